"""`folded_training`: the same output and the same gradients as the plain network, in the layout the device wants."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.engines.small_models import small
from tinyvae import TAEHV
from tinyvae.engines import eager


def loss_of(model: TAEHV, frames: Tensor) -> Tensor:
    decoded, latents = model(frames)
    return F.mse_loss(decoded[:, : frames.shape[1]], frames[:, : decoded.shape[1]]) + latents.square().mean()


def small_pair(variant: str) -> tuple[TAEHV, TAEHV, Tensor]:
    plain = small(variant, width=0.125).train()
    folded = copy.deepcopy(plain)
    folded.folded_training = True
    factor = plain.spec.space_factor
    length = 17 if plain.spec.frame_rule == "chunked" else 2 * plain.spec.time_factor
    return plain, folded, torch.rand(2, length, 3, factor, 2 * factor)


def gradient_error(plain: TAEHV, folded: TAEHV) -> float:
    """The largest relative error of a parameter's gradient."""
    pairs = [(a.grad, b.grad) for a, b in zip(plain.parameters(), folded.parameters(), strict=True)]
    assert all(a is not None and b is not None for a, b in pairs)
    return max(((a - b).norm() / a.norm()).item() for a, b in pairs if a is not None and b is not None)


@pytest.mark.parametrize("variant", ["taehv", "taew2_2", "taew2_2_super", "taeltx_2", "taeh3"])
def test_gradients_are_those_of_the_plain_network(variant: str) -> None:
    plain, folded, frames = small_pair(variant)
    losses = []
    for model in (plain, folded):
        loss = loss_of(model, frames)
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert gradient_error(plain, folded) < 1e-5
    assert folded.state_dict().keys() == plain.state_dict().keys()


def test_gradients_the_way_cuda_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filled-up channels and the stacked first convolution, which a CPU does not choose by itself."""
    plain, folded, frames = small_pair("taehv")
    monkeypatch.setattr(eager.EagerStack, "stacking_of_first", lambda self, x, state: 2 if x.shape[2] == 3 else 1)
    aligned = eager.aligned_conv
    monkeypatch.setattr(eager, "aligned_conv", lambda x, w, b, multiple: aligned(x, w, b, multiple=8))
    loss_of(plain, frames).backward()
    loss_of(folded, frames).backward()
    assert gradient_error(plain, folded) < 1e-5


def test_checkpointing_changes_nothing() -> None:
    _, folded, frames = small_pair("taehv")
    again = copy.deepcopy(folded)
    again.gradient_checkpointing = True
    loss_of(folded, frames).backward()
    loss_of(again, frames).backward()
    assert gradient_error(folded, again) < 1e-6


def test_same_loss_curve() -> None:
    plain, folded, frames = small_pair("taehv")
    curves = []
    for model in (plain, folded):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(3):
            loss = loss_of(model, frames)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[0][-1] < curves[0][0]
    assert curves[1] == pytest.approx(curves[0], rel=1e-3)


def test_gradients_stay_in_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution that gets its gradient in another layout copies it first: 9 of 50 ms of a step on an H200."""
    _, folded, frames = small_pair("taehv")
    wrong: list[tuple[int, ...]] = []
    seen = 0
    convolve = F.conv2d

    def watched(x: Tensor, weight: Tensor, *rest: object, **options: object) -> Tensor:
        made = convolve(x, weight, *rest, **options)

        def look(gradient: Tensor) -> None:
            nonlocal seen
            seen += 1
            if not gradient.is_contiguous(memory_format=torch.channels_last):
                wrong.append(tuple(weight.shape))

        made.register_hook(look)
        return made

    monkeypatch.setattr(F, "conv2d", watched)
    loss_of(folded, frames).backward()
    image_and_latents = {tuple(folded.decoder[-1].weight.shape), tuple(folded.encoder[-1].weight.shape)}
    assert seen == 18 * 3 + 3 + 3 + 4  # memory blocks, pooling, growing, the first and last of each side
    assert set(wrong) <= image_and_latents


def test_torch_compile_sees_one_graph() -> None:
    """`compile_model` compiles the training step; a break in the graph would cost what compiling brings."""
    _, folded, frames = small_pair("taehv")
    expected = folded.encode(frames)
    compiled = torch.compile(folded.encode, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(frames), expected)
