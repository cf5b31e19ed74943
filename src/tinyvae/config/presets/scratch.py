"""Train from nothing on any folder of clips, without a teacher.

Command:   tinyvae train scratch --data_root FOLDER
Hardware:  one GPU with 8 GB (3.2 GiB seen; made for an H100 or H200), 8 CPU cores.
Data:      any folder of videos of at least 128x128 pixels and 12 frames (to validate: 256x256 and 20 frames).
Expect:    29.2 dB after 1,000 steps (benchmarks/scratch_search.py), and 32.1 dB in less than five minutes on an H200
           with --max_train_steps 9800 --resolutions 12x128x128,20x128x128@70% (longer clips at the end). If nothing
           was compiled there before, the first step comes after 46 s. Clips had 128x128 to 1280x720 pixels; the curve,
           and what was tried and lost, are in docs/results.md. Its latents are the model's own: a diffusion model's
           latent space needs a teacher (see distill and h100).
"""

from tinyvae.config import TrainConfig

config = TrainConfig(
    init="colors",
    height=128,
    width=128,
    n_frames=12,
    validation_height=256,
    validation_width=256,
    validation_n_frames=20,
    random_resize=False,
    crop_candidates=4,
    decoded_cache_gb=16.0,
    max_train_steps=9_600,
    train_batch_size=16,
    mixed_precision="bf16",
    compile_model=True,
    compile_mode="reduce-overhead",
    optimizer="muon",
    learning_rate=1e-3,
    muon_learning_rate=0.004,
    lr_scheduler="linear",
    lr_warmup_steps=30,
    weight_decay=0.0,
    ema_decay=0.95,
    validation_steps=1_200,
    num_validation_samples=64,
    checkpointing_steps=1_200,
    checkpoints_total_limit=3,
    dataloader_num_workers=8,
    prefetch_factor=4,
)
