"""Run folders from ``output_dir``: the folder of a new run, and the folders of earlier runs of the same experiment.

``output_dir`` may hold the time directives %Y %m %d %H %M %S. Runs whose folders differ only there belong to one
experiment. One process names the folder and tells the others: two clocks would make two folders.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

from tinyvae.config_files.expressions import TIME_DIRECTIVES

_DIRECTIVE = re.compile(f"%[{TIME_DIRECTIVES}]")
_DIGITS = {"%Y": r"\d{4}"}
_TWO_DIGITS = r"\d{2}"


def new_run_folder(output_dir: Path, now: datetime) -> Path:
    """``output_dir`` with its time directives filled in; other per cent signs stay as they are."""
    return Path(_DIRECTIVE.sub(lambda directive: now.strftime(directive.group()), str(output_dir)))


def has_time(output_dir: Path) -> bool:
    """Whether every start makes a folder of its own."""
    return _DIRECTIVE.search(str(output_dir)) is not None


def earlier_run_folders(output_dir: Path) -> list[Path]:
    """Existing folders of the experiment that ``output_dir`` names, the newest (by its own time) first."""
    fixed = Path(output_dir.anchor)
    parts = [part for part in output_dir.parts if part != output_dir.anchor]
    while parts and not _DIRECTIVE.search(parts[0]):
        fixed /= parts.pop(0)
    found = [fixed]
    for part in parts:
        pattern = _pattern_of(part)
        found = [
            entry for folder in found if folder.is_dir() for entry in folder.iterdir() if pattern.fullmatch(entry.name)
        ]
    folders = [folder for folder in found if folder.is_dir()]
    return sorted(folders, key=lambda folder: _time_of(folder, output_dir), reverse=True)


def _pattern_of(part: str) -> re.Pattern[str]:
    text, end = "", 0
    for directive in _DIRECTIVE.finditer(part):
        digits = _DIGITS.get(directive.group(), _TWO_DIGITS)
        text += re.escape(part[end : directive.start()]) + f"({digits})"
        end = directive.end()
    return re.compile(text + re.escape(part[end:]))


def _time_of(folder: Path, output_dir: Path) -> tuple[str, ...]:
    """The folder's time as (year, month, day, hour, minute, second), as far as its name holds them."""
    directives = _DIRECTIVE.findall(str(output_dir))
    match = _pattern_of(str(output_dir)).fullmatch(str(folder))
    values = dict(zip(directives, match.groups(), strict=True)) if match else {}
    return tuple(values.get(f"%{letter}", "") for letter in TIME_DIRECTIVES)
