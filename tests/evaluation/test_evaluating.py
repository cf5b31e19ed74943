"""Evaluation end to end: a perfect codec is perfect, real networks score what their whole-video call scores."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.conftest import WriteVideo
from tests.evaluation.copy_codec import CopyCodec
from tests.processes import HANGS_S
from tinyvae import TAEHV, load_model
from tinyvae.errors import MissingFileError, UserError
from tinyvae.evaluation import clip_metrics, evaluate
from tinyvae.evaluation import round_trip as round_trip_module
from tinyvae.evaluation.cost import choose_devices
from tinyvae.evaluation.evaluating import own_memory_bytes
from tinyvae.evaluation.metrics import METRICS, PSNR_CAP_DB, ClipMeter
from tinyvae.evaluation.results import results_as_json
from tinyvae.evaluation.round_trip import StreamedCodec, open_model
from tinyvae.models.codec import CodecState
from tinyvae.video.decode import read_frames


def test_a_perfect_codec_is_perfect(write_video: WriteVideo, tmp_path: Path) -> None:
    """Alignment by one frame wrong would score about 25 dB here; published tables have this fault."""
    lengths = (9, 17, 18, 23, 24)
    for length in lengths:
        write_video(f"clips/{length:02}.mp4", frames=length, height=38, width=50)  # no multiple of 8, 16 or 32
    for codec in map(CopyCodec, ("taehv", "taehv1_5", "taeltx_2")):
        result = evaluate(codec, tmp_path / "clips", lpips=None)
        assert [clip.metrics.num_frames for clip in result.clips] == list(map(codec.spec.aligned_frames, lengths))
        for clip in result.clips:
            assert clip.metrics.psnr == PSNR_CAP_DB and clip.metrics.flicker_error == 0, (codec.spec.name, clip.name)
        assert result.is_complete and result.summary.num_clips == 5


@pytest.mark.parametrize(
    ("variant", "num_frames"),
    [("taehv", 19), ("taecvx", 5), ("taecvx", 8), ("taeh3", 18), ("taew2_2_super", 9), ("taeltx_2", 17)],
)
def test_streamed_evaluation_equals_the_whole_video_call(
    write_video: WriteVideo, monkeypatch: pytest.MonkeyPatch, variant: str, num_frames: int
) -> None:
    monkeypatch.setitem(round_trip_module.CHUNK_PIXELS, "cpu", 3 * 44 * 52)  # three frames at a time
    video = write_video("clip.mp4", frames=num_frames, height=44, width=52)
    model = TAEHV(variant, width=0.125)
    (clip,) = evaluate(model, video, lpips=None).clips
    frames = read_frames(video, range(num_frames))[None].float() / 255
    with torch.no_grad():
        decoded = model.reconstruct(frames)
    (whole,) = clip_metrics(decoded, model.target(frames))
    assert clip.metrics.num_frames == whole.num_frames == model.spec.aligned_frames(num_frames)
    for name in METRICS:
        expected = whole.value(name)
        assert clip.metrics.value(name) == (None if expected is None else pytest.approx(expected, rel=1e-3, abs=1e-6))


def test_several_devices_give_the_same_numbers(write_video: WriteVideo, tmp_path: Path) -> None:
    for seed in range(4):
        write_video(f"clips/{seed}.mp4", seed=seed, frames=9)
    model = TAEHV("taehv", width=0.125)
    one = evaluate(model, tmp_path / "clips", lpips=None, device="cpu")
    two = evaluate(model, tmp_path / "clips", lpips=None, device=["cpu", "cpu"])
    assert [clip.name for clip in two.clips] == [clip.name for clip in one.clips] == [f"{i}.mp4" for i in range(4)]
    assert [clip.metrics for clip in two.clips] == [clip.metrics for clip in one.clips]
    assert two.cost.num_devices == 2


def test_a_gpu_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_devices("cuda:0, cuda:1") == [torch.device("cuda", 0), torch.device("cuda", 1)]
    with pytest.raises(UserError, match="'cuda:0' is named twice"):
        choose_devices("cuda,cuda:0")
    with pytest.raises(UserError, match="this machine shows 2 CUDA devices"):
        choose_devices("cuda:2")


def test_size_and_frame_limits(write_video: WriteVideo, tmp_path: Path) -> None:
    for seed in range(5):
        write_video(f"clips/{seed}.mp4", seed=seed, frames=21, height=64, width=128)
    result = evaluate(CopyCodec(), tmp_path / "clips", lpips=None, max_frames=13, max_clips=2, size=(32, 40))
    assert [clip.name for clip in result.clips] == ["0.mp4", "2.mp4"]
    assert {(clip.height, clip.width, clip.num_frames) for clip in result.clips} == {(32, 40, 13)}
    assert result.summary.psnr is not None and result.summary.psnr.mean == PSNR_CAP_DB


def test_one_unreadable_video_among_many_is_skipped_and_named(write_video: WriteVideo, tmp_path: Path) -> None:
    write_video("clips/good.mp4")
    write_video("clips/short.mp4", frames=3)
    (tmp_path / "clips" / "text.mp4").write_text("this is no video " * 50)
    result = evaluate(CopyCodec(), tmp_path / "clips", lpips=None)
    assert [clip.name for clip in result.clips] == ["good.mp4"] and not result.is_complete
    reasons = {skipped.name: skipped.reason for skipped in result.skipped}
    assert "it has 3 of the 4 frames that one taehv latent needs" in reasons["short.mp4"]
    assert "text.mp4" in reasons["text.mp4"]


def test_users_mistakes_are_one_sentence(write_video: WriteVideo, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="there is no video in"):
        evaluate(CopyCodec(), tmp_path / "empty", lpips=None)
    with pytest.raises(MissingFileError, match="there is no data at"):
        evaluate(CopyCodec(), tmp_path / "nowhere", lpips=None)
    with pytest.raises(UserError, match=r"no video of .* could be measured: .*it has 3 of the 4 frames"):
        evaluate(CopyCodec(), write_video("short.mp4", frames=3), lpips=None)
    video = write_video("a.mp4", frames=5)
    with pytest.raises(UserError, match="max_frames must be at least 1"):
        evaluate(CopyCodec(), video, lpips=None, max_frames=0)
    with pytest.raises(UserError, match=r"--frames 3 \(max_frames\) is less than the 4 frames of one latent"):
        evaluate(CopyCodec(), video, lpips=None, max_frames=3)
    for device in ("meta", "cpu,vulkan"):
        with pytest.raises(UserError, match="torch cannot compute on"):
            evaluate(CopyCodec(), video, lpips=None, device=device)
    with pytest.raises(UserError, match="no device 'gpu'"):
        evaluate(CopyCodec(), video, lpips=None, device="gpu")
    with pytest.raises(UserError, match="there are no LPIPS weights at"):
        evaluate(CopyCodec(), video, lpips=tmp_path / "none.safetensors")
    for preview in ("time", "space"):
        with pytest.raises(UserError, match="load the model without preview="):
            evaluate(TAEHV("taehv", width=0.125, preview=preview), video, lpips=None)


def test_annotations_and_index(write_video: WriteVideo, tmp_path: Path) -> None:
    from tinyvae.data.index_build import build_index

    for seed, split in enumerate(("train", "val", "val")):
        write_video(f"clips/{split}/{seed}.mp4", seed=seed, frames=9)
    (tmp_path / "clips" / "val" / "bad.mp4").write_bytes(b"\0" * 500)
    entries = [
        {"path": str(path.relative_to(tmp_path / "clips")), "split": path.parent.name}
        for path in sorted((tmp_path / "clips").glob("*/*.mp4"))
    ]
    annotations = tmp_path / "clips" / "list.json"
    annotations.write_text(json.dumps({"total": len(entries), "list": entries}))
    result = evaluate(CopyCodec(), annotations, lpips=None, split="val")
    assert [clip.name for clip in result.clips] == ["val/1.mp4", "val/2.mp4"]
    assert [skipped.name for skipped in result.skipped] == ["val/bad.mp4"]
    index = tmp_path / "clips.index"
    build_index(annotations, index, num_workers=1)
    indexed = evaluate(CopyCodec(), index, lpips=None, split="val")
    assert [clip.metrics for clip in indexed.clips] == [clip.metrics for clip in result.clips]
    assert "as its index says" in indexed.skipped[0].reason


def test_missing_lpips_weights_are_said_in_one_line(
    write_video: WriteVideo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINYVAE_LPIPS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no_cache"))
    result = evaluate(CopyCodec(), write_video("clip.mp4"))
    assert result.summary.lpips is None and result.clips[0].metrics.lpips is None
    assert len(result.notes) == 1 and "tinyvae lpips-weights" in result.notes[0]


def test_lpips_is_the_known_distance(shared: Path, write_video: WriteVideo) -> None:
    from tinyvae.losses.perceptual import LPIPS

    weights = shared / "lpips" / "alex.safetensors"
    video = write_video("clip.mp4", frames=9, height=64, width=64)
    codec = CopyCodec(flicker=0.1)
    (clip,) = evaluate(codec, video, lpips=weights).clips
    frames = read_frames(video, range(9)).float() / 255
    decoded = codec.reconstruct(frames[None])[0].clamp(0, 1)
    assert clip.metrics.lpips_by_frame == pytest.approx(LPIPS.from_file(weights)(decoded, frames).tolist(), abs=1e-5)
    assert clip.metrics.lpips is not None and clip.metrics.lpips > 0.001
    (tiny,) = evaluate(codec, write_video("tiny.mp4", frames=9, height=16, width=16), lpips=weights).clips
    assert tiny.metrics.lpips is None  # AlexNet needs 31 pixels


def test_a_model_that_makes_nan_is_not_complete(write_video: WriteVideo) -> None:
    result = evaluate(CopyCodec(offset=float("nan")), write_video("clip.mp4"), lpips=None)
    assert not result.is_complete and "NaN" in result.notes[-1]
    plain = results_as_json(result, command="test")
    text = json.dumps(plain, allow_nan=False)
    assert plain["evaluations"][0]["summary"]["psnr"]["mean"] is None and "NaN" in text


def test_model_files_and_their_facts(write_video: WriteVideo, small_model_file: Path) -> None:
    result = evaluate(small_model_file, write_video("clip.mp4", frames=9), lpips=None)
    model = TAEHV("taehv", width=0.125)
    assert result.model.parameters == sum(p.numel() for p in model.parameters())
    assert (result.model.label, result.model.variant, result.model.dtype) == ("small", "taehv", "float32")
    assert result.model.sha256 is not None and len(result.model.sha256) == 64
    assert result.cost.decode_fps > 0 and result.cost.peak_memory_bytes is not None
    assert result.cost.peak_memory_bytes > 10 * 2**20
    assert result.environment["torch"] == torch.__version__


def test_a_fused_model_scores_the_same(write_video: WriteVideo, small_model_file: Path) -> None:
    video = write_video("clip.mp4", frames=11)
    plain = evaluate(small_model_file, video, lpips=None)
    fused = evaluate(open_model(small_model_file, fused=True), video, lpips=None)
    in_memory = evaluate(load_model(small_model_file).fused(), video, lpips=None)
    for result in (fused, in_memory):
        assert result.clips[0].metrics.psnr == pytest.approx(plain.clips[0].metrics.psnr, abs=1e-3)
        assert result.model.parameters == plain.model.parameters
    assert fused.model.label == "small (fused)"
    with pytest.raises(UserError, match="cannot be moved to meta"):
        open_model(load_model(small_model_file).fused()).to(torch.device("meta"))


def test_real_clips(shared: Path) -> None:
    result = evaluate(CopyCodec(), shared / "data" / "clips" / "val" / "ocv_box.mp4", lpips=None, max_frames=9)
    assert result.clips[0].metrics.psnr == PSNR_CAP_DB
    hostile = evaluate(CopyCodec(), shared / "data" / "hostile", lpips=None, max_frames=5, size=(32, 48))
    names = {clip.name for clip in hostile.clips}
    assert {"rotated_90.mp4", "av1.mp4", "gray.mp4", "odd_dims_vp9.webm"} <= names
    assert {"zero_bytes.mp4", "audio_only.mp4", "one_frame.mp4"} <= {skipped.name for skipped in hostile.skipped}
    assert all(clip.metrics.psnr == PSNR_CAP_DB for clip in hostile.clips)


class FailingCodec(CopyCodec):
    """A device that gives up at its first clip; the others are slow, and begin when it ``has_failed``."""

    def __init__(self, fault: BaseException, has_failed: threading.Event, *, fails: bool = True) -> None:
        super().__init__()
        self.fault, self.has_failed, self.fails = fault, has_failed, fails
        self.chunks = 0

    def encode_chunk(self, frames_NTCHW: torch.Tensor, state: CodecState | None) -> tuple[torch.Tensor, CodecState]:
        self.chunks += 1
        if self.fails:
            self.has_failed.set()
            raise self.fault
        assert self.has_failed.wait(HANGS_S)
        time.sleep(0.1)
        return super().encode_chunk(frames_NTCHW, state)


class TwoDevices(StreamedCodec):
    """A round trip whose copy on the second "device" is another codec."""

    def __init__(self, codecs: list[FailingCodec]) -> None:
        super().__init__(codecs[0], open_model(codecs[0]).facts)
        self._codecs = iter(codecs)

    def to(self, device: torch.device) -> StreamedCodec:
        return StreamedCodec(next(self._codecs), self.facts)


@pytest.mark.parametrize(
    ("fault", "seen", "words"),
    [
        (RuntimeError("the device fell off the bus"), RuntimeError, "fell off the bus"),
        (torch.OutOfMemoryError("CUDA out of memory"), UserError, "mp4 does not fit into the memory of the GPU"),
    ],
)
def test_one_failing_device_ends_the_evaluation_soon(
    write_video: WriteVideo, tmp_path: Path, fault: Exception, seen: type[Exception], words: str
) -> None:
    for seed in range(3):
        write_video(f"clips/{seed}.mp4", seed=seed, frames=9, height=16, width=16)
    for copy in range(27):
        (tmp_path / "clips" / f"copy{copy}.mp4").write_bytes((tmp_path / "clips" / "0.mp4").read_bytes())
    has_failed = threading.Event()
    working, failing = FailingCodec(fault, has_failed, fails=False), FailingCodec(fault, has_failed)
    with pytest.raises(seen, match=words):
        evaluate(TwoDevices([working, failing]), tmp_path / "clips", lpips=None, device=["cpu", "cpu"])
    assert working.chunks < 60  # it did not go through all clips, of three chunks each


class PressedCodec(CopyCodec):
    """Somebody presses Ctrl-C while its fifth chunk is encoded; later ones are slow."""

    chunks = 0

    def encode_chunk(self, frames_NTCHW: torch.Tensor, state: CodecState | None) -> tuple[torch.Tensor, CodecState]:
        self.chunks += 1
        if self.chunks == 5:
            os.kill(os.getpid(), signal.SIGINT)
        if self.chunks >= 5:
            time.sleep(0.1)
        return super().encode_chunk(frames_NTCHW, state)


def test_ctrl_c_does_not_wait_for_all_clips(write_video: WriteVideo, tmp_path: Path) -> None:
    write_video("clips/0.mp4", frames=9, height=16, width=16)
    for copy in range(30):
        (tmp_path / "clips" / f"copy{copy}.mp4").write_bytes((tmp_path / "clips" / "0.mp4").read_bytes())
    codec = PressedCodec()
    with pytest.raises(KeyboardInterrupt):
        evaluate(codec, tmp_path / "clips", lpips=None)
    assert codec.chunks < 60  # of 93


def test_memory_is_that_of_the_stages_not_of_the_metrics(
    write_video: WriteVideo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LPIPS and SSIM need more than a tiny network; their scratch memory must not be called the model's."""
    push = ClipMeter.push

    def hungry_push(self: ClipMeter, decoded_TCHW: torch.Tensor, target_TCHW: torch.Tensor) -> None:
        torch.ones(200 * 2**20, dtype=torch.uint8)
        push(self, decoded_TCHW, target_TCHW)

    video = write_video("clip.mp4", frames=9)
    usual = evaluate(CopyCodec(), video, lpips=None).cost.peak_memory_bytes
    monkeypatch.setattr(ClipMeter, "push", hungry_push)
    hungry = evaluate(CopyCodec(), video, lpips=None).cost.peak_memory_bytes
    assert usual is not None and hungry is not None and hungry < usual + 100 * 2**20


def test_memory_of_a_model_on_a_gpu_leaves_other_models_out() -> None:
    facts = replace(open_model(CopyCodec()).facts, parameters=1000, dtype="float16")
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert own_memory_bytes(facts, cuda, idle=50_000, peak=80_000) == 30_000 + 2 * 1000
    assert own_memory_bytes(facts, cpu, idle=0, peak=80_000) == 80_000
