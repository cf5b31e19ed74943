"""The CUDA engines ask of a GPU what they asked when a Hopper GPU ran them: this machine most likely has none."""

from __future__ import annotations

import json

import pytest

from tests.engines import launches
from tinyvae.engines import hopper_kernels


@pytest.mark.parametrize("name", [*launches.CASES, launches.KERNELS])
def test_a_gpu_has_run_this(name: str) -> None:
    lines = launches.kernel_code() if name == launches.KERNELS else launches.record(*launches.CASES[name])
    assert launches.digest(lines) == json.loads(launches.DIGESTS.read_text())[name], (
        "no GPU has run this yet; `python -m tests.engines.launches FILE` on both commits shows what differs; "
        "if it is meant: `pytest -m gpu` on a Hopper GPU, then `python -m tests.engines.launches --write`"
    )


def test_another_argument_is_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    case = launches.CASES["hopper taehv, preview"]
    before = launches.record(*case)
    assert launches.record(*case) == before
    monkeypatch.setattr(hopper_kernels, "STAGING_BYTES", hopper_kernels.STAGING_BYTES * 2)
    assert launches.digest(launches.record(*case)) != launches.digest(before)
