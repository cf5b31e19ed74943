"""Keys of older files that another part decides now: accepted, with one line each saying what takes their place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

_LAUNCHER = "the launcher decides it (accelerate launch, train_taehv.sh, train_taehv_h100.sh)"
_ACCELERATE_FILE = "the accelerate configuration file decides it (accelerate_configs/)"
_FLAT_AVERAGE = "gradients are averaged in one flat exchange; under DeepSpeed the accelerate configuration file decides"
_NO_ATTENTION = "the network has no attention layer, so there is nothing to switch"
_DATA_ORDER = "the order of clips is a function of (seed, epoch, position); every process takes its own share"

OLD_KEYS: Mapping[str, str] = {
    "world_size": _LAUNCHER,
    "rank": _LAUNCHER,
    "local_rank": _LAUNCHER,
    "master_addr": _LAUNCHER,
    "master_port": _LAUNCHER,
    "use_deepspeed": _ACCELERATE_FILE,
    "deepspeed_config_file": "give the file to the launcher: accelerate launch --config_file FILE",
    "device_type": "accelerate takes the GPU where there is one, else the CPU",
    "model_dtype": "weights stay in fp32; mixed_precision decides what the networks compute in",
    "use_flash_attention": _NO_ATTENTION,
    "enable_xformers": _NO_ATTENTION,
    "gradient_as_bucket_view": _FLAT_AVERAGE,
    "static_loss_scale": "fp16 scales its loss dynamically; bf16 needs no scale",
    "dataloader_pin_memory_device": "pin_memory pins for the device of the process",
    "persistent_workers": "training is one endless pass over the data, so its workers live as long as the run",
    "log_predictions": "save_validation_videos decides it",
    "save_best": "the best model is always kept in best_model/, by the score that metric_for_best_model names",
    "save_best_model": "the best model is always kept in best_model/, by the score that metric_for_best_model names",
    # The keys below are of the many-node files of the same trainers.
    "frames_to_trim": "the variant's frame rule decides it",
    "use_zero3_save": "saved weights are always whole, whatever the ZeRO stage",
    "zero3_save_16bit_model": "saved weights are always whole, whatever the ZeRO stage",
    "communication_overlap": _FLAT_AVERAGE,
    "bucket_size_mb": _FLAT_AVERAGE,
    "find_unused_parameters": "every parameter takes part in every step",
    "broadcast_buffers": "the networks have no buffers to send; Seraena's are synchronised always",
    "ddp_bucket_cap_mb": _FLAT_AVERAGE,
    "gradient_compression": _FLAT_AVERAGE,
    "dataloader_drop_last": "batches run across epochs, so none is incomplete",
    "dataloader_timeout": "decode_timeout_s bounds the time of each clip",
    "save_on_each_node": "one process writes each checkpoint",
    "sync_each_batch": "gradients are exchanged once per optimiser step",
    "save_optimizer_states": "checkpoints always hold all that an exact resume needs",
    "use_distributed_sampler": _DATA_ORDER,
    "shuffle_data": _DATA_ORDER,
    "dist_backend": "accelerate takes nccl on GPUs and gloo on CPUs",
    "init_method": _LAUNCHER,
    "monitor_nccl": "set NCCL_DEBUG=INFO in the environment",
    "profile_communication": "enable_profiler traces the communication too",
    "check_nan_inf": "not-finite losses and gradients are always caught",
    "auto_scale_batch_size": "train_batch_size is taken as it is; `tinyvae check` estimates its memory",
    "auto_find_batch_size": "train_batch_size is taken as it is; `tinyvae check` estimates its memory",
}
"""Old key -> what takes its place."""

CHECKED_KEYS: Mapping[str, str] = {"patch_size": "patch_size", "latent_channels": "latent_channels"}
"""Old key -> the field of `VariantSpec` that it must agree with; the variant decides it now."""

OTHER_NAMES: Mapping[str, str] = {
    "lr": "learning_rate",
    "eps": "epsilon",
    "epochs": "max_train_steps",
    "num_epochs": "max_train_steps",
    "num_train_epochs": "max_train_steps",
    "clip_grad": "max_grad_norm",
    "grad_clip": "max_grad_norm",
    "precision": "mixed_precision",
    "use_amp": "mixed_precision",
    "amp": "mixed_precision",
    "fp16": "mixed_precision",
    "bf16": "mixed_precision",
    "workers": "dataloader_num_workers",
    "steps": "max_train_steps",
    "dtype": "mixed_precision",
    "ema": "ema_decay",
    "resume": "resume_from_checkpoint",
    "teacher": "ref_vae_path",
    "dataset": "data_root",
    "frames": "n_frames",
    "resolution": "height",
}
"""A name from elsewhere -> the key that people mean by it, where no likeness of letters would lead there."""


OLD_FILES: Mapping[str, str] = {
    "16gpu": "16gpu_h100",
    "1gpu": "1gpu_h100",
    "a800": "a800",
    "h100": "h100",
    "test": "test",
}
"""Part of an old settings file's name -> the preset that holds its settings; the first that fits counts."""


def preset_of_old_file(name: str) -> str | None:
    """The preset in place of ``training/configs/taehv_config_NAME.py``; None for any other name."""
    file = PurePath(name).name
    if not (file.startswith("taehv_config") and file.endswith(".py")):
        return None
    return next((preset for part, preset in OLD_FILES.items() if part in file), None)


def notice_of(key: str) -> str:
    """The line that a user of an old key gets."""
    return f"{key} is not a setting any more: {OLD_KEYS[key]}."
