"""The command line's ``--key value`` words as settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinyvae.config.old_files import CHECKED_KEYS, OLD_KEYS
from tinyvae.config.schema import FIELDS
from tinyvae.config.values import is_bool, is_tuple
from tinyvae.errors import UserError

SHORT_FORMS: Mapping[str, str] = {"resume": "resume_from_checkpoint"}
"""Short form -> key."""


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Key -> text (or bool), from ``--key value``, ``--key=value``, ``--key`` and ``--no-key`` (for switches).

    Dashes inside a key may stand for underscores. The last of several values counts. Text is turned into values
    later, where the key's type is known.
    """
    settings: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise UserError(f"{word!r} is not a setting; settings are written as --key value.")
        name, equals, text = word[2:].partition("=")
        key, negated = _key_of(name)
        if negated:
            if equals:
                raise UserError(f"{word}: --no-{key} takes no value; write --{key} false instead.")
            settings[key] = False
        elif equals:
            settings[key] = text
        else:
            settings[key] = _values_of(key, rest)
    return settings


def _key_of(name: str) -> tuple[str, bool]:
    """(key, whether it is negated) of the word after ``--``."""
    key = name.replace("-", "_")
    key = SHORT_FORMS.get(key, key)
    if key not in FIELDS and key.startswith("no_") and key[3:] in FIELDS:
        if not is_bool(key[3:]):
            raise UserError(f"--{name}: {key[3:]} is not a switch; write --{key[3:]} VALUE.")
        return key[3:], True
    return key, False


def _values_of(key: str, rest: list[str]) -> Any:
    """Take the words that belong to ``key`` off the front of ``rest``."""
    has_value = bool(rest) and not rest[0].startswith("--")
    if key in FIELDS and is_bool(key):
        return rest.pop(0) if has_value else True  # a switch alone means on
    if not has_value:
        if key in FIELDS or key in OLD_KEYS or key in CHECKED_KEYS:
            raise UserError(f"--{key} needs a value.")
        return True  # an unknown key: the loader names the nearest right one
    if key in FIELDS and is_tuple(key):
        words = []
        while rest and not rest[0].startswith("--"):
            words.append(rest.pop(0))
        return " ".join(words)
    return rest.pop(0)
