"""Checks of a `TrainConfig` before any GPU or process group is touched; every complaint at once.

``check_values`` looks at the numbers alone, ``check_paths`` at the file system. Both raise one `UserError` that lists
all complaints, because a user who mends one mistake per start loses a queue slot for each.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyvae.config.schema import FIELDS, TrainConfig
from tinyvae.config.values import convert, limits_in_words, numbers_in, shown_value, within
from tinyvae.errors import MissingFileError, UserError


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """One thing that is wrong: the keys it is about, and a sentence with the remedy."""

    keys: tuple[str, ...]
    text: str
    missing: bool = False
    """Whether it is about a file that is named and not there."""


@dataclass(frozen=True, kw_only=True)
class GivenPath:
    """How a path was written, and the folder it was resolved against."""

    text: str
    base: Path


def raise_complaints(complaints: Sequence[Complaint], *, heading: str = "the configuration") -> None:
    """Raise one error that lists all complaints; nothing where there is none."""
    if not complaints:
        return
    error = MissingFileError if all(complaint.missing for complaint in complaints) else UserError
    if len(complaints) == 1:
        raise error(f"{heading}: {complaints[0].text}")
    lines = "".join(f"\n  - {complaint.text}" for complaint in complaints)
    raise error(f"{heading} has {len(complaints)} mistakes:{lines}")


DATA_KEYS = ("data_root", "annotation_file", "index_path")
NAMED_PATHS = (*DATA_KEYS, "pretrained_model_path", "ref_vae_path", "cogvideox_model_path", "lpips_weights")
"""Keys that name something to read."""

WHERE_WEIGHTS_ARE = (
    "the released weights are published in the GitHub repository madebyollin/taehv: download the file to this place, "
    "name another, or none to start from fresh weights"
)
WHERE_TEACHERS_ARE = (
    "name a folder that diffusers can load, or a hub name as owner/name (CogVideoX: THUDM/CogVideoX-2b or "
    "zai-org/CogVideoX-2b)"
)

ANNOTATION_SUFFIXES = (".json", ".jsonl", ".ndjson")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def path_complaints(config: TrainConfig, given: Mapping[str, GivenPath]) -> list[Complaint]:
    """Everything that is named and not there, with the key, the path as written, and where it was looked for."""
    unreadable = [key for key in NAMED_PATHS if not _may_be_read(getattr(config, key))]
    forbidden = [
        Complaint(
            keys=(key,),
            text=f"{key}={getattr(config, key)} may not be read by you; mend its permissions or name another.",
        )
        for key in unreadable
    ]
    # What may not be read is complained of once, and not looked at again.
    nothing: dict[str, Any] = dict.fromkeys(set(unreadable) - set(DATA_KEYS))
    readable = dataclasses.replace(config, **nothing)
    return [
        *forbidden,
        *_data_paths(config, given, unreadable),
        *_pretrained_weights(readable, given),
        *_teacher_paths(readable, given),
        *_lpips_weights(readable, given),
        *_output_folder(config),
    ]


def _may_be_read(path: str | Path | None) -> bool:
    """Whether a file or folder may be looked into, as far as it is there; None and hub names always may."""
    if path is None:
        return True
    try:
        folder = Path(path).is_dir()
        return not Path(path).exists() or os.access(path, os.R_OK | (os.X_OK if folder else 0))
    except PermissionError:  # of a folder above it
        return False


def _missing(config: TrainConfig, key: str, given: Mapping[str, GivenPath], remedy: str = "") -> Complaint:
    path = Path(getattr(config, key))
    written = given.get(key)
    text, base = (written.text, written.base) if written else (str(path), Path.cwd())
    where = f"looked for {path.absolute()}" + ("" if Path(text).is_absolute() else f", from {base}")
    return Complaint(keys=(key,), text=f"{key}={text} does not exist ({where}){remedy}.", missing=True)


def _data_paths(config: TrainConfig, given: Mapping[str, GivenPath], unreadable: Sequence[str]) -> list[Complaint]:
    mistakes = list(_data_kinds(config, given, unreadable))
    blameless = not mistakes and not set(DATA_KEYS) & set(unreadable)
    if blameless and not config.use_sample_clips and (lack := _lack_of_videos(config)):
        mistakes.append(Complaint(keys=DATA_KEYS, text=lack))
    return mistakes


def _lack_of_videos(config: TrainConfig) -> str:
    """What is wrong with the list of videos, as far as its first entry tells; an index was checked when it was made."""
    from tinyvae.data.annotations import iterate_entries

    source = config.data_source
    assert source is not None, "complained of before"
    if config.index_path is not None:
        return ""
    try:
        first = next(iterate_entries(source, config.data_root), None)
    except UserError as mistake:
        return f"{mistake}."
    return "" if first is not None else f"{source} names no video; give a folder or a list with at least one."


def _data_kinds(config: TrainConfig, given: Mapping[str, GivenPath], unreadable: Sequence[str]) -> Iterator[Complaint]:
    keys = DATA_KEYS
    if config.data_source is None:
        yield Complaint(keys=keys, text="no data is named; set data_root to a folder of videos (--data_root FOLDER).")
    if config.use_sample_clips and config.data_root is None:
        yield Complaint(keys=keys, text="use_sample_clips needs a data_root, the folder that the clips are written to.")
    for key in keys:
        path = getattr(config, key)
        if path is None or key in unreadable:
            continue
        if key == "data_root" and config.use_sample_clips:
            has_clips = path.is_dir() and any(path.iterdir())
            if not has_clips and (obstacle := _obstacle_to_writing(path)):
                yield Complaint(keys=(key,), text=f"{key}={path} cannot be written: {obstacle}.")
        elif not path.exists():
            yield _missing(config, key, given, _same_name_in_data_root(config, key))
        elif mistake := _wrong_kind_of_data(key, path):
            yield Complaint(keys=(key,), text=f"{key}={path} {mistake}.")


def _same_name_in_data_root(config: TrainConfig, key: str) -> str:
    """A list is often kept beside its videos: where one of that name is there, the end of a sentence that says so."""
    if key == "data_root" or config.data_root is None:
        return ""
    beside = config.data_root / Path(getattr(config, key)).name
    return f"; {beside} does" if beside.is_file() else ""


def _wrong_kind_of_data(key: str, path: Path) -> str:
    """What is wrong with a data path that exists, as the end of a sentence; told from its first bytes at most."""
    from tinyvae.data.index import is_index

    if key == "data_root":
        if path.is_file():
            return "is a file; name it as annotation_file or index_path"
        if next(path.iterdir(), None) is None:
            return "is an empty folder; name the folder of the videos (or is its disk not mounted?)"
    elif key == "index_path" and not is_index(path):
        return f"is {'a folder' if path.is_dir() else 'no index'}; name the file that `tinyvae data index` made"
    elif key == "annotation_file" and path.suffix.lower() not in ANNOTATION_SUFFIXES and not path.is_dir():
        return f"is no annotation file by its name; it must end in {' or '.join(ANNOTATION_SUFFIXES)}"
    return ""


def _pretrained_weights(config: TrainConfig, given: Mapping[str, GivenPath]) -> Iterator[Complaint]:
    """Whether the weights to start from are there, can be read, and are of the network that is to be trained."""
    keys = ("pretrained_model_path", "variant", "model_width")
    path = config.pretrained_model_path
    if path is None:
        return
    if not path.exists():
        yield _missing(config, "pretrained_model_path", given, f"; {WHERE_WEIGHTS_ARE}")
        return
    from tinyvae.models.weights import find_weights, read_weights, tell_variant

    try:
        file = find_weights(path)
        state, stated = read_weights(file)
        found = tell_variant(state, stated=stated, variant=config.variant, origin=file)
    except UserError as mistake:
        yield Complaint(keys=keys, text=f"pretrained_model_path: {mistake}")
        return
    if found.width != config.model_width:
        yield Complaint(
            keys=keys,
            text=f"pretrained_model_path={file} holds a network of model_width={found.width:g}, "
            f"and model_width is {config.model_width:g}; set model_width to {found.width:g}, or name other weights.",
        )


def _teacher_paths(config: TrainConfig, given: Mapping[str, GivenPath]) -> Iterator[Complaint]:
    key = "ref_vae_path" if config.ref_vae_path else "cogvideox_model_path"
    path = config.teacher_path
    if path is None:
        return
    if not Path(path).exists() and not HUB_NAME.fullmatch(path):
        yield _missing(config, key, given, f"; {WHERE_TEACHERS_ARE}")
        return
    from tinyvae.teachers import check_teacher

    seen_from = given[key].base if key in given else None
    try:
        check_teacher(path, config.teacher_type, config.spec, seen_from=seen_from)
    except UserError as mistake:
        missing = isinstance(mistake, MissingFileError)
        keys = (key, "variant", "ref_vae_type", "model_width")
        yield Complaint(keys=keys, text=f"{key}: {mistake}", missing=missing)


def _lpips_weights(config: TrainConfig, given: Mapping[str, GivenPath]) -> Iterator[Complaint]:
    """LPIPS as a loss or as the metric that decides needs its weights; as one metric among others it does not.

    A file that the user names must hold them in any case.
    """
    named = config.lpips_weights
    if named is not None and not named.exists():
        yield _missing(config, "lpips_weights", given, "; get them with: tinyvae lpips-weights")
        return
    needed = [
        key
        for key, wanted in (
            ("perceptual_loss_weight", config.perceptual_loss_weight > 0),
            ("metric_for_best_model", config.metric_for_best_model == "lpips"),
        )
        if wanted
    ]
    if named is None and not needed:
        return
    from tinyvae.losses.lpips_weights import find_lpips_weights
    from tinyvae.losses.perceptual import LPIPS

    try:
        LPIPS.from_file(find_lpips_weights(named))
    except UserError as mistake:
        because = f"{needed[0]}={shown_value(getattr(config, needed[0]))} needs LPIPS weights" if needed else ""
        if named is not None:
            text = f"lpips_weights: {mistake}"
        elif isinstance(mistake, MissingFileError):
            text = f"{because}, and there are none: {mistake}"
        else:
            text = f"{because}: {mistake}"
        yield Complaint(keys=(*needed, "lpips_weights"), text=text)


def _output_folder(config: TrainConfig) -> Iterator[Complaint]:
    if obstacle := _obstacle_to_writing(config.output_dir):
        text = f"output_dir={config.output_dir} cannot be written: {obstacle}; choose another."
        yield Complaint(keys=("output_dir",), text=text)


def _obstacle_to_writing(folder: Path) -> str:
    """Why nothing can be written into a folder that may not be there yet; empty where nothing is in the way."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if is_seen(place))
    if not there.is_dir():
        return f"{there} is a file"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} is not yours to write to"


