"""A latent store: what it makes of a run's clips, and that training from it is training with the teacher."""

from __future__ import annotations

import gc
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.data.ray_workers import GivesKilled, KilledOnce
from tests.data.test_latent_store import FACTS, SIZES
from tests.processes import HANGS_S
from tests.training.test_full_disk import fill, small_disk  # noqa: F401  (a fixture)
from tests.training.tiny_runs import (
    arguments_for,
    copy_as_killed,
    differences,
    launch,
    read_lines,
    run_differences,
    train_here,
)
from tinyvae.cli.main import run
from tinyvae.config.load import load_config
from tinyvae.config.schema import TrainConfig
from tinyvae.data import latent_store
from tinyvae.data.latent_store import LatentStore
from tinyvae.errors import UserError
from tinyvae.training import latents
from tinyvae.training.build import open_latents
from tinyvae.training.clips import RunData
from tinyvae.training.latents import LatentJob, make_latents
from tinyvae.training.loop import Trainer
from tinyvae.training.preflight import preflight

STEPS = 4
FACTS_OF_SIZES = replace(FACTS, clips={**FACTS.clips, **SIZES})


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_store, "CLIPS_PER_SHARD", 2)


def recipe(clips: Path, run: Path, **changes: object) -> list[str]:
    """A run of a few steps that learns from a teacher; with everything that changes pixels and latents switched on."""
    settings: dict[str, object] = {
        "variant": "taecvx",
        "encoder_loss_weight": 0.1,
        "decoder_loss_weight": 0.1,
        "ref_vae_dtype": "float32",
        "ref_vae_sample": True,
        "color_jitter": True,
        "gaussian_blur": True,
        "crop_candidates": 3,
        "random_turn": True,
        "random_reverse": True,
        "n_frames": 8,
        "max_train_steps": STEPS,
        "checkpointing_steps": STEPS,
        "validation_steps": STEPS,
        "log_every": 1,
        **changes,
    }
    return arguments_for(clips, run, **settings)


def live(clips: Path, run: Path, teacher: Path, **changes: object) -> list[str]:
    return recipe(clips, run, use_ref_vae=True, ref_vae_path=teacher, **changes)


def without_own_files(folder: Path) -> dict[str, object]:
    """Settings of a run whose other files and tracker are not on the machine that makes its latents."""
    files = {"pretrained_model_path": folder / "gone.pth", "lpips_weights": folder / "no"}
    return {**files, "perceptual_loss_weight": 0.1, "report_to": "mlflow"}


def make(words: list[str], folder: Path, num_clips: int = 8, **job: object) -> int:
    job = {"dtype": "float32", **job}
    return make_latents(load_config(words[0], words[1:]), LatentJob(folder=folder, num_clips=num_clips, **job))  # type: ignore[arg-type]


