"""The clips of a run: index, split and loaders, as a configuration asks for them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinyvae.config.schema import TrainConfig
from tinyvae.data.clip import ClipSettings
from tinyvae.data.clip_reading import BadFileLog
from tinyvae.data.index import VideoIndex, is_index, open_index
from tinyvae.data.index_build import CACHED_INDEX, bring_up_to_date, usable_cores
from tinyvae.data.latent_store import LatentStore
from tinyvae.data.loader import TrainLoader, ValidationLoader, make_train_loader, make_validation_loader
from tinyvae.data.sizes import SizesOfPositions, with_size
from tinyvae.data.splits import ClipSet, split
from tinyvae.errors import UserError
from tinyvae.files import writing_to
from tinyvae.storage import Place
from tinyvae.training.engine import Engine

log = logging.getLogger(__name__)

SAMPLES_UNFINISHED = ".unfinished"  # in the folder of the sample clips while they are written


def training_settings(config: TrainConfig) -> ClipSettings:
    """What a training clip is. With several sizes: the most frames, height and width, which each file must hold."""
    return with_size(ClipSettings.from_config(config), config.sizes.bounds)


def validation_settings(config: TrainConfig) -> ClipSettings:
    """What a validation clip is: its own size, the smallest frame step, nothing random."""
    n_frames, height, width = config.validation_size
    return replace(
        ClipSettings.from_config(config),
        n_frames=n_frames,
        height=height,
        width=width,
        max_frame_delta=config.min_frame_delta,
        random_crop=False,
        crop_candidates=1,
        random_flip=False,
        random_turn=False,
        random_reverse=False,
        color_jitter=False,
        gaussian_blur=False,
    )


def loading_processes(config: TrainConfig) -> int:
    """As many as the configuration asks for, at most one for each processor core: more would wait for each other."""
    return min(config.dataloader_num_workers, usable_cores())


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The training and the validation files, and the list of bad files."""

    config: TrainConfig
    train: ClipSet
    validation: ClipSet
    bad_files: BadFileLog
    latents: LatentStore | None = None
    """The teacher's latents of the training clips, where the run takes them from a store."""

    @property
    def stored_clips(self) -> int | None:
        """After how many clips the first one comes again; None without a latent store."""
        return None if self.latents is None else self.latents.num_clips

    @property
    def loading(self) -> dict[str, Any]:
        """How clips are loaded, for the functions of `tinyvae.data.loader`."""
        config = self.config
        return {
            "num_workers": loading_processes(config),
            "prefetch_factor": config.prefetch_factor,
            "pin_memory": config.pin_memory,
            "bad_file_limit": config.bad_file_limit,
            "bad_file_log": self.bad_files,
        }

    def settled(self, index_folder: Path, folder: Path) -> RunData:
        """The same data, after its index was moved from ``index_folder`` to ``folder``: workers open it by its name."""
        if index_folder == folder or self.train.index.file.parent != index_folder:
            return self
        index = open_index(folder / CACHED_INDEX)
        return replace(self, train=replace(self.train, index=index), validation=replace(self.validation, index=index))

    def name_bad_files(self) -> None:
        """Write the bad files of the index to the list; main process only."""
        if num_bad := self.bad_files.add_index(self.train.index):
            log.warning("%d bad files are named in %s", num_bad, self.bad_files.file)

    def check_start(self, start_sample: int, start_step: int) -> None:
        """Refuse a latent store of several sizes where the run's steps did not always have as many clips as now."""
        sizes = None if self.latents is None else self.latents.facts.sizes
        if sizes is not None and start_sample != start_step * sizes.clips_per_step:
            raise UserError(
                f"the run has taken {start_sample} clips in {start_step} steps, and the latent store has "
                f"{sizes.clips_per_step} clips for each step, which decides over their sizes; go on with the teacher "
                "itself (--latent_store none), or start a new run."
            )

    def training_loader(self, engine: Engine, *, start_sample: int, start_step: int) -> TrainLoader:
        """Endless micro-batches of this rank, from the clips that come after ``start_sample``; ``start_step``: the
        optimizer step that they are for, which decides over their size. Close its iterator at the end."""
        config = self.config
        if self.latents is not None:
            sizes = self.latents.facts.sizes
        else:
            clips_per_step = config.train_batch_size * config.gradient_accumulation_steps * engine.world_size
            sizes = SizesOfPositions(
                schedule=config.sizes, clips_per_step=clips_per_step, start_sample=start_sample, start_step=start_step
            )
        return make_train_loader(
            self.train,
            training_settings(config),
            batch_size=config.train_batch_size,
            rank=engine.rank,
            world_size=engine.world_size,
            start_sample=start_sample,
            sizes=sizes,
            latents=self.latents,
            **self.loading,
        )

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
            **self.loading,
        )


