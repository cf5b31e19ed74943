"""From a preset, a file or a run's config.json, and the command line, to one checked `TrainConfig`.

Settings come in layers: the defaults of `TrainConfig`, the preset that a file starts from, the file, the command line.
A later layer wins, also over what it contradicts: switching the teacher off on the command line drops the weights
that the preset gave to the teacher's losses, and says so. Inside one layer a contradiction is a mistake.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tinyvae.config.old_files import CHECKED_KEYS, OLD_KEYS, OTHER_NAMES, notice_of, preset_of_old_file
from tinyvae.config.overrides import parse_overrides
from tinyvae.config.paths import (
    PATH_KEYS,
    TEACHER_KEYS,
    project_of,
    resolved,
    resolved_checkpoint,
    resolved_teacher,
)
from tinyvae.config.reader import FileSettings, read_settings
from tinyvae.config.rules import Complaint, GivenPath, is_seen, path_complaints, raise_complaints, value_complaints
from tinyvae.config.save import settings_in_json
from tinyvae.config.schema import FIELDS, TrainConfig
from tinyvae.config.values import convert, convert_text, shown_value
from tinyvae.errors import MissingFileError, UserError, nearest_name

PRESET_FOLDER = Path(__file__).resolve().parent / "presets"
COMMAND_LINE = "the command line"


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A configuration and how it came about."""

    config: TrainConfig
    source: str
    """The preset's name, or the file."""
    notices: tuple[str, ...] = ()
    """One line each, for the caller to print: old keys, and what was decided for the user."""
    given_paths: Mapping[str, GivenPath] = field(default_factory=dict)
    """Path key -> how it was written and what it was resolved against; `check_paths` quotes it."""


@dataclass(frozen=True, kw_only=True)
class _Layer:
    name: str
    base: Path
    values: Mapping[str, Any]
    lines: Mapping[str, int] = field(default_factory=dict)
    is_text: bool = False
    used_time: bool = False

    def where(self, key: str) -> str:
        return f"{self.name}, line {self.lines[key]}" if key in self.lines else self.name


def preset_names() -> list[str]:
    """The built-in presets, in alphabetical order."""
    return sorted(file.stem for file in PRESET_FOLDER.glob("*.py") if file.stem != "__init__")


def preset_summary(name: str) -> str:
    """The docstring of a preset: its command, hardware and expected result."""
    return _read_preset(name).docstring


def load_preset(name: str) -> TrainConfig:
    """A built-in preset as it stands, for ``replace(load_preset("h100"), key=value)``; paths stay relative."""
    values: dict[str, Any] = {}
    for layer in _preset_layers(name, base=Path()):
        values.update({key: convert(key, value) for key, value in layer.values.items()})
    return TrainConfig(**values)


def load_config(
    preset_or_file: str | Path,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    check: Literal["values", "all"] = "values",
) -> LoadedConfig:
    """The configuration of a preset's name, a settings file, a run's ``config.json`` or a run folder.

    That of a run is one for a new run: whether the old one was resumed is left out.

    Args:
        overrides: words of the command line (``--key value ...``), or a mapping of keys to Python values.
        check: ``values`` looks at the values alone; ``all`` also at the files and folders they name.

    Raises:
        UserError: one message with every unknown key, wrong value and broken rule.
    """
    layers = [*_source_layers(preset_or_file), _override_layer(overrides)]
    # The defaults hold one path, which starts from the same folder as those of the preset or file.
    defaults = _Layer(name="the defaults", base=layers[0].base, values={"output_dir": FIELDS["output_dir"].default})
    layers.insert(0, defaults)
    merging = _Merging()
    for layer in layers:
        merging.add(layer)
    merging.settle_switches()
    merging.settle_lengths()
    merging.settle_variant()
    config = TrainConfig(**merging.values)
    complaints = [*merging.complaints, *merging.variant_disagreements(config)]
    wrong_keys = {key for complaint in complaints for key in complaint.keys}
    found = value_complaints(config)
    if check == "all":
        found += path_complaints(config, merging.given)
    complaints += [complaint for complaint in found if not wrong_keys & set(complaint.keys)]
    raise_complaints(complaints, heading=str(preset_or_file))
    return LoadedConfig(
        config=config, source=str(preset_or_file), notices=tuple(merging.notices), given_paths=merging.given
    )


# where layers come from


OF_ONE_START = ("resume_from_checkpoint", "allow_changed_settings")
"""Settings that a run's ``config.json`` records, but that hold for that one start alone."""


def _source_layers(preset_or_file: str | Path) -> list[_Layer]:
    name = str(preset_or_file)
    if name in preset_names():
        return _preset_layers(name, base=project_of(Path.cwd()))
    path = Path(preset_or_file).expanduser()
    try:
        is_folder = path.is_dir()
        path = path / "config.json" if is_folder else path
        is_there = path.is_file()
    except PermissionError as refused:
        raise _unreadable(path, refused) from None
    if not is_there:
        raise MissingFileError(_nothing_there(name, is_folder=is_folder))
    text = _text_of(path)
    base = project_of(path.absolute().parent)
    if path.suffix == ".json":
        # A run's settings make a new run: that it was resumed once, and from where, is not one of them.
        values = {key: value for key, value in settings_in_json(text, origin=path).items() if key not in OF_ONE_START}
        return [_Layer(name=str(path), base=base, values=values)]
    settings = read_settings(text, file=path.absolute(), base=base)
    return _layers_of(settings, name=str(path), base=base)


