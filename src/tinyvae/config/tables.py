"""The list of settings for people: the text of ``tinyvae train --help`` and the table of the documentation.

``python -m tinyvae.config docs/configuration.md`` writes the current table into the document.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from tinyvae.config.schema import FIELDS, GROUPS, TrainConfig
from tinyvae.config.values import limits_in_words, shown_value, type_in_words

HELP_WIDTH = 100
TABLE_BEGIN = "<!-- settings: begin -->"
TABLE_END = "<!-- settings: end -->"


def _keys_of(group: str) -> list[str]:
    return [key for key, field in FIELDS.items() if field.metadata["group"] == group]


def config_help_text(config: TrainConfig | None = None) -> str:
    """Every setting with its type, range, default and meaning, by group, for a terminal.

    With ``config`` (a preset's or a file's), also its own value wherever that is not the default.
    """
    return "\n".join(line for group, heading in GROUPS.items() for line in _help_lines(group, heading, config))


def _help_lines(group: str, heading: str, config: TrainConfig | None) -> Iterator[str]:
    yield f"{heading}:"
    for key in _keys_of(group):
        field = FIELDS[key]
        limits = limits_in_words(field.metadata["limits"])
        takes = type_in_words(key) + (f", {limits}" if limits else "")
        value = field.default if config is None else getattr(config, key)
        here = "" if value == field.default else f"; here {shown_value(value)}"
        yield f"  --{key} ({takes}; default {shown_value(field.default)}{here})"
        yield textwrap.fill(
            field.metadata["meaning"], width=HELP_WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8
        )
    yield ""


def settings_table() -> str:
    """Every setting as Markdown tables, one for each group; ``docs/configuration.md`` holds exactly this text."""
    return "\n".join(line for group, heading in GROUPS.items() for line in _table_lines(group, heading))


def _table_lines(group: str, heading: str) -> Iterator[str]:
    yield f"### {heading}\n"
    yield "| key | takes | default | meaning |"
    yield "|---|---|---|---|"
    for key in _keys_of(group):
        field = FIELDS[key]
        limits = limits_in_words(field.metadata["limits"])
        takes = type_in_words(key) + (f", {limits}" if limits else "")
        cells = (f"`{key}`", takes, f"`{shown_value(field.default)}`", field.metadata["meaning"])
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def with_current_table(document: str) -> str:
    """A document with the text between its two settings marks replaced by the current table."""
    before, rest = document.split(TABLE_BEGIN)
    after = rest.split(TABLE_END)[1]
    return f"{before}{TABLE_BEGIN}\n{settings_table()}\n{TABLE_END}{after}"
