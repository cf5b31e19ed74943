"""Past fakes with their contexts, bounded in megabytes: the discriminator must not forget faults that were mended.

Writing is split in two, so that a step that turns out not to be finite leaves no trace: `plan` says where the new
items will go, `read` answers as if they were there, `commit` puts them there. And a training step that runs out of
memory half-way is computed again: `go_back` undoes every `commit` since `remember`. Items rest in fp16 (half the
memory and half the checkpoint; its step near 1.0 is 0.0005, an eighth of a grey level), on the CPU or on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tinyvae.errors import UserError

STORED_DTYPE = torch.float16
BYTES_PER_MB = 2**20


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """Where each new item goes. ``source_of``: slot -> number of the new item that will rest there."""

    source_of: dict[int, int]
    num_after: int
    capacity: int


class ReplayBuffer:
    """At most ``max_mb`` megabytes of items; when full, each new item replaces a random one."""

    def __init__(self, *, max_mb: float, device: torch.device | str) -> None:
        if not max_mb > 0:
            raise UserError(f"the replay buffer needs a size above 0 MB, got {max_mb}; 512 is a good start.")
        self.max_mb = max_mb
        self.device = torch.device(device)
        self._images: Tensor | None = None  # [capacity, C, H, W]
        self._contexts: Tensor | None = None  # [capacity, c, h, w]
        self._num_items = 0
        self._undo: list[Callable[[], None]] | None = None  # newest last; None: nobody will ask

    def __len__(self) -> int:
        return self._num_items

    def capacity(self, image_shape: torch.Size, context_shape: torch.Size) -> int:
        """How many items of these shapes fit; an error where not even one does."""
        item_bytes = (image_shape.numel() + context_shape.numel()) * STORED_DTYPE.itemsize
        capacity = int(self.max_mb * BYTES_PER_MB) // item_bytes
        if capacity < 1:
            raise UserError(
                f"the replay buffer of {self.max_mb} MB does not hold one group of frames "
                f"({item_bytes / BYTES_PER_MB:.2f} MB); set seraena_buffer_mb to ten times that or more."
            )
        return capacity

    def plan(self, images_NCHW: Tensor, contexts_NCHW: Tensor, generator: torch.Generator) -> WritePlan:
        """Choose a slot for every new item: free slots first, then random ones. Changes nothing but the generator."""
        capacity = self.capacity(images_NCHW.shape[1:], contexts_NCHW.shape[1:])
        num_items = self._num_items if self._fits(images_NCHW, contexts_NCHW) else 0
        num_free = min(capacity - num_items, len(images_NCHW))
        slots = list(range(num_items, num_items + num_free))
        slots += torch.randint(capacity, (len(images_NCHW) - num_free,), generator=generator).tolist()
        # Two items may draw one slot: the later one rests there, as if they had come one after the other.
        return WritePlan(
            source_of={slot: item for item, slot in enumerate(slots)},
            num_after=num_items + num_free,
            capacity=capacity,
        )

    def read(
        self, slots: list[int], plan: WritePlan, images_NCHW: Tensor, contexts_NCHW: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Items at these slots as they will be after `commit`, in fp32 on the device of the new images."""
        images, contexts = [], []
        for slot in slots:
            assert 0 <= slot < plan.num_after, f"slot {slot} of {plan.num_after}"
            if slot in plan.source_of:
                item = plan.source_of[slot]
                image, context = stored(images_NCHW[item]), stored(contexts_NCHW[item])
            else:
                assert self._images is not None and self._contexts is not None
                image, context = self._images[slot], self._contexts[slot]
            images.append(image.to(images_NCHW.device).float())
            contexts.append(context.to(contexts_NCHW.device).float())
        return torch.stack(images), torch.stack(contexts)

    def commit(self, plan: WritePlan, images_NCHW: Tensor, contexts_NCHW: Tensor) -> None:
        """Put the new items where the plan says."""
        if self._images is None or not self._fits(images_NCHW, contexts_NCHW):
            # A clip size that changed in mid-run: items of the old size cannot share a batch with the new.
            self._note_undo(None)
            self._allocate(plan.capacity, images_NCHW.shape[1:], contexts_NCHW.shape[1:])
        assert self._images is not None and self._contexts is not None
        slots = torch.tensor(list(plan.source_of), device=self.device)
        items = torch.tensor(list(plan.source_of.values()), device=images_NCHW.device)
        self._note_undo(slots)
        self._images[slots] = stored(images_NCHW[items]).to(self.device)
        self._contexts[slots] = stored(contexts_NCHW[items]).to(self.device)
        self._num_items = plan.num_after

    def remember(self) -> None:
        """From here on `go_back` can undo what `commit` does; what was remembered before is forgotten."""
        self._undo = []

    def go_back(self) -> None:
        """Undo every `commit` since `remember`."""
        assert self._undo is not None, "go_back without remember"
        while self._undo:
            self._undo.pop()()

    def _note_undo(self, slots: Tensor | None) -> None:
        """Keep what the next write destroys: the items in ``slots``, or all of it (None: it will be replaced)."""
        if self._undo is None:
            return
        images, contexts, num_items = self._images, self._contexts, self._num_items
        if slots is not None:
            assert images is not None and contexts is not None
            slots = slots[slots < num_items]  # what lies in a free slot is nothing
            old_images, old_contexts = images[slots], contexts[slots]

        def undo() -> None:
            self._images, self._contexts, self._num_items = images, contexts, num_items
            if slots is not None:
                assert images is not None and contexts is not None
                images[slots], contexts[slots] = old_images, old_contexts

        self._undo.append(undo)

    def items(self) -> tuple[Tensor, Tensor] | None:
        """All images and contexts in the order of their slots (views, fp16), or None while empty."""
        if self._images is None or self._contexts is None or self._num_items == 0:
            return None
        return self._images[: self._num_items], self._contexts[: self._num_items]

    def replace(self, images_NCHW: Tensor, contexts_NCHW: Tensor) -> None:
        """Hold exactly these items; where more are given than fit, the last ones stay."""
        self._images = self._contexts = None
        self._num_items = 0
        if len(images_NCHW) == 0:
            return
        capacity = self.capacity(images_NCHW.shape[1:], contexts_NCHW.shape[1:])
        images, contexts = images_NCHW[-capacity:], contexts_NCHW[-capacity:]
        self._allocate(capacity, images.shape[1:], contexts.shape[1:])
        assert self._images is not None and self._contexts is not None
        self._images[: len(images)] = stored(images).to(self.device)
        self._contexts[: len(images)] = stored(contexts).to(self.device)
        self._num_items = len(images)

    def _fits(self, images_NCHW: Tensor, contexts_NCHW: Tensor) -> bool:
        if self._images is None or self._contexts is None:
            return False
        return self._images.shape[1:] == images_NCHW.shape[1:] and self._contexts.shape[1:] == contexts_NCHW.shape[1:]

    def _allocate(self, capacity: int, image_shape: torch.Size, context_shape: torch.Size) -> None:
        self._images = torch.empty((capacity, *image_shape), dtype=STORED_DTYPE, device=self.device)
        self._contexts = torch.empty((capacity, *context_shape), dtype=STORED_DTYPE, device=self.device)
        self._num_items = 0


def stored(values: Tensor) -> Tensor:
    """Values as the buffer keeps them. A diverging model can leave fp16's range: it saturates, never becomes inf."""
    limit = torch.finfo(STORED_DTYPE).max
    return values.detach().clamp(-limit, limit).to(STORED_DTYPE)
