"""The sixteen failures that trainers of this kind are known for, by number, each shown not to happen here.

Numbers are those of docs/troubleshooting.md. What DeepSpeed adds to 2, 4 and 10 is in tests/training/test_deepspeed.py,
faults in one of two ranks in every place are in tests/training/test_two_ranks.py.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.faults import Both, KeepWeights, NanLoss, SignalInStep
from tests.training.tiny_runs import (
    SERAENA,
    arguments_for,
    differences,
    launch,
    run_differences,
    state_of,
    train_here,
    write_clips,
)
from tinyvae import TAEHV, VARIANTS, get_spec, load_model, save_model
from tinyvae.cli.main import main
from tinyvae.config.load import load_config
from tinyvae.config.schema import FIELDS, shown_value, to_json
from tinyvae.errors import UserError
from tinyvae.losses.seraena import group_contexts_of, group_frames_of, ungroup_frames
from tinyvae.teachers import load_teacher
from tinyvae.training.build import build_task
from tinyvae.training.checkpoint import newest_intact
from tinyvae.training.engine import Engine, as_number
from tinyvae.training.optim import make_optimizers


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clips(tmp_path_factory.mktemp("clips"))


@pytest.fixture(scope="module")
def two_ranks(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two ranks with Seraena whose second step met a NaN on rank 1 alone."""
    folder = tmp_path_factory.mktemp("two_ranks")
    arguments = arguments_for(clips, folder / "run", **SERAENA, max_train_steps=3, train_batch_size=1)
    faults = Both(KeepWeights(folder), NanLoss(rank=1, calls=(2,)))
    launch(arguments, folder, ranks=2, prepare=faults).ends_with(0, 0)
    return folder


