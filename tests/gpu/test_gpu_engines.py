"""Every variant, preview and engine on a GPU against float64; streams, CUDA graphs, two threads on one codec."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Iterator
from typing import get_args

import pytest
import torch
from torch import Tensor

from tinyvae import TAEHV, VARIANTS, StreamingDecoder, StreamingEncoder
from tinyvae.engines import cudnn
from tinyvae.engines.fused import Engine, FusedTAEHV
from tinyvae.errors import UserError

CASES = [(variant, None) for variant in VARIANTS] + [("taehv", kind) for kind in ("time", "space", "both")]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
FLOOR = {torch.float16: 2e-4, torch.bfloat16: 2e-3, torch.float32: 2e-6}
"""A plain error below this is rounding luck: no engine is held to less."""


def spread(variant: str, **options: object) -> TAEHV:
    """Weights of which every layer matters to the output."""
    model = TAEHV(variant, **options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.05 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.cuda().eval()


def error(made: Tensor, exact: Tensor) -> float:
    assert made.shape == exact.shape, (made.shape, exact.shape)
    return ((made.double() - exact).norm() / exact.norm()).item()


def by_latents(codec: object, latents: Tensor) -> Tensor:
    stream = StreamingDecoder(codec, num_latents=latents.shape[1])  # type: ignore[arg-type]
    return torch.cat([stream.push(part) for part in latents.split(1, dim=1)], dim=1)


def by_frames(codec: object, frames: Tensor) -> Tensor:
    stream = StreamingEncoder(codec)  # type: ignore[arg-type]
    parts = [stream.push(part) for part in frames.split(3, dim=1)]
    return torch.cat([*parts, stream.flush()], dim=1)


@pytest.fixture(autouse=True)
def no_tf32() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize(("variant", "preview"), CASES)
def test_against_float64(variant: str, preview: str | None) -> None:
    check_against_float64(spread(variant, preview=preview))


def test_leaky_relu_against_float64() -> None:
    check_against_float64(spread("taehv1_5", activation="leaky_relu"))


def check_against_float64(model: TAEHV) -> None:
    only_eager = model.spec.decoder == "wide" or model.spec.activation == "leaky_relu"
    exact_model = copy.deepcopy(model).double()
    factor, length = model.spec.space_factor, 2 * model.spec.time_factor + 1
    torch.manual_seed(1)
    frames = torch.rand(2, length, 3, 3 * factor, 5 * factor, device="cuda", dtype=torch.float64)
    exact_in = exact_model.encode_video(frames)
    checked = 0
    for dtype in DTYPES:
        plain = copy.deepcopy(model).to(dtype)
        short, latents = frames.to(dtype), exact_in.to(dtype)
        exact_here, exact_out = exact_model.encode_video(short.double()), exact_model.decode_video(latents.double())
        limit_in = 1.3 * max(error(plain.encode_video(short), exact_here), FLOOR[dtype])
        limit_out = 1.3 * max(error(plain.decode_video(latents), exact_out), FLOOR[dtype])
        for engine in get_args(Engine):
            try:
                fused = FusedTAEHV(plain, engine=engine)
            except UserError as refused:
                assert engine == "hopper" or only_eager, f"{engine}: {refused}"
                continue
            checked += 1
            name = f"{model.spec.name} {model.spec.preview} {dtype} {engine}"
            assert error(fused.encode_video(short), exact_here) < limit_in, f"{name}: encode"
            assert error(by_frames(fused, short), exact_here) < limit_in, f"{name}: encode stream"
            assert error(fused.decode_video(latents), exact_out) < limit_out, f"{name}: decode"
            assert error(by_latents(fused, latents), exact_out) < limit_out, f"{name}: decode stream"
    assert checked >= (3 if only_eager else 6), "cuDNN and eager in three precisions at least"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("variant", ["taehv", "taew2_2", "taew2_2_super"])
def test_a_graph_gives_the_streams_own_frames(variant: str, dtype: torch.dtype) -> None:
    model = spread(variant).to(dtype)
    latents = torch.randn(1, 5, model.spec.latent_channels, 12, 20, device="cuda", dtype=dtype)
    fused = model.fused()
    graph, stream = StreamingDecoder(fused, low_latency=True), StreamingDecoder(fused)
    for part in latents.split(1, dim=1):
        assert torch.equal(graph.push(part), stream.push(part))


@pytest.mark.parametrize("variant", ["taehv", "taew2_2_super"])
def test_two_threads_with_two_streams_on_one_codec(variant: str) -> None:
    """Each thread decodes its own film many times; a launch that took the other's tensors would show."""
    fused = spread(variant).half().fused()
    channels = fused.spec.latent_channels
    films = [torch.randn(1, 6, channels, 10, 14, device="cuda", dtype=torch.float16) for _ in range(2)]
    expected = [by_latents(fused, film) for film in films]
    torch.cuda.synchronize()
    wrong: list[str] = []
    together = threading.Barrier(2)

    def decode(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            together.wait()
            for attempt in range(40):
                made = by_latents(fused, films[number])
                torch.cuda.current_stream().synchronize()
                if not torch.equal(made, expected[number]):
                    wrong.append(f"thread {number}, attempt {attempt}")
                    return

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


@pytest.mark.parametrize("variant", ["taew2_2", "taeltx_2", "taew2_2_super"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_replayed_chunks_are_the_launched_ones(variant: str, dtype: torch.dtype) -> None:
    """Whole videos and interleaved streams, several times: the first time launches, later ones replay a CUDA graph."""
    fused = spread(variant).to(dtype).fused()
    spec, torch_random = fused.spec, torch.Generator("cuda").manual_seed(0)
    length, side = 3 * spec.time_factor, 6 * spec.space_factor
    films = torch.rand(3, 1, length, 3, side, side, device="cuda", dtype=dtype, generator=torch_random)
    launched = [fused.encode_video(films[0])]
    decoded = [fused.decode_video(launched[0])]
    for film in films[1:]:
        fused._replays["encoder"]._recordings.clear()
        fused._replays["decoder"]._recordings.clear()
        launched.append(fused.encode_video(film))
        decoded.append(fused.decode_video(launched[-1]))
    for _ in range(3):
        for film, latents, frames in zip(films, launched, decoded, strict=True):
            assert torch.equal(fused.encode_video(film), latents)
            assert torch.equal(fused.decode_video(latents), frames)
    assert any(recording is not None for recording in fused._replays["decoder"]._recordings.values())
    streams = [StreamingDecoder(fused, num_latents=latents.shape[1]) for latents in launched]
    parts = [latents.split(1, dim=1) for latents in launched]
    made = [[stream.push(part) for stream, part in zip(streams, row, strict=True)] for row in zip(*parts, strict=True)]
    expected = [by_latents(fused, latents) for latents in launched]
    for number, frames in enumerate(expected):
        assert torch.equal(torch.cat([row[number] for row in made], dim=1), frames)


def test_480x720_fp16_is_the_hopper_engine_on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernels need compute capability 9.0")
    model = spread("taehv").half()
    fused = model.fused()
    assert fused.engines == {"encoder": "hopper", "decoder": "hopper"}
    exact = copy.deepcopy(model).float()
    frames = torch.rand(1, 9, 3, 480, 720, device="cuda", dtype=torch.float16)
    exact_in = exact.encode_video(frames.float()).double()
    latents = exact_in.half()
    exact_out = exact.decode_video(latents.float()).double()
    assert error(fused.encode_video(frames), exact_in) < 1.3 * error(model.encode_video(frames), exact_in)
    assert error(fused.decode_video(latents), exact_out) < 1.3 * error(model.decode_video(latents), exact_out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["taehv", "taew2_2_super"])
def test_a_shape_that_cudnn_refuses(variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch computes it on the card, within the same error; one warning for each shape."""
    model = spread(variant)
    exact = copy.deepcopy(model).double()
    plain = model.to(dtype)
    latents = torch.randn(1, 3, model.spec.latent_channels, 12, 20, device="cuda", dtype=dtype)
    exact_out = exact.decode_video(latents.double())
    limit = 1.3 * max(error(plain.decode_video(latents), exact_out), FLOOR[dtype])
    fused = FusedTAEHV(plain, engine="cudnn")

    def refuse(*arguments: object) -> Tensor:
        raise RuntimeError("GET was unable to find an engine to execute this computation")

    monkeypatch.setattr(cudnn, "_refused", set())
    monkeypatch.setattr(torch, "cudnn_convolution_add_relu", refuse)
    monkeypatch.setattr(torch, "cudnn_convolution_relu", refuse)
    with pytest.warns(UserWarning, match="cuDNN refuses"):
        assert error(fused.decode_video(latents), exact_out) < limit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert error(fused.decode_video(latents), exact_out) < limit


def test_cudnns_own_refusal_is_known() -> None:
    """What cuDNN says to a convolution that it has no kernel for is among the words that we look for."""
    x = torch.ones(1, 8, 8, 8, device="cuda", dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    weight = torch.ones(8, 8, 3, 3, device="cuda", dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    bias = torch.ones(8, device="cuda", dtype=torch.float64)
    try:
        torch.cudnn_convolution_relu(x, weight, bias, (1, 1), (1, 1), (1, 1), 1)
    except RuntimeError as refusal:
        assert any(words in str(refusal) for words in cudnn.REFUSALS), str(refusal)
    else:
        pytest.skip("this cuDNN has fused convolutions in float64")
