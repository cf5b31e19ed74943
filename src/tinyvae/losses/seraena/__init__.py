"""Seraena for video: a discriminator that trains beside the student and gives it correction targets.

The student never sees an adversarial loss: plain MSE trains it toward ``fake + correction``. A training step that runs
out of memory is computed again. The discriminator remembers the micro-batches that it has learned from in this step:
for those, the next attempt only makes the corrections again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinyvae.errors import UserError
from tinyvae.losses.distances import reconstruction_loss
from tinyvae.losses.seraena.discriminator import PATCH_PIXELS, Normalization, SeraenaDiscriminator, make_correction
from tinyvae.losses.seraena.replay_buffer import ReplayBuffer, WritePlan
from tinyvae.models.variants import VariantSpec

AverageInPlace = Callable[[list[Tensor]], None]  # replaces each tensor by its mean over all ranks


class HalfStepError(UserError):
    """The discriminator's update failed in the middle: its state must not be used or saved."""


@dataclass(frozen=True, kw_only=True)
class SeraenaResult:
    """``target_NTCHW``: fake + correction. ``scalars``: for the log, fp32. ``finite``: the same on every rank; False
    where any rank met a value that is not finite: then Seraena has not changed, and the trainer skips its step too."""

    target_NTCHW: Tensor
    finite: bool
    scalars: dict[str, Tensor]


def seraena_loss(fake_NTCHW: Tensor, target_NTCHW: Tensor) -> Tensor:
    """MSE of the decoded frames toward their correction targets; a scalar in fp32."""
    return reconstruction_loss(fake_NTCHW, target_NTCHW.detach())


