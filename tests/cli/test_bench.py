"""`tinyvae bench`: the real thing at a small size, and what it says to mistakes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tinyvae import TAEHV, save_model
from tinyvae.cli.main import run
from tinyvae.convert import bench
from tinyvae.convert.bench import BenchmarkCase, Ceilings, count_work, floor_ms, time_once_ms
from tinyvae.errors import UserError


def test_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "bench.json"
    options = ["--size", "16x24", "--frames", "5", "--device", "cpu", "--repeats", "3", "--output", str(target)]
    assert run(["bench", "taehv", *options]) == 0
    captured = capsys.readouterr()
    shown = captured.out
    assert "decode: 100%" in captured.err and "fused stream, call 3" in captured.err
    report = json.loads(target.read_text())
    assert [(row["operation"], row["codec"]) for row in report["timings"]] == [
        ("decode", "plain"),
        ("decode", "fused"),
        ("decode", "fused stream"),
        ("encode", "plain"),
        ("encode", "fused"),
        ("encode", "fused stream"),
    ]
    for row in report["timings"]:
        assert row["milliseconds"] > 0
        assert row["relative_error"] is None if "stream" in row["codec"] else row["relative_error"] < 1e-5
        assert row["frames_per_s"] == pytest.approx(5 / row["milliseconds"] * 1e3)
        assert f"{row['milliseconds']:.2f}" in shown
    assert report["dtype"] == "float32" and report["ceilings"]["flops_per_s"] > 0
    heading, legend = shown.splitlines()[3], shown.split("\n\n")[1]
    for word in ("memory", "error", "compute", "bandwidth", "speed-up"):
        assert word in heading and f"\n{word} " in f"\n{legend}", word
    assert max(map(len, shown.splitlines()[3:])) <= 110
    assert report["engines"] == TAEHV("taehv", width=0.125).fused().engines and report["engines"]["decoder"] in shown


def test_several_models_and_sizes_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(TAEHV("taehv", width=0.125), tmp_path / "first.safetensors")
    save_model(TAEHV("taew2_2", width=0.25), tmp_path / "second.safetensors")
    target = tmp_path / "bench.json"
    models = [str(tmp_path / "first.safetensors"), "--against", str(tmp_path / "second.safetensors")]
    options = ["--frames", "5", "--device", "cpu", "--repeats", "3", "--output", str(target)]
    assert run(["bench", *models, "--size", "16x32", "--size", "32x16", *options]) == 0
    shown = capsys.readouterr().out
    report = json.loads(target.read_text())
    rows = report["timings"]
    assert [(row["operation"], row["size"]) for row in rows[::2]] == [
        ("decode", [16, 32]),
        ("encode", [16, 32]),
        ("decode", [32, 16]),
        ("encode", [32, 16]),
    ]
    assert [(row["model"], row["variant"], row["width"]) for row in rows[:2]] == [
        ("first", "taehv", 0.125),
        ("second", "taew2_2", 0.25),
    ]
    for place, row in enumerate(rows):
        first = rows[place - place % 2]
        assert row["speed"] == pytest.approx(first["milliseconds"] / row["milliseconds"])
        assert row["frames_per_s"] == pytest.approx(5 / row["milliseconds"] * 1e3) and row["share_of_floor"] > 0
        assert f"{row['milliseconds']:.2f}" in shown
    heading, legend = shown.splitlines()[2], shown.split("\n\n")[1]
    for word in ("speed", "memory", "floor"):
        assert word in heading and f"\n{word} " in f"\n{legend}", word


def test_the_floor_is_the_sum_over_layers() -> None:
    """Never less than all arithmetic or all bytes alone, and exactly that where one of the two is free."""
    model = TAEHV("taehv", width=0.125)
    case = BenchmarkCase(height=16, width=24, num_frames=5)
    flops, moved = count_work(model, "decode", 5, 16, 24)
    both = floor_ms(model, "decode", case, Ceilings(bytes_per_s=1e9, flops_per_s=1e10))
    assert both >= max(flops / 1e10, moved / 1e9) * 1e3
    free_bytes = floor_ms(model, "decode", case, Ceilings(bytes_per_s=math.inf, flops_per_s=1e10))
    assert free_bytes == pytest.approx(flops / 1e10 * 1e3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["taehv", "--against", "taew2_2", "taehv", "--device", "cpu"], "taehv is named twice"),
        (["taehv", "--against", "taew22", "--device", "cpu"], "Did you mean 'taew2_2'"),
        (["taehv", "--against", "no_such_file.pth", "--device", "cpu"], "no model at no_such_file.pth"),
        (["taehv", "--against", "taeltx_2", "--device", "cpu"], "taeltx_2 needs .* 480x704 or 480x736"),
        (["taehv", "--against", "taeltx_2", "--size", "32x32", "--repeats", "2", "--device", "cpu"], "3 repeats"),
        (["taehv", "--size", "64x64", "--size", "64x64", "--device", "cpu"], "one size twice"),
        (["taehv", "--against", "a", "b", "--variant", "taehv", "--variant", "-"], "2 times for 3 models"),
        (["taehv", "--device", "mps"], "mps"),
        (["taehv", "--device", "meta"], "cpu"),
        (["taehv", "--device", "cpu,cpu"], "one device"),
        (["taehv", "--variant", "taew2_2", "--device", "cpu"], "leave one out"),
        (["taehv", "--output", "model.safetensors"], "ends in .json"),
        (["taehv", "--size", "481x720", "--device", "cpu"], "480x720 or 488x720"),
        (["taehv", "--device", "gpu"], "no device 'gpu'"),
        (["taehv", "--size", "16x16", "--frames", "1", "--device", "cpu", "--repeats", "2"], "3 repeats"),
        (["no_such_file.pth", "--device", "cpu"], "no_such_file.pth"),
    ],
)
def test_mistakes_end_in_a_sentence(options: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        run(["bench", *options])


def test_memory_that_does_not_suffice_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_memory(*_: object) -> Ceilings:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(bench, "measure_ceilings", fill_memory)
    for models in (["taehv"], ["taehv", "--against", "taecvx"]):
        with pytest.raises(UserError, match="frames of 16x16 does not fit into the memory of the GPU"):
            run(["bench", *models, "--size", "16x16", "--frames", "5", "--device", "cpu", "--repeats", "3"])


def test_a_second_gpu_is_timed_by_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch records an event on the current GPU unless it is told the stream."""

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object = None) -> None:
            seen.append(stream)

        def synchronize(self) -> None: ...

        def elapsed_time(self, stop: Event) -> float:
            return 1.5

    seen: list[object] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    assert time_once_ms(lambda: seen.append("call"), torch.device("cuda:1")) == 1.5
    assert seen == ["stream of cuda:1", "call", "stream of cuda:1"]


def test_black_pictures_have_an_error_too(tmp_path: Path) -> None:
    """Fresh weights may decode to values below 0 alone, which a clamp would make equal, and 0 / 0 an error."""
    model = TAEHV("taehv", width=0.125)
    with torch.no_grad():
        model.decoder[-1].bias.fill_(-100.0)
    save_model(model, tmp_path / "black")
    target = tmp_path / "bench.json"
    options = ["--size", "16x24", "--frames", "5", "--device", "cpu", "--repeats", "3", "--output", str(target)]
    assert run(["bench", str(tmp_path / "black"), *options]) == 0
    errors = [row["relative_error"] for row in json.loads(target.read_text())["timings"]]
    assert all(0 < error < 1e-5 for error in errors if error is not None)
