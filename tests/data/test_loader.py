"""Exact batches: the same with any number of workers and ranks, restartable anywhere, and honest about bad files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.data.small_indexes import build, training_clips
from tests.processes import HANGS_S, still_alive
from tests.video.small_videos import write_video
from tinyvae.data import (
    BadFileLog,
    ClipBatch,
    ClipSet,
    ClipSettings,
    latent_store,
    make_train_loader,
    make_validation_loader,
    split,
    workers,
)
from tinyvae.data import loader as loader_module
from tinyvae.data.check import stage_training_samples
from tinyvae.data.clip import choose_clip, file_of
from tinyvae.data.clip_reading import detail_of, finish_clip
from tinyvae.data.latent_store import LatentStore, StoredLatents, StoreFacts
from tinyvae.data.loader import ValidationReads
from tinyvae.data.sizes import SizeSchedule, SizesOfPositions, with_size
from tinyvae.errors import UserError
from tinyvae.video.decode import read_frames

SETTINGS = ClipSettings(
    height=32, width=48, n_frames=5, min_frame_delta=1, max_frame_delta=2, color_jitter=True, gaussian_blur=True, seed=7
)


@pytest.fixture(scope="module")
def sides(video_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[ClipSet, ClipSet]:
    return split(build(video_folder, tmp_path_factory.mktemp("index") / "i.tvi").index, SETTINGS, train_split=0.7)


@pytest.fixture(scope="module")
def train(sides: tuple[ClipSet, ClipSet]) -> ClipSet:
    return sides[0]


@pytest.fixture(scope="module")
def val(sides: tuple[ClipSet, ClipSet]) -> ClipSet:
    return sides[1]


def take(clips: ClipSet, count: int, settings: ClipSettings = SETTINGS, **options: Any) -> list[ClipBatch]:
    return list(islice(iter(make_train_loader(clips, settings, **options)), count))


def assert_equal(ours: list[ClipBatch], theirs: list[ClipBatch]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.names, one.positions, one.epoch) == (other.names, other.positions, other.epoch)
        assert torch.equal(one.frames, other.frames) and torch.equal(one.color_and_blur, other.color_and_blur)


def joined(batches: list[ClipBatch]) -> torch.Tensor:
    return torch.cat([batch.frames for batch in batches])


def store_of(clips: ClipSet, folder: Path, num_clips: int) -> LatentStore:
    """A store whose latents are the clips' positions."""
    facts = StoreFacts(teacher={}, clips={}, data={}, space={}, dtype="float32", has_std=False)
    store = LatentStore.create(folder, facts, num_clips=num_clips)
    mean = torch.arange(float(num_clips)).view(-1, 1, 1, 1, 1).expand(-1, 2, 4, 4, 6)
    names = [name for batch in take(clips, num_clips, batch_size=1) for name in batch.names]
    store.write(0, [StoredLatents(mean=mean)], names)
    return store


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stored_latents_come_with_their_clips_and_go_round(train: ClipSet, tmp_path: Path, num_workers: int) -> None:
    """Position p has the pixels, colors and latents of clip p mod N; its position stays p."""
    store = store_of(train, tmp_path, 5)
    alone = [batch.frames[0] for batch in take(train, 5, batch_size=1)]
    loader = make_train_loader(train, SETTINGS, batch_size=2, num_workers=num_workers, latents=store)
    for number, batch in enumerate(islice(iter(loader), 6)):
        assert batch.positions == [2 * number, 2 * number + 1] and batch.latents is not None
        clips = [position % 5 for position in batch.positions]
        assert batch.latents.mean[:, 1, 2, 3, 4].tolist() == clips
        assert all(torch.equal(frames, alone[clip]) for frames, clip in zip(batch.frames, clips, strict=True))
    assert take(train, 1, batch_size=2)[0].latents is None


def test_a_damaged_store_ends_the_run_with_its_shard(train: ClipSet, tmp_path: Path) -> None:
    store = store_of(train, tmp_path, 5)
    (shard,) = tmp_path.glob("latents-*")
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    latent_store._open_shard.cache_clear()  # a run has not written it itself
    with pytest.raises(UserError, match=r"latents-00000\.safetensors is damaged \(the mean of clip 4 has changed\)"):
        take(train, 1, batch_size=5, latents=store)


