"""A student beside its teacher: how close its decoder and its encoder come, each alone, and how much faster they are.

Four round trips of the same frames: the teacher's own; the teacher's latents decoded by the student; the student's
latents decoded by the teacher; the student's own. They stand beside each other as models of one comparison.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tinyvae.errors import UserError
from tinyvae.evaluation.evaluating import EvaluationResult
from tinyvae.evaluation.metrics import METRICS
from tinyvae.evaluation.round_trip import (
    FAMILY_KIND,
    MIXED_KIND,
    MixedRoundTrip,
    RoundTrip,
    TeacherRoundTrip,
    with_own_labels,
)
from tinyvae.evaluation.statistics import Estimate, PairedDifference, paired_difference
from tinyvae.teachers import check_teacher

WORDS = {
    "teacher": "teacher's own round trip",
    "decoder": "student's decoder on teacher latents",
    "encoder": "student's encoder, teacher decodes",
    "student": "student's own round trip",
}
"""Row -> what it is."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One of the four round trips. ``gap``: its PSNR less the teacher's, clip by clip; None for the teacher itself."""

    label: str  # of the model in the comparison
    psnr: Estimate | None
    gap: PairedDifference | None

    @property
    def shown_psnr(self) -> str:
        return METRICS["psnr"].shown(self.psnr.mean if self.psnr else None)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Milliseconds for a clip: medians over clips without the first of each device, which warms up."""

    teacher_ms: float
    student_ms: float
    times_as_fast: float  # the median of the ratios of each clip


@dataclass(frozen=True, kw_only=True)
class TeacherFigures:
    """One student and its teacher on the same frames. A speed that cannot be told (a single clip) is None."""

    teacher: Figure
    decoder: Figure
    encoder: Figure
    student: Figure
    encode: Speed | None
    decode: Speed | None

    def rows(self) -> dict[str, Figure]:
        """What each of the four is, in the order of tables."""
        return {words: getattr(self, name) for name, words in WORDS.items()}

    def sentence(self) -> str:
        """``teacher 31.20 dB; student's decoder on teacher latents 30.61 dB (-0.59); ...; decodes 12x as fast``."""
        parts = [f"teacher {self.teacher.shown_psnr} dB"]
        for words, figure in list(self.rows().items())[1:]:
            gap = f" ({METRICS['psnr'].shown_difference(figure.gap.difference.mean)})" if figure.gap else ""
            parts.append(f"{words} {figure.shown_psnr} dB{gap}")
        speeds = {"encodes": self.encode, "decodes": self.decode}
        fast = [f"{verb} {speed.times_as_fast:.3g}x as fast" for verb, speed in speeds.items() if speed is not None]
        return "; ".join([*parts, *([", ".join(fast)] if fast else [])])


def open_teacher(
    path: str | os.PathLike[str], students: Sequence[RoundTrip], *, device: torch.device, dtype: torch.dtype | None
) -> TeacherRoundTrip:
    """The teacher of a folder, hub name or weights file of ours, once it is known that it fits every student."""
    for student in students:
        if student.facts.kind != FAMILY_KIND:
            what = f"{student.facts.label} is a {student.facts.kind} and not a student"
            raise UserError(f"{what}; beside a teacher (--teacher) name models of the family only.")
        check_teacher(os.fspath(path), None, student.spec)
    spec = students[0].spec if students else None
    return TeacherRoundTrip.open(os.fspath(path), device=device, dtype=dtype, spec=spec)


def beside_teacher(students: Sequence[RoundTrip], teacher: TeacherRoundTrip) -> list[RoundTrip]:
    """The models to compare: the teacher, and for each student its decoder, its encoder and itself.

    The teacher is in memory once and encodes each clip once. Students that are elsewhere come to its device.
    """
    teacher = teacher.remembering()
    rows: list[RoundTrip] = [teacher]
    for student in (student.to(teacher.device) for student in with_own_labels(students)):
        rows += [MixedRoundTrip(teacher, student), MixedRoundTrip(student, teacher), student]
    return with_own_labels(rows)


def rows_of(evaluations: Sequence[EvaluationResult]) -> list[list[EvaluationResult]]:
    """The four evaluations of `beside_teacher` for each student: the teacher, its decoder, its encoder and itself. None
    where they are of other models."""
    if not any(evaluation.model.kind == MIXED_KIND for evaluation in evaluations):
        return []
    teacher, *others = evaluations
    return [[teacher, *others[first : first + 3]] for first in range(0, len(others), 3)]


def teacher_figures(rows: Sequence[EvaluationResult]) -> TeacherFigures:
    """The figures of one student, from its four evaluations on the same clips."""
    teacher, decoder, encoder, student = rows
    baseline = teacher.by_name()

    def figure(result: EvaluationResult) -> Figure:
        gap = paired_difference("psnr", baseline, result.by_name()) if result is not teacher else None
        return Figure(label=result.model.label, psnr=result.summary.psnr, gap=gap)

    return TeacherFigures(
        teacher=figure(teacher),
        decoder=figure(decoder),
        encoder=figure(encoder),
        student=figure(student),
        encode=_speed(teacher, student, "encode_s"),
        decode=_speed(teacher, student, "decode_s"),
    )


def _speed(teacher: EvaluationResult, student: EvaluationResult, stage: str) -> Speed | None:
    teacher_s, student_s = (
        {clip.name: getattr(clip, stage) for clip in result.clips if not clip.is_warm_up}
        for result in (teacher, student)
    )
    names = teacher_s.keys() & student_s.keys()
    if not names:
        return None
    return Speed(
        teacher_ms=1000 * statistics.median(teacher_s[name] for name in names),
        student_ms=1000 * statistics.median(student_s[name] for name in names),
        times_as_fast=statistics.median(teacher_s[name] / student_s[name] for name in names),
    )
