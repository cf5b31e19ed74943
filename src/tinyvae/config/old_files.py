"""What the files of older trainers need: keys that are gone or renamed, and the modules that these files import."""

from __future__ import annotations

import datetime
import importlib.util
import re
import time
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from tinyvae.config.schema import FIELDS, TIME_DIRECTIVES
from tinyvae.errors import UserError

_GONE: Mapping[str, str] = {
    "world_size rank local_rank master_addr master_port init_method": "the launcher decides it",
    "use_deepspeed": "the accelerate configuration file decides it (accelerate_configs/)",
    "deepspeed_config_file": "give the file to the launcher: accelerate launch --config_file FILE",
    "device_type": "accelerate takes the GPU where there is one, else the CPU",
    "model_dtype": "weights stay in fp32; mixed_precision decides what the networks compute in",
    "use_flash_attention enable_xformers": "the network has no attention layer, so there is nothing to switch",
    "gradient_as_bucket_view communication_overlap bucket_size_mb ddp_bucket_cap_mb gradient_compression": "gradients "
    "are averaged in one flat exchange; under DeepSpeed the accelerate configuration file decides",
    "static_loss_scale": "fp16 scales its loss dynamically; bf16 needs no scale",
    "dataloader_pin_memory_device": "pin_memory pins for the device of the process",
    "persistent_workers": "training is one endless pass over the data, so its workers live as long as the run",
    "log_predictions": "save_validation_videos decides it",
    "save_best save_best_model": "the best model is always kept in best_model/ (by metric_for_best_model)",
    "frames_to_trim": "the variant's frame rule decides it",
    "use_zero3_save zero3_save_16bit_model": "saved weights are always whole, whatever the ZeRO stage",
    "find_unused_parameters": "every weight that is trained takes part in every step",
    "broadcast_buffers": "the networks have no buffers to send; Seraena's are synchronized always",
    "dataloader_drop_last": "batches run across epochs, so none is incomplete",
    "dataloader_timeout": "decode_timeout_s bounds the time of each clip",
    "save_on_each_node": "one process writes each checkpoint",
    "sync_each_batch": "gradients are exchanged once per optimizer step",
    "save_optimizer_states": "checkpoints always hold all that an exact resume needs",
    "use_distributed_sampler shuffle_data": "the seed decides the order of clips; every process takes its own share",
    "dist_backend": "accelerate takes nccl on GPUs and gloo on CPUs",
    "monitor_nccl": "set NCCL_DEBUG=INFO in the environment",
    "profile_communication": "enable_profiler traces the communication too",
    "check_nan_inf": "not-finite losses and gradients are always caught",
    "auto_scale_batch_size auto_find_batch_size": "train_batch_size stays as it is; `tinyvae check` tries its memory",
}

OLD_KEYS: Mapping[str, str] = {key: reason for keys, reason in _GONE.items() for key in keys.split()}
CHECKED_KEYS = ("patch_size", "latent_channels")  # the variant decides them now; a file's value must agree with it
# key -> names from elsewhere that people mean by it, where no likeness of letters would lead there
_ELSEWHERE: Mapping[str, str] = {
    "learning_rate": "lr",
    "epsilon": "eps",
    "max_train_steps": "epochs num_epochs num_train_epochs steps",
    "max_grad_norm": "clip_grad grad_clip",
    "mixed_precision": "precision use_amp amp fp16 bf16 dtype",
    "dataloader_num_workers": "workers",
    "ema_decay": "ema",
    "data_root": "dataset",
    "n_frames": "frames",
    "height": "resolution",
}

OTHER_NAMES: Mapping[str, str] = {name: key for key, names in _ELSEWHERE.items() for name in names.split()}
ALIASES: Mapping[str, str] = {
    "teacher": "ref_vae_path",
    "cogvideox_model_path": "ref_vae_path",
    "resume": "resume_from_checkpoint",
}
"""Another name of a key -> the key. ``teacher`` also turns use_ref_vae on, and ``cogvideox_model_path`` (of old files)
also says that the teacher is a CogVideoX."""

OLD_NAMES = {*ALIASES, *CHECKED_KEYS, *OLD_KEYS}


def preset_of_old_file(name: str) -> str | None:
    """The preset in place of ``training/configs/taehv_config_NAME.py``; None for any other name."""
    old = re.search(r"taehv_config_.*?(16gpu_h100|1gpu_h100|a800|h100|test).*\.py$", name)
    return old[1] if old else None


class Settings(dict[str, Any]):
    """What a settings file sets: ``args.key = value``. ``below``: the layers of the preset that it starts from."""

    below: Sequence[Any] = ()

    def above(self, layers: Sequence[Any]) -> Settings:
        vars(self)["below"] = layers
        return self

    def __getattr__(self, key: str) -> Any:
        for values in (self, *(layer.values for layer in reversed(self.below))):
            if key in values:
                return values[key]
        if key in FIELDS:
            return FIELDS[key].default
        raise AttributeError(f"{key} is not set before this line")

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value


class StartTime(datetime.datetime):
    """``datetime`` and ``date`` of settings files. Its text stays a pattern, which the run fills in when it starts."""

    def strftime(self, pattern: str) -> str:
        if not pattern or set(re.findall("%(.)", pattern)) - set(TIME_DIRECTIVES):
            known = " ".join(f"%{letter}" for letter in TIME_DIRECTIVES)
            raise UserError(f"the time pattern {pattern!r} must be made of {known}")
        return pattern

    __format__ = strftime


def modules_for_files() -> dict[str, ModuleType]:
    """Name -> the module that a settings file imports; ``easydict`` and ``pytz`` only where they are not installed."""
    modules = {
        "datetime": changed_module(datetime, datetime=StartTime, date=StartTime),
        "time": changed_module(time, strftime=lambda pattern, moment=None: StartTime.now().strftime(pattern)),
    }
    for name, names in (("easydict", {"EasyDict": Settings}), ("pytz", {"timezone": lambda name: None, "utc": None})):
        if importlib.util.find_spec(name) is None:
            modules[name] = changed_module(ModuleType(name), **names)
    return modules


def changed_module(module: ModuleType, **changes: Any) -> ModuleType:
    """A copy of a module with some names changed; the module itself stays as it is."""
    copy = ModuleType(module.__name__)
    copy.__dict__.update(vars(module) | changes)
    return copy
