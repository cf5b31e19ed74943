"""Make a small encoder and decoder for the latents of any teacher.

Command:   tinyvae train distill --teacher FOLDER --data_root FOLDER
           (start from a released student: --pretrained_model_path FILE; the teacher's latents from disk instead of the
           teacher itself: `tinyvae latents distill ...`, then --latent_store FOLDER; docs/guide-distillation.md)
Hardware:  one GPU with 8 GB beside what the teacher takes (made for an H100 or H200), 8 CPU cores.
Needs:     a teacher: a diffusers folder or hub name (docs/teachers.md). It tells the variant.
Data:      any folder of videos of at least 128x128 pixels and 17 frames (to validate: 256x256 and 20 frames).
Expect:    the decoder and the encoder close to the teacher's own; `tinyvae eval` with the teacher says how close.
           The decoder alone: --encoder_loss_weight 0. The encoder alone: --decoder_loss_weight 0.
"""

from dataclasses import replace

from tinyvae.config import load_preset

config = replace(
    load_preset("scratch"),
    init="he",  # the other start makes latents of colors, and these latents are the teacher's
    use_ref_vae=True,
    # 17: student and teacher of every variant count it alike. A teacher's latents may change with their position in a
    # clip, as Wan's do: a student of 9 frames would never see those behind the third (docs/decisions.md).
    n_frames=17,
    train_batch_size=8,
    max_train_steps=9_000,
    # Encoder and decoder share no weights, so their losses do not compete (docs/losses.md).
    reconstruction_loss_weight=0.0,
    encoder_loss_weight=1.0,
    decoder_loss_weight=10.0,
    validation_steps=1_000,
    checkpointing_steps=1_000,
)
