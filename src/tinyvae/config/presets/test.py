"""A small run of the whole recipe, before the long one.

Command:   ./train_taehv_h100.sh 4 test --data_root FOLDER    (or: tinyvae train test --data_root FOLDER, on one GPU)
Hardware:  one to four GPUs with 16 GB; one step is 4 clips of 16 frames at 128x128 on each.
Needs:     checkpoints/taecvx.pth, the folder CogVideoX-2b (or --ref_vae_path owner/name), LPIPS weights.
Expect:    18-22 dB after 100 steps from the released weights, more than 25 dB after 1,000; a smooth loss curve,
           best_model/ written, no out-of-memory. (Reported values for this recipe; we did not measure them.)
"""

from dataclasses import replace

from tinyvae.config import load_preset

config = replace(
    load_preset("h100"),
    height=128,
    width=128,
    max_frame_delta=3,
    max_train_steps=10_000,
    train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=3e-4,
    lr_warmup_steps=500,
    seraena_start=500,
    ema_decay=0.999,
    validation_steps=500,
    checkpointing_steps=500,
    log_every=10,
)
