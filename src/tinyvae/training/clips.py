"""The clips of a run: index, split and loaders, as a configuration asks for them."""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path

from tinyvae.config import TrainConfig
from tinyvae.data.bad_files import BadFileLog
from tinyvae.data.clip_reading import ClipBatch
from tinyvae.data.clip_settings import ClipSettings
from tinyvae.data.index_build import open_or_build_index
from tinyvae.data.loader import ValidationLoader, make_train_loader, make_validation_loader
from tinyvae.data.splits import ClipSet, split
from tinyvae.errors import UserError
from tinyvae.training.engine import Engine

log = logging.getLogger(__name__)


def training_settings(config: TrainConfig) -> ClipSettings:
    """What a training clip is."""
    return ClipSettings(
        height=config.height,
        width=config.width,
        n_frames=config.n_frames,
        min_frame_delta=config.min_frame_delta,
        max_frame_delta=config.max_frame_delta,
        random_crop=config.random_crop,
        random_resize=config.random_resize,
        random_flip=config.random_flip,
        color_jitter=config.color_jitter,
        color_jitter_params=config.color_jitter_params,
        gaussian_blur=config.gaussian_blur,
        gaussian_blur_sigma=config.gaussian_blur_sigma,
        gaussian_blur_probability=config.gaussian_blur_probability,
        allow_upscale=config.allow_upscale,
        seed=config.seed,
        decode_timeout_s=config.decode_timeout_s,
        decoded_cache_gb=config.decoded_cache_gb,
        decoded_cache_dir=config.decoded_cache_dir,
        variant=config.variant,
    )


def validation_settings(config: TrainConfig) -> ClipSettings:
    """What a validation clip is: its own size, the smallest frame step, nothing random."""
    n_frames, height, width = config.validation_size
    return replace(
        training_settings(config),
        n_frames=n_frames,
        height=height,
        width=width,
        max_frame_delta=config.min_frame_delta,
        random_crop=False,
        random_flip=False,
        color_jitter=False,
        gaussian_blur=False,
    )


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The two sides of the data, and where bad files are written down."""

    config: TrainConfig
    train: ClipSet
    validation: ClipSet
    bad_files: BadFileLog

    @property
    def fingerprint(self) -> str:
        """Equal where the same positions give the same clips."""
        return self.train.fingerprint

    def training_batches(self, engine: Engine, *, start_sample: int) -> Generator[ClipBatch, None, None]:
        """Endless micro-batches of this rank, from the clips that come after ``start_sample``. Close it at the end."""
        config = self.config
        loader = make_train_loader(
            self.train,
            training_settings(config),
            batch_size=config.train_batch_size,
            rank=engine.rank,
            world_size=engine.world_size,
            num_workers=config.dataloader_num_workers,
            prefetch_factor=config.prefetch_factor,
            pin_memory=config.pin_memory,
            start_sample=start_sample,
            bad_file_limit=config.bad_file_limit,
            bad_file_log=self.bad_files,
        )
        yield from loader

    def validation_loader(self, engine: Engine) -> ValidationLoader:
        """This rank's share of the validation clips: the same tensors every time."""
        config = self.config
        return make_validation_loader(
            self.validation,
            validation_settings(config),
            batch_size=config.validation_batch_size,
            rank=engine.rank,
            world_size=engine.world_size,
            num_samples=config.num_validation_samples,
            bad_file_limit=config.bad_file_limit,
            bad_file_log=self.bad_files,
        )


def open_data(config: TrainConfig, engine: Engine, folder: Path) -> RunData:
    """Write the sample clips where asked, index what is new (on one rank), and split."""
    if config.use_sample_clips:
        engine.from_main(lambda: write_missing_sample_clips(config))
    source = config.data_source
    if source is None:
        raise UserError("there is nothing to train on: set --data_root, --annotation_file or --index_path.")
    annotations = source / "annotations.json" if config.use_sample_clips and source.is_dir() else source
    index = open_or_build_index(
        annotations if annotations.is_file() else source,
        data_root=config.data_root,
        cache_dir=folder,
        is_main=engine.is_main,
        barrier=engine.barrier,
        num_workers=max(1, config.dataloader_num_workers),
        timeout_s=config.decode_timeout_s,
    )
    limits = {"train_split": config.train_split, "bad_file_limit": config.bad_file_limit}
    train, _ = split(index, training_settings(config), split_by=config.split_by, **limits)
    _, validation = split(index, validation_settings(config), split_by=config.split_by, **limits)
    bad_files = BadFileLog(folder / "bad_files.jsonl")
    if engine.is_main:
        num_bad = bad_files.add_index(index)
        log.info("data: %d files; left out: %s", len(index), train.excluded.sentence())
        if num_bad:
            log.warning("%d bad files are named in %s", num_bad, folder / "bad_files.jsonl")
    if config.validation_steps > 0 and len(validation) == 0:
        raise UserError(
            f"no file is left for validation with train_split={config.train_split:g}; lower it, add files, or switch "
            "validation off with --validation_steps 0."
        )
    return RunData(config=config, train=train, validation=validation, bad_files=bad_files)


def write_missing_sample_clips(config: TrainConfig) -> None:
    """Write the procedural clips to ``data_root`` unless that folder already holds something.

    They are made again at any time, so the folder hides itself from git.
    """
    from tinyvae.data.sample_clips import write_sample_clips

    folder = config.data_root
    if folder is None:
        raise UserError("use_sample_clips needs a folder to write to; set --data_root.")
    if folder.is_dir() and any(folder.iterdir()):
        return
    log.info("writing the sample clips to %s", folder)
    write_sample_clips(folder)
    (folder / ".gitignore").write_text("*\n")
