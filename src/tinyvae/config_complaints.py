"""What is wrong with a configuration, as sentences that can be collected: a user is told of all mistakes at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tinyvae.errors import MissingFileError, UserError


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """One thing that is wrong: the keys it is about, and a sentence with the remedy."""

    keys: tuple[str, ...]
    text: str
    missing: bool = False
    """Whether it is about a file that is named and not there."""


@dataclass(frozen=True, kw_only=True)
class GivenPath:
    """How a path was written, and the folder it was resolved against."""

    text: str
    base: Path


def raise_complaints(complaints: Sequence[Complaint], *, heading: str = "the configuration") -> None:
    """Raise one error that lists all complaints; nothing where there is none."""
    if not complaints:
        return
    error = MissingFileError if all(complaint.missing for complaint in complaints) else UserError
    if len(complaints) == 1:
        raise error(f"{heading}: {complaints[0].text}")
    lines = "".join(f"\n  - {complaint.text}" for complaint in complaints)
    raise error(f"{heading} has {len(complaints)} mistakes:{lines}")
