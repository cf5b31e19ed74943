"""Whether the files and folders that a `TrainConfig` names are there, may be used, and are what they should be.

Looked at before any GPU or process group is touched, and no further than it takes: first bytes, headers, one listing.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinyvae.config import TrainConfig
from tinyvae.config_complaints import Complaint, GivenPath
from tinyvae.config_values import shown_value
from tinyvae.errors import MissingFileError, UserError

DATA_KEYS = ("data_root", "annotation_file", "index_path")
NAMED_PATHS = (*DATA_KEYS, "pretrained_model_path", "ref_vae_path", "cogvideox_model_path", "lpips_weights")
"""Keys that name something to read."""

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
        yield _missing(config, "pretrained_model_path", given, "; download the weights there, or name another file")
        return
    from tinyvae.models.variant_of_weights import tell_variant
    from tinyvae.models.weights import find_weights, read_weights

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
        yield _missing(config, key, given, "; name a folder that diffusers can load, or a hub name as owner/name")
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
