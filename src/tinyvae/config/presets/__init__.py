"""The built-in presets, one file each: ``tinyvae train NAME``. They are read by `tinyvae.config`, never run."""
