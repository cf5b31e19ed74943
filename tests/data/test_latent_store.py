"""The store of the teacher's latents: what is written is read, and what does not fit is refused by name."""

from __future__ import annotations

import os
import shutil
import signal
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import HANGS_S
from tinyvae.data import latent_store
from tinyvae.data.latent_store import CLIPS_PER_SHARD, LatentStore, StoredLatents, StoreFacts
from tinyvae.errors import MissingFileError, UserError

FACTS = StoreFacts(
    teacher={"class": "AutoencoderKLWan", "weights": "ab12", "dtype": "float32"},
    clips={"height": 32, "width": 48, "seed": 42},
    data={"hash": "f00"},
    space={"mean": [0.0] * 16, "std": [1.0] * 16, "factor": 0.7},
    dtype="float32",
    has_std=False,
)
SHAPE = (2, 16, 4, 6)


def latents_of(positions: range) -> torch.Tensor:
    """Other values for every position; all of them survive bfloat16."""
    return torch.stack([torch.full(SHAPE, float(position % 97)) for position in positions])


def fill(store: LatentStore, shards: list[int] | None = None) -> LatentStore:
    for shard in store.missing_shards() if shards is None else shards:
        positions = store.positions(shard)
        store.write(shard, [StoredLatents(mean=latents_of(positions))], [f"clip_{p}.mp4" for p in positions])
    return store


def new_store(folder: Path, *, num_clips: int = 150, dtype: str = "float32") -> LatentStore:
    return LatentStore.create(folder, replace(FACTS, dtype=dtype), num_clips=num_clips)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_is_read_and_comes_round_again(tmp_path: Path, dtype: str) -> None:
    store = fill(new_store(tmp_path, dtype=dtype))
    positions = [0, 149, 63, 64, 150, 1000]
    read = LatentStore.open(tmp_path).read(positions)
    mean = read.mean
    assert read.std is None and mean.dtype == getattr(torch, dtype)
    assert mean[:, 0, 0, 0, 0].tolist() == [float(position % 150 % 97) for position in positions]
    assert store.file_of(151) == "clip_1.mp4"


def test_float32_latents_keep_every_bit_and_the_spread_comes_along(tmp_path: Path) -> None:
    facts = replace(FACTS, has_std=True)
    store = LatentStore.create(tmp_path, facts, num_clips=3)
    mean, std = torch.randn(3, 2, 16, 4, 6), torch.rand(3, 2, 16, 4, 6)
    store.write(0, [StoredLatents(mean=mean, std=std)], ["a", "b", "c"])
    read = store.read([2, 0])
    assert torch.equal(read.mean, mean[[2, 0]]) and read.std is not None and torch.equal(read.std, std[[2, 0]])
    assert 2 * mean.numel() * 4 < store.num_bytes < 2 * mean.numel() * 4 + 2000
    assert replace(store, with_std=False).read([2, 0]).std is None
    row = read[slice(1, 2)].to("cpu")
    assert torch.equal(row.mean, mean[:1]) and row.std is not None and torch.equal(row.std, std[:1])


def test_a_store_goes_on_where_it_stopped_and_may_grow(tmp_path: Path) -> None:
    fill(new_store(tmp_path), [1])
    begun = new_store(tmp_path)
    assert list(begun.missing_shards()) == [0, 2]
    assert [list(begun.missing_shards(part, 2)) for part in (0, 1)] == [[0, 2], []]
    fill(begun)
    grown = new_store(tmp_path, num_clips=200)
    assert list(grown.missing_shards()) == [2, 3]  # shard 2 held 22 clips and now needs 64
    fill(grown).check_complete()
    assert new_store(tmp_path, num_clips=10).num_clips == 200


SIZES = {"resolutions": ["5x32x48", "1x16x24:2", "9x16x16@20"], "clips_per_step": 6}


def test_several_sizes_each_stage_has_its_own_clips(tmp_path: Path) -> None:
    """Three clips a micro-batch, six a step; the second stage begins at position 120."""
    facts = replace(FACTS, clips={**FACTS.clips, **SIZES})
    for num_clips, shards in ((20, [0, 1, 2]), (70, [0, 1, 2, 3])):  # shards hold 63 positions
        store = LatentStore.create(tmp_path, facts, num_clips=num_clips, batch_size=3)
        rounded = num_clips + -num_clips % 6
        assert [list(stage) for stage in store.stages] == [list(range(rounded)), list(range(120, 120 + rounded))]
        assert store.shards == [shard for shard in shards if store.positions(shard)] and store.clips_per_shard == 63
        stored = [position for shard in store.shards for position in store.positions(shard)]
        assert stored == [position for stage in store.stages for position in stage]
        sizes = store.facts.sizes
        assert sizes is not None
        for shard in store.missing_shards():
            made = []
            for position in store.positions(shard):
                n_frames, height, width = sizes.size_at(position, seed=42)
                made.append(StoredLatents(mean=torch.full((1, n_frames, 1, height // 8, width // 8), float(position))))
            store.write(shard, made, [f"clip_{position}.mp4" for position in store.positions(shard)])
        store = LatentStore.open(tmp_path)
        store.check_complete()
        for position in range(0, 400, 6):  # every clip of a step has its size, also where it comes round again
            first, clip = (0 if position < 120 else 120), store.clip_of(position)
            assert clip == first + (position - first) % rounded
            mean = store.read(list(range(position, position + 6))).mean
            assert mean[:, 0, 0, 0, 0].tolist() == list(range(clip, clip + 6))
            assert store.file_of(position + 1) == f"clip_{clip + 1}.mp4"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"teacher": {**FACTS.teacher, "weights": "cd34"}},
            "the hash of the teacher's weights is cd34 here and ab12 in the store",
        ),
        ({"clips": {**FACTS.clips, "height": 64}}, "height is 64 here and 32 in the store"),
        ({"data": {"hash": "bee"}}, "the hash of the list of training files is bee here and f00 in the store"),
        ({"has_std": True}, "ref_vae_sample is True here and False in the store"),
    ],
)
def test_a_store_of_something_else_is_refused_by_the_difference(
    tmp_path: Path, change: dict[str, object], named: str
) -> None:
    store = fill(new_store(tmp_path))
    wanted = replace(FACTS, **change)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=named):
        store.check_fits(change)
    with pytest.raises(UserError, match=named):
        LatentStore.create(tmp_path, wanted, num_clips=150)
    store.check_fits(asdict(FACTS))
    store.check_fits({"clips": {"height": 32}})


