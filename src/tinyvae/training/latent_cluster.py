"""Making the shards of a latent store on a Ray cluster: tasks on all cores read clips, one actor per GPU encodes them.

The micro-batches are those of `latents.make_shards`, so the store is the same. Actors write their shards themselves:
the folder of the store must be on storage that all machines share.
"""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tinyvae.config.schema import TrainConfig
from tinyvae.data.clip_reading import BadFileWatch, Clips, ReadBatch
from tinyvae.data.latent_store import LatentStore
from tinyvae.data.ray_cluster import ray_cluster
from tinyvae.errors import UserError
from tinyvae.files import writing_to
from tinyvae.storage import use_file_cache, work_folder
from tinyvae.teachers import Teacher, identify_teacher
from tinyvae.terminal import progress_bar
from tinyvae.training.build import build_teacher
from tinyvae.training.clips import RunData, training_settings
from tinyvae.training.latents import encode_clips, micro_batches

ReadPart = tuple[ReadBatch, npt.NDArray[np.uint8]]
"""A micro-batch without its frames, and the frames (NTCHW): Ray shares arrays between processes without a copy."""


def make_shards_on_cluster(
    address: str, config: TrainConfig, data: RunData, store: LatentStore, teacher: Teacher, shards: Sequence[int]
) -> None:
    """As `latents.make_shards`, on the cluster at ``address``; there each actor loads a teacher of its own."""
    if not shards:
        return
    clips = Clips(data.train, training_settings(config), training=True, sizes=store.facts.sizes)
    watch = BadFileWatch(limit=config.bad_file_limit, written_to=data.bad_files)
    work = ((shard, micro_batches(store, shard, config.train_batch_size)) for shard in shards)
    total = sum(len(store.positions(shard)) for shard in shards)
    with (
        ray_cluster(address) as cluster,
        progress_bar(total=total, desc="latents", unit="clip") as bar,
    ):
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
    teacher = build_teacher(config, torch.device(device))
    known = identify_teacher(config.teacher_path) or {}
    if known.items() - store.facts.teacher.items():
        raise UserError(
            f"the teacher {config.teacher_path} on machine {socket.gethostname()} is not that of the store "
            f"{store.folder}; all machines of the Ray cluster need the same files under the same path"
        )
    return partial(encode_shard, config, store, teacher)


def encode_shard(
    config: TrainConfig, store: LatentStore, teacher: Teacher, shard: int, *parts: ReadPart
) -> list[ReadBatch]:
    """Encode and write a shard; returns what happened while its parts were read. A failed part: nothing is written."""
    reads: list[ReadBatch] = [replace(read, batch=None) for read, _ in parts]
    if any(read.failure for read in reads):
        return reads
    made: list[Any] = []
    names: list[str] = []
    for read, frames in parts:
        assert read.batch is not None, "a training batch without failure is whole"
        batch = replace(read.batch, frames=torch.from_numpy(frames.copy()))  # Ray's own are read-only
        made.append(encode_clips(teacher, batch, with_std=store.facts.has_std))
        names += batch.names
    with writing_to(work_folder(store.folder)):
        store.write(shard, made, names)
    return reads
