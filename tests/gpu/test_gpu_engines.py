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

from tests.gpu.gpu_codecs import FLOOR, SHORT, by_frames, by_latents, error, needs_hopper, spread
from tinyvae import TAEHV, VARIANTS, StreamingDecoder
from tinyvae.engines import cudnn
from tinyvae.engines.fused import Engine, FusedTAEHV
from tinyvae.errors import UserError

CASES = [(variant, None) for variant in VARIANTS] + [("taehv", kind) for kind in ("time", "space", "both")]
DTYPES = list(FLOOR)


@pytest.fixture(autouse=True)
def no_tf32() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize(("variant", "preview"), CASES)
def test_against_float64(variant: str, preview: str | None) -> None:
    check_against_float64(spread(variant, preview=preview))


@pytest.mark.parametrize("variant", VARIANTS)
def test_leaky_relu_against_float64(variant: str) -> None:
    check_against_float64(spread(variant, activation="leaky_relu"))


@pytest.mark.parametrize("variant", ["taehv", "taew2_2", "taeltx_2"])
def test_narrow_networks_against_float64(variant: str) -> None:
    """The Hopper engine fills up their channels with zeros."""
    check_against_float64(spread(variant, width=0.5))


def check_against_float64(model: TAEHV) -> None:
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
                assert engine in ("hopper", "onednn"), f"{engine}: {refused}"
                continue
            checked += 1
            name = f"{model.spec.name} {model.spec.preview} {dtype} {engine}"
            assert error(fused.encode_video(short), exact_here) < limit_in, f"{name}: encode"
            assert error(by_frames(fused, short), exact_here) < limit_in, f"{name}: encode stream"
            assert error(fused.decode_video(latents), exact_out) < limit_out, f"{name}: decode"
            assert error(by_latents(fused, latents), exact_out) < limit_out, f"{name}: decode stream"
    assert checked >= 6, "cuDNN and eager in three precisions at least"


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("variant", ["taehv", "taew2_2", "taew2_2_super", "taeltx2_3_wide"])
def test_a_graph_gives_the_streams_own_frames(variant: str, dtype: torch.dtype) -> None:
    exact_model = spread(variant).double()
    model = copy.deepcopy(exact_model).to(dtype)
    latents = torch.randn(1, 5, model.spec.latent_channels, 12, 20, device="cuda", dtype=dtype)
    fused = model.fused()
    graph, stream = StreamingDecoder(fused, low_latency=True), StreamingDecoder(fused)
    exact = StreamingDecoder(exact_model)
    for part in latents.split(1, dim=1):
        by_graph, pushed = graph.push(part), stream.push(part)
        if variant == "taeltx2_3_wide":  # cuDNN may take another kernel where it pads a video's start itself
            wanted = exact.push(part.double())
            assert error(by_graph, wanted) < 1.3 * max(error(pushed, wanted), FLOOR[dtype])
        else:
            assert torch.equal(by_graph, pushed)


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


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize(
    ("variant", "activation", "size"),
    [
        ("taehv", "relu", (480, 720)),
        ("taehv", "leaky_relu", (488, 728)),  # 61 x 91 latents: tiles that hang over both edges
        ("taehv1_5", "leaky_relu", (464, 752)),
        ("taeltx2_3_wide", "relu", (480, 736)),
        ("taeltx2_3_wide", "leaky_relu", (544, 928)),
    ],
)
def test_large_frames_are_the_hopper_engines_on_hopper(
    variant: str, activation: str, size: tuple[int, int], dtype: torch.dtype
) -> None:
    needs_hopper()
    model = spread(variant, activation=activation).to(dtype)
    fused = model.fused()
    assert fused.engines == {"encoder": "hopper", "decoder": "hopper"}
    exact = copy.deepcopy(model).float()
    frames = torch.rand(1, 9, 3, *size, device="cuda", dtype=dtype)
    exact_in = exact.encode_video(frames.float()).double()
    latents = exact_in.to(dtype)
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
