"""A word to the user where the latency curve says that over-provisioning can't pay."""

import logging
import statistics

from .metrics import RolloutRecord
from .policy import LatencyCurve
from .policy.worth import best_case_speedup
from .scheduling import FinishReason


logger = logging.getLogger(__name__)

NUM_ROLLOUTS = 8  # those in which the budget is calibrated, and few prompts are stopped early


class WorthCheck:
    """
    Looks at the first rollouts of a training, and warns once.

    Args:
        latency_curve ([`LatencyCurve`], *optional*):
            Of one engine. Nothing is said without it.
        num_engines (`int`):
            Engines that decode a batch together.
    """

    def __init__(self, latency_curve: LatencyCurve | None, num_engines: int) -> None:
        self.latency_curve = latency_curve
        self.num_engines = num_engines
        self._speedups: list[float] = []

    def observe(self, record: RolloutRecord) -> None:
        """
        Takes note of a rollout. Prompts of which candidates were aborted say nothing of what they would have cost.

        Args:
            record ([`RolloutRecord`]):
                Of a rollout of training.
        """
        if self.latency_curve is None or len(self._speedups) == NUM_ROLLOUTS:
            return
        pools = [s.lengths for s in record.summaries if FinishReason.ABORT.value not in s.finish_reasons]
        if 2 * len(pools) < len(record.summaries) or not any(len(own) > record.num_generations for own in pools):
            return
        self._speedups.append(best_case_speedup(pools, record.num_generations, self.latency_curve, self.num_engines))
        if len(self._speedups) == NUM_ROLLOUTS and (speedup := statistics.median(self._speedups)) < 1:
            logger.warning(
                "`latency_curve` says that over-provisioning costs more than it can return here: even if every "
                "prompt stopped at its `num_generations`-th shortest answer, a rollout would be %.2f times as fast as "
                "one with `num_generations` candidates (median of the first %d). Lower `target_redundancy`, set "
                "`schedule='grpo'`, or see what `trl-darts simulate` says about other settings.",
                speedup,
                NUM_ROLLOUTS,
            )
