"""
One's own loop of a conversation: a coroutine as `rollout_func`, which runs once for each row, all of them at once.

```python
async def play(session: Session, example: dict) -> None:
    move = await session.generate()
    session.append(board.answer(move))
    ...
    session.reward = board.score
```
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from ..errors import GenerationError
from .conversations import POLL_S, Turns
from .rows import Tokens


Play = Callable[["Session", dict[str, Any]], Awaitable[None]]


class Session:
    """
    A conversation that a coroutine leads. What the model writes is trained on, and what is appended is not.

    Args:
        prompt (`str` or `list[dict[str, Any]]`):
            The row's prompt, as in the data set.

    Attributes:
        reward (`float` or `None`, defaults to `None`):
            The reward of the conversation, which [`session_reward`] passes on.
        completion_ids (`list[int]`):
            Tokens after the prompt.
        num_left (`int`):
            Tokens that still fit into `max_completion_length`.
    """

    def __init__(self, number: int, prompt: Any, prompt_ids: Tokens, most: int, tokenizer: Any, turns: Turns) -> None:
        self.prompt = prompt
        self.reward: float | None = None
        self.completion_ids: Tokens = []
        self.logprobs: list[float] = []
        self.mask: list[int] = []
        self.prompt_ids = prompt_ids
        self._number = number
        self._most = most
        self._tokenizer = tokenizer
        self._turns = turns
        self._num_turns = 0

    @property
    def num_left(self) -> int:
        return self._most - len(self.completion_ids)

    @property
    def text(self) -> str:
        """The conversation after its prompt, without special tokens."""
        text: str = self._tokenizer.decode(self.completion_ids, skip_special_tokens=True)
        return text

    async def generate(self, max_tokens: int | None = None) -> str:
        """
        Has the model write, until it ends or has written `max_tokens`.

        Returns:
            `str`: What it wrote, without special tokens. Empty if no token is left of `max_completion_length`.

        Raises:
            [`GenerationError`]: If no server is left, or one rejects the conversation.
        """
        most = min(self.num_left, self.num_left if max_tokens is None else max_tokens)
        if most <= 0:
            return ""
        decoded = self._turns.start(self._number, self._num_turns, [*self.prompt_ids, *self.completion_ids], most)
        self._num_turns += 1
        tokens, logprobs = await asyncio.wrap_future(decoded)
        self.completion_ids += tokens
        self.logprobs += logprobs or []
        self.mask += [1] * len(tokens)
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def append(self, content: str | Sequence[int]) -> bool:
        """
        Adds what the model did not write: text, which is tokenized without special tokens, or tokens. They have no
        loss.

        Returns:
            `bool`: Whether it fits into `max_completion_length` with a token to spare. Otherwise nothing is added.
        """
        if isinstance(content, str):
            tokens: Tokens = self._tokenizer(content, add_special_tokens=False)["input_ids"]
        else:
            tokens = list(content)
        if len(tokens) >= self.num_left:
            return False
        self.completion_ids += tokens
        self.logprobs += [0.0] * len(tokens)
        self.mask += [0] * len(tokens)
        return True


def session_reward(completions: list[Any], session_reward: list[float | None], **kwargs: Any) -> list[float | None]:
    """A reward function: what the coroutines have set as [`Session`]'s `reward`. Rows without one get no reward."""
    return session_reward


def as_rollout_func(play: Play) -> Callable[[list[Any], Any], dict[str, Any]]:
    """Returns a `rollout_func` of TRL that runs a coroutine for each row of this process."""

    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        prompt_ids = trainer._tokenize_prompts(prompts)[0]
        examples = trainer._batch.inputs or [{"prompt": prompt} for prompt in prompts]
        with trainer._engine.turns(len(prompts)) as turns:
            sessions = [
                Session(i, prompt, ids, trainer.max_completion_length, trainer._tokenizer, turns)
                for i, (prompt, ids) in enumerate(zip(prompts, prompt_ids, strict=True))
            ]
            _run([play(*pair) for pair in zip(sessions, map(dict, examples), strict=True)], turns)
        if not all(any(session.mask) for session in sessions):
            raise GenerationError(
                f"`rollout_func` ({play.__name__!r}) ended without `await session.generate()`. Each row needs a token "
                "of the model."
            )
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [session.completion_ids for session in sessions],
            "logprobs": [session.logprobs for session in sessions],
            "env_mask": [session.mask for session in sessions],
            "session_reward": [session.reward for session in sessions],
        }

    return rollout_func


def _run(plays: list[Any], turns: Turns) -> None:
    """Runs coroutines in a thread, since a notebook's main thread has a loop. The first exception ends the others."""
    over: Future[None] = Future()
    loop = asyncio.new_event_loop()

    async def play_all() -> None:
        async with asyncio.TaskGroup() as group:
            for play in plays:
                group.create_task(play)

    def run() -> None:
        try:
            asyncio.set_event_loop(loop)
            loop.run_until_complete(task)
            over.set_result(None)
        except BaseException as error:  # raised in the main thread
            over.set_exception(error)
        finally:
            loop.close()

    task = loop.create_task(play_all())
    thread = threading.Thread(target=run, name="trl_darts-sessions", daemon=True)
    thread.start()
    try:
        while not wait([over], POLL_S).done:
            turns.tend()
    except BaseException:
        loop.call_soon_threadsafe(task.cancel)
        raise
    thread.join()
    try:
        over.result()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
