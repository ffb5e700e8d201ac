"""
Turns of conversations on vLLM servers, each decoded when it is asked for, while the others wait for their tools or
decode. Runs in the engine's event loop.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..scheduling import Candidate, Continuous, Event, GroupPlan, SchedulePolicies, Scheduler
from ..scheduling.placement import Homes
from .monitor import Monitor
from .sampling import RolloutSeed
from .vllm_api import ServerPrompt
from .vllm_rollout import RolloutRun
from .waiting import Deadlines, Waiting


class TurnRun(RolloutRun):
    """A rollout without an end whose groups are single turns."""

    def __init__(
        self,
        num_conversations: int,
        carries_tokens: bool,
        monitor: Monitor,
        body: Mapping[str, Any],
        deadlines: Deadlines,
        seed: RolloutSeed | None = None,
    ) -> None:
        policies = SchedulePolicies(batch_stop=Continuous(), placement=Homes(num_conversations))
        scheduler = Scheduler(policies, 1, carries_tokens=carries_tokens)
        self._room: dict[int, int] = {}  # most tokens, by group
        super().__init__(
            scheduler, monitor, {}, body, lambda command: {"max_tokens": self._room[command.group_id]}, deadlines, seed
        )
        self.rollout = None  # the deadline is for turns that decode, and not for tools
        self._ended: dict[int, asyncio.Future[None]] = {}  # by group
        self._dropped: set[int] = set()  # groups whose requests end
        self.finished.add_done_callback(lambda _: self._wake(list(self._ended)))

    @property
    def is_over(self) -> bool:
        return self.scheduler.error is not None and self.scheduler.done

    async def decode(self, group_id: int, prompt: ServerPrompt, max_tokens: int) -> Candidate:
        """
        Decodes a turn, and returns it. If it is cancelled, the turn is aborted. Raises [`GenerationError`] if that, or
        another turn, fails.
        """
        if not self._ended:
            self.rollout = Waiting(self.deadlines.rollout_s)
        self._ended[group_id] = asyncio.get_running_loop().create_future()
        self.prompts[group_id], self._room[group_id] = [prompt], max_tokens
        try:
            if not self.finished.done():
                plan = GroupPlan(group_id, 1, num_prompt_tokens=len(prompt.tokens))
                self._execute(self.scheduler.add([plan], time.perf_counter()))
                await self._ended[group_id]
            if self.finished.done():
                if isinstance(self.error, Exception):  # otherwise it is cancelled, or its scheduler has ended it
                    raise self.error
                self.finished.result()
                self.scheduler.result()  # raises why the run is over
            return self.scheduler.take([group_id], time.perf_counter()).groups[0].rows[0]
        except asyncio.CancelledError:
            self._drop(group_id)
            raise
        finally:
            del self._ended[group_id], self.prompts[group_id], self._room[group_id]
            if not self._ended:
                self.rollout = None

    def _drop(self, group_id: int) -> None:
        """Aborts a turn."""
        if not self.finished.done():
            self._dropped.add(group_id)
            self._execute(self.scheduler.drop(group_id, "its conversation is over", time.perf_counter()))
            self._forget()

    def _forget(self) -> None:
        """Forgets aborted turns whose requests have ended."""
        ended = [own for own in self._dropped if self.scheduler.has_ended([own])]
        self._dropped.difference_update(ended)
        self.scheduler.take(ended, time.perf_counter())

    def _report(self, event: Event) -> None:
        super()._report(event)
        self._forget()
        self._wake([own for own in self.scheduler.takeable if self.scheduler.has_ended([own])])

    def _wake(self, group_ids: Sequence[int]) -> None:
        for group_id in group_ids:
            ended = self._ended.get(group_id)
            if ended is not None and not ended.done():
                ended.set_result(None)
