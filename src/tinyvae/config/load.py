"""From a preset, a settings file or a run's config.json, and the command line, to one checked `TrainConfig`.

Settings come in layers: the defaults, the preset that a file starts from, the file, the command line. A later layer
wins, also over what it contradicts, and says so. Inside one layer a contradiction is a mistake.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import itertools
import json
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_origin

from tinyvae.config import old_files, rules
from tinyvae.config.old_files import Settings
from tinyvae.config.rules import Complaint, GivenPath
from tinyvae.config.schema import FIELDS, RUN_FORMAT, TrainConfig, kinds_of, path_keys, shown_value
from tinyvae.config.variant import TEACHER_KEYS, variant_of_teacher, variant_of_weights
from tinyvae.errors import MissingFileError, UserError, closed_paths_told, nearest_name
from tinyvae.files import home_folder
from tinyvae.models.variants import VARIANTS
from tinyvae.storage import Url

PRESET_FOLDER = Path(__file__).resolve().parent / "presets"
PROJECT_MARKERS = (".git", ".hg", "pyproject.toml", "setup.py", "setup.cfg", "environment.yml", "requirements.txt")
LARGEST_FILE = 2**20  # bytes; a larger file is something else, such as a video or weights
TEACHER_NAMES = ("teacher", "cogvideox_model_path")  # other names of ref_vae_path, which say more than the path
SWITCH_WORDS = ("true", "false", "yes", "no", "on", "off", "1", "0")


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A configuration, the preset or file it comes from, lines to print, and how each path key was written."""

    config: TrainConfig
    source: str
    notices: tuple[str, ...] = ()
    given_paths: Mapping[str, GivenPath] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Settings that were written in one place. ``base``: the folder that their relative paths start from."""

    name: str
    base: Path
    values: Mapping[str, Any]
    lines: Mapping[str, int] = field(default_factory=dict)

    def where(self, key: str) -> str:
        return f"{self.name}, line {self.lines[key]}" if key in self.lines else self.name


def preset_names() -> list[str]:
    """The built-in presets, in alphabetical order."""
    return sorted(file.stem for file in PRESET_FOLDER.glob("*.py"))


def preset_summary(name: str) -> str:
    """The docstring of a preset: its command, hardware and expected result."""
    return ast.get_docstring(ast.parse((PRESET_FOLDER / f"{name}.py").read_text(encoding="utf-8"))) or ""


def load_preset(name: str) -> TrainConfig:
    """A built-in preset as it stands; its paths stay relative.

    Example: ``dataclasses.replace(load_preset("h100"), max_train_steps=5_000)``
    """
    layers = _preset_layers(name, base=Path.cwd())
    return TrainConfig(**{key: rules.convert(key, value) for layer in layers for key, value in layer.values.items()})


@closed_paths_told()
def load_config(preset_or_file: str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> LoadedConfig:
    """The configuration of a preset's name, a settings file, a run's ``config.json`` or a run folder (for a new run).

    ``overrides``: words of the command line (``--key value ...``), or a mapping of keys to values. One `UserError`
    lists every unknown key, wrong value and broken rule. `rules.check_config` looks at the files that are named.

    Example: ``load_config("scratch", ["--data_root", "clips", "--max_train_steps", "500"]).config``
    """
    layers = _source_layers(preset_or_file)
    # The defaults hold one path, which starts from the same folder as those of the preset or file.
    defaults = Layer(name="the defaults", base=layers[0].base, values={"output_dir": FIELDS["output_dir"].default})
    names, values = ([], overrides) if isinstance(overrides, Mapping) else parse_words(overrides)
    if names:
        raise UserError(f"{names[0]!r} is not a setting; settings are written as --key value.")
    merging = _Merging([defaults, *layers, Layer(name="the command line", base=Path.cwd(), values=values)])
    config = TrainConfig(**merging.values)
    if config.resume_from_checkpoint == "latest" and "output_dir" not in values:
        config = _of_named_run(config, preset_or_file)
    complaints = [*merging.complaints, *merging.disagreements(config)]
    wrong_keys = {key for complaint in complaints for key in complaint.keys}
    found = rules.value_complaints(config)
    complaints += [complaint for complaint in found if not wrong_keys & set(complaint.keys)]
    rules.raise_complaints(complaints, heading=str(preset_or_file))
    notices = tuple(merging.notices)
    return LoadedConfig(config=config, source=str(preset_or_file), notices=notices, given_paths=merging.given)


# where layers come from


def _of_named_run(config: TrainConfig, source: str | Path) -> TrainConfig:
    """The settings with ``--resume latest`` of a run whose folder (or config.json) is named: that run goes on there.

    Else ``latest`` would look where the run once was, and among the newer runs of the same experiment.
    """
    place = Path(os.path.expanduser(source))
    folder = Path(os.path.realpath(place if os.path.isdir(place) else place.parent))
    is_run = str(source) not in preset_names() and (os.path.isdir(place) or place.name == "config.json")
    if not is_run or not any(folder.glob("*checkpoint-*")):
        return config
    return dataclasses.replace(config, resume_from_checkpoint=str(folder), output_dir=folder)


def project_of(folder: Path) -> Path:
    """The nearest folder at or above with a project marker (never the home folder or the root); else ``folder``."""
    folder, home = Path(os.path.abspath(folder)), home_folder()
    for candidate in (folder, *folder.parents):
        if candidate in (home, Path(candidate.anchor)):
            break
        if any((candidate / marker).exists() for marker in PROJECT_MARKERS):
            return candidate
    return folder


def _source_layers(preset_or_file: str | Path) -> list[Layer]:
    name = str(preset_or_file)
    if name in preset_names():
        return _preset_layers(name, base=project_of(Path.cwd()))
    path = _with_home(Path(preset_or_file), name)
    try:
        is_folder = path.is_dir()
        path = path / "config.json" if is_folder else path
        if not path.is_file():
            raise MissingFileError(_nothing_there(name, is_folder=is_folder))
        if path.suffix in (".yaml", ".yml"):
            what = "YAML, and settings are written in Python, as in examples/my_settings.py"
            raise UserError(f"{path} is {what}; a launch file goes to: accelerate launch --config_file.")
        if path.stat().st_size > LARGEST_FILE:
            raise UserError(f"{path} is too large for settings ({path.stat().st_size:,} bytes); name another file.")
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; it must be a settings file or a config.json.") from None
    except MissingFileError:
        raise  # also an OSError
    except OSError as fault:
        raise UserError(f"{path} cannot be read ({fault.strerror}); fix its permissions, or name another.") from None
    base = project_of(path.absolute().parent)
    if path.suffix == ".json":
        return [Layer(name=str(path), base=base, values=_settings_in_json(text, path))]
    return _file_layers(path.absolute(), text, name=str(path), base=base)


def _nothing_there(name: str, *, is_folder: bool) -> str:
    presets = f"The presets are {', '.join(preset_names())}."
    if is_folder:
        return f"{name} is a folder without config.json, so it is no run's; name a preset, a file or a run. {presets}"
    preset = old_files.preset_of_old_file(name)
    hint = f" The settings of this file are the preset {preset} now: name that in its place." if preset else ""
    hint = hint or nearest_name(name, preset_names())
    return f"there is no preset or file {name!r} (looked from {Path.cwd()}).{hint} {presets}"


def _settings_in_json(text: str, file: Path) -> dict[str, Any]:
    """Key -> value of a run's ``config.json``, without what holds for one start alone."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as fault:
        raise UserError(f"{file} is not valid JSON ({fault}); fix it, or start from a preset.") from None
    if not isinstance(content, dict) or content.get("format") != RUN_FORMAT:
        way_out = "name one of a run folder"
        if "checkpoint-" in file.parent.name:
            way_out = f"to go on from this checkpoint: tinyvae train {file.parent.parent} --resume {file.parent}"
        raise UserError(f"{file} is not the config.json of a run (no format {RUN_FORMAT!r}); {way_out}.")
    left_out = ("format", "tinyvae_version", "resume_from_checkpoint", "allow_changed_settings")
    return {key: value for key, value in content.items() if key not in left_out}


