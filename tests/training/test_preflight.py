"""The checks before a run: each line passes for what is well and names the fix for what is not."""

from __future__ import annotations

import io
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.processes import free_port
from tinyvae import TAEHV
from tinyvae.config import load_config, load_preset
from tinyvae.config.schema import TrainConfig
from tinyvae.data.splits import Exclusions
from tinyvae.errors import UserError
from tinyvae.models.weights import save_model
from tinyvae.training import preflight
from tinyvae.training.checkpoint import checkpoint_bytes, state_bytes
from tinyvae.training.preflight import (
    Check,
    TrialStep,
    checks_at_start,
    parse_driver_version,
    print_table,
    try_step,
)
from tinyvae.video.write import VideoWriter


def tiny(clips: Path, folder: Path, **changes: object) -> TrainConfig:
    config = TrainConfig(
        lr_warmup_steps=1,
        model_width=0.125,
        data_root=clips,
        height=32,
        width=32,
        n_frames=4,
        train_split=0.7,
        output_dir=folder / "run",
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def named(checks: list[Check], name: str) -> Check:
    (check,) = (check for check in checks if check.name == name)
    return check


def test_a_good_run_passes_every_line(clips: Path, tmp_path: Path) -> None:
    config = tiny(clips, tmp_path, max_train_steps=10)
    checks = preflight.preflight(config, {}, processes=1)
    assert all(check.passes for check in checks), checks
    assert {"frames", "packages", "files", "data", "disk", "memory", "one step"} <= {check.name for check in checks}
    data = named(checks, "data").found
    assert "8 files" in data and "train" in data and "validate" in data
    assert "torch 2" in named(checks, "packages").found
    assert not (tmp_path / "run").exists()  # looking leaves nothing behind


def test_every_kind_of_missing_file_is_a_line_with_its_fix_and_the_step_is_still_tried(tmp_path: Path) -> None:
    small = {"n_frames": 8, "n_seraena_frames": 4, "model_width": 0.125, "max_train_steps": 10_000_000}
    config = replace(load_preset("h100"), output_dir=tmp_path, **small)  # type: ignore[arg-type]
    checks = preflight.preflight(config, {}, processes=8)
    fixes = "\n".join(check.fix for check in checks)
    for word in ("data_root", "checkpoints/taecvx.pth", "CogVideoX-2b", "LPIPS weights"):
        assert word in fixes
    if not preflight.torch.cuda.is_available():
        assert "no GPU" in named(checks, "device").found
        assert "run it on a machine with a GPU" in named(checks, "one step").fix


def test_bad_data_is_found_in_a_sample(clips: Path, tmp_path: Path) -> None:
    folder = tmp_path / "videos"
    folder.mkdir()
    for number in range(30):
        (folder / f"broken_{number}.mp4").write_bytes(b"not a video")
    (check,) = preflight._data(tiny(folder, tmp_path, dataloader_num_workers=0))
    assert not check.passes and "bad" in check.fix
    shutil.rmtree(folder)
    folder.mkdir()
    empty = preflight.preflight(tiny(folder, tmp_path), {}, processes=1, with_step=False)
    assert "empty folder" in named(empty, "files").fix and "data" not in {check.name for check in empty}
    (large,) = preflight._data(tiny(clips, tmp_path, height=512, width=512, dataloader_num_workers=0))
    assert f"no file of {clips} can give a clip" in large.fix


def test_a_source_of_which_most_cannot_be_used_fails(clips: Path, tmp_path: Path) -> None:
    """Two of ten files are large enough; a test split is no fault."""
    folder = tmp_path / "videos"
    shutil.copytree(clips, folder)
    for number in range(2):
        with VideoWriter(folder / f"large_{number}.mp4", fps=24, width=96, height=80) as writer:
            writer.write(torch.zeros(14, 3, 80, 96, dtype=torch.uint8))
    config = tiny(folder, tmp_path, height=64, width=64, dataloader_num_workers=0)
    (check,) = preflight._data(config)
    assert not check.passes and "8 smaller than the clip size" in check.found and "--allow_upscale" in check.fix
    (enough,) = preflight._data(replace(config, allow_upscale=True))
    assert enough.passes
    assert not Exclusions(test=9).is_most_of(10) and Exclusions(too_small=6).is_most_of(11)
    assert not Exclusions(too_small=5, test=1).is_most_of(11)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
def test_a_run_made_for_gpus_is_not_ticked_without_one(tmp_path: Path) -> None:
    for name, is_large in (("h100", True), ("1gpu_h100", True), ("a800", True), ("test", False), ("quickstart", False)):
        config = replace(load_preset(name), output_dir=tmp_path)
        device, *_ = preflight._gpus(config, 1)
        assert device.passes != is_large, name
        assert len(preflight.machine_complaints(config)) == is_large
        assert preflight.machine_complaints(replace(config, allow_cpu=True)) == []
    (complaint,) = preflight.machine_complaints(load_preset("h100"))
    small = dict(zip(*[iter(complaint.text.split(" with --")[1].split(", or")[0].split())] * 2, strict=True))
    changes = {key.removeprefix("--"): value for key, value in small.items()}
    tried = load_config("h100", [word for key, value in changes.items() for word in (f"--{key}", value)]).config
    assert preflight.machine_complaints(tried) == [], "the way to try it small is one"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
def test_half_precision_on_a_cpu_is_warned_about(tmp_path: Path) -> None:
    for precision in ("bf16", "fp16"):
        config = TrainConfig(output_dir=tmp_path, mixed_precision=precision)  # type: ignore[arg-type]
        check = named(checks_at_start(config, processes=1), "precision")
        assert check.passes and "--mixed_precision no" in check.fix
    assert "precision" not in {check.name for check in checks_at_start(TrainConfig(output_dir=tmp_path), processes=1)}


def test_figures_are_in_units_that_suit_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = TrialStep(memory_bytes=2**30, available_bytes=2**31, seconds=9771.87, measured_at="here")
    monkeypatch.setattr(preflight, "try_step", lambda config: trial)
    memory, step = preflight._trial_step(TrainConfig(max_train_steps=100_000))
    assert step.found == "2.7 hours, so about 31 years for 100,000 steps on one device"
    assert memory.found.startswith("1.00 GiB of 2.00 GiB")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda place: usage._replace(free=3_000_000))
    disk = preflight._disk(TrainConfig(model_width=0.125, output_dir=tmp_path), 1)
    assert disk.found.startswith("2.86 MiB free at") and "checkpoints of 3.49 MiB" in disk.found
    assert disk.fix.startswith("make room for 25.0 MiB more")


