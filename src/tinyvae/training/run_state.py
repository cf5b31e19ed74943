"""Everything that a checkpoint must hold for the run to go on bit by bit, collected and put back.

Shared by all ranks: weights, their average, optimiser, loss scale, discriminator, progress. Each rank's own: the
random states and Seraena's replay buffer. Data order needs no state: it is a function of ``progress.samples_seen``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tinyvae.errors import UserError
from tinyvae.losses.seraena import Seraena, saved_ranks_for
from tinyvae.losses.seraena_start import SeraenaStart
from tinyvae.models.taehv import TAEHV
from tinyvae.models.weights import plain_state
from tinyvae.training.ema import WeightAverage
from tinyvae.training.engine import Engine
from tinyvae.training.progress import LoopState, Progress
from tinyvae.training.resume import SavedRun

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The objects whose state a checkpoint holds. ``optimizer``: its kind, by the configuration's name."""

    model: TAEHV
    engine: Engine
    optimizer: str
    average: WeightAverage | None
    seraena: Seraena | None

    def shared(self, loop: LoopState) -> dict[str, Any]:
        """What all ranks share; called on the main process."""
        return {
            "progress": loop.progress.to_dict(),
            "model": plain_state(self.model),
            "average": None if self.average is None else self.average.state_dict(),
            "engine": self.engine.state_dict(),
            "seraena": None if self.seraena is None else self.seraena.shared_state_dict(),
            "seraena_start": None if loop.seraena_start is None else loop.seraena_start.state_dict(),
        }

    def of_rank(self, loop: LoopState) -> dict[str, Any]:
        """What this rank has of its own."""
        on_gpu = self.engine.device.type == "cuda"
        return {
            "cpu_random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state(self.engine.device) if on_gpu else None,
            "seraena": None if self.seraena is None else self.seraena.rank_state_dict(),
            "step_log": loop.step_log,
        }

    def restore(self, saved: SavedRun, seraena_start: SeraenaStart | None) -> LoopState:
        """Take a checkpoint's state over; where the run stood. ``seraena_start``: the rule of this configuration."""
        shared = saved.shared
        self._restore_model(saved)
        self._restore_engine(saved)
        if self.average is not None:
            if shared["average"] is None:
                raise UserError(
                    f"{saved.folder} was written without averaged weights; set ema_decay to 0 to go on from it."
                )
            self.average.load_state_dict(shared["average"])
        if seraena_start is not None and shared["seraena_start"] is not None:
            seraena_start = seraena_start.with_past_of(SeraenaStart.from_state_dict(shared["seraena_start"]))
        self._restore_seraena(saved)
        step_log = self._restore_own(saved)
        return LoopState(progress=Progress(**shared["progress"]), seraena_start=seraena_start, step_log=step_log)

    def _restore_model(self, saved: SavedRun) -> None:
        wanted = {name: tuple(value.shape) for name, value in self.model.state_dict().items()}
        found = {name: tuple(value.shape) for name, value in saved.shared["model"].items()}
        if wanted != found:
            raise UserError(
                f"the weights in {saved.folder} are those of another network, so there is nothing to go on from; "
                "give variant and model_width as they were, or start a new run with --pretrained_model_path."
            )
        self.model.load_state_dict(saved.shared["model"])
        self.engine.weights_were_loaded()

    def _restore_engine(self, saved: SavedRun) -> None:
        was = saved.manifest["config"].get("optimizer")
        if was == self.optimizer:
            self.engine.load_state_dict(saved.shared["engine"])
        elif self.engine.is_main:
            log.warning("the checkpoint was written with %s: the moments of %s start anew", was, self.optimizer)

    def _restore_seraena(self, saved: SavedRun) -> None:
        if self.seraena is None or saved.shared["seraena"] is None:
            return
        self.seraena.load_shared_state_dict(saved.shared["seraena"])
        ranks = saved_ranks_for(self.engine.rank, saved.world_size, self.engine.world_size)
        states: list[Mapping[str, Any]] = [saved.rank_state(rank)["seraena"] for rank in ranks]
        self.seraena.load_rank_state_dicts(
            [dict(state) for state in states], num_ranks_saved=saved.world_size, num_ranks=self.engine.world_size
        )

    def _restore_own(self, saved: SavedRun) -> dict[str, Any] | None:
        """Take over the random states; this rank's unfinished log line."""
        if saved.world_size != self.engine.world_size:
            if self.engine.is_main:
                log.warning(
                    "the checkpoint was written with %d process(es) and the run goes on with %d: weights, optimiser, "
                    "schedule, data position and scores carry over; torch's random states, Seraena's draws and the "
                    "averages of the next log line start anew",
                    saved.world_size,
                    self.engine.world_size,
                )
            return None
        own = saved.rank_state(self.engine.rank)
        torch.set_rng_state(own["cpu_random"])
        if own["cuda_random"] is not None and self.engine.device.type == "cuda":
            torch.cuda.set_rng_state(own["cuda_random"], self.engine.device)
        return own["step_log"]
