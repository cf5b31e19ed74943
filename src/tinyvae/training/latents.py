"""Making a latent store: the teacher's latents of a run's first N clips, in the run's own order.

A shard goes three ways, each a function of its own: `read_clips` (CPU), `encode_clips` (where the teacher is) and
`LatentStore.write`. `make_latents` sends all missing shards through them in this process, with the run's own loader.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from tinyvae.config.load import LoadedConfig
from tinyvae.config.rules import check_config
from tinyvae.config.schema import TrainConfig
from tinyvae.data.clip_reading import ClipBatch, Clips
from tinyvae.data.latent_store import DTYPES, LOCK, LatentStore, StoredLatents, StoreFacts
from tinyvae.data.loader import make_position_loader
from tinyvae.data.splits import ClipSet
from tinyvae.errors import UserError
from tinyvae.files import lock_file, make_output_folder, writing_to
from tinyvae.models.variants import VariantSpec
from tinyvae.teachers import Teacher, identify_teacher
from tinyvae.terminal import bytes_in_words, count_of, progress_bar
from tinyvae.training.build import build_teacher, clip_facts
from tinyvae.training.clips import RunData, loading_processes, open_data, training_settings
from tinyvae.training.engine import Engine
from tinyvae.training.guards import is_out_of_memory

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LatentJob:
    """What one command makes: ``num_clips`` clips in ``folder``; of the shards every ``num_parts``-th from ``part``."""

    folder: Path
    num_clips: int
    dtype: str = "bfloat16"
    part: int = 0
    num_parts: int = 1
    processes: int = 1
    """How many the run will have; only counts for clips of several sizes."""


def make_latents(loaded: LoadedConfig, job: LatentJob) -> LatentStore:
    """Make what is missing of a store; raises `UserError` for mistakes. Shards that are there stay.

    Example::

        job = LatentJob(folder=Path("latents"), num_clips=10_000)
        make_latents(load_config("h100", ["--data_root", "clips"]), job)
    """
    config = loaded.config
    check_job(loaded)
    make_output_folder(job.folder)
    engine = Engine(config)
    data = open_clips(config, engine, job.folder)
    teacher = build_teacher(config, engine.device)
    store = begin_store(config, data.train, teacher, job)
    shards = list(store.missing_shards(job.part, job.num_parts, skip_damaged=True))
    print_size(config, store, shards)
    make_shards(config, data, store, teacher, shards)
    return store


def check_job(loaded: LoadedConfig) -> None:
    """Refuse settings that no store can be made from."""
    config = loaded.config
    if config.latent_store is not None:
        raise UserError("latent_store is set, but a store is made by the teacher itself; leave it out here.")
    if config.teacher_path is None:
        text = "there is no teacher whose latents could be stored; use --use_ref_vae true --ref_vae_path FOLDER"
        raise UserError(f"{loaded.source}: {text}, and a weight for encoder_loss_weight or decoder_loss_weight.")
    check_config(config, loaded.given_paths, heading=loaded.source)


def open_clips(config: TrainConfig, engine: Engine, folder: Path) -> RunData:
    """The run's files; where they have no index yet, it is made in ``folder`` by the first process that comes."""
    with open(folder / LOCK, "ab") as stream:
        lock_file(stream, wait=True)
        return open_data(config, engine, folder, index_folder=folder)


def begin_store(config: TrainConfig, train: ClipSet, teacher: Teacher, job: LatentJob) -> LatentStore:
    """The store to write into, new or begun before with the same settings."""
    assert config.teacher_path is not None
    known = identify_teacher(config.teacher_path)
    assert known is not None, "a teacher that was loaded is on this machine"
    facts = StoreFacts(
        teacher={**known, "dtype": config.ref_vae_dtype},
        **clip_facts(config, train, processes=job.processes),
        space=asdict(teacher.space),
        dtype=job.dtype,
        has_std=config.ref_vae_sample,
    )
    with writing_to(job.folder):
        return LatentStore.create(job.folder, facts, num_clips=job.num_clips, batch_size=config.train_batch_size)


def latent_bytes(config: TrainConfig, store: LatentStore, shards: Iterable[int]) -> int:
    """What the latents of some shards take."""
    spec, facts, sizes = config.spec, store.facts, store.facts.sizes
    if sizes is None:
        clips = Counter({config.sizes.largest: sum(len(store.positions(shard)) for shard in shards)})
    else:
        positions = (position for shard in shards for position in store.positions(shard))
        clips = Counter(sizes.size_at(position, seed=config.seed) for position in positions)
    factor = spec.space_factor
    pixels = sum(
        count * spec.latents(size.n_frames) * (size.height // factor) * (size.width // factor)
        for size, count in clips.items()
    )
    return pixels * spec.latent_channels * DTYPES[facts.dtype].itemsize * (2 if facts.has_std else 1)


def print_size(config: TrainConfig, store: LatentStore, shards: Sequence[int]) -> None:
    """Say how large the work is, and refuse it where the disk cannot hold it."""
    whole, needed = (latent_bytes(config, store, numbers) for numbers in (store.shards, shards))
    free = shutil.disk_usage(store.folder).free
    num_clips = sum(map(len, store.stages))
    clips = f"{count_of(num_clips, 'clip')} of {bytes_in_words(whole // num_clips)} in {store.facts.dtype}"
    print(f"{store.folder}: {clips}: {bytes_in_words(whole)} in {count_of(store.num_shards, 'shard')}")
    print(f"to make here: {count_of(len(shards), 'shard')}, {bytes_in_words(needed)}; {bytes_in_words(free)} are free")
    if needed > free:
        lack = bytes_in_words(needed - free)
        raise UserError(
            f"the disk of {store.folder} has {bytes_in_words(free)} free, and {bytes_in_words(needed)} are needed; "
            f"make room for {lack} more, name another --output, or store fewer --clips or in bfloat16."
        )


def micro_batches(store: LatentStore, shard: int, batch_size: int) -> list[range]:
    """The positions of a shard in the run's own micro-batches: a clip then has the same neighbors as in the run."""
    return [
        piece[first : first + batch_size] for piece in store.pieces(shard) for first in range(0, len(piece), batch_size)
    ]


def read_clips(clips: Clips, positions: range) -> ClipBatch:
    """Read the clips at some positions in this process; ``UserError`` where they cannot be read."""
    read = clips.__getitems__(list(positions))
    if read.failure or read.batch is None:
        raise UserError(read.failure)
    return read.batch


def encode_clips(teacher: Teacher, batch: ClipBatch, spec: VariantSpec, *, with_std: bool) -> StoredLatents:
    """The teacher's latents of a micro-batch, on the CPU, in the teacher's dtype."""
    frames_NTCHW = batch.model_input(teacher.device)
    try:
        target_NTCHW = frames_NTCHW[:, : spec.aligned_frames(frames_NTCHW.shape[1])]
        mean, std = teacher.distribution(target_NTCHW, with_std=with_std)
    except (RuntimeError, MemoryError) as fault:
        if not is_out_of_memory(fault):
            raise
        raise UserError("out of memory in the teacher; use a smaller --train_batch_size or clip.") from None
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
            made.append(encode_clips(teacher, batch, config.spec, with_std=store.facts.has_std))
            files += batch.names
            bar.update(len(batch))
            if positions[-1] == store.positions(shard)[-1]:
                with writing_to(store.folder):
                    store.write(shard, made, files)
                made, files = [], []
