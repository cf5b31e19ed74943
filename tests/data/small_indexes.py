"""Makes the indexes of the data tests: of real files, or of rows that a test writes itself."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tinyvae.data.clip import ClipSettings
from tinyvae.data.index import IndexJournal, IndexRow, VideoIndex, open_index
from tinyvae.data.index_build import build_index
from tinyvae.data.splits import ClipSet, split

build = partial(build_index, num_workers=0, show_progress_bar=False)
"""`build_index` in this process."""


def index_of(folder: Path, *rows: IndexRow) -> VideoIndex:
    """The index ``folder/i.tvi`` of these rows; no file of theirs need be there."""
    journal = IndexJournal(folder / "i.tvi")
    for row in rows:
        journal.append(row)
    journal.finish({"data_root": str(folder), "source": ""})
    return open_index(folder / "i.tvi")


def training_clips(folder: Path, settings: ClipSettings) -> ClipSet:
    """All videos of a folder, for training; the index lies beside the folder."""
    train, _ = split(build(folder, folder.with_name(f"{folder.name}.tvi")).index, settings, train_split=1.0)
    return train
