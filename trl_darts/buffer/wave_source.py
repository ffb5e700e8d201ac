"""Batches whose groups are trained on as they finish, for `stream_training`."""

import time
from functools import reduce
from typing import Any

from ..engines.batch import PromptBatch
from ..engines.engine import RolloutPlan
from ..scheduling import FinishedGroups
from ..telemetry.metrics import RolloutRecord
from .batch import Batch
from .batches import BufferedBatches
from .continuous_source import ContinuousSource
from .feed import Rows


class WaveSource(ContinuousSource):
    """
    Batches in waves: all prompts of a batch start together, and each wave takes the groups that have finished. No
    weights change and no prompt enters before the last wave, so that the training is on-policy.
    """

    def __init__(self, trainer: Any, batches: BufferedBatches) -> None:
        super().__init__(trainer, batches)
        self._records: list[RolloutRecord] = []
        self._waited = 0.0  # seconds

    def next(self, inputs: Rows) -> Batch:
        """Returns the next wave."""
        waves = self.trainer._waves
        if waves.is_first(self.trainer._step):
            self.cancel()
            self._records, self._waited = [], 0.0
            self.trainer._sync_weights()
            if self.batches.next_round() is not None:
                self.batches.main.run(self._extend)
        begin = time.perf_counter()
        rows, record = self.trainer._rollout(self, self.batches.prompts([]))
        self._waited += time.perf_counter() - begin
        self._records.append(record)
        if waves.is_last(self.trainer._step):
            self.log(reduce(RolloutRecord.then, self._records))
            self.trainer._log_all({"darts/rollout/wait_seconds": self._waited, **self.batches.pop_skip_metrics()})
        return self.batches.finish(rows, None, None)

    def launch_next(self) -> None:
        """Nothing: the next batch is sampled with the next weights."""

    def plan(self, batch: PromptBatch, ahead: bool = False) -> RolloutPlan:
        """Decides which groups are taken, on the main process."""
        return RolloutPlan(self._admission, [], self._scheduler, FinishedGroups(self.batches.policy.num_groups))
