"""The networks as modules: width, gradients in every mode, checkpointing, and what bad input gets."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from tinyvae import TAEHV, VARIANTS
from tinyvae.errors import UserError

ONE_OF_EACH = ["taehv", "taecvx", "taehv1_5_super", "taeltx_2", "taeh3"]


def loss_gradients(model: TAEHV, video: Tensor, *, parallel: bool = True) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    decoded = model.decode_video(model.encode_video(video, parallel=parallel), parallel=parallel)
    (decoded * torch.linspace(-1, 1, decoded.numel()).reshape(decoded.shape).to(decoded)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("width", [0.25, 0.5, 1.5])
@pytest.mark.parametrize("variant", ["taehv", "taew2_2_super"])
def test_width_scales_hidden_channels_only(variant: str, width: float) -> None:
    with torch.device("meta"):
        scaled, released = TAEHV(variant, width=width).state_dict(), TAEHV(variant).state_dict()
    assert list(scaled) == list(released)
    assert scaled["encoder.0.weight"].shape[0] == 64 * width
    assert scaled["encoder.17.weight"].shape[0] == released["encoder.17.weight"].shape[0]
    assert scaled["decoder.22.weight"].shape[0] == released["decoder.22.weight"].shape[0]
    hidden = released["decoder.17.conv.0.weight"].shape[0]
    assert scaled["decoder.17.conv.0.weight"].shape[0] == hidden * width


@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_gradients_are_the_same_in_every_mode(variant: str) -> None:
    model = TAEHV(variant, width=0.125).double()
    size = model.spec.space_factor
    video = 0.4 + 0.2 * torch.rand(1, 17, 3, size, size, dtype=torch.double)
    expected = loss_gradients(model, video)
    assert set(expected) == {name for name, _ in model.named_parameters()}
    for name, gradient in loss_gradients(model, video, parallel=False).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-9, rtol=1e-7)
    model.gradient_checkpointing = True
    for name, gradient in loss_gradients(model, video).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-12, rtol=1e-9)


PEAK_MEMORY = """
import sys, torch
from tinyvae import TAEHV

def peak_kb():
    # not getrusage: its maximum survives exec, so a large parent (the test run) would hide the child's own
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

torch.manual_seed(0); torch.set_num_threads(1)
model = TAEHV("taehv", width=0.25)
model.gradient_checkpointing = sys.argv[1] == "on"
video = torch.rand(1, 8, 3, 320, 320)
before = peak_kb()
model(video)[0].square().mean().backward()
print(peak_kb() - before)
"""


def test_checkpointing_lowers_peak_memory() -> None:
    """Measured, in processes of their own: resident memory that a training step adds, in kB.

    Seen: 0.69 to 0.75 of the plain step resident, convolution scratch included; 0.44 by the allocator's own count.
    """
    added = {
        mode: int(subprocess.run([sys.executable, "-c", PEAK_MEMORY, mode], capture_output=True, check=True).stdout)
        for mode in ("off", "on")
    }
    assert added["on"] < 0.85 * added["off"], added


def test_training_path_has_no_clamp() -> None:
    model = TAEHV("taehv", width=0.125)
    torch.nn.init.constant_(model.decoder[22].bias, 5.0)
    latents = torch.randn(1, 2, 16, 1, 1)
    decoded = model.decode(latents)
    assert decoded.max() > 1 and model.decode_video(latents).max() <= 1
    decoded.sum().backward()
    assert model.decoder[22].bias.grad.abs().min() > 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_half_precision_follows_the_weights(variant: str) -> None:
    model = TAEHV(variant, width=0.125).to(torch.bfloat16).eval()
    size = model.spec.space_factor
    with torch.no_grad():
        decoded = model.reconstruct(torch.rand(1, 3, 3, size, size))
    assert decoded.dtype == torch.bfloat16 and decoded.isfinite().all()


@pytest.mark.parametrize(
    ("video", "says"),
    [
        (torch.rand(4, 3, 8, 8), r"x\[None\]"),
        (torch.rand(1, 3, 4, 8, 8), r"x.transpose\(1, 2\)"),
        (torch.rand(1, 4, 8, 8, 3), r"x.movedim\(-1, 2\)"),
        (torch.rand(1, 4, 4, 8, 8), "3 RGB channels"),
        (torch.rand(1, 0, 3, 8, 8), "empty"),
        (torch.rand(0, 1, 3, 8, 8), "empty"),
        (torch.rand(1, 1, 3, 12, 8), "8x8 or 16x8"),
        (torch.zeros(1, 1, 3, 8, 8, dtype=torch.uint8), r"x.float\(\) / 255"),
        (torch.rand(1, 1, 3, 8, 8, device="meta"), "is on meta"),
        (torch.rand(1, 1, 3, 8, 8).numpy(), r"torch.as_tensor\(x\)"),
    ],
)
@pytest.mark.parametrize("parallel", [True, False])
def test_bad_videos_are_refused(video: Tensor, says: str, parallel: bool) -> None:
    model = TAEHV("taehv", width=0.125)
    with pytest.raises(UserError, match=says):
        model.encode_video(video, parallel=parallel)
    if "16x8" not in says:  # that one is padded
        with pytest.raises(UserError, match=says):
            model.reconstruct(video)


def test_bad_latents_are_refused() -> None:
    with pytest.raises(ValueError, match="48 latent channels"):
        TAEHV("taew2_2", width=0.125).decode_video(torch.randn(1, 2, 16, 1, 1))


def test_values_of_another_range_warn_once() -> None:
    model = TAEHV("taehv", width=0.125)
    with pytest.warns(UserWarning, match=r"looks like 0\.\.255"):
        model.encode_video(255 * torch.rand(1, 1, 3, 8, 8))
    with pytest.warns(UserWarning, match=r"looks like -1\.\.1"):
        TAEHV("taehv", width=0.125).encode_video(2 * torch.rand(1, 1, 3, 8, 8) - 1)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.encode_video(255 * torch.rand(1, 1, 3, 8, 8))
        TAEHV("taehv", width=0.125).encode_video(torch.rand(1, 1, 3, 8, 8))


def test_another_range_is_seen_behind_a_black_frame_and_in_a_later_call() -> None:
    model = TAEHV("taehv", width=0.125)
    model.encode_video(torch.rand(1, 1, 3, 8, 8))
    fades_in = torch.zeros(2, 3, 3, 8, 8)
    fades_in[1, 2] = 200
    with pytest.warns(UserWarning, match=r"looks like 0\.\.255"):
        model.encode_video(fades_in)


def test_progress_bar_is_shown_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    model = TAEHV("taehv", width=0.125)
    with torch.no_grad():
        model.decode_video(torch.randn(1, 2, 16, 1, 1), parallel=False, show_progress_bar=True)
    assert "decode" in capsys.readouterr().err