class Seraena:
    """Discriminator, optimizer, replay buffer and random numbers of one rank; no part of the student's module.

    Example::

        seraena = Seraena(get_spec("taehv"), n_frames=16, group_frames=4, buffer_mb=512)
        result = seraena.step(target, decoded, latents)
        loss = seraena_loss(decoded, result.target_NTCHW)
    """

    def __init__(
        self,
        spec: VariantSpec,
        n_frames: int | Sequence[int],
        group_frames: int,
        *,
        buffer_mb: float,
        buffer_sizes: int = 1,
        buffer_device: torch.device | str = "cpu",
        device: torch.device | str = "cpu",
        learning_rate: float = 3e-4,
        normalization: Normalization = "size_independent",
        seed: int = 0,
        rank: int = 0,
        dtype: torch.dtype = torch.float32,
        compiled: bool = False,
    ) -> None:
        """``n_frames``: the clip length before encoding, or several. ``group_frames``: frames that the discriminator
        sees at once. ``buffer_mb``: the bound of this rank's replay buffer in 2**20 bytes; ``buffer_sizes``: how many
        picture sizes share it. ``dtype``: precision of the discriminator's layers, whose weights stay in fp32."""
        lengths = [n_frames] if isinstance(n_frames, int) else n_frames
        for length in lengths:
            spec.check_seraena_frames(length, group_frames)
        self.group_frames = group_frames
        self._padded_frames = {spec.latents(length): spec.padded_frames(length) for length in lengths}
        self.normalization: Normalization = normalization
        self.seed, self.rank, self.steps = seed, rank, 0
        self.discriminator = SeraenaDiscriminator.from_seed(3 * group_frames, spec.latent_channels, seed)
        self.discriminator.to(device).eval()
        self.discriminator.dtype = dtype
        if torch.device(device).type == "cuda":
            self.discriminator.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if compiled:
            self.discriminator.compile(dynamic=False)
        self.optimizer = torch.optim.AdamW(
            self.discriminator.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.01
        )
        self.buffer = ReplayBuffer(max_mb=buffer_mb, device=buffer_device, num_sizes=buffer_sizes)
        self.generator = rank_generator(seed, rank, self.steps)
        self._training_step: int | None = None
        self._learned: list[Tensor | None] = []  # the loss of each of its micro-batches; None: not finite
        self._position = 0  # which micro-batch comes next

    def check_batch(self, num_clips: int, height: int, width: int) -> None:
        """Refuse batches in which the discriminator's batch norm would see a single value."""
        num_images = num_clips * min(self._padded_frames.values()) // self.group_frames
        if num_images * (height // PATCH_PIXELS) * (width // PATCH_PIXELS) < 2:
            raise UserError(
                f"Seraena cannot normalize a batch of one {height}x{width} image; use larger frames or a larger batch."
            )

    def begin_step(self, training_step: int) -> None:
        """A training step starts, or starts again after it ran out of memory; all ranks together."""
        if training_step != self._training_step:
            self._training_step, self._learned = training_step, []
        self._position = 0

    def step(
        self, real_NTCHW: Tensor, fake_NTCHW: Tensor, latents_NTCHW: Tensor, *, average: AverageInPlace | None = None
    ) -> SeraenaResult:
        """Train the discriminator once on a micro-batch, then make the correction targets of its fakes.

        ``fake_NTCHW``: decoded frames, not clamped; ``real_NTCHW``: their targets in [0, 1]; ``latents_NTCHW``: what
        they were decoded from. The student gets no gradient from here. Several ranks call this together and give
        ``average``; their discriminators stay equal bit by bit.
        """
        assert real_NTCHW.shape == fake_NTCHW.shape, f"{tuple(real_NTCHW.shape)} and {tuple(fake_NTCHW.shape)}"
        assert len(latents_NTCHW) == len(fake_NTCHW), f"{len(latents_NTCHW)} latents, {len(fake_NTCHW)} videos"
        padded_frames = self._padded_frames[latents_NTCHW.shape[1]]
        grouping = {"padded_frames": padded_frames, "group_frames": self.group_frames}
        real, fake = (group_frames_of(x.detach().float(), **grouping) for x in (real_NTCHW, fake_NTCHW))
        contexts = group_contexts_of(latents_NTCHW.detach().float(), num_groups=padded_frames // self.group_frames)
        if self._position == len(self._learned):
            self._learned.append(self._learn(real, fake, contexts, average))
        loss = self._learned[self._position]
        self._position += 1
        target = fake_NTCHW.detach().float()
        if loss is None:
            names = ("discriminator_loss", "correction_std", "real_score", "fake_score")
            scalars = dict.fromkeys(names, fake.new_tensor(torch.nan))
            return SeraenaResult(target_NTCHW=target, finite=False, scalars=scalars)
        correction, scalars = make_correction(self.discriminator, real, fake, contexts, self.normalization)
        change = ungroup_frames(correction, num_frames=fake_NTCHW.shape[1], **grouping)
        return SeraenaResult(target_NTCHW=target + change, finite=True, scalars={"discriminator_loss": loss, **scalars})

    def _learn(self, real: Tensor, fake: Tensor, contexts: Tensor, average: AverageInPlace | None) -> Tensor | None:
        """One AdamW step; its loss, or None where any rank met a value that is not finite: then nothing has changed."""
        norms = list(self.discriminator.buffers())
        norms_before, draws_before = [value.clone() for value in norms], self.generator.get_state()
        is_well = False
        try:
            plan = self.buffer.plan(fake, contexts, self.generator)
            loss, gradients = self._gradients(*self._draw_batch(real, fake, contexts, plan))
            statistics = [value for value in norms if value.is_floating_point()]
            # The inputs are checked too: they enter the buffer even if they are not drawn. The flag travels with the
            # gradients, so all ranks decide alike.
            any_bad = torch.where(all_finite([real, fake, contexts, loss]), 0.0, 1.0)
            if average is not None:
                average([*gradients, *statistics, any_bad, loss])
            is_well = bool((any_bad == 0) & all_finite(gradients) & all_finite(statistics))
        finally:
            if not is_well:
                for value, before in zip(norms, norms_before, strict=True):
                    value.copy_(before)
                self.generator.set_state(draws_before)
        if not is_well:
            return None
        try:
            for parameter, gradient in zip(self.discriminator.parameters(), gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.buffer.commit(plan, fake, contexts)
        except (RuntimeError, MemoryError) as fault:  # nearly impossible: the gradients' own memory is free again
            words = ("out of memory", "allocate memory")  # an illegal memory access is something else
            if isinstance(fault, RuntimeError) and not any(word in str(fault) for word in words):
                raise
            raise HalfStepError(
                "out of memory while Seraena's discriminator was updated; use a smaller --train_batch_size, then "
                "--resume latest. See docs/troubleshooting.md#out-of-memory"
            ) from None
        self.steps += 1
        return loss

    def _gradients(self, images: Tensor, contexts: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The discriminator's loss and the gradients of its parameters; the batch norms have seen the images."""
        with torch.enable_grad():
            self.discriminator.train()
            try:
                scores = self.discriminator(images, contexts)
            finally:
                self.discriminator.eval()
            loss = (scores - labels.view(-1, 1, 1, 1)).square().mean()
            parameters = list(self.discriminator.parameters())
            gradients = torch.autograd.grad(loss, parameters)
        # In the layout of the parameters: AdamW then takes all of them in one pass.
        return loss.detach(), [torch.empty_like(p).copy_(g) for p, g in zip(parameters, gradients, strict=True)]

    def _draw_batch(
        self, real: Tensor, fake: Tensor, contexts: Tensor, plan: WritePlan
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Images, contexts and labels (1 fake, -1 real): each row is real or fake by a coin, half of the fakes old."""
        num_rows = len(fake)
        order = torch.randperm(num_rows, generator=self.generator)
        # Of an odd number the middle one comes from either side by a coin, so a batch of 1 works too.
        num_current = (num_rows + int(torch.randint(2, (1,), generator=self.generator))) // 2
        slots = torch.randint(plan.num_after, (num_rows - num_current,), generator=self.generator).tolist()
        is_fake = (torch.rand(num_rows, generator=self.generator) < 0.5).to(fake.device)
        fakes, fake_contexts = fake.clone(), contexts.clone()
        if slots:
            old_rows = order[num_current:].to(fake.device)
            fakes[old_rows], fake_contexts[old_rows] = self.buffer.read(slots, plan, fake, contexts)
        chosen = is_fake.view(-1, 1, 1, 1)
        images = torch.where(chosen, fakes, real)
        return images, torch.where(chosen, fake_contexts, contexts), torch.where(is_fake, 1.0, -1.0)

    def shared_state_dict(self) -> dict[str, Any]:
        return {
            "discriminator": self.discriminator.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "training_step": self._training_step,
            "learned": [None if loss is None else float(loss) for loss in self._learned],
        }

    def load_shared_state_dict(self, state: dict[str, Any]) -> None:
        """Take over discriminator, optimizer and step count; the learning rate stays the one of this run."""
        try:
            self.discriminator.load_state_dict(state["discriminator"])
        except RuntimeError:
            raise UserError(
                "the checkpoint's Seraena discriminator has another shape; resume with the variant and the "
                "n_seraena_frames that it was trained with."
            ) from None
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:
            group["lr"] = self.optimizer.defaults["lr"]
        self.steps = int(state["steps"])
        self._training_step = state.get("training_step")  # older checkpoints are never of the middle of a step
        device = next(self.discriminator.parameters()).device
        losses = state.get("learned", [])
        self._learned = [None if loss is None else torch.tensor(loss, device=device) for loss in losses]

    def rank_state_dict(self) -> dict[str, Any]:
        """What this rank has of its own: random numbers and replay buffer (copies, on the CPU)."""
        copies = [tuple(value.to("cpu", copy=True) for value in of_size) for of_size in self.buffer.items()]
        return {"generator": self.generator.get_state(), "buffers": copies}

    def load_rank_state_dicts(self, states: Sequence[dict[str, Any]], *, num_ranks_saved: int, num_ranks: int) -> None:
        """Take over the states of the saved ranks that `saved_ranks_for` names, after `load_shared_state_dict`. With
        another number of ranks the buffers are merged or split, and the random numbers start again."""
        assert len(states) == len(saved_ranks_for(self.rank, num_ranks_saved, num_ranks)), f"{len(states)} states"
        if num_ranks_saved == num_ranks:
            self.generator.set_state(states[0]["generator"])
        else:
            self.generator = rank_generator(self.seed, self.rank, self.steps)
        # Ranks that share one saved buffer take every k-th item of it, each from another place.
        sharers = len(range(self.rank % num_ranks_saved, num_ranks, num_ranks_saved))
        mine = slice(self.rank // num_ranks_saved, None, sharers)
        by_size: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
        for state in states:
            # Older checkpoints have one size: a pair, or None.
            for images, contexts in state["buffers"] if "buffers" in state else filter(None, [state["buffer"]]):
                by_size.setdefault(images.shape[1:], []).append((images[mine], contexts[mine]))
        for buffers in by_size.values():
            self.buffer.replace(*map(torch.cat, zip(*buffers, strict=True)))


def group_frames_of(frames_NTCHW: Tensor, *, padded_frames: int, group_frames: int) -> Tensor:
    """Groups [N·G, k·C, H, W] of a decoded clip; ``padded_frames`` is `VariantSpec.padded_frames` of its length."""
    num_frames = frames_NTCHW.shape[1]
    assert 1 <= num_frames <= padded_frames, f"{num_frames} decoded frames of a padded length {padded_frames}"
    assert padded_frames % group_frames == 0, f"{group_frames} does not divide {padded_frames}"
    if num_frames < padded_frames:  # repeat the clip as often as it takes (taeh3: 5 decoded, 12 padded)
        frames_NTCHW = frames_NTCHW[:, torch.arange(padded_frames, device=frames_NTCHW.device) % num_frames]
    return frames_NTCHW.unflatten(1, (-1, group_frames)).flatten(2, 3).flatten(0, 1)


def ungroup_frames(groups_NCHW: Tensor, *, num_frames: int, padded_frames: int, group_frames: int) -> Tensor:
    """The clip [N, num_frames, C, H, W] that `group_frames_of` made these groups from."""
    grouped = groups_NCHW.unflatten(0, (-1, padded_frames // group_frames)).unflatten(2, (group_frames, -1))
    return grouped.flatten(1, 2)[:, :num_frames]


def group_contexts_of(latents_NTCHW: Tensor, *, num_groups: int) -> Tensor:
    """Contexts [N·G, C, h, w]: the mean over *time* of each clip's latents, once for every group of the clip."""
    return latents_NTCHW.mean(dim=1).repeat_interleave(num_groups, dim=0)


def saved_ranks_for(rank: int, num_ranks_saved: int, num_ranks: int) -> list[int]:
    """Which saved ranks' states rank ``rank`` of ``num_ranks`` has to read."""
    if num_ranks_saved <= num_ranks:
        return [rank % num_ranks_saved]
    return list(range(rank, num_ranks_saved, num_ranks))


def rank_generator(seed: int, rank: int, steps: int) -> torch.Generator:
    """Random numbers of one rank: another stream for every seed, rank and starting step."""
    # Multipliers far apart keep (seed 1, rank 0) from meeting (seed 0, rank 1).
    return torch.Generator().manual_seed((seed * 1_000_003 + rank * 7_919 + steps * 104_729) % 2**63)


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Whether every value is finite: one boolean on the tensors' device, without waiting for it."""
    return torch.stack([torch.isfinite(values).all() for values in tensors]).all()
