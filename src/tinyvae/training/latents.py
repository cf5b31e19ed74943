"""Making a latent store: the teacher's latents of a run's first N clips, in the run's own order.

`make_shards` works in this process, with the run's own loader. `make_shards_on_cluster` works on a Ray cluster: tasks
on all cores read clips, and one actor per GPU encodes them and writes its shards, so all machines must share the
store's folder. The micro-batches are the same, and so is the store.
"""

from __future__ import annotations

import gc
import shutil
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tinyvae.config.load import LoadedConfig
from tinyvae.config.rules import path_complaints, raise_complaints
from tinyvae.config.schema import TrainConfig
from tinyvae.data.clip_reading import BadFileWatch, ClipBatch, Clips, ReadBatch
from tinyvae.data.latent_store import DTYPES, LOCK, MANIFEST, LatentStore, StoredLatents, StoreFacts
from tinyvae.data.loader import make_position_loader
from tinyvae.data.ray_cluster import check_address, ray_cluster
from tinyvae.data.splits import ClipSet
from tinyvae.errors import UserError, closed_paths_told
from tinyvae.files import lock_file, make_output_folder, writing_to
from tinyvae.storage import Place, Url, use_file_cache, work_folder
from tinyvae.teachers import Teacher, identify_teacher
from tinyvae.terminal import bytes_in_words, count_of, progress_bar
from tinyvae.training.build import build_teacher, clip_facts, settle_compilation
from tinyvae.training.clips import RunData, open_data, training_settings
from tinyvae.training.engine import Engine
from tinyvae.training.guards import is_out_of_memory

NOT_NEEDED = {"pretrained_model_path", "lpips_weights", "output_dir", "report_to"}
"""Settings that name files and packages of a run that its latents do not need."""

ReadPart = tuple[ReadBatch, npt.NDArray[np.uint8]]
"""A micro-batch without its frames, and the frames (NTCHW): Ray shares arrays between processes without a copy."""


@dataclass(frozen=True, kw_only=True)
class LatentJob:
    """What one command makes: ``num_clips`` clips in ``folder``; of the shards every ``num_parts``-th from ``part``."""

    folder: Place
    num_clips: int
    dtype: str = "bfloat16"
    part: int = 0
    num_parts: int = 1
    processes: int = 1
    """How many the run will have; only counts for clips of several sizes."""
    ray: str | None = None
    """The address of the Ray cluster that makes the shards; None: this process."""


def make_latents(loaded: LoadedConfig, job: LatentJob) -> int:
    """Make what is missing of a store, and return how many shards of other parts are still missing.

    Raises `UserError` for mistakes. Shards that are there stay.

    Example::

        job = LatentJob(folder=Path("latents"), num_clips=10_000)
        make_latents(load_config("h100", ["--data_root", "clips"]), job)
    """
    config = loaded.config
    check_job(loaded, job)
    make_output_folder(work_folder(job.folder))
    engine = Engine(config)
    if engine.world_size > 1:
        raise UserError("a launcher started several processes; start each by itself, with --shard 1/8, 2/8 and so on.")
    data = open_clips(config, engine, job)
    teacher = build_teacher(settle_compilation(config, engine.device), engine.device)
    facts = facts_of(config, data.train, teacher, job)
    check_room(config, facts, job)
    with writing_to(work_folder(job.folder)):
        store = LatentStore.create(job.folder, facts, num_clips=job.num_clips, batch_size=config.train_batch_size)
    shards = list(store.missing_shards(job.part, job.num_parts, skip_damaged=True))
    print(f"{count_of(len(store.shards), 'shard')} in all, {len(shards)} to make here", flush=True)
    if job.ray is None:
        make_shards(data, store, teacher, shards)
    elif shards:
        make_shards_on_cluster(job.ray, data, store, shards)
    return len(list(store.missing_shards(skip_damaged=True)))