def test_a_store_from_before_there_were_crop_candidates_and_turns_has_none(tmp_path: Path) -> None:
    store = fill(new_store(tmp_path))
    assert "crop_candidates" not in store.facts.clips
    store.check_fits({"clips": {"crop_candidates": 1, "random_turn": False, "random_reverse": False}})
    one, four = (replace(FACTS, clips={**FACTS.clips, "crop_candidates": number}) for number in (1, 4))
    LatentStore.create(tmp_path, one, num_clips=150).check_complete()
    fill(LatentStore.create(tmp_path, one, num_clips=200))
    LatentStore.open(tmp_path).check_complete()  # its old shards are still its own
    with pytest.raises(UserError, match="crop_candidates is 4 here and 1 in the store"):
        store.check_fits(asdict(four))


def test_an_incomplete_store_is_refused(tmp_path: Path) -> None:
    store = fill(new_store(tmp_path), [0])
    with pytest.raises(UserError, match="lacks 2 of its 3 shards; run the same tinyvae latents command again"):
        store.check_complete()


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
        LatentStore.open(tmp_path).check_complete()
    assert list(store.missing_shards(skip_damaged=True)) == [2], "the command that makes it names it and goes on"


def test_a_shard_of_another_store_is_no_part_of_this_one(tmp_path: Path) -> None:
    """As two different commands leave it that began in one folder at the same moment."""
    store = fill(new_store(tmp_path / "a"))
    other = LatentStore.create(tmp_path / "b", replace(FACTS, data={"hash": "bee"}), num_clips=150)
    fill(other)
    shutil.copy(tmp_path / "b" / "latents-00001.safetensors", tmp_path / "a")
    with pytest.raises(UserError, match=r"latents-00001\.safetensors is damaged \(it belongs to another store\)"):
        store.read([64])


def test_a_shard_holds_whole_micro_batches(tmp_path: Path) -> None:
    store = LatentStore.create(tmp_path, FACTS, num_clips=150, batch_size=10)
    assert [store.pieces(shard) for shard in store.shards] == [[range(60)], [range(60, 120)], [range(120, 150)]]
    assert LatentStore.create(tmp_path, FACTS, num_clips=150, batch_size=7) == store, "as it was begun"


def test_many_processes_begin_one_store(tmp_path: Path) -> None:
    """The larger number of clips wins, whoever comes last."""
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        begun = list(pool.map(partial(_begin, tmp_path), range(8)))
    assert LatentStore.open(tmp_path).num_clips == 107
    assert {store.facts.digest for store in begun} == {FACTS.digest}


def test_what_another_process_has_written_since_counts(tmp_path: Path) -> None:
    """As on a Ray cluster, where the command itself only counts the shards."""
    fill(new_store(tmp_path))
    grown = new_store(tmp_path, num_clips=180)
    assert list(grown.missing_shards()) == [2]
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        pool.submit(fill, grown, [2]).result()
    assert list(grown.missing_shards()) == []


def _begin(folder: Path, number: int) -> LatentStore:
    return LatentStore.create(folder, FACTS, num_clips=100 + number)


def test_a_folder_without_a_store_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"there is no latent store in .*; make one with: tinyvae latents"):
        LatentStore.open(tmp_path)
    (tmp_path / "store.json").write_text('{"version": 1}')
    with pytest.raises(UserError, match="is not the manifest of a latent store"):
        LatentStore.open(tmp_path)
    (tmp_path / "store.json").unlink()
    (tmp_path / "store.json").mkdir()
    with pytest.raises(UserError, match=r"store\.json cannot be read \(Is a directory\)"):
        LatentStore.open(tmp_path)


def test_kill_9_loses_at_most_the_shard_in_work(tmp_path: Path) -> None:
    """A process is killed in the middle of a write; what lies there is either whole or not there."""
    save, calls = latent_store.save, []

    def save_or_die(*what: Any) -> bytes | None:
        calls.append(what)
        return save(*what) if len(calls) < 4 else os.kill(os.getpid(), signal.SIGKILL)

    def fill_a_store() -> None:
        latent_store.save = save_or_die
        fill(new_store(tmp_path, num_clips=5 * CLIPS_PER_SHARD))

    killed = get_context("fork").Process(target=fill_a_store)
    killed.start()
    killed.join(HANGS_S)
    assert killed.exitcode == -signal.SIGKILL
    store = LatentStore.open(tmp_path)
    assert list(store.missing_shards()) == [3, 4] and len(list(tmp_path.glob("latents-*"))) == 3
    assert torch.equal(store.read(range(3 * CLIPS_PER_SHARD)).mean, latents_of(range(3 * CLIPS_PER_SHARD)))
    (part,) = tmp_path.glob(".latents-*.part")
    os.utime(part, (0, 0))
    new_store(tmp_path)
    assert not part.exists(), "what a killed process leaves is removed later"
