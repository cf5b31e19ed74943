"""What must hold of the settings: each value, pairs of them, and the files they name. All complaints come at once."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from tinyvae.config.schema import FIELDS, TrainConfig, kinds_of, shown_value, takes_in_words
from tinyvae.errors import MissingFileError, UserError, nearest_name, require_package
from tinyvae.models.hub import names_repository
from tinyvae.storage import SCHEME, Place, Url, place_of

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from tinyvae.data.sizes import ClipSize


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """One thing that is wrong: the keys it is about, and what to do. ``missing``: a file is named and not there."""

    keys: tuple[str, ...]
    text: str
    missing: bool = False


@dataclass(frozen=True, kw_only=True)
class GivenPath:
    """How a path was written, and the folder it was resolved against. ``key``: the name of the key that was used."""

    key: str
    text: str
    base: Path


Findings = Iterator[tuple[str, str]]  # (keys with spaces between, sentence) of each broken rule


def check_config(
    config: TrainConfig,
    given: Mapping[str, GivenPath] | None = None,
    *,
    also: Sequence[Complaint] = (),
    heading: str = "the configuration",
) -> None:
    """Raise one `UserError` with every mistake in the values and the files, and what the caller has ``also`` found."""
    raise_complaints([*value_complaints(config), *path_complaints(config, given or {}), *also], heading=heading)


def raise_complaints(complaints: Sequence[Complaint], *, heading: str = "the configuration") -> None:
    """Raise one error that lists all complaints; nothing where there is none."""
    if not complaints:
        return
    error = MissingFileError if all(complaint.missing for complaint in complaints) else UserError
    if len(complaints) == 1:
        raise error(f"{heading}: {complaints[0].text}")
    lines = "".join(f"\n  - {complaint.text}" for complaint in complaints)
    raise error(f"{heading} has {len(complaints)} mistakes:{lines}")


# one value

NONE_MEANS: Mapping[str, Any] = {
    "report_to": "none",
    "mixed_precision": "no",
    "max_grad_norm": 0.0,
    "early_stopping_patience": 0,
    "validation_steps": 0,
    "resolutions": (),
}
"""Key -> its value for "none of it", where the files of other trainers write None."""

OTHER_SPELLINGS: Mapping[str, Mapping[str, str]] = {
    "mixed_precision": {"fp32": "no", "float32": "no", "float16": "fp16", "bfloat16": "bf16"},
    "ref_vae_dtype": {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"},
    "metric_for_best_model": {"reconstruction_loss": "mse"},
}
"""Key -> values of other trainers' files that mean the same as one of ours."""

JITTER_NAMES = ("brightness", "contrast", "saturation", "hue")


def convert(key: str, value: Any, where: str = "") -> Any:
    """A Python value, or the text of the command line, as ``key`` holds it; ``where`` is for the message.

    Example: ``convert("max_train_steps", 1e4) == 10000``, ``convert("gaussian_blur_sigma", "0.1,2") == (0.1, 2.0)``
    """
    from pydantic import ValidationError

    try:
        converted = _validator(key).validate_python(_plain_value(key, value))
    except ValidationError:
        raise UserError(_wrong_value(key, value, where)) from None
    if isinstance(converted, str | Path | Url) and "\0" in str(converted):
        text = f"{key}={str(converted)!r} holds a NUL byte{where}"
        raise UserError(f"{text}; leave it out: the system takes none in a path, a name or a command.")
    if key == "resolutions" and (refusal := _refusal(lambda: TrainConfig(resolutions=converted))):
        raise UserError(f"{refusal}{where}")
    return converted


def _wrong_value(key: str, value: Any, where: str = "") -> str:
    choices = [choice for kind in kinds_of(key) if get_origin(kind) is Literal for choice in get_args(kind)]
    return f"{key}={value!r} must be {takes_in_words(key)}{where}.{nearest_name(str(value), choices)}"


@functools.cache
def _validator(key: str) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, Field, TypeAdapter

    def limited(kind: Any) -> Any:
        if get_origin(kind) is tuple:
            return tuple[tuple(map(limited, get_args(kind)))]  # type: ignore[misc]
        return Annotated[kind, Field(**FIELDS[key].metadata["limits"])] if kind in (int, float) else kind

    kind: Any = Union[tuple(map(limited, kinds_of(key)))]  # noqa: UP007  (the members are computed)
    return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True))


