"""The report: complete, self-contained, safe against odd names, and alive in a real browser."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.conftest import WriteVideo
from tests.evaluation.browser import Page, open_browser
from tests.evaluation.copy_codec import CopyCodec
from tests.video import small_videos
from tinyvae.evaluation import EvaluationResult, evaluate
from tinyvae.evaluation.compare import Comparison, compare
from tinyvae.evaluation.evaluating import SkippedClip
from tinyvae.evaluation.metrics import METRICS
from tinyvae.evaluation.pictures import choose_clips, gather_evidence
from tinyvae.evaluation.report import (
    MAX_CURVE_FRAMES,
    MAX_TRAINING_POINTS,
    best_and_worst,
    find_run_folder,
    listed_clips,
    publish,
    read_training_curves,
    report_html,
)
from tinyvae.evaluation.round_trip import open_model

ODD_NAME = "a <b>&\"'</script> clip.mp4"


class Parsed(HTMLParser):
    """Tags with their attributes, and whether every tag that opens also closes."""

    VOID = frozenset({"meta", "link", "input", "img", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page_data(text: str) -> dict[str, object]:
    found = re.search(r'id="report-data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


@pytest.fixture(scope="module")
def eval_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    for seed in range(3):
        small_videos.write_video(folder / "clips" / f"{seed}.mp4", seed=seed, frames=25 + 4 * seed)
    small_videos.write_video(folder / "clips" / ODD_NAME.replace("/", "_"), frames=17)
    (folder / "clips" / "broken.mp4").write_bytes(b"no video")
    round_trip = open_model(CopyCodec(flicker=0.03), label="copy <codec>")
    result = evaluate(round_trip, folder / "clips", lpips=None)
    publish(result, [round_trip], folder / "report", command="tinyvae eval copy --data 'clips & more'", num_films=3)
    return folder / "report" / "report.html"


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path]:
    """A comparison of two models, and the folder of its report."""
    folder = tmp_path_factory.mktemp("compare")
    for seed in range(3):
        small_videos.write_video(folder / "clips" / f"{seed}.mp4", seed=seed, frames=9)
    trips = [open_model(CopyCodec(offset=0.1), label="base"), open_model(CopyCodec(flicker=0.05), label="new")]
    comparison = compare(trips, folder / "clips", lpips=None)
    publish(comparison, trips, folder, command="tinyvae compare base new", num_films=1)
    return comparison, folder


@pytest.fixture(scope="module")
def one_clip(tmp_path_factory: pytest.TempPathFactory) -> EvaluationResult:
    """An evaluation of one clip of nine frames."""
    video = small_videos.write_video(tmp_path_factory.mktemp("one") / "clip.mp4", frames=9)
    return evaluate(CopyCodec(), video, lpips=None)


def test_the_page_is_whole_and_needs_no_network(eval_report: Path) -> None:
    text = eval_report.read_text()
    parsed = Parsed(text)
    assert parsed.open == []
    for tag, attributes in parsed.tags:
        for name in ("src", "href"):
            address = attributes.get(name)
            assert address is None or address.startswith(("data:", "#")), (tag, address)
    assert "@import" not in text and "url(" not in text
    sections = [attributes["id"] for tag, attributes in parsed.tags if tag == "section"]
    assert sections == ["summary", "films", "clips", "frames", "worst-frames", "latents", "environment"]
    assert "copy &lt;codec&gt;" in text and "<codec>" not in text and "</script> clip" not in text
    assert "tinyvae eval copy --data &#39;clips &amp; more&#39;" in text
    assert "1 video was skipped" in text and "broken.mp4" in text
    assert len(text) < 4_000_000


def test_the_page_holds_the_numbers(eval_report: Path) -> None:
    results = json.loads((eval_report.parent / "results.json").read_text())
    clips = {clip["name"]: clip["metrics"] for clip in results["evaluations"][0]["clips"]}
    data = page_data(eval_report.read_text())
    curves = {curve["name"]: curve["series"][0] for curve in data["curves"]}  # type: ignore[attr-defined]
    assert curves.keys() == clips.keys() and len(clips) == 4
    for name, metrics in clips.items():
        assert curves[name]["psnr"] == pytest.approx(metrics["psnr_by_frame"], rel=1e-4)
        # Flicker needs the frame before (and the one after): the curve begins at frame 1.
        assert curves[name]["flicker_error"][0] is curves[name]["flicker_energy"][0] is None
        assert curves[name]["flicker_error"][1:] == pytest.approx(metrics["flicker_error_by_frame"], rel=1e-4)
        assert curves[name]["flicker_energy"][1:-1] == pytest.approx(metrics["flicker_energy_by_frame"], rel=1e-4)
    text = eval_report.read_text()
    mean = results["evaluations"][0]["summary"]["psnr"]["mean"]
    assert f"{mean:.2f}" in text and text.count("<tr data-clip=") == 4


def test_comparison_page(compared: tuple[Comparison, Path]) -> None:
    comparison, folder = compared
    text = (folder / "report.html").read_text()
    assert Parsed(text).open == [] and "new − base" in text
    first, second = (evaluation.by_name()["0.mp4"].psnr for evaluation in comparison.evaluations)
    assert f">{second - first:+.2f}</td>" in text  # the paired difference of each clip
    assert '<span class="verdict better">better</span>' in text and '<span class="verdict worse">worse</span>' in text
    (player,) = page_data(text)["players"]  # type: ignore[misc]
    assert player["panels"] == ["input", "base", "new", "error of base", "error of new"]
    results = json.loads((folder / "results.json").read_text())
    assert results["comparison"]["winners"]["psnr"] == "new"


@pytest.fixture(scope="module")
def long_film(one_clip: EvaluationResult) -> EvaluationResult:
    """An evaluation of one film of 20,000 frames, made up from that of a short one; frame 7,777 is the worst."""
    psnr = tuple(11.0 if place == 7_777 else 30.0 + (place % 7) for place in range(20_000))
    metrics = replace(
        one_clip.clips[0].metrics,
        psnr_by_frame=psnr,
        ssim_by_frame=psnr,
        mse_by_frame=psnr,
        mae_by_frame=psnr,
        flicker_error_by_frame=psnr[1:],
    )
    return replace(one_clip, clips=(replace(one_clip.clips[0], metrics=metrics),))


def test_curves_of_a_long_film_are_thinned_and_keep_its_worst_frames(long_film: EvaluationResult) -> None:
    """A page with every frame of two hours is hundreds of megabytes of numbers that no browser draws."""
    text = report_html(long_film, training={}, command="x")
    (curve,) = page_data(text)["curves"]  # type: ignore[misc]
    assert len(curve["frames"]) == len(curve["series"][0]["psnr"]) == MAX_CURVE_FRAMES
    assert curve["frames"] == sorted(curve["frames"]) and min(curve["series"][0]["psnr"]) == 11
    place = curve["frames"].index(7_777)
    assert curve["series"][0]["psnr"][place] == 11 and curve["series"][0]["flicker_error"][place] == 11
    assert len(text) < 200_000


def test_nan_is_worse_than_any_number(write_video: WriteVideo, tmp_path: Path) -> None:
    for seed in range(3):
        write_video(f"clips/{seed}.mp4", seed=seed, frames=9)
    result = evaluate(CopyCodec(offset=0.1), tmp_path / "clips", lpips=None)
    second = result.clips[1]
    frames = list(second.metrics.psnr_by_frame)
    frames[4] = math.nan
    broken = replace(second, metrics=replace(second.metrics, psnr=math.nan, psnr_by_frame=tuple(frames)))
    assert broken.metrics.worst_frame == 4
    result = replace(result, clips=(result.clips[0], broken, result.clips[2]))
    assert choose_clips([result], limit=1) == [(broken.name, "worst")] and listed_clips([result])[0] == broken.name
    best, worst = best_and_worst(result, METRICS["psnr"])
    assert best.metrics.psnr == max(result.clips[place].metrics.psnr for place in (0, 2)) and worst is broken


def test_a_page_without_films_and_with_nan(write_video: WriteVideo) -> None:
    result = evaluate(CopyCodec(offset=float("nan")), write_video("clip.mp4", frames=9), lpips=None)
    text = report_html(result, training={}, command="x")
    assert Parsed(text).open == [] and "NaN" in text and 'id="stage"' not in text
    assert page_data(text)["players"] == []
    shown = gather_evidence([open_model(CopyCodec(offset=float("nan")))], [result], limit=1)
    with_pictures = report_html(result, shown, training={}, command="x")
    assert "NaN dB at its worst" in with_pictures and "nan dB" not in with_pictures


def test_a_table_of_all_shared_clips_does_not_speak_of_more(write_video: WriteVideo, tmp_path: Path) -> None:
    write_video("clips/17.mp4", frames=17)
    for num_frames in (5, 3):  # too short for one latent of eight frames, and for one of four
        write_video(f"clips/{num_frames}.mp4", frames=num_frames)
    comparison = compare([CopyCodec("taehv"), CopyCodec("taeltx_2")], tmp_path / "clips", lpips=None)
    first, second = comparison.evaluations
    second = replace(second, clips=(*second.clips, replace(second.clips[0], name="3.mp4")))  # two clips of each model
    text = report_html(replace(comparison, evaluations=(first, second)), training={}, command="x")
    assert text.count("<tr data-clip=") == 1 and "are listed" not in text


def test_hostile_names_stay_text(one_clip: EvaluationResult) -> None:
    hostile = "</script><script>alert(1)</script> \" onload='alert(2)' {{ 7 * 6 }}"
    result = replace(
        one_clip,
        model=replace(one_clip.model, label=hostile, path=hostile),
        settings=replace(one_clip.settings, data=hostile, split=hostile),
        clips=(replace(one_clip.clips[0], name=hostile),),
        skipped=(SkippedClip(name=hostile, reason=hostile),),
        notes=(hostile,),
    )
    text = report_html(result, training={hostile: [(1.0, 2.0)]}, command=hostile)
    parsed = Parsed(text)
    assert parsed.open == [] and [tag for tag, _ in parsed.tags].count("script") == 2
    assert "<script>alert" not in text and not any("onload" in attributes for _, attributes in parsed.tags)
    assert page_data(text)["models"] == [hostile] and "7 * 6" in text


def test_training_curves_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "best_model").mkdir(parents=True)
    lines = [json.dumps({"step": s, "train/loss": 1 / (s + 1), "note": "x"}) for s in range(1000)]
    (run / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 1000, "train/lo']))
    history = [{"step": 100, "psnr": 20.5, "ssim": float("nan")}, {"step": 200, "psnr": 22.0}]
    (run / "validation_history.json").write_text(json.dumps(history))
    assert find_run_folder(run / "best_model") == find_run_folder(run) == run
    assert find_run_folder(tmp_path / "other.pth") is None
    curves = read_training_curves(run)
    assert list(curves) == ["val/psnr", "train/loss"]
    assert curves["val/psnr"] == [(100.0, 20.5), (200.0, 22.0)]
    assert len(curves["train/loss"]) == MAX_TRAINING_POINTS and curves["train/loss"][-1] == (999.0, 0.001)


def test_training_shows_the_telling_curves_first(one_clip: EvaluationResult, tmp_path: Path) -> None:
    entry = {
        "step": 5,
        "val/psnr": 20,
        "val/psnr_std": 1,
        "val_raw/psnr": 19,
        "train/gpu_memory_gb": 0.0,
        "train/loss": 1,
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps(entry))
    text = report_html(one_clip, training=read_training_curves(tmp_path), command="x")
    opened, closed = text.split("<details>")
    assert re.findall('data-training="([^"]+)"', opened) == ["val/psnr", "train/loss"]
    assert re.findall('data-training="([^"]+)"', closed) == ["val/psnr_std", "train/gpu_memory_gb", "val_raw/psnr"]
    assert "3 more curves" in closed and "The run this model comes from" in opened


def test_a_comparison_shows_the_training_of_whichever_model_is_a_run(
    write_video: WriteVideo, small_model_file: Path, tmp_path: Path
) -> None:
    (small_model_file.parent / "metrics.jsonl").write_text(json.dumps({"step": 1, "train/loss": 0.5}))
    trips = [open_model(small_model_file), open_model(CopyCodec(), label="copy")]
    comparison = compare(trips, write_video("clip.mp4", frames=9), lpips=None)
    publish(comparison, trips, tmp_path / "out", command="x", num_films=0)
    assert "The run that small comes from" in (tmp_path / "out" / "report.html").read_text()


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with open_browser() as opened:
        yield opened


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (400, True)])
def test_in_a_browser_the_page_loads_sorts_and_plays(eval_report: Path, page: Page, width: int, dark: bool) -> None:
    page.open(eval_report, width=width, dark=dark)
    assert page.run("return document.documentElement.scrollWidth") <= width  # nothing sticks out
    paper = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper)[:3])) < 200) == dark
    assert page.run("return performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:'))") == []

    names = "return [...document.querySelectorAll('.clips tbody tr')].map(r => Number(r.cells[4].dataset.value))"
    sort = "document.querySelectorAll('.clips thead button.sort')[4].click()"
    page.run(sort)
    rising = page.run(names)
    page.run(sort)
    assert rising == sorted(rising) and page.run(names) == rising[::-1] and len(set(rising)) > 1

    page.run("document.querySelector('#films').scrollIntoView({behavior: 'instant'})")
    page.wait("const v = document.querySelector('video'); return v.readyState >= 2 && v.currentTime > 0.1")
    assert page.run("return document.querySelectorAll('#stage canvas').length") == 3
    lit = """return [...document.querySelectorAll('#stage canvas')].map((c) =>
        c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((v, i) => i % 4 < 3 && v > 40))"""
    assert page.run(lit) == [True, True, True]
    press = "document.querySelector(`#stage [name=${arguments[0]}]`).click()"
    page.run("document.querySelector('video').pause()")
    frame = "return Number(document.querySelector('#stage').dataset.frame)"
    page.run("const s = document.querySelector('#stage input'); s.value = 4; s.dispatchEvent(new Event('input'))")
    page.wait(f"{frame} === 4")
    page.run(press, "forward")
    page.wait(f"{frame} === 5")
    page.run(press, "back")
    page.run(press, "back")
    page.wait(f"{frame} === 3")
    page.run("const s = document.querySelector('[name=speed]'); s.value = '0.25'; s.dispatchEvent(new Event('change'))")
    assert page.run("return document.querySelector('video').playbackRate") == 0.25
    assert page.run("return document.querySelector('video').loop") is True
    page.run(press, "loop")
    assert page.run("return document.querySelector('video').loop") is False
    page.run("document.querySelector('[data-view-button=wipe]').click()")
    assert page.run("return document.querySelectorAll('#stage canvas').length") == 1
    page.run("document.querySelectorAll('.picks button')[1].click()")
    page.wait("return document.querySelector('video').readyState >= 2")
    assert page.run("return document.querySelectorAll('.picks button')[1].getAttribute('aria-pressed')") == "true"

    before = page.run("return document.querySelector('#curve-chart path').getAttribute('d')")
    page.run("document.querySelectorAll('#curve-metric button')[1].click()")
    assert page.run("return document.querySelector('#curve-chart path').getAttribute('d')") != before
    page.run("document.querySelectorAll('.clips tbody tr')[2].click()")
    clip = page.run("return document.querySelectorAll('.clips tbody tr')[2].dataset.clip")
    assert page.run("return document.querySelector('#curve-clip').value") == clip
    assert page.complaints() == []


def test_in_a_browser_the_comparison_switches_metrics(page: Page, compared: tuple[Comparison, Path]) -> None:
    page.open(compared[1] / "report.html", width=400)
    shown = "return [...document.querySelectorAll('.clips tbody tr')[0].cells].filter(c => !c.hidden).length"
    assert page.run(shown) == 7  # clip, frames, size, two values, their difference, curve
    value = "return [...document.querySelectorAll('.clips tbody tr')[0].cells].filter(c => !c.hidden)[3].textContent"
    psnr = page.run(value)
    page.run("document.querySelector('#table-metric button[value=mse]').click()")
    assert page.run(shown) == 7 and page.run(value) != psnr
    assert page.run("return document.documentElement.scrollWidth") <= 400
    page.run("document.querySelector('#films').scrollIntoView({behavior: 'instant'})")
    page.wait("return document.querySelectorAll('#stage canvas').length === 5")
    assert page.complaints() == []


def test_in_a_browser_a_long_film_and_the_curves_of_a_run_are_drawn(
    page: Page, long_film: EvaluationResult, tmp_path: Path
) -> None:
    steps = [(float(step), 20 + step / 10) for step in range(1, 61)]
    training = {"val/psnr": steps[-1:], "train/loss": steps, "val/psnr_std": steps}
    page_text = report_html(long_film, training=training, command="x")
    (tmp_path / "report.html").write_text(page_text)
    page.open(tmp_path / "report.html", width=400)
    drawn = "return [...document.querySelectorAll('[data-training]')].filter(box => box.querySelector('path')).length"
    page.run("document.querySelector('details').open = true")
    page.wait(f"{drawn} === 3")
    ticks = "return [...document.querySelectorAll('[data-training] text')].map(t => t.textContent)"
    assert "59.5" not in page.run(ticks) and "60" in page.run(ticks)  # steps are whole
    path = page.run("return document.querySelector('#curve-chart path').getAttribute('d')")
    assert path.count("L") == MAX_CURVE_FRAMES - 1
    assert page.run("return document.documentElement.scrollWidth") <= 400 and page.complaints() == []