def is_seen(path: Path) -> bool:
    """Whether something is there, as far as this user may know."""
    try:
        return path.exists()
    except PermissionError:  # of a folder above it
        return False


def check_values(config: TrainConfig) -> None:
    """Raise one `UserError` with every value that cannot be meant. No file system, no GPU."""
    raise_complaints(value_complaints(config))


def check_paths(config: TrainConfig, given: Mapping[str, GivenPath] | None = None) -> None:
    """Raise one error with every file and folder that is named and not there. ``given``: how paths were written."""
    raise_complaints(path_complaints(config, given or {}))


def check_config(
    config: TrainConfig,
    given: Mapping[str, GivenPath] | None = None,
    *,
    also: Sequence[Complaint] = (),
    heading: str = "the configuration",
) -> None:
    """`check_values` and `check_paths` in one message, with what the caller has ``also`` found."""
    raise_complaints([*value_complaints(config), *path_complaints(config, given or {}), *also], heading=heading)


def value_complaints(config: TrainConfig) -> list[Complaint]:
    """Everything wrong with the values: types and ranges first, then the rules between keys."""
    wrong = list(_field_complaints(config))
    wrong_keys = {key for complaint in wrong for key in complaint.keys}
    # A rule about a key that is wrong by itself would only repeat that, or compute nonsense.
    defaults: dict[str, Any] = {key: FIELDS[key].default for key in wrong_keys}
    sane = dataclasses.replace(config, **defaults)
    for rule in RULES:
        wrong += [complaint for complaint in rule(sane) if not wrong_keys & set(complaint.keys)]
    return wrong


