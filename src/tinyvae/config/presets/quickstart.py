"""See it work, on any machine, in three minutes.

Command:   tinyvae train quickstart
Hardware:  two CPU cores and 2 GB of memory; no GPU, no download.
Data:      procedural clips, written to ``sample_clips/`` at the first start (git does not see that folder); your own
           with --data_root FOLDER.
Expect:    training, validation and report.html in under 2 minutes on two free cores; 28.8 dB on its validation
           clips, 10 dB more than a predictor of the mean color.
"""

from pathlib import Path

from tinyvae.config import TrainConfig

config = TrainConfig(
    variant="taehv",
    model_width=0.25,
    init="colors",
    data_root=Path("sample_clips"),
    use_sample_clips=True,
    train_split=0.8,
    height=64,
    width=64,
    n_frames=12,
    max_train_steps=340,
    train_batch_size=4,
    optimizer="muon",
    learning_rate=1e-3,
    muon_learning_rate=0.007,
    lr_scheduler="linear",
    lr_warmup_steps=20,
    weight_decay=0.0,
    ema_decay=0.98,
    validation_steps=170,
    num_validation_samples=8,
    validation_batch_size=4,
    checkpointing_steps=170,
    checkpoints_total_limit=2,
    dataloader_num_workers=1,
    pin_memory=False,
)
