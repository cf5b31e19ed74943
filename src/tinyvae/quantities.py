"""Amounts as people read them: bytes, durations, counted things."""

from __future__ import annotations

MINUTE, HOUR, DAY, YEAR = 60.0, 3600.0, 86_400.0, 365.25 * 86_400.0


def bytes_in_words(count: float) -> str:
    """``0 bytes``, ``12.3 KiB``, ``1.50 GiB``: three digits and the unit that suits them."""
    if count < 1024:
        return f"{count:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if count < 1000 or unit == "TiB":
            break
    return f"{count:.{2 if count < 10 else 1 if count < 100 else 0}f} {unit}"


def duration_in_words(seconds: float) -> str:
    """``0.35 s``, ``12 s``, ``4 min``, ``2.7 hours``, ``11 days``, ``31 years``."""
    for limit, unit, name in ((2 * HOUR, MINUTE, "min"), (2 * DAY, HOUR, "hours"), (2 * YEAR, DAY, "days")):
        if seconds < 2 * MINUTE:
            return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
        if seconds < limit:
            amount = seconds / unit
            return f"{amount:.1f} {name}" if amount < 10 else f"{amount:.0f} {name}"
    return f"{seconds / YEAR:,.0f} years"


def count_of(number: int, noun: str) -> str:
    """``1 clip``, ``3 clips``; of nouns that take an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
