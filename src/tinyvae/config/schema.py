"""Every setting of a training run: its name, type, range, unit and meaning.

This file is the only list of settings. The help text, the tables of ``docs/configuration.md``, the values that the
command line takes and the checks of types and ranges are made from it.
"""

# ruff: noqa: RUF009  (option() is dataclasses.field with our metadata; it makes no shared value)
from __future__ import annotations

import dataclasses
import functools
import json
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from tinyvae import __version__
from tinyvae.models.variants import VariantSpec, get_spec
from tinyvae.storage import Place, Url, place_of

if TYPE_CHECKING:
    from tinyvae.data.sizes import SizeSchedule

LIMIT_WORDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}  # the limits of pydantic
TIME_DIRECTIVES = "YmdHMS"  # letters after % in ``output_dir`` that stand for a part of the time of the start
RUN_FORMAT = "tinyvae-run"  # the format that a run's ``config.json`` states
TeacherType = Literal["cogvideox", "wan", "hunyuan", "ltx", "minimax", "taehv"]


def option(default: Any, meaning: str, *, group: str = "", **limits: float) -> Any:
    """A field of `TrainConfig`. ``limits``: ge, gt, le, lt as in pydantic. ``group``: the heading that begins here."""
    assert limits.keys() <= LIMIT_WORDS.keys(), limits
    return dataclasses.field(default=default, metadata={"meaning": meaning, "limits": limits, "group": group})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What one training run does. Lengths are in frames, sizes in pixels, times in seconds unless the name says else.

    Example: ``dataclasses.replace(TrainConfig(variant="taecvx", data_root="clips"), max_train_steps=500)``
    """

    variant: str = option("taehv", "Which network of the family, by name (`tinyvae info` lists them).", group="Model")
    model_width: float = option(
        1.0, "Factor on every hidden channel count; 1: as released, 0.25: for a laptop.", gt=0, le=16
    )
    latent_space: Literal["diffusion", "vae"] = option(
        "diffusion", "The student's latents: as the diffusion model sees them, or as its VAE makes them, unscaled."
    )
    activation: Literal["relu", "leaky_relu"] = option("relu", "ReLU, or LeakyReLU (slope 0.2), in the whole network.")
    pretrained_model_path: Path | None = option(None, "Weights to start from (file, model or run folder); none: fresh.")
    init: Literal["he", "colors", "torch"] = option(
        "he", "Fresh weights: he (scaled for ReLU), colors (he, and three channels pass the colors), or as torch does."
    )
    gradient_checkpointing: bool = option(False, "Recompute activations in the backward pass: less memory, more time.")

    data_root: Path | Url | None = option(
        None, "Folder of the videos; paths in annotation_file start here.", group="Data"
    )
    annotation_file: Path | Url | None = option(
        None, "JSON or JSONL list of the videos; none: every video below data_root."
    )
    index_path: Path | Url | None = option(None, "Index made by `tinyvae data index`; none: the run makes one.")
    file_cache_gb: float | None = option(
        None, "Keep files fetched from URLs, up to this many GiB; none: $TINYVAE_FILE_CACHE_GB, else 50.", gt=0
    )
    file_cache_dir: Path | None = option(
        None, "Folder of these files, best on a local disk; none: $TINYVAE_FILE_CACHE_DIR, else temporary."
    )
    use_sample_clips: bool = option(False, "Write sample clips to data_root first, if it is empty or absent.")
    train_split: float = option(0.95, "Share of files to train on, by a hash of the path; others validate.", gt=0, le=1)
    split_by: Literal["auto", "annotation", "hash"] = option(
        "auto", "annotation: as the list says; hash: by train_split; auto: the list, if it says."
    )
    height: int = option(128, "Height of a training clip, pixels; a multiple of the space factor.", ge=8)
    width: int = option(128, "Width of a training clip, pixels; a multiple of the space factor.", ge=8)
    n_frames: int = option(16, "Frames of a training clip; the variant says which lengths suit its teacher.", ge=1)
    resolutions: tuple[str, ...] = option(
        (), "Several clip sizes, `FRAMESxHEIGHTxWIDTH[:SHARE][@STEP or @70%]`; they replace the three keys above."
    )
    min_frame_delta: int = option(1, "Smallest step between the frames of a clip, source frames.", ge=1)
    max_frame_delta: int = option(1, "Largest step between the frames of a clip, source frames.", ge=1)
    allow_upscale: bool = option(False, "Enlarge videos smaller than height x width instead of leaving them out.")
    bad_file_limit: float = option(0.05, "Share of unreadable files above which the run stops.", ge=0, le=1)
    decoded_cache_gb: float = option(0.0, "Keep decoded files of small data sets, up to this many GiB; 0: none.", ge=0)
    decoded_cache_dir: Path | None = option(None, "Folder of decoded files, best on a local disk; none: temporary.")
    decode_timeout_s: float = option(30.0, "Longest time one clip may take to decode, seconds.", gt=0)

    random_crop: bool = option(True, "Crop at a random place; off: the center.", group="Augmentation")
    random_resize: bool = option(True, "Scale each crop down from a random window; off: pixels stay as they are.")
    crop_candidates: int = option(
        1, "Draw this many crops of each clip, train on the one with the most detail; 1: no choice.", ge=1, le=64
    )
    random_flip: bool = option(True, "Mirror half of the clips left to right.")
    random_turn: bool = option(
        False, "Mirror half of the clips top to bottom; turn half of the square ones on their side."
    )
    random_reverse: bool = option(False, "Play half of the clips backwards.")
    color_jitter: bool = option(False, "Change the colors of each clip by color_jitter_params.")
    color_jitter_params: tuple[float, float, float, float] = option(
        (0.15, 0.15, 0.15, 0.08),
        "Largest change of brightness, contrast, saturation (shares), hue (turns).",
        ge=0,
        lt=1,
    )
    gaussian_blur: bool = option(False, "Blur a share of the clips by a sigma drawn from gaussian_blur_sigma.")
    gaussian_blur_probability: float = option(0.5, "Share of the clips that gaussian_blur blurs.", ge=0, le=1)
    gaussian_blur_sigma: tuple[float, float] = option((0.1, 2.0), "Smallest and largest sigma, pixels.", gt=0, le=10)

    max_train_steps: int = option(10_000, "Optimizer steps of the whole run.", ge=1, group="Steps and precision")
    train_batch_size: int = option(4, "Clips of one micro-batch on one device.", ge=1, le=4096)
    gradient_accumulation_steps: int = option(
        1, "Micro-batches of a step; as one larger batch (except Seraena).", ge=1, le=4096
    )
    mixed_precision: Literal["no", "fp16", "bf16"] = option("no", "Precision of the networks; losses are in fp32.")
    allow_tf32: bool = option(True, "Let fp32 matrix products use TF32 on the GPUs that have it.")
    compile_model: bool = option(False, "Compile the training step with torch.compile.")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = option(
        "default", "Mode of torch.compile where compile_model is on."
    )
    deterministic: bool = option(False, "The same bits from the same run on one GPU; slower: nothing is compiled.")
    seed: int = option(42, "Seed of weights, data order and augmentation.", ge=0, lt=2**32)

    optimizer: Literal["adamw", "muon"] = option(
        "adamw", "adamw; or muon for the inner convs and adamw for the rest.", group="Optimizer and schedule"
    )
    learning_rate: float = option(1e-4, "Peak learning rate of AdamW.", gt=0, le=1)
    muon_learning_rate: float = option(0.01, "Peak learning rate of the convs that Muon trains.", gt=0, le=1)
    muon_momentum: float = option(0.95, "Momentum of Muon.", ge=0, lt=1)
    lr_scheduler: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"
    ] = option("cosine", "How the learning rates move after the warm-up; counted in optimizer steps.")
    lr_warmup_steps: int = option(100, "Optimizer steps over which the learning rates rise from 0.", ge=0)
    lr_num_cycles: int = option(1, "Number of cosine decays of cosine_with_restarts.", ge=1)
    lr_power: float = option(1.0, "Power of the polynomial schedule.", gt=0)
    beta1: float = option(0.9, "AdamW: decay of the mean of gradients.", ge=0, lt=1)
    beta2: float = option(0.95, "AdamW: decay of the mean of squared gradients.", ge=0, lt=1)
    weight_decay: float = option(1e-2, "AdamW: decoupled weight decay.", ge=0)
    epsilon: float = option(1e-8, "AdamW: term that keeps the division finite.", gt=0)
    max_grad_norm: float = option(1.0, "Gradients are clipped to this norm; 0: never.", ge=0)
    enable_fused_adam: bool = option(True, "Use torch's fused AdamW kernel on a GPU.")
    ema_decay: float = option(0.999, "Decay of the mean of weights that is validated and saved; 0: none.", ge=0, lt=1)

    reconstruction_loss_type: Literal["mse", "l1", "charbonnier"] = option(
        "mse", "What the reconstruction and decoder losses measure.", group="Losses"
    )
    reconstruction_loss_weight: float = option(
        10.0, "Weight: the student's own round trip against the frames; 0: the step does not compute it.", ge=0
    )
    encoder_loss_weight: float = option(0.0, "Weight: student latents against the teacher's.", ge=0)
    decoder_loss_weight: float = option(0.0, "Weight: the teacher's latents decoded, against the frames.", ge=0)
    perceptual_loss_weight: float = option(0.0, "Weight: LPIPS (needs LPIPS weights).", ge=0)
    perceptual_frames: int | None = option(None, "Frames of a clip that LPIPS sees in a step; none: all.", ge=1)
    temporal_loss_weight: float = option(0.0, "Weight: error of frame-to-frame differences.", ge=0)
    lpips_weights: Path | None = option(None, "LPIPS weights; none: searched in the places of `docs/losses.md`.")

    use_ref_vae: bool = option(False, "Load a reference VAE as the teacher.", group="Teacher (reference VAE)")
    ref_vae_type: TeacherType | None = option(None, "Family of the teacher; none: read from its config.json.")
    ref_vae_path: str | None = option(
        None,
        "The teacher: a diffusers folder, a hub name (owner/name), or our weights; --teacher sets it and use_ref_vae.",
    )
    ref_vae_dtype: Literal["float32", "float16", "bfloat16"] = option("bfloat16", "Precision of the teacher.")
    ref_vae_sample: bool = option(False, "Draw the teacher's latents from their distribution; off: take its mode.")
    latent_store: Path | Url | None = option(
        None, "The teacher's latents (`tinyvae latents` makes them); none: it runs."
    )

    use_seraena: bool = option(False, "Train with Seraena's correction targets.", group="Seraena")
    seraena_loss_weight: float = option(0.0, "Weight: distance to the corrected frames.", ge=0)
    n_seraena_frames: int = option(1, "Frames the discriminator sees at once; divides the padded clip length.", ge=0)
    seraena_start: int | Literal["auto"] = option(0, "Step where Seraena begins; auto: when validation stalls.", ge=0)
    seraena_learning_rate: float = option(3e-4, "Learning rate of the discriminator's AdamW.", gt=0, le=1)
    seraena_patience: int = option(2, "Validations without improvement after which seraena_start=auto begins.", ge=1)
    seraena_normalisation: Literal["golden", "size_independent"] = option(
        "size_independent", "golden: as published, fades with the picture size; size_independent: the same at any size."
    )
    seraena_buffer_mb: int = option(512, "Bound of each process's replay buffer, 2**20 bytes.", ge=1, le=2**20)
    seraena_buffer_device: Literal["cpu", "device"] = option("device", "cpu: the buffer lies in main memory.")

    validation_steps: int = option(500, "Steps between validations, and one last; 0: never.", ge=0, group="Validation")
    num_validation_samples: int = option(20, "Clips of a validation, over all processes.", ge=1)
    validation_batch_size: int = option(2, "Clips per validation batch on one device.", ge=1)
    validation_height: int | None = option(None, "Height of a validation clip; none: height.", ge=8)
    validation_width: int | None = option(None, "Width of a validation clip; none: width.", ge=8)
    validation_n_frames: int | None = option(None, "Frames of a validation clip; none: n_frames.", ge=1)
    save_validation_videos: bool = option(True, "Log pictures and short videos of input, output, error.")
    metric_for_best_model: Literal["psnr", "ssim", "lpips", "mse"] = option(
        "psnr", "What decides best_model and early stopping."
    )
    early_stopping_patience: int = option(0, "Validations without a better score that end the run; 0: never.", ge=0)

    output_dir: Path = option(
        Path("output/%Y-%m-%d_%H-%M-%S"), "The run's folder; %Y to %S: time of its start.", group="Output and resume"
    )
    checkpointing_steps: int = option(500, "Optimizer steps between checkpoints; 0: at the end only.", ge=0)
    checkpoints_total_limit: int | None = option(5, "Checkpoints kept beside best and emergency ones; none: all.", ge=1)
    resume_from_checkpoint: str | None = option(None, "Go on from a checkpoint's path, its name, or latest (--resume).")
    allow_changed_settings: bool = option(False, "Resume although model or data settings differ from the checkpoint's.")
    save_model_card: bool = option(True, "Write a model card beside the final model.")
    report: bool = option(True, "Write report.html at the end of the run.")

    log_every: int = option(10, "Optimizer steps between log lines.", ge=1, group="Logging")
    report_to: Literal["tensorboard", "wandb", "mlflow", "none"] = option(
        "tensorboard", "Tracker of curves, settings and pictures; metrics.jsonl is always written."
    )
    tracker_name: str = option("tinyvae", "Name of the run in the tracker.")
    logging_dir: Path = option(Path("logs"), "Folder of the tracker's files; relative: inside the run's folder.")
    enable_profiler: bool = option(False, "Write a torch profiler trace of a few early steps to profile.json.")
    log_system_stats: bool = option(False, "Log CPU, memory and GPU use and temperature.")
    debug: bool = option(False, "Log shapes, dtypes and ranges of everything in the first step.")
    notify_command: str | None = option(None, "Shell command at an end, failure or stall; TINYVAE_EVENT says which.")
    notify_stall_s: float = option(1800.0, "Seconds without a finished step, validation or save: a stall.", gt=0)

    dataloader_num_workers: int = option(4, "Decoding processes of each process.", ge=0, group="Workers and limits")
    prefetch_factor: int = option(2, "Batches each worker prepares ahead.", ge=1, le=64)
    pin_memory: bool = option(True, "Use pinned memory for copies to a GPU.")
    allow_cpu: bool = option(False, "Train without a GPU, however large a step is (it may take hours).")
    nccl_timeout: int = option(1800, "Longest wait in a collective before the job ends, seconds (any backend).", ge=1)
    max_skipped_steps: int = option(10, "Steps skipped in a row (loss or gradient not finite) that end the run.", ge=1)

    def __post_init__(self) -> None:
        for key in path_keys():
            value: object = getattr(self, key)
            if isinstance(value, str):  # people write text for a path
                object.__setattr__(self, key, place_of(value) if Url in kinds_of(key) else Path(value))
        if self.resolutions:  # whoever asks for one size (validation, messages, a trial step) means the largest
            for key, number in self.sizes.largest._asdict().items():
                object.__setattr__(self, key, number)

    @functools.cached_property
    def spec(self) -> VariantSpec:
        """The network and its frame rule; `UserError` where there is no such variant or width."""
        return get_spec(
            self.variant, width=self.model_width, latent_space=self.latent_space, activation=self.activation
        )

    @functools.cached_property
    def sizes(self) -> SizeSchedule:
        """The sizes of training clips; `UserError` where an entry of ``resolutions`` is wrong."""
        from tinyvae.data.sizes import ClipSize, SizeSchedule  # not above: most readers of a schema need no numpy

        if self.resolutions:
            return SizeSchedule.parse(self.resolutions_in_steps)
        return SizeSchedule.of_one(ClipSize(self.n_frames, self.height, self.width))

    @property
    def resolutions_in_steps(self) -> list[str]:
        """``resolutions`` whose later stages begin at a step, not at a part of the run."""
        from tinyvae.data.sizes import in_steps

        return [in_steps(entry, self.max_train_steps) for entry in self.resolutions]

    @property
    def data_source(self) -> Place | None:
        """What lists the videos: the index, else the annotation file, else the folder."""
        return self.index_path or self.annotation_file or self.data_root

    @property
    def teacher_path(self) -> str | None:
        """The folder or hub name of the teacher that the run loads; None without one, and with a latent store."""
        return self.ref_vae_path if self.use_ref_vae and self.latent_store is None else None

    @property
    def decodes_teacher(self) -> bool:
        """Whether a step decodes the teacher's latents: for the decoder loss."""
        return self.decoder_loss_weight > 0

    @property
    def makes_round_trip(self) -> bool:
        """Whether a step decodes the student's own latents: for the reconstruction loss, or for a loss on the output
        (LPIPS, temporal, Seraena) where there is no decoding of the teacher's latents to compute it on."""
        on_output = self.perceptual_loss_weight or self.temporal_loss_weight or self.use_seraena
        return self.reconstruction_loss_weight > 0 or (bool(on_output) and not self.decodes_teacher)

    @property
    def trains_encoder(self) -> bool:
        """Whether a step runs the encoder; where not, its weights stay as they are."""
        return self.makes_round_trip or self.encoder_loss_weight > 0

    @property
    def trains_decoder(self) -> bool:
        """Whether a step runs the decoder; where not, its weights stay as they are."""
        return self.makes_round_trip or self.decodes_teacher

    @property
    def trained_parts(self) -> str:
        """``encoder and decoder``, ``encoder`` or ``decoder``."""
        trained = {"encoder": self.trains_encoder, "decoder": self.trains_decoder}
        return " and ".join(part for part, is_trained in trained.items() if is_trained)

    @property
    def validation_size(self) -> tuple[int, int, int]:
        """(frames, height, width) of a validation clip."""
        height, width = self.validation_height or self.height, self.validation_width or self.width
        return self.validation_n_frames or self.n_frames, height, width


