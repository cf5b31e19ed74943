"""Kernels that start while the one in front still runs, on a Hopper GPU: the same bits as one after the other, whatever
memory is used again, in streams, graphs and threads, and right behind the kernels that make their weights. And what
small chunks have of their own: flat tiles, small shares of rows, states that a block's kernel copies."""

from __future__ import annotations

import copy
import ctypes
import math
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.gpu.gpu_codecs import FLOOR, SHORT, by_frames, by_latents, error, needs_hopper, spread
from tinyvae import TAEHV
from tinyvae.engines import (
    conv_rows,
    depthwise,
    first_pool,
    first_rows,
    fold,
    grow_image,
    hopper_kernels,
    nvrtc,
    replay,
)
from tinyvae.engines import fused as engines
from tinyvae.engines.fused import FusedTAEHV
from tinyvae.engines.stack import Stack

VARIANTS = ["taehv", "taew2_2", "taeltx_2", "taew2_2_super", "taeltx2_3_wide"]


@pytest.fixture(autouse=True)
def only_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_hopper()
    monkeypatch.setattr(replay.Replay, "records", True)


class CountingDriver:
    """The driver, with a count of the kernels that may start early."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        self._driver, self.early, self.others = driver, 0, 0

    def __getattr__(self, name: str) -> object:
        self.early += name == "cuLaunchKernelEx"
        self.others += name == "cuLaunchKernel"
        return getattr(self._driver, name)


def videos(model: TAEHV, count: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Frames and latents, two videos each."""
    spec = model.spec
    frames = torch.rand(count, 2, 2 * spec.time_factor, 3, 3 * spec.space_factor, 5 * spec.space_factor, device="cuda")
    latents = torch.randn(count, 2, 3, spec.latent_channels, 3, 5, device="cuda")
    return list(zip(frames.to(dtype), latents.to(dtype), strict=True))


