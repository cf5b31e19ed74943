"""Models as round trips: a GPU that is too small gets smaller chunks, a teacher runs as diffusers does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.conftest import WriteVideo
from tinyvae import TAEHV
from tinyvae.convert.reconstruct import Outputs, decode_to_video, reconstruct_video
from tinyvae.errors import UserError
from tinyvae.evaluation import evaluate
from tinyvae.evaluation import round_trip as round_trip_module
from tinyvae.evaluation.compare import compare
from tinyvae.evaluation.cost import StageTimes
from tinyvae.evaluation.pictures import gather_evidence
from tinyvae.evaluation.report import publish
from tinyvae.evaluation.round_trip import (
    Piece,
    StreamedCodec,
    codec_facts,
    is_teacher,
    label_of,
    open_model,
    with_own_labels,
)


class TooSmallGpu(StreamedCodec):
    """A network on a device whose memory takes ``most_frames`` at once; ``sizes``: what it was handed."""

    def __init__(self, codec: TAEHV, *, most_frames: int) -> None:
        super().__init__(codec, codec_facts(codec, label="small", path=None))
        self.most_frames = most_frames
        self.sizes: list[int] = []

    def run(
        self,
        chunks: Iterable[Tensor],
        num_frames: int,
        times: StageTimes,
        on_latents: Callable[[Tensor], None] | None = None,
    ) -> Iterator[Piece]:
        def checked() -> Iterator[Tensor]:
            for number, chunk in enumerate(chunks):
                self.sizes.append(chunk.shape[0])
                if number and chunk.shape[0] > self.most_frames:  # not at once: what was measured so far must go
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
                yield chunk

        return super().run(checked(), num_frames, times, on_latents)


@pytest.fixture
def codec() -> TAEHV:
    torch.manual_seed(0)
    return TAEHV("taehv", width=0.125)


@pytest.fixture
def clips(write_video: WriteVideo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(round_trip_module.CHUNK_PIXELS, "cpu", 8 * 48 * 64)  # eight frames of these at a time
    for seed in range(2):
        write_video(f"clips/{seed}.mp4", seed=seed, frames=20)
    return tmp_path / "clips"


def test_smaller_chunks_give_the_same_numbers_and_are_kept(codec: TAEHV, clips: Path, tmp_path: Path) -> None:
    whole = evaluate(codec, clips, lpips=None)
    small = TooSmallGpu(codec, most_frames=3)
    result = evaluate(small, clips, lpips=None)
    assert small.sizes == [8, 8, 4, 4, *[2] * 20], "halved until it fits, and the next clip begins with what fits"
    for clip, wanted in zip(result.clips, whole.clips, strict=True):
        assert clip.metrics.psnr == pytest.approx(wanted.metrics.psnr, abs=1e-4)
        assert len(clip.metrics.psnr_by_frame) == len(wanted.metrics.psnr_by_frame)
    small = TooSmallGpu(codec, most_frames=3)
    (evidence, _) = gather_evidence([small], [whole], limit=2)
    assert evidence.film.num_frames == 17 and set(small.sizes) == {8, 4, 2}


def test_what_fits_in_no_way_is_a_sentence(codec: TAEHV, clips: Path, tmp_path: Path) -> None:
    sentence = r"\.mp4 does not fit into the memory of the GPU; take smaller frames"
    none = TooSmallGpu(codec, most_frames=0)
    with pytest.raises(UserError, match=sentence):
        evaluate(none, clips, lpips=None)
    assert none.sizes[-2:] == [1, 1]
    with pytest.raises(UserError, match=sentence):
        compare([codec, TooSmallGpu(codec, most_frames=0)], clips, lpips=None)
    result = evaluate(codec, clips, lpips=None)
    with pytest.raises(UserError, match=sentence):  # the second pass, for the films of the report
        publish(result, [TooSmallGpu(codec, most_frames=0)], tmp_path, command="test")


def test_a_model_that_does_not_fit_is_a_sentence(small_model_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> TAEHV:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("tinyvae.evaluation.round_trip.load_model", full)
    with pytest.raises(UserError, match=r"small\.safetensors does not fit into the memory of the GPU"):
        open_model(small_model_file)


def test_checkpoints_are_named_with_their_run() -> None:
    assert label_of(Path("out/my_run/checkpoint-500")) == "my_run/checkpoint-500"
    assert label_of(Path("out/my_run/best_model")) == "my_run/best_model"
    assert (label_of(Path("out/my_run")), label_of(Path("a/taehv.safetensors"))) == ("my_run", "taehv")
    assert label_of(Path("CogVideoX-2b/vae")) == "CogVideoX-2b"


def test_no_two_models_have_one_label(codec: TAEHV) -> None:
    """A browser calls the second download of a file `a (2)`."""
    trips = [open_model(codec, label=label) for label in ("a", "a (2)", "a", "a", "b")]
    assert [trip.facts.label for trip in with_own_labels(trips)] == ["a", "a (2)", "a (3)", "a (4)", "b"]
    trips = [open_model(codec, label=label) for label in ("a", "a", "a (2)")]
    assert [trip.facts.label for trip in with_own_labels(trips)] == ["a", "a (2)", "a (2) (2)"]


def test_a_config_that_is_no_text_is_no_teacher(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    assert not is_teacher(tmp_path)


@pytest.fixture
def cogvideox_folder(tmp_path: Path) -> Path:
    from tests.test_diffusers import small_teacher  # which is skipped where there is no diffusers

    folder = tmp_path / "CogVideoX-tiny" / "vae"
    small_teacher("taecvx").save_pretrained(folder)
    return folder


def test_a_teacher_can_stand_in_any_place(cogvideox_folder: Path, write_video: WriteVideo) -> None:
    video = write_video("clip.mp4", frames=14, height=40, width=48)  # 8k+1 and 8k: nine frames agree
    assert is_teacher(cogvideox_folder) and is_teacher(cogvideox_folder.parent)
    for wrong in ({"variant": "taecvx"}, {"fused": True}):
        with pytest.raises(UserError, match="is a teacher; leave it out"):
            open_model(cogvideox_folder, **wrong)  # type: ignore[arg-type]
    (clip,) = evaluate(cogvideox_folder, video, lpips=None).clips
    assert clip.metrics.num_frames == 9 and clip.metrics.is_finite
    comparison = compare([TAEHV("taecvx", width=0.125), cogvideox_folder.parent], video, lpips=None)
    first, second = comparison.evaluations
    assert (first.model.kind, second.model.kind) == ("tinyvae", "teacher")
    assert first.clips[0].metrics.num_frames == second.clips[0].metrics.num_frames == 9
    assert second.clips[0].metrics == clip.metrics
    assert second.model.parameters > 1000 and second.model.variant == "AutoencoderKLCogVideoX"
    assert any("teacher holds a whole clip" in note for note in first.notes)


def test_a_teacher_alone_sees_49_frames_unless_told(cogvideox_folder: Path, write_video: WriteVideo) -> None:
    video = write_video("clip.mp4", frames=60, height=16, width=16)
    alone = evaluate(cogvideox_folder, video, lpips=None)
    assert alone.clips[0].metrics.num_frames == 49 and "first 49 frames" in alone.notes[0]
    assert evaluate(cogvideox_folder, video, lpips=None, max_frames=57).clips[0].metrics.num_frames == 57


def test_a_student_decodes_the_latents_of_its_teacher(
    cogvideox_folder: Path, write_video: WriteVideo, tmp_path: Path
) -> None:
    video = write_video("clip.mp4", frames=9, height=32, width=48)
    latents = tmp_path / "latents.safetensors"
    reconstruct_video(open_model(cogvideox_folder), video, Outputs(latents=latents))
    student = open_model(TAEHV("taecvx", width=0.125))
    assert isinstance(student, StreamedCodec)
    assert decode_to_video(student, latents, tmp_path / "out.mp4") == 9


@pytest.mark.parametrize("variant", ["taeltx_2", "taeltx2_3"])
def test_students_of_either_ltx_decode_the_latents_of_their_teacher(
    variant: str, write_video: WriteVideo, tmp_path: Path
) -> None:
    """The VAEs of LTX-2 and LTX-2.3 have one class: its latents are not taken for those of the first."""
    from tests.test_diffusers import small_teacher

    small_teacher("taeltx_2").save_pretrained(tmp_path / "vae")
    video, latents = write_video("clip.mp4", frames=9, height=64, width=64), tmp_path / "latents.safetensors"
    reconstruct_video(open_model(tmp_path / "vae"), video, Outputs(latents=latents))
    student = open_model(TAEHV(variant, width=0.125))
    assert isinstance(student, StreamedCodec)
    assert decode_to_video(student, latents, tmp_path / "out.mp4") == 9
