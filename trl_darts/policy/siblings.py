"""Finds answers to one prompt that are too alike for independent samples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np


MIN_TOKENS = 8
MOST_EXPECTED = 1e-6  # expected number of pairs like the one found: a false alarm in a million runs or fewer

Row = tuple[Sequence[int], Sequence[float] | None]  # tokens, and their log-probs under the sampling distribution


@dataclass(frozen=True)
class Twins:
    """Two answers with the same first tokens."""

    num_tokens: int
    logprob: float  # of these tokens


class SiblingCheck:
    """
    Compares the answers to each prompt of a run.

    Of two independent samples, the second starts with the tokens of the first with a probability of exp(l), where l is
    the sum of their log-probs. Among n pairs, at most n · exp(l) are expected to share tokens that are as unlikely or
    more. If that number is tiny, and one does, engines share their random numbers. Answers that are equal because
    nothing else is likely have an l near 0.
    """

    def __init__(self) -> None:
        self.num_pairs = 0  # that were compared so far

    def find(self, rows: Sequence[Row]) -> Twins | None:
        """Returns the least likely twins among the answers to one prompt, if chance does not explain them."""
        known = [(tokens, logprobs) for tokens, logprobs in rows if logprobs is not None and len(tokens) >= MIN_TOKENS]
        self.num_pairs += math.comb(len(known), 2)
        # Most answers differ soon.
        buckets = groupby(sorted(known, key=_head), key=_head)
        pairs = (pair for _, bucket in buckets for pair in pairwise(sorted(bucket, key=lambda row: list(row[0]))))
        twins = min((_compare(*pair) for pair in pairs), key=lambda twins: twins.logprob, default=None)
        if twins is None or self.num_pairs * math.exp(twins.logprob) >= MOST_EXPECTED:
            return None
        return twins


def _head(row: Row) -> list[int]:
    return list(row[0][:MIN_TOKENS])


def _compare(one: Row, other: Row) -> Twins:
    """Counts the tokens that two answers share. Unknown log-probs (NaN) count as 0, and the larger sum counts."""
    size = min(len(one[0]), len(other[0]))
    differs = np.asarray(one[0][:size]) != np.asarray(other[0][:size])
    shared = int(differs.argmax()) if differs.any() else size
    sums = [float(np.nansum(np.asarray(row[1][:shared], dtype=float))) for row in (one, other) if row[1] is not None]
    return Twins(shared, min(0.0, max(sums)))
