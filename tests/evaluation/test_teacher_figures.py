"""A student beside its teacher: the figures are those that plain diffusers and the student give by hand."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from markupsafe import escape
from torch import Tensor

from tests.conftest import WriteVideo
from tests.evaluation.browser import open_browser
from tinyvae import TAEHV, get_spec, save_model
from tinyvae.cli.main import run
from tinyvae.errors import UserError
from tinyvae.evaluation import clip_metrics
from tinyvae.evaluation.compare import compare
from tinyvae.evaluation.cost import StageTimes
from tinyvae.evaluation.report import publish
from tinyvae.evaluation.results import results_as_json
from tinyvae.evaluation.round_trip import FAMILY_KIND, RoundTrip, TeacherRoundTrip, open_model
from tinyvae.evaluation.teacher_figures import beside_teacher, open_teacher
from tinyvae.models.codec import pad_to_multiple
from tinyvae.teachers import Teacher
from tinyvae.video.decode import read_frames

diffusers = pytest.importorskip("diffusers")

from tests.test_diffusers import small_teacher  # noqa: E402 (needs the package)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Variant -> folder of a tiny teacher."""
    made = {}
    for variant in ("taecvx", "taew2_1"):
        torch.manual_seed(3)
        made[variant] = tmp_path_factory.mktemp(variant) / "big"
        small_teacher(variant).save_pretrained(made[variant] / "vae")
    return made


def student(variant: str = "taecvx", **options: Any) -> TAEHV:
    torch.manual_seed(1)
    return TAEHV.of(get_spec(variant, width=0.125, **options)).eval()


def by_hand(folder: Path, model: TAEHV, frames_NTCHW: Tensor) -> dict[str, float]:
    """PSNR of the four round trips, by diffusers' own calls and the pipelines' formulas. The teacher sees the frames
    that come back."""
    class_name = json.loads((folder / "vae" / "config.json").read_text())["_class_name"]
    vae = getattr(diffusers, class_name).from_pretrained(folder / "vae").eval()
    mean, std = (
        torch.tensor(getattr(vae.config, name, None) or [value] * 16).view(16, 1, 1)
        for name, value in (("latents_mean", 0.0), ("latents_std", 1.0))
    )
    scale = getattr(vae.config, "scaling_factor", None) or 1.0
    in_vae_space = model.spec.latent_space == "vae"
    target, padded = model.target(frames_NTCHW), pad_to_multiple(frames_NTCHW, 8)

    def teach(z_NTCHW: Tensor) -> Tensor:
        return (vae.decode(z_NTCHW.transpose(1, 2)).sample.transpose(1, 2) / 2 + 0.5).clamp(0, 1)

    with torch.no_grad():
        z = vae.encode((2 * model.target(padded) - 1).transpose(1, 2)).latent_dist.mode().transpose(1, 2)
        of_student = model.encode_video(padded)
        decoded = {
            "teacher": teach(z),
            "decoder": model.decode_video(z if in_vae_space else (z - mean) * scale / std),
            "encoder": teach(of_student if in_vae_space else of_student / scale * std + mean),
            "student": model.decode_video(of_student),
        }
    height, width = target.shape[-2:]
    cropped = {name: video[:, : target.shape[1], :, :height, :width] for name, video in decoded.items()}
    return {name: clip_metrics(video, target)[0].psnr for name, video in cropped.items()}


@pytest.mark.parametrize(
    ("variant", "options", "used"),
    [
        pytest.param("taecvx", {}, 9, marks=pytest.mark.slow),
        ("taecvx", {"latent_space": "vae"}, 9),
        pytest.param("taew2_1", {}, 12, marks=pytest.mark.slow),
    ],
)
def test_the_figures_are_those_of_a_direct_computation(
    teachers: dict[str, Path], write_video: WriteVideo, variant: str, options: dict[str, Any], used: int
) -> None:
    """Of twelve frames CogVideoX and its students count nine alike, Wan and its own twelve; nine come back of both."""
    video = write_video("clip.mp4", frames=12, height=12, width=20)  # no multiples of eight
    model = student(variant, **options)
    comparison = compare([model], video, teacher=teachers[variant], lpips=None)
    (figures,) = comparison.figures
    for name, psnr in by_hand(teachers[variant], model, read_frames(video, range(used))[None].float() / 255).items():
        assert getattr(figures, name).psnr.mean == pytest.approx(psnr, abs=2e-3), name
    gap = figures.decoder.gap.difference.mean
    assert gap == pytest.approx(figures.decoder.psnr.mean - figures.teacher.psnr.mean, abs=1e-9)
    assert {evaluation.clips[0].metrics.num_frames for evaluation in comparison.evaluations} == {9}
    assert {evaluation.clips[0].num_frames for evaluation in comparison.evaluations} == {used}
    assert figures.encode is None and figures.decode is None, "a single clip is the warm-up"


