"""The rows of `schedules.py`, and a training whose rollouts a real server decodes, with lengths that are given."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import requests

from trl_darts.analysis.simulation import ClusterSpec, SimulatedRun, SimulatedTraining, Workload
from trl_darts.engines import ServerPrompt, VLLMServerEngine
from trl_darts.policy import LatencyCurve
from trl_darts.scheduling import (
    GroupPlan,
    Occupancy,
    RolloutResult,
    Scheduler,
    ScheduleSettings,
    Submit,
    make_policies,
)


EOS_TOKEN = "1"
FIRST_TEXT_TOKEN, NUM_TEXT_TOKENS = 3, 96  # of the Markov model: prompts are made of these

PROFILED_LENGTHS = (40, 200)  # tokens

AUTO = {"long_end_patience": "auto"}
BOTH_ENDS = {"selection": "dual_end", **AUTO}


@dataclass(frozen=True)
class Row:
    """
    One line of the tables: what is set, and the speed-up that is expected. `capped` ones run on engines that decode no
    more than a batch of N × M at once, so that the others queue.
    """

    name: str
    settings: Mapping[str, Any]
    expected: str = ""

    @property
    def capped(self) -> bool:
        """Only the sorted schedule is made for a queue."""
        return self.settings["schedule"] == "sorted"

    def build(self, num_generations: int) -> ScheduleSettings:
        """The schedule's settings, as a trainer has them."""
        return ScheduleSettings(num_generations=num_generations, **self.settings)


def _row(name: str, schedule: str, expected: str = "", **settings: object) -> Row:
    return Row(name, {"schedule": schedule, **settings}, expected)


ROWS = [
    _row("grpo", "grpo", "bubble ≥ 70 %"),
    _row("darts (paper)", "darts", long_end_patience=None),
    _row("darts, patience 2", "darts", "≥ 1.4", long_end_patience=2.0),
    _row("darts, patience auto", "darts", "≥ 1.4", **AUTO),
    _row("uniform, auto", "darts", selection="uniform", **AUTO),
    _row("tail batching", "tail_batching", "≥ 1.6"),
    _row("tail batching, dual-end, auto", "tail_batching", **BOTH_ENDS),
    _row("partial rollout", "partial_rollout", "≥ 1.4"),
    _row("partial rollout, dual-end, auto", "partial_rollout", **BOTH_ENDS),
    _row("sorted, on-policy", "sorted", "bubble ≤ 6 %", sorted_mode="on_policy"),
    _row("sorted, partial", "sorted", "bubble ≤ 4 %", sorted_mode="partial"),
]


class ServerCluster:
    """
    A real server in the place of [`SimulatedCluster`]: decodes as many tokens of each candidate as it is given.

    Args:
        url (`str`):
            Of a server of the Markov model.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = VLLMServerEngine([url])
        self.model = self.engine.query(lambda server: server.get("/v1/models"))[0]["data"][0]["id"]

    def run(
        self, scheduler: Scheduler, plans: Sequence[GroupPlan], lengths: Sequence[Sequence[int]], max_length: int
    ) -> RolloutResult:
        """One rollout. The cache is emptied before it, as a weight sync does."""

        def fixed(command: Submit) -> dict[str, Any]:
            own = lengths[command.group_id][command.index]  # one that does not end by itself is cut by `max_tokens`
            return {"min_tokens": min(own - 1, max_length), "logit_bias": {EOS_TOKEN: 100}}

        requests.post(f"{self.url}/reset_prefix_cache", timeout=30).raise_for_status()
        places = [divmod(plan.prompt_key, NUM_TEXT_TOKENS) for plan in plans]
        prompts = [[ServerPrompt([FIRST_TEXT_TOKEN + place for place in pair])] for pair in places]
        body = {"model": self.model, "max_tokens": max_length, "logprobs": 0, "return_token_ids": True}
        return self.engine.run(scheduler, plans, prompts, body, fixed)

    def profile(self, batch_sizes: Sequence[int]) -> tuple[LatencyCurve, float]:
        """
        Seconds per token at these numbers of sequences, and per request, as rollouts themselves see them: fixed
        lengths cost the server more per token than free ones do, and the client is on the same machine.
        """
        short, long = PROFILED_LENGTHS
        times = {(n, length): self._best_time(n, length) for n in batch_sizes for length in PROFILED_LENGTHS}
        per_token = [max(1e-6, times[n, long] - times[n, short]) / (long - short) for n in batch_sizes]
        per_request = (times[batch_sizes[-1], short] - short * per_token[-1]) / batch_sizes[-1]
        return LatencyCurve.fit(batch_sizes, per_token), max(0.0, per_request)

    def _best_time(self, num_candidates: int, length: int) -> float:
        plans = [GroupPlan(index, 1, prompt_key=index) for index in range(num_candidates)]
        lengths = [[length]] * num_candidates
        grpo = make_policies("grpo", 1, 1, 0)
        return min(Occupancy.of(self.run(Scheduler(grpo, 1), plans, lengths, length)).seconds for _ in range(3))


@dataclass(frozen=True)
class Total:
    """What all steps of a row's training were like together. Shares are of 1."""

    seconds: float
    bubble_ratio: float
    oversubscribed: float  # the bubble ratio of the rollouts that ended while others were under way; NaN without any
    wasted: float  # of the tokens decoded: not trained on
    off_policy: float  # of the tokens trained on: sampled by an older version of the policy
    trained: float  # tokens

    @classmethod
    def median(cls, totals: Sequence["Total"]) -> "Total":
        """Field by field."""
        return cls(**{name: statistics.median(getattr(t, name) for t in totals) for name in cls.__annotations__})


