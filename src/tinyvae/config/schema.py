"""TrainConfig: every parameter of a training run, with its meaning, its unit and its range.

This file is the only list of parameters. ``tinyvae train --help``, the table in ``docs/configuration.md``, the types
of command-line values and the range checks are all made from the fields below; rules between several parameters are
in `tinyvae.config.rules`, what is asked of the files that it names in `tinyvae.config.rules`, settings files and
presets in `tinyvae.config`.
"""

# ruff: noqa: RUF009  (option() is dataclasses.field with our metadata; it makes no shared value)
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from tinyvae.models.variants import VariantSpec, get_spec

GROUPS = {
    "model": "Model",
    "data": "Data",
    "augmentation": "Augmentation",
    "step": "Steps and precision",
    "optimiser": "Optimiser and schedule",
    "losses": "Losses",
    "teacher": "Teacher (reference VAE)",
    "seraena": "Seraena",
    "validation": "Validation",
    "saving": "Output, checkpoints and resume",
    "logging": "Logging",
    "system": "Workers and limits",
}
"""Group of a field -> its heading in the help text and in the documentation."""

TeacherType = Literal["cogvideox", "wan", "hunyuan", "ltx", "minimax"]


def option(
    default: Any,
    group: str,
    meaning: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """A field of `TrainConfig`: its default, where it is listed, what it means, and its range (for tuples: of each)."""
    assert group in GROUPS, group
    limits = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    return dataclasses.field(default=default, metadata={"group": group, "meaning": meaning, "limits": limits})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What one training run does. Lengths are in frames, sizes in pixels, times in seconds unless a name says else."""

    # model
    variant: str = option("taehv", "model", "Which network of the family, by name (`tinyvae info` lists them).")
    model_width: float = option(
        1.0, "model", "Factor on every hidden channel count; 1.0 is the released network, 0.25 suits a laptop.", above=0
    )
    pretrained_model_path: Path | None = option(
        None, "model", "Weights to start from (.safetensors, .pth, model or run folder); none: fresh weights."
    )
    init: Literal["he", "torch"] = option(
        "he", "model", "How fresh weights are drawn: he (scaled for ReLU, quiet residual branches) or torch's default."
    )
    gradient_checkpointing: bool = option(
        False, "model", "Recompute activations in the backward pass: less memory, more time."
    )

    # data
    data_root: Path | None = option(
        None, "data", "Folder of the videos; also the base of relative paths in annotation_file."
    )
    annotation_file: Path | None = option(
        None, "data", "JSON or JSONL list of the videos to use; none: every video below data_root."
    )
    index_path: Path | None = option(
        None, "data", "Index of the videos, made by `tinyvae data index`; none: the run makes one."
    )
    use_sample_clips: bool = option(
        False, "data", "Write the procedural sample clips to data_root first, if that folder is empty or absent."
    )
    train_split: float = option(
        0.95,
        "data",
        "Share of the files that is trained on, chosen by a hash of the path; the rest validates.",
        above=0,
        at_most=1,
    )
    split_by: Literal["auto", "annotation", "hash"] = option(
        "auto",
        "data",
        "annotation: each file as its annotation says; hash: by train_split alone; auto: annotation if there is one.",
    )
    height: int = option(128, "data", "Height of a training clip, pixels; a multiple of the space factor.", at_least=8)
    width: int = option(128, "data", "Width of a training clip, pixels; a multiple of the space factor.", at_least=8)
    n_frames: int = option(
        16, "data", "Frames of a training clip; the variant says which lengths agree with its teacher.", at_least=1
    )
    min_frame_delta: int = option(1, "data", "Smallest step between the frames of a clip, source frames.", at_least=1)
    max_frame_delta: int = option(1, "data", "Largest step between the frames of a clip, source frames.", at_least=1)
    allow_upscale: bool = option(
        False, "data", "Enlarge videos that are smaller than height x width instead of leaving them out."
    )
    bad_file_limit: float = option(
        0.05, "data", "Share of unreadable files above which the run stops.", at_least=0, at_most=1
    )
    decoded_cache_gb: float = option(
        0.0, "data", "Keep decoded files of small data sets, up to this many GiB; 0: decode every clip.", at_least=0
    )
    decoded_cache_dir: Path | None = option(
        None, "data", "Where decoded files are kept, best a local disk; none: the temporary folder of the machine."
    )
    decode_timeout_s: float = option(30.0, "data", "Longest time one clip may take to decode, seconds.", above=0)

    # augmentation
    random_crop: bool = option(True, "augmentation", "Crop at a random place; off: the centre.")
    random_resize: bool = option(
        True, "augmentation", "Scale each crop down from a random window of the picture; off: pixels stay as they are."
    )
    random_flip: bool = option(True, "augmentation", "Mirror half of the clips left to right.")
    color_jitter: bool = option(False, "augmentation", "Change the colours of each clip by color_jitter_params.")
    color_jitter_params: tuple[float, float, float, float] = option(
        (0.15, 0.15, 0.15, 0.08),
        "augmentation",
        "Largest change of brightness, contrast, saturation (shares) and hue (turns of the colour circle).",
        at_least=0,
        below=1,
    )
    gaussian_blur: bool = option(
        False, "augmentation", "Blur a share of the clips by a sigma drawn from gaussian_blur_sigma."
    )
    gaussian_blur_probability: float = option(
        0.5, "augmentation", "Share of the clips that gaussian_blur blurs.", at_least=0, at_most=1
    )
    gaussian_blur_sigma: tuple[float, float] = option(
        (0.1, 2.0), "augmentation", "Smallest and largest sigma of the blur, pixels.", above=0, at_most=10
    )

    # steps and precision
    max_train_steps: int = option(10_000, "step", "Optimiser steps of the whole run.", at_least=1)
    train_batch_size: int = option(4, "step", "Clips of one micro-batch on one device.", at_least=1)
    gradient_accumulation_steps: int = option(
        1,
        "step",
        "Micro-batches per optimiser step; the same maths as one larger batch (Seraena trains in each of them).",
        at_least=1,
    )
    mixed_precision: Literal["no", "fp16", "bf16"] = option(
        "no", "step", "Precision of the networks in training; losses are in fp32 always."
    )
    allow_tf32: bool = option(True, "step", "Let fp32 matrix products use TF32 on the GPUs that have it.")
    compile_model: bool = option(False, "step", "Compile the training step with torch.compile.")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = option(
        "default", "step", "Mode of torch.compile where compile_model is on."
    )
    deterministic: bool = option(
        False,
        "step",
        "The same bits from the same run, stopped and resumed or not, on the same GPU; a tenth slower, in less memory, "
        "shown without compile_model. A CPU needs no switch.",
    )
    seed: int = option(42, "step", "Seed of weights, data order and augmentation.", at_least=0, below=2**32)

    # optimiser and schedule
    optimizer: Literal["adamw", "muon"] = option(
        "adamw", "optimiser", "adamw; or muon for the inner convs with adamw for biases and the first and last conv."
    )
    learning_rate: float = option(1e-4, "optimiser", "Peak learning rate of AdamW.", above=0, at_most=1)
    muon_learning_rate: float = option(
        0.01, "optimiser", "Peak learning rate of the convs that Muon trains.", above=0, at_most=1
    )
    muon_momentum: float = option(0.95, "optimiser", "Momentum of Muon.", at_least=0, below=1)
    lr_scheduler: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"
    ] = option("cosine", "optimiser", "How the learning rates move after the warm-up; counted in optimiser steps.")
    lr_warmup_steps: int = option(
        100, "optimiser", "Optimiser steps over which the learning rates rise from 0.", at_least=0
    )
    lr_num_cycles: int = option(1, "optimiser", "Number of cosine decays of cosine_with_restarts.", at_least=1)
    lr_power: float = option(1.0, "optimiser", "Power of the polynomial schedule.", above=0)
    beta1: float = option(0.9, "optimiser", "AdamW: decay of the mean of gradients.", at_least=0, below=1)
    beta2: float = option(0.95, "optimiser", "AdamW: decay of the mean of squared gradients.", at_least=0, below=1)
    weight_decay: float = option(1e-2, "optimiser", "AdamW: decoupled weight decay.", at_least=0)
    epsilon: float = option(1e-8, "optimiser", "AdamW: term that keeps the division finite.", above=0)
    max_grad_norm: float = option(1.0, "optimiser", "Gradients are clipped to this norm; 0: never.", at_least=0)
    enable_fused_adam: bool = option(True, "optimiser", "Use torch's fused AdamW kernel on a GPU.")
    ema_decay: float = option(
        0.999,
        "optimiser",
        "Decay of the running mean of weights that is validated and exported; 0: none.",
        at_least=0,
        below=1,
    )

    # losses
    reconstruction_loss_type: Literal["mse", "l1", "charbonnier"] = option(
        "mse", "losses", "What the reconstruction and decoder losses measure."
    )
    reconstruction_loss_weight: float = option(
        10.0, "losses", "Weight: the student's own round trip against the frames.", at_least=0
    )
    encoder_loss_weight: float = option(
        0.0, "losses", "Weight: student latents against teacher latents (needs use_ref_vae).", at_least=0
    )
    decoder_loss_weight: float = option(
        0.0, "losses", "Weight: the teacher's latents decoded, against the frames (needs use_ref_vae).", at_least=0
    )
    perceptual_loss_weight: float = option(0.0, "losses", "Weight: LPIPS (needs LPIPS weights).", at_least=0)
    perceptual_frames: int | None = option(
        None, "losses", "Frames of each clip that LPIPS looks at in a step, in turn; none: all.", at_least=1
    )
    temporal_loss_weight: float = option(0.0, "losses", "Weight: error of frame-to-frame differences.", at_least=0)
    lpips_weights: Path | None = option(
        None, "losses", "LPIPS weights file; none: the places that `docs/losses.md` names are searched."
    )

    # teacher
    use_ref_vae: bool = option(False, "teacher", "Load a reference VAE as the teacher.")
    ref_vae_type: TeacherType | None = option(
        None, "teacher", "Family of the teacher; none: read from its config (cogvideox for cogvideox_model_path)."
    )
    ref_vae_path: str | None = option(None, "teacher", "The teacher: a diffusers folder or a hub name (owner/name).")
    cogvideox_model_path: str | None = option(
        None, "teacher", "The teacher, where it is a CogVideoX: same as ref_vae_path with ref_vae_type cogvideox."
    )
    ref_vae_dtype: Literal["float32", "float16", "bfloat16"] = option(
        "bfloat16", "teacher", "Precision of the teacher."
    )
    ref_vae_sample: bool = option(
        False, "teacher", "Draw the teacher's latents from their distribution; off: its mode, the same every time."
    )

    # seraena
    use_seraena: bool = option(False, "seraena", "Train with Seraena's correction targets.")
    seraena_loss_weight: float = option(0.0, "seraena", "Weight: distance to the corrected frames.", at_least=0)
    n_seraena_frames: int = option(
        1, "seraena", "Frames the discriminator sees at once; divides the padded clip length.", at_least=0
    )
    seraena_start: int | Literal["auto"] = option(
        0, "seraena", "Optimiser step at which Seraena begins; auto: when validation stops improving.", at_least=0
    )
    seraena_learning_rate: float = option(
        3e-4, "seraena", "Learning rate of the discriminator's AdamW.", above=0, at_most=1
    )
    seraena_patience: int = option(
        2, "seraena", "Validations without improvement after which seraena_start=auto begins.", at_least=1
    )
    seraena_normalisation: Literal["golden", "size_independent"] = option(
        "size_independent",
        "seraena",
        "golden: the published formula, which fades with the picture size; size_independent: one strength at any size.",
    )
    seraena_buffer_mb: int = option(512, "seraena", "Bound of each process's replay buffer, 2**20 bytes.", at_least=1)
    seraena_buffer_device: Literal["cpu", "device"] = option(
        "cpu", "seraena", "Where the replay buffer lies: main memory, or the training device."
    )

    # validation
    validation_steps: int = option(
        500, "validation", "Optimiser steps between validations (there is one at the end too); 0: never.", at_least=0
    )
    num_validation_samples: int = option(20, "validation", "Clips of a validation, over all processes.", at_least=1)
    validation_batch_size: int = option(2, "validation", "Clips per validation batch on one device.", at_least=1)
    validation_height: int | None = option(None, "validation", "Height of a validation clip; none: height.", at_least=8)
    validation_width: int | None = option(None, "validation", "Width of a validation clip; none: width.", at_least=8)
    validation_n_frames: int | None = option(
        None, "validation", "Frames of a validation clip; none: n_frames.", at_least=1
    )
    save_validation_videos: bool = option(True, "validation", "Log pictures and short videos of input, output, error.")
    metric_for_best_model: Literal["psnr", "ssim", "lpips", "mse"] = option(
        "psnr", "validation", "What decides best_model and early stopping."
    )
    early_stopping_patience: int = option(
        0, "validation", "Validations without a better score after which the run ends; 0: never.", at_least=0
    )

    # output, checkpoints and resume
    output_dir: Path = option(
        Path("output/%Y-%m-%d_%H-%M-%S"),
        "saving",
        "The run's folder; %Y %m %d %H %M %S become the time at which the run starts.",
    )
    checkpointing_steps: int = option(
        500, "saving", "Optimiser steps between checkpoints; 0: at the end only.", at_least=0
    )
    checkpoints_total_limit: int | None = option(
        5, "saving", "Checkpoints kept beside the best and the emergency one; none: all.", at_least=1
    )
    resume_from_checkpoint: str | None = option(
        None, "saving", "Go on from: a checkpoint's path, its bare name, or latest (--resume is short for it)."
    )
    allow_changed_settings: bool = option(
        False, "saving", "Resume although model or data settings differ from the checkpoint's."
    )
    save_model_card: bool = option(True, "saving", "Write a model card beside the final model.")
    report: bool = option(True, "saving", "Write report.html at the end of the run.")

    # logging
    log_every: int = option(10, "logging", "Optimiser steps between log lines.", at_least=1)
    report_to: Literal["tensorboard", "none"] = option(
        "tensorboard", "logging", "Tracker; metrics.jsonl is always written."
    )
    tracker_name: str = option("tinyvae", "logging", "Name of the run in the tracker.")
    logging_dir: Path = option(
        Path("logs"), "logging", "Folder of the tracker's files; relative: inside the run's folder."
    )
    enable_profiler: bool = option(
        False, "logging", "Write a torch profiler trace of a few steps, after the first ones, to profile.json."
    )
    log_system_stats: bool = option(False, "logging", "Log CPU, memory and GPU use and temperature.")
    debug: bool = option(False, "logging", "Log shapes, dtypes and ranges of everything in the first step.")
    notify_command: str | None = option(
        None, "logging", "Shell command for the end, a failure, an early stop or a stall; TINYVAE_EVENT says which."
    )
    notify_stall_s: float = option(
        1800.0, "logging", "Seconds without a finished step, validation or save that count as a stall.", above=0
    )

    # workers and limits
    dataloader_num_workers: int = option(4, "system", "Decoding processes of each training process.", at_least=0)
    prefetch_factor: int = option(2, "system", "Batches each worker prepares ahead.", at_least=1)
    pin_memory: bool = option(True, "system", "Use pinned memory for copies to a GPU.")
    allow_cpu: bool = option(False, "system", "Train without a GPU, however large a step is (it may take hours).")
    nccl_timeout: int = option(
        1800, "system", "Longest wait in a collective before the job ends, seconds (any backend).", at_least=1
    )
    max_skipped_steps: int = option(
        10, "system", "Optimiser steps skipped in a row (not-finite loss or gradient) that end the run.", at_least=1
    )

    def __post_init__(self) -> None:
        for key in path_keys():
            value: object = getattr(self, key)
            if isinstance(value, str):  # text is what people write for a path; it is held as one
                object.__setattr__(self, key, Path(value))

    # what several places ask

    @functools.cached_property
    def spec(self) -> VariantSpec:
        """The network and its frame rule; `UserError` where there is no such variant or width."""
        return get_spec(self.variant, width=self.model_width)

    @property
    def data_source(self) -> Path | None:
        """What lists the videos: the index, else the annotation file, else the folder."""
        return self.index_path or self.annotation_file or self.data_root

    @property
    def teacher_path(self) -> str | None:
        """The teacher's folder or hub name, whichever key gave it; None without a teacher."""
        return (self.ref_vae_path or self.cogvideox_model_path) if self.use_ref_vae else None

    @property
    def teacher_type(self) -> TeacherType | None:
        """The teacher's family where the configuration tells it; None: the teacher's own config.json does."""
        if self.ref_vae_type is None and self.cogvideox_model_path and not self.ref_vae_path:
            return "cogvideox"
        return self.ref_vae_type

    @property
    def validation_size(self) -> tuple[int, int, int]:
        """(frames, height, width) of a validation clip."""
        return (
            self.validation_n_frames or self.n_frames,
            self.validation_height or self.height,
            self.validation_width or self.width,
        )


FIELDS: Mapping[str, dataclasses.Field[Any]] = {field.name: field for field in dataclasses.fields(TrainConfig)}
"""Key -> its field, in the order of the documentation."""


@functools.cache
def field_types() -> dict[str, Any]:
    """Key -> its type, as an object."""
    return get_type_hints(TrainConfig)


@functools.cache
def path_keys() -> tuple[str, ...]:
    """The keys whose values are paths (or none)."""
    return tuple(key for key, kind in field_types().items() if kind is Path or Path in get_args(kind))
