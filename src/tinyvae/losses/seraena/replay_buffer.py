"""Past fakes with their contexts, bounded in megabytes: the discriminator must not forget faults that were fixed.

Items of one picture size lie together, because a batch has one size. Runs with several sizes share the bound equally.
A write has two halves. `plan` chooses the slots, `commit` fills them; between the two, `read` answers as if the items
were there. So a step that is not finite, or that runs out of memory, leaves no trace. Items are stored in fp16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinyvae.errors import UserError

STORED_DTYPE = torch.float16
BYTES_PER_MB = 2**20

Storage = tuple[Tensor, Tensor]  # images [capacity, C, H, W] and contexts [capacity, c, h, w]
Shapes = tuple[torch.Size, torch.Size]  # of one image and of one context


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """Where each new item goes. ``source_of``: slot -> number of the new item that will lie there."""

    storage: Storage
    source_of: dict[int, int]
    num_after: int


class ReplayBuffer:
    """At most ``max_mb`` megabytes of items; when it is full, each new item replaces a random one of its size.

    It holds items of at most ``num_sizes`` sizes. When another size comes, the one that was written longest ago goes.
    """

    def __init__(self, *, max_mb: float, device: torch.device | str, num_sizes: int = 1) -> None:
        self.max_mb, self.num_sizes = max_mb, num_sizes
        self.device = torch.device(device)
        self._held: dict[Shapes, tuple[Storage, int]] = {}  # storage and number of items; the last written at the end

    def __len__(self) -> int:
        return sum(num_items for _, num_items in self._held.values())

    def capacity(self, image_shape: Sequence[int], context_shape: Sequence[int]) -> int:
        """How many items of these shapes fit; an error where not even one does."""
        item_bytes = (math.prod(image_shape) + math.prod(context_shape)) * STORED_DTYPE.itemsize
        max_bytes = self.max_mb * BYTES_PER_MB / self.num_sizes
        if not max_bytes >= item_bytes:
            of_each = f", a part for each of {self.num_sizes} sizes," if self.num_sizes > 1 else ""
            raise UserError(
                f"the replay buffer of {self.max_mb} MB{of_each} does not hold one group of frames "
                f"({item_bytes / BYTES_PER_MB:.2f} MB); set seraena_buffer_mb to ten times that or more."
            )
        return int(max_bytes) // item_bytes

    def plan(self, images_NCHW: Tensor, contexts_NCHW: Tensor, generator: torch.Generator) -> WritePlan:
        """Choose a slot for every new item: free slots first, then random ones. Changes only the generator."""
        shapes = (images_NCHW.shape[1:], contexts_NCHW.shape[1:])
        storage, num_items = self._held.get(shapes) or (self._allocate(*shapes), 0)
        capacity = len(storage[0])
        num_free = min(capacity - num_items, len(images_NCHW))
        slots = list(range(num_items, num_items + num_free))
        slots += torch.randint(capacity, (len(images_NCHW) - num_free,), generator=generator).tolist()
        # Two items can draw one slot: the later one stays there, as if they had come one after the other.
        source_of = {slot: item for item, slot in enumerate(slots)}
        return WritePlan(storage=storage, source_of=source_of, num_after=num_items + num_free)

    def read(
        self, slots: list[int], plan: WritePlan, images_NCHW: Tensor, contexts_NCHW: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Items at these slots as they will be after `commit`, in fp32 on the device of the new images."""
        fresh = [row for row, slot in enumerate(slots) if slot in plan.source_of]
        columns = []
        for old, new in zip(plan.storage, (images_NCHW, contexts_NCHW), strict=True):
            rows = old[slots].to(new.device).float()
            if fresh:
                rows[fresh] = stored(new[[plan.source_of[slots[row]] for row in fresh]]).float()
            columns.append(rows)
        return columns[0], columns[1]

    def commit(self, plan: WritePlan, images_NCHW: Tensor, contexts_NCHW: Tensor) -> None:
        slots, items = list(plan.source_of), list(plan.source_of.values())
        for old, new in zip(plan.storage, (images_NCHW, contexts_NCHW), strict=True):
            old[slots] = stored(new[items]).to(self.device)
        self._hold(plan.storage, plan.num_after)

    def items(self) -> list[tuple[Tensor, Tensor]]:
        """Images and contexts of each size in the order of their slots (views, fp16); the last written size at the
        end."""
        return [
            (images[:num_items], contexts[:num_items])
            for (images, contexts), num_items in self._held.values()
            if num_items > 0
        ]

    def replace(self, images_NCHW: Tensor, contexts_NCHW: Tensor) -> None:
        """Hold exactly these items of their size; where more are given than fit, the last ones stay."""
        storage = self._allocate(images_NCHW.shape[1:], contexts_NCHW.shape[1:])
        num_items = min(len(storage[0]), len(images_NCHW))
        for old, new in zip(storage, (images_NCHW, contexts_NCHW), strict=True):
            old[:num_items] = stored(new[len(new) - num_items :]).to(self.device)
        self._hold(storage, num_items)

    def _hold(self, storage: Storage, num_items: int) -> None:
        shapes = (storage[0].shape[1:], storage[1].shape[1:])
        self._held.pop(shapes, None)  # to the end
        self._held[shapes] = (storage, num_items)
        for oldest in list(self._held)[: -self.num_sizes]:
            del self._held[oldest]

    def _allocate(self, *shapes: torch.Size) -> Storage:
        size = self.capacity(*shapes)
        images, contexts = (torch.empty((size, *shape), dtype=STORED_DTYPE, device=self.device) for shape in shapes)
        return images, contexts


def stored(values: Tensor) -> Tensor:
    """Values as the buffer keeps them. Those of a diverging model can leave fp16's range: they saturate."""
    limit = torch.finfo(STORED_DTYPE).max
    return values.detach().clamp(-limit, limit).to(STORED_DTYPE)
