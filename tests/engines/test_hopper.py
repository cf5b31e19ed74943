"""The Hopper engine's bookkeeping (packing, state, stacking, slices) with the kernels replaced by plain torch.

The stand-ins read the *packed* weights, in the layout the kernels read, so a packing fault shows here without a GPU.
The kernels themselves are compared with torch by benchmarks/speed_kernels.py on a Hopper GPU.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.engines import cudnn_stand_ins
from tests.engines.small_models import small
from tinyvae import TAEHV
from tinyvae.engines import conv_rows, first_pool, first_rows, grow_image, hopper, hopper_kernels
from tinyvae.engines.fill import fill_channels
from tinyvae.engines.fold import ConvLayer, Layer, fold_layers
from tinyvae.engines.fused import folded_copy
from tinyvae.models.blocks import WideMemBlock


def unpacked_tiles(weights: hopper_kernels.TileWeights) -> Tensor:
    """OIHW, by the addresses that `conv_tiles` reads: 4096 values a tap, 512 a chunk of 8 inputs, 8 an output."""
    blocks, slices, taps = weights.packed.shape[:3]
    o, i, tap = torch.meshgrid(torch.arange(64 * blocks), torch.arange(64 * slices), torch.arange(taps), indexing="ij")
    address = ((o // 64 * slices + i // 64) * taps + tap) * 4096 + i % 64 // 8 * 512 + o % 64 * 8 + i % 8
    side = 3 if taps == 9 else 2
    return weights.packed.flatten()[address].unflatten(2, (side, side))


def torch_conv_tiles(
    x_BHWC: Tensor,
    weights: hopper_kernels.TileWeights,
    *,
    frames_per_video: int = 1,
    past_NHWC: Tensor | None = None,
    residual_BHWC: Tensor | None = None,
    relu: bool = False,
    slope: float = 0.0,
    stacked: int = 1,
    out: Tensor | None = None,
    last_NHWC: Tensor | None = None,
) -> Tensor:
    frames, height, width, _ = x_BHWC.shape
    if last_NHWC is not None:
        last_NHWC.copy_(
            (x_BHWC if residual_BHWC is None else residual_BHWC).unflatten(0, (-1, frames_per_video))[:, -1]
        )
    x, weight = x_BHWC.permute(0, 3, 1, 2), unpacked_tiles(weights)
    if weights.sources == 2:
        video = x.unflatten(0, (-1, frames_per_video))
        first = torch.zeros_like(video[:, :1]) if past_NHWC is None else past_NHWC.permute(0, 3, 1, 2)[:, None]
        x = torch.cat([x, torch.cat([first, video[:, :-1]], 1).flatten(0, 1)], 1)
    assert x.shape[1] == weights.channels_in * weights.sources
    groups = weights.packed.shape[0] if weights.grouped else 1
    made = F.conv2d(x, weight, padding=1, groups=groups)
    if weights.taps == 4:
        phases = made.unflatten(1, (2, 2, weights.grown, -1))
        made = x.new_empty(frames, weights.grown, weights.channels_out, 2 * height, 2 * width)
        for i in (0, 1):
            for j in (0, 1):
                made[..., i::2, j::2] = phases[:, i, j, ..., i : i + height, j : j + width]
        made = made.flatten(0, 1)
    else:
        made = made.unflatten(1, (weights.grown, -1)).flatten(0, 1)
    if weights.bias is not None:
        made = made + weights.bias[:, None, None]
    if residual_BHWC is not None:
        made = made + residual_BHWC.permute(0, 3, 1, 2)
    made = F.leaky_relu(made, slope) if relu else made
    made = made.unflatten(0, (-1, stacked)).flatten(1, 2).permute(0, 2, 3, 1).contiguous()
    return made if out is None else out.copy_(made)


def unpacked_rows(weights: conv_rows.RowWeights) -> Tensor:
    """OIHW, by the addresses and columns that `conv_rows` reads: 12288 values a horizontal tap, 1536 a chunk of 8
    inputs, 512 an output row, 8 a column. A thread with lane % 4 == lane writes these columns to these channels."""
    o, i = torch.meshgrid(torch.arange(64), torch.arange(64 * weights.sources), indexing="ij")
    half, lane, n, r = o // 32, o % 32 // 8, o % 8 // 2, o % 2
    column = (half * 4 + n) * 8 + lane * 2 + r
    weight = torch.empty(64, 64 * weights.sources, 3, 3)
    for row in range(3):  # of the output: the one above the input row takes its lowest tap
        for tap in range(3):
            address = (i // 64 * 3 + tap) * 12288 + i % 64 // 8 * 1536 + row * 512 + column * 8 + i % 8
            weight[:, :, 2 - row, tap] = weights.packed.flatten()[address]
    return weight


def torch_conv_rows(x_BHWC: Tensor, weights: conv_rows.RowWeights, **how: Any) -> Tensor:
    packed = hopper_kernels.pack_tile_weights(unpacked_rows(weights), weights.bias, sources=weights.sources)
    return torch_conv_tiles(x_BHWC, packed, **how)


def columns(packed: Tensor) -> Tensor:
    """(K, N) of B fragments, by the PTX manual (mma.m16n8k16): of tile (k step, n tile) lane l holds the four values
    k = 2·(l % 4) + {0, 1, 8, 9} of column l // 4."""
    steps, tiles = packed.shape[:2]
    k, n = torch.meshgrid(torch.arange(16 * steps), torch.arange(8 * tiles), indexing="ij")
    lane = n % 8 * 4 + k % 8 // 2
    value = k % 2 + k % 16 // 8 * 2
    return packed.flatten()[((k // 16 * tiles + n // 8) * 32 + lane) * 4 + value]


def torch_image_conv(x_BHWC: Tensor, weights: hopper_kernels.ImageWeights, out: Tensor) -> None:
    weight = columns(weights.packed).reshape(3, 3, 64, -1).permute(3, 2, 0, 1)[: weights.channels_out]
    made = F.conv2d(x_BHWC.permute(0, 3, 1, 2), weight, weights.bias, padding=1)
    out.copy_(F.pixel_shuffle(made, weights.patch_size))


def torch_grow_image(x_BHWC: Tensor, weights: grow_image.GrowImageWeights, out: Tensor) -> None:
    """By the addresses and columns that the kernels read and sum: cells of phases, then the image."""
    (frames, height, width, _), grown = x_BHWC.shape, weights.grown
    o, i, tap = torch.meshgrid(torch.arange(256), torch.arange(64), torch.arange(4), indexing="ij")
    grow = weights.packed[:, tap * 16384 + i // 8 * 2048 + o * 8 + i % 8].unflatten(3, (2, 2))  # frame, out, in, 2x2
    cells = F.leaky_relu(F.conv2d(x_BHWC.permute(0, 3, 1, 2), grow.flatten(0, 1), padding=1), weights.slope)
    cells = cells.unflatten(1, (grown, 2, 2, 64)).flatten(0, 1)  # frame; phase row, phase column, channel; y, x
    cells[:, 1, :, :, 0], cells[:, 0, :, :, -1] = 0, 0
    cells[:, :, 1, :, :, 0], cells[:, :, 0, :, :, -1] = 0, 0
    if weights.patch_size > 1:
        out.copy_(torch_patches(cells, weights))
        return
    column, k = torch.meshgrid(torch.arange(48), torch.arange(256), indexing="ij")
    image = weights.packed[0][65536 + k // 8 * 384 + column * 8 + k % 8]
    reach = torch.einsum("fkyx,ok->foyx", cells.flatten(1, 3), image)
    quads = weights.bias[None, :, None, None, None, None].repeat(frames * grown, 1, height, 2, width, 2)
    for lane in range(4):  # the thread's output pixel of each quad
        for number in range(12):  # its columns: dy, dx, RGB
            dy, dx, color = number // 6, number // 3 % 2, number % 3
            part = reach[:, number // 2 * 8 + lane * 2 + number % 2, dy : dy + height, dx : dx + width]
            quads[:, color, :, lane // 2, :, lane % 2] += part
    out.copy_(quads.flatten(4, 5).flatten(2, 3))


def torch_patches(cells: Tensor, weights: grow_image.GrowImageWeights) -> Tensor:
    """The image of cells (frame; phase row, phase column, matrix column; y, x), as `grow_patches` computes it."""
    frames, _, _, _, height, width = cells.shape
    patch, together = weights.patch_size, grow_image.TOGETHER[weights.patch_size]
    columns = 12 * patch
    pixels = torch.zeros(frames, 64, 2 * height, 2 * width)  # from pixel (-1, -1)
    for lane in range(4):  # a thread with lane % 4 == lane writes these matrix columns to these channels
        for tile in range(8):
            for b in range(2):
                channel = (tile // 4 * 4 + lane) * 8 + tile % 4 * 2 + b
                for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
                    pixels[:, channel, 1 - i :: 2, 1 - j :: 2] = cells[:, i, j, tile * 8 + lane * 2 + b]
    k, row, column = torch.meshgrid(torch.arange(64), torch.arange(3), torch.arange(columns), indexing="ij")
    made = torch.empty(frames, 3, 2 * height - 2, patch, width - 1, 2, patch)  # quads' columns apart: even, odd
    for start in range(0, 2, together):
        rows = torch.zeros(frames, columns, 2 * height - 2, width - 1)  # of the output, by matrix column
        for tap in range(together + 2):
            image = weights.packed[0][65536 + ((tap * 8 + k // 8) * 3 + row) * columns * 8 + column * 8 + k % 8]
            for place in range(3):  # the output row above, beside, below: it reads pixel rows from 2 - place on
                part = pixels[:, :, 2 - place :, start + tap :: 2][:, :, : 2 * height - 2, : width - 1]
                rows += torch.einsum("fkyx,ko->foyx", part, image[:, place])
        for lane in range(4):
            for own in range(3 * patch):  # the thread's columns: three lines of a patch
                line, odd = (own // patch * 4 + lane) // together, start + lane % together
                values = rows[:, own // 2 * 8 + lane * 2 + own % 2] + weights.bias[line * patch + own % patch]
                made[:, line // patch, :, line % patch, :, odd, own % patch] = values
    return made.flatten(4, 6).flatten(2, 3)


def torch_first_rows(
    image_BCHW: Tensor, weights: first_rows.FirstRowWeights, *, stacked: int = 1, slope: float = 0.0
) -> Tensor:
    """By the addresses that `first_rows` reads: 1024 values a step of K = 16, 512 a half of it, 8 a column. Value k of
    a step is what `read_step` puts into half k // 8 of the thread lane % 4 == k % 8 // 2."""
    patch, steps = weights.patch_size, weights.packed.shape[1]
    outputs = torch.arange(64)
    columns = (outputs // 32 * 4 + outputs % 8 // 2) * 8 + outputs % 32 // 8 * 2 + outputs % 2
    weight = torch.zeros(64, 3, patch, 3 * patch, 3)  # out, color, row in the patch, value of a run, row of patches
    for dy, step, k in itertools.product(range(3), range(steps), range(16)):
        half, thread, pair = k // 8, k % 8 // 2, k % 2
        color, row, value = {
            1: (thread, 0, half * 2 + pair),
            2: (step, half, thread * 2 + pair),
            4: (step // 3, thread, step % 3 * 4 + half * 2 + pair),
        }[patch]
        read = weights.packed.flatten()[(dy * steps + step) * 1024 + half * 512 + columns * 8 + k % 8]
        if color < 3 and value < 3 * patch:
            weight[:, color, row, value, dy] = read
        else:
            assert not read.any()
    # A convolution of 3·patch x 3·patch with stride patch on the image.
    on_image = weight.permute(0, 1, 4, 2, 3).flatten(2, 3)
    made = F.leaky_relu(F.conv2d(image_BCHW, on_image, weights.bias, stride=patch, padding=patch), slope)
    return made.unflatten(0, (-1, stacked)).flatten(1, 2).permute(0, 2, 3, 1).contiguous()


def torch_first_pool(image_BCHW: Tensor, weights: first_pool.FirstPoolWeights, *, slope: float = 0.0) -> Tensor:
    """By the addresses that `first_pool` reads: 36864 values a frame, of them 12288 for even rows (4096 a horizontal
    tap, 512 a chunk of 8 inputs, 8 a column) and 24576 for odd rows (twice as many columns: lower, then upper taps)."""
    begin = weights.packed[73728:].reshape(3, -1, 2, 64, 8)
    both = first_rows.FirstRowWeights(packed=begin, bias=weights.bias, patch_size=weights.patch_size)
    hidden = torch_first_rows(image_BCHW, both, stacked=2, slope=slope).permute(0, 3, 1, 2)
    o, i, tap = torch.meshgrid(torch.arange(64), torch.arange(128), torch.arange(3), indexing="ij")
    column = (o // 32 * 4 + o % 8 // 2) * 8 + o % 32 // 8 * 2 + o % 2
    frame, chunk, value = i // 64 * 36864, i % 64 // 8, i % 8
    middle = frame + tap * 4096 + chunk * 512 + column * 8 + value
    lower = frame + 12288 + tap * 8192 + chunk * 1024 + column * 8 + value
    weight = weights.packed[torch.stack([lower + 512, middle, lower], dim=2)]
    return F.conv2d(hidden, weight, stride=2, padding=1).permute(0, 2, 3, 1).contiguous()


@pytest.fixture
def kernels_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_kernels, "conv_tiles", torch_conv_tiles)
    monkeypatch.setattr(hopper_kernels, "image_conv", torch_image_conv)
    monkeypatch.setattr(first_rows, "first_rows", torch_first_rows)
    monkeypatch.setattr(first_pool, "first_pool", torch_first_pool)
    monkeypatch.setattr(grow_image, "grow_image", torch_grow_image)
    monkeypatch.setattr(conv_rows, "conv_rows", torch_conv_rows)
    cudnn_stand_ins.stand_in(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())


def stacks(model: TAEHV) -> tuple[hopper.HopperStack, hopper.HopperStack]:
    both = [folded_copy(network) for network in (model.encoder, model.decoder)]
    encoder, decoder = [fill_channels(layers, hopper.CHANNELS) or layers for layers in both]
    patch = model.spec.patch_size
    return hopper.HopperStack(encoder, patch_size=patch), hopper.HopperStack(decoder, patch_size=patch)


@pytest.mark.usefixtures("kernels_in_torch")
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("variant", ["taehv", "taew2_2", "taeltx_2"])
def test_same_numbers_whole_and_in_chunks(variant: str, joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels that join layers, and as networks run whose layers do not fit them."""
    if not joined:
        monkeypatch.setattr(hopper, "CUDNN_CHANNELS", frozenset[int]())
        for kernel in (first_rows, first_pool, grow_image):
            monkeypatch.setattr(kernel, "fits", lambda *_: False)
    check_whole_and_in_chunks(TAEHV(variant), monkeypatch)


@pytest.mark.usefixtures("kernels_in_torch")
def test_a_narrow_network_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    check_whole_and_in_chunks(small("taew2_2", width=0.5), monkeypatch)


@pytest.mark.usefixtures("kernels_in_torch")
@pytest.mark.parametrize("variant", ["taehv", pytest.param("taehv1_5", marks=pytest.mark.slow)])
def test_leaky_relu_without_cudnns_relu(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels do all 3x3 convolutions of the blocks; no call that has ReLU inside is left."""

    def refuse(*arguments: object) -> Tensor:
        raise AssertionError("cuDNN's ReLU in a network of LeakyReLU")

    monkeypatch.setattr(torch, "cudnn_convolution_relu", refuse)
    monkeypatch.setattr(torch, "cudnn_convolution_add_relu", refuse)
    check_whole_and_in_chunks(small(variant, width=1.0, activation="leaky_relu"), monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("kernels_in_torch")
def test_wide_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("taeltx2_3_wide", width=1.0)
    packed = stacks(model)[1]._packed
    assert sum(isinstance(weights, hopper._WideWeights) for weights in packed) == 9
    check_whole_and_in_chunks(model, monkeypatch)


@pytest.mark.usefixtures("kernels_in_torch")
@pytest.mark.parametrize("slope", [0.0, 0.2])
def test_wide_block(slope: float) -> None:
    """One block of 128 channels, two videos, in pieces: against the plain block."""
    block = WideMemBlock(128, slope).requires_grad_(False)
    layers: list[Layer] = [*fold_layers(nn.Sequential(block)), ConvLayer(weight=torch.zeros(3, 128, 3, 3), bias=None)]
    stack = hopper.HopperStack(layers, patch_size=1)
    video = torch.randn(2, 5, 128, 3, 7)
    past = torch.cat([torch.zeros(2, 1, 128, 3, 7), video[:, :-1]], dim=1)
    expected = block(video.flatten(0, 1), past.flatten(0, 1)).unflatten(0, (2, 5))
    state, parts = [None, None], []
    for part in video.split([1, 3, 1], dim=1):
        made, state[0] = stack.block(0, part.flatten(0, 1).permute(0, 2, 3, 1).contiguous(), state, 2)
        parts.append(made.permute(0, 3, 1, 2).unflatten(0, (2, -1)))
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-5, rtol=1e-4)


def check_whole_and_in_chunks(model: TAEHV, monkeypatch: pytest.MonkeyPatch) -> None:
    factor = model.spec.space_factor
    encoder, decoder = stacks(model)
    monkeypatch.setattr(hopper, "SLICE_BYTES", 2**16)  # several groups of frames at full resolution
    frames = torch.rand(2, 2 * model.spec.time_factor, 3, factor, 2 * factor)
    with torch.no_grad():
        latents = model.encode_chunk(frames, None)[0]
        decoded = model.decode_chunk(3 * latents, None)[0]
        torch.testing.assert_close(encoder.run(frames, None)[0], latents, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(decoder.run(3 * latents, None)[0], decoded, atol=1e-5, rtol=1e-4)
        state, parts = None, []
        for start, stop in ((0, 1), (1, 4), (4, frames.shape[1])):  # groups that must wait for their partners
            part, state = encoder.run(frames[:, start:stop], state)
            parts += [part] if part.shape[1] else []
        torch.testing.assert_close(torch.cat(parts, 1), latents, atol=1e-5, rtol=1e-4)
        state, parts = None, []
        for place in range(latents.shape[1]):
            part, state = decoder.run(3 * latents[:, place : place + 1], state)
            parts.append(part)
        torch.testing.assert_close(torch.cat(parts, 1), decoded, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("kernels_in_torch")
@pytest.mark.parametrize(
    ("variant", "head"), [("taehv", ["first_pool"]), ("taew2_2", ["first_pool"]), ("taeltx_2", ["first_rows"])]
)
@torch.no_grad()
def test_layers_at_the_image_apart(variant: str, head: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What replays launch outside of a graph: whole kernels, and none of them inside."""
    model, called = TAEHV(variant), []
    for module in (first_pool, first_rows, grow_image):
        name = module.__name__.rpartition(".")[2]
        kernel = getattr(module, name)

        def noted(*arguments: Any, kernel: Any = kernel, name: str = name, **words: Any) -> Any:
            called.append(name)
            return kernel(*arguments, **words)

        monkeypatch.setattr(module, name, noted)
    encoder, decoder = stacks(model)
    frames = torch.rand(2, 2 * model.spec.time_factor, 3, model.spec.space_factor, 2 * model.spec.space_factor)
    latents = encoder.run(frames, None)[0]
    images = decoder.run(latents, None)[0]
    assert called == [*head, "grow_image"]
    begun = encoder.head(frames)
    assert called[2:] == head and begun.shape[:2] == (2, frames.shape[1] // 2)
    torch.testing.assert_close(encoder.run(begun, None, with_head=False)[0], latents)
    before = decoder.run(latents, None, with_image=False)[0]
    assert called[2:] == head
    torch.testing.assert_close(decoder.image(before, 2), images)
    assert called[2:] == [*head, "grow_image"]


@pytest.mark.usefixtures("kernels_in_torch")
@pytest.mark.parametrize("preview", ["time", "space", "both"])
def test_previews(preview: str) -> None:
    model = TAEHV("taehv", preview=preview)
    latents = torch.randn(1, 3, 16, 3, 5)
    with torch.no_grad():
        expected = model.decode_chunk(latents, None)[0]
        torch.testing.assert_close(stacks(model)[1].run(latents, None)[0], expected, atol=1e-5, rtol=1e-4)


def test_an_image_at_an_odd_address_is_copied() -> None:
    """A view into a larger buffer: the first kernels read 16 bytes at a time. At a whole address nothing is copied."""
    encoder = stacks(TAEHV("taehv").half())[0]
    buffer = torch.rand(8 + 4 * 3 * 8 * 16).half()
    for offset, is_copied in ((0, False), (8, False), (1, True)):
        image = buffer[offset : offset + 4 * 3 * 8 * 16].view(1, 4, 3, 8, 16)
        entered = encoder.enter(image, [])
        assert entered.data_ptr() % 16 == 0 and torch.equal(entered, image[0])
        assert (entered.data_ptr() != image.data_ptr()) == is_copied


def test_tile_height_wastes_least() -> None:
    # rows computed: 240 = 8 x 30, 32, 48 = 2 x 24, 16, 90 = 3 x 30, 96 = 3 x 32, 64 = 2 x 32
    for height, best in ((240, 30), (32, 32), (45, 24), (1, 16), (90, 30), (96, 32), (61, 32), (368, 16)):
        assert hopper_kernels.best_tile_height(height) == best


def test_flat_tiles_where_processors_would_be_idle() -> None:
    def chosen(frames: int, height: int, width: int, blocks: int) -> int:
        work = hopper_kernels.TileWork(frames, height, width, blocks, 9, False)
        return hopper_kernels.choose_tile_height(work, processors=132)

    # 256 channels of taew2_2 at 30x46: a whole video, three latents (36 tall jobs or 72 flat ones), one latent
    assert [chosen(frames, 30, 46, 4) for frames in (13, 3, 1)] == [30, 16, 8]
    # many frames of any height never pay for weights that are loaded again and again
    for height in (16, 30, 45, 60, 90, 120, 240):
        assert chosen(64, height, 368, 4) == hopper_kernels.best_tile_height(height)


def test_frames_that_would_keep_a_few_processors_busy_go_apart() -> None:
    def first(frames: int, multiple: int = 1, steps: int = 36) -> int:
        work = hopper_kernels.TileWork(frames, 30, 46, 4, 9, False)
        return hopper_kernels.first_frames(work, steps, multiple, processors=132)

    # a frame is 12 jobs: 11 frames are one wave of 132, 13 would be two with 24 in the second
    assert [first(frames) for frames in (10, 11, 13, 22, 23)] == [10, 11, 11, 22, 22]
    assert first(21) == 21, "two waves are nearly full"
    assert first(14, multiple=2) == 10 and first(13, steps=4) == 13, "one launch more costs more than it saves"


def test_a_launch_for_some_frames_sees_the_frame_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """`conv_tiles` itself, its launches computed in torch: two parts are what one is."""
    torch.manual_seed(0)
    x, past = torch.randn(5, 6, 7, 64), torch.randn(1, 6, 7, 64)
    weights = hopper_kernels.pack_tile_weights(torch.randn(64, 128, 3, 3) / 34, torch.randn(64), sources=2)

    def tiles_launch(*numbers: Any) -> Any:
        *_, frames, stacked, relu, slope = numbers

        def launch(
            x: Tensor, past: Tensor, packed: Tensor, bias: Tensor, residual: Any, out: Tensor, last: Any
        ) -> None:
            assert packed is weights.packed and bias is weights.bias
            words = {"past_NHWC": past, "frames_per_video": frames, "stacked": stacked, "relu": relu, "slope": slope}
            torch_conv_tiles(x, weights, residual_BHWC=residual, out=out, last_NHWC=last, **words)

        return launch

    monkeypatch.setattr(hopper_kernels, "_tiles_launch", tiles_launch)
    monkeypatch.setattr(hopper_kernels, "processors", lambda index: 132)
    made = []
    for first in (5, 2):
        monkeypatch.setattr(hopper_kernels, "first_frames", lambda *_, count=first, **__: count)
        last = torch.full_like(past, torch.nan)
        frames = hopper_kernels.conv_tiles(x, weights, frames_per_video=5, past_NHWC=past, relu=True, last_NHWC=last)
        made.append((frames, last))
    torch.testing.assert_close(made[0], made[1])
    assert torch.equal(made[1][1], x[-1:])


@pytest.mark.usefixtures("kernels_in_torch")
def test_wide_decoder_without_an_image_kernel() -> None:
    """128 channels at the image: cuDNN does the last convolution, and the patches must still become pixels."""
    model = TAEHV("taew2_2", width=2.0)
    decoder = hopper.HopperStack(folded_copy(model.decoder), patch_size=2)
    latents = torch.randn(1, 2, 48, 1, 2)
    with torch.no_grad():
        expected = model.decode_chunk(latents, None)[0]
        torch.testing.assert_close(decoder.run(latents, None)[0], expected, atol=1e-5, rtol=1e-4)
