"""Clips have exactly the right pixels; bad files are named once, written once, and too many stop the run."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from tests.data.small_indexes import index_of
from tinyvae.data.clip import AS_IT_IS, ClipChoice, ClipSettings, CropWindow, Turn
from tinyvae.data.clip_reading import (
    BadFile,
    BadFileLog,
    BadFileWatch,
    ClipBatch,
    ReadBatch,
    attempts_for,
    detail_of,
    finish_clip,
    settle_window,
)
from tinyvae.data.index import IndexRow
from tinyvae.errors import UserError

BROKEN = BadFile(path="a ü.mp4", reason='cut "off"')
OTHER = BadFile(path="b.mp4", reason="no frames")


def lines(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines() if line]


def test_each_file_is_written_once_by_several_ranks_and_after_a_resume(tmp_path: Path) -> None:
    file = tmp_path / "run" / "bad_files.jsonl"
    first_rank, second_rank = BadFileLog(file), BadFileLog(file)
    first_rank.add(BROKEN)
    second_rank.add(BROKEN, OTHER)
    first_rank.add(OTHER, BROKEN)
    BadFileLog(file).add(BROKEN, OTHER)
    assert lines(file) == [{"path": bad.path, "reason": bad.reason} for bad in (BROKEN, OTHER)]


def test_lines_of_a_user_and_one_cut_by_a_kill_do_not_end_a_run(tmp_path: Path) -> None:
    file = tmp_path / "bad_files.jsonl"
    BadFileLog(file).add(OTHER)
    first, own = file.read_text(), '\nlooked at\n"c.mp4"\n{"reason": "none"}\n'
    file.write_text(first + own + '{"path": "a')
    BadFileLog(file).add(BROKEN, OTHER)
    assert file.read_text().startswith(first + own)
    (added,) = file.read_text().removeprefix(first + own).splitlines()
    assert json.loads(added)["path"] == BROKEN.path


def test_the_bad_files_of_an_index_are_written(tmp_path: Path) -> None:
    index = index_of(tmp_path, *(IndexRow(path=f"{n}.mp4", reason="empty" * (n < 2)) for n in range(5)))
    file = tmp_path / "bad_files.jsonl"
    assert BadFileLog(file).add_index(index) == 2
    assert sorted(line["path"] for line in lines(file)) == ["0.mp4", "1.mp4"]


def test_the_watch_names_each_file_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = BadFileWatch(limit=0.5)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            watch.see((BROKEN,), 10)
    assert [record.getMessage() for record in caplog.records] == ['bad file a ü.mp4 skipped: cut "off"']
    assert watch.num_bad_tries == 3 and watch.num_tries == 30 and watch.named == {BROKEN.path: BROKEN.reason}


def test_the_watch_stops_a_run_above_the_limit_and_only_then() -> None:
    watch = BadFileWatch(limit=0.05)
    # 5 % of 40, but too early to judge; then 2 of 100; then 5 of 103: 4.9 %
    for bad_files, num_tries in (((BROKEN, OTHER), 40), ((), 24), ((), 36), ((BROKEN, OTHER, BROKEN), 3)):
        watch.see(bad_files, num_tries)
        watch.judge()
    watch.see((OTHER,), 1)
    with pytest.raises(UserError, match=r"6 of 104 clips .*5\.8%.*limit of 5\.0%.*'a ü\.mp4'.*bad_file_limit"):
        watch.judge()


def test_a_list_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What could not be written is written later."""
    file = tmp_path / "bad_files.jsonl"
    file.mkdir()
    watch = BadFileWatch(limit=0.5, written_to=BadFileLog(file))
    watch.see((BROKEN,), 10)
    assert "bad_files.jsonl cannot be written (Is a directory)" in caplog.text
    file.rmdir()
    watch.see((BROKEN,), 10)
    assert [line["path"] for line in lines(file)] == [BROKEN.path]


@pytest.mark.parametrize(("limit", "attempts"), [(0.0, 8), (0.05, 10), (0.3, 23), (0.999, 64), (1.0, 64)])
def test_more_bad_files_that_are_allowed_mean_more_attempts(limit: float, attempts: int) -> None:
    assert attempts_for(limit) == attempts


def test_what_is_kept_holds_no_shared_memory() -> None:
    shared = torch.zeros(1, 1, 3, 4, 4, dtype=torch.uint8).share_memory_()
    batch = ClipBatch(
        frames=shared, color_and_blur=torch.zeros(1, 5).share_memory_(), positions=[0], names=["a.mp4"], epoch=0
    )
    kept = ReadBatch(batch=batch).copied().batch
    assert kept is not None and not kept.frames.is_shared() and not kept.color_and_blur.is_shared()


