"""Decoded frame j is input frame j, seen by impulse response: which inputs may move which outputs.

A causal codec's output frame j must not depend on the frames of later latents, and must depend on its own latent's.
With random weights every allowed dependence is there with probability one, so both directions are tested.
"""

from __future__ import annotations

import pytest
import torch

from tinyvae import TAEHV, VARIANTS
from tinyvae.errors import UserError

SMALLEST = {name: spec.space_factor for name, spec in VARIANTS.items()}
ONE_OF_EACH = ["taehv", "taecvx", "taew2_2", "taehv1_5_super", "taeltx_2", "taeh3"]


def small_model(variant: str) -> TAEHV:
    return TAEHV(variant, width=0.125).double().eval()


def latent_of_frame(variant: str, frame: int, num_frames: int) -> int:
    """The latent that holds input frame ``frame``, as the teachers' causal map says (DESIGN section 2)."""
    spec = VARIANTS[variant]
    if spec.frame_rule == "chunked":
        chunk, place = divmod(frame, 17)
        return 5 * chunk + (place + 3) // 4
    return frame // spec.time_factor


@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_a_frame_moves_its_own_latent_and_none_before(variant: str) -> None:
    model, size = small_model(variant), SMALLEST[variant]
    length = 34 if variant == "taeh3" else 2 * model.spec.time_factor + 1
    video = torch.rand(1, length, 3, size, size, dtype=torch.double)
    with torch.no_grad():
        before = model.encode_video(video)
        for frame in range(length):
            moved = video.clone()
            moved[:, frame] += 0.1
            change = (model.encode_video(moved) - before).abs().amax(dim=(0, 2, 3, 4))
            first = latent_of_frame(variant, frame, length)
            assert (change[:first] == 0).all(), f"frame {frame} moved a latent before {first}"
            if first < len(change):
                assert change[first] > 0, f"frame {frame} did not move latent {first}"


@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_a_latent_moves_its_own_frames_and_none_before(variant: str) -> None:
    """Latent i first shows in the output where the causal map puts it: frame S·i - trim."""
    model = small_model(variant)
    spec = model.spec
    for num_latents in (2, 3, 6):
        latents = torch.randn(1, num_latents, spec.latent_channels, 1, 1, dtype=torch.double)
        raw_of_output = [i for i in range(spec.time_factor * num_latents) if spec.frame_is_kept(i, num_latents)]
        with torch.no_grad():
            before = model.decode(latents)
            assert before.shape[1] == spec.frames_from_latents(num_latents) == len(raw_of_output)
            for i in range(num_latents):
                moved = latents.clone()
                moved[:, i] += 1
                change = (model.decode(moved) - before).abs().amax(dim=(0, 2, 3, 4))
                for j, raw in enumerate(raw_of_output):
                    if raw < spec.time_factor * i:
                        assert change[j] == 0, f"latent {i} moved output frame {j}"
                    elif raw < spec.time_factor * (i + 1):
                        assert change[j] > 0, f"latent {i} did not move its own frame {j}"


@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_target_is_the_head_of_the_clip(variant: str) -> None:
    model, size = small_model(variant), SMALLEST[variant]
    for length in (1, 5, 12, 17, 18):
        frames = torch.arange(length, dtype=torch.float).reshape(1, length, 1, 1, 1).expand(1, length, 3, size, size)
        target = model.target(frames)
        assert target[0, :, 0, 0, 0].tolist() == list(range(model.spec.aligned_frames(length)))


@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_reconstruct_takes_any_length_and_odd_sizes(variant: str) -> None:
    model = TAEHV(variant, width=0.125).eval()
    with torch.no_grad():
        for length, height, width in [(1, 9, 17), (3, 33, 31), (8, 16, 40), (18, 5, 7)]:
            video = torch.rand(2, length, 3, height, width)
            output = model.reconstruct(video)
            assert output.shape == (2, model.spec.aligned_frames(length), 3, height, width)
            assert output.min() >= 0 and output.max() <= 1


def test_a_preview_in_time_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TAEHV("taehv", width=0.125, preview="time")
    monkeypatch.setattr(model, "encode_chunk", lambda *_: pytest.fail("the encoder ran"))
    with pytest.raises(UserError, match="makes one frame per latent, which does not line up"):
        model.reconstruct(torch.rand(1, 5, 3, 16, 16))
