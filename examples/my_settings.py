"""Settings of a run of your own, to copy and change.

Command:   tinyvae train examples/my_settings.py                    (go on after a stop: add --resume latest)
           ./train_taehv_h100.sh 8 custom examples/my_settings.py   (eight GPUs)

It starts from a preset and changes what is written here; `tinyvae train PRESET --help` lists all settings. The file is
a Python program and is run. Lines of `args.key = value` work too: docs/configuration.md.
"""

from dataclasses import replace
from pathlib import Path

from tinyvae.config import load_preset

config = replace(
    load_preset("scratch"),
    data_root=Path("/data/videos"),
    height=256,
    width=384,
    n_frames=17,
    validation_height=None,  # as in training
    validation_width=None,
    validation_n_frames=None,
    train_batch_size=4,
    max_train_steps=20_000,
    lr_warmup_steps=200,
    ema_decay=0.999,
    deterministic=True,  # on a GPU too a resumed run has the bits of one that was never stopped; a tenth slower
    compile_model=False,  # faster, but not yet shown to repeat its bits
    validation_steps=1_000,
    checkpointing_steps=1_000,
    output_dir=Path("output/mine_%Y-%m-%d_%H-%M-%S"),
    tracker_name="mine",
)