@closed_paths_told()
def check_job(loaded: LoadedConfig, job: LatentJob) -> None:
    """Refuse settings that no store can be made from, and a cluster that does not answer."""
    config = loaded.config
    if job.ray is not None:
        check_address(job.ray)
    use_file_cache(config.file_cache_dir, config.file_cache_gb)
    if config.latent_store is not None:
        raise UserError("latent_store is set, but a store is made by the teacher itself; use --latent_store none.")
    if config.teacher_path is None:
        text = "there is no teacher whose latents could be stored; use --teacher FOLDER"
        raise UserError(f"{loaded.source}: {text}, and a weight for encoder_loss_weight or decoder_loss_weight.")
    complaints = path_complaints(config, loaded.given_paths)
    needed = [complaint for complaint in complaints if not NOT_NEEDED & set(complaint.keys)]
    raise_complaints(needed, heading=loaded.source)


def open_clips(config: TrainConfig, engine: Engine, job: LatentJob) -> RunData:
    """The run's files; where they have no index yet, the first process that comes makes it. A store that was begun
    goes on with the files that it has."""
    folder = work_folder(job.folder)
    with open(folder / LOCK, "ab") as stream:
        lock_file(stream, wait=True)
        begun = (job.folder / MANIFEST).exists()
        return open_data(config, engine, folder, index_folder=folder, keeps_verdicts=begun)


def facts_of(config: TrainConfig, train: ClipSet, teacher: Teacher, job: LatentJob) -> StoreFacts:
    """What a store of this run's latents says of itself."""
    assert config.teacher_path is not None
    known = identify_teacher(config.teacher_path)
    assert known is not None, "a teacher that was loaded is on this machine"
    return StoreFacts(
        teacher={**known, "dtype": config.ref_vae_dtype},
        **clip_facts(config, train, processes=job.processes),
        space=asdict(teacher.space),
        dtype=job.dtype,
        has_std=config.ref_vae_sample,
    )


