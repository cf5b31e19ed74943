"""ungroup(group(x)) == x for every variant and length, and the order of rows, channels and contexts."""

from __future__ import annotations

import pytest
import torch

from tinyvae import VARIANTS
from tinyvae.losses.seraena import group_contexts_of, group_frames_of, ungroup_frames
from tinyvae.models.variants import get_spec


@pytest.mark.parametrize("variant", VARIANTS)
def test_ungroup_gives_back_what_was_grouped(variant: str) -> None:
    spec = get_spec(variant)
    for n_frames in range(1, 41):
        padded = spec.padded_frames(n_frames)
        for num_frames in {spec.aligned_frames(n_frames), min(spec.frames_out(n_frames), padded)}:
            frames = torch.rand(2, num_frames, 3, 2, 2)
            for group_frames in spec.seraena_divisors(n_frames):
                groups = group_frames_of(frames, padded_frames=padded, group_frames=group_frames)
                assert groups.shape == (2 * padded // group_frames, 3 * group_frames, 2, 2)
                back = ungroup_frames(groups, num_frames=num_frames, padded_frames=padded, group_frames=group_frames)
                assert torch.equal(back, frames)


def test_rows_are_sample_major_and_channels_frame_major() -> None:
    frames = torch.arange(2 * 5 * 3).view(2, 5, 3, 1, 1).float()  # sample n, frame t, channel c: 15n + 3t + c
    groups = group_frames_of(frames, padded_frames=8, group_frames=4)
    # 5 decoded frames and 3 that were trimmed: the padding is the clip's own frames 0, 1, 2.
    assert groups[0].flatten().tolist() == [*range(12)]
    assert groups[1].flatten().tolist() == [12, 13, 14, *range(9)]
    assert groups[2].flatten().tolist() == [*range(15, 27)]


def test_padding_longer_than_the_clip_goes_round() -> None:
    spec = get_spec("taeh3")
    assert (spec.padded_frames(17), spec.aligned_frames(17)) == (17, 5)
    frames = torch.arange(5).view(1, 5, 1, 1, 1).float().expand(1, 5, 3, 1, 1)
    groups = group_frames_of(frames, padded_frames=17, group_frames=1)
    assert groups[:, 0].flatten().tolist() == [index % 5 for index in range(17)]


def test_nothing_is_padded_where_nothing_was_trimmed() -> None:
    spec = get_spec("taecvx")  # FACTS 15: 16 decoded frames of 16 must not become 19
    frames = torch.rand(2, 16, 3, 2, 2)
    groups = group_frames_of(frames, padded_frames=spec.padded_frames(16), group_frames=4)
    assert torch.equal(groups, frames.reshape(8, 12, 2, 2))


def test_contexts_are_means_over_time_one_for_each_group() -> None:
    latents = torch.rand(2, 5, 16, 3, 4)
    contexts = group_contexts_of(latents, num_groups=3)
    assert contexts.shape == (6, 16, 3, 4)
    for row in range(6):
        torch.testing.assert_close(contexts[row], latents[row // 3].mean(dim=0))
