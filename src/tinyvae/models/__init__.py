"""The networks, their frame rules, streams and file formats.

`tinyvae.engines` is built on this room, so this room does not import it. `tinyvae/__init__.py`, which Python runs
before any module of the package, puts two of its functions here.
"""

from collections.abc import Callable
from typing import Any

fuse: Callable[..., Any]  # `TAEHV` -> `FusedTAEHV`
run_folded: Callable[..., Any]  # `blocks.run_layers` in folded form
