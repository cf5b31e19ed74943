"""Several models on the same frames of the same clips: paired differences, winners, best and worst clips."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tinyvae.errors import UserError
from tinyvae.evaluation.cost import choose_devices
from tinyvae.evaluation.evaluating import EvaluationResult, EvaluationSettings, evaluate_models
from tinyvae.evaluation.metrics import METRICS, ClipMetrics
from tinyvae.evaluation.round_trip import MIXED_KIND, Model, RoundTrip, open_model, with_own_labels
from tinyvae.evaluation.statistics import PairedDifference, paired_difference, summarize
from tinyvae.evaluation.teacher_figures import TeacherFigures, beside_teacher, open_teacher, rows_of, teacher_figures

if TYPE_CHECKING:
    from tinyvae.losses.perceptual import LPIPS


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model against another one, metric by metric."""

    label: str
    baseline: str
    differences: tuple[PairedDifference, ...]

    def difference(self, metric: str) -> PairedDifference | None:
        return next((d for d in self.differences if d.metric == metric), None)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Models in the order given; the first is the baseline.

    Beside a teacher the models are those of `beside_teacher`, and ``figures`` has one entry for each student.
    """

    evaluations: tuple[EvaluationResult, ...]
    candidates: tuple[Candidate, ...]
    winners: dict[str, str | None]  # metric -> label of the model with the best mean over shared clips; None: a tie
    figures: tuple[TeacherFigures, ...] = ()

    @property
    def baseline(self) -> EvaluationResult:
        return self.evaluations[0]

    @property
    def is_complete(self) -> bool:
        return all(evaluation.is_complete for evaluation in self.evaluations)


@torch.no_grad()
def compare(
    models: Sequence[Model],
    data: str | os.PathLike[str],
    *,
    teacher: str | os.PathLike[str] | None = None,
    device: str | torch.device | Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    lpips: LPIPS | str | os.PathLike[str] | None = "auto",
    max_frames: int | None = None,
    max_clips: int | None = None,
    size: tuple[int, int] | None = None,
    split: str | None = None,
    data_root: str | os.PathLike[str] | None = None,
    show_progress_bar: bool = False,
) -> Comparison:
    """Evaluate two or more models on the frames that every one of them gives back; arguments as in `evaluate`.

    A file that cannot tell its variant is opened with `open_model` first. ``teacher``: the diffusers folder or hub name
    of the teacher of these students, of which one is enough then; the result has ``figures`` for each student.

    Example: ``compare(["taehv.pth", "output/my_run"], "videos/val").candidates[0].difference("psnr").verdict``
    """
    check_enough(models, teacher)
    devices = choose_devices(device)
    round_trips = with_own_labels([open_model(model, device=devices[0], dtype=dtype) for model in models])
    if teacher is not None:
        opened = open_teacher(teacher, round_trips, device=devices[0], dtype=dtype)
        round_trips = beside_teacher(round_trips, opened)
    warn_of_twins(round_trips)
    root = str(data_root) if data_root is not None else None
    settings = EvaluationSettings(
        data=str(data), data_root=root, split=split, max_clips=max_clips, max_frames=max_frames, size=size
    )
    evaluations = evaluate_models(
        round_trips, settings, devices=devices, lpips=lpips, show_progress_bar=show_progress_bar
    )
    return compare_results(evaluations)


def check_enough(models: Sequence[object], teacher: object) -> None:
    """Refuse a model alone, which has nothing to be compared with."""
    if len(models) < 2 and teacher is None:
        raise UserError("compare needs at least two models; for one, use: tinyvae eval MODEL --data DATA")


def compare_results(evaluations: Sequence[EvaluationResult]) -> Comparison:
    """Paired differences of evaluations on the same data, and their means over the clips that every model could do."""
    shared = set.intersection(*(set(evaluation.by_name()) for evaluation in evaluations))
    if not shared:
        raise UserError("no clip was measured with every model, so there is nothing to compare.")
    tables = [{name: clip for name, clip in e.by_name().items() if name in shared} for e in evaluations]
    left_out = set().union(*(evaluation.by_name() for evaluation in evaluations)) - shared
    named = ", ".join(sorted(left_out)[:3])
    note = f"not every model could do every clip; {len(left_out)} are left out of the means and differences: {named}"
    notes = (note,) if left_out else ()
    evaluations = [
        replace(evaluation, summary=summarize(list(table.values())), notes=(*evaluation.notes, *notes))
        for evaluation, table in zip(evaluations, tables, strict=True)
    ]
    labels = [evaluation.model.label for evaluation in evaluations]
    by_label = dict(zip(labels, tables, strict=True))
    candidates = []
    for baseline, label in _pairs(evaluations):
        found = [paired_difference(metric, by_label[baseline], by_label[label]) for metric in METRICS]
        differences = tuple(difference for difference in found if difference is not None)
        candidates.append(Candidate(label=label, baseline=baseline, differences=differences))
    return Comparison(
        evaluations=tuple(evaluations),
        candidates=tuple(candidates),
        winners=_winners(labels, tables),
        figures=tuple(teacher_figures(rows) for rows in rows_of(evaluations)),
    )


def _pairs(evaluations: Sequence[EvaluationResult]) -> list[tuple[str, str]]:
    """(baseline, candidate) of each difference: all against the first; and of the students of a teacher, each part of
    a later one against the same part of the first."""
    first, *others = (evaluation.model.label for evaluation in evaluations)
    pairs = [(first, other) for other in others]
    students = rows_of(evaluations)
    for rows in students[1:]:
        both = zip(students[0][1:], rows[1:], strict=True)
        pairs += [(earlier.model.label, later.model.label) for earlier, later in both]
    return pairs


def warn_of_twins(round_trips: Sequence[RoundTrip]) -> None:
    """Warn where two models are the same weights run in the same way."""
    seen: dict[object, RoundTrip] = {}
    for model in round_trips:
        facts = model.facts
        if facts.path is None or facts.kind == MIXED_KIND:
            continue
        # A teacher is a folder of many files and has no sha256. Plain against fused, or two dtypes, are no twins.
        weights = facts.sha256 or os.path.realpath(facts.path)
        twin = seen.setdefault((weights, facts.variant, facts.dtype, type(getattr(model, "codec", None))), model)
        if twin is not model:
            both = f"{twin.facts.label} ({twin.facts.path}) and {facts.label} ({facts.path})"
            warnings.warn(f"{both} are the same weights, so their difference is zero in every metric.", stacklevel=2)


def _winners(labels: Sequence[str], tables: Sequence[Mapping[str, ClipMetrics]]) -> dict[str, str | None]:
    winners: dict[str, str | None] = {}
    for metric, info in METRICS.items():
        scores: list[tuple[float, str]] = []
        for label, table in zip(labels, tables, strict=True):
            values = [value for clip in table.values() if (value := clip.value(metric)) is not None]
            if values and all(map(math.isfinite, values)):
                scores.append((math.fsum(map(info.badness, values)) / len(values), label))
        if scores:
            best = min(scores)[0]
            first, *others = [label for score, label in scores if score == best]
            winners[metric] = None if others else first
    return winners