def parse_words(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """(words that are no setting, key -> text or bool), from ``--key value``, ``--key=value``, ``--key a b``,
    ``--switch`` and ``--no-switch``. Dashes inside a key may stand for underscores. The last of several values counts.

    Example: ``parse_words(["--seed", "1", "quickstart"]) == (["quickstart"], {"seed": "1"})``
    """
    names: list[str] = []
    settings: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            names.append(word)
            continue
        name, equals, text = word[2:].partition("=")
        key = name.replace("-", "_")
        if key not in FIELDS and key.removeprefix("no_") in FIELDS:
            key = key.removeprefix("no_")
            if bool not in kinds_of(key):
                raise UserError(f"--{name}: {key} is not a switch; write --{key} VALUE.")
            if equals:
                raise UserError(f"--{name} takes no value; write --{key} false instead.")
            settings[key] = False
            continue
        kinds = kinds_of(key) if key in FIELDS else ()
        is_known = bool(kinds) or key in old_files.OLD_NAMES
        # As many words as the key takes values. Of a list without end one word, or it would swallow a preset's name.
        lengths = (len(get_args(kind)) for kind in kinds if get_origin(kind) is tuple and ... not in get_args(kind))
        most = next(lengths, 1)
        values = [text] if equals else []
        while not equals and rest and len(values) < most and not rest[0].startswith("--"):
            if bool in kinds and rest[0].lower() not in SWITCH_WORDS:
                break
            if not is_known and rest[0] in preset_names():
                break  # a mistyped switch in front of the preset
            values.append(rest.pop(0))
        if is_known and not values and bool not in kinds:
            raise UserError(f"--{key} needs a value.")
        settings[key] = " ".join(values) if values else True  # an unknown key is complained of later
    return names, settings


# settings files


def _preset_layers(name: str, *, base: Path) -> list[Layer]:
    if name not in preset_names():
        known = preset_names()
        raise UserError(f"there is no preset {name!r}.{nearest_name(name, known)} The presets are {', '.join(known)}.")
    file = PRESET_FOLDER / f"{name}.py"
    *below, own = _file_layers(file, file.read_text(encoding="utf-8"), name=f"preset {name}", base=base)
    named_after = {"output_dir": Path(f"output/{name}_%Y-%m-%d_%H-%M-%S"), "tracker_name": name}
    return [*below, dataclasses.replace(own, values=named_after | dict(own.values))]


def _file_layers(file: Path, text: str, *, name: str, base: Path) -> list[Layer]:
    """Run a settings file: the layers of the preset that it starts from, and its own."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as fault:  # the last two: brackets without end
        line = f", line {fault.lineno}" if isinstance(fault, SyntaxError) else ""
        raise UserError(f"{file}{line} is not valid Python ({str(fault) or 'too deep'}); fix it.") from None
    ran = _run(file, base)
    args, config = ran.get("args"), ran.get("config")
    found = config if isinstance(config, Settings | TrainConfig) else args
    if found is config and args:
        raise UserError(f"{file} sets both args and config; write all settings into one of them.")
    holds_settings = isinstance(found, Mapping) or hasattr(found, "__dict__")  # EasyDict and its like, or a namespace
    if not holds_settings or not (found or getattr(found, "below", ())):
        raise UserError(f"{file} sets neither args nor config; write `args.key = value` (docs/configuration.md).")
    named = found if isinstance(found, Mapping) else vars(found)
    values = {str(key): value for key, value in named.items() if not str(key).startswith("__")}
    if isinstance(found, TrainConfig):
        values = {key: value for key, value in values.items() if key in FIELDS and value != FIELDS[key].default}
    return [*getattr(found, "below", ()), Layer(name=name, base=base, values=values, lines=_lines_of(tree))]


def _lines_of(tree: ast.AST) -> dict[str, int]:
    """Key -> the last line that sets it, by ``args.key = value`` or by ``key=value`` in a call."""
    lines: dict[str, int] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=key, ctx=ast.Store(), lineno=line) | ast.keyword(arg=str(key), lineno=line):
                lines[key] = max(line, lines.get(key, 0))
    return lines


def _run(file: Path, base: Path) -> dict[str, Any]:
    """The variables that a settings file leaves. Whatever it raises becomes one sentence."""
    try:
        with _surroundings(file.parent, base):
            return runpy.run_path(str(file), init_globals={"args": Settings()}, run_name="settings")
    except (Exception, SystemExit) as fault:  # noqa: BLE001  (it is the user's program, which may raise anything)
        places = [frame.lineno for frame in traceback.extract_tb(fault.__traceback__) if frame.filename == str(file)]
        line = f", line {places[-1]}" if places else ""
        if isinstance(fault, UserError):
            raise UserError(f"{file}{line}: {fault}") from None
        what = " ".join(traceback.format_exception_only(fault)[-1].split())
        raise UserError(f"{file}{line} stops with {what}; fix it: a settings file is a program and is run.") from None


@contextlib.contextmanager
def _surroundings(folder: Path, base: Path) -> Iterator[None]:
    """What a settings file finds: its folder on ``sys.path``, ``base`` as working directory, and, only there, changed
    modules: times are patterns, and `TrainConfig` keeps what is written, right or wrong, for the checks.
    """

    def start_from(name: str) -> Settings:
        return Settings().above(_preset_layers(name, base=base))

    def replace(start: Any, **changes: Any) -> Any:
        is_ours = isinstance(start, Settings)
        return Settings(start | changes).above(start.below) if is_ours else dataclasses.replace(start, **changes)

    ours = old_files.changed_module(sys.modules["tinyvae.config"], TrainConfig=Settings, load_preset=start_from)
    modules = {**old_files.modules_for_files(), "dataclasses": old_files.changed_module(dataclasses, replace=replace)}
    modules |= dict.fromkeys((f"tinyvae.config{end}" for end in ("", ".schema", ".load", "_files")), ours)
    loaded, path, plain_import = set(sys.modules), sys.path.copy(), builtins.__import__

    def changed_import(name: str, *scope: Any, **more: Any) -> ModuleType:  # globals, locals, fromlist, level
        importer = str(scope[0].get("__file__")) if scope and scope[0] else ""
        if name in modules and Path(importer).parent == folder and ("." not in name or any(scope[2:3])):
            return modules[name]
        return plain_import(name, *scope, **more)

    sys.path.insert(0, str(folder))
    builtins.__import__ = changed_import
    try:
        with contextlib.chdir(base):
            yield
    finally:
        builtins.__import__ = plain_import
        sys.path[:] = path
        for name in set(sys.modules) - loaded:  # another file may have other neighbors of the same names
            package = name.partition(".")[0]
            place = getattr(sys.modules.get(package), "__file__", None)
            if package not in loaded and place is not None and folder in Path(place).parents[:2]:
                del sys.modules[name]


# how layers become one


class _Merging:
    """All layers as one set of values, with the complaints and notices on the way."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.values: dict[str, Any] = {}
        self.complaints: list[Complaint] = []
        self.notices: list[str] = []
        self.given: dict[str, GivenPath] = {}
        self._set_in: dict[str, int] = {}
        self._stated: dict[str, tuple[Any, str]] = {}
        self._layers = layers
        for number, layer in enumerate(layers):
            for key, value in layer.values.items():
                self._add(number, layer, key, value)
        self._settle_switches()
        self._settle_lengths()
        self._settle_sizes()
        self._settle_variant()
        self._settle_frames()

    def _add(self, number: int, layer: Layer, key: str, value: Any) -> None:
        if key in TEACHER_NAMES:
            if value in (None, "", "none") and key == "cogvideox_model_path":  # as in the config.json of earlier runs
                return
            self._add_teacher(number, layer, key, value)
        if key in old_files.OLD_KEYS:
            self.notices.append(f"{key} is not a setting any more: {old_files.OLD_KEYS[key]}.")
        elif key in old_files.CHECKED_KEYS:
            self._stated[key] = (value, layer.where(key))
        elif old_files.ALIASES.get(key, key) in FIELDS:
            self._set(number, layer, key, value)
        else:
            near = nearest_name(old_files.OTHER_NAMES.get(key, key), FIELDS)
            text = f"there is no setting {key!r} ({layer.where(key)}).{near}"
            self._complain((key, *near.split("'")[1:2]), text)  # rules about the key that was meant are not told too

    def _add_teacher(self, number: int, layer: Layer, key: str, value: Any) -> None:
        """What another name of ``ref_vae_path`` says besides the path."""
        others = [name for name in ("ref_vae_path", *TEACHER_NAMES) if name != key and name in layer.values]
        if any(layer.values[name] not in (None, value) for name in others):
            text = f"{others[0]} and {key} ({layer.where(key)}) name two teachers; leave one of them out."
            self._complain(("ref_vae_path",), text)
        if key == "teacher":
            self._set(number, layer, "use_ref_vae", str(value).lower() not in ("", "none", "null"))
        elif layer.values.get("ref_vae_type") is None:
            self._add(number, layer, "ref_vae_type", "cogvideox")

    def _complain(self, keys: tuple[str, ...], text: str) -> None:
        self.complaints.append(Complaint(keys=keys, text=text))

    def _set(self, number: int, layer: Layer, written: str, value: Any) -> None:
        key = old_files.ALIASES.get(written, written)
        where = f" ({layer.where(written)})"
        try:
            value = rules.convert(key, value, where)
            if value is not None and key in (*path_keys(), "ref_vae_path", "resume_from_checkpoint"):
                self.given[key] = GivenPath(key=written, text=str(value), base=layer.base)
                value = resolved(key, value, layer.base, where)
        except UserError as mistake:
            self._complain((key,), str(mistake))
            return
        self._set_in[key] = number
        self.values[key] = value

    def _is_later(self, key: str, other: str) -> bool:
        """Whether ``key`` was set in a later layer than ``other`` (which was set at all)."""
        return other in self._set_in and self._set_in.get(key, -1) > self._set_in[other]

    def _layer_of(self, key: str) -> str:
        return self._layers[self._set_in[key]].name

    def _decide(self, key: str, value: Any, because: str) -> None:
        self.notices.append(f"{key} is set to {shown_value(value)}, because {because}.")
        self.values[key] = value

    def _settle_switches(self) -> None:
        """A later layer wins over what it contradicts in an earlier one."""
        values = self.values
        for switch, weights in rules.SWITCHES.items():
            for weight in weights:
                is_on = values.get(switch) or (switch == "use_ref_vae" and values.get("latent_store"))
                if not is_on and values.get(weight, 0) > 0 and self._is_later(switch, weight):
                    self._decide(weight, 0.0, f"{self._layer_of(switch)} turns {switch} off")
            zeroed = [weight for weight in weights if self._is_later(weight, switch)]
            if values.get(switch) and zeroed and not any(values.get(weight, 0) for weight in weights):
                self._decide(switch, False, f"{self._layer_of(zeroed[0])} sets {' and '.join(weights)} to 0")
        if values.get("ref_vae_type") and self._is_later("ref_vae_path", "ref_vae_type"):
            self._decide("ref_vae_type", None, f"{self._layer_of('ref_vae_path')} names another ref_vae_path")
        for key in ("data_root", "annotation_file", "index_path"):
            if values.get("use_sample_clips") and values.get(key) and self._is_later(key, "use_sample_clips"):
                self._decide("use_sample_clips", False, f"{self._layer_of(key)} names {key}")
                if not self._is_later("data_root", "use_sample_clips"):  # a list's paths do not start from these clips
                    self._decide("data_root", None, f"{self._layer_of(key)} names {key}")
        is_off = not values.get("random_crop", True) and self._is_later("random_crop", "crop_candidates")
        if is_off and values["crop_candidates"] > 1:
            self._decide("crop_candidates", 1, f"{self._layer_of('random_crop')} turns random_crop off")
        listed = "annotation_file"  # of an index and a list, the index is read
        if values.get("index_path") and values.get(listed) and self._is_later(listed, "index_path"):
            self._decide("index_path", None, f"{self._layer_of(listed)} names {listed}")

    def _settle_lengths(self) -> None:
        """A layer that shortens the run (to try it out) cuts its beginning to a tenth too, where it does not fit."""
        steps = self.values.get("max_train_steps", FIELDS["max_train_steps"].default)
        for key in ("lr_warmup_steps", "seraena_start"):
            begins = self.values.get(key, FIELDS[key].default)
            is_older = self._set_in.get(key, -1) < self._set_in.get("max_train_steps", -1)
            if is_older and isinstance(begins, int) and begins >= steps:
                self._decide(key, steps // 10, f"{self._layer_of('max_train_steps')} sets max_train_steps to {steps}")

    def _settle_sizes(self) -> None:
        """One size and ``resolutions`` exclude each other: the later layer wins; in one layer they must agree."""
        if not self.values.get("resolutions"):
            return
        sizes = TrainConfig(resolutions=self.values["resolutions"]).sizes
        largest, first = sizes.largest, sizes.stages[0].sizes[0]
        others = [key for key, number in largest._asdict().items() if self.values.get(key, number) != number]
        if not others:
            return
        if later := [key for key in others if self._is_later(key, "resolutions")]:
            self._decide("resolutions", (), f"{self._layer_of(later[0])} sets {later[0]}")
            self.values = first._asdict() | self.values  # what nobody sets is as in the first steps
        elif both := [key for key in others if not self._is_later("resolutions", key)]:
            text = f"{both[0]}={self.values[both[0]]} and resolutions ({self._layer_of(both[0])}) exclude each other; "
            self._complain(
                (*both, "resolutions"), text + "leave one out (validation_height is the size of validations)."
            )
        else:
            because = f"that is the largest of the resolutions that {self._layer_of('resolutions')} sets"
            self.notices.append(f"the size for validation and messages is {largest}, because {because}.")

    def _settle_variant(self) -> None:
        """Where no layer names the variant: the teacher does, else the weights to start from, else the default."""
        weights, presumed = self.values.get("pretrained_model_path"), self.values.get("variant")
        if presumed is None:
            self._settle_variant_by_teacher()
            presumed = self.values.get("variant")
        if weights is None or not os.path.exists(weights):
            return
        if presumed is None or self._is_later("pretrained_model_path", "variant"):
            try:
                told = variant_of_weights(weights, presumed, self._layer_of("variant") if presumed else "")
            except UserError as mistake:
                self._complain(("pretrained_model_path", "variant"), f"pretrained_model_path: {mistake}")
            else:
                if told is not None:
                    self._decide("variant", told.name, told.because)

    def _settle_variant_by_teacher(self) -> None:
        try:
            told = variant_of_teacher(self.values)
        except UserError as mistake:
            self._complain(("variant", *TEACHER_KEYS), str(mistake))
            return
        if told is None:
            return
        self._decide("variant", told.name, told.because)

    def _settle_frames(self) -> None:
        """Clips of lengths that the variant does not take give way, where a later layer names it or what tells it."""
        variant, several = self.values.get("variant"), self.values.get("resolutions")
        if variant not in VARIANTS:
            return
        lengths = [self.values.get("n_frames", FIELDS["n_frames"].default)]
        if several:
            lengths = [size.n_frames for size in TrainConfig(resolutions=several).sizes.sizes]
        fits, told_by = VARIANTS[variant].is_training_length, ("variant", "pretrained_model_path", *TEACHER_KEYS)
        told_in = max(self._set_in.get(key, -1) for key in told_by)
        set_in = self._set_in.get("resolutions" if several else "n_frames", -1)
        if set_in < told_in and not all(map(fits, lengths)):
            because = f"{variant} takes no clips of {next(n for n in lengths if not fits(n))} frames"
            if several:
                self._decide("resolutions", (), because)
            fitting = next(length for length in itertools.count(min(lengths)) if fits(length))
            self._decide("n_frames", fitting, because)

    def disagreements(self, config: TrainConfig) -> Iterator[Complaint]:
        """Old keys that the variant decides now, where a file has another value."""
        try:
            spec = config.spec
        except UserError:
            return  # the unknown variant is a complaint of its own
        for key, (value, where) in self._stated.items():
            right = getattr(spec, key)
            if str(value) == str(right):
                self.notices.append(f"{key} is not a setting any more: variant={spec.name} decides it ({right}).")
            else:
                text = f"{key}={value} ({where}) does not fit variant={spec.name}, whose {key} is {right}; fix one."
                yield Complaint(keys=(key,), text=text)


def resolved(key: str, value: Any, base: Path, where: str) -> Any:
    """A path from ``base``, absolute and without ``..``; links stay. Kept as written: a URL, ``logging_dir``, the bare
    name of a checkpoint, and a teacher's ``owner/name`` where neither it nor ``owner`` is a folder here. ``where`` is
    for the message.
    """
    if isinstance(value, Url):
        return value
    path = _with_home(Path(value), f"{key}={value}{where}")
    here = Path(os.path.normpath(base / path))
    if key == "logging_dir":
        return path
    if key == "resume_from_checkpoint":
        return value if len(path.parts) == 1 and not value.startswith(("~", ".")) else str(here)
    if key == "ref_vae_path":
        is_hub_name = len(Path(value).parts) == 2 and not value.startswith(("~", ".", "/"))
        return value if is_hub_name and not os.path.exists(here) and not here.parent.is_dir() else str(here)
    return here


def _with_home(path: Path, named: str) -> Path:
    """A path with ``~`` or ``~user`` filled in; ``named`` begins the message."""
    try:
        return path.expanduser()
    except RuntimeError:
        text = f"{named}: there is no home folder {path.parts[0]} on this machine"
        raise UserError(f"{text}; write the whole path.") from None