def test_a_batch_holds_what_the_pure_function_says(train: ClipSet) -> None:
    batch = take(train, 2, batch_size=3)[1]
    assert batch.frames.shape == (3, 5, 3, 32, 48) and batch.frames.dtype == torch.uint8
    assert batch.positions == [3, 4, 5] and len(batch) == 3
    row = train.row(file_of(4, len(train), 7))
    choice = choose_clip(row, SETTINGS, 4, len(train))
    assert batch.names[1] == row.path
    assert batch.color_and_blur[1].tolist() == pytest.approx(choice.color_and_blur)
    frames = read_frames(train.index.full_path(row), choice.frame_indices)
    window = choice.window
    cut = frames[..., window.top : window.top + window.height, window.left : window.left + window.width]
    assert abs(cut.float().mean() - batch.frames[1].float().mean()) < 1.0
    model_input = batch.model_input()
    assert model_input.dtype == torch.float32 and model_input.min() >= 0 and 0.5 < model_input.max() <= 1


@pytest.mark.parametrize("resize", [False, True])
def test_clips_come_turned_as_their_choice_says(train: ClipSet, resize: bool, tmp_path: Path) -> None:
    upright = replace(SETTINGS, width=32, random_flip=False, random_resize=resize)
    turned = replace(upright, random_flip=True, random_turn=True, random_reverse=True)
    cached = replace(turned, decoded_cache_gb=1.0, decoded_cache_dir=tmp_path)
    before, after, from_cache = (joined(take(train, 3, how, batch_size=4)) for how in (upright, turned, cached))
    turns = set()
    for position, (clip, same_turned) in enumerate(zip(before, after, strict=True)):
        row = train.row(file_of(position, len(train), 7))
        turn = choose_clip(row, turned, position, len(train)).turn
        expected = clip.mT if turn.on_side else clip
        for dim, is_so in ((-1, turn.mirrored), (-2, turn.upside_down), (0, turn.backwards)):
            expected = expected.flip(dim) if is_so else expected
        assert torch.equal(same_turned, expected), turn
        turns.add(turn)
    assert len(turns) > 6 and torch.equal(after, from_cache)


