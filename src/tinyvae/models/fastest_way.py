"""Which of several ways to compute the same thing is fastest here: tried once per problem, then remembered.

As cuDNN's benchmark mode does for its own algorithms. A way whose result is not that of the first way (an operator
that a library version gets wrong, say) is set aside, whatever its speed, with a warning that names it.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor

TRIALS = 5
ALLOWED_DIFFERENCE = 1e-2  # relative, far above the rounding of fp16 and bf16, far below a wrong result

_chosen: dict[Hashable, str] = {}


def run_fastest(problem: Hashable, ways: Mapping[str, Callable[[], Tensor]]) -> Tensor:
    """Run the fastest way. The first in ``ways`` is the reference, and the one used while a CUDA graph is recorded."""
    name = _chosen.get(problem)
    if name is None:
        reference = next(iter(ways))
        if torch.cuda.is_current_stream_capturing():
            return ways[reference]()
        name = _chosen[problem] = _try_all(problem, ways, reference)
    return ways[name]()


def choices() -> dict[Hashable, str]:
    """What has been chosen so far in this process."""
    return dict(_chosen)


def _try_all(problem: Hashable, ways: Mapping[str, Callable[[], Tensor]], reference: str) -> str:
    expected = ways[reference]().float()
    times = {}
    for name, way in ways.items():
        made = way().float()
        # NaN compares false, so it is set aside too.
        if name != reference and not (made - expected).norm() <= ALLOWED_DIFFERENCE * expected.norm():
            warnings.warn(f"{name} gives another result than {reference} for {problem} and is not used.", stacklevel=4)
            continue
        times[name] = statistics.median(_time_ms(way) for _ in range(TRIALS))
    return min(times, key=lambda name: times[name])


def _time_ms(way: Callable[[], Tensor]) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(3):  # so that the host's share of a launch does not decide
        way()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 3
