"""From what a user wrote to what a `TrainConfig` key holds: Python values of files, text of the command line.

The types are those of the dataclass; a value of another type is refused with what to write instead. Nothing is
guessed: the text "10" in a file is not the number 10.
"""

from __future__ import annotations

import math
import operator
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Literal, get_args, get_origin

from tinyvae.config.schema import field_types
from tinyvae.errors import UserError, nearest_name

TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")
NONE_WORDS = ("none", "null", "")

OTHER_SPELLINGS: Mapping[str, Mapping[str, str]] = {
    "mixed_precision": {"fp32": "no", "float32": "no", "float16": "fp16", "bfloat16": "bf16"},
    "ref_vae_dtype": {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"},
    "metric_for_best_model": {"reconstruction_loss": "mse"},
}
"""Key -> values that mean the same as one of ours, as other trainers' files write them."""

NONE_MEANS: Mapping[str, Any] = {
    "report_to": "none",
    "mixed_precision": "no",
    "max_grad_norm": 0.0,
    "early_stopping_patience": 0,
    "validation_steps": 0,
}
"""Key -> its value for "none of it", where other trainers' files write None."""

JITTER_NAMES = ("brightness", "contrast", "saturation", "hue")


LIMIT_WORDS: Mapping[str, tuple[str, Callable[[float, float], bool]]] = {
    "at_least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "at_most": ("at most", operator.le),
    "below": ("below", operator.lt),
}
"""Limit of an `option` -> its words, and the comparison that a number must pass (NaN passes none)."""


class _NotThisTypeError(Exception):
    """The value does not fit one alternative of a type; the argument says what would."""


def convert(key: str, value: Any) -> Any:
    """A Python value as ``key`` holds it (1e4 for an int is 10000, a list for a tuple is a tuple, text is a path).

    Raises:
        UserError: naming the key, the value and what it must be.
    """
    if key == "color_jitter_params" and isinstance(value, Mapping):
        value = _jitter_from_names(value)
    if value is None and key in NONE_MEANS:
        return NONE_MEANS[key]
    try:
        return _convert(key, value, field_types()[key])
    except _NotThisTypeError as fault:
        raise UserError(f"{key}={value!r} must be {fault}.") from None


def convert_text(key: str, text: str) -> Any:
    """The words of the command line as ``key`` holds them; ``none`` where the key may be empty, ``a,b`` for tuples."""
    return convert(key, _python_value(key, text.strip()))


def is_bool(key: str) -> bool:
    return field_types()[key] is bool


def is_tuple(key: str) -> bool:
    return get_origin(field_types()[key]) is tuple


def may_be_none(key: str) -> bool:
    return type(None) in _alternatives(field_types()[key])


def type_in_words(key: str) -> str:
    """What a key takes, for help texts: ``int``, ``mse|l1|charbonnier``, ``path or none``, ``2 floats``."""
    return " or ".join(_in_words(kind) for kind in _alternatives(field_types()[key]))


def within(value: Any, limits: Mapping[str, float | None]) -> bool:
    """Whether a number, or each number of a tuple, lies in a range; None and words always do."""
    given = [(LIMIT_WORDS[name][1], limit) for name, limit in limits.items() if limit is not None]
    return all(
        math.isfinite(number) and passes(number, limit) for number in numbers_in(value) for passes, limit in given
    )


def numbers_in(value: Any) -> list[float]:
    """The numbers of a value: itself, those of a tuple, none of a word."""
    values = value if isinstance(value, tuple) else (value,)
    return [number for number in values if isinstance(number, int | float) and not isinstance(number, bool)]


def limits_in_words(limits: Mapping[str, float | None]) -> str:
    """``above 0 and at most 1``; empty where there is no limit."""
    return " and ".join(
        f"{LIMIT_WORDS[name][0]} {shown_value(limit)}" for name, limit in limits.items() if limit is not None
    )


def shown_value(value: Any) -> str:
    """A value as a user would write it on the command line."""
    if isinstance(value, tuple | list):
        return ",".join(map(shown_value, value))
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"{len(get_args(kind))} {get_args(kind)[0].__name__}s"
    return {type(None): "none", Path: "path", str: "text"}.get(kind) or kind.__name__


def _convert(key: str, value: Any, kind: Any) -> Any:
    alternatives = _alternatives(kind)
    if (value is None or value == "") and type(None) in alternatives:
        return None  # an empty text names nothing; as a path it would be the base folder
    faults: list[str] = []
    for alternative in alternatives:
        if alternative is type(None):
            faults.append("none")
            continue
        try:
            return _convert_one(key, value, alternative)
        except _NotThisTypeError as fault:
            faults.append(str(fault))
    raise _NotThisTypeError(" or ".join(faults))


def _convert_one(key: str, value: Any, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        return _convert_choice(key, value, get_args(kind))
    if get_origin(kind) is tuple:
        return _convert_tuple(value, get_args(kind))
    if kind is bool:
        return _convert_bool(value)
    if kind is int:
        return _convert_int(value)
    if kind is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise _NotThisTypeError("a number")
    if kind is Path:
        if isinstance(value, str | PurePath) and str(value):
            return Path(value)
        raise _NotThisTypeError("a path")
    assert kind is str, kind
    if isinstance(value, str | PurePath):
        return str(value)
    raise _NotThisTypeError("text")


def _convert_choice(key: str, value: Any, choices: tuple[Any, ...]) -> Any:
    value = OTHER_SPELLINGS.get(key, {}).get(value, value) if isinstance(value, str) else value
    if value in choices:
        return value
    nearest = nearest_name(str(value), choices)
    raise _NotThisTypeError("one of " + ", ".join(map(str, choices)) + (f" ({nearest.strip()})" if nearest else ""))


def _convert_tuple(value: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    wanted = f"{len(kinds)} numbers"
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != len(kinds):
        raise _NotThisTypeError(wanted)
    try:
        return tuple(_convert_one("", item, kind) for item, kind in zip(value, kinds, strict=True))
    except _NotThisTypeError:
        raise _NotThisTypeError(wanted) from None


def _convert_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise _NotThisTypeError("true or false")


def _convert_int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise _NotThisTypeError("a whole number")


def _jitter_from_names(named: Mapping[Any, Any]) -> tuple[Any, ...]:
    unknown = [str(name) for name in named if name not in JITTER_NAMES]
    if unknown:
        known = ", ".join(JITTER_NAMES)
        raise UserError(f"color_jitter_params has no part {', '.join(unknown)}; its parts are {known}.")
    return tuple(named.get(name, 0.0) for name in JITTER_NAMES)


def _python_value(key: str, text: str) -> Any:
    """The Python value that command-line text means for a key; text that means none of its types stays text."""
    alternatives = _alternatives(field_types()[key])
    if text.lower() in NONE_WORDS and (type(None) in alternatives or key in NONE_MEANS):
        return None
    if bool in alternatives and text.lower() in TRUE_WORDS + FALSE_WORDS:
        return text.lower() in TRUE_WORDS
    if any(get_origin(alternative) is tuple for alternative in alternatives):
        parts = text.strip("()[]").replace(",", " ").split()
        return tuple(_number(part) for part in parts)
    if any(alternative in (int, float) for alternative in alternatives):
        return _number(text)
    return text


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
