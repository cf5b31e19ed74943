"""Tables of eval and compare in the terminal: never wider than it, and every shortened name is explained."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.evaluation.copy_codec import CopyCodec
from tests.video import small_videos
from tinyvae.evaluation.compare import Comparison, compare, compare_results
from tinyvae.evaluation.results import comparison_text, evaluation_table, short_names

RUNS = [f"taehv_2026-11-{day:02d}_10-11-12_h100_perceptual/best_model" for day in range(10, 15)]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("clips")
    for seed in range(8):
        small_videos.write_video(folder / f"{seed}.mp4", seed=seed, frames=5)
    models = [CopyCodec(offset=0.1 + 0.01 * number) for number in range(5)]
    found = compare(models, folder, lpips=None)
    named = [replace(e, model=replace(e.model, label=run)) for e, run in zip(found.evaluations, RUNS, strict=True)]
    return compare_results(named)


@pytest.mark.parametrize("width", [60, 80, 132, 400])
def test_nothing_but_the_legend_is_wider_than_the_terminal(comparison: Comparison, width: int) -> None:
    text = evaluation_table(comparison.evaluations, width)
    *tables, legend = text.split("\n\n") if width < 400 else [text, ""]
    assert max(len(line) for table in tables for line in table.splitlines()) <= width
    columns = [line for table in tables for line in table.splitlines() if line.startswith("PSNR dB")]
    assert sum(line.count("…") for line in columns) == 5, "every model has its interval somewhere"
    if width < 400:
        assert legend.splitlines() == [f"[{number}] {run}" for number, run in enumerate(RUNS, start=1)]
    else:
        assert all(run in text.splitlines()[0] for run in RUNS)


def test_best_and_worst_clips_of_many_and_of_few(comparison: Comparison) -> None:
    text = comparison_text(comparison, 80)
    assert text.count("best clips, by difference of PSNR:") == 4 and text.count("worst clips:") == 4
    first = text.split("\n\n")[0]
    assert first.count(".mp4") == 6 and all(first.count(f"{seed}.mp4") <= 1 for seed in range(8))
    few = [
        replace(e, clips=tuple(clip for clip in e.clips if clip.name in ("0.mp4", "1.mp4", "2.mp4")))
        for e in comparison.evaluations[:2]
    ]
    first = comparison_text(compare_results(few), 80).split("\n\n")[0]
    assert "clips by difference of PSNR:" in first and all(first.count(f"{seed}.mp4") == 1 for seed in range(3))


def test_the_winner_has_a_line_for_each_metric(comparison: Comparison) -> None:
    lines = comparison_text(comparison, 400).split("best mean:\n")[1].splitlines()
    assert lines[0].split() == ["PSNR", RUNS[0]]
    assert [line.split("  ")[1] for line in lines] == ["PSNR", "SSIM", "MSE", "MAE", "Flicker error", "Flicker energy"]


def test_short_names_are_distinct_and_fit() -> None:
    alike = ["x" * 90, "x" * 90 + "y" * 30 + "x" * 90, "short"]
    names = short_names(alike, 80)
    assert names["short"] == "short" and len(set(names.values())) == 3
    assert all(len(name) <= 24 for name in names.values())
    assert names[alike[0]].startswith("[1] x") and names[alike[1]].startswith("[2] x")