@pytest.mark.parametrize("resize", [False, True])
def test_a_clip_is_the_most_detailed_of_its_drawn_windows(train: ClipSet, resize: bool) -> None:
    settings = replace(SETTINGS, crop_candidates=4, random_resize=resize)
    places = []
    for position, clip in enumerate(joined(take(train, 3, settings, batch_size=4, num_workers=2))):
        row = train.row(file_of(position, len(train), 7))
        choice = choose_clip(row, settings, position, len(train))
        frames = read_frames(train.index.full_path(row), choice.frame_indices)
        drawn = []
        for top, left, height, width in (choice.window, *choice.more_windows):
            cut = frames[..., top : top + height, left : left + width]
            drawn.append(finish_clip(cut, torch.empty_like(clip), choice.turn))
        details = [detail_of(candidate[len(clip) // 2]) for candidate in drawn]
        places.append(details.index(max(details)))
        assert torch.equal(clip, drawn[places[-1]])
    assert len(set(places)) > 2
    shown = stage_training_samples(train, settings, 12).samples
    for position, sample in enumerate(shown):  # the contact sheet
        choice = choose_clip(sample.row, settings, position, len(train))
        assert sample.choice.window == (choice.window, *choice.more_windows)[places[position]]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 5 worker")
def test_the_same_batches_with_any_number_of_workers(train: ClipSet) -> None:
    assert_equal(take(train, 9, batch_size=2, num_workers=5), take(train, 9, batch_size=2))


def test_ranks_together_see_what_one_rank_with_the_whole_batch_sees(train: ClipSet) -> None:
    alone = take(train, 5, batch_size=6)
    ranks = [take(train, 5, batch_size=2, rank=rank, world_size=3) for rank in range(3)]
    for step, whole in enumerate(alone):
        parts = [batches[step] for batches in ranks]
        assert [name for part in parts for name in part.names] == whole.names
        assert torch.equal(joined(parts), whole.frames)
        assert torch.equal(torch.cat([part.color_and_blur for part in parts]), whole.color_and_blur)


def test_clips_of_several_sizes_are_those_that_a_run_of_each_size_would_read(train: ClipSet) -> None:
    """Two micro-batches a step, on two ranks: files, frames and crops follow from the position, the size from the
    step."""
    schedule = SizeSchedule.parse(["5x32x48", "3x24x16", "1x16x24@2"])
    sizes = SizesOfPositions(schedule=schedule, clips_per_step=4, start_sample=20, start_step=1)
    options = {"batch_size": 1, "world_size": 2, "start_sample": 20}
    seen = set()
    for rank in (0, 1):
        loader = make_train_loader(train, SETTINGS, rank=rank, num_workers=2 * rank, sizes=sizes, **options)
        for number, batch in enumerate(islice(iter(loader), 6)):
            size = schedule.size_at(step=1 + number // 2, seed=SETTINGS.seed)
            alone = {**options, "start_sample": 20 + 2 * number, "rank": rank}
            assert_equal([batch], take(train, 1, with_size(SETTINGS, size), **alone))
            seen.add(tuple(batch.frames.shape[1:]))
    assert len(seen) > 1


def test_each_file_once_per_epoch_and_nothing_dropped_between_epochs(train: ClipSet) -> None:
    size = len(train)
    batches = take(train, size, batch_size=4)  # four epochs, whose borders lie inside batches
    names = [name for batch in batches for name in batch.names]
    epochs = [names[start : start + size] for start in range(0, 4 * size, size)]
    assert all(len(set(epoch)) == size for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert [position for batch in batches for position in batch.positions] == list(range(4 * size))
    assert batches[-1].epoch == 3
    clips_of_one_file = [joined(batches)[place] for place, name in enumerate(names) if name == names[0]]
    assert not torch.equal(clips_of_one_file[0], clips_of_one_file[1]), "another epoch, another clip of the file"


def test_starting_at_step_k_is_the_rest_of_the_run_without_reading_the_start(
    train: ClipSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = take(train, 8, batch_size=3)
    reads: list[Path] = []

    def counted(path: Path, *args: object, **options: object) -> torch.Tensor:
        reads.append(path)
        return read_frames(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("tinyvae.data.clip_reading.read_frames", counted)
    assert_equal(take(train, 3, batch_size=3, start_sample=15), whole[5:])
    assert len(reads) == 9, "no replay of what was consumed before"
    far = take(train, 1, batch_size=3, start_sample=10**12)[0]
    assert far.positions[0] == 10**12
    # A resume with another batch size and more ranks goes on at the same sample.
    ranks = [take(train, 2, batch_size=1, rank=rank, world_size=3, start_sample=15) for rank in range(3)]
    assert torch.equal(torch.cat([ranks[rank][0].frames for rank in range(3)]), whole[5].frames)


def test_the_loader_leaves_torchs_random_state_alone(train: ClipSet) -> None:
    before = torch.get_rng_state()
    take(train, 1, batch_size=2, num_workers=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_validation_is_the_same_every_time_and_ranks_share_it_without_repeats(val: ClipSet) -> None:
    loader = make_validation_loader(val, SETTINGS, batch_size=2)
    first, second = list(loader), list(loader)
    assert_equal(first, second)
    assert sum(map(len, first)) == len(val)
    assert torch.equal(first[0].model_input(), first[0].frames.float() / 255), "nothing random is applied"
    with_workers = list(make_validation_loader(val, SETTINGS, batch_size=2, num_workers=2))
    assert_equal(with_workers, first)
    parts = [
        batch
        for rank in range(2)
        for batch in make_validation_loader(val, SETTINGS, batch_size=1, rank=rank, world_size=2)
    ]
    assert sorted(position for part in parts for position in part.positions) == list(range(len(val)))
    by_position = {part.positions[0]: part.frames for part in parts}
    assert torch.equal(torch.cat([by_position[n] for n in range(len(val))]), joined(first))
    few = make_validation_loader(val, SETTINGS, batch_size=4, num_samples=2)
    assert [batch.positions for batch in few] == [[0, 1]]


@pytest.fixture
def damaged(tmp_path: Path) -> ClipSet:
    """Twenty files, two of which went bad after they were indexed: one is gone, one has changed."""
    data = tmp_path / "data"
    for number in range(20):
        write_video(data / f"{number}.mp4", frames=10, seed=number)
    train = training_clips(data, SETTINGS)
    (data / "3.mp4").unlink()
    shutil.copy(data / "5.mp4", data / "4.mp4")
    return train


def test_bad_files_are_replaced_named_and_written_down(damaged: ClipSet, tmp_path: Path) -> None:
    file = tmp_path / "bad_files.jsonl"
    options = {"batch_size": 4, "bad_file_limit": 0.5, "bad_file_log": BadFileLog(file)}
    loader = make_train_loader(damaged, SETTINGS, **options)
    alone = list(islice(iter(loader), 10))
    assert all(batch.frames.shape[0] == 4 for batch in alone)
    names = Counter(name for batch in alone for name in batch.names)
    assert not names.keys() & {"3.mp4", "4.mp4"} and sum(names.values()) == 40
    assert set(loader.bad_files.named) == {"3.mp4", "4.mp4"}
    written = {record["path"]: record["reason"] for record in map(json.loads, file.read_text().splitlines())}
    assert written.keys() == {"3.mp4", "4.mp4"}
    assert "No such file" in written["3.mp4"] and "when it was indexed" in written["4.mp4"]
    workers = make_train_loader(damaged, SETTINGS, num_workers=2, **options)
    assert_equal(list(islice(iter(workers), 10)), alone)  # substitutes are pure functions too
    assert len(file.read_text().splitlines()) == 2


def test_a_run_with_too_many_bad_files_stops(damaged: ClipSet) -> None:
    loader = make_train_loader(damaged, SETTINGS, batch_size=4, num_workers=1)
    with pytest.raises(UserError, match=r"limit of 5\.0%"):
        list(islice(iter(loader), 30))


def test_storage_that_goes_away_ends_the_run_in_one_sentence(damaged: ClipSet) -> None:
    shutil.rmtree(damaged.index.data_root)
    loader = make_train_loader(damaged, SETTINGS, batch_size=1, num_workers=1, bad_file_limit=1.0)
    with pytest.raises(UserError, match=r"64 files in a row could not be read at position 0.*No such file"):
        next(iter(loader))
    with pytest.raises(UserError, match="not one validation clip"):
        list(make_validation_loader(damaged, SETTINGS, batch_size=4))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_validation_leaves_bad_files_out_and_reads_once(damaged: ClipSet, num_workers: int) -> None:
    loader = make_validation_loader(damaged, SETTINGS, batch_size=4, num_workers=num_workers)
    assert loader.kept_clips == {}
    loader.start()
    first = list(loader)
    assert {name for batch in first for name in batch.names} == {f"{n}.mp4" for n in range(20) if n not in (3, 4)}
    assert set(loader.bad_files.named) == {"3.mp4", "4.mp4"}
    shutil.rmtree(damaged.index.data_root)
    assert_equal(list(loader), first)
    assert (loader.reads.num_clips, loader.reads.num_tries, loader.reads.num_bad_tries) == (18, 40, 4)
    assert len(loader.kept_clips) == 18 and loader.kept_clips[first[1].names[0]].equal(first[1].frames[0])
    assert not any(batch.frames.is_shared() for batch in first), "the workers' shared memory is free again"


def test_an_iteration_that_is_cut_off_keeps_nothing(damaged: ClipSet) -> None:
    loader = make_validation_loader(damaged, SETTINGS, batch_size=4)
    next(iter(loader))
    assert loader.kept_clips == {} and sum(map(len, loader)) == 18


def test_validation_clips_that_do_not_fit_are_read_again_each_time(
    damaged: ClipSet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tinyvae.data.loader.MAX_KEPT_BYTES", 20 * 5 * 3 * 32 * 48 - 1)
    loader = make_validation_loader(damaged, SETTINGS, batch_size=4, num_workers=2)
    with caplog.at_level("INFO", logger="tinyvae"):
        assert_equal(list(loader), list(loader))
    assert caplog.text.count("they are decoded again for each validation") == 1
    assert "take 450 KiB, more than the 450 KiB that are kept in memory:" in caplog.text and loader.kept_clips == {}
    shutil.rmtree(damaged.index.data_root)
    with pytest.raises(UserError, match="not one validation clip could be read"):
        list(loader)


def test_training_workers_that_started_early_give_the_same_clips(train: ClipSet) -> None:
    early = make_train_loader(train, SETTINGS, batch_size=2, num_workers=2)
    early.start()
    with closing(iter(early)) as batches:
        assert_equal(list(islice(batches, 5)), take(train, 5, batch_size=2))
    assert_equal(list(islice(iter(early), 1)), take(train, 1, batch_size=2))  # from the start again


def test_workers_that_nobody_used_end_with_their_loader(val: ClipSet) -> None:
    others = set(psutil.Process().children())
    loader = make_validation_loader(val, SETTINGS, batch_size=1, num_workers=2)
    loader.start()
    workers = [child for child in psutil.Process().children() if child not in others]
    assert len(workers) >= 2
    loader.close()
    assert still_alive(workers) == []
    assert sum(map(len, loader)) == len(val), "it can still be used"


def test_ranks_judge_bad_validation_files_together(damaged: ClipSet) -> None:
    """Each of 20 ranks has one clip: a rank whose only clip is bad is no error, as it is none for a single process."""

    def reads_of_all() -> list[ValidationReads]:
        loaders = [make_validation_loader(damaged, SETTINGS, batch_size=4, rank=r, world_size=20) for r in range(20)]
        names = [name for loader in loaders for batch in loader for name in batch.names]
        assert len(names) == sum(loader.reads.num_clips for loader in loaders)
        return [loader.reads for loader in loaders]

    judge = make_validation_loader(damaged, SETTINGS, batch_size=4, rank=1, world_size=20)
    reads = reads_of_all()
    assert [of_rank.num_clips for of_rank in reads].count(0) == 2
    judge.check(reads)
    with pytest.raises(UserError, match=r"8 of 80 clips read so far \(10\.0%\) were bad, above the limit of 5\.0%"):
        judge.check(4 * reads)
    shutil.rmtree(damaged.index.data_root)
    first = damaged.index.row(int(damaged.rows[0])).path
    with pytest.raises(UserError, match=f"not one validation clip could be read; the first was {first!r}: .*No such"):
        judge.check(reads_of_all())


def test_the_share_of_bad_validation_files_is_judged_for_a_single_process_too(damaged: ClipSet) -> None:
    loader = make_validation_loader(damaged, SETTINGS, batch_size=4)
    for _ in range(3):
        assert sum(len(batch) for batch in loader) == 18
    with pytest.raises(UserError, match=r"8 of 80 clips read so far .* above the limit of 5\.0%"):
        list(loader)


def test_workers_survive_the_schedulers_signal(train: ClipSet) -> None:
    alone, others = take(train, 12, batch_size=2), set(psutil.Process().children())
    batches = iter(make_train_loader(train, SETTINGS, batch_size=2, num_workers=2))
    got = [next(batches), next(batches)]  # one of each worker: both have begun
    workers = [child for child in psutil.Process().children() if child not in others]
    assert len(workers) >= 2
    for worker in workers:
        # From a process that is not the worker's parent, as a scheduler would. (Slim images have no program `kill`.)
        for name in ("-TERM", "-INT", "-TERM"):
            subprocess.run(["sh", "-c", f"kill {name} {worker.pid}"], check=True)
    got += list(islice(batches, 10))
    assert_equal(got, alone)
    del batches
    assert still_alive(workers) == []


@pytest.mark.slow
def test_fresh_workers_take_over_from_a_killed_one(
    train: ClipSet, val: ClipSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For training and validation; the main process hears of it where it asks for a batch, and nowhere else."""
    handler, others = signal.getsignal(signal.SIGCHLD), set(psutil.Process().children())
    workers = {"num_workers": 2, "prefetch_factor": 1}
    start, found_at_start = loader_module.starting_workers, []

    def starting_workers(num_workers: int) -> AbstractContextManager[None]:
        if num_workers:
            children = [child for child in psutil.Process().children() if child not in others]
            found_at_start.append([child for child in children if child.status() != psutil.STATUS_ZOMBIE])
        return start(num_workers)

    monkeypatch.setattr(loader_module, "starting_workers", starting_workers)
    trained = iter(make_train_loader(train, SETTINGS, batch_size=2, **workers))
    got = [next(trained)]
    kill_a_worker(others)
    assert_equal([*got, *islice(trained, 5)], take(train, 6, batch_size=2))
    del trained
    validation = make_validation_loader(val, SETTINGS, batch_size=1, **workers)
    validated = iter(validation)
    got = [next(validated)]
    kill_a_worker(others)
    whole = list(make_validation_loader(val, SETTINGS, batch_size=1))
    assert len(whole) > 3
    assert_equal([*got, *validated], whole)
    assert_equal(list(validation), whole)
    assert found_at_start == [[]] * 4, "the memory may be full: the others of a killed one end first"
    assert signal.getsignal(signal.SIGCHLD) == handler, "torch's, which raises anywhere, is not left behind"


def kill_a_worker(others: set[psutil.Process]) -> None:
    workers = [child for child in psutil.Process().children() if child not in others]
    assert len(workers) == 2
    workers[0].kill()
    while workers[0].status() != psutil.STATUS_ZOMBIE:  # not wait(), which would take its end away from the loader
        time.sleep(0.01)


def signal_while_starting(worker: int) -> None:
    """In place of `start_worker`: the scheduler's signals come before the worker has done anything."""
    for number in workers.JOB_SIGNALS:
        subprocess.run(["sh", "-c", f"kill -{int(number)} {os.getpid()}"], check=True)
    workers.start_worker(worker)


def test_a_signal_that_comes_while_workers_start(train: ClipSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "start_worker", signal_while_starting)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    got = take(train, 4, batch_size=2, num_workers=2)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask, "the main process hears signals as before"
    assert_equal(got, take(train, 4, batch_size=2))


def test_a_program_that_ends_in_mid_iteration_leaves_no_worker_behind(train: ClipSet) -> None:
    script = (
        "import sys, psutil\n"
        "from pathlib import Path\n"
        "from tinyvae.data import *\n"
        "settings = ClipSettings(height=32, width=48, n_frames=5)\n"
        "clips, _ = split(open_index(Path(sys.argv[1])), settings)\n"
        "batches = iter(make_train_loader(clips, settings, batch_size=2, num_workers=2))\n"
        "next(batches)\n"
        "print(*[child.pid for child in psutil.Process().children()])\n"
    )
    words = [sys.executable, "-c", script, str(train.index.file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANGS_S, check=True)
    workers = [int(pid) for pid in done.stdout.split()]
    assert len(workers) == 2 and still_alive(workers) == []


def test_counts_that_cannot_be_meant_are_refused(train: ClipSet, val: ClipSet) -> None:
    with pytest.raises(UserError, match="batch size is 0"):
        make_train_loader(train, SETTINGS, batch_size=0)
    with pytest.raises(UserError, match="num_workers is -1"):
        make_train_loader(train, SETTINGS, batch_size=1, num_workers=-1)
    with pytest.raises(UserError, match="start_sample is -1"):
        make_train_loader(train, SETTINGS, batch_size=1, start_sample=-1)
    with pytest.raises(UserError, match="num_samples is 0"):
        make_validation_loader(val, SETTINGS, batch_size=1, num_samples=0)
