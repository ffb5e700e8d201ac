"""
One's own loop of a conversation: a coroutine as `rollout_func`, which runs once for each
candidate, all of them at once.

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
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

from ..errors import ConfigurationError, GenerationError
from .chat_format import ChatFormat
from .conversations import Over, Turn
from .players import Played, Player, Players, Stage
from .rows import Tokens


CLOSE_S = 10.0  # for what coroutines do when they are cancelled

Content = str | Sequence[int] | Sequence[dict[str, Any]]  # text, tokens, or messages
Play = Callable[["Session", dict[str, Any]], Awaitable[None]]
Decode = Callable[[int, Tokens, int], Awaitable[Turn]]  # of a turn's number, the tokens so far, and the most new ones


class Led(NamedTuple):
    """What a coroutine made of a conversation."""

    prompt_ids: Tokens
    mask: list[int]  # of the tokens after the prompt: 1 for what the model wrote
    reward: float | None


class Writer:
    """Writes text and messages as tokens, for all conversations of a trainer."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}

    @cached_property
    def chat(self) -> ChatFormat:
        return ChatFormat(self._trainer)

    def text(self, tokens: Tokens) -> str:
        """Returns the text of tokens, without special ones."""
        text: str = self._trainer._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def tokens(self, content: Content) -> Tokens:
        """Returns the tokens of what follows a turn of the model."""
        if isinstance(content, str):
            tokens: Tokens = self._trainer._tokenizer(content, add_special_tokens=False)["input_ids"]
            return tokens
        own: list[Any] = list(content)
        return self.chat.suffix(own) if own and isinstance(own[0], Mapping) else own


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

    def __init__(self, prompt: Any, prompt_ids: Tokens, most: int, writer: Writer, decode: Decode) -> None:
        self.prompt = prompt
        self.reward: float | None = None
        self.prompt_ids = prompt_ids
        self.completion_ids: Tokens = []
        self.logprobs: list[float] = []
        self.mask: list[int] = []
        self._most = most
        self._writer = writer
        self._decode = decode
        self._tools: Any = None
        self._num_turns = 0
        self._begin = self._end = 0  # of the last turn, in the completion
        self._acting_s = 0.0
        self._last_end = time.perf_counter()
        self._is_full = False  # whether something did not fit

    @property
    def num_left(self) -> int:
        return self._most - len(self.completion_ids)

    @property
    def text(self) -> str:
        """The conversation after its prompt, without special tokens."""
        return self._writer.text(self.completion_ids)

    @property
    def has_ended_turn(self) -> bool:
        """Whether the model has ended its last turn, and was not cut off."""
        return self._end > 0 and self.completion_ids[self._end - 1] in self._writer.ends

    @property
    def message(self) -> dict[str, Any]:
        """
        The last turn as a message, with `tool_calls` where it calls the tools of [`begin`], as TRL's `parse_response`
        reads it.
        """
        before = [*self.prompt_ids, *self.completion_ids[: self._begin]]
        return self._writer.chat.message(self.completion_ids[self._begin : self._end], before, self._tools)

    def begin(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None = None) -> None:
        """
        Begins with another conversation than the row's prompt, such as one with a system prompt, or with tools: their
        JSON schemas, or functions. Called before the model writes.

        Raises:
            [`ConfigurationError`]: If the model has written, or its tokenizer has no chat template.
        """
        if self.completion_ids:
            raise ConfigurationError("`session.begin` must come before `session.generate` and `session.append`.")
        self._tools = tools
        self.prompt_ids = self._writer.chat.prompt(messages, tools)

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
        self._acting_s += time.perf_counter() - self._last_end
        tokens, logprobs = await self._decode(self._num_turns, [*self.prompt_ids, *self.completion_ids], most)
        self._num_turns += 1
        self._last_end = time.perf_counter()
        self._begin = len(self.completion_ids)
        self.completion_ids += tokens
        self.logprobs += logprobs or []
        self.mask += [1] * len(tokens)
        self._end = len(self.completion_ids)
        return self._writer.text(tokens)

    def append(self, content: Content) -> bool:
        """
        Adds what the model did not write, which has no loss: text, which is tokenized without special tokens; tokens;
        or messages, which are added as the chat template has them between two turns of the model.

        Returns:
            `bool`: Whether it fits into `max_completion_length` with a token to spare. Otherwise nothing is added.

        Raises:
            [`ConfigurationError`]: If messages are given, and the tokenizer has no chat template.
        """
        tokens = self._writer.tokens(content)
        if len(tokens) >= self.num_left:
            self._is_full = True
            return False
        self.completion_ids += tokens
        self.logprobs += [0.0] * len(tokens)
        self.mask += [0] * len(tokens)
        return True

    def _played(self, candidate_id: int) -> tuple[Played, bool]:
        """Returns what became of it, and whether there was no room for its end."""
        tokens = self.completion_ids, self.logprobs
        led = Led(self.prompt_ids, self.mask, self.reward)
        played = Played(candidate_id, tokens, led, self._num_turns, self._acting_s)
        return played, self._is_full or self.num_left <= 0