def _plain_value(key: str, value: Any) -> Any:
    """What pydantic is given: other spellings in our words, and numbers, lists and none out of their text."""
    kinds = kinds_of(key)
    if isinstance(value, PurePath) or type(value).__module__ == "torch":  # a path, or torch.bfloat16
        value = str(value).removeprefix("torch.")
    if isinstance(value, str):
        value = OTHER_SPELLINGS.get(key, {}).get(value.strip(), value.strip())
    if isinstance(value, str) and SCHEME.match(value) and Path in kinds:
        return _place_value(key, value)
    may_be_none = type(None) in kinds or key in NONE_MEANS
    if value is None or value == "" or (may_be_none and str(value).lower() in ("none", "null")):
        return NONE_MEANS.get(key)  # an empty text names nothing; as a path it would be the base folder
    if isinstance(value, Mapping) and value.keys() <= set(JITTER_NAMES):
        return [value.get(name, 0.0) for name in JITTER_NAMES]
    if isinstance(value, bool) and bool not in kinds:
        return str(value)  # True is no number
    if isinstance(value, str) and get_origin(kinds[0]) is tuple:
        return value.strip("()[]").replace(",", " ").split()
    if isinstance(value, str) and {int, float} & set(kinds):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _place_value(key: str, text: str) -> Place:
    """A URL as the key holds it; ``Path`` would make one slash of two."""
    place = place_of(text)
    if isinstance(place, Url) and Url not in kinds_of(key):
        raise UserError(f"{key}={place} is a URL, and {key} must be on this machine's file system; name a local path.")
    return place


# between settings


def value_complaints(config: TrainConfig) -> list[Complaint]:
    """Everything wrong with the values: types and ranges first, then the rules between keys."""
    wrong: dict[str, Complaint] = {}
    for key in FIELDS:
        value = getattr(config, key)
        try:
            if convert(key, value) != value:  # such as the text "no" for a switch, which would count as on
                raise UserError(_wrong_value(key, value))
        except UserError as mistake:
            wrong[key] = Complaint(keys=(key,), text=str(mistake))
    # A rule about a key that is wrong by itself would only repeat that, or compute nonsense.
    defaults: dict[str, Any] = {key: FIELDS[key].default for key in wrong}
    sane = dataclasses.replace(config, **defaults)
    found = [*_variant_rules(sane), *_data_rules(sane), *_schedule_rules(sane), *_loss_rules(sane)]
    broken = [Complaint(keys=tuple(keys.split()), text=text) for keys, text in [*found, *_teacher_rules(sane)]]
    return [*wrong.values(), *(complaint for complaint in broken if not wrong.keys() & set(complaint.keys))]


def _refusal(check: Callable[..., object], *arguments: Any) -> str:
    """The sentence with which a check refuses its arguments; empty where it accepts them."""
    try:
        check(*arguments)
    except UserError as mistake:
        return str(mistake)
    return ""


def _variant_rules(config: TrainConfig) -> Findings:
    """The rules of the variant: width, clip length, frame size, Seraena's groups, frames to tell a change from."""
    if refusal := _refusal(lambda: config.spec):
        yield "variant model_width", refusal.replace("width=", "model_width=", 1)
        return
    found = [finding for size in config.sizes.sizes for finding in _size_rules(config, size)]
    yield from found
    fits = not any(keys.startswith("height") for keys, _ in found)  # else it would be told twice
    if fits and (refusal := _refusal(config.spec.check_size, *config.validation_size[1:])):
        yield "validation_height validation_width", f"validation size: {refusal}"


