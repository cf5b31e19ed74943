"""Making a latent store: the teacher's latents of a run's first N clips, in the run's own order.

A shard is made in three steps, each a function of its own: read its micro-batches (`data.clip_reading.Clips`, CPU),
`encode_clips` (where the teacher is), and `LatentStore.write`. `make_shards` does them in this process, with the run's
own loader, and `latent_cluster.make_shards_on_cluster` on a Ray cluster.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from tinyvae.config.load import LoadedConfig
from tinyvae.config.rules import path_complaints, raise_complaints, value_complaints
from tinyvae.config.schema import TrainConfig
from tinyvae.data.clip_reading import ClipBatch
from tinyvae.data.latent_store import DTYPES, LOCK, LatentStore, StoredLatents, StoreFacts
from tinyvae.data.loader import make_position_loader
from tinyvae.data.splits import ClipSet
from tinyvae.errors import UserError
from tinyvae.files import lock_file, make_output_folder, writing_to
from tinyvae.storage import Place, Url, use_file_cache, work_folder
from tinyvae.teachers import Teacher, identify_teacher
from tinyvae.terminal import bytes_in_words, count_of, progress_bar
from tinyvae.training.build import build_teacher, clip_facts
from tinyvae.training.clips import RunData, loading_processes, open_data, training_settings
from tinyvae.training.engine import Engine
from tinyvae.training.guards import is_out_of_memory

NOT_NEEDED = {"pretrained_model_path", "lpips_weights", "output_dir"}
"""Settings that name files of a run that its latents do not need."""

MakeShards = Callable[[TrainConfig, RunData, LatentStore, Teacher, Sequence[int]], None]
"""What makes the missing shards: `make_shards` in this process, or `latent_cluster.make_shards_on_cluster`."""


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


def make_latents(loaded: LoadedConfig, job: LatentJob, *, make: MakeShards | None = None) -> int:
    """Make what is missing of a store, and return how many shards of other parts are still missing.

    Raises `UserError` for mistakes. Shards that are there stay.

    Example::

        job = LatentJob(folder=Path("latents"), num_clips=10_000)
        make_latents(load_config("h100", ["--data_root", "clips"]), job)
    """
    config = loaded.config
    check_job(loaded)
    make_output_folder(work_folder(job.folder))
    engine = Engine(config)
    if engine.world_size > 1:
        raise UserError("a launcher started several processes; start each by itself, with --shard 1/8, 2/8 and so on.")
    data = open_clips(config, engine, work_folder(job.folder))
    teacher = build_teacher(config, engine.device)
    facts = facts_of(config, data.train, teacher, job)
    check_room(config, facts, job)
    with writing_to(work_folder(job.folder)):
        store = LatentStore.create(job.folder, facts, num_clips=job.num_clips, batch_size=config.train_batch_size)
    shards = list(store.missing_shards(job.part, job.num_parts, skip_damaged=True))
    print(f"{count_of(store.num_shards, 'shard')} in all, {len(shards)} to make here", flush=True)
    (make or make_shards)(config, data, store, teacher, shards)
    return len(list(store.missing_shards(skip_damaged=True)))


def check_job(loaded: LoadedConfig) -> None:
    """Refuse settings that no store can be made from."""
    config = loaded.config
    use_file_cache(config.file_cache_dir, config.file_cache_gb)
    if config.latent_store is not None:
        raise UserError("latent_store is set, but a store is made by the teacher itself; use --latent_store none.")
    if config.teacher_path is None:
        text = "there is no teacher whose latents could be stored; use --use_ref_vae true --ref_vae_path FOLDER"
        raise UserError(f"{loaded.source}: {text}, and a weight for encoder_loss_weight or decoder_loss_weight.")
    complaints = [*value_complaints(config), *path_complaints(config, loaded.given_paths)]
    needed = [complaint for complaint in complaints if not NOT_NEEDED & set(complaint.keys)]
    raise_complaints(needed, heading=loaded.source)


def open_clips(config: TrainConfig, engine: Engine, folder: Path) -> RunData:
    """The run's files; where they have no index yet, it is made in ``folder`` by the first process that comes."""
    with open(folder / LOCK, "ab") as stream:
        lock_file(stream, wait=True)
        return open_data(config, engine, folder, index_folder=folder)


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
        piece[first : first + batch_size] for piece in store.pieces(shard) for first in range(0, len(piece), batch_size)
    ]


def encode_clips(teacher: Teacher, batch: ClipBatch, *, with_std: bool) -> StoredLatents:
    """The teacher's latents of a micro-batch, on the CPU, in the teacher's dtype."""
    frames_NTCHW = batch.model_input(teacher.device)
    try:
        mean, std = teacher.distribution(teacher.clip_of(frames_NTCHW), with_std=with_std)
    except (RuntimeError, MemoryError) as fault:
        if not is_out_of_memory(fault):
            raise
        raise UserError("out of memory in the teacher; use smaller clips or a smaller --train_batch_size.") from None
    return StoredLatents(mean=mean, std=std).to("cpu")


def make_shards(
    config: TrainConfig, data: RunData, store: LatentStore, teacher: Teacher, shards: Sequence[int]
) -> None:
    """Read, encode and write shards in this process, with workers that read ahead; each is written when it is full."""
    batches = [(shard, part) for shard in shards for part in micro_batches(store, shard, config.train_batch_size)]
    loader = make_position_loader(
        data.train,
        training_settings(config),
        [positions for _, positions in batches],
        sizes=store.facts.sizes,
        num_workers=loading_processes(config),
        prefetch_factor=config.prefetch_factor,
        pin_memory=config.pin_memory,
        bad_file_limit=config.bad_file_limit,
        bad_file_log=data.bad_files,
    )
    reads: Iterable[ClipBatch] = iter(loader)
    made: list[StoredLatents] = []
    files: list[str] = []
    total = sum(len(positions) for _, positions in batches)
    with closing(reads), progress_bar(total=total, desc="latents", unit="clip", disable=not batches) as bar:  # type: ignore[type-var]
        for (shard, positions), batch in zip(batches, reads, strict=True):
            made.append(encode_clips(teacher, batch, with_std=store.facts.has_std))
            files += batch.names
            bar.update(len(batch))
            if positions[-1] == store.positions(shard)[-1]:
                with writing_to(work_folder(store.folder)):
                    store.write(shard, made, files)
                made, files = [], []
