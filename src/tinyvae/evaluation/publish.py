"""From results to files: ``results.json`` and ``report.html`` in an output folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tinyvae.evaluation.compare import Comparison
from tinyvae.evaluation.evaluating import EvaluationResult
from tinyvae.evaluation.evidence import gather_evidence
from tinyvae.evaluation.report import DEFAULT_FILMS, Report, write_report
from tinyvae.evaluation.results_file import write_results
from tinyvae.evaluation.round_trip import RoundTrip
from tinyvae.evaluation.training_curves import Curves, find_run_folder, read_training_curves


def publish(
    result: EvaluationResult | Comparison,
    round_trips: Sequence[RoundTrip],
    output_dir: Path,
    *,
    command: str,
    num_films: int = DEFAULT_FILMS,
    show_progress_bar: bool = False,
) -> list[Path]:
    """Write both files and return their paths. The clips worth showing go through the models again for their films."""
    comparison = result if isinstance(result, Comparison) else None
    evaluations = (result,) if isinstance(result, EvaluationResult) else result.evaluations
    files = [output_dir / "results.json", output_dir / "report.html"]
    write_results(result, files[0], command=command)
    training_of, training = _training(evaluations)
    evidence = gather_evidence(round_trips, evaluations, limit=num_films, show_progress_bar=show_progress_bar)
    report = Report(
        evaluations=evaluations,
        comparison=comparison,
        evidence=tuple(evidence),
        training=training,
        training_of=training_of,
        command=command,
    )
    write_report(report, files[1])
    return files


def _training(evaluations: Sequence[EvaluationResult]) -> tuple[str, Curves]:
    """(label, curves) of the last model that comes from a run; ("", {}) where none does."""
    for evaluation in reversed(evaluations):
        path = evaluation.model.path
        run_folder = find_run_folder(Path(path)) if path is not None else None
        if run_folder is not None:
            return evaluation.model.label, read_training_curves(run_folder)
    return "", {}