def session_reward(completions: list[Any], session_reward: list[float | None], **kwargs: Any) -> list[float | None]:
    """A reward function: what the coroutines have set as [`Session`]'s `reward`. Rows without one get no reward."""
    return session_reward


@dataclass
class SessionPlayer(Player):
    """A candidate with the coroutine that leads it."""

    led: Future[None] = field(init=False)


class SessionPlayers(Players[SessionPlayer]):
    """
    Conversations that coroutines lead, all in one thread.

    Args:
        trainer (`DARTSGRPOTrainer`):
            The trainer.
        play (`Callable`):
            The coroutine function.
        prompts (`list[list[int]]`):
            Prompt of each of this process's rows.
        examples (`Sequence[Mapping[str, Any]]`):
            Data of each row.
    """

    player_class = SessionPlayer

    def __init__(
        self, trainer: Any, play: Play, prompts: Sequence[Tokens], examples: Sequence[Mapping[str, Any]]
    ) -> None:
        super().__init__()
        self._play = play
        self._prompts = prompts
        self._examples = examples
        self._most: int = trainer.max_completion_length
        self._writer = Writer(trainer)

    @contextmanager
    def on(self, stage: Stage) -> Iterator[None]:
        self._loop = asyncio.new_event_loop()
        # A thread, since a notebook's main thread has a loop.
        self._thread = threading.Thread(target=self._loop.run_forever, name="trl_darts-sessions", daemon=True)
        self._thread.start()
        with super().on(stage):
            yield

    def _begin(self, player: SessionPlayer) -> None:
        player.led = asyncio.run_coroutine_threadsafe(self._lead(player), self._loop)

    def _end(self, player: SessionPlayer) -> None:
        player.over.set()
        player.led.cancel()

    def _close(self) -> None:
        """Waits for the coroutines that were cancelled, and ends the loop."""

        async def finish() -> None:
            if left := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(left)

        finished = asyncio.run_coroutine_threadsafe(finish(), self._loop)
        with suppress(NotDone):
            finished.result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._loop.is_running():
            self._loop.close()

    # In the loop's thread

    async def _lead(self, player: SessionPlayer) -> None:
        example = dict(self._examples[player.row])
        prompt, decode = list(self._prompts[player.row]), partial(self._decode, player)
        session = Session(example["prompt"], prompt, self._most, self._writer, decode)
        try:
            await self._play(session, example)
            if not any(session.mask):
                name = getattr(self._play, "__name__", self._play)
                raise GenerationError(
                    f"`rollout_func` ({name!r}) ended without `await session.generate()`. Each row "
                    "needs a token of the model."
                )
        except BaseException as error:
            self._failed(player, error)
        else:
            self._stage.ended(player.key, *session._played(player.candidate_id))

    def _failed(self, player: SessionPlayer, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            if player.over.is_set():
                return
            error = GenerationError("A conversation was cancelled, and not by the rollout.")
        super()._failed(player, error)

    async def _decode(self, player: SessionPlayer, number: int, tokens: Tokens, most: int) -> Turn:
        if player.over.is_set():  # also for coroutines that go on when they are cancelled
            raise Over
        return await asyncio.wrap_future(self._stage.start(player.key, number, tokens, most))
