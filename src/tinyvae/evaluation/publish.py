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
from tinyvae.evaluation.training_curves import find_run_folder, read_training_curves


def publish(
    result: EvaluationResult | Comparison,
    round_trips: Sequence[RoundTrip],
    output_dir: Path,
    *,
    command: str,
    num_films: int = DEFAULT_FILMS,
) -> list[Path]:
    """Write both files and return their paths. The clips worth showing go through the models again for their films."""
    comparison = result if isinstance(result, Comparison) else None
    evaluations = (result,) if isinstance(result, EvaluationResult) else result.evaluations
    files = [output_dir / "results.json", output_dir / "report.html"]
    write_results(result, files[0], command=command)
    path = evaluations[-1].model.path
    run_folder = find_run_folder(Path(path)) if path is not None else None
    report = Report(
        evaluations=evaluations,
        comparison=comparison,
        evidence=tuple(gather_evidence(round_trips, evaluations, limit=num_films)) if num_films else (),
        training=read_training_curves(run_folder) if run_folder is not None else {},
        command=command,
    )
    write_report(report, files[1])
    return files
