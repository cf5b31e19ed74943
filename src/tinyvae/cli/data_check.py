"""What ``tinyvae data check`` prints: the tables of a data set, held against a preset or against plain flags."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tinyvae.data.check import (
    Stages,
    ValueRange,
    bad_file_lines,
    draw_contact_sheet,
    heading,
    save_contact_sheet,
    stage_files,
    stage_training_samples,
    summarise,
    summary_lines,
)
from tinyvae.data.clip import ClipSettings
from tinyvae.data.index import VideoIndex
from tinyvae.data.splits import ClipSet, frames_needed, refuse_bad_index, split
from tinyvae.errors import UserError
from tinyvae.models.variants import VARIANTS, get_spec


@dataclass(frozen=True, kw_only=True)
class PlannedUse:
    """What a preset asks of the data."""

    name: str
    settings: ClipSettings
    train_split: float
    split_by: Any
    bad_file_limit: float
    samples_per_step: int
    variant: str | None
    """Whose frame rule holds; None where neither a preset nor a flag names it."""


def print_check(index: VideoIndex, use: PlannedUse, arguments: argparse.Namespace) -> int:
    """0 when the data can be trained on as planned, else 1; the reason is the last thing printed."""
    summary = summarise(index)
    print(f"data set {arguments.source}, {index.data_root} as its root\n")
    print("\n".join(summary_lines(summary)))
    if summary.num_bad:
        bad = ((row.path, row.reason) for row in index.bad_rows())
        print("\n" + "\n".join(bad_file_lines(bad, summary.bad_kinds)))
    train: ClipSet | None = None
    failure = ""
    try:
        # The limit is judged after the table, so that data above it still shows what it would give.
        train, val = split(index, use.settings, train_split=use.train_split, split_by=use.split_by, bad_file_limit=1.0)
        print("\n" + "\n".join(use_lines(use, train, val)))
        stages = stage_training_samples(train, use.settings, arguments.samples)
        print(length_line(use))
        refuse_bad_index(index, use.bad_file_limit)
    except UserError as refused:
        failure = str(refused)
        if train is None:
            stages = stage_files(index, arguments.samples)
    print("\n" + "\n".join(range_lines(stages)))
    for bad_file in stages.bad_files:
        print(f"  could not be read now: {bad_file.path}: {bad_file.reason}")
    if stages.samples:
        sheet = draw_contact_sheet(
            stages.samples,
            title=str(arguments.source),
            subtitle=f"{summary.num_good} good files, {summary.num_bad} bad. Left: a frame as stored"
            + (
                f", with the window of its first training clip. Right: what the model sees ({use.name})."
                if train is not None
                else "; no clip can be cut as asked."
            ),
        )
        save_contact_sheet(sheet, arguments.contact_sheet)
        print(f"\ncontact sheet: {arguments.contact_sheet}")
    if failure:
        print(f"\nNOT USABLE as asked: {failure}")
    return 1 if failure or not stages.samples else 0


def planned_use(arguments: argparse.Namespace) -> PlannedUse:
    """The preset (or the defaults of training), with the flags put over it."""
    from tinyvae.config import load_config
    from tinyvae.config.schema import TrainConfig

    names = ("height", "width", "n_frames", "min_frame_delta", "max_frame_delta", "train_split", "variant")
    changes = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if "min_frame_delta" in changes and "max_frame_delta" not in changes:
        default = TrainConfig() if arguments.preset is None else load_config(arguments.preset).config
        changes["max_frame_delta"] = max(changes["min_frame_delta"], default.max_frame_delta)
    if arguments.preset is None:
        # Not a run: only the clip matters, so rules between the other settings of a run do not apply.
        config: Any = TrainConfig(**changes)
        name = "the default settings" if not changes else "the flags given"
    else:
        config = load_config(arguments.preset, changes).config
        name = f"preset {arguments.preset}"
    return PlannedUse(
        name=name,
        settings=ClipSettings.from_config(config),
        train_split=config.train_split,
        split_by=config.split_by,
        bad_file_limit=config.bad_file_limit,
        samples_per_step=config.train_batch_size * config.gradient_accumulation_steps,
        variant=config.variant if arguments.preset is not None else arguments.variant,
    )


def length_line(use: PlannedUse) -> str:
    """Which variants train at this clip length; `UserError`, as training would say it, where the one named does not."""
    n_frames = use.settings.n_frames
    if use.variant is not None:
        get_spec(use.variant).check_training_length(n_frames)
        return f"  {n_frames} frames suit {use.variant}"
    others = [name for name, spec in VARIANTS.items() if not spec.is_training_length(n_frames)]
    if len(others) == len(VARIANTS):
        raise UserError(
            f"n_frames={n_frames} suits no variant; with --variant NAME the nearest lengths of that variant are said."
        )
    if len(others) <= len(VARIANTS) // 2:
        return f"  {n_frames} frames suit every variant" + (f" but {', '.join(others)}" if others else "")
    return f"  {n_frames} frames suit only {', '.join(name for name in VARIANTS if name not in others)}"


def use_lines(use: PlannedUse, train: ClipSet, val: ClipSet) -> Iterator[str]:
    settings = use.settings
    delta = f"{settings.min_frame_delta}"
    if settings.max_frame_delta != settings.min_frame_delta:
        delta += f" to {settings.max_frame_delta}"
    yield from heading(f"use by {use.name}")
    yield (
        f"  clips of {settings.n_frames} frames, step {delta}, {settings.width}x{settings.height} (width x height); "
        f"files need {frames_needed(settings.n_frames, settings.min_frame_delta)} frames"
    )
    yield f"  {len(train):,} files train (one epoch), {len(val):,} validate, {train.excluded.total:,} are left out"
    if train.excluded.total:
        yield f"  left out: {train.excluded.sentence()}"
    steps = len(train) / use.samples_per_step
    yield f"  with one process: {use.samples_per_step} clips in a step, {steps:,.1f} steps in an epoch"


def range_lines(stages: Stages) -> list[str]:
    """The table of values; a stage that nothing reached says so."""
    lines = heading("values", "type", "lowest", "highest", "mean")
    for name, values, places in (
        ("file (RGB)", stages.file, 0),
        ("batch", stages.batch, 0),
        ("model input", stages.model_input, 3),
    ):
        lines.append(f"  {name}".ljust(20) + _range_cells(values, places))
    return lines


def _range_cells(values: ValueRange, places: int) -> str:
    if values.count == 0:
        return f"{'nothing to read':>20}"
    mean_places = max(1, places)
    return f"{values.dtype:>10}{values.low:>10.{places}f}{values.high:>10.{places}f}{values.mean:>10.{mean_places}f}"
