"""The CogVideoX student at full size, on eight GPUs.

Command:   ./train_taehv_h100.sh 8 h100 --data_root FOLDER
           (or: accelerate launch ... -m tinyvae train h100 --data_root FOLDER)
Hardware:  8 x H100 80 GB, 64 CPU cores or more; one step is 64 clips of 16 frames at 720x480.
Needs:     checkpoints/taecvx.pth, the folder CogVideoX-2b (or --ref_vae_path owner/name), LPIPS weights.
Speed:     measured on one H200 with 2 clips a step: 77 frames/s with a live teacher (15.9 GiB), about 260 with a store
           (15.4 GiB; `tinyvae latents` makes it). The first step comes two minutes after the first start: it compiles.
Expect:    from the released weights 25-28 dB after 1,000 steps, 28-31 dB after 10,000, 29-32 dB after 50,000;
           SSIM 0.92-0.95 and LPIPS 0.05-0.08 at the end.
           (Reported values for this recipe; we did not measure them.)
"""

from pathlib import Path

from tinyvae.config import TrainConfig

config = TrainConfig(
    variant="taecvx",
    pretrained_model_path=Path("checkpoints/taecvx.pth"),
    height=480,
    width=720,
    n_frames=16,
    max_frame_delta=2,
    color_jitter=True,
    gaussian_blur=True,
    max_train_steps=100_000,
    train_batch_size=2,
    gradient_accumulation_steps=4,
    mixed_precision="bf16",
    compile_model=True,
    learning_rate=1e-4,
    lr_warmup_steps=2_000,
    ema_decay=0.9995,
    reconstruction_loss_weight=10.0,
    encoder_loss_weight=0.1,
    decoder_loss_weight=0.1,
    perceptual_loss_weight=0.1,
    perceptual_frames=4,
    use_ref_vae=True,
    ref_vae_path="CogVideoX-2b",
    use_seraena=True,
    seraena_loss_weight=0.1,
    n_seraena_frames=4,
    seraena_start=2_000,
    validation_steps=1_000,
    early_stopping_patience=5,
    checkpointing_steps=2_000,
    log_every=25,
    log_system_stats=True,
    dataloader_num_workers=8,
)
