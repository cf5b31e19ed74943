"""Train and validation never share a file, stay where they are, and leave out what cannot give a clip."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.small_indexes import index_of
from tinyvae.data.clip import ClipSettings
from tinyvae.data.index import IndexRow
from tinyvae.data.splits import ClipSet, split
from tinyvae.errors import UserError

SETTINGS = ClipSettings(height=64, width=96, n_frames=9, min_frame_delta=2, max_frame_delta=3)


def record(path: str, **fields: object) -> IndexRow:
    values = {"frames": 100, "width": 320, "height": 240, "fps": 25.0, "codec": "h264", **fields}
    return IndexRow(path=path, **values)  # type: ignore[arg-type]


def paths_of(clips: ClipSet) -> set[str]:
    return {clips.index.row(int(number)).path for number in clips.rows}


def test_every_usable_file_is_on_exactly_one_side_and_the_share_is_kept(tmp_path: Path) -> None:
    index = index_of(tmp_path, *(record(f"{n}.mp4") for n in range(4000)))
    train, val = split(index, SETTINGS, train_split=0.9)
    assert paths_of(train) | paths_of(val) == {f"{n}.mp4" for n in range(4000)}
    assert not paths_of(train) & paths_of(val)
    assert abs(len(train) / 4000 - 0.9) < 0.02
    everything, nothing = split(index, SETTINGS, train_split=1.0)
    assert (len(everything), len(nothing)) == (4000, 0)


def test_files_stay_on_their_side_when_others_are_added(tmp_path: Path) -> None:
    few = split(index_of(tmp_path, *(record(f"{n}.mp4") for n in range(500))), SETTINGS, train_split=0.8)
    more = split(index_of(tmp_path, *(record(f"{n}.mp4") for n in range(900))), SETTINGS, train_split=0.8)
    assert paths_of(few[0]) <= paths_of(more[0]) and paths_of(few[1]) <= paths_of(more[1])
    larger_share = split(more[0].index, SETTINGS, train_split=0.9)
    assert paths_of(more[0]) <= paths_of(larger_share[0]), "a larger share only adds to the training side"
    assert few[0].fingerprint != more[0].fingerprint


def test_annotated_splits_win_and_unannotated_files_go_by_hash(tmp_path: Path) -> None:
    told = [record(f"{side}{n}.mp4", split=side) for side in ("train", "val", "test") for n in range(20)]
    index = index_of(tmp_path, *told, *(record(f"free{n}.mp4") for n in range(200)))
    train, val = split(index, SETTINGS, train_split=0.5)
    assert {path for path in paths_of(train) if not path.startswith("free")} == {f"train{n}.mp4" for n in range(20)}
    assert {path for path in paths_of(val) if not path.startswith("free")} == {f"val{n}.mp4" for n in range(20)}
    assert train.excluded.test == 20 and 60 < len(train) - 20 < 140
    by_hash, _ = split(index, SETTINGS, train_split=0.999999, split_by="hash")
    assert len(by_hash) >= 258, "asked for by hash, annotations are ignored, test files too"


def test_short_small_and_bad_files_are_left_out_and_counted(tmp_path: Path) -> None:
    index = index_of(
        tmp_path,
        *(record(f"good{n}.mp4") for n in range(30)),
        record("enough.mp4", frames=17),  # (9 - 1) * 2 + 1
        record("short.mp4", frames=16),
        record("flat.mp4", height=63),
        record("narrow.mp4", width=95),
        record("exact.mp4", height=64, width=96),
        record("bad.mp4", reason="broken"),
    )
    train, val = split(index, SETTINGS)
    used = paths_of(train) | paths_of(val)
    assert used == {f"good{n}.mp4" for n in range(30)} | {"enough.mp4", "exact.mp4"}
    excluded = train.excluded
    assert (excluded.bad, excluded.too_short, excluded.too_small, excluded.test) == (1, 1, 2, 0)
    upscaled = ClipSettings(height=64, width=96, n_frames=9, min_frame_delta=2, max_frame_delta=3, allow_upscale=True)
    train, val = split(index, upscaled)
    assert {"flat.mp4", "narrow.mp4"} <= paths_of(train) | paths_of(val) and train.excluded.too_small == 0


@pytest.mark.parametrize("count", [2, 3, 5])
def test_small_sets_have_both_sides(tmp_path: Path, count: int) -> None:
    for name in range(20):
        index = index_of(tmp_path, *(record(f"{name}_{n}.mp4") for n in range(count)))
        for share in (0.05, 0.95):
            train, val = split(index, SETTINGS, train_split=share)
            assert len(train) >= 1 and len(val) >= 1 and len(train) + len(val) == count
            assert not paths_of(train) & paths_of(val)


def test_small_sets_share_no_file_where_validation_clips_have_another_size(tmp_path: Path) -> None:
    """All files would train. Of all, one file must validate; of those large enough, it may be another one."""
    larger = replace(SETTINGS, height=480, width=640)
    for name in range(20):
        sizes = [{"height": 480, "width": 640}, {"height": 480, "width": 640}, {}, {}]
        index = index_of(tmp_path, *(record(f"{name}_{n}.mp4", **size) for n, size in enumerate(sizes)))
        train, val = split(index, SETTINGS, validation=larger, train_split=0.999)
        assert len(train) >= 2 and paths_of(val) <= {f"{name}_0.mp4", f"{name}_1.mp4"} and len(val) >= 1
        assert not paths_of(train) & paths_of(val)
        assert (train.excluded.too_small, val.excluded.too_small) == (0, 2)
    index = index_of(tmp_path, record("a.mp4", height=480, width=640), record("b.mp4", height=480, width=640))
    train, val = split(index, SETTINGS, validation=larger)
    assert (len(train), len(val)) == (1, 1) and train.fingerprint == split(index, SETTINGS)[0].fingerprint


def test_too_many_bad_files_stop_the_run_at_its_start(tmp_path: Path) -> None:
    bad = [record(f"bad{n}.mp4", reason="cut off") for n in range(6)]
    index = index_of(tmp_path, *bad, *(record(f"{n}.mp4") for n in range(94)))
    told = r"6 of 100 files \(6\.0%\).*limit of 5\.0%.*cut off; .*`tinyvae data index` writes a list.*bad_file_limit"
    with pytest.raises(UserError, match=told):
        split(index, SETTINGS)
    split(index, SETTINGS, bad_file_limit=0.06)
    with pytest.raises(UserError, match=r"all 6 files .* are bad.*cut off.*; copy the files again"):
        split(index_of(tmp_path, *bad), SETTINGS, bad_file_limit=1.0)


def test_what_cannot_be_split_is_named(tmp_path: Path) -> None:
    index = index_of(tmp_path, record("a.mp4"), record("b.mp4", frames=3))
    with pytest.raises(UserError, match="train_split is 0"):
        split(index, SETTINGS, train_split=0.0)
    with pytest.raises(UserError, match="no annotated split"):
        split(index, SETTINGS, split_by="annotation")
    with pytest.raises(UserError, match="left for validation"):
        split(index, SETTINGS)  # one usable file cannot be on both sides
    with pytest.raises(UserError, match=r"no file .* 9 frames at 640x480.*1 too short, 1 smaller"):
        split(index, ClipSettings(height=480, width=640, n_frames=9))
    told = index_of(tmp_path, record("a.mp4", split="train"), record("b.mp4", split="train"))
    with pytest.raises(UserError, match="left for validation"):
        split(told, SETTINGS)
    told = index_of(tmp_path, record("a.mp4", split="val"))
    with pytest.raises(UserError, match="in the training split; annotate some or use split_by=hash"):
        split(told, SETTINGS)
    with pytest.raises(UserError, match="in the training split; add files, or raise train_split"):
        split(told, SETTINGS, split_by="hash", train_split=1e-6)  # one file, which the hash lets validate
