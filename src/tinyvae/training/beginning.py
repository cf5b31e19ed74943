"""A run's first moments: its past is taken over, then the folder becomes its own.

In this order, because a resume can be refused up to the last tensor of its past, and must leave no trace then.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from tinyvae.config import TrainConfig
from tinyvae.training.clips import RunData
from tinyvae.training.engine import Engine
from tinyvae.training.place import RunPlace, bring_past_along, cannot_write
from tinyvae.training.progress import LoopState, Progress
from tinyvae.training.resume import SavedRun
from tinyvae.training.run_log import RunLog
from tinyvae.training.run_state import RunState, with_its_best_model

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What is there before anything is built.

    ``place``: on the main process. ``index_folder``: where the index is made. ``saved``: the past of a resumed run.
    """

    config: TrainConfig
    engine: Engine
    folder: Path
    index_folder: Path
    place: RunPlace | None
    run_log: RunLog
    saved: SavedRun | None

    def from_the_past(self, state: RunState, fresh: LoopState) -> LoopState:
        """Where the loop begins: ``fresh`` at step 0, or where the checkpoint stood. Nothing is written yet."""
        if self.saved is None:
            return fresh
        loop = state.restore(self.saved, fresh.seraena_start)
        log.info("resumed from %s at step %d", self.saved.folder, loop.progress.step)
        return loop

    def settle(self, loop: LoopState, data: RunData) -> tuple[LoopState, RunData]:
        """Nothing can be refused any more: from here on the folder is this run's own."""
        stood = loop.progress
        self.engine.from_main(lambda: self._write_first_files(stood, data))
        data = data.settled(self.index_folder, self.folder)
        if self.saved is not None:
            saved = self.saved.tidied()
            best = self.engine.from_main(lambda: with_its_best_model(stood, saved, self.folder))
            loop = replace(loop, progress=best)
        return loop, data

    def _write_first_files(self, stood: Progress, data: RunData) -> None:
        assert self.place is not None, "only the main process writes"
        try:
            self.place.settle()
            if self.saved is not None:
                bring_past_along(self.saved.folder.parent, self.folder)
            self.run_log.begin(from_step=stood.step, with_validation=stood.validated_step == stood.step)
            data.name_bad_files()
            self.place.sign(self.config)
        except OSError as fault:
            raise cannot_write(self.folder, fault) from None
