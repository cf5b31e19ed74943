"""The two doors from a network to its fast forms.

The room ``engines`` is built on this room, so this room does not import it. `tinyvae/__init__.py`, which Python runs
before any module of the package, puts the functions of that room here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

fuse: Callable[[Any], Any]
"""`TAEHV` -> `FusedTAEHV`."""

run_folded: Callable[..., tuple[Tensor, list[Tensor | None]]]
"""`blocks.run_layers` in folded form."""
