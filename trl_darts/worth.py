"""A word to the user where the latency curve is of another model, or says that over-provisioning can't pay."""

import statistics
from typing import Any

from accelerate.logging import get_logger

from .metrics import RolloutRecord
from .policy import LatencyCurve
from .policy.censoring import expected_lengths
from .policy.worth import best_case_speedup
from .scheduling import FinishReason, GroupSummary


logger = get_logger(__name__)

NUM_ROLLOUTS = 8  # those in which the budget is calibrated


def warn_of_other_model(curve: LatencyCurve | None, path: str | None, model: Any) -> None:
    """
    Warns of a curve that was measured with another model. That is no error: a checkpoint has another directory's name.

    Args:
        curve ([`LatencyCurve`], *optional*):
            The curve.
        path (`str`, *optional*):
            Where it came from.
        model (`PreTrainedModel`):
            What is trained.
    """
    name = getattr(model.config, "_name_or_path", None)
    if curve is not None and not curve.is_of(name):
        logger.warning(
            "`latency_curve` (%r) was measured with %r, and the model is %r. If one is not a checkpoint of the other, "
            "budgets follow another model's costs: measure a curve with `trl-darts profile`.",
            path,
            curve.metadata.get("model"),
            name,
        )


class WorthCheck:
    """
    Looks at the first rollouts of a training, and warns once.

    Args:
        latency_curve ([`LatencyCurve`], *optional*):
            Of one engine. Nothing is said without it.
        num_engines (`int`):
            Engines that decode a batch together.
        max_completion_length (`int`):
            Longest that an answer can be, in tokens.
    """

    def __init__(self, latency_curve: LatencyCurve | None, num_engines: int, max_completion_length: int) -> None:
        self.latency_curve = latency_curve
        self.num_engines = num_engines
        self.max_completion_length = max_completion_length
        self._speedups: list[float] = []

    def observe(self, record: RolloutRecord) -> None:
        """
        Takes note of a rollout. Candidates that were aborted count with the length that could be expected of them.

        Args:
            record ([`RolloutRecord`]):
                Of a rollout of training.
        """
        if self.latency_curve is None or len(self._speedups) == NUM_ROLLOUTS:
            return
        if not any(len(summary.lengths) > record.num_generations for summary in record.summaries):
            return
        pools = [self._whole(summary) for summary in record.summaries]
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

    def _whole(self, summary: GroupSummary) -> list[float]:
        """Lengths of a prompt's candidates, had none been aborted."""
        aborted = [reason == FinishReason.ABORT.value for reason in summary.finish_reasons]
        return expected_lengths(summary.lengths, aborted, horizon=self.max_completion_length)
