"""What earlier answers bring: counts for the metrics, and whether verifying them pays."""

import logging
from collections import Counter


LEAST_REUSED = 0.1  # share of the verified tokens that must be kept for verification to pay
SHARE_EMA = 0.8  # of that share, per rollout
PAUSE = 16  # rollouts after it did not pay

logger = logging.getLogger(__name__)


class ReuseTally:
    """
    Counts `verified` and `reused` tokens, `answers`, those kept `whole`, and those with a `rejected` token.

    Attributes:
        seconds (`float`):
            Seconds of verification since the last metrics.
        unknown (`float`):
            Sum over rejected tokens of what is not known of the old policy there, see
            [`~trl_darts.policy.verification.draw_residual`].
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.seconds = self.unknown = 0.0
        self._before: Counter[str] = Counter()  # the rollout
        self._reused_share = 1.0
        self._pause = 0  # rollouts

    def forget(self) -> None:
        """Begins a training."""
        self._pause, self._reused_share = 0, 1.0

    def begin(self) -> bool:
        """Begins a rollout. Returns whether answers are verified in it."""
        self._before = self.counts.copy()
        pays = not self._pause
        self._pause = max(0, self._pause - 1)
        return pays

    def end(self, seconds: float) -> None:
        """Ends a rollout's verification. Pauses if too little was kept."""
        self.seconds += seconds
        counts = self.counts - self._before
        if not counts["verified"]:
            return
        self._reused_share = SHARE_EMA * self._reused_share + (1 - SHARE_EMA) * counts["reused"] / counts["verified"]
        if self._reused_share < LEAST_REUSED:
            share = f"{self._reused_share:.0%} of the tokens of earlier answers were kept"
            logger.warning("%s: less than it costs. `reuse_answers` pauses for %d rollouts.", share, PAUSE)
            self._pause, self._reused_share = PAUSE, 1.0

    def pop_metrics(self) -> dict[str, float]:
        """Returns what was reused since the last call, see docs/metrics.md."""
        counts, self.counts = self.counts, Counter()
        metrics = {"darts/reuse/seconds": self.seconds, "darts/reuse/answers": float(counts["answers"])}
        if counts["verified"]:
            metrics["darts/reuse/reused_ratio"] = counts["reused"] / counts["verified"]
            metrics["darts/reuse/whole_ratio"] = counts["whole"] / counts["answers"]
        if counts["rejected"]:
            metrics["darts/reuse/unknown_ratio"] = self.unknown / counts["rejected"]
        self.seconds = self.unknown = 0.0
        return metrics