def _field_complaints(config: TrainConfig) -> Iterator[Complaint]:
    for key, field in FIELDS.items():
        value = getattr(config, key)
        try:
            convert(key, value)
        except UserError as mistake:
            yield Complaint(keys=(key,), text=str(mistake))
            continue
        limits = field.metadata["limits"]
        if not within(value, limits):
            finite = all(math.isfinite(number) for number in numbers_in(value))
            text = f"{key}={shown_value(value)} must be {'' if finite else 'finite and '}{limits_in_words(limits)}."
            yield Complaint(keys=(key,), text=text)


def _variant_rules(config: TrainConfig) -> Iterator[Complaint]:
    """The variant's own rules: width factor, frame length, frame size, Seraena groups, frames to tell a change from."""
    try:
        spec = config.spec
    except UserError as mistake:
        text = str(mistake).replace("width=", "model_width=", 1)
        yield Complaint(keys=("variant", "model_width"), text=text)
        return
    _, height, width = config.validation_size
    checks: list[tuple[tuple[str, ...], Callable[[], None]]] = [
        (("n_frames",), lambda: spec.check_training_length(config.n_frames)),
        (("height", "width"), lambda: spec.check_size(config.height, config.width)),
    ]
    if (height, width) != (config.height, config.width):
        checks.append((("validation_height", "validation_width"), lambda: spec.check_size(height, width)))
    if config.use_seraena:
        seraena_keys = ("n_frames", "n_seraena_frames")
        checks.append((seraena_keys, lambda: spec.check_seraena_frames(config.n_frames, config.n_seraena_frames)))
        checks.append((("seraena_buffer_mb", "height", "width"), lambda: _check_replay_buffer(config)))
    if config.temporal_loss_weight > 0:
        from tinyvae.losses.distances import check_temporal_frames

        checks.append((("n_frames", "temporal_loss_weight"), lambda: check_temporal_frames(spec, config.n_frames)))
    for keys, check in checks:
        try:
            check()
        except UserError as mistake:
            prefix = "validation size: " if keys[0] == "validation_height" else ""
            yield Complaint(keys=keys, text=prefix + str(mistake))


