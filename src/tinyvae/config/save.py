"""A configuration as JSON (a run's ``config.json``) and as the plain values that trackers accept."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from tinyvae import __version__
from tinyvae.config.old_files import OLD_KEYS
from tinyvae.config.schema import FIELDS, TrainConfig
from tinyvae.config.values import convert
from tinyvae.errors import UserError

RUN_FORMAT = "tinyvae-run"
"""States that a ``config.json`` is a run's: `tinyvae.models.weights` takes ``variant`` and ``model_width`` from it."""

NOT_SETTINGS = ("format", "tinyvae_version")


def to_json(config: TrainConfig) -> str:
    """The whole configuration as JSON text; `from_json` reads it back to an equal one."""
    settings = {key: json_value(getattr(config, key)) for key in FIELDS}
    return json.dumps({"format": RUN_FORMAT, "tinyvae_version": __version__, **settings}, indent=1) + "\n"


def from_json(text: str, *, origin: Path | str = "the configuration") -> TrainConfig:
    """The configuration in JSON text. Keys that are missing take their defaults, old ones are passed over, and unknown
    ones are refused."""
    settings = {key: value for key, value in settings_in_json(text, origin=origin).items() if key not in OLD_KEYS}
    unknown = [key for key in settings if key not in FIELDS]
    if unknown:
        raise UserError(
            f"{origin} has settings that do not exist here: {', '.join(unknown)}; it may be of another version."
        )
    return TrainConfig(**{key: convert(key, value) for key, value in settings.items()})


def settings_in_json(text: str, *, origin: Path | str) -> dict[str, Any]:
    """Key -> JSON value of a run's ``config.json``."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as fault:
        raise UserError(f"{origin} is not valid JSON ({fault}); mend it, or start from a preset.") from None
    if not isinstance(content, dict) or content.get("format") != RUN_FORMAT:
        raise UserError(
            f"{origin} is not the config.json of a run (no format {RUN_FORMAT!r}); name one of a run folder."
        )
    return {key: value for key, value in content.items() if key not in NOT_SETTINGS}


def json_value(value: Any) -> Any:
    """A value as JSON knows it: paths and times become text, tuples lists, and what is inside them alike."""
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_value(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def flat_for_tracker(config: TrainConfig | Mapping[str, Any]) -> dict[str, int | float | str | bool]:
    """The configuration as a tracker's hyper-parameters: numbers, bools and text only, one entry for each key.

    Trackers refuse None, tuples, dictionaries, paths and times. Nested values get a dotted key, lists become text.
    """
    settings = {key: getattr(config, key) for key in FIELDS} if isinstance(config, TrainConfig) else config
    flat: dict[str, int | float | str | bool] = {}
    for key, value in settings.items():
        plain = json_value(value)
        if isinstance(plain, dict):
            flat.update({f"{key}.{name}": item for name, item in flat_for_tracker(plain).items()})
        elif isinstance(plain, bool | int | float | str):
            flat[key] = plain
        else:
            flat[key] = "none" if plain is None else ", ".join(map(str, plain))
    return flat
