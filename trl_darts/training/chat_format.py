"""How the messages of a conversation become tokens, and a turn's tokens a message."""

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ..errors import ConfigurationError
from ..trl_compat import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_completion,
)
from .rows import Tokens


Message = dict[str, Any]


class ChatFormat:
    """
    The format of a trainer's model.

    Args:
        trainer (`DARTSGRPOTrainer`):
            The trainer. Raises [`ConfigurationError`] if its tokenizer has no chat template.
    """

    def __init__(self, trainer: Any) -> None:
        tokenizer = trainer._tokenizer
        if tokenizer.chat_template is None:
            raise ConfigurationError(
                f"`processing_class` ({type(tokenizer).__name__}) has no chat template, which a conversation of "
                "messages needs. Set `processing_class.chat_template`, or use `session.append` with text."
            )
        self._tokenizer = tokenizer
        names = ("response_template", "response_schema")
        self._parses = any(getattr(tokenizer, name, None) is not None for name in names)
        self._view = copy.copy(trainer)
        if trainer.chat_template is None and not is_chat_template_prefix_preserving(tokenizer):
            self._view.chat_template = get_training_chat_template(tokenizer)

    @cached_property
    def _reader(self) -> Any:
        """A tokenizer that finds calls of tools in a turn."""
        return self._tokenizer if self._parses else add_response_schema(copy.copy(self._tokenizer))

    def prompt(self, messages: Sequence[Message], tools: Any) -> Tokens:
        """Returns the tokens of a conversation whose next speaker is the model."""
        ids: Tokens = self._tokenizer.apply_chat_template(
            list(messages),
            tools=tools or None,
            chat_template=self._view.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **self._view.chat_template_kwargs,
        )
        return ids

    def suffix(self, messages: Sequence[Message]) -> Tokens:
        """Returns the tokens of messages after a turn of the model, whose next speaker is the model again."""
        ids: Tokens = self._view._get_tool_suffix_ids([{"name": "", **messages[0]}, *messages[1:]])
        return ids

    def message(self, ids: Tokens, before: Tokens, tools: Any) -> Message:
        """Returns the message of a turn, given the tokens before it."""
        if tools or self._parses:
            message: Message = parse_completion(self._reader, ids, before, tools)
            return message
        return {"role": "assistant", "content": self._tokenizer.decode(ids, skip_special_tokens=True)}
