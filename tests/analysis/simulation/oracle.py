"""Simulates a rollout token by token on one engine: slow, and simple enough to trust."""

from __future__ import annotations

from collections.abc import Sequence

from trl_darts.policy import LatencyCurve
from trl_darts.scheduling import CandidateEnded, EngineLoad, FinishReason, GroupPlan, RolloutResult, Scheduler, Submit


def token_by_token(
    scheduler: Scheduler,
    plans: Sequence[GroupPlan],
    lengths: Sequence[Sequence[int]],
    max_length: int,
    latency: LatencyCurve,
    max_num_seqs: int | None = None,
) -> RolloutResult:
    """Each step gives every running candidate a token; then those that are complete end, in the order of their IDs."""
    now, waiting, running = 0.0, [], {}  # running: tokens by candidate_id
    submits = {}

    def execute(commands):
        for command in commands:
            if isinstance(command, Submit):
                submits[command.candidate_id] = command
                waiting.append(command.candidate_id)
                continue
            tokens = running.pop(command.candidate_id, 0)
            if command.candidate_id in waiting:
                waiting.remove(command.candidate_id)
            submit = submits[command.candidate_id]
            own = lengths[submit.group_id][submit.index]
            end(command.candidate_id, tokens, reason_of(own) if tokens == min(own, max_length) else FinishReason.ABORT)

    def reason_of(own):
        return FinishReason.STOP if own <= max_length else FinishReason.LENGTH

    def end(candidate_id, tokens, reason):
        event = CandidateEnded(candidate_id, 0, 0, list(range(tokens)), None, reason, now)
        execute(scheduler.handle(event))

    def admit():
        while waiting and (max_num_seqs is None or len(running) < max_num_seqs):
            running[waiting.pop(0)] = 0

    execute(scheduler.start(plans, [EngineLoad("0")], now))
    admit()
    while not scheduler.done:
        now += latency(len(running))
        for candidate_id in running:
            running[candidate_id] += 1
        for candidate_id in sorted(running):
            if candidate_id not in running:  # aborted because of one that ended in the same step
                continue
            command = submits[candidate_id]
            own = lengths[command.group_id][command.index]
            if running[candidate_id] == min(own, max_length):
                end(candidate_id, running.pop(candidate_id), reason_of(own))
        admit()
    return scheduler.result()
