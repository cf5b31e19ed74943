"""The store of the teacher's latents: what is written is read, and what does not fit is refused by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tinyvae.data.latent_store import CLIPS_PER_SHARD, LatentStore, StoreFacts
from tinyvae.errors import MissingFileError, UserError

FACTS = StoreFacts(
    teacher={"class": "AutoencoderKLWan", "sha256": "ab12", "dtype": "float32"},
    clips={"height": 32, "width": 48, "seed": 42},
    data={"fingerprint": "f00"},
    latent_shape=(2, 16, 4, 6),
    has_std=False,
)


def latents_of(positions: range) -> torch.Tensor:
    """Other values for every position; all of them survive bfloat16."""
    return torch.stack([torch.full(FACTS.latent_shape, float(position % 97)) for position in positions])


def fill(store: LatentStore, shards: list[int] | None = None) -> LatentStore:
    for shard in store.missing_shards() if shards is None else shards:
        positions = store.positions(shard)
        store.write(shard, latents_of(positions), None, [f"clip_{position}.mp4" for position in positions])
    return store


def new_store(folder: Path, *, num_clips: int = 150, dtype: str = "float32") -> LatentStore:
    return LatentStore.create(folder, FACTS, dtype=dtype, num_clips=num_clips)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_is_read_and_comes_round_again(tmp_path: Path, dtype: str) -> None:
    store = fill(new_store(tmp_path, dtype=dtype))
    positions = [0, 149, 63, 64, 150, 1000]
    mean, std = LatentStore.open(tmp_path).read(positions)
    assert std is None and mean.dtype == getattr(torch, dtype)
    assert mean[:, 0, 0, 0, 0].tolist() == [float(position % 150 % 97) for position in positions]
    assert store.file_of(151) == "clip_1.mp4"


def test_float32_latents_keep_every_bit_and_the_spread_comes_along(tmp_path: Path) -> None:
    facts = replace(FACTS, has_std=True)
    store = LatentStore.create(tmp_path, facts, dtype="float32", num_clips=3)
    mean, std = torch.randn(3, 2, 16, 4, 6), torch.rand(3, 2, 16, 4, 6)
    store.write(0, mean, std, ["a", "b", "c"])
    read_mean, read_std = store.read([2, 0])
    assert torch.equal(read_mean, mean[[2, 0]]) and read_std is not None and torch.equal(read_std, std[[2, 0]])
    assert store.num_bytes == 2 * mean.numel() * 4


def test_a_store_goes_on_where_it_stopped_and_may_grow(tmp_path: Path) -> None:
    fill(new_store(tmp_path), [1])
    begun = new_store(tmp_path)
    assert list(begun.missing_shards()) == [0, 2]
    assert [list(begun.missing_shards(part, 2)) for part in (0, 1)] == [[0, 2], []]
    fill(begun)
    grown = new_store(tmp_path, num_clips=200)
    assert list(grown.missing_shards()) == [2, 3]  # shard 2 held 22 clips and now needs 64
    fill(grown).check_fits(FACTS)
    assert new_store(tmp_path, num_clips=10).num_clips == 200


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"teacher": {**FACTS.teacher, "sha256": "cd34"}}, "teacher.sha256 is cd34, not ab12"),
        ({"clips": {**FACTS.clips, "height": 64}}, "clips.height is 64, not 32"),
        ({"data": {"fingerprint": "bee"}}, "data.fingerprint is bee, not f00"),
        ({"has_std": True}, "has_std is True, not False"),
    ],
)
def test_a_store_of_something_else_is_refused_by_the_difference(
    tmp_path: Path, change: dict[str, object], named: str
) -> None:
    store = fill(new_store(tmp_path))
    wanted = replace(FACTS, **change)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=named):
        store.check_fits(wanted)
    with pytest.raises(UserError, match=named):
        LatentStore.create(tmp_path, wanted, dtype="float32", num_clips=150)
    store.check_fits(FACTS)


def test_an_incomplete_store_is_refused(tmp_path: Path) -> None:
    store = fill(new_store(tmp_path), [0])
    with pytest.raises(UserError, match="lacks 2 of its 3 shards; run the same tinyvae latents command again"):
        store.check_fits(FACTS)


def test_a_changed_byte_names_its_shard_and_clip(tmp_path: Path) -> None:
    store = fill(new_store(tmp_path))
    file = tmp_path / "latents-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1  # of the last clip
    file.write_bytes(content)
    store.read([0, 126])
    with pytest.raises(UserError, match=r"latents-00001\.safetensors is damaged \(the mean of clip 127 has changed\)"):
        store.read([127])


@pytest.mark.parametrize("content", [b"", b"nothing of ours", b"\xff" * 100])
def test_a_file_that_is_no_shard_is_named(tmp_path: Path, content: bytes) -> None:
    store = fill(new_store(tmp_path))
    (tmp_path / "latents-00002.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"latents-00002\.safetensors is damaged"):
        LatentStore.open(tmp_path).check_fits(FACTS)
    assert store.num_shards == 3


def test_a_folder_without_a_store_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"there is no latent store in .*; make one with: tinyvae latents"):
        LatentStore.open(tmp_path)
    (tmp_path / "store.json").write_text('{"version": 1}')
    with pytest.raises(UserError, match="is not the manifest of a latent store"):
        LatentStore.open(tmp_path)


def test_kill_9_loses_at_most_the_shard_in_work(tmp_path: Path) -> None:
    """A process is killed in the middle of a write; what lies there is either whole or not there."""
    program = f"""
import sys, torch
from pathlib import Path
from tests.data.test_latent_store import FACTS, fill
from tinyvae.data.latent_store import LatentStore
store = LatentStore.create(Path({str(tmp_path)!r}), FACTS, dtype="float32", num_clips={200 * CLIPS_PER_SHARD})
print("ready", flush=True)
fill(store)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2], env=os.environ
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    while len(list(tmp_path.glob("latents-*"))) < 5:
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    store = LatentStore.open(tmp_path)
    written = store.num_shards - len(list(store.missing_shards()))
    assert 5 <= written < 200 and written == len(list(tmp_path.glob("latents-*")))
    mean, _ = store.read(list(range(written * CLIPS_PER_SHARD)))
    assert torch.equal(mean, latents_of(range(written * CLIPS_PER_SHARD)))
