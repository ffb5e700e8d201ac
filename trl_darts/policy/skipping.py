"""Prompts whose groups had no spread of rewards lately, and are skipped before a token is decoded."""

import random
from typing import Any


EXPLORATION = 0.5  # GRESO's base probability of sampling such a prompt, to the power of how often it taught nothing
LEAST_SAMPLED = 0.05  # any prompt is sampled once in twenty times: what a policy learns elsewhere may reach it


class UniformPrompts:
    """
    Remembers the prompts of which all rewards were equal, in their latest groups one after another, and draws whether
    the next group is worth its tokens ([GRESO](https://huggingface.co/papers/2506.02177), Section 4): after z such
    groups it is skipped with the probability `1 - EXPLORATION**z`, at most `1 - LEAST_SAMPLED`.

    Draws depend only on their number, so that a resumed run makes the same ones.
    """

    def __init__(self) -> None:
        self._streaks: dict[int, int] = {}  # z by prompt key; others have 0
        self._num_draws = 0

    def __len__(self) -> int:
        """Number of prompts whose latest group was uniform."""
        return len(self._streaks)

    def observe(self, key: int, is_uniform: bool) -> None:
        """Adds a group of a prompt that was sampled."""
        if is_uniform:
            self._streaks[key] = self._streaks.get(key, 0) + 1
        else:
            self._streaks.pop(key, None)

    def probability(self, key: int) -> float:
        """Returns the probability with which the prompt is skipped now."""
        return 1 - max(EXPLORATION ** self._streaks.get(key, 0), LEAST_SAMPLED)

    def skips(self, key: int) -> bool:
        """Draws whether the prompt is skipped."""
        self._num_draws += 1
        return random.Random(f"skip {self._num_draws}").random() < self.probability(key)

    def state_dict(self) -> dict[str, Any]:
        """Returns what was observed, for JSON."""
        return {"streaks": [[key, streak] for key, streak in self._streaks.items()], "num_draws": self._num_draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self._streaks = {int(key): streak for key, streak in state["streaks"]}
        self._num_draws = state["num_draws"]