def open_data(
    config: TrainConfig, engine: Engine, folder: Path, *, index_folder: Path, keeps_verdicts: bool
) -> RunData:
    """Write the sample clips if asked for, index new files in ``index_folder`` (on one rank), and split.

    ``keeps_verdicts``: a bad file that was repaired meanwhile stays out, because what was begun goes on.
    """
    if config.use_sample_clips:
        engine.from_main(lambda: write_missing_sample_clips(config))
    index = _open_index(config, engine, index_folder, keeps_verdicts=keeps_verdicts)
    train, validation = split_files(config, index)
    if engine.is_main:
        _log_excluded(config, train, validation)
    if fix := lack_of_validation(config, validation):
        raise UserError(f"no file is left for validation with train_split={config.train_split:g}; {fix}.")
    bad_files = BadFileLog(folder / "bad_files.jsonl")
    return RunData(config=config, train=train, validation=validation, bad_files=bad_files)


def split_files(config: TrainConfig, index: VideoIndex, *, whole: bool = True) -> tuple[ClipSet, ClipSet]:
    """The files that train and those that validate. Of a sample of the files (not ``whole``) all train: the hash may
    put it all on one side. So they do where no file can validate and the run never does."""
    settings, limit = training_settings(config), config.bad_file_limit
    if not whole:
        return split(index, settings, train_split=1.0, split_by="hash", bad_file_limit=limit)
    how: dict[str, Any] = {"split_by": config.split_by, "bad_file_limit": limit}
    try:
        return split(index, settings, validation=validation_settings(config), train_split=config.train_split, **how)
    except UserError:
        if config.validation_steps > 0:
            raise
    train, others = split(index, settings, train_split=1.0, **how)
    return train, replace(others, rows=others.rows[:0])


def _open_index(config: TrainConfig, engine: Engine, folder: Path, *, keeps_verdicts: bool) -> VideoIndex:
    """The index of the run's videos, made by the main process in ``folder`` unless the source itself is one."""
    source = list_of_videos(config)
    if is_index(source):
        return open_index(source, config.data_root)
    output = folder / CACHED_INDEX

    def make() -> None:
        with writing_to(folder):
            bring_up_to_date(
                source,
                output,
                data_root=config.data_root,
                keeps_verdicts=keeps_verdicts,
                num_workers=max(1, loading_processes(config)),
                timeout_s=config.decode_timeout_s,
            )

    engine.from_main(make)
    if not output.is_file():
        raise UserError(f"the index {output} is not visible here; all machines must share the storage of the run.")
    return open_index(output)


def _log_excluded(config: TrainConfig, train: ClipSet, validation: ClipSet) -> None:
    """Once for both sides, unless validation clips have another size; loud if few files can be used."""
    num_files, excluded = len(train.index), train.excluded
    fits = f" (each file must hold all sizes: {config.sizes.bounds})" if len(config.sizes.sizes) > 1 else ""
    log.info("data: %d files; left out: %s%s", num_files, excluded.sentence(), fits)
    if validation.excluded != excluded:
        log.info("data for validation: %d files; left out: %s", num_files, validation.excluded.sentence())
    if fix := lack_of_files(config, train):
        what = f"{excluded.unusable} of {num_files} ({excluded.sentence()})"
        log.warning("MOST FILES CANNOT BE USED: %s; %s", what, fix)


def lack_of_files(config: TrainConfig, train: ClipSet) -> str:
    """What to do if most files cannot be used; empty if enough can."""
    if not train.excluded.is_most_of(len(train.index)):
        return ""
    bounds = config.sizes.bounds
    clip = f"{bounds.n_frames} frames of {bounds.height}x{bounds.width}"
    return f"use smaller or shorter clips than {clip}, --allow_upscale true, or other files"


def lack_of_validation(config: TrainConfig, validation: ClipSet) -> str:
    """What to do if the run validates and has no file for it; empty if it has one."""
    if config.validation_steps == 0 or len(validation) > 0:
        return ""
    return "add files, lower --train_split, or switch validation off with --validation_steps 0"


def list_of_videos(config: TrainConfig) -> Place:
    """What lists the run's videos: its ``data_source``, or the list that was written with the sample clips."""
    source = config.data_source
    assert source is not None, "config.rules refuses a run without data"
    listed = source / "annotations.json"
    return listed if config.use_sample_clips and listed.is_file() else source


def lacks_sample_clips(config: TrainConfig) -> bool:
    """Whether the run has to write the sample clips: ``data_root`` is absent or empty, or a start was stopped there."""
    folder = config.data_root
    if not config.use_sample_clips or not isinstance(folder, Path):
        return False
    return not folder.is_dir() or not any(folder.iterdir()) or (folder / SAMPLES_UNFINISHED).exists()


def write_missing_sample_clips(config: TrainConfig) -> None:
    """Write the procedural clips to ``data_root``, hidden from git, unless that folder already holds something."""
    from tinyvae.data.sample_clips import write_sample_clips

    folder = config.data_root
    assert isinstance(folder, Path), "config.rules refuses use_sample_clips without a local data_root"
    if not lacks_sample_clips(config):
        return
    log.info("writing the sample clips to %s", folder)
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SAMPLES_UNFINISHED).touch()
        (folder / ".gitignore").write_text("*\n")
        write_sample_clips(folder, overwrite=True)
        (folder / SAMPLES_UNFINISHED).unlink(missing_ok=True)  # another start may write the same clips
