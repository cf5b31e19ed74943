"""The whole way, over the hostile files: every frame that a batch holds is the frame that was asked for."""

from __future__ import annotations

from pathlib import Path

from tests.data.small_indexes import build
from tests.video.numbered_video import frame_number
from tinyvae.data import ClipSettings, make_train_loader, split
from tinyvae.data.clip import choose_clip, file_of

SETTINGS = ClipSettings(height=240, width=320, n_frames=5, max_frame_delta=3, random_flip=False, seed=3)
FIRST_CODE = {"edit_list_trim.mp4": 21}
BAD = {
    "zero_bytes.mp4", "random_bytes.mp4", "text_named.mp4", "moov_missing.mp4", "audio_only.mp4",
    "zero_duration_edit.mp4", "interlaced_tff.mp4", "truncated_mdat.mp4",
}  # fmt: skip
# A quick index looks at one frame only; what is wrong later in a file shows when that part is read.
BAD_IN_THE_MIDDLE = {"corrupt_middle.mp4", "resolution_change.ts"}
WITHOUT_CODE = {"odd_dims_vp9.webm", "odd_dims_yuv444.mp4", "resolution_change.ts"}


def test_hostile_files_give_true_frames_or_are_named(shared: Path, tmp_path: Path) -> None:
    index = build(shared / "data" / "hostile", tmp_path / "i.tvi", num_workers=2).index
    assert BAD <= {row.path for row in index.bad_rows()} <= BAD | BAD_IN_THE_MIDDLE
    train, _ = split(index, SETTINGS, train_split=1.0, bad_file_limit=1.0)
    assert train.excluded.too_short >= 2 and train.excluded.too_small >= 3
    loader = make_train_loader(train, SETTINGS, batch_size=1, num_workers=2, bad_file_limit=1.0)
    epochs, checked = 4, set()
    for batch in loader:
        position = batch.positions[0]
        if position >= epochs * len(train):
            break
        row = index.row(int(train.rows[file_of(position, len(train), SETTINGS.seed)]))
        if row.path != batch.names[0]:
            assert row.path in BAD_IN_THE_MIDDLE, "only damaged files may be replaced"
            continue
        if row.path in WITHOUT_CODE:
            continue
        indices = choose_clip(row, SETTINGS, position, len(train)).frame_indices
        first = FIRST_CODE.get(row.path, 0)
        numbers = [frame_number(frame) for frame in batch.frames[0]]
        assert numbers == [first + index for index in indices], row.path
        checked.add(row.path)
    assert len(checked) >= 15 and set(loader.bad_files.named) <= BAD_IN_THE_MIDDLE
    assert {"frame_index_vfr.mp4", "bframes_open_gop.mp4", "start_offset.ts", "hevc_10bit.mp4", "av1.mp4"} <= checked
