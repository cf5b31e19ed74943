"""Seraena on two real processes: the same exchange that a distributed run uses, over gloo."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from tinyvae.losses.seraena import Seraena
from tinyvae.models.variants import get_spec


def average_over_ranks(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


def train_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.set_num_threads(1)
    seraena = Seraena(get_spec("taehv"), 5, 8, buffer_mb=1, seed=1, rank=rank)
    generator = torch.Generator().manual_seed(rank)
    finite = []
    for step in range(4):
        real, fake = (torch.rand((1 + rank, 5, 3, 16, 16), generator=generator) for _ in range(2))  # batch 1, batch 2
        if (rank, step) == (1, 2):
            fake[0, 0, 0, 0, 0] = float("nan")
        latents = torch.randn((1 + rank, 2, 16, 2, 2), generator=generator)
        finite.append(seraena.step(real, fake, latents, average=average_over_ranks).finite)
    torch.save((finite, seraena.shared_state_dict()), f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_keep_one_discriminator_and_skip_together() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train_rank, args=(folder,), nprocs=2)
        (finite, first), (finite_too, second) = (torch.load(Path(folder) / f"rank{rank}.pt") for rank in range(2))
    assert finite == finite_too == [True, True, False, True]
    assert first["steps"] == second["steps"] == 3
    for name, value in first["discriminator"].items():
        assert torch.equal(value, second["discriminator"][name]), name
    for index, moments in first["optimizer"]["state"].items():
        for name, value in moments.items():
            assert torch.equal(value, second["optimizer"]["state"][index][name])