def test_several_sizes_are_checked_at_the_largest(clips: Path, tmp_path: Path) -> None:
    sizes = ("4x32x32", "8x40x48", "1x40x48@50")
    config = tiny(clips, tmp_path, resolutions=sizes, max_train_steps=10)
    checks = preflight.preflight(config, {}, processes=1)
    assert [check.found.rsplit(" of ")[1] for check in checks if check.name == "frames"] == ["32x32", "40x48", "40x48"]
    stage = named(checks, "sizes")
    assert stage.passes and stage.found == "1x40x48 begins at step 50, and the run has 10"
    assert stage in checks_at_start(config, processes=1)
    assert "8 frames of 40x48 on the CPU, the largest of the sizes" in named(checks, "memory").found
    assert "so at most about" in named(checks, "one step").found
    wide = replace(config, resolutions=("4x32x64", "8x48x32"))
    (data,) = preflight._data(wide)
    assert "no file" in data.fix and "a clip of 8 frames at 64x48 (width x height)" in data.fix, "each must hold all"


def test_only_a_teacher_of_diffusers_asks_for_diffusers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [package for package in preflight.distributions() if package.name != "diffusers"]
    monkeypatch.setattr(preflight, "distributions", lambda: installed)
    save_model(TAEHV("taehv", width=0.125), tmp_path / "whole.safetensors")
    config = TrainConfig(use_ref_vae=True, ref_vae_path="owner/vae")
    assert "pip install 'diffusers" in preflight._packages(config, None).fix
    ours = replace(config, ref_vae_path=str(tmp_path / "whole.safetensors"))
    assert "diffusers" not in preflight._packages(ours, None).fix


@pytest.mark.parametrize("missing", ["lpips_weights", "ref_vae_path", "latent_store"])
def test_without_what_is_missing_there_is_still_something_to_train(missing: str) -> None:
    weights = {"reconstruction_loss_weight": 0.0, "perceptual_loss_weight": 0.0}
    weights |= {"perceptual_loss_weight": 1.0} if missing == "lpips_weights" else {"decoder_loss_weight": 1.0}
    tried = preflight._without(TrainConfig(**weights), {missing})  # type: ignore[arg-type]
    assert tried.trained_parts == "encoder and decoder" and not tried.perceptual_loss_weight