class TeacherInDisguise(RoundTrip):
    """A student that encodes and decodes exactly as its teacher."""

    def __init__(self, teacher: TeacherRoundTrip) -> None:
        super().__init__(replace(teacher.facts, kind=FAMILY_KIND, label="twin", path=None), teacher.spec)
        self._twin = teacher

    @property
    def device(self) -> torch.device:
        return self._twin.device

    def to(self, device: torch.device) -> RoundTrip:
        return self

    def encode(self, chunks: Iterable[Tensor], num_frames: int, times: StageTimes) -> Iterator[Tensor]:
        return self._twin.encode(chunks, num_frames, times)

    def decode(self, latents: Iterable[Tensor], num_latents: int, times: StageTimes) -> Iterator[Tensor]:
        return self._twin.decode(latents, num_latents, times)


@pytest.mark.slow
def test_a_perfect_student_has_four_equal_rows(
    teachers: dict[str, Path], write_video: WriteVideo, tmp_path: Path
) -> None:
    for seed in range(2):
        write_video(f"clips/{seed}.mp4", frames=9, height=16, width=16, seed=seed)
    teacher = TeacherRoundTrip.open(teachers["taecvx"], device=torch.device("cpu"), dtype=None)
    rows = beside_teacher([TeacherInDisguise(teacher)], teacher)
    comparison = compare(rows, tmp_path / "clips", lpips=None)
    first, *others = (evaluation.by_name() for evaluation in comparison.evaluations)
    assert [table == first for table in others] == [True] * 3
    (figures,) = comparison.figures
    for figure in (figures.decoder, figures.encoder, figures.student):
        assert figure.gap is not None and figure.gap.difference.mean == 0 and figure.gap.verdict == "unclear"
    assert figures.encode is not None and 0 < figures.encode.times_as_fast < math.inf
    assert [row.facts.label for row in rows] == ["big", "twin decoder", "twin encoder", "twin"]


class Elsewhere(TeacherInDisguise):
    """The same student on another device."""

    @property
    def device(self) -> torch.device:
        return torch.device("meta")

    def to(self, device: torch.device) -> RoundTrip:
        assert device == self._twin.device
        return TeacherInDisguise(self._twin)


def test_students_come_to_the_teachers_device(teachers: dict[str, Path]) -> None:
    """`compare` opens the teacher on the GPU and leaves a student in memory where it is."""
    teacher = TeacherRoundTrip.open(teachers["taecvx"], device=torch.device("cpu"), dtype=None)
    assert [row.device for row in beside_teacher([Elsewhere(teacher)], teacher)] == [teacher.device] * 4