def _nothing_there(name: str, *, is_folder: bool) -> str:
    known = preset_names()
    presets = f"The presets are {', '.join(known)}."
    if is_folder:
        return f"{name} is a folder without config.json, so it is no run's; name a preset, a file or a run. {presets}"
    preset = preset_of_old_file(name)
    if preset is not None:
        hint = f" The settings of this file are the preset {preset} now: name that in its place."
    else:
        hint = nearest_name(name, known)
    return f"there is no preset or file {name!r} (looked from {Path.cwd()}).{hint} {presets}"


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; it must be a settings file or a config.json.") from None
    except OSError as refused:
        raise _unreadable(path, refused) from None


def _unreadable(path: Path, refused: OSError) -> UserError:
    return UserError(f"{path} cannot be read ({refused.strerror}); mend its permissions, or name another file.")


def _read_preset(name: str) -> FileSettings:
    if name not in preset_names():
        known = preset_names()
        raise UserError(f"there is no preset {name!r}.{nearest_name(name, known)} The presets are {', '.join(known)}.")
    file = PRESET_FOLDER / f"{name}.py"
    return read_settings(file.read_text(encoding="utf-8"), file=file, base=PRESET_FOLDER)


def _preset_layers(name: str, *, base: Path) -> list[_Layer]:
    return _layers_of(_read_preset(name), name=f"preset {name}", base=base)


def _layers_of(settings: FileSettings, *, name: str, base: Path) -> list[_Layer]:
    start = _preset_layers(settings.derived_from, base=base) if settings.derived_from else []
    own = _Layer(name=name, base=base, values=settings.values, lines=settings.lines, used_time=settings.used_time)
    return [*start, own]


def _override_layer(overrides: Sequence[str] | Mapping[str, Any]) -> _Layer:
    if isinstance(overrides, Mapping):
        return _Layer(name="the overrides", base=Path.cwd(), values=overrides)
    return _Layer(name=COMMAND_LINE, base=Path.cwd(), values=parse_overrides(overrides), is_text=True)


# how layers become one


SWITCHES: Mapping[str, tuple[str, ...]] = {
    "use_ref_vae": ("encoder_loss_weight", "decoder_loss_weight"),
    "use_seraena": ("seraena_loss_weight",),
}
"""Switch -> the weights that mean nothing without it."""

BEGINNINGS = ("lr_warmup_steps", "seraena_start")
"""Steps of a run's beginning, which a shorter run cannot hold."""

BEGINNING_SHARE = 10
"""A run that is cut short has a beginning of a tenth of it."""

RIVALS: tuple[tuple[str, str], ...] = (("ref_vae_path", "cogvideox_model_path"),)
"""Two keys that name the same thing."""


