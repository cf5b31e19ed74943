"""A GPU that is too small: evaluation goes on in smaller chunks, and ends in a sentence where that is not enough."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tinyvae import TAEHV
from tinyvae.errors import UserError
from tinyvae.evaluation import evaluate
from tinyvae.evaluation import round_trip as round_trip_module
from tinyvae.evaluation.compare import compare
from tinyvae.evaluation.cost import StageTimes
from tinyvae.evaluation.evidence import gather_evidence
from tinyvae.evaluation.open_model import open_model
from tinyvae.evaluation.report import publish
from tinyvae.evaluation.round_trip import Piece, StreamedCodec, codec_facts

WriteVideo = Callable[..., Path]


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

    monkeypatch.setattr("tinyvae.evaluation.open_model.load_model", full)
    with pytest.raises(UserError, match=r"small\.safetensors does not fit into the memory of the GPU"):
        open_model(small_model_file)