def test_the_teacher_is_loaded_once_and_encodes_each_clip_once(
    teachers: dict[str, Path], write_video: WriteVideo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the figures of two students, and for the films and pictures of the report."""
    for seed in range(3):
        write_video(f"clips/{seed}.mp4", frames=9 + 2 * seed, height=16, width=16, seed=seed)
    calls = {"encode": 0, "decode": 0, "__init__": 0}
    for name in calls:
        plain = getattr(Teacher, name)

        def counted(*parts: Any, _plain: Any = plain, _name: str = name, **options: Any) -> Any:
            calls[_name] += 1
            return _plain(*parts, **options)

        monkeypatch.setattr(Teacher, name, counted)
    students = [open_model(student(), label="one"), open_model(student(), label="two")]
    rows = beside_teacher(students, open_teacher(teachers["taecvx"], students, device=torch.device("cpu"), dtype=None))
    comparison = compare(rows, tmp_path / "clips", lpips=None)
    assert calls == {"encode": 3, "decode": 9, "__init__": 1}
    publish(comparison, rows, tmp_path / "out", command="test", num_films=1)
    assert calls == {"encode": 3, "decode": 12, "__init__": 1}
    pairs = [(candidate.baseline, candidate.label) for candidate in comparison.candidates]
    assert pairs[:3] == [("big", "one decoder"), ("big", "one encoder"), ("big", "one")]
    assert pairs[6:] == [("one decoder", "two decoder"), ("one encoder", "two encoder"), ("one", "two")]
    content = results_as_json(comparison, command="test")["comparison"]
    figures = content["teacher_figures"][1]
    assert figures["decoder"]["label"] == "two decoder" and figures["decoder"]["gap"]["difference"]["count"] == 3
    assert figures["decode"]["teacher_ms"] > 0 < figures["decode"]["student_ms"]
    timed = [clip.is_warm_up for clip in comparison.evaluations[0].clips]
    assert timed == [True, False, False]


def test_the_verbs_print_and_write_the_figures(
    teachers: dict[str, Path], write_video: WriteVideo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(2):
        write_video(f"clips/{seed}.mp4", frames=9, height=32, width=48, seed=seed)
    save_model(student(), tmp_path / "tiny.safetensors")
    words = [str(tmp_path / "tiny.safetensors"), "--data", str(tmp_path / "clips"), "--lpips", "off"]
    words += ["--teacher", str(teachers["taecvx"])]
    assert run(["eval", *words, "--films", "1", "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    page = (tmp_path / "out" / "report.html").read_text()
    (figures,) = json.loads((tmp_path / "out" / "results.json").read_text())["comparison"]["teacher_figures"]
    assert "tiny beside its teacher big:" in printed
    for row, words in (
        ("teacher", "teacher's own round trip"),
        ("decoder", "student's decoder on teacher latents"),
        ("encoder", "student's encoder, teacher decodes"),
        ("student", "student's own round trip"),
    ):
        psnr = re.escape(f"{figures[row]['psnr']['mean']:.2f}")
        assert re.search(rf"  {words} +{psnr} dB", printed), printed
        assert re.search(rf'{escape(words[1:])}</th><td class="num">{psnr}</td>', page)
    assert "encodes " in printed and "x as fast: " in printed and max(map(len, printed.splitlines()[:30])) <= 80
    assert 'id="teacher"' in page and "Student&#39;s encoder, teacher decodes" in page
    assert page.count('class="pixels" alt="tiny decoder, a square of it"') == 1


@pytest.mark.slow
@pytest.mark.parametrize("num_students", [1, 2])
def test_the_page_in_a_browser(
    teachers: dict[str, Path], write_video: WriteVideo, tmp_path: Path, num_students: int
) -> None:
    video = write_video("clip.mp4", frames=9, height=32, width=48)
    students = [open_model(student(), label=f"student {number}") for number in range(num_students)]
    teacher = open_teacher(teachers["taecvx"], students, device=torch.device("cpu"), dtype=None)
    rows = beside_teacher(students, teacher)
    publish(compare(rows, video, lpips=None), rows, tmp_path, command="test")
    with open_browser() as browser:
        for width, dark in ((1400, False), (400, True)):
            browser.open(tmp_path / "report.html", width=width, dark=dark)
            assert browser.run("return document.documentElement.scrollWidth") <= width
            assert browser.run("return document.querySelectorAll('#teacher .same figure').length") == len(rows) + 1
            loaded = "return [...document.querySelectorAll('#teacher img')].every(i => i.naturalWidth > 0)"
            assert browser.run(loaded) and browser.complaints() == []


def test_weights_of_ours_that_state_no_variant_can_be_the_teacher(write_video: WriteVideo, tmp_path: Path) -> None:
    """They are taken for the student's variant, as in training; a name such as taecvx.pth is no obstacle."""
    video = write_video("clip.mp4", frames=12, height=16, width=24)
    model = student()
    torch.save(model.state_dict(), tmp_path / "taecvx.pth")
    comparison = compare([model], video, teacher=tmp_path / "taecvx.pth", lpips=None)
    teacher, decoder, encoder, own = comparison.evaluations
    assert teacher.model.latent_variant == "taecvx" and teacher.clips[0].num_frames == 9
    for row in (decoder, encoder, own):
        assert row.by_name()["clip.mp4"].psnr == pytest.approx(teacher.by_name()["clip.mp4"].psnr, abs=1e-3)


def test_mistakes_are_one_sentence(teachers: dict[str, Path], write_video: WriteVideo, tmp_path: Path) -> None:
    video = write_video("clip.mp4", frames=9, height=16, width=24)
    save_model(student(), tmp_path / "tiny.safetensors")
    save_model(student("taew2_2"), tmp_path / "wan.safetensors")
    tiny, data = str(tmp_path / "tiny.safetensors"), ["--data", str(video), "--lpips", "off"]
    for models, teacher, words in (
        ([tiny], tmp_path, "has no config.json, nor has its vae folder; name a diffusers VAE"),
        ([tiny], tmp_path / "gone", "there is no teacher folder .*gone"),
        ([tiny], next(teachers["taew2_1"].rglob("*.safetensors")), "is a file; name its folder in diffusers' format"),
        ([tiny], teachers["taew2_1"], "does not suit taecvx: .*; use variant taew2_1"),
        ([str(tmp_path / "wan.safetensors")], teachers["taew2_1"], "does not suit taew2_2: it has 16 latent channels"),
        ([str(teachers["taecvx"])], teachers["taecvx"], "big is a teacher and not a student; beside a teacher"),
    ):
        with pytest.raises(UserError, match=words) as mistake:
            run(["eval", *models, "--teacher", str(teacher), *data])
        assert "\n" not in str(mistake.value)