DTYPES = [
    ("float32", "float32"),
    pytest.param("bfloat16", "float32", marks=pytest.mark.slow),
    pytest.param("bfloat16", "bfloat16", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("teacher_dtype", "dtype"), DTYPES)
def test_training_from_a_store_is_training_with_the_teacher(
    clips: Path, teacher: Path, tmp_path: Path, teacher_dtype: str, dtype: str
) -> None:
    """To the last bit; a store in bfloat16 keeps all that a teacher in bfloat16 says.

    Where the teacher is named beside the store, only validation runs it; else the run loads none.
    """
    words = live(clips, tmp_path / "live", teacher, ref_vae_dtype=teacher_dtype)
    assert make(words, tmp_path / "store", dtype=dtype) == 0
    train_here(words)
    beside = {"latent_store": tmp_path / "store", "ref_vae_dtype": teacher_dtype}
    train_here(live(clips, tmp_path / "stored", teacher, **beside))
    assert run_differences(tmp_path / "live", tmp_path / "stored", STEPS) == []
    train_here(recipe(clips, tmp_path / "alone", latent_store=tmp_path / "store"))
    weights = [torch.load(tmp_path / run / "final_model.pth", weights_only=True) for run in ("live", "alone")]
    assert differences(*weights) == []
    (with_teacher,), (alone,) = (read_lines(tmp_path / run / "validation_history.json") for run in ("live", "alone"))
    assert {name for name in with_teacher if name not in alone} >= {"decoder_psnr", "decoder_ssim", "latent_snr"}
    assert with_teacher["psnr"] == alone["psnr"]
    assert "no teacher is named beside the latent store" in (tmp_path / "alone/train.log").read_text()


@pytest.mark.slow
def test_a_store_of_several_sizes(clips: Path, teacher: Path, tmp_path: Path) -> None:
    """As with the teacher, to the last bit, through two stages; a smaller store comes round again inside each stage."""
    sizes: dict[str, object] = {"resolutions": "8x32x32,8x16x24,1x32x32@50%", "max_train_steps": 6}
    words = live(clips, tmp_path / "live", teacher, **sizes)
    make(words, tmp_path / "store", num_clips=6)
    train_here(words)
    train_here(live(clips, tmp_path / "stored", teacher, latent_store=tmp_path / "store", **sizes))
    assert run_differences(tmp_path / "live", tmp_path / "stored", 6) == []
    make(words, tmp_path / "small", num_clips=1)
    train_here(recipe(clips, tmp_path / "again", latent_store=tmp_path / "small", **sizes))
    lines = [line for line in read_lines(tmp_path / "again/metrics.jsonl") if "train/loss" in line]
    steps = [key for line in lines for key in line if key.startswith("train/steps_")]
    assert len(set(steps[:3])) == 1 and steps[3:] == ["train/steps_1x32x32"] * 3
    with pytest.raises(UserError, match=r"the number of clips of a step .* is 4 here and 2 in the store"):
        train_here(recipe(clips, tmp_path / "other", latent_store=tmp_path / "store", train_batch_size=4, **sizes))
    one_size = recipe(clips, tmp_path / "one", latent_store=tmp_path / "store")
    with pytest.raises(UserError, match=r"resolutions is \[\] here and \['8x32x32', "):
        train_here(one_size)


def test_a_store_of_several_sizes_needs_steps_that_always_had_as_many_clips(tmp_path: Path) -> None:
    store = LatentStore(folder=tmp_path, facts=FACTS_OF_SIZES, num_clips=12)
    data = RunData(config=TrainConfig(), train=None, validation=None, bad_files=None, latents=store)  # type: ignore[arg-type]
    data.check_start(60, 10)
    with pytest.raises(UserError, match="has taken 62 clips in 10 steps, and the latent store has 6 clips for each"):
        data.check_start(62, 10)


@pytest.mark.slow
def test_micro_batches_in_parts_take_their_own_latents(
    clips: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after memory ran out: each part of a micro-batch has the latents and draws of its own clips."""
    begin = Trainer.__init__

    def begin_in_parts(self: Trainer, *arguments: Any) -> None:
        begin(self, *arguments)
        self.slices[torch.Size((8, 3, 32, 32))] = 2

    monkeypatch.setattr(Trainer, "__init__", begin_in_parts)
    words = live(clips, tmp_path / "live", teacher)
    make(words, tmp_path / "store")
    train_here(words)
    train_here(live(clips, tmp_path / "stored", teacher, latent_store=tmp_path / "store"))
    assert run_differences(tmp_path / "live", tmp_path / "stored", STEPS) == []


@pytest.mark.slow
def test_two_ranks_train_from_a_store_as_with_the_teacher(clips: Path, teacher: Path, tmp_path: Path) -> None:
    """Each rank reads its own clips, with a worker, and draws for them."""
    changes: dict[str, object] = {"train_batch_size": 1, "max_train_steps": STEPS}
    words = live(clips, tmp_path / "live", teacher, **changes)
    make(words, tmp_path / "store", 8)
    beside: dict[str, object] = {"latent_store": tmp_path / "store", "dataloader_num_workers": 1}
    stored = live(clips, tmp_path / "stored", teacher, **beside, **changes)
    for command in (words, stored):
        launch(command, tmp_path / "logs", ranks=2).ends_with(0, 0)
    assert run_differences(tmp_path / "live", tmp_path / "stored", STEPS) == []


@pytest.mark.slow
def test_a_run_resumes_exactly_and_not_with_a_store_that_has_grown(clips: Path, teacher: Path, tmp_path: Path) -> None:
    """Four steps of two clips go round a store of five."""
    words, store = live(clips, tmp_path / "made", teacher), tmp_path / "store"
    make(words, store, 5)
    train_here(recipe(clips, tmp_path / "whole", latent_store=store, checkpointing_steps=2))
    copy_as_killed(tmp_path / "whole", tmp_path / "cut", before=4)
    again = recipe(clips, tmp_path / "cut", latent_store=store, checkpointing_steps=2, resume_from_checkpoint="latest")
    train_here(again)
    assert run_differences(tmp_path / "whole", tmp_path / "cut", STEPS) == []
    make(words, store, 6)
    with pytest.raises(UserError, match="clips in the latent store: 5 -> 6, which changes their order"):
        train_here([*again, "--max_train_steps", "6"])


def test_bfloat16_is_a_rounding_of_float32_and_shards_do_not_show(
    clips: Path, teacher: Path, tmp_path: Path, small_shards: None
) -> None:
    words = live(clips, tmp_path / "run", teacher)
    make(words, tmp_path / "whole", 4)
    make(words, tmp_path / "parts", 4, dtype="bfloat16", part=1, num_parts=2)
    assert make(words, tmp_path / "parts", 4, dtype="bfloat16", part=0, num_parts=2) == 0
    whole, parts = (LatentStore.open(tmp_path / name) for name in ("whole", "parts"))
    assert len(parts.shards) == 2 and parts.num_bytes < whole.num_bytes
    exact, rounded = whole.read(range(4)), parts.read(range(4))
    assert exact.std is not None and rounded.std is not None
    assert torch.equal(exact.mean.to(torch.bfloat16), rounded.mean)
    assert torch.equal(exact.std.to(torch.bfloat16), rounded.std)
    assert [whole.file_of(p) for p in range(4)] == [parts.file_of(p) for p in range(4)]


@pytest.fixture(scope="module")
def made(clips: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small store without spread. Treat as read-only."""
    folder = tmp_path_factory.mktemp("store")
    make(live(clips, folder / "run", teacher, ref_vae_sample=False, **without_own_files(folder)), folder, 2)
    return folder


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"height": 40}, "height is 40 here and 32 in the store"),
        ({"random_flip": False}, "random_flip is False here and True in the store"),
        ({"crop_candidates": 4}, "crop_candidates is 4 here and 3 in the store"),
        ({"random_reverse": False}, "random_reverse is False here and True in the store"),
        ({"seed": 1}, "seed is 1 here and 42 in the store"),
        ({"gaussian_blur_probability": 0.1}, "gaussian_blur_probability is 0.1 here and 0.5 in the store"),
        ({"ref_vae_sample": True}, "ref_vae_sample is True here and False in the store"),
        ({"train_split": 0.9}, "the number of training files is 7 here and 6 in the store"),
    ],
)
def test_a_store_of_other_clips_is_refused_by_the_difference(
    clips: Path, made: Path, tmp_path: Path, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(UserError, match=f"does not fit this run: {named}; make one for this run"):
        train_here(recipe(clips, tmp_path / "run", latent_store=made, **{"ref_vae_sample": False, **changes}))


def test_a_store_of_another_teacher_is_refused_where_the_teacher_is_there(
    clips: Path, made: Path, teacher: Path, tmp_path: Path
) -> None:
    other = tmp_path / "teacher"
    shutil.copytree(teacher, other)
    weights = other / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(UserError, match=r"the hash of the teacher's weights is .* here and .* in the store"):
        train_here(live(clips, tmp_path / "run", other, latent_store=made, ref_vae_sample=False))
    with pytest.raises(UserError, match="ref_vae_dtype is bfloat16 here and float32 in the store"):
        words = live(clips, tmp_path / "run", Path("gone"), latent_store=made, ref_vae_sample=False)
        train_here([*words, "--ref_vae_dtype", "bfloat16"])


def test_a_file_that_went_bad_ends_the_run_by_name(clips: Path, made: Path, tmp_path: Path) -> None:
    """The loader would take another file, whose latents the store does not hold."""
    copies = tmp_path / "clips"
    shutil.copytree(clips, copies)
    words = recipe(copies, tmp_path / "run", latent_store=made, ref_vae_sample=False)
    first = LatentStore.open(made).file_of(0)
    index = tmp_path / "index.tvi"
    assert run(["data", "index", str(copies), "--output", str(index)]) == 0
    (copies / first).write_bytes(b"")
    with pytest.raises(UserError, match=f"latents of clip 0 in {made} are those of '{first}', and the run read 'clip_"):
        train_here([*words, "--index_path", str(index)])


def test_the_check_has_a_line_for_the_store(clips: Path, made: Path, tmp_path: Path) -> None:
    words = recipe(clips, tmp_path / "run", latent_store=made, ref_vae_sample=False)

    def line(*more: str) -> tuple[str, str]:
        config = load_config(words[0], [*words[1:], *more]).config
        (found,) = [row for row in preflight(config, {}, processes=1, with_step=False) if row.name == "latents"]
        return found.found, found.fix

    found, fix = line()
    assert (
        found.startswith(f"2 clips in {made}, ")
        and "complete; the first comes again after 1 step of one device" in found
    )
    assert fix == ""
    assert "height is 40 here" in line("--height", "40")[1]


def test_nothing_is_written_where_the_disk_cannot_hold_it(
    clips: Path, made: Path, teacher: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (made / "store.json").read_bytes()
    with pytest.raises(UserError, match=r"free, and .* TiB are needed; make room for"):
        make(live(clips, made / "run", teacher, ref_vae_sample=False), made, 10**10)
    assert (made / "store.json").read_bytes() == before
    assert "10000000000 clips of 2.00 KiB in float32, 18.6 TiB in all" in capsys.readouterr().out


def test_a_run_that_does_not_sample_reads_no_spread(clips: Path, made: Path, tmp_path: Path) -> None:
    words = recipe(clips, tmp_path / "run", latent_store=made, ref_vae_sample=False)
    store = open_latents(load_config(words[0], words[1:]).config, None, processes=None)
    assert store is not None and not store.with_std


def test_settings_without_a_teacher_have_no_latents(clips: Path, made: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no teacher whose latents could be stored"):
        make(arguments_for(clips, tmp_path / "run"), tmp_path / "store")
    with pytest.raises(UserError, match="latent_store is set, but a store is made by the teacher itself"):
        make(recipe(clips, tmp_path / "run", latent_store=made), tmp_path / "store")


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_what_is_written_stays(
    clips: Path,
    teacher: Path,
    small_disk: Path,  # noqa: F811
    small_shards: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = LatentStore.write

    def write_then_fill(store: LatentStore, shard: int, *what: object) -> None:
        write(store, shard, *what)  # type: ignore[arg-type]
        if shard == 0:
            fill(small_disk, leaving=5000)

    monkeypatch.setattr(LatentStore, "write", write_then_fill)
    words, folder = live(clips, small_disk / "run", teacher), small_disk / "store"
    with pytest.raises(UserError, match=r"writing to .* failed \(No space left on device: .* free in .*\); check"):
        make(words, folder)
    (small_disk / "ballast").unlink()
    store = LatentStore.open(folder)
    assert list(store.missing_shards()) == [1, 2, 3] and not list(folder.glob("*.part"))
    assert make(words, folder) == 0
    latent_store._open_shard.cache_clear()  # its memory maps, and that of the index, would keep the disk busy
    gc.collect()


KILLED_IN_THE_SECOND_WRITE = """
import os, signal, sys
from tinyvae.cli.main import main
from tinyvae.data import latent_store
save, calls = latent_store.save, []
def save_or_die(*what):
    calls.append(what)
    return save(*what) if len(calls) < 2 else os.killpg(0, signal.SIGKILL)
latent_store.save = save_or_die
main(sys.argv[1:])
"""


def test_micro_batches_are_those_of_the_run_wherever_a_shard_begins() -> None:
    """A store may go on with another batch size; a micro-batch then still lies in one step."""
    store: Any = SimpleNamespace(pieces=lambda shard: [range(64, 96), range(96, 128)])
    cut = latents.micro_batches(store, 1, 6)
    assert [position for part in cut for position in part] == list(range(64, 128))
    assert all(part[0] // 6 == part[-1] // 6 for part in cut) and range(66, 72) in cut


def test_a_store_that_was_begun_goes_on_with_its_files(clips: Path, teacher: Path, tmp_path: Path) -> None:
    """Although a bad file was repaired meanwhile; a new store takes it."""
    own, bad = shutil.copytree(clips, tmp_path / "own"), {"bad_file_limit": 0.5}
    (own / "clip_99.mp4").write_bytes(b"not a video")
    words = live(own, tmp_path / "run", teacher, **bad)
    assert make(words, tmp_path / "begun", 4) == 0
    shutil.copy2(own / "clip_0.mp4", own / "clip_99.mp4")
    assert make(words, tmp_path / "begun", 8) == 0
    assert make(words, tmp_path / "new", 4) == 0
    files = [LatentStore.open(tmp_path / name).facts.data["files"] for name in ("begun", "new")]
    assert files[1] == files[0] + 1


@pytest.mark.slow
def test_kill_9_costs_one_shard_and_several_processes_share_a_store(clips: Path, teacher: Path, tmp_path: Path) -> None:
    """The real command: killed, damaged, started again in two processes at once; the store is that of one process."""
    words = live(clips, tmp_path / "run", teacher, train_batch_size=4, dataloader_num_workers=2)
    arguments = ["latents", *words, "--clips", "72", "--dtype", "fp32", "--output"]
    command = [sys.executable, "-m", "tinyvae", *arguments]
    folder = tmp_path / "store"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_IN_THE_SECOND_WRITE, *arguments, str(folder)],
        start_new_session=True,
        check=False,
        timeout=HANGS_S,
    )
    assert killed.returncode == -signal.SIGKILL
    store = LatentStore.open(folder)
    assert list(store.missing_shards()) == [1] and len(list(folder.glob(".latents-*.part"))) == 1
    first = folder / "latents-00000.safetensors"
    first.write_bytes(first.read_bytes()[:1000])
    pair = [
        subprocess.Popen([*command, str(folder), "--shard", f"{part}/2"], stderr=subprocess.PIPE) for part in (1, 2)
    ]
    messages = [process.communicate(timeout=HANGS_S)[1].decode() for process in pair]
    assert [process.returncode for process in pair] == [0, 0], messages
    assert "latents-00000.safetensors is damaged" in messages[0]
    make(words, tmp_path / "again", 72)
    both = [LatentStore.open(made).read(range(72)) for made in (folder, tmp_path / "again")]
    assert torch.equal(both[0].mean, both[1].mean)
    assert both[0].std is not None and both[1].std is not None and torch.equal(both[0].std, both[1].std)
    assert json.loads((folder / "store.json").read_text())["num_clips"] == 72


def contents(folder: Path) -> dict[str, Any]:
    """The manifest, and what each shard says and holds; the bytes of its tensors."""
    found: dict[str, Any] = {"manifest": (folder / "store.json").read_text()}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as shard:
            tensors = {name: shard.get_tensor(name).tobytes() for name in shard.keys()}  # noqa: SIM118 - no dictionary
            found[file.name] = (dict(shard.metadata()), tensors)
    return found


@pytest.mark.slow
def test_the_store_of_a_ray_cluster_is_that_of_one_process(
    clips: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clips have two sizes. One process that reads and one that encodes are killed with SIGKILL in the middle."""
    pytest.importorskip("ray")
    monkeypatch.setattr(latent_store, "CLIPS_PER_SHARD", 4)
    words = live(clips, tmp_path / "run", teacher, resolutions="8x32x32,8x16x24")
    options = ["--clips", "18", "--dtype", "float32", "--output"]
    assert run(["latents", *words, *options, str(tmp_path / "alone")]) == 0
    reading = KilledOnce(latents.read_part, tmp_path / "reading", call=2)
    encoding = GivesKilled(latents.open_encoder, tmp_path / "encoding", call=2)
    monkeypatch.setattr(latents, "read_part", reading)
    monkeypatch.setattr(latents, "open_encoder", encoding)
    assert run(["latents", *words, *options, str(tmp_path / "cluster"), "--ray", "local"]) == 0
    assert reading.num_calls > 9 and encoding.killed.num_calls > 5, "the killed ones came again"
    alone, cluster = contents(tmp_path / "alone"), contents(tmp_path / "cluster")
    assert len(alone) == 6 and cluster == alone
