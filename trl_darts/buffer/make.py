"""The order of the data, the buffer and the sources of a trainer, by its settings."""

import math
import weakref
from functools import partial
from typing import Any

from ..policy.skipping import UniformPrompts
from ..streaming import decode_completions
from .batches import BufferedBatches
from .buffer_source import BufferSource
from .continuous_source import ContinuousSource
from .conversation_source import ToolSource
from .feed import PromptFeed
from .rounds import ContinuousRounds, round_policy
from .scores import GroupScores
from .session_source import SessionEvaluation, SessionRollout, SessionSource
from .sources import EvaluationSource, LoaderSource, TRLSource
from .wave_source import WaveSource


def make_feed(trainer: Any) -> PromptFeed:
    """Returns the order of the data for a schedule."""
    args, loop = trainer.args, trainer._loop
    trainer = weakref.proxy(trainer)
    # Others come in the place of prompts that are dropped or skipped.
    replaces = args.drop_uniform_groups or args.is_continuous or args.skip_uniform_prompts
    runs_ahead = args.scores_early or args.rollout_ahead != 0
    return PromptFeed(
        loop,
        [{}] * args.rows_per_process if args.buffers_prompts else None,
        endless=replaces or runs_ahead,
        limit=lambda: loop.num_batches(trainer.state.max_steps) if runs_ahead and not replaces else math.inf,
    )


def make_batches(trainer: Any, feed: PromptFeed) -> BufferedBatches | None:
    """Returns the batches of a schedule with a rollout buffer."""
    args = trainer.args
    num_groups = args.generation_batch_size // args.num_generations
    make_policy: Any = partial(round_policy, args, num_groups)
    if trainer._waves is not None:
        make_policy = partial(ContinuousRounds, num_groups // trainer._waves.num_waves, num_groups)
    if make_policy() is None:
        return None
    admission, main, loop = trainer._admission, trainer._main, trainer._loop
    trainer = weakref.proxy(trainer)  # no cycle, see `make_sources`

    def tokenize(prompts: list[Any]) -> tuple[Any, ...]:  # as the trainer does, which may be a subclass
        output: tuple[Any, ...] = trainer._tokenize_prompts(prompts)
        return output

    make_skips = UniformPrompts if args.skip_uniform_prompts else lambda: None
    return BufferedBatches(make_policy, admission, args.num_generations, feed, main, tokenize, loop, make_skips)


def plays_tools(trainer: Any) -> bool:
    """Whether candidates are whole conversations with tools. Those of vision-language models may have images."""
    has_tools = bool(trainer.tools) and not trainer._is_vlm
    return bool(has_tools and trainer.args.plays_conversations(trainer.environment_factories is not None))


def make_sources(trainer: Any) -> tuple[TRLSource, TRLSource]:
    """Returns the sources of training and of evaluation. Engines in the trainer's process leave evaluation to TRL."""
    args, batches = trainer.args, trainer._batches
    trainer = weakref.proxy(trainer)  # no cycle: connections and threads end with the trainer
    if isinstance(trainer.rollout_func, SessionRollout):
        return SessionSource(trainer), SessionEvaluation(trainer)
    evaluation = EvaluationSource(trainer) if args.uses_servers else TRLSource()
    if batches is None:
        return (ToolSource if plays_tools(trainer) else LoaderSource)(trainer), evaluation
    if args.stream_training:
        return WaveSource(trainer, batches), evaluation
    if args.is_continuous:
        return ContinuousSource(trainer, batches), evaluation
    scores = None
    if batches.policy.scores_first or args.stream_rewards:
        decode = partial(decode_completions, trainer)
        scores = GroupScores(trainer, batches, decode, trainer._streams.owners)
    return BufferSource(trainer, batches, scores), evaluation
