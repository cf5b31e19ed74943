"""The tables of ``docs/configuration.md``; ``python -m tests.config.settings_table`` writes them."""

from __future__ import annotations

from pathlib import Path

from tinyvae.config.schema import FIELDS, shown_value, takes_in_words

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"
TABLE_BEGIN = "<!-- settings: begin -->"
TABLE_END = "<!-- settings: end -->"


def settings_table() -> str:
    """Every setting as Markdown tables, one for each group."""
    lines = []
    for key, field in FIELDS.items():
        if group := field.metadata["group"]:
            lines += ["", f"### {group}", "", "| key | takes | default | meaning |", "|---|---|---|---|"]
        cells = (f"`{key}`", takes_in_words(key), f"`{shown_value(field.default)}`", field.metadata["meaning"])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines[1:]) + "\n"


def with_current_table(document: str) -> str:
    """A document with the current tables between its two marks."""
    before, rest = document.split(TABLE_BEGIN)
    return f"{before}{TABLE_BEGIN}\n{settings_table()}\n{TABLE_END}{rest.split(TABLE_END)[1]}"


if __name__ == "__main__":
    DOCUMENT.write_text(with_current_table(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
