"""A short run at full size on one GPU: does my set-up learn, and does it fit?

Command:   ./train_taehv_h100.sh 1 1gpu_h100 --data_root FOLDER    (or: tinyvae train 1gpu_h100 --data_root FOLDER)
Hardware:  1 x H100 80 GB, 8 CPU cores; one step is 16 clips of 17 frames at 720x480.
Needs:     what h100 needs.
Expect:    18-22 dB after 100 steps from the released weights, about 25 dB at the end (500 steps).
           (Reported values for this recipe; we did not measure them.)
"""

from dataclasses import replace

from tinyvae.config import load_preset

config = replace(
    load_preset("h100"),
    n_frames=17,
    train_batch_size=1,
    gradient_accumulation_steps=16,
    max_train_steps=500,
    learning_rate=5e-4,
    lr_warmup_steps=100,
    seraena_start=100,
    ema_decay=0.99,
    validation_steps=100,
    checkpointing_steps=500,
    log_every=10,
)