def _size_rules(config: TrainConfig, size: ClipSize) -> Findings:
    """The rules of the variant for one size of training clips."""
    spec, (n_frames, height, width) = config.spec, size
    of_size = f"resolutions {size}: " if config.resolutions else ""
    if refusal := _refusal(spec.check_training_length, n_frames):
        yield "n_frames resolutions", of_size + refusal
    if refusal := _refusal(spec.check_size, height, width):
        yield "height width resolutions", of_size + refusal
    if config.temporal_loss_weight and (num_decoded := spec.aligned_frames(n_frames)) < 2:
        text = f"temporal_loss_weight needs at least 2 decoded frames, but {spec.name} decodes {num_decoded} of "
        text += f"n_frames={n_frames}; use longer clips or a weight of 0."
        yield "n_frames resolutions temporal_loss_weight", of_size + text
    if config.use_seraena:
        if refusal := _refusal(spec.check_seraena_frames, n_frames, config.n_seraena_frames):
            yield "n_frames n_seraena_frames resolutions", of_size + refusal
        elif refusal := _refusal(_check_replay_buffer, config, size):
            yield "seraena_buffer_mb height width resolutions", of_size + refusal


def _check_replay_buffer(config: TrainConfig, size: ClipSize) -> None:
    """Refuse a replay buffer that does not hold one group of frames with its context."""
    from tinyvae.losses.seraena.replay_buffer import ReplayBuffer

    factor = config.spec.space_factor
    image = (3 * config.n_seraena_frames, size.height, size.width)
    context = (config.spec.latent_channels, size.height // factor, size.width // factor)
    num_sizes = config.sizes.pictures_at_once
    ReplayBuffer(max_mb=config.seraena_buffer_mb, device="cpu", num_sizes=num_sizes).capacity(image, context)


def _data_rules(config: TrainConfig) -> Findings:
    (low, high), hue = config.gaussian_blur_sigma, config.color_jitter_params[3]
    smallest, largest = config.min_frame_delta, config.max_frame_delta
    if smallest > largest:
        yield "min_frame_delta max_frame_delta", f"min_frame_delta={smallest} is above max_frame_delta={largest}."
    if low > high:
        yield "gaussian_blur_sigma", f"gaussian_blur_sigma=({low:g}, {high:g}) must be (smallest, largest)."
    if hue > 0.5:
        yield "color_jitter_params", f"color_jitter_params: the hue is {hue:g}; it must be at most 0.5."
    if config.crop_candidates > 1 and not config.random_crop:
        text = f"crop_candidates={config.crop_candidates} needs random_crop, which is off; turn it on, or set "
        yield "crop_candidates random_crop", text + "crop_candidates to 1."
    if config.annotation_file is None and config.index_path is None:
        if config.train_split == 1 and config.validation_steps:
            yield (
                "train_split validation_steps",
                "train_split=1 leaves no file to validate on; set it below 1, or validation_steps to 0.",
            )
        if config.split_by == "annotation":
            yield "split_by annotation_file", "split_by=annotation needs an annotation_file that names the splits."


def _schedule_rules(config: TrainConfig) -> Findings:
    steps, start, patience = config.max_train_steps, config.seraena_start, config.early_stopping_patience
    waits = config.use_seraena and start == "auto"
    if config.lr_warmup_steps > steps:
        text = f"lr_warmup_steps={config.lr_warmup_steps} is more than max_train_steps={steps}; set it below."
        yield "lr_warmup_steps max_train_steps", text
    if config.use_seraena and isinstance(start, int) and start >= steps:
        text = f"seraena_start={start} is not before max_train_steps={steps}, so Seraena would never begin."
        yield "seraena_start max_train_steps", text
    for key, needed in (("early_stopping_patience", patience > 0), ("seraena_start", waits)):
        if needed and config.validation_steps == 0:
            text = f"{key}={getattr(config, key)} needs validations, and validation_steps is 0."
            yield f"validation_steps {key}", text
    if waits and 0 < patience <= config.seraena_patience:
        text = f"seraena_patience={config.seraena_patience} must be below early_stopping_patience={patience}, "
        yield "seraena_patience early_stopping_patience", text + "or the run would end before Seraena begins."


# switch -> the weights that mean nothing without it
SWITCHES = {"use_ref_vae": ("encoder_loss_weight", "decoder_loss_weight"), "use_seraena": ("seraena_loss_weight",)}


def _loss_rules(config: TrainConfig) -> Findings:
    """A loss whose needs are not met is a mistake, and so is a switch that nothing uses."""
    weights = {key: getattr(config, key) for key in FIELDS if key.endswith("_loss_weight")}
    for switch, keys in SWITCHES.items():
        is_on, what, off = getattr(config, switch), "a teacher" if switch == "use_ref_vae" else "Seraena", "false"
        if switch == "use_ref_vae" and config.latent_store is not None:
            is_on, switch, off = True, "latent_store", "none"
        if is_on and not any(weights[key] for key in keys):
            text = f"{switch} is on but {' and '.join(f'{key}=0' for key in keys)}; "
            yield f"{switch} {' '.join(keys)}", f"{text}set a weight (0.1 is usual), or {switch} to {off}."
        for key in keys:
            if weights[key] and not is_on:
                text = f"{key}={weights[key]:g} needs {what}, and {switch} is off; turn it on, or set {key} to 0."
                yield f"{key} {switch}", text
    if not any(weights.values()):
        yield " ".join(weights), "all loss weights are 0, so nothing would be trained; set one."
    elif config.seraena_start and not any(weights[key] for key in weights if key != "seraena_loss_weight"):
        text = f"nothing would be trained before Seraena begins (seraena_start={config.seraena_start}): "
        yield "seraena_start seraena_loss_weight", f"{text}set another loss weight, or seraena_start to 0."
    for key in _lpips_needs(config):
        sizes = [config.validation_size] if key == "metric_for_best_model" else config.sizes.sizes
        _, height, width = min(sizes, key=lambda size: min(size[1:]))
        if min(height, width) < 31:
            text = f"{key}={shown_value(getattr(config, key))} is LPIPS, which needs frames of at least 31x31 pixels, "
            concerned = f"{key} height width resolutions validation_height validation_width"
            yield concerned, text + f"got {height}x{width}."


def _lpips_needs(config: TrainConfig) -> list[str]:
    """The keys that need LPIPS weights: LPIPS as a loss, or as the metric that decides."""
    needs = ["perceptual_loss_weight"] if config.perceptual_loss_weight > 0 else []
    return needs + (["metric_for_best_model"] if config.metric_for_best_model == "lpips" else [])


def _teacher_rules(config: TrainConfig) -> Findings:
    if config.teacher_path is None:
        return
    from tinyvae.teachers.families import FAMILIES, NETWORK
    from tinyvae.teachers.network import is_network

    kind, variant = config.ref_vae_type, config.variant
    if kind == NETWORK.kind or is_network(config.teacher_path):
        return  # one of ours can teach every variant
    keys = "variant use_ref_vae ref_vae_path ref_vae_type"
    possible = sorted({family.kind for family in FAMILIES.values() if variant in family.variants})
    if not possible:
        yield keys, f"there is no teacher for {variant} in diffusers; set use_ref_vae to false."
    elif kind is not None and kind not in possible:
        students = dict.fromkeys(name for f in FAMILIES.values() if f.kind == kind for name in f.variants)
        text = f"a {kind} teacher cannot teach {variant}, whose latents are those of {' or '.join(possible)}; "
        yield keys, text + f"set variant to {' or '.join(students)}, or name another teacher."


# files and folders

DATA_KEYS = ("data_root", "annotation_file", "index_path")
ANNOTATION_SUFFIXES = (".json", ".jsonl", ".ndjson")
REMEDIES: Mapping[str, str] = {
    "pretrained_model_path": "; the released weights are published in the GitHub repository madebyollin/taehv: "
    "download the file to this place, name another, or none to start from fresh weights",
    "ref_vae_path": "; name a folder that diffusers can load, or a hub name as owner/name (CogVideoX: "
    "THUDM/CogVideoX-2b or zai-org/CogVideoX-2b)",
    "latent_store": "; make it with: tinyvae latents",
    "lpips_weights": "; get them with: tinyvae lpips-weights",
}
"""Key -> what to do where the file that it names is not there."""


def path_complaints(config: TrainConfig, given: Mapping[str, GivenPath]) -> list[Complaint]:
    """Everything that is named and not there, not readable, or of the wrong kind; ``given``: how paths were written."""
    complaints = []
    for key in (*DATA_KEYS, *REMEDIES):
        named = config.teacher_path if key == "ref_vae_path" else getattr(config, key)
        is_hub_name = key == "ref_vae_path" and names_repository(str(named))
        may_be_absent = is_hub_name or (key == "data_root" and config.use_sample_clips)
        if named is None:
            continue
        is_there, refusal = _look_at(named if isinstance(named, Url) else Path(named))
        if refusal:
            complaints.append(Complaint(keys=(key,), text=f"{key}={named} {refusal}."))
        elif not is_there and not may_be_absent:
            complaints.append(_missing(config, key, given))
    if config.use_ref_vae and config.ref_vae_path is None and config.latent_store is None:
        text = "no teacher is named; name its folder (--teacher FOLDER), or set use_ref_vae to false."
        complaints.append(Complaint(keys=("ref_vae_path", "use_ref_vae"), text=text))
    wrong = {key for complaint in complaints for key in complaint.keys}
    # What is not there or may not be read is complained of once; the others are looked into.
    seen_from = given["ref_vae_path"].base if "ref_vae_path" in given else None
    if not wrong & set(DATA_KEYS):
        complaints += [Complaint(keys=DATA_KEYS, text=text) for text in _data_mistakes(config)]
    for keys, check in (
        ("pretrained_model_path variant model_width latent_space activation", _check_start_weights),
        ("ref_vae_path variant ref_vae_type model_width", functools.partial(_check_teacher, seen_from=seen_from)),
        ("lpips_weights perceptual_loss_weight metric_for_best_model", _check_lpips),
        ("report_to", _check_tracker),
    ):
        key = keys.split()[0]
        try:
            if key not in wrong:
                check(config)
        except UserError as mistake:
            missing = isinstance(mistake, MissingFileError) and key == "ref_vae_path"
            written = given[key].key if key in given else key
            complaints.append(Complaint(keys=tuple(keys.split()), text=f"{written}: {mistake}", missing=missing))
    if obstacle := _obstacle_to_writing(config.output_dir):
        text = f"output_dir={config.output_dir} cannot be written: {obstacle}; choose another."
        complaints.append(Complaint(keys=("output_dir",), text=text))
    return complaints


def _look_at(place: Place) -> tuple[bool, str]:
    """Whether a file or folder is there, and why it cannot be looked into (empty if it can)."""
    try:
        is_there = place.exists()
        if is_there and isinstance(place, Path):
            may_be_read = os.access(place, os.R_OK | (os.X_OK if place.is_dir() else 0))
            return True, "" if may_be_read else "may not be read by you; fix its permissions or name another"
        return is_there, ""
    except OSError as fault:
        return True, f"cannot be read ({fault.strerror}); fix its permissions or name another"
    except UserError as mistake:  # of the storage behind a URL
        return True, f"cannot be opened: {mistake}"


def _missing(config: TrainConfig, key: str, given: Mapping[str, GivenPath]) -> Complaint:
    if isinstance(url := getattr(config, key), Url):
        text = f"{key}={url} does not exist (no such bucket or repository, or nothing of this name in it)."
        return Complaint(keys=(key,), text=text, missing=True)
    path = Path(getattr(config, key)).absolute()
    written = given.get(key, GivenPath(key=key, text=str(getattr(config, key)), base=Path.cwd()))
    where = f"looked for {path}" + ("" if Path(written.text).is_absolute() else f", from {written.base}")
    remedy = REMEDIES.get(key, "")
    if key in ("annotation_file", "index_path") and isinstance(config.data_root, Path):
        beside = config.data_root / path.name  # a list is often kept beside its videos
        remedy = f"; {beside} does" if beside.is_file() else ""
    return Complaint(keys=(key,), text=f"{written.key}={written.text} does not exist ({where}){remedy}.", missing=True)


def _data_mistakes(config: TrainConfig) -> Iterator[str]:
    """Each data path is of its kind, and the list of videos has an entry; an index was checked when it was made."""
    from tinyvae.data.annotations import iterate_entries
    from tinyvae.data.index import is_index

    root, listed, index, source = config.data_root, config.annotation_file, config.index_path, config.data_source
    if source is None:
        yield "no data is named; set data_root to a folder of videos (--data_root FOLDER)."
    elif config.use_sample_clips:
        if not isinstance(root, Path):
            yield "use_sample_clips needs a local data_root, the folder that the clips are written to."
        elif not (root.is_dir() and any(root.iterdir())) and (obstacle := _obstacle_to_writing(root)):
            yield f"data_root={root} cannot be written: {obstacle}."
    elif root is not None and not root.is_dir():
        others = "or a list as annotation_file, or an index as index_path"
        yield f"data_root={root} is a file; name the folder of the videos, {others}."
    elif isinstance(root, Path) and not any(root.iterdir()):
        yield f"data_root={root} is an empty folder; name the folder of the videos (or is its disk not mounted?)."
    elif index is not None:
        if not is_index(index):
            kind = "a folder" if index.is_dir() else "no index"
            yield f"index_path={index} is {kind}; name the file that `tinyvae data index` made."
    elif listed is not None and listed.suffix.lower() not in ANNOTATION_SUFFIXES and not listed.is_dir():
        suffixes = " or ".join(ANNOTATION_SUFFIXES)
        yield f"annotation_file={listed} is no annotation file by its name; it must end in {suffixes}."
    elif isinstance(source, Url) and source.is_dir():
        pass  # to list it may take minutes: the run lists it once, on one process, and says it where it has no video
    else:
        try:
            if next(iterate_entries(source, root), None) is None:
                yield f"{source} names no video; give a folder or a list with at least one."
        except UserError as mistake:
            yield f"{mistake}."


def _check_start_weights(config: TrainConfig) -> None:
    """The weights to start from can be read and are of the network that is to be trained."""
    if config.pretrained_model_path is None:
        return
    from tinyvae.models.weights import find_weights, read_weights, tell_variant

    file = find_weights(config.pretrained_model_path)
    state, stated = read_weights(file)
    width = tell_variant(state, stated=stated, variant=config.variant, origin=file).width
    for key in ("latent_space", "activation"):
        wanted, given = getattr(config, key), stated.get(key)
        if given not in (None, wanted):
            advice = f"set {key} to {given}, or name other weights"
            if key == "latent_space":
                advice += " (tinyvae.convert.latent_space converts an encoder)"
            raise UserError(f"{file} is stated to have {key} {given}, and {key} is {wanted}; {advice}.")
    if width != config.model_width:
        text = f"{file} holds a network of model_width={width:g}, and model_width is {config.model_width:g}; "
        raise UserError(f"{text}set model_width to {width:g}, or name other weights.")


def _check_teacher(config: TrainConfig, seen_from: Path | None) -> None:
    if config.teacher_path is not None:
        from tinyvae.teachers import check_teacher

        check_teacher(config.teacher_path, config.ref_vae_type, config.spec, seen_from=seen_from)


def _check_tracker(config: TrainConfig) -> None:
    if config.report_to == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        what = "the package 'tensorboard' is not installed"
        raise UserError(f"{what}; install it with: pip install tensorboard, or set report_to to none.")
    if config.report_to in ("wandb", "mlflow"):
        require_package(config.report_to, extra=config.report_to, needed_for=f"report_to={config.report_to}")


def _check_lpips(config: TrainConfig) -> None:
    """A loss or the deciding metric needs LPIPS weights; a file that is named must hold them in any case."""
    named, needs = config.lpips_weights, _lpips_needs(config)
    if named is None and not needs:
        return
    from tinyvae.losses.perceptual import LPIPS

    try:
        LPIPS.from_file(named)
    except UserError as mistake:
        if named is not None:
            raise
        none = ", and there are none" if isinstance(mistake, MissingFileError) else ""
        needed = f"{needs[0]}={shown_value(getattr(config, needs[0]))}"
        raise UserError(f"{needed} needs LPIPS weights{none}: {mistake}") from None


def _obstacle_to_writing(folder: Path) -> str:
    """Why nothing can be written into a folder that may not be there yet; empty where nothing is in the way."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.exists(place))
    if not there.is_dir():
        return f"{there} is a file"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} is not yours to write to"
