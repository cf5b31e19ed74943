"""The replay buffer: its bound, random replacement, and plans that leave no trace."""

from __future__ import annotations

import pytest
import torch

from tinyvae.errors import UserError
from tinyvae.losses.seraena.replay_buffer import ReplayBuffer


def items(values: list[float], size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    column = torch.tensor(values).view(-1, 1, 1, 1)
    return column.expand(-1, 3, size, size).clone(), (-column).expand(-1, 4, 2, 2).clone()


def put(buffer: ReplayBuffer, values: list[float], generator: torch.Generator, size: int = 16) -> None:
    images, contexts = items(values, size)
    buffer.commit(buffer.plan(images, contexts, generator), images, contexts)


ITEM_BYTES = (3 * 16 * 16 + 4 * 2 * 2) * 2


def buffer_of(capacity: int) -> ReplayBuffer:
    return ReplayBuffer(max_mb=(capacity * ITEM_BYTES + 1) / 2**20, device="cpu")


def test_the_bound_in_megabytes_holds() -> None:
    buffer = ReplayBuffer(max_mb=0.1, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for step in range(60):
        put(buffer, [float(step), step + 0.5], generator)
    (stored,) = buffer.items()
    assert sum(value.untyped_storage().nbytes() for value in stored) <= 0.1 * 2**20
    assert len(buffer) == int(0.1 * 2**20) // ITEM_BYTES


def test_free_slots_first_then_each_item_replaces_a_random_one() -> None:
    buffer = buffer_of(4)
    generator = torch.Generator().manual_seed(0)
    put(buffer, [0.0, 1.0, 2.0], generator)
    assert buffer.items()[0][0][:, 0, 0, 0].tolist() == [0, 1, 2]
    put(buffer, [3.0], generator)
    for value in range(4, 40):
        before = buffer.items()[0][0][:, 0, 0, 0].tolist()
        put(buffer, [float(value)], generator)
        after = buffer.items()[0][0][:, 0, 0, 0].tolist()
        assert sum(a != b for a, b in zip(before, after, strict=True)) == 1 and value in after
    images, contexts = buffer.items()[0]
    assert torch.equal(images[:, 0, 0, 0], -contexts[:, 0, 0, 0]), "an item lost its own context"


def test_a_batch_larger_than_the_buffer() -> None:
    buffer = buffer_of(2)
    put(buffer, [1.0, 2.0, 3.0, 4.0, 5.0], torch.Generator().manual_seed(3))
    assert len(buffer) == 2


def test_a_plan_reads_as_if_written_and_leaves_no_trace() -> None:
    buffer = buffer_of(4)
    generator = torch.Generator().manual_seed(0)
    put(buffer, [0.0, 1.0, 2.0, 3.0], generator)
    before = [value.clone() for value in buffer.items()[0]]
    images, contexts = items([7.0, 8.0])
    plan = buffer.plan(images, contexts, generator)
    read, read_contexts = buffer.read([0, 1, 2, 3], plan, images, contexts)
    assert all(torch.equal(a, b) for a, b in zip(before, buffer.items()[0], strict=True))
    buffer.commit(plan, images, contexts)
    assert torch.equal(buffer.items()[0][0].float(), read)
    assert torch.equal(buffer.items()[0][1].float(), read_contexts)
    assert read.dtype == torch.float32


def test_a_new_frame_size_starts_a_new_buffer() -> None:
    buffer = buffer_of(4)
    generator = torch.Generator().manual_seed(0)
    put(buffer, [1.0, 2.0], generator)
    put(buffer, [3.0], generator, size=8)
    assert [images.shape for images, _ in buffer.items()] == [(1, 3, 8, 8)]


def test_sizes_share_the_bound_and_the_one_that_was_written_longest_ago_goes() -> None:
    buffer = ReplayBuffer(max_mb=(8 * ITEM_BYTES + 2) / 2**20, device="cpu", num_sizes=2)
    generator = torch.Generator().manual_seed(0)
    put(buffer, [1.0, 2.0, 3.0, 4.0, 5.0], generator)
    put(buffer, [6.0], generator, size=8)
    assert [len(images) for images, _ in buffer.items()] == [4, 1], "four of eight items fit into half"
    put(buffer, [7.0], generator)
    assert 7.0 in buffer.items()[1][0][:, 0, 0, 0], "items of a size replace their own"
    put(buffer, [8.0], generator, size=4)
    assert [images.shape[1:] for images, _ in buffer.items()] == [(3, 16, 16), (3, 4, 4)]
    copy = ReplayBuffer(max_mb=buffer.max_mb, device="cpu", num_sizes=2)
    for images, contexts in buffer.items():
        copy.replace(images, contexts)
    for ours, theirs in zip(copy.items(), buffer.items(), strict=True):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    with pytest.raises(UserError, match="a part for each of 2 sizes, does not hold one group"):
        buffer.capacity(torch.Size((3, 48, 48)), torch.Size((4, 2, 2)))


def test_values_beyond_fp16_saturate() -> None:
    buffer = buffer_of(1)
    put(buffer, [1e6], torch.Generator())
    assert buffer.items()[0][0].isfinite().all()


@pytest.mark.parametrize("max_mb", [0, -1, float("nan"), 1e-4])
def test_a_bound_that_holds_nothing_is_refused(max_mb: float) -> None:
    with pytest.raises(UserError, match="MB"):
        put(ReplayBuffer(max_mb=max_mb, device="cpu"), [1.0], torch.Generator())
