"""What a log line shows: means over micro-batches, steps and ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.training.tiny_runs import arguments_for, launch, train_here
from tinyvae.config.schema import TrainConfig
from tinyvae.training.engine import Engine, StepResult
from tinyvae.training.logs import StepLog, system_stats


def log_of(**changes: object) -> StepLog:
    config = TrainConfig(n_frames=8, log_every=2, lr_scheduler="constant", learning_rate=1e-3, **changes)  # type: ignore[arg-type]
    return StepLog(config, Engine(config))


def add_step(log: StepLog, *losses: float, norm: float = 1.0, stepped: bool = True) -> None:
    log.begin_step()
    for value in losses:
        log.add({"loss": torch.tensor(value)}, share=1 / len(losses))
    log.end_step(StepResult(gradient_norm=norm, stepped=stepped), num_clips=4, seconds=0.5)


def test_a_line_is_the_mean_of_its_steps_and_their_parts() -> None:
    log = log_of()
    add_step(log, 1.0, 3.0, norm=2.0)
    add_step(log, 6.0, norm=4.0)
    assert log.is_due(2) and not log.is_due(3)
    line = log.take(2)
    assert line["train/loss"] == pytest.approx(4.0) and line["train/gradient_norm"] == pytest.approx(3.0)
    assert line["train/frames_per_second"] == pytest.approx(2 * 4 * 8 / 1.0)
    assert line["train/learning_rate"] == pytest.approx(1e-3) and log.recent_loss == pytest.approx(4.0)
    add_step(log, 8.0)
    assert log.take(2)["train/loss"] == pytest.approx(8.0), "the line before is still in it"


def add_terms(log: StepLog, **terms: float) -> None:
    log.begin_step()
    log.add({name: torch.tensor(value) for name, value in terms.items()}, share=1.0)
    log.end_step(StepResult(gradient_norm=1.0, stepped=True), num_clips=4, seconds=0.5)


def test_a_term_that_begins_in_mid_line_is_the_mean_of_its_own_steps() -> None:
    """As Seraena's do; so too where the run is resumed in that line."""
    log, resumed = log_of(), log_of()
    for loss in (1.0, 2.0, 3.0):
        add_terms(log, loss=loss)
    add_terms(log, loss=4.0, seraena_loss=0.5)
    assert not log.is_empty
    resumed.load_state_dict(log.state_dict())
    for each in (log, resumed):
        add_terms(each, loss=5.0, seraena_loss=1.5)
        line = each.take(4)
        assert line["train/loss"] == pytest.approx(3.0) and line["train/seraena_loss"] == pytest.approx(1.0)
        assert each.is_empty
    add_terms(log, loss=1.0, seraena_loss=3.0)
    assert log.take(4)["train/seraena_loss"] == pytest.approx(3.0), "the count of the line before is still in it"


def test_the_line_of_an_older_checkpoint_goes_on() -> None:
    """It had one count of steps for all terms."""
    log, older = log_of(), log_of()
    for loss in (1.0, 2.0):
        add_terms(log, loss=loss)
    state = log.state_dict()
    del state["counts"]
    older.load_state_dict(state)
    add_terms(older, loss=6.0)
    assert older.take(4)["train/loss"] == pytest.approx(3.0)


def test_muons_rate_stands_beside_adamws() -> None:
    log = log_of(optimizer="muon", muon_learning_rate=0.02)
    add_step(log, 1.0)
    assert log.take(2)["train/muon_learning_rate"] == pytest.approx(0.02)
    assert "train/muon_learning_rate" not in log_of().take(2)


def test_a_skipped_step_and_a_failed_attempt_are_left_out() -> None:
    log = log_of()
    add_step(log, 2.0)
    add_step(log, float("nan"), stepped=False)
    log.begin_step()
    log.add({"loss": torch.tensor(100.0)}, share=0.5)  # then memory ran out, and the step begins again
    add_step(log, 4.0)
    assert log.take(2)["train/loss"] == pytest.approx(3.0)
    add_step(log, float("nan"), stepped=False)
    line = log.take(2)
    assert "train/loss" not in line and "loss" not in log.bar_text(line)


def test_the_bar_shows_loss_rate_speed_and_memory() -> None:
    log = log_of()
    add_step(log, 2.0)
    text = log.bar_text(log.take(2))
    assert text.startswith("loss 2, lr 1.00e-03, 64 frames/s, ") and text.endswith(" GiB")


def test_system_stats_join_in_where_asked() -> None:
    log = log_of(log_system_stats=True)
    add_step(log, 1.0)
    line = log.take(2)
    assert set(system_stats(torch.device("cpu"))) == {"system/cpu_percent", "system/memory_percent"} <= set(line)
    assert 0 < line["system/memory_percent"] <= 100


def test_two_ranks_log_what_one_with_all_clips_does(clips: Path, tmp_path: Path) -> None:
    """And train.log holds the same lines for a reader."""
    shape = {"max_train_steps": 2, "log_every": 1, "validation_steps": 0, "epsilon": 1e-3}
    one = train_here(arguments_for(clips, tmp_path / "one", train_batch_size=4, **shape)).folder
    halves = {"train_batch_size": 1, "gradient_accumulation_steps": 2}
    pair = launch(arguments_for(clips, tmp_path / "two", **shape, **halves), tmp_path, ranks=2)
    assert pair.wait(120) == [0, 0], pair.both_logs()
    lines = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (one, tmp_path / "two")
    ]
    for of_one, of_two in zip(*lines, strict=True):
        for name in ("train/loss", "train/reconstruction_loss", "train/gradient_norm", "train/learning_rate"):
            assert of_two[name] == pytest.approx(of_one[name], rel=1e-4), name
    text = (tmp_path / "two" / "train.log").read_text()
    assert f"INFO step 2 of 2: loss {lines[1][1]['train/loss']:.4g}, lr " in text
