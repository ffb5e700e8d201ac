"""The last answers to each prompt, with what is needed to verify them under a later policy."""

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray


ANSWERS_FILE = "darts_answers.npz"
TOP = 8  # tokens per position whose log-probs are known
BYTES_PER_TOKEN = 8 + 8 * TOP
GIB = 1 << 30


class TopTokens:
    """The likeliest tokens at the positions of an answer that is being written, in 64 bytes each."""

    def __init__(self) -> None:
        self._tokens, self._logprobs = array("i"), array("f")

    def __len__(self) -> int:
        return len(self._tokens) // TOP

    def add(self, top: Mapping[int, float]) -> None:
        """Adds a position with its tokens' log-probs, of which the `TOP` largest are kept. None if unknown."""
        likeliest = sorted(top.items(), key=lambda item: -item[1])[:TOP]
        missing = TOP - len(likeliest)
        self._tokens.extend([*(token for token, _ in likeliest), *[-1] * missing])
        self._logprobs.extend([*(logprob for _, logprob in likeliest), *[-math.inf] * missing])

    def continue_at(self, position: int) -> None:
        """Drops what is known from a position on, or fills up to there with nothing known."""
        del self._tokens[position * TOP :], self._logprobs[position * TOP :]
        for _ in range(position - len(self)):
            self.add({})

    def arrays(self, size: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Returns tokens and log-probs of the first positions, `(size, TOP)`."""
        self.continue_at(size)
        tokens, logprobs = np.array(self._tokens, np.int32), np.array(self._logprobs, np.float32)
        return tokens.reshape(size, TOP), logprobs.reshape(size, TOP)


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A row that was trained on."""

    tokens: NDArray[np.int32]  # (T,)
    logprobs: NDArray[np.float32]  # (T,), under the policies that sampled them
    # (T, TOP), the likeliest tokens of these policies and their log-probs; -1 and minus infinity where there are fewer
    top_tokens: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
    ended: bool  # by itself, and not at the length limit

    def __len__(self) -> int:
        return len(self.tokens)

    def top(self, position: int) -> dict[int, float]:
        """Returns the likeliest tokens at a position, with their log-probs. Empty if they are not known."""
        pairs = zip(self.top_tokens[position].tolist(), self.top_logprobs[position].tolist(), strict=True)
        return {token: logprob for token, logprob in pairs if token >= 0}


class AnswerStore:
    """Answers by prompt key, at most so many GiB: those that were written longest ago leave first."""

    def __init__(self, max_gib: float) -> None:
        self._max_tokens = int(max_gib * GIB / BYTES_PER_TOKEN)
        self._answers: dict[int, list[Answer]] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._answers)

    def clear(self) -> None:
        self._answers, self.num_tokens = {}, 0

    def get(self, key: int) -> list[Answer]:
        """Returns the last answers to a prompt."""
        return self._answers.get(key, [])

    def put(self, key: int, answers: Sequence[Answer]) -> None:
        """Replaces a prompt's answers."""
        self._remove(key)
        self._answers[key] = list(answers)
        self.num_tokens += sum(map(len, answers))
        while self.num_tokens > self._max_tokens and self._answers:
            self._remove(next(iter(self._answers)))

    def _remove(self, key: int) -> None:
        self.num_tokens -= sum(map(len, self._answers.pop(key, [])))

    def save(self, directory: Path) -> None:
        """Writes `ANSWERS_FILE` into a directory."""
        flat = [(key, answer) for key, answers in self._answers.items() for answer in answers]
        np.savez(
            directory / ANSWERS_FILE,
            allow_pickle=False,
            keys=np.array([key for key, _ in flat], np.uint64),
            lengths=np.array([len(answer) for _, answer in flat], np.int64),
            ended=np.array([answer.ended for _, answer in flat], bool),
            tokens=_joined([answer.tokens for _, answer in flat], np.int32),
            logprobs=_joined([answer.logprobs for _, answer in flat], np.float32),
            top_tokens=_joined([answer.top_tokens for _, answer in flat], np.int32, TOP),
            top_logprobs=_joined([answer.top_logprobs for _, answer in flat], np.float32, TOP),
        )

    def load(self, directory: Path) -> str | None:
        """Restores what `save` wrote. Returns a message if the file can't be read; the store is then empty."""
        self.clear()
        try:
            # Only numbers: nothing is unpickled. NumPy leaves a file open that it can't read.
            with (directory / ANSWERS_FILE).open("rb") as file, np.load(file) as arrays:
                restored = list(_split(dict(arrays)))
        except FileNotFoundError:
            return f"{directory} has no {ANSWERS_FILE}: no answer of earlier epochs is reused."
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            return f"{directory / ANSWERS_FILE} can't be read ({error}): no answer of earlier epochs is reused."
        by_key: dict[int, list[Answer]] = {}
        for key, answer in restored:
            by_key.setdefault(key, []).append(answer)
        for key, answers in by_key.items():
            self.put(key, answers)
        return None


def _joined(parts: Sequence[NDArray], dtype: type, width: int | None = None) -> NDArray:  # type: ignore[type-arg]
    shape = (0,) if width is None else (0, width)
    return np.concatenate([np.empty(shape, dtype), *parts])


def _split(arrays: dict[str, NDArray]) -> Iterator[tuple[int, Answer]]:  # type: ignore[type-arg]
    ends = np.cumsum(arrays["lengths"]).tolist()
    names = ("tokens", "logprobs", "top_tokens", "top_logprobs")
    if any(len(arrays[name]) != (ends[-1] if ends else 0) for name in names):
        raise ValueError("its arrays differ in length")
    for key, start, end, ended in zip(
        arrays["keys"].tolist(), [0, *ends], ends, arrays["ended"].tolist(), strict=False
    ):
        yield key, Answer(**{name: arrays[name][start:end] for name in names}, ended=ended)
