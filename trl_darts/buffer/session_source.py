"""Batches whose conversations are led by coroutines, which a user gives as `rollout_func`."""

from typing import Any

from ..engines.batch import PromptBatch
from ..training.sessions import Play, SessionPlayers
from .batch import Prompts
from .conversation_source import ConversationSource
from .sources import EvaluationSource


class SessionSource(ConversationSource):
    """Conversations that coroutines lead."""

    def players(self, batch: PromptBatch) -> SessionPlayers:
        trainer = self.trainer
        return SessionPlayers(trainer, trainer.rollout_func.play, batch.rows[batch.mine], trainer._batch.inputs)


class SessionEvaluation(EvaluationSource, SessionSource):
    """Those of an evaluation: one candidate for each row."""


class SessionRollout:
    """A `rollout_func` of TRL that has the trainer's source play conversations."""

    def __init__(self, play: Play) -> None:
        self.play = play

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Returns the rows of this process. Called on every process at once."""
        prompt_ids = trainer._tokenize_prompts(prompts)[0]
        num_generations = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        with trainer._clock.on("rollout"):
            rows = trainer._source.sample(Prompts(prompt_ids, num_generations, None, None))
        trainer._batch.fillers = rows.fillers
        return {
            "prompt_ids": [own.outcome.prompt_ids for own in rows.played],
            "completion_ids": rows.completion_ids,
            "logprobs": rows.logprobs,
            "env_mask": [own.outcome.mask for own in rows.played],
            "session_reward": [own.outcome.reward for own in rows.played],
        }