def latent_bytes(config: TrainConfig, store: LatentStore) -> int:
    """What a whole store takes, as far as it can be told before: the shares of several sizes hold on average."""
    spec, factor = config.spec, config.spec.space_factor
    values = 0.0
    for stage, positions in zip(config.sizes.stages, store.stages, strict=True):
        for (n_frames, height, width), share in zip(stage.sizes, stage.shares, strict=True):
            values += len(positions) * share * spec.latents(n_frames) * (height // factor) * (width // factor)
    itemsize = DTYPES[store.facts.dtype].itemsize * (2 if store.facts.has_std else 1)
    return round(values) * spec.latent_channels * itemsize


def check_room(config: TrainConfig, facts: StoreFacts, job: LatentJob) -> None:
    """Say how large the store will be, and refuse what the disk cannot hold, before anything is written."""
    store = LatentStore(folder=job.folder, facts=facts, num_clips=job.num_clips)
    whole, num_clips, there = latent_bytes(config, store), sum(map(len, store.stages)), store.num_bytes
    needed = max(0, whole - there) // job.num_parts
    clips = f"{count_of(num_clips, 'clip')} of {bytes_in_words(whole // num_clips)} in {facts.dtype}"
    print(f"{job.folder}: {clips}, {bytes_in_words(whole)} in all")
    to_write = f"{bytes_in_words(there)} there, {bytes_in_words(needed)} to write here"
    if isinstance(job.folder, Url):  # nobody tells how much room is there
        print(to_write)
        return
    free = shutil.disk_usage(job.folder).free
    print(f"{to_write}, {bytes_in_words(free)} free")
    if needed > free:
        raise UserError(
            f"the disk of {job.folder} has {bytes_in_words(free)} free, and {bytes_in_words(needed)} are needed; make "
            f"room for {bytes_in_words(needed - free)} more, name another --output, or store fewer --clips."
        )


def micro_batches(store: LatentStore, shard: int, batch_size: int) -> list[range]:
    """The positions of a shard in the run's own micro-batches: a clip then has the same neighbors as in the run."""
    return [
        range(max(first, piece.start), min(first + batch_size, piece.stop))
        for piece in store.pieces(shard)
        for first in range(piece.start - piece.start % batch_size, piece.stop, batch_size)
    ]


def write_shard(store: LatentStore, teacher: Teacher, shard: int, batches: Iterable[ClipBatch]) -> None:
    """Encode the micro-batches of a shard as they come, and write it."""
    made: list[StoredLatents] = []
    files: list[str] = []
    try:
        for batch in batches:
            frames_NTCHW = batch.model_input(teacher.device)
            mean, std = teacher.distribution(teacher.clip_of(frames_NTCHW), with_std=store.facts.has_std)
            made.append(StoredLatents(mean=mean, std=std).to("cpu"))
            files += batch.names
    except (RuntimeError, MemoryError) as fault:
        if not is_out_of_memory(fault):
            raise
        raise UserError("out of memory in the teacher; use smaller clips or a smaller --train_batch_size.") from None
    with writing_to(work_folder(store.folder)):
        store.write(shard, made, files)


def make_shards(data: RunData, store: LatentStore, teacher: Teacher, shards: Sequence[int]) -> None:
    """Read, encode and write shards in this process, with workers that read ahead."""
    work = {shard: micro_batches(store, shard, data.config.train_batch_size) for shard in shards}
    loader = make_position_loader(
        data.train,
        training_settings(data.config),
        [positions for parts in work.values() for positions in parts],
        sizes=store.facts.sizes,
        **data.loading,
    )
    total = sum(len(store.positions(shard)) for shard in shards)
    batches: Any = iter(loader)
    with closing(batches), progress_bar(total=total, desc="latents", unit="clip", disable=not shards) as bar:
        for shard, parts in work.items():
            write_shard(store, teacher, shard, islice(batches, len(parts)))
            bar.update(len(store.positions(shard)))


# on a Ray cluster


def make_shards_on_cluster(address: str, data: RunData, store: LatentStore, shards: Sequence[int]) -> None:
    """As `make_shards`, on the cluster at ``address``; there each actor loads a teacher of its own."""
    config = data.config
    limit, sizes = config.bad_file_limit, store.facts.sizes
    clips = Clips(data.train, training_settings(config), training=True, sizes=sizes, bad_file_limit=limit)
    watch = BadFileWatch(limit=limit, written_to=data.bad_files)
    work = ((shard, micro_batches(store, shard, config.train_batch_size)) for shard in shards)
    total = sum(len(store.positions(shard)) for shard in shards)
    with ray_cluster(address) as cluster, progress_bar(total=total, desc="latents", unit="clip") as bar:
        make_worker = partial(open_encoder, config, store, "cuda" if cluster.num_gpus else "cpu")
        for shard, reads in cluster.feed(partial(read_part, config, clips), make_worker, work):
            for read in reads:
                watch.see(read.bad_files, read.num_tries)
                watch.judge()
                if read.failure:
                    raise UserError(read.failure)
            bar.update(len(store.positions(shard)))


def read_part(config: TrainConfig, clips: Clips, positions: range) -> ReadPart:
    """Read the clips of a micro-batch; a failure is in what it returns, with the bad files."""
    use_file_cache(config.file_cache_dir, config.file_cache_gb)
    read = clips.__getitems__(list(positions))
    gc.collect()  # closed decoders, which hold frames
    if read.batch is None:
        return read, np.empty(0, np.uint8)
    bare = replace(read.batch, frames=torch.empty(0, dtype=torch.uint8))
    return replace(read, batch=bare, loan=None), read.batch.frames.numpy()


def open_encoder(config: TrainConfig, store: LatentStore, device: str) -> Callable[..., list[ReadBatch]]:
    """Load the teacher of a store, in an actor: what it gives encodes and writes a shard."""
    assert config.teacher_path is not None
    place = torch.device(device)
    teacher = build_teacher(settle_compilation(config, place), place)
    known = identify_teacher(config.teacher_path) or {}
    if known.items() - store.facts.teacher.items():
        raise UserError(
            f"the teacher {config.teacher_path} on machine {socket.gethostname()} is not that of the store "
            f"{store.folder}; all machines of the Ray cluster need the same files under the same path"
        )
    return partial(encode_shard, store, teacher)


def encode_shard(store: LatentStore, teacher: Teacher, shard: int, *parts: ReadPart) -> list[ReadBatch]:
    """Encode and write a shard; returns what happened while its parts were read. A failed part: nothing is written."""
    reads: list[ReadBatch] = [replace(read, batch=None) for read, _ in parts]
    if any(read.failure for read in reads):
        return reads
    bare = [(read.batch, frames) for read, frames in parts if read.batch is not None]
    assert len(bare) == len(parts), "a training batch without failure is whole"
    batches = (replace(batch, frames=torch.from_numpy(frames.copy())) for batch, frames in bare)  # Ray's are read-only
    write_shard(store, teacher, shard, batches)
    return reads
