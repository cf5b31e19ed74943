"""Benchmarks call src/ as it is now, write where they are told to, and keep results in the repository only when asked
to. Those that train teachers and students run from end to end, and train the function that the teacher has in use."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mypy.api
import pytest
import torch
from PIL import Image

from tinyvae import TAEHV, load_model, save_model
from tinyvae.cli.main import run
from tinyvae.data.sample_clips import write_sample_clips
from tinyvae.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
TINY_RUN = ("--height", "32", "--width", "32", "--train_batch_size", "1", "--mixed_precision", "no")
TINY_RUN += ("--validation_height", "32", "--validation_width", "32", "--allow_cpu", "true")
NARROW: dict[str, dict[str, Any]] = {
    "cogvideox": {"block_out_channels": [8, 8, 8, 16], "norm_num_groups": 4, "layers_per_block": 1},
    "wan": {"base_dim": 8, "dim_mult": [1, 1, 2, 2], "num_res_blocks": 1},
}


@pytest.fixture(autouse=True)
def scripts_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.parametrize("script", sorted(file.stem for file in (ROOT / "benchmarks").glob("*.py")))
def test_what_scripts_import_is_there(script: str) -> None:
    """Nobody runs most of them without a GPU: a name that has gone from src/ shows here."""
    pytest.importorskip("diffusers")
    assert importlib.import_module(script).__doc__


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["benchmarks", "tests/gpu"])
def test_scripts_call_what_src_has_now(folder: str) -> None:
    """Also where only a GPU comes: mypy finds arguments and names that have changed."""
    said, *_ = mypy.api.run([str(file) for file in sorted((ROOT / folder).glob("*.py"))])
    codes = ("[call-arg]", "[attr-defined]", "[name-defined]")
    assert [line for line in said.splitlines() if line.endswith(codes)] == [] and "checked " in said


@pytest.mark.slow
def test_speeds_are_written_into_new_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import speed_codec  # type: ignore[import-not-found]
    import speed_training_step  # type: ignore[import-not-found]
    import speed_variants  # type: ignore[import-not-found]

    page, folder, steps = tmp_path / "new" / "page.md", tmp_path / "other" / "new", tmp_path / "third" / "new"
    shared = ("--repeats", "3", "--output")
    words = ["--sizes", "32x32", "--frames", "9", "--variants", "taehv", "taecvx", "taew2_2", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["speed_variants.py", *words, "--dtype", "float32", *shared, str(page)])
    speed_variants.main()
    rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    assert [row[1] for row in rows] == ["variant", *("taehv", "taew2_2") * 2], "taecvx is taehv's network"
    monkeypatch.setattr("sys.argv", ["speed_codec.py", "--sizes", "32x32x9", "--dtype", "fp32", *shared, str(folder)])
    speed_codec.main()
    found = json.loads((folder / "codec.json").read_text())["32x32x9"]
    assert {"decode", "encode", "decode whole", "encode by 3 latents, which wait"} <= found.keys()
    assert "decode whole" in capsys.readouterr().out
    words = ["--cases", "1x4x16x16", "--ways", "plain", "folded", "--curve_steps", "1", "--repeats", "1"]
    monkeypatch.setattr("sys.argv", ["speed_training_step.py", *words, "--output", str(steps)])
    speed_training_step.main()
    assert json.loads((steps / "training.json").read_text())["1x4x16x16"]["times"].keys() == {"plain", "folded"}


@pytest.mark.parametrize("script", ["seraena_effect", "prune_students"])
def test_clips_that_are_not_there_are_told_before_the_training(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--clips", str(tmp_path / "missing"), "--work", str(tmp_path / "work")]
    monkeypatch.setattr("sys.argv", [f"{script}.py", *(["without:"] if script == "seraena_effect" else []), *words])
    monkeypatch.setattr("student_runs.tinyvae", lambda *_, **__: pytest.fail("a training was begun"), raising=False)
    with pytest.raises(UserError, match="missing"):
        importlib.import_module(script).main()


@pytest.fixture
def chaos(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``benchmarks/chaos.py``, whose kills take no time."""
    module = importlib.import_module("chaos")
    result = {"kills": 1, "in a save": 0, "in start-up": 1, "steps": 9, "differences": []}
    monkeypatch.setattr(module, "kills", lambda *_, **__: result)
    monkeypatch.setattr(module, "write_sample_clips", lambda folder: folder.mkdir(parents=True))
    monkeypatch.setattr(module.torch, "set_num_threads", lambda number: None)  # of this process: other tests run in it
    return module