def test_01_weights_path_from_any_folder(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path in a settings file starts at the file, not at the shell's folder; a missing one ends the start at once."""
    save_model(TAEHV("taehv", width=0.125), tmp_path / "checkpoints/start.pth")
    (tmp_path / "settings").mkdir()
    settings = tmp_path / "settings/mine.py"
    settings.write_text('args.pretrained_model_path = "../checkpoints/start.pth"\nargs.model_width = 0.125\n')
    found = set()
    for folder in (tmp_path, tmp_path / "settings", Path("/")):
        monkeypatch.chdir(folder)
        path = load_config(str(settings), []).config.pretrained_model_path
        assert path is not None
        found.add(path.resolve())
    assert found == {tmp_path / "checkpoints/start.pth"}
    (tmp_path / "checkpoints/start.pth").unlink()
    with pytest.raises(SystemExit) as end:
        main(["train", str(settings), "--data_root", str(clips)])
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert "pretrained_model_path" in message and "start.pth" in message and "Traceback" not in message


def test_02_a_frozen_teacher_is_never_wrapped_trained_or_saved(clips: Path, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLHunyuanVideo(block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4)
    vae.save_pretrained(tmp_path / "teacher")
    changes: dict[str, object] = {"use_ref_vae": True, "ref_vae_path": tmp_path / "teacher", "n_frames": 5}
    changes |= {"encoder_loss_weight": 0.1, "decoder_loss_weight": 0.1, "ref_vae_dtype": "float32"}
    changes |= {"max_train_steps": 2, "checkpointing_steps": 2, "validation_steps": 0, "log_every": 1}
    train_here(arguments_for(clips, tmp_path / "run", **changes))
    assert '"train/encoder_loss"' in (tmp_path / "run/metrics.jsonl").read_text(), "the teacher took part"
    state = state_of(tmp_path / "run/checkpoint-2")["training_state.pt"]
    student = TAEHV("taehv", width=0.125)
    assert set(state["model"]) == set(student.state_dict())
    moments = state["engine"]["optimizers"]["optimizers"]
    assert sum(len(optimizer["state"]) for optimizer in moments) == len(list(student.parameters()))
    teacher = load_teacher(None, str(tmp_path / "teacher"), dtype=torch.float32, device=torch.device("cpu"))
    assert not any(p.requires_grad for p in teacher._vae.parameters()) and not teacher._vae.training
    assert not isinstance(teacher, torch.nn.Module)


def test_03_the_tracker_takes_every_type_of_setting(clips: Path, tmp_path: Path) -> None:
    """None, tuples and paths are in every configuration; TensorBoard is really written."""
    arguments = arguments_for(clips, tmp_path / "run", max_train_steps=1, validation_steps=0)
    train_here([*arguments, "--report_to", "tensorboard"])
    assert list((tmp_path / "run").rglob("events.out.tfevents.*"))
    config = load_config(tmp_path / "run/config.json").config
    assert config.annotation_file is None and config.color_jitter_params == (0.15, 0.15, 0.15, 0.08)
    (tmp_path / "config.json").write_text(to_json(config))
    assert load_config(tmp_path).config == config
    assert all(isinstance(shown_value(getattr(config, key)), str) for key in FIELDS)


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
def test_04_float_frames_in_every_precision(clips: Path, precision: str) -> None:
    """One step with Seraena: weights and losses are fp32 in every mode, and the step moves the weights."""
    arguments = arguments_for(clips, Path("unused"), mixed_precision=precision, **SERAENA)
    config = load_config("quickstart", arguments[1:]).config
    engine = Engine(config)
    model = TAEHV(config.variant, width=config.model_width)
    engine.prepare(model, make_optimizers(model, config))
    task = build_task(config, engine, model)
    before = [p.detach().clone() for p in model.parameters()]
    frames = torch.rand(2, 4, 3, 32, 32)
    with engine.autocast():
        decoded, _ = model(frames)
    assert decoded.dtype == {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    for _ in range(10):  # fp16 looks for its loss scale first, by steps that are skipped
        with engine.autocast():
            losses = task.losses(frames, use_seraena=True)
        assert losses.total.dtype == torch.float32
        engine.backward(losses.total)
        result = engine.finish_step(max_grad_norm=1.0)
        if result.stepped:
            break
    assert result.stepped and result.gradient_norm > 0
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_05_a_fault_on_one_rank_makes_all_skip(two_ranks: Path) -> None:
    weights = [torch.load(two_ranks / f"weights_of_rank_{rank}.pt", weights_only=True)["model"] for rank in (0, 1)]
    assert differences(*weights) == []
    text = (two_ranks / "run/train.log").read_text()
    (line,) = [line for line in text.splitlines() if "skipped:" in line]
    assert "process 1:" in line and ".mp4" in line


def test_06_the_gradient_norm_may_be_a_tensor_a_float_or_none(two_ranks: Path) -> None:
    assert as_number(torch.tensor(1.5)) == as_number(1.5) == 1.5
    assert as_number(torch.tensor([3.0], dtype=torch.float64)) == 3.0
    assert math.isnan(as_number(None)), "not computed is not a number"
    lines = [json.loads(line) for line in (two_ranks / "run/metrics.jsonl").read_text().splitlines()]
    assert all(line["train/gradient_norm"] > 0 for line in lines if "train/loss" in line)


def test_07_a_checkpoint_is_whole_or_not_there(two_ranks: Path, tmp_path: Path) -> None:
    """Two ranks made one run folder and one folder for each checkpoint; an empty one is never chosen."""
    folders = [path for path in two_ranks.iterdir() if path.is_dir()]
    assert sorted((path.name, path.is_symlink()) for path in folders) == [("latest", True), ("run", False)]
    names = {file.name for file in (two_ranks / "run/checkpoint-3").iterdir()}
    assert {"training_state.pt", "rank_00000.pt", "rank_00001.pt", "model.safetensors", "manifest.json"} <= names
    run = shutil.copytree(two_ranks / "run", tmp_path / "run")
    (run / "checkpoint-500").mkdir()
    found, faults = newest_intact([run])
    assert found == run / "checkpoint-3" and "checkpoint-500" in faults[0]


def test_08_sigterm_saves_and_the_resumed_run_is_the_same(clips: Path, tmp_path: Path) -> None:
    changes: dict[str, object] = {"max_train_steps": 4, "checkpointing_steps": 0}
    train_here(arguments_for(clips, tmp_path / "calm", **changes))
    arguments = arguments_for(clips, tmp_path / "run", **changes)
    launch(arguments, tmp_path, prepare=SignalInStep(rank=0, call=2, number=signal.SIGTERM)).ends_with(143)
    assert (tmp_path / "run/emergency_checkpoint-2").is_dir()
    train_here([*arguments, "--resume", "latest"])
    assert run_differences(tmp_path / "calm", tmp_path / "run", 4) == []


def test_09_resume_looks_where_the_checkpoint_is(clips: Path, tmp_path: Path) -> None:
    """Full path, bare name and latest, although each start would make a folder of its own."""
    pattern = tmp_path / "run_%Y-%m-%d_%H-%M-%S"
    short: dict[str, object] = {"validation_steps": 0, "checkpointing_steps": 1, "checkpoints_total_limit": 9}
    first = train_here(arguments_for(clips, pattern, **short, max_train_steps=1)).folder
    for steps, form in enumerate((str(first / "checkpoint-1"), "checkpoint-2", "latest"), start=2):
        again = train_here(arguments_for(clips, pattern, **short, max_train_steps=steps, resume_from_checkpoint=form))
        assert again.folder == first and again.progress.step == steps
    with pytest.raises(UserError, match="no such folder"):
        train_here(arguments_for(clips, pattern, **short, resume_from_checkpoint="checkpoint-5500"))
    with pytest.raises(UserError, match=r"--pretrained_model_path .*final_model\.pth"):
        train_here(arguments_for(clips, pattern, **short, resume_from_checkpoint="final_model.pth"))
    assert {path.resolve() for path in tmp_path.iterdir()} == {first}, "one folder, and the link to it"


def test_10_seraena_is_one_on_all_ranks_and_saved_whole(two_ranks: Path) -> None:
    both = [torch.load(two_ranks / f"weights_of_rank_{rank}.pt", weights_only=True)["seraena"] for rank in (0, 1)]
    assert differences(*both) == []
    states = state_of(two_ranks / "run/checkpoint-3")
    saved = states["training_state.pt"]["seraena"]
    assert differences(saved, both[0]) == []
    assert len(saved["optimizer"]["state"]) == len(
        [k for k in saved["discriminator"] if k.endswith((".weight", "bias"))]
    )
    for rank in (0, 1):
        own = states[f"rank_0000{rank}.pt"]["seraena"]
        assert own["generator"] is not None and len(own["buffers"][0][0]) > 0
    assert not any(key.startswith(("blocks", "proj")) for key in states["training_state.pt"]["model"])


def test_11_ungroup_undoes_group() -> None:
    """The case of the report: 9 decoded frames and 3 wrapped ones are 12, not 15."""
    frames = torch.rand(2, 9, 3, 16, 16)
    groups = group_frames_of(frames, padded_frames=12, group_frames=3)
    assert groups.shape == (8, 9, 16, 16)
    assert torch.equal(ungroup_frames(groups, num_frames=9, padded_frames=12, group_frames=3), frames)


@pytest.mark.parametrize("variant", VARIANTS)
def test_12_target_and_decoded_frames_are_as_many(variant: str) -> None:
    """For every clip length, 19 frames of the report among them; by the network itself for a few."""
    spec = get_spec(variant)
    for num_frames in range(1, 60):
        assert spec.aligned_frames(num_frames) == min(num_frames, spec.frames_out(num_frames))
    model = TAEHV(variant, width=0.125)
    for num_frames in (4, 16, 19):
        frames = torch.rand(1, num_frames, 3, spec.space_factor, spec.space_factor)
        target = model.target(frames)
        assert model.reconstruct(frames).shape == target.shape
        assert torch.equal(target, frames[:, : target.shape[1]]), "the tail goes, never the head"


@pytest.mark.parametrize(
    ("n_frames", "group", "works"),
    [
        *((16, 13, False), (20, 17, False), (20, 8, False), (24, 7, False), (28, 5, False)),
        *((16, 4, True), (20, 4, True), (20, 5, True), (28, 7, True)),
    ],
)
def test_13_the_real_rule_for_seraena(
    clips: Path, n_frames: int, group: int, works: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the padded count, told at the start with the divisors; every decoded frame is used."""
    spec = get_spec("taehv")
    if works:
        spec.check_seraena_frames(n_frames, group)
        assert spec.padded_frames(n_frames) // group * group >= spec.frames_out(n_frames)
        return
    changes: dict[str, object] = {**SERAENA, "n_frames": n_frames, "n_seraena_frames": group}
    with pytest.raises(SystemExit) as end:
        main(["train", *arguments_for(clips, Path("/nowhere/unused"), **changes)])
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert "n_seraena_frames" in message and "Traceback" not in message
    assert all(str(divisor) in message for divisor in spec.seraena_divisors(n_frames))


def test_14_taecvx_keeps_all_frames_of_an_even_latent_count(tmp_path: Path) -> None:
    """16 frames are 4 latents are 16 frames; 12 are 3 are 9. The rule is of the variant, not of a file's name."""
    spec = get_spec("taecvx")
    assert [spec.frames_out(num_frames) for num_frames in (16, 12, 8, 9)] == [16, 9, 8, 9]
    model = TAEHV("taecvx", width=0.125)
    assert model.reconstruct(torch.rand(1, 16, 3, 8, 8)).shape[1] == 16
    assert model.target(torch.rand(1, 12, 3, 8, 8)).shape[1] == 9
    save_model(model, tmp_path / "renamed/taehv.safetensors")
    assert load_model(tmp_path / "renamed/taehv.safetensors").spec.name == "taecvx"


def test_15_nothing_is_padded_where_nothing_was_trimmed() -> None:
    spec = get_spec("taecvx")
    frames = torch.rand(2, 16, 3, 4, 4)
    groups = group_frames_of(frames, padded_frames=spec.padded_frames(16), group_frames=4)
    assert torch.equal(groups, frames.reshape(8, 12, 4, 4)), "16 frames stay 16, not 19"


def test_16_one_context_for_each_group_averaged_over_time(clips: Path) -> None:
    latents = torch.rand(2, 4, 16, 3, 5)
    contexts = group_contexts_of(latents, num_groups=16)
    assert contexts.shape == (2 * 16, 16, 3, 5)
    torch.testing.assert_close(contexts[17], latents[1].mean(dim=0))
    config = load_config("quickstart", arguments_for(clips, Path("unused"), n_frames=16, **SERAENA)[1:]).config
    task = build_task(config, Engine(config), TAEHV("taehv", width=0.125))
    seen: dict[str, Any] = {}
    assert task.seraena is not None
    forward = task.seraena.discriminator.forward

    def note(images: torch.Tensor, contexts: torch.Tensor) -> torch.Tensor:
        seen.update(images=images.shape, contexts=contexts.shape)
        return forward(images, contexts)

    task.seraena.discriminator.forward = note  # type: ignore[method-assign]
    task.losses(torch.rand(2, 16, 3, 32, 32), use_seraena=True)
    assert seen["images"][0] == seen["contexts"][0] == 2 * 16 // config.n_seraena_frames
    assert seen["contexts"][1] == 16