class _Merging:
    """Collects layers into one set of values, with the complaints and notices on the way."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.complaints: list[Complaint] = []
        self.notices: list[str] = []
        self.given: dict[str, GivenPath] = {}
        self._set_in: dict[str, int] = {}
        self._stated: dict[str, tuple[Any, str]] = {}
        self._layers: list[_Layer] = []

    def add(self, layer: _Layer) -> None:
        self._layers.append(layer)
        if layer.used_time:
            self.notices.append(f"{layer.name}: times in names are those of the moment the run starts, by local clock.")
        for key, value in layer.values.items():
            if key in FIELDS:
                self._set(layer, key, value)
            elif key in OLD_KEYS:
                self.notices.append(notice_of(key))
            elif key in CHECKED_KEYS:
                self._stated[key] = (value, layer.where(key))
            else:
                nearest = f" Did you mean {OTHER_NAMES[key]!r}?" if key in OTHER_NAMES else nearest_name(key, FIELDS)
                text = f"there is no setting {key!r} ({layer.where(key)}).{nearest}"
                self.complaints.append(Complaint(keys=(key, *nearest.split("'")[1:2]), text=text))

    def _set(self, layer: _Layer, key: str, value: Any) -> None:
        try:
            known = convert_text(key, value) if layer.is_text and isinstance(value, str) else convert(key, value)
        except UserError as mistake:
            where = "" if layer.name == COMMAND_LINE else f" ({layer.where(key)})"
            self.complaints.append(Complaint(keys=(key,), text=f"{str(mistake)[:-1]}{where}."))
            return
        self._set_in[key] = len(self._layers) - 1
        self.values[key] = self._from_base(layer.base, key, known)

    def _from_base(self, base: Path, key: str, value: Any) -> Any:
        if key == "logging_dir":
            return value.expanduser()
        if value is None or key not in (*PATH_KEYS, *TEACHER_KEYS, "resume_from_checkpoint"):
            return value
        self.given[key] = GivenPath(text=str(value), base=base)
        if key in PATH_KEYS:
            return resolved(value, base)
        return resolved_teacher(value, base) if key in TEACHER_KEYS else resolved_checkpoint(value, base)

    def _is_later(self, key: str, other: str) -> bool:
        """Whether ``key`` was set in a later layer than ``other`` (which was set at all)."""
        return other in self._set_in and self._set_in.get(key, -1) > self._set_in[other]

    def _decide(self, key: str, value: Any, because: str) -> None:
        self.notices.append(f"{key} is set to {shown_value(value)}, because {because}.")
        self.values[key] = value

    def settle_switches(self) -> None:
        """Let a later layer win over what it contradicts in an earlier one, and say so."""
        for switch, weights in SWITCHES.items():
            on = self.values.get(switch, False)
            for weight in weights:
                if not on and self.values.get(weight, 0) > 0 and self._is_later(switch, weight):
                    self._decide(weight, 0.0, f"{self._layer_of(switch)} turns {switch} off")
            zeroed = [weight for weight in weights if self._is_later(weight, switch)]
            if on and zeroed and not any(self.values.get(weight, 0) for weight in weights):
                self._decide(switch, False, f"{self._layer_of(zeroed[0])} sets {' and '.join(weights)} to 0")
        for one, other in RIVALS:
            for newer, older in ((one, other), (other, one)):
                if self.values.get(newer) and self.values.get(older) and self._is_later(newer, older):
                    self._decide(older, None, f"{self._layer_of(newer)} names {newer}")
        sources = [
            key for key in ("data_root", "annotation_file", "index_path") if self._is_later(key, "use_sample_clips")
        ]
        if self.values.get("use_sample_clips") and any(self.values[key] for key in sources):
            self._decide("use_sample_clips", False, f"{self._layer_of(sources[0])} names {sources[0]}")

    def settle_lengths(self) -> None:
        """A later layer that shortens the run (to try it out) shortens its beginning too, where that would not fit."""
        if "max_train_steps" not in self._set_in:
            return
        steps = max(0, self.values["max_train_steps"])
        for key in BEGINNINGS:
            begins = self.values.get(key, FIELDS[key].default)
            is_older = self._set_in.get(key, -1) < self._set_in["max_train_steps"]
            if is_older and isinstance(begins, int) and begins >= steps:
                because = f"{self._layer_of('max_train_steps')} sets max_train_steps to {steps}"
                self._decide(key, steps // BEGINNING_SHARE, because)

    def _layer_of(self, key: str) -> str:
        return self._layers[self._set_in[key]].name

    def settle_variant(self) -> None:
        """Where no layer names the variant: the teacher does, else the weights to start from, else the default.

        A variant that a layer names for other weights than those of a later layer (a preset, and a file on the
        command line) is not said of these: where they speak against it, the user must say which it is.
        """
        weights = self.values.get("pretrained_model_path")
        presumed = self.values.get("variant")
        if presumed is None and self.values.get("cogvideox_model_path"):
            self._decide("variant", "taecvx", "cogvideox_model_path names a CogVideoX; set variant to say otherwise")
        elif weights is None or not is_seen(weights):
            return
        elif presumed is None or self._is_later("pretrained_model_path", "variant"):
            self._settle_variant_by(weights, presumed)

    def _settle_variant_by(self, weights: Path, presumed: str | None) -> None:
        from tinyvae.models.weights import find_weights, fitting_variants, read_weights, tell_variant

        keys = ("pretrained_model_path", "variant")
        try:
            file = find_weights(weights)
            state, stated = read_weights(file)
            found = tell_variant(state, stated=stated, variant=None, origin=file, presumed=presumed).name
        except UserError as mistake:
            self.complaints.append(Complaint(keys=keys, text=f"pretrained_model_path: {mistake}"))
            return
        if presumed is None:
            fitting = fitting_variants(state)
            because = f"the weights in {file} are of that network"
            if not stated.get("variant") and len(fitting) > 1:
                because = f"nothing tells which of {', '.join(fitting)} the weights in {file} are"
            self._decide("variant", found, f"{because}; set variant to say otherwise")
        elif found != presumed:
            text = (
                f"pretrained_model_path: the weights in {file} are {found}, and {self._layer_of('variant')} sets "
                f"variant to {presumed}; say which to train with --variant."
            )
            self.complaints.append(Complaint(keys=keys, text=text))

    def variant_disagreements(self, config: TrainConfig) -> list[Complaint]:
        """Old keys that the variant decides now, where a file has another value."""
        try:
            spec = config.spec
        except UserError:
            return []  # the unknown variant is a complaint of its own
        complaints = []
        for key, (value, where) in self._stated.items():
            right = getattr(spec, CHECKED_KEYS[key])
            if str(value) == str(right):
                self.notices.append(f"{key} is not a setting any more: variant={spec.name} decides it ({right}).")
            else:
                text = f"{key}={value} ({where}) does not fit variant={spec.name}, whose {key} is {right}; mend one."
                complaints.append(Complaint(keys=(key,), text=text))
        return complaints
