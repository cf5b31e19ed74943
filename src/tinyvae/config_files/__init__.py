"""Presets, settings files, command-line overrides and the JSON of a run: all the ways to and from a `TrainConfig`."""

from __future__ import annotations

from tinyvae.config_files.loading import LoadedConfig, load_config, load_preset, preset_names, preset_summary
from tinyvae.config_files.run_folder import earlier_run_folders, has_time, new_run_folder
from tinyvae.config_files.saving import flat_for_tracker, from_json, to_json
from tinyvae.config_files.tables import config_help_text, settings_table

__all__ = [
    "LoadedConfig",
    "config_help_text",
    "earlier_run_folders",
    "flat_for_tracker",
    "from_json",
    "has_time",
    "load_config",
    "load_preset",
    "new_run_folder",
    "preset_names",
    "preset_summary",
    "settings_table",
    "to_json",
]