def coordinates(height: int, width: int) -> torch.Tensor:
    """Two frames whose red is the row and whose green is the column, as bytes."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([y, x, torch.zeros_like(y)]).to(torch.uint8).expand(2, 3, height, width)


def cut_clip(
    frames_TCHW: torch.Tensor,
    top: int,
    left: int,
    height: int,
    width: int,
    *,
    size: tuple[int, int] = (64, 96),
    turn: Turn = AS_IT_IS,
) -> torch.Tensor:
    window = frames_TCHW[..., top : top + height, left : left + width]
    return finish_clip(window, torch.empty((*window.shape[:2], *size), dtype=torch.uint8), turn)


def test_a_native_crop_is_exactly_the_pixels_of_its_window() -> None:
    frames = coordinates(200, 250)
    part = frames[..., 20:84, 30:126]
    clip = cut_clip(frames, 20, 30, 64, 96)
    assert torch.equal(clip, part)
    assert torch.equal(cut_clip(frames, 20, 30, 64, 96, turn=Turn(mirrored=True)), part.flip(-1))


@pytest.mark.parametrize("scaled", [False, True])
def test_turns_apply_to_whole_clips_and_also_in_place(scaled: bool) -> None:
    frames = torch.randint(0, 256, (4, 3, 48, 48), dtype=torch.uint8)
    side = 24 if scaled else 48
    upright = cut_clip(frames, 0, 0, 48, 48, size=(side, side))
    ways = {
        Turn(upside_down=True): upright.flip(-2),
        Turn(on_side=True): upright.mT,
        Turn(backwards=True): upright.flip(0),
        Turn(on_side=True, mirrored=True): upright.mT.flip(-1),
        Turn(True, True, True, True): upright.mT.flip(-1).flip(-2).flip(0),
    }
    for turn, expected in ways.items():
        assert torch.equal(cut_clip(frames, 0, 0, 48, 48, size=(side, side), turn=turn), expected), turn
        if not scaled and not turn.backwards:
            own = frames.clone()
            assert torch.equal(finish_clip(own, own, turn), expected), turn


def test_scaling_down_averages_and_keeps_position() -> None:
    frames = coordinates(192, 240)
    clip = cut_clip(frames, 20, 30, 128, 192)
    assert clip.shape == (2, 3, 64, 96) and clip.dtype == torch.uint8
    inner = clip[0, :, 2:-2, 2:-2].float()
    expected_rows = 20 + 2 * torch.arange(2, 62) + 0.5
    assert (inner[0] - expected_rows[:, None]).abs().max() <= 1.0
    expected_columns = 30 + 2 * torch.arange(2, 94) + 0.5
    assert (inner[1] - expected_columns[None]).abs().max() <= 1.0


def test_scaling_is_antialiased() -> None:
    stripes = (torch.arange(512) % 2 * 255).to(torch.uint8).expand(1, 3, 512, 512)
    clip = cut_clip(stripes, 0, 0, 512, 512, size=(64, 64))
    assert (clip.float() - 127.5).abs().max() < 6, "one-pixel stripes become grey, not moire"


def test_all_frames_of_a_clip_are_cut_alike() -> None:
    frame = torch.randint(0, 256, (1, 3, 150, 200), dtype=torch.uint8)
    clip = cut_clip(frame.expand(4, -1, -1, -1), 3, 5, 100, 150, turn=Turn(mirrored=True))
    assert all(torch.equal(clip[0], other) for other in clip)


def test_detail_is_the_mean_step_down_plus_right_of_the_mean_color() -> None:
    frame = torch.randint(0, 256, (3, 20, 30), dtype=torch.uint8)
    light = frame.double().mean(dim=0)
    steps = (light[1:] - light[:-1]).abs().sum() + (light[:, 1:] - light[:, :-1]).abs().sum()
    assert detail_of(frame) == pytest.approx(float(steps) / 600)
    assert detail_of(torch.full((3, 20, 30), 77, dtype=torch.uint8)) == 0


def test_the_window_with_the_most_detail_at_clip_size_is_taken_and_the_first_of_equals() -> None:
    settings, area = ClipSettings(height=16, width=16, n_frames=1), CropWindow(top=5, left=7, height=40, width=64)
    grain = torch.zeros(3, 40, 64, dtype=torch.uint8)
    grain[:, :, :16], grain[:, :16, 16:32] = torch.arange(0, 160, 4).view(1, -1, 1), 200
    grain[:, :, 32:] = torch.arange(32) % 2 * 255  # much detail, which is gone at half the size
    slope, edge, flat = (CropWindow(top=t, left=x, height=16, width=16) for t, x in ((5, 7), (16, 23), (29, 23)))
    large = CropWindow(top=5, left=39, height=32, width=32)

    turn = Turn(mirrored=True, backwards=True)

    def taken(*windows: CropWindow) -> CropWindow:
        choice = ClipChoice(frame_indices=(3,), window=windows[0], more_windows=windows[1:], turn=turn)
        settled = settle_window(choice, grain, settings, area)
        assert settled.more_windows == () and settled.turn == turn
        return settled.window

    assert taken(flat, edge, slope) == edge and taken(slope, flat) == taken(flat, slope) == slope
    assert taken(large, edge) == edge, "as the model would see it"
    assert taken(large._replace(height=16, width=16), edge).left == 39
    shifted = slope, slope._replace(top=slope.top + 8)  # the same slope further down
    assert taken(*shifted) == shifted[0] and taken(*shifted[::-1]) == shifted[1]
