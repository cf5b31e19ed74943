"""benchmarks/profile_codec.py: its tables say of each kernel which layer it is of, how long it ran, and what the GPU
waited for. The traces here are as torch's profiler writes them on a GPU."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tinyvae import TAEHV

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import profile_codec  # type: ignore[import-not-found]

    return profile_codec


def kernel(name: str, start: float, stop: float, correlation: int, grid: int = 132) -> dict[str, Any]:
    words = {"grid": [grid, 1, 1], "correlation": correlation}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": stop - start, "args": words}


def on_host(kind: str, name: str, start: float, stop: float, correlation: int = 0) -> dict[str, Any]:
    words = {"correlation": correlation} if correlation else {}
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": stop - start, "args": words}


def launched_trace() -> list[dict[str, Any]]:
    """Two calls of two layers: a block of two kernels, inside a run of layers one more."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
    for call in range(2):
        at, first = call * 1000.0, call * 10
        events += [
            on_host("user_annotation", "layer: 0 Mem 13x30x46x64", at, at + 40),
            on_host("cuda_driver", "cuLaunchKernel", at + 10, at + 12, first + 1),
            on_host("cuda_runtime", "cudaLaunchKernel", at + 20, at + 22, first + 2),
            on_host("user_annotation", "layer: 1-2 Grow+Conv 13x30x46x64", at + 50, at + 90),
            on_host("user_annotation", "layer: 2 Conv 13x60x92x64", at + 60, at + 80),
            on_host("cuda_driver", "cuLaunchKernelEx", at + 70, at + 72, first + 3),
            kernel("conv_rows", at + 100, at + 110 + 2 * call, first + 1),
            kernel("conv_rows", at + 115, at + 125, first + 2),
            kernel("conv_tiles", at + 120, at + 145, first + 3, grid=7),
        ]
    return events


def test_a_table_has_layers_and_gaps(profiled: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = profiled.find_kernels(launched_trace(), calls=2)
    assert [(one.name, one.layer) for one in kernels] == [
        ("conv_rows", "0 Mem 13x30x46x64"),
        ("conv_rows", "0 Mem 13x30x46x64"),
        ("conv_tiles", "2 Conv 13x60x92x64"),
    ], "the innermost layer"
    # Medians of both calls; the third kernel begins while the second runs.
    assert [(one.busy_us, one.gap_us) for one in kernels] == [(11, 0), (10, 4), (20, 0)]
    rows = profiled.make_table(kernels)
    assert [(row["calls"], row["busy_us"], row["gap_us"]) for row in rows] == [(2, 21, 4), (1, 20, 0), (3, 41, 4)]
    assert [round(row["share"], 3) for row in rows] == [0.556, 0.444, 1.0]
    profiled.print_table("taew2_2, decode", rows)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 5 and "conv_tiles" in printed[3] and " 7 " in printed[3] and printed[4].endswith("100.0%")


def test_replayed_kernels_have_the_layers_of_launched_ones(profiled: ModuleType) -> None:
    launched = profiled.find_kernels(launched_trace(), calls=2)
    copy_in = {**kernel("Memcpy DtoD", 90, 95, 1), "cat": "gpu_memcpy", "args": {"correlation": 1}}
    replayed = [copy_in, *(kernel(name, 100 + 10 * i, 110 + 10 * i, 2, grid) for i, (name, grid) in enumerate(
        [("conv_rows", 132), ("conv_rows", 132), ("conv_tiles", 7), ("copy", 3)]
    ))]  # fmt: skip
    found = profiled.name_layers(profiled.find_kernels(replayed, calls=1), launched)
    assert [one.layer for one in found] == ["", *["0 Mem 13x30x46x64"] * 2, "2 Conv 13x60x92x64", ""]
    assert [one.gap_us for one in found] == [0, 5, 0, 0, 0]
    assert profiled.make_table([])[0]["calls"] == 0


def test_layers_mark_what_they_launch(profiled: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through torch's profiler itself, on this CPU: no kernels, but every layer of both stacks."""
    monkeypatch.setattr(profiled, "CALLS", 1)
    monkeypatch.setattr(profiled, "WARMUPS", 0)
    codec = TAEHV("taew2_2", width=0.125).fused(engine="eager")
    for stack in codec._stacks.values():
        profiled.label_layers(stack)
    frames = torch.rand(1, 5, 3, 32, 32)
    events = profiled.trace(lambda: codec.decode_video(codec.encode_video(frames)), torch.device("cpu"))
    labels = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    blocks = sum(label.startswith("layer: ") and "Mem" in label for label in labels)
    assert blocks == 18 and profiled.find_kernels(events, calls=1) == [], sorted(labels)