def test_disk_arithmetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(output_dir=tmp_path / "run", checkpoints_total_limit=5)
    weights = state_bytes(config)[0]
    assert weights == 4 * sum(p.numel() for p in TAEHV("taehv").parameters())
    assert checkpoint_bytes(config, 1) == 5 * weights
    seraena = replace(config, use_seraena=True, seraena_buffer_mb=100)
    assert checkpoint_bytes(seraena, 4) - checkpoint_bytes(seraena, 1) == 300 * 2**20
    check = preflight._disk(config, 1)
    assert check.passes and str(tmp_path) in check.found
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda place: usage._replace(free=weights))
    assert "--output_dir" in preflight._disk(config, 1).fix
    assert any(not check.passes for check in checks_at_start(config, processes=1))
    saved = config.output_dir / "checkpoint-10"
    saved.mkdir(parents=True)
    with (saved / "rank_00000.pt").open("wb") as state:
        state.truncate(8 * checkpoint_bytes(config, 1))
    assert not preflight._disk(config, 1).passes
    assert preflight._disk(replace(config, resume_from_checkpoint="latest"), 1).passes, "it makes room itself"
    config.output_dir.rename(tmp_path / "run_2026")
    timed = replace(config, resume_from_checkpoint="latest", output_dir=tmp_path / "run_%Y")
    assert preflight._disk(timed, 1).passes, "also in a folder with the time in its name"


def test_a_port_in_use_is_found() -> None:
    with socket.socket() as busy:
        busy.bind(("", port := free_port()))
        busy.listen()
        (check,) = preflight._port(port)
        assert "MASTER_PORT" in check.fix and str(port) in check.found
    (check,) = preflight._port(port)
    assert check.passes
    assert list(preflight._port(None)) == []


def test_driver_versions_are_read_and_compared() -> None:
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Wed Oct 27 21:21:55 UTC 2021\nGCC version: 9.4.0"
    assert parse_driver_version(text) == (470, 82, 1) < preflight.OLDEST_DRIVER
    assert parse_driver_version("Kernel Module for x86_64  580.95.05  Release") > preflight.OLDEST_DRIVER
    assert parse_driver_version("nothing here") == ()


def test_memory_that_is_not_there_is_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = TrialStep(memory_bytes=99, available_bytes=100, seconds=1.0, measured_at="here")
    monkeypatch.setattr(preflight, "try_step", lambda config: trial)
    memory, _ = preflight._trial_step(TrainConfig(max_train_steps=10))
    assert "--gradient_checkpointing" in memory.fix

    def too_large(config: TrainConfig) -> TrialStep:
        raise UserError("out of memory")

    monkeypatch.setattr(preflight, "try_step", too_large)
    (failed,) = preflight._trial_step(TrainConfig())
    assert failed.fix == "out of memory"


def test_the_estimate_grows_with_the_clip_and_shrinks_with_checkpointing(clips: Path, tmp_path: Path) -> None:
    small = try_step(tiny(clips, tmp_path, train_batch_size=1))
    large = try_step(tiny(clips, tmp_path, train_batch_size=4))
    assert large.memory_bytes > 2 * small.memory_bytes - 5 * state_bytes(tiny(clips, tmp_path))[0]
    lean = try_step(tiny(clips, tmp_path, train_batch_size=4, gradient_checkpointing=True))
    assert lean.memory_bytes < large.memory_bytes


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU nothing is scaled")
def test_the_optimizers_time_is_not_scaled_with_the_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "measure_step", lambda config, device: (2.0, 1.0, 0, 0))
    small = TrainConfig(height=64, width=64, train_batch_size=1)
    assert try_step(small).seconds == 3.0
    assert try_step(replace(small, train_batch_size=40, gradient_accumulation_steps=4)).seconds == 81.0


def test_a_step_that_fits_a_cpu_is_taken_as_it_is(clips: Path, tmp_path: Path) -> None:
    assert "scaled" not in try_step(tiny(clips, tmp_path, train_batch_size=4)).measured_at
    assert (
        "4 clips of 4 frames of 32x32 on the CPU, scaled"
        in try_step(tiny(clips, tmp_path, train_batch_size=8)).measured_at
    )


def test_a_run_of_nothing_but_the_teachers_losses_tries_a_round_trip(tmp_path: Path) -> None:
    small = {"model_width": 0.125, "height": 16, "width": 16, "train_batch_size": 1}
    trial = try_step(replace(load_preset("distill"), ref_vae_path=str(tmp_path), **small))
    assert trial.measured_at.endswith("on the CPU, without the teacher") and trial.seconds > 0


def test_the_table_shows_ticks_and_fixes_also_without_unicode() -> None:
    checks = [
        Check(name="a", found="fine"),
        Check(name="bb", found="old", fix="renew it", only_warns=True),
        Check(name="c", found="gone", fix="bring it"),
    ]
    assert [check.passes for check in checks] == [True, True, False]
    for encoding, tick, cross in (("utf-8", "✓", "✗"), ("ascii", "ok", "NO")):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding=encoding)
        print_table(checks, stream)
        stream.flush()
        lines = raw.getvalue().decode(encoding).splitlines()
        assert lines[0].split() == [tick, "a", "fine"] and lines[3].split()[0] == cross
        assert lines[4].strip() == "fix: bring it"