FIELDS: Mapping[str, dataclasses.Field[Any]] = {field.name: field for field in dataclasses.fields(TrainConfig)}
"""Key -> its field, in the order of the document."""


_types = functools.cache(lambda: get_type_hints(TrainConfig))


def kinds_of(key: str) -> tuple[Any, ...]:
    """The types that a key takes: ``(int, NoneType)`` for ``int | None``."""
    kind = _types()[key]
    return get_args(kind) if get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


@functools.cache
def path_keys() -> tuple[str, ...]:
    """The keys whose values are paths (or none)."""
    return tuple(key for key in FIELDS if Path in kinds_of(key))


# a configuration as text


def to_json(config: TrainConfig) -> str:
    """The whole configuration as the text of a run's ``config.json``; `load_config` reads it back to an equal one."""
    settings = {key: getattr(config, key) for key in FIELDS}
    content = {"format": RUN_FORMAT, "tinyvae_version": __version__, **settings}
    return json.dumps(content, indent=1, default=str) + "\n"


def shown_value(value: Any) -> str:
    """A value as a user writes it on the command line."""
    if isinstance(value, tuple | list) and value:
        return ",".join(map(shown_value, value))
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if value == ():
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def takes_in_words(key: str) -> str:
    """What a key takes: ``a whole number, at least 1``, ``one of mse, l1, charbonnier``, ``a path or none``."""
    limits = FIELDS[key].metadata["limits"].items()
    range_in_words = " and ".join(f"{LIMIT_WORDS[name]} {shown_value(limit)}" for name, limit in limits)
    return ", ".join(filter(None, [" or ".join(map(_kind_in_words, kinds_of(key))), range_in_words]))


def _kind_in_words(kind: Any) -> str:
    names = get_args(kind)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(names)}" if len(names) > 1 else names[0]
    if get_origin(kind) is tuple:
        return "sizes such as 16x480x720:0.3,16x256x256:0.7" if str in names else f"{len(names)} numbers"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path", Url: "a URL"}
    return words.get(kind, "none")


def config_help_text(config: TrainConfig | None = None) -> str:
    """Every setting with its type, range, default, meaning and, where it differs, its value in ``config``."""
    lines, indent = [], " " * 8
    for key, field in FIELDS.items():
        if field.metadata["group"]:
            lines.append(f"\n{field.metadata['group']}:")
        value = field.default if config is None else getattr(config, key)
        here = "" if value == field.default else f"; here {shown_value(value)}"
        takes = f"  --{key} ({takes_in_words(key)}; default {shown_value(field.default)}{here})"
        meaning = indent + field.metadata["meaning"]
        lines += [textwrap.fill(text, width=100, subsequent_indent=indent) for text in (takes, meaning)]
    return "\n".join(lines).strip("\n") + "\n"