class Replay(SimulatedTraining):
    """
    A training of which one step can be run at a time, on simulated engines or on a server.

    Args:
        row ([`Row`]):
            The schedule.
        num_generations (`int`):
            M.
        workload ([`Workload`]):
            What is trained on. Equal workloads and seeds give equal lengths to all rows, batch by batch and candidate
            by candidate.
        spec ([`ClusterSpec`]):
            The engines.
        server ([`ServerCluster`], *optional*):
            Decodes in their place. Capped rows need one with as many slots as the batch has rows.
        seed (`int`, *optional*, defaults to `0`):
            Of the trace.
    """

    def __init__(
        self,
        row: Row,
        num_generations: int,
        workload: Workload,
        spec: ClusterSpec,
        server: ServerCluster | None = None,
        seed: int = 0,
    ) -> None:
        self.slots = workload.prompts_per_step * num_generations // spec.num_engines if row.capped else None
        spec = replace(spec, max_num_seqs=self.slots)
        super().__init__(workload, row.build(num_generations), spec, seed)
        if server is not None:
            self.cluster = server  # type: ignore[assignment]
        self.num_engines = spec.num_engines
        self.slot_seconds: list[tuple[float, float, bool]] = []  # of each rollout: used, available, oversubscribed
        self.outcome = SimulatedRun()

    def steps(self) -> Iterator[None]:
        """One optimizer step after the other, without end."""
        for outcome in self.outcomes():
            self.outcome.add(outcome, self.workload)
            yield

    @property
    def total(self) -> Total:
        """All steps so far. The buffer must be empty, as it is at the end of an epoch: nothing is under way then."""
        run = self.outcome
        decoded, trained = sum(run.pool_tokens), sum(run.kept_tokens)
        stale = sum(share * kept for share, kept in zip(run.off_policy_share, run.kept_tokens, strict=True))
        wasted, off_policy = 1 - trained / decoded, stale / trained
        return Total(sum(run.rollout_seconds), self._bubbles(), self._bubbles(True), wasted, off_policy, trained)

    def _bubbles(self, oversubscribed: bool = False) -> float:
        used, available, _ = np.array([[0, 0, 1], *(own for own in self.slot_seconds if own[2] >= oversubscribed)]).T
        return float(1 - used.sum() / available.sum()) if available.any() else math.nan

    def rollout(self, *args: Any, **kwargs: Any) -> RolloutResult:
        result = super().rollout(*args, **kwargs)
        occupancy = Occupancy.of(result)
        available = (self.slots * self.num_engines if self.slots else occupancy.peak) * occupancy.seconds
        self.slot_seconds.append((slots_used(result, self.slots), available, bool(result.deferred)))
        return result


def slots_used(result: RolloutResult, slots: int | None) -> float:
    """
    Slot-seconds in which a candidate was decoded. Of those on an engine with `slots`, the others wait in its queue,
    which the scheduler's own timeline does not tell apart.
    """
    changes: dict[str, list[tuple[float, int]]] = {}
    for group in [*result.groups, *result.deferred]:
        for candidate in group.candidates:
            if candidate.engine_id is not None:  # else it was complete before, or never submitted
                changes.setdefault(candidate.engine_id, []).extend([(candidate.started, 1), (candidate.ended, -1)])
    area = 0.0
    for own in changes.values():
        times, steps = np.array(sorted(own)).T
        area += float(np.minimum(np.cumsum(steps)[:-1], slots or np.inf) @ np.diff(times))
    return area
