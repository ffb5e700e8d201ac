"""
A rollout without an end on vLLM servers (`rollout_ahead="continuous"`): prompts are added and groups taken while it
runs, and its weights change between two tokens. Runs in the engine's event loop.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..scheduling import (
    EngineJoined,
    EngineLoad,
    EngineUpdated,
    Event,
    FinishedGroups,
    FreshGroups,
    GroupPlan,
    GroupResult,
    RolloutResult,
    Scheduler,
)
from .engine import OnGroup
from .monitor import Monitor
from .pool import Member
from .sampling import RolloutSeed
from .vllm_api import ServerPrompt
from .vllm_rollout import Overrides, RolloutRun
from .waiting import Deadlines, Waiting


class ContinuousRun(RolloutRun):
    """
    Other rollouts, such as evaluations, can run at the same time.

    Versions of the weights are numbers of optimizer steps. The trainer sets `step`, the version of the next weight
    sync, before it begins.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        monitor: Monitor,
        body: Mapping[str, Any],
        overrides: Overrides | None,
        deadlines: Deadlines,
        step: int,
        keeps_kv: bool,
        seed: RolloutSeed | None = None,
        on_group: OnGroup | None = None,
    ) -> None:
        super().__init__(scheduler, monitor, {}, body, overrides, deadlines, seed)
        self.rollout = None
        self.step = step
        self.keeps_kv = keeps_kv
        self._steps = {self.pool.version: step}  # by number of the sync
        self._changed = asyncio.Event()
        self._on_group = on_group
        self._passed_on: set[int] = set()  # groups that `on_group` was called with
        self.finished.add_done_callback(lambda _: self._changed.set())

    @property
    def is_over(self) -> bool:
        return self.scheduler.error is not None and self.scheduler.done

    def add(self, plans: Sequence[GroupPlan], prompts: Mapping[int, Sequence[ServerPrompt]]) -> None:
        """Starts groups, with the prompts of each."""
        self.prompts |= prompts
        self._execute(self.scheduler.add(plans, time.perf_counter()))

    async def take(self, rule: FreshGroups | FinishedGroups) -> RolloutResult:
        """
        Waits for the groups of the next batch, ends and returns them. Their aborted candidates end with the tokens
        that have arrived, without the servers' answers, for which each batch or wave would wait.
        """
        self.rollout = Waiting(self.deadlines.rollout_s)
        while (chosen := rule.choose(self.scheduler)) is None:
            await self._wait()
        self._execute(self.scheduler.select(chosen, time.perf_counter()))
        self._pass_on()
        for request in [own for own in self.requests.values() if own.command.group_id in chosen]:
            if request.internal_id is None:  # not sent yet
                self._close(request)
            self._report_abort(request)
        for group_id in chosen:
            del self.prompts[group_id]
        self.failed_prompts.forget(chosen)
        self._passed_on.difference_update(chosen)
        self.rollout = None
        return self.scheduler.take(chosen, time.perf_counter())

    async def _wait(self) -> None:
        """Waits for an event. Raises if the rollout has failed."""
        await self._changed.wait()
        self._changed.clear()
        if self.finished.done():
            self.finished.result()
            self.scheduler.result()

    def _report(self, event: Event) -> None:
        super()._report(event)
        self._pass_on()
        self._changed.set()

    def _pass_on(self) -> None:
        """Calls `on_group` with the groups whose rows were selected since the last call."""
        if self._on_group is None:
            return
        for group_id in sorted(self.scheduler.selected - self._passed_on):
            self._passed_on.add(group_id)
            group = self.scheduler.ledger.groups[group_id]
            self._on_group(GroupResult(group.plan, group.candidates, group.selected or []))

    # Versions

    def _step_of(self, sync: int) -> int:
        step = self._steps.setdefault(sync, self.step)
        in_use = {self.pool.version, *(member.version for member in self.pool.members.values()), sync}
        self._steps = {known: self._steps[known] for known in self._steps.keys() & in_use}
        return step

    def _load(self, url: str, member: Member) -> EngineLoad:
        return EngineLoad(url, member.capacity, version=self._step_of(member.version))

    def on_joined(self, url: str, capacity: int) -> None:
        """Reports a server that has reconnected."""
        version = self._step_of(self.pool.members[url].version)
        self._report(EngineJoined(url, time.perf_counter(), capacity, version=version))

    def on_updated(self, url: str, num_outputs: Mapping[str, int] | None) -> None:
        """
        Reports new weights. The time of the update does not count as silence.

        If keys and values are kept, requests without tokens start again: their salt would let them read the prompt's
        of the old weights.
        """
        now, counts = time.perf_counter(), {}
        if num_outputs is None:
            self._report(EngineUpdated(url, self._step_of(self.pool.version), None, now))
            return
        self.pool.members[url].last_progress = now
        for request in self.requests.on(url):
            request.last_progress = now
            count = num_outputs.get(request.internal_id or "")
            if count is not None:
                counts[request.command.candidate_id] = count
            if self.keeps_kv and not count and not request.decodes and request.aborted_at is None:
                self._close(request)
                self._start(request.command)
        self._report(EngineUpdated(url, self._step_of(self.pool.version), counts, now))

    def _check_progress(self, urls: Sequence[str]) -> None:
        is_paused = self.pool.updating.locked()
        if is_paused or not self.requests:
            self.tokens = Waiting(self.deadlines.first_token_s)
        if not is_paused:
            super()._check_progress(urls)
