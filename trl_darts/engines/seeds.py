"""Seeds of sampling, so that no two candidates share their random numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ..errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class RolloutSeed:
    """Derives the seeds of one rollout's candidates. `rollout` is what no other rollout of the run has."""

    base: int
    rollout: tuple[int, ...] = ()
    always: bool = False  # whether requests have a seed wherever they run, and not only where engines sample alike

    def of(self, group_id: int, index: int, segment: int = 0) -> int:
        """Returns the seed of a candidate's request. A resumed candidate must not replay its random numbers."""
        words = repr((self.base, self.rollout, group_id, index, segment)).encode()
        # 62 bits: vLLM takes signed integers of 64 bits, of which -1 is no seed.
        return int.from_bytes(blake2b(words, digest_size=8).digest(), "big") >> 2


def user_seed(generation_kwargs: Mapping[str, Any] | None) -> int | None:
    """Returns the seed among a user's sampling options, if any. For vLLM, -1 is none."""
    seed = (generation_kwargs or {}).get("seed")
    if seed is not None and type(seed) is not int:
        raise ConfigurationError(
            f"`generation_kwargs['seed']` ({seed!r}) must be a whole number, from which each candidate's seed is "
            "derived. Correct it, or leave it out."
        )
    return None if seed == -1 else seed