def test_chaos_keeps_its_results_only_with_write(
    chaos: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "chaos.json", tmp_path / "page.md"
    file.write_text("{}\n")
    page.write_text("before <!-- chaos: begin -->\n<!-- chaos: end --> after\n")
    words = ["chaos.py", "--kills", "1", "--results", str(file), "--work", str(tmp_path / "work")]
    monkeypatch.setattr("sys.argv", words)
    chaos.main()
    assert file.read_text() == "{}\n" and "is as it was; --write" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [*words, "--write", str(page)])
    chaos.main()
    assert json.loads(file.read_text())["kills"]["result"]["kills"] == 1 and "kept in" in capsys.readouterr().out
    assert "1 x `kill -9`" in page.read_text() and page.read_text().startswith("before ")


@pytest.mark.parametrize(("family", "num_frames"), [("cogvideox", 9), ("cogvideox", 17), ("wan", 17)])
def test_whole_clips_are_what_diffusers_makes_of_them(family: str, num_frames: int) -> None:
    diffusers = pytest.importorskip("diffusers")
    from whole_clips import decode_whole, encode_whole, whole_clips  # type: ignore[import-not-found]

    torch.manual_seed(0)
    kind = {"cogvideox": "AutoencoderKLCogVideoX", "wan": "AutoencoderKLWan"}[family]
    vae = getattr(diffusers, kind)(**NARROW[family])
    frames = torch.rand(2, 3, num_frames, 16, 24) * 2 - 1
    with torch.no_grad():
        known = vae.encode(frames).latent_dist
        decoded = vae.decode(known.mode()).sample
        with whole_clips(in_two_parts=family == "cogvideox" and num_frames == 17):
            mean, log_variance = encode_whole(vae, frames)
            made = decode_whole(vae, mean)
        again = vae.encode(frames).latent_dist.mode()
    torch.testing.assert_close(mean, known.mode(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(log_variance, known.logvar, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(made.clamp(-1, 1), decoded.clamp(-1, 1), atol=1e-5, rtol=1e-4)
    assert decoded.std() > 0.01 and torch.equal(again, known.mode()), "behind the block diffusers is itself again"


def test_processes_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from turns import TURN_FILE, gpu_turn, side_by_side  # type: ignore[import-not-found]

    monkeypatch.delenv(TURN_FILE, raising=False)
    with gpu_turn("alone") as waited_s:
        assert waited_s == 0 and capsys.readouterr().out == "", "without a file nothing happens"
    file = tmp_path / "turn"
    assert side_by_side(2, tmp_path)[TURN_FILE] == str(file)
    monkeypatch.setenv(TURN_FILE, str(file))
    assert side_by_side(2, tmp_path / "other")[TURN_FILE] == str(file), "one that is named stays"
    took = []

    def take() -> None:
        with gpu_turn("second"):
            took.append(capsys.readouterr().out)

    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyError), gpu_turn("first"):
        second = pool.submit(take)
        with file.open() as same, pytest.raises(BlockingIOError):
            fcntl.flock(same, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert not took and not second.done()
        raise KeyError("a turn ends with its block, also when that fails")
    second.result(timeout=60)
    assert [line.split(" has its turn ")[0] for line in took[0].splitlines()] == ["first", "second"]


def test_the_clock_of_a_teacher_counts_its_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers")
    import make_teacher  # type: ignore[import-not-found]

    clock = {"s": 0.0}

    def look(pause_s: float = 1.0) -> float:
        clock["s"] += pause_s
        return clock["s"]

    @contextmanager
    def long_wait(holder: str) -> Iterator[float]:
        look(3000)
        yield 3000.0

    monkeypatch.setattr(make_teacher, "time", SimpleNamespace(perf_counter=look))
    monkeypatch.setattr(make_teacher, "gpu_turn", long_wait)
    monkeypatch.setattr(make_teacher, "compile_or_not", lambda losses, *_: look(500) and losses)
    words = ["make_teacher.py", "wan", "--clips", "none", "--output", "none", "--seconds", "3", "--batch_size", "1"]
    monkeypatch.setattr("sys.argv", [*words, "--size", "16", "--frames", "9"])
    videos = [torch.randint(0, 256, (9, 3, 16, 16), dtype=torch.uint8)]
    vae = make_teacher.make_vae("wan", NARROW["wan"], seed=0)
    with make_teacher.whole_clips():
        figures = make_teacher.train(vae, videos, "wan", make_teacher.read_arguments())
    assert (figures["steps"], figures["seconds"]) == (3, 4.0), "a look at the clock takes a second"
    assert figures["compile_s"] == 501 and figures["waited_s"] == 3000


@pytest.mark.parametrize(
    ("words", "message"),
    [(["wan", "wan"], "named twice"), (["wan", "cogvideox", "--settings", '{"base_dim": 8}'], "but it has base_dim")],
)
def test_teachers_side_by_side_need_a_folder_and_settings_each(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("diffusers")
    import make_teacher

    monkeypatch.setattr("sys.argv", ["make_teacher.py", *words, "--clips", "none", "--output", "none"])
    with pytest.raises(SystemExit):
        make_teacher.read_arguments()
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_teachers_get_ready_side_by_side_and_wait_for_their_turns(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    clips, output, turn = tmp_path / "clips", tmp_path / "teachers", tmp_path / "turn"
    write_sample_clips(clips, count=5, height=32, width=48, frames=20)
    words: list[Any] = ["wan", "cogvideox", "--clips", clips, "--output", output, "--device", "cpu", "--steps", 2]
    words += ["--batch_size", 1, "--size", 32, "--settings", json.dumps(NARROW)]
    said: list[str] = []
    with turn.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as a third process would that trains
        with subprocess.Popen(**command_of("make_teacher.py", *words, TINYVAE_TURN_FILE=str(turn))) as process:
            for line in process.stdout:
                said.append(line)
                if sum("the first step was ready" in earlier for earlier in said) == 2 or "Traceback" in line:
                    break
            fcntl.flock(held, fcntl.LOCK_UN)
            ready, said = said, [*said, *process.stdout]
    assert process.returncode == 0 and not any("has its turn" in line for line in ready), said
    for family in NARROW:
        own = [line.removeprefix(f"{family} | ") for line in said if line.startswith(f"{family} | ")]
        figures = json.loads((output / family / "figures.json").read_text())
        assert figures["steps"] == 2 and figures["waited_s"] > 0 and (output / family / "config.json").is_file()
        assert f"{figures['validation_db']:.2f} dB on validation clips" in own[-1]
        assert sum(line.startswith(f"{family} has its turn on the GPU after waiting") for line in own) == 1

    words[3] = tmp_path / "missing"
    said_of_failure = run_benchmark("make_teacher.py", *words, exit_code=1)
    assert "no teacher of wan, cogvideox" in said_of_failure and "cogvideox | FileNotFoundError" in said_of_failure


@pytest.mark.slow
@pytest.mark.parametrize("family", NARROW)
def test_a_teacher_is_made_and_students_learn_from_it(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("diffusers")
    clips, teacher, rows = tmp_path / "clips", tmp_path / "teacher", tmp_path / "new" / "rows.json"
    write_sample_clips(clips, count=5, height=32, width=48, frames=20)
    said = run_benchmark(
        *("make_teacher.py", family, "--clips", clips, "--output", teacher, "--device", "cpu", "--steps", 3),
        *("--batch_size", 1, "--size", 32, "--settings", json.dumps(NARROW[family])),
    )
    figures = json.loads((teacher / "figures.json").read_text())
    assert figures["steps"] == 3 and f"{figures['validation_db']:.2f} dB on validation clips" in said
    config = json.loads((teacher / "config.json").read_text())
    assert config["latents_std"][0] != 2.8184 if family == "wan" else config["scaling_factor"] != 1.15258426

    evaluated = tmp_path / "evaluated"
    words = ["--data", clips / "annotations.json", "--frames", 17, "--device", "cpu", "--lpips", "off", "--films", 0]
    assert run(["eval", str(teacher), *map(str, words), "--output", str(evaluated)]) == 0
    assert "PSNR" in capsys.readouterr().out and (evaluated / "results.json").is_file()

    candidates = ["", "train=decoder,teacher_frames=5,features=0.1", "train=encoder,activation=leaky_relu,n_frames=9"]
    candidates += [
        "consistency=0.1,reconstruction_loss_weight=2,round_trip_to=encoder,freeze_encoder=0.5,small_first=16",
        "latent_metric=0.5,picture_loss=10,picture_clips=1,crop_candidates=3",
    ]
    run_benchmark(
        *("distill_search.py", *candidates, "--clips", clips, "--teacher", teacher, "--steps", 4, "--pool", 4),
        *("--set", "height=32,width=32,train_batch_size=2,model_width=0.25", "--output", rows),
        *("--at_once", 2 if family == "wan" else 1),
    )
    found = json.loads(rows.read_text())
    assert {row["name"] for row in found} == {"base", *candidates[1:]} and {row["steps"] for row in found} == {4}
    for row in found:  # 17 frames: the first, then four for each of four latents
        first, *rest = row["by_latent"]["decoder"]
        assert len(rest) == 4 and (first + 4 * sum(rest)) / 17 == pytest.approx(row["decoder"], abs=1e-3)
    assert {round(row["teacher"], 4) for row in found} == {round(figures["validation_db"], 4)}, (
        "one and the same figure"
    )
    assert all(row["decoder"] > 5 and row["encoder"] > 5 and row["raw"]["own"] > 5 for row in found)

    settings = "allow_cpu=true,mixed_precision=no,height=32,width=32,train_batch_size=2,model_width=0.25"
    settings += ",validation_height=32,validation_width=32,validation_n_frames=17,num_validation_samples=1"
    words = [teacher, "--clips", clips, "--work", tmp_path / "proof", "--seconds", 1, "--trial_steps", 2]
    run_benchmark("distill_proof.py", *words, "--set", settings)
    row = (tmp_path / "proof" / "table.md").read_text().splitlines()[-1]
    cells = [cell.strip(" ()x").replace(" dB", "") for cell in row.strip("|").split("|")]
    assert cells[0] == "teacher" and int(cells[1]) >= 1 and float(cells[3]) > 0
    decoder, gap = map(float, cells[5].split(" ("))
    assert decoder - gap == pytest.approx(float(cells[4]), abs=0.02) and float(cells[4]) > 5


def test_latent_errors_weigh_what_they_do_to_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers")
    import distill_lesson  # type: ignore[import-not-found]
    from distill_search import weighted_latent_loss  # type: ignore[import-not-found]

    from tinyvae.losses.distances import latent_loss

    torch.manual_seed(0)
    decoder = torch.randn(12, 4)  # a teacher that makes 12 pixels of each latent of 4 channels
    monkeypatch.setattr(
        distill_lesson, "teacher_picture", lambda _, latents: torch.einsum("pc,ntchw->ntphw", decoder, latents)
    )
    metric = distill_lesson.latent_metric(None, torch.randn(8, 5, 4, 32, 32))
    wanted = decoder.T @ decoder
    torch.testing.assert_close(metric, wanted * 4 / wanted.trace(), atol=0.05, rtol=0.05)
    a, b = torch.randn(2, 2, 3, 4, 5, 6)
    torch.testing.assert_close(weighted_latent_loss(a, b, torch.eye(4)), latent_loss(a, b))
    alone = torch.diag(torch.tensor([4.0, 0, 0, 0]))
    torch.testing.assert_close(weighted_latent_loss(a, b, alone), (a - b)[:, :, 0].square().mean())


def test_crops_show_where_the_source_has_detail() -> None:
    from seraena_effect import contact_sheet, detailed_square  # type: ignore[import-not-found]

    frame = torch.full((3, 96, 128), 100, dtype=torch.uint8)
    frame[:, 40:72, 64:96] = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
    assert detailed_square(frame, 32) == (40, 64)
    crops = [torch.full((3, 16, 16), level, dtype=torch.uint8) for level in (10, 200)]
    sheet = contact_sheet({"clip a": crops, "clip b": crops}, ["source", "with"])
    for left, level in ((30, 10), (30 + 52, 200)):
        assert [sheet.getpixel((left, top)) for top in (50, 120)] == [(level,) * 3] * 2


@pytest.mark.slow
def test_small_students_get_their_table(tmp_path: Path) -> None:
    clips, whole, work = tmp_path / "clips", tmp_path / "whole.safetensors", tmp_path / "work"
    write_sample_clips(clips, count=5, height=64, width=64, frames=20)
    save_model(TAEHV("taehv", width=0.25), whole)
    said = run_benchmark(
        *("prune_students.py", "--clips", clips, "--work", work, "--whole", whole, "--steps", 2, "--at_once", 2),
        *("--widths", 0.5, "--bench_size", "16x16", "--settings", *TINY_RUN),
    )
    table = [line.split(" | ") for line in (work / "table.md").read_text().splitlines()[2:]]
    kinds = ["whole", "0.5 from scratch", "0.5 taught", "0.5 pruned", "0.5 pruned, taught"]
    assert [row[0] for row in table] == [f"| {kind}" for kind in kinds], said
    assert table[0][3] == "0.00" and len({row[1] for row in table[1:]}) == 1 and float(table[1][1]) < float(table[0][1])


@pytest.mark.slow
def test_what_seraena_does_is_shown(tmp_path: Path) -> None:
    clips, weights, work = tmp_path / "clips", tmp_path / "weights.safetensors", tmp_path / "work"
    write_sample_clips(clips, count=5, height=64, width=64, frames=20)
    save_model(TAEHV("taehv", width=0.125), weights)
    shared = ",".join(f"{key.removeprefix('--')}={value}" for key, value in zip(*[iter(TINY_RUN)] * 2, strict=True))
    said = run_benchmark(
        *("seraena_effect.py", "without:", "with:use_seraena=true,n_seraena_frames=4,seraena_loss_weight=1"),
        *("--clips", clips, "--work", work, "--weights", weights, "--steps", 2, "--at_once", 2),
        *("--set", f"{shared},model_width=0.125"),
    )
    figures = json.loads((work / "results.json").read_text())["figures"]
    assert list(figures) == ["before", "without", "with"] and "Differences from *without*" in said
    assert len({figure["psnr"] for figure in figures.values()}) == 3
    with Image.open(work / "crops.png") as sheet:
        assert sheet.width > 4 * 3 * 64


@pytest.mark.slow
def test_ideas_for_scratch_are_tried(tmp_path: Path) -> None:
    clips, rows, saved = tmp_path / "clips", tmp_path / "new" / "rows.json", tmp_path / "saved"
    save_model(TAEHV("taehv", width=0.25), saved / "0.safetensors")  # of an earlier call
    write_sample_clips(clips, count=5, height=48, width=64, frames=20)
    candidates = [
        "",
        "detail=2,crop_candidates=2,random_turn=true,random_reverse=true",
        "shapes=0.5:4x4x16+0.5:1x8x32,per_tap=1",
        "init=he",
    ]
    candidates += ["fixed_rows=1,reconstruction_loss_type=l1", "model_width=0.25"]
    said = run_benchmark(
        *("scratch_search.py", *candidates, "--clips", clips, "--steps", 4, "--output", rows, "--save", saved),
        *("--set", "height=16,width=16,n_frames=4,train_batch_size=4"),
        TINYVAE_TURN_FILE=str(tmp_path / "turn"),
    )
    found = json.loads(rows.read_text())
    assert [row["name"] for row in found] == ["scratch", *candidates[1:]] and {row["steps"] for row in found} == {4}
    assert said.count("has its turn on the GPU") == len({row["psnr"] for row in found}) == 6, said
    assert all(row["psnr"] > 5 for row in found), said
    assert found[0]["psnr"] > found[3]["psnr"] + 3, "the colors pass from the first step on"
    assert load_model(saved / "5.safetensors", variant="taehv").spec.width == 0.25
    assert load_model(saved / "0.safetensors", variant="taehv").spec.width == 1.0
    said = run_benchmark("scratch_search.py", "--clips", clips, "--score", saved / "5.safetensors")
    assert "on training clips" in said and "same frames as latent 2, 3, ...:" in said, "also of clips of five latents"


def command_of(*words: Any, **variables: str) -> dict[str, Any]:
    """What `subprocess` needs to run a script of benchmarks/; its errors are among what it prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""} | variables
    command = [sys.executable, str(ROOT / "benchmarks" / words[0]), *map(str, words[1:])]
    return {
        "args": command,
        "env": environment,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }


def run_benchmark(*words: Any, exit_code: int = 0, **variables: str) -> str:
    """What a script of benchmarks/ prints until it ends."""
    ran = subprocess.run(**command_of(*words, **variables), timeout=600)
    assert ran.returncode == exit_code, ran.stdout
    return ran.stdout