def all_ways(codec: FusedTAEHV, frames: Tensor, latents: Tensor) -> list[Tensor]:
    whole = [codec.encode_video(frames), codec.decode_video(latents)]
    return [*whole, by_frames(codec, frames), by_latents(codec, latents)]


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("variant", VARIANTS)
def test_early_kernels_make_the_same_bits(variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched and from graphs, several videos in turn, so that memory goes from hand to hand."""
    model = spread(variant).to(dtype)
    cases = videos(model, 3, dtype)
    driver = CountingDriver(nvrtc._driver())
    monkeypatch.setattr(nvrtc, "_driver", lambda: driver)
    monkeypatch.setattr(nvrtc, "EARLY_LAUNCH", False)
    codec = model.fused()
    expected = [all_ways(codec, *case) for case in cases]
    assert driver.early == 0 < driver.others
    monkeypatch.setattr(nvrtc, "EARLY_LAUNCH", True)
    for replays in (False, True):
        monkeypatch.setattr(engines, "REPLAY_CHUNKS", replays)
        early = model.fused()
        for _ in range(6):
            for case, known in zip(cases, expected, strict=True):
                for made, one in zip(all_ways(early, *case), known, strict=True):
                    assert torch.equal(made, one)
    assert driver.early > 100, "most kernels of ours started early"


def test_weights_are_complete_though_made_just_before() -> None:
    """A codec, or a copy of one, runs right behind the kernels that make its weights, while the GPU is busy."""
    model = spread("taehv").half()
    frames = torch.rand(1, 4, 3, 64, 96, device="cuda", dtype=torch.float16)
    codec = model.fused()
    expected = codec.encode_video(frames)
    busy = torch.rand(4096, 4096, device="cuda")
    for _ in range(10):
        made = []
        busy = busy @ busy / 4096
        made.append(model.fused().encode_video(frames))
        busy = busy @ busy / 4096
        made.append(copy.deepcopy(codec).encode_video(frames))
        for one in made:
            assert torch.equal(one, expected)


def test_threads_and_streams_at_the_same_time() -> None:
    model = spread("taew2_2").half()
    codec, cases = model.fused(), videos(model, 4, torch.float16)
    expected = [all_ways(codec, *case) for case in cases]
    torch.cuda.synchronize()
    wrong: list[object] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                made = all_ways(codec, *cases[number])
                wrong.extend(number for one, known in zip(made, expected[number], strict=True) if not one.equal(known))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(("frames", "height", "width"), [(1, 3, 5), (2, 37, 29), (3, 60, 92), (13, 60, 90)])
def test_a_chain_of_kernels_over_two_buffers(frames: int, height: int, width: int) -> None:
    """Each kernel reads what the one before wrote, and writes over what that one read."""
    torch.manual_seed(height)
    weight = (torch.randn(64, 64, 3, 3, device="cuda") / 24).half()
    first = (torch.randn(64, 128, 3, 3, device="cuda") / 34).half()
    bias = torch.zeros(64, device="cuda").half()
    rows, tiles = conv_rows.pack_row_weights(weight, bias), hopper_kernels.pack_tile_weights(weight, bias)
    two = conv_rows.pack_row_weights(first, bias)
    two_tiles = hopper_kernels.pack_tile_weights(first, bias, sources=2)
    bands = depthwise.pack_bands(*(torch.randn(2, 64, 1, 7, 7, device="cuda") / 7).half())
    start = torch.randn(frames, height, width, 64, device="cuda").half()

    def chain() -> list[Tensor]:
        here, there, kept = start.clone(), torch.empty_like(start), []
        steps: list[Callable[[], object]] = [
            lambda: conv_rows.conv_rows(here, rows, residual_BHWC=here, out=there),
            lambda: hopper_kernels.conv_tiles(there, tiles, residual_BHWC=there, out=here),
            lambda: conv_rows.conv_rows(here, two, frames_per_video=frames, out=there, last_NHWC=last),
            lambda: hopper_kernels.conv_tiles(there, two_tiles, frames_per_video=frames, out=here, last_NHWC=last),
            lambda: there.copy_(
                depthwise.super_depthwise(here, bands, num_videos=1, past_NHWC=last)[1].expand_as(there)
            ),
            lambda: here.copy_(there.add_(start).clamp_(-4, 4)),
        ]
        last = torch.empty_like(start[:1])
        for _ in range(8):
            for step in steps:
                step()
            kept.append(last.clone())
        return [here, there, *kept]

    expected = chain()
    assert expected[0].isfinite().all() and expected[0].std() > 0.1
    for _ in range(10):
        with nvrtc.early_launches():
            made = chain()
        for one, known in zip(made, expected, strict=True):
            assert torch.equal(one, known)


@pytest.mark.parametrize("patch", [1, 2, 4])
def test_a_chain_from_image_to_image(patch: int) -> None:
    """An encoder's first kernels make small frames of an image, and a decoder's last kernel an image of them, which the
    next turn reads while the image before is written over."""
    torch.manual_seed(patch)
    inputs = 3 * patch**2
    wide = (torch.randn(64, inputs, 3, 3, device="cuda") / (4 * inputs) ** 0.5).half()
    first = fold.ConvLayer(weight=wide, bias=torch.randn(64, device="cuda").half(), relu=True)
    pool = fold.PoolLayer(weight=fold.channels_last((torch.randn(64, 128, 3, 3, device="cuda") / 24).half()), stride=2)
    grow = fold.GrowLayer(weight=(torch.randn(512, 64, 2, 2, device="cuda") / 16).half(), frames=2, relu=True)
    narrow = (torch.randn(inputs, 64, 3, 3, device="cuda") / 17).half()
    image = fold.ConvLayer(weight=narrow, bias=torch.randn(inputs, device="cuda"))
    assert first.bias is not None
    rows = first_rows.pack_weights(first.weight, first.bias, patch)
    joined = first_pool.pack_weights(first, pool, patch) if patch < 4 else None
    back = grow_image.pack_weights(grow, image)
    start = torch.randn(4, 3, 10 * patch * 8, 23 * patch * 8, device="cuda").half()

    def chain() -> list[Tensor]:
        here, there, kept = start.clone(), torch.empty_like(start), []
        for _ in range(8):
            hidden = first_rows.first_rows(here, rows, stacked=2)
            if joined is not None:
                small = first_pool.first_pool(here, joined)
            else:
                pooled = torch.nn.functional.conv2d(hidden.permute(0, 3, 1, 2), pool.weight, stride=2, padding=1)
                small = pooled.permute(0, 2, 3, 1).contiguous()
            grow_image.grow_image(small, back, there)
            here, there = there, here
            kept += [hidden[:, ::7, ::7].clone(), small]
        return [here, there, *kept]

    expected = chain()
    assert expected[0].isfinite().all() and expected[0].std() > 0.1
    for _ in range(10):
        with nvrtc.early_launches():
            made = chain()
        for one, known in zip(made, expected, strict=True):
            assert torch.equal(one, known)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("grouped", [False, True])
def test_tiles_of_every_height(grouped: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64, and the last frames of three videos besides."""
    torch.manual_seed(2)
    x, other = (torch.randn(6, 31, 23, 128, device="cuda").to(dtype) for _ in "ab")
    groups, sources = (2, 1) if grouped else (1, 2)
    weight = (torch.randn(128, 128 * sources // groups, 3, 3, device="cuda") / 40).to(dtype)
    bias = torch.randn(128, device="cuda").to(dtype)
    packed = hopper_kernels.pack_tile_weights(weight, bias, sources=sources, groups=groups)
    flat, residual = x.double().permute(0, 3, 1, 2), other if grouped else None
    if sources == 2:
        video = flat.unflatten(0, (3, 2))
        flat = torch.cat([flat, torch.cat([torch.zeros_like(video[:, :1]), video[:, :1]], 1).flatten(0, 1)], 1)
    exact = torch.nn.functional.conv2d(flat, weight.double(), bias.double(), padding=1, groups=groups)
    exact = torch.relu(exact.permute(0, 2, 3, 1) + (other.double() if grouped else 0))
    for tile_h in (8, *hopper_kernels.TILE_HEIGHTS):
        monkeypatch.setattr(hopper_kernels, "choose_tile_height", lambda *_, height=tile_h, **__: height)
        hopper_kernels._tiles_launch.cache_clear()
        out, last = torch.full_like(x, torch.nan), torch.full_like(x[:3], torch.nan)
        hopper_kernels.conv_tiles(
            x, packed, frames_per_video=2, residual_BHWC=residual, relu=True, out=out, last_NHWC=last
        )
        assert error(out, exact) < 2 * FLOOR[dtype], tile_h
        assert torch.equal(last, (other if grouped else x)[1::2])
    forget_cuts()


def test_frames_in_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as in one: over two frames, phases that grow frames, a residual with frames side by side."""
    x, residual = (torch.randn(5, 31, 23, 64, device="cuda").half() for _ in "ab")
    past, bias = torch.randn(1, 31, 23, 64, device="cuda").half(), torch.randn(64, device="cuda").half()
    shapes = {"two frames": (64, 128, 3, 3), "phases": (512, 64, 2, 2), "residual": (64, 64, 3, 3)}
    weights = {name: (torch.randn(shape, device="cuda") / 30).half() for name, shape in shapes.items()}
    two = hopper_kernels.pack_tile_weights(weights["two frames"], bias, sources=2)
    phases = hopper_kernels.pack_tile_weights(weights["phases"], None, grown=2)
    plain = hopper_kernels.pack_tile_weights(weights["residual"], bias)
    made = []
    for first in (5, 3):
        monkeypatch.setattr(hopper_kernels, "first_frames", lambda work, *_, cut=first, **__: min(cut, work.frames))
        last = torch.full_like(past, torch.nan)
        one = hopper_kernels.conv_tiles(x, two, frames_per_video=5, past_NHWC=past, relu=True, last_NHWC=last)
        more = hopper_kernels.conv_tiles(x, phases, relu=True)
        added = hopper_kernels.conv_tiles(x, plain, residual_BHWC=residual, relu=True)
        made.append([one, more, added, last])
    assert torch.equal(made[1][3], x[-1:])
    for whole, parts in zip(*made, strict=True):
        assert torch.equal(whole, parts)


def forget_cuts() -> None:
    """How the work was cut before."""
    for cached in (hopper_kernels._tiles_launch, hopper_kernels.first_frames, conv_rows._launch):
        cached.cache_clear()


@pytest.mark.parametrize("variant", VARIANTS)
def test_small_chunks_are_as_right_as_before(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single latents with tall tiles, warpgroups in pairs and copies of images, and without all these: both as near to
    float64. Three times, the last one from graphs."""
    model = spread(variant).half()
    exact_model = copy.deepcopy(model).double()
    frames = torch.rand(1, 2 * model.spec.time_factor, 3, 10 * model.spec.space_factor, 15 * model.spec.space_factor)
    frames = frames.cuda().half()
    exact_in = exact_model.encode_video(frames.double())
    latents = exact_in.half()
    exact_out = exact_model.decode_video(latents.double())
    errors = []
    for is_new in (False, True):
        with monkeypatch.context() as patch:
            if not is_new:
                patch.setattr(hopper_kernels, "FLAT_HEIGHTS", ())
                patch.setattr(conv_rows, "ALONE_TURNS", math.inf)
                patch.setattr(Stack, "head_is_smaller", lambda *_: False)
                patch.setattr(Stack, "image_is_larger", lambda *_: False)
            forget_cuts()
            codec = model.fused()
            for _ in range(3):
                made_in, made_out = by_frames(codec, frames), by_latents(codec, latents)
        errors.append([error(made_in, exact_in), error(made_out, exact_out)])
    forget_cuts()
    for old, new in zip(*errors, strict=True):
        assert new < 1.1 * max(old, FLOOR[torch.float16])
