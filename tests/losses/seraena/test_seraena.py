"""Seraena's step: any batch, exact repetition and resume, equal ranks, and no trace of a step that is not finite."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.processes import HANGS_S
from tests.training.tiny_runs import differences
from tinyvae.errors import UserError
from tinyvae.losses.seraena import HalfStepError, Seraena, SeraenaResult, discriminator, saved_ranks_for, seraena_loss
from tinyvae.models.variants import get_spec

SPEC = get_spec("taehv")
N_FRAMES = 8  # two latents, five decoded frames, padded to eight


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrow discriminator. That of the released width has its own tests, with golden values."""
    monkeypatch.setattr(discriminator, "WIDTHS", (2, 3, 4, 4, 4, 4))


def make_seraena(*, group_frames: int = 4, rank: int = 0, buffer_mb: float = 0.05, **options: Any) -> Seraena:
    return Seraena(SPEC, N_FRAMES, group_frames, buffer_mb=buffer_mb, seed=3, rank=rank, **options)


def clips(batch: int, seed: int, pixels: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, SPEC.aligned_frames(N_FRAMES), 3, pixels, pixels)
    latents = torch.randn((batch, SPEC.latents(N_FRAMES), 16, pixels // 8, pixels // 8), generator=generator)
    return torch.rand(shape, generator=generator), torch.rand(shape, generator=generator), latents


def all_state(seraena: Seraena) -> dict[str, Any]:
    """A copy of the whole state at the start of a training step, through a file."""
    written = io.BytesIO()
    shared = seraena.shared_state_dict() | {"training_step": None, "learned": []}
    torch.save({"shared": shared, "rank": seraena.rank_state_dict()}, written)
    return torch.load(io.BytesIO(written.getvalue()), weights_only=True)


def load_all(seraena: Seraena, state: dict[str, Any]) -> None:
    seraena.load_shared_state_dict(copy.deepcopy(state["shared"]))  # the optimizer works in the tensors it is given
    seraena.load_rank_state_dicts([state["rank"]], num_ranks_saved=1, num_ranks=1)


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("group_frames", [1, 8])
def test_any_batch_size(batch: int, group_frames: int) -> None:
    seraena = make_seraena(group_frames=group_frames)
    real, fake, latents = clips(batch, seed=batch)
    for _ in range(2):
        result = seraena.step(real, fake, latents)
    assert result.finite
    assert result.target_NTCHW.shape == fake.shape and not torch.equal(result.target_NTCHW, fake)
    assert all(value.isfinite().all() and value.ndim == 0 for value in result.scalars.values())


def test_the_student_gets_the_gradient_of_mse_toward_fake_plus_correction() -> None:
    real, fake, latents = clips(1, seed=0)
    fake.requires_grad_(True)
    latents.requires_grad_(True)
    result = make_seraena().step(real, fake, latents)
    assert fake.grad is None and latents.grad is None and not result.target_NTCHW.requires_grad
    seraena_loss(fake, result.target_NTCHW).backward()
    correction = result.target_NTCHW - fake.detach()
    torch.testing.assert_close(fake.grad, -2 * correction / fake.numel())


def test_the_same_under_autocast_no_grad_and_another_global_seed() -> None:
    real, fake, latents = clips(2, seed=1)
    plain = make_seraena()
    first = plain.step(real, fake, latents)
    torch.manual_seed(77)
    stream = torch.random.get_rng_state()
    other = make_seraena()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        second = other.step(real, fake, latents)
    assert torch.equal(first.target_NTCHW, second.target_NTCHW)
    assert differences(all_state(plain), all_state(other)) == []
    assert torch.equal(torch.random.get_rng_state(), stream), "Seraena drew from torch's own stream"


def test_a_resumed_run_goes_on_bit_by_bit() -> None:
    whole = make_seraena()
    for step in range(4):
        whole.step(*clips(3, seed=step))
    state = all_state(whole)
    resumed = make_seraena()
    load_all(resumed, state)
    for step in range(4, 6):
        expected, found = (seraena.step(*clips(3, seed=step)) for seraena in (whole, resumed))
        assert torch.equal(expected.target_NTCHW, found.target_NTCHW)
    assert differences(all_state(whole), all_state(resumed)) == []
    assert len(whole.buffer) == whole.buffer.capacity(torch.Size((12, 16, 16)), torch.Size((16, 2, 2))), "not yet full"


@pytest.mark.parametrize(
    ("where", "value"), [("real", float("nan")), ("fake", float("inf")), ("fake", 1e30), ("latents", float("nan"))]
)
def test_a_step_that_is_not_finite_leaves_no_trace(where: str, value: float) -> None:
    seraena = make_seraena()
    seraena.step(*clips(2, seed=0))
    before = all_state(seraena)
    inputs = dict(zip(("real", "fake", "latents"), clips(2, seed=1), strict=True))
    inputs[where][:] = value  # 1e30 is finite itself; its square in the batch norm is not
    result = seraena.step(*inputs.values())
    assert not result.finite
    assert differences(all_state(seraena), before) == []
    assert seraena.step(*clips(2, seed=2)).finite


def test_one_bad_value_that_is_not_drawn_is_found_too() -> None:
    for seed in range(6):  # among these the coins leave the bad row out of the batch
        seraena = Seraena(SPEC, N_FRAMES, 8, buffer_mb=0.1, seed=seed)
        real, fake, latents = clips(2, seed=0)
        fake[1, 0, 0, 0, 0] = float("nan")
        assert not seraena.step(real, fake, latents).finite
        assert len(seraena.buffer) == 0


def test_half_of_the_fakes_are_past_ones_each_with_its_own_context() -> None:
    seraena = make_seraena(group_frames=8, buffer_mb=1)
    old, new = (torch.full((9, 24, 16, 16), value) for value in (0.25, 0.5))
    contexts_old, contexts_new = (torch.full((9, 16, 2, 2), -value) for value in (0.25, 0.5))
    seraena.buffer.commit(seraena.buffer.plan(old, contexts_old, seraena.generator), old, contexts_old)
    real = torch.zeros_like(new)
    counts = {"real": 0, "now": 0, "past": 0}
    for _ in range(60):
        # The plan of an empty write: what is drawn from the buffer is always an old one.
        plan = seraena.buffer.plan(new[:0], contexts_new[:0], seraena.generator)
        images, contexts, labels = seraena._draw_batch(real, new, contexts_new, plan)
        for image, context, label in zip(images[:, 0, 0, 0], contexts[:, 0, 0, 0], labels, strict=True):
            kind = {0.0: "real", 0.5: "now", 0.25: "past"}[float(image)]
            counts[kind] += 1
            assert float(context) == (-0.25 if kind == "past" else -0.5)
            assert float(label) == (-1 if kind == "real" else 1)
    assert 225 < counts["real"] < 315  # of 540: a fair coin, within four deviations
    assert 90 < counts["now"] < 180 and 90 < counts["past"] < 180


def test_the_discriminator_learns_and_its_correction_fixes_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discriminator, "WIDTHS", (32, 64, 128, 128, 128, 128))
    seraena = make_seraena(group_frames=1, buffer_mb=1, learning_rate=3e-3)
    for step in range(28):
        real, _, latents = clips(1, seed=step)
        fake = 0.5 + 0.2 * (real - 0.5)  # the fault: a fifth of the contrast
        result = seraena.step(real, fake, 0 * latents)
    assert result.scalars["discriminator_loss"] < 0.9  # 1 is what a score of 0 everywhere costs
    assert result.scalars["fake_score"] > result.scalars["real_score"] + 0.3
    asked = (result.target_NTCHW - fake).flatten()
    assert torch.corrcoef(torch.stack([asked, (real - 0.5).flatten()]))[0, 1] > 0.6, "it asks for more contrast"
    assert 0.9 < result.scalars["correction_std"] < 1.1


# out of memory


class FailingOp(TorchDispatchMode):
    """Memory runs out in operation number ``at`` (from 0); counts them all."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.at == self.count - 1:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("every", [40, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("steps_before", [0, 3], ids=["empty buffer", "full buffer"])
def test_out_of_memory_in_any_operation_and_the_step_computed_again(steps_before: int, every: int) -> None:
    """The second attempt gives what an undisturbed step gives: targets, state and draws, bit by bit."""
    seraena = make_seraena(group_frames=8)
    for step in range(steps_before):
        seraena.step(*clips(3, seed=step))
    before, inputs = all_state(seraena), clips(3, seed=7)
    seraena.begin_step(10)
    with FailingOp() as operations:
        wanted = seraena.step(*inputs)
    after = all_state(seraena)
    half_steps = []
    for at in range(0, operations.count, every):
        again = make_seraena(group_frames=8)
        load_all(again, before)
        again.begin_step(10)
        try:
            with FailingOp(at):
                again.step(*inputs)
        except HalfStepError:
            half_steps.append(at)
            continue
        except torch.OutOfMemoryError:
            pass
        again.begin_step(10)
        result = again.step(*inputs)
        assert torch.equal(result.target_NTCHW, wanted.target_NTCHW), at
        assert differences([result.scalars, all_state(again)], [wanted.scalars, after]) == [], at
    assert operations.count > 200
    # Only the update itself cannot be repeated, and it says so: one stretch, after the exchange.
    assert half_steps == list(range(half_steps[0], half_steps[-1] + 1, every))
    assert half_steps[0] > 100 and half_steps[-1] < operations.count - 100


def test_another_fault_of_the_update_keeps_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    seraena = make_seraena()
    monkeypatch.setattr(seraena.optimizer, "step", fail)
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        seraena.step(*clips(2, seed=0))


def test_a_training_step_computed_again_teaches_no_clip_twice() -> None:
    """Memory runs out in the student after the second of three micro-batches; the next attempt may be a resumed run."""
    undisturbed, seraena = make_seraena(), make_seraena()
    undisturbed.begin_step(5)
    wanted = [undisturbed.step(*clips(2, seed=seed)) for seed in range(3)]
    seraena.begin_step(5)
    for seed in range(2):
        seraena.step(*clips(2, seed=seed))
    resumed = make_seraena()
    load_all(resumed, {**all_state(seraena), "shared": seraena.shared_state_dict()})
    for attempt in (seraena, resumed):
        attempt.begin_step(5)
        found = [attempt.step(*clips(2, seed=seed)) for seed in range(3)]
        assert attempt.steps == 3 and differences(all_state(attempt), all_state(undisturbed)) == []
        for made, expected in zip(found, wanted, strict=True):
            assert made.scalars["discriminator_loss"] == expected.scalars["discriminator_loss"]
        assert torch.equal(found[2].target_NTCHW, wanted[2].target_NTCHW)
        attempt.begin_step(6)
        attempt.step(*clips(2, seed=0))
        assert attempt.steps == 4, "the next training step teaches again"


def test_a_micro_batch_that_is_not_finite_stays_so_in_the_next_attempt() -> None:
    seraena = make_seraena()
    real, fake, latents = clips(2, seed=0)
    for _ in range(2):
        seraena.begin_step(0)
        assert not seraena.step(real, fake * torch.nan, latents).finite
        assert seraena.step(real, fake, latents).finite
        assert seraena.steps == 1


# several ranks


def run_ranks(
    count: int, make: Callable[[int], Seraena], inputs: Callable[[int, int], tuple], steps: int
) -> tuple[list[Seraena], list[SeraenaResult]]:
    """Ranks as threads that meet in a real exchange: each rank's tensors become the mean of all."""
    barrier = threading.Barrier(count)
    offered: list[list[Tensor]] = [[] for _ in range(count)]
    ranks = [make(rank) for rank in range(count)]
    results: list[Any] = [None] * count

    def work(rank: int) -> None:
        def average(tensors: list[Tensor]) -> None:
            offered[rank] = [tensor.clone() for tensor in tensors]
            barrier.wait(HANGS_S)
            for index, tensor in enumerate(tensors):
                tensor.copy_(torch.stack([theirs[index] for theirs in offered]).mean(dim=0))
            barrier.wait(HANGS_S)

        for step in range(steps):
            results[rank] = ranks[rank].step(*inputs(rank, step), average=average)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ranks, results


def test_all_ranks_have_one_discriminator() -> None:
    ranks, _ = run_ranks(2, lambda rank: make_seraena(rank=rank), lambda rank, step: clips(2, seed=10 * step + rank), 3)
    first, second = (rank.shared_state_dict() for rank in ranks)
    assert first["steps"] == 3 and differences(first, second) == []
    assert differences(ranks[0].rank_state_dict(), ranks[1].rank_state_dict()), "each rank has its own fakes and coins"


def test_a_bad_value_on_one_rank_stops_the_step_on_all() -> None:
    def inputs(rank: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
        real, fake, latents = clips(2, seed=10 * step + rank)
        return real, fake * (float("nan") if (rank, step) == (1, 2) else 1), latents

    def make(rank: int) -> Seraena:
        return make_seraena(rank=rank)

    ranks, results = run_ranks(2, make, inputs, 3)
    assert [result.finite for result in results] == [False, False]
    healthy, _ = run_ranks(2, make, inputs, 2)
    for rank, before in zip(ranks, healthy, strict=True):
        assert differences(all_state(rank), all_state(before)) == []


@pytest.mark.parametrize(("saved", "now"), [(1, 3), (4, 2), (3, 2), (2, 5), (2, 2)])
def test_another_number_of_ranks_deals_out_every_item_once(saved: int, now: int) -> None:
    states = []
    for rank in range(saved):
        seraena = make_seraena(rank=rank, buffer_mb=1)
        images = (100.0 * rank + torch.arange(7)).view(-1, 1, 1, 1).expand(-1, 12, 16, 16)
        seraena.buffer.replace(images, -images[:, :1, :2, :2].expand(-1, 16, -1, -1))
        states.append(all_state(seraena)["rank"])
    dealt = []
    for rank in range(now):
        seraena = make_seraena(rank=rank, buffer_mb=1)
        mine = [states[index] for index in saved_ranks_for(rank, saved, now)]
        seraena.load_rank_state_dicts(mine, num_ranks_saved=saved, num_ranks=now)
        dealt += seraena.buffer.items()[0][0][:, 0, 0, 0].tolist()
        if saved == now:
            assert torch.equal(seraena.generator.get_state(), states[rank]["generator"])
    assert sorted(dealt) == sorted(100.0 * rank + index for rank in range(saved) for index in range(7))


# mistakes


def test_a_checkpoint_of_another_group_size_is_refused() -> None:
    state = make_seraena(group_frames=4).shared_state_dict()
    with pytest.raises(UserError, match="n_seraena_frames"):
        make_seraena(group_frames=2).load_shared_state_dict(state)


def test_mistakes_at_start() -> None:
    with pytest.raises(UserError, match="1, 2, 4, 8"):
        make_seraena(group_frames=3)
    with pytest.raises(UserError, match="batch of one"):
        make_seraena(group_frames=8).check_batch(1, 8, 8)


def test_a_changed_learning_rate_is_kept_on_resume() -> None:
    changed = make_seraena(learning_rate=1e-5)
    changed.load_shared_state_dict(make_seraena().shared_state_dict())
    assert changed.optimizer.param_groups[0]["lr"] == 1e-5