def _check_replay_buffer(config: TrainConfig) -> None:
    """Refuse a replay buffer that does not hold one group of frames with its context."""
    from torch import Size

    from tinyvae.losses.seraena.replay_buffer import ReplayBuffer

    factor = config.spec.space_factor
    image = Size((3 * config.n_seraena_frames, config.height, config.width))
    context = Size((config.spec.latent_channels, config.height // factor, config.width // factor))
    ReplayBuffer(max_mb=config.seraena_buffer_mb, device="cpu").capacity(image, context)


def _loss_rules(config: TrainConfig) -> Iterator[Complaint]:
    """A term whose needs are not met is a mistake, and so is a switch that nothing uses."""
    teacher_keys = ("encoder_loss_weight", "decoder_loss_weight")
    for key in teacher_keys:
        if getattr(config, key) > 0 and not config.use_ref_vae:
            yield Complaint(
                keys=(key, "use_ref_vae"),
                text=f"{key}={getattr(config, key):g} needs a teacher, and use_ref_vae is off; "
                f"set use_ref_vae and ref_vae_path, or {key} to 0.",
            )
    if config.use_ref_vae and not any(getattr(config, key) for key in teacher_keys):
        yield Complaint(
            keys=("use_ref_vae", *teacher_keys),
            text="use_ref_vae is on but encoder_loss_weight and decoder_loss_weight are both 0, so the teacher would "
            "teach nothing; give them a weight (0.1 is usual), or set use_ref_vae to false.",
        )
    if config.use_seraena != (config.seraena_loss_weight > 0):
        has = f"seraena_loss_weight={config.seraena_loss_weight:g}"
        text = (
            f"use_seraena is on but {has}; give it a weight (0.1 is usual), or set use_seraena to false."
            if config.use_seraena
            else f"{has} needs Seraena, and use_seraena is off; set use_seraena to true, or seraena_loss_weight to 0."
        )
        yield Complaint(keys=("use_seraena", "seraena_loss_weight"), text=text)
    weights = [key for key in FIELDS if key.endswith("_loss_weight")]
    if not any(getattr(config, key) for key in weights):
        yield Complaint(keys=tuple(weights), text="all loss weights are 0, so nothing would be trained; set one.")
    _, height, width = config.validation_size
    for key, wanted, size in (
        ("perceptual_loss_weight", config.perceptual_loss_weight > 0, (config.height, config.width)),
        ("metric_for_best_model", config.metric_for_best_model == "lpips", (height, width)),
    ):
        if wanted and min(size) < 31:
            yield Complaint(
                keys=(key, "height", "width", "validation_height", "validation_width"),
                text=f"{key}={shown_value(getattr(config, key))} is LPIPS, which needs frames of at least 31x31 "
                f"pixels, got {size[0]}x{size[1]}.",
            )


def _teacher_rules(config: TrainConfig) -> Iterator[Complaint]:
    if not config.use_ref_vae:
        return
    keys = ("use_ref_vae", "ref_vae_path", "cogvideox_model_path", "ref_vae_type")
    if config.teacher_path is None:
        yield Complaint(keys=keys, text="use_ref_vae is on, but neither ref_vae_path nor cogvideox_model_path is set.")
        return
    both = config.ref_vae_path and config.cogvideox_model_path
    if both and config.ref_vae_path != config.cogvideox_model_path:
        yield Complaint(
            keys=keys,
            text=f"ref_vae_path={config.ref_vae_path} and cogvideox_model_path={config.cogvideox_model_path} name two "
            "teachers; set one of them to none.",
        )
    from tinyvae.teachers.families import FAMILIES

    possible = sorted({family.kind for family in FAMILIES.values() if config.variant in family.variants})
    if not possible:
        yield Complaint(
            keys=("variant", *keys),
            text=f"there is no teacher for {config.variant} in diffusers; set use_ref_vae to false.",
        )
    elif config.teacher_type is not None and config.teacher_type not in possible:
        families = [family for family in FAMILIES.values() if family.kind == config.teacher_type]
        students = dict.fromkeys(name for family in families for name in family.variants)
        yield Complaint(
            keys=("variant", *keys),
            text=f"a {config.teacher_type} teacher cannot teach {config.variant}, whose latents are those of "
            f"{' or '.join(possible)}; set variant to {' or '.join(students)}, or name another teacher.",
        )


def _schedule_rules(config: TrainConfig) -> Iterator[Complaint]:
    if config.lr_warmup_steps > config.max_train_steps:
        yield Complaint(
            keys=("lr_warmup_steps", "max_train_steps"),
            text=f"lr_warmup_steps={config.lr_warmup_steps} is more than max_train_steps={config.max_train_steps}; "
            "the learning rate would never reach its peak.",
        )
    start = config.seraena_start
    if config.use_seraena and isinstance(start, int) and start >= config.max_train_steps:
        yield Complaint(
            keys=("seraena_start", "max_train_steps"),
            text=f"seraena_start={start} is not before max_train_steps={config.max_train_steps}, "
            "so Seraena would never begin.",
        )
    if config.validation_steps == 0:
        for key, wanted in (
            ("early_stopping_patience", config.early_stopping_patience > 0),
            ("seraena_start", config.use_seraena and start == "auto"),
        ):
            if wanted:
                yield Complaint(
                    keys=("validation_steps", key),
                    text=f"{key}={getattr(config, key)} needs validations, and validation_steps is 0.",
                )


def _patience_rules(config: TrainConfig) -> Iterator[Complaint]:
    """Seraena that waits for validation to stall must begin before early stopping ends the run for the same reason."""
    waits = config.use_seraena and config.seraena_start == "auto"
    if waits and 0 < config.early_stopping_patience <= config.seraena_patience:
        yield Complaint(
            keys=("seraena_patience", "early_stopping_patience"),
            text=f"seraena_patience={config.seraena_patience} must be below "
            f"early_stopping_patience={config.early_stopping_patience}, or the run would end before Seraena begins.",
        )


def _data_rules(config: TrainConfig) -> Iterator[Complaint]:
    if config.min_frame_delta > config.max_frame_delta:
        yield Complaint(
            keys=("min_frame_delta", "max_frame_delta"),
            text=f"min_frame_delta={config.min_frame_delta} is above max_frame_delta={config.max_frame_delta}.",
        )
    low, high = config.gaussian_blur_sigma
    if low > high:
        yield Complaint(
            keys=("gaussian_blur_sigma",), text=f"gaussian_blur_sigma=({low:g}, {high:g}) must be (smallest, largest)."
        )
    if config.color_jitter_params[3] > 0.5:
        yield Complaint(
            keys=("color_jitter_params",),
            text=f"color_jitter_params: the hue is {config.color_jitter_params[3]:g}; it must be at most 0.5.",
        )
    annotated = config.annotation_file is not None or config.index_path is not None
    if config.train_split == 1 and config.validation_steps and not annotated:
        yield Complaint(
            keys=("train_split", "validation_steps"),
            text="train_split=1 leaves no file to validate on; set it below 1, or validation_steps to 0.",
        )
    if config.split_by == "annotation" and not annotated:
        yield Complaint(
            keys=("split_by", "annotation_file"),
            text="split_by=annotation needs an annotation_file or index_path that names the splits.",
        )


RULES: tuple[Callable[[TrainConfig], Iterator[Complaint]], ...] = (
    _variant_rules,
    _data_rules,
    _schedule_rules,
    _patience_rules,
    _loss_rules,
    _teacher_rules,
)
