"""How a video becomes the discriminator's images: groups of consecutive frames, each with its clip's context.

A decoded clip is padded at its end with its own first frames up to the padded length of the variant (decoded frames
plus those that were trimmed; nothing where nothing was trimmed), then cut into G groups of k frames. Group g of
sample n is row n·G + g; its 3·k channels are frame-major. Ungrouping drops the padding: ungroup(group(x)) == x.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_frames_of(frames_NTCHW: Tensor, *, padded_frames: int, group_frames: int) -> Tensor:
    """Groups [N·G, k·C, H, W] of a decoded clip; ``padded_frames`` is `VariantSpec.padded_frames` of its length."""
    num_frames = frames_NTCHW.shape[1]
    assert 1 <= num_frames <= padded_frames, f"{num_frames} decoded frames of a padded length {padded_frames}"
    assert padded_frames % group_frames == 0, f"{group_frames} does not divide {padded_frames}"
    if num_frames < padded_frames:
        # The padding can be longer than the clip (taeh3: 5 decoded, 12 padded): go round as often as it takes.
        order = torch.arange(padded_frames, device=frames_NTCHW.device) % num_frames
        frames_NTCHW = frames_NTCHW[:, order]
    return frames_NTCHW.unflatten(1, (-1, group_frames)).flatten(2, 3).flatten(0, 1)


def ungroup_frames(groups_NCHW: Tensor, *, num_frames: int, padded_frames: int, group_frames: int) -> Tensor:
    """The clip [N, num_frames, C, H, W] that `group_frames_of` made these groups from."""
    num_groups = padded_frames // group_frames
    grouped = groups_NCHW.unflatten(0, (-1, num_groups)).unflatten(2, (group_frames, -1))
    return grouped.flatten(1, 2)[:, :num_frames]


def group_contexts_of(latents_NTCHW: Tensor, *, num_groups: int) -> Tensor:
    """Contexts [N·G, C, h, w]: the mean over *time* of each clip's latents, once for every group of the clip."""
    return latents_NTCHW.mean(dim=1).repeat_interleave(num_groups, dim=0)
