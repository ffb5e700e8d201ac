"""Sizes of a model, without its weights."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from transformers.utils.import_utils import is_peft_available
from trl import ModelConfig, get_peft_config  # type: ignore[attr-defined]  # TRL exports them lazily

from ..errors import ConfigurationError
from .memory import ModelSize


class UnreadableModelError(ConfigurationError):
    """A model's config can't be read here. Where the training runs it may be."""


def read_model_size(model: ModelConfig) -> ModelSize:
    """
    Counts the parameters of a model that is built on the meta device, where they take no memory.

    Args:
        model ([`~trl.ModelConfig`]):
            With `model_name_or_path`, and LoRA's settings.

    Returns:
        [`ModelSize`]: Its sizes.

    Raises:
        [`UnreadableModelError`]: If the model's config can't be read, or is of no causal language model.
        [`ConfigurationError`]: If LoRA's settings don't fit the model.
        [`ImportError`]: If they need PEFT, which is not installed.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if model.use_peft and not is_peft_available():
        raise ImportError("`use_peft` (True) needs PEFT. Install it: pip install 'trl-darts[peft]'")
    name = model.model_name_or_path or ""
    try:
        config = AutoConfig.from_pretrained(name, revision=model.model_revision, trust_remote_code=False)
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise UnreadableModelError(
            f"`model_name_or_path` ({name!r}) could not be read: {str(error).splitlines()[0]} Give "
            "`--num-parameters`, such as 7.6e9."
        ) from error
    num_parameters = sum(parameter.numel() for parameter in built.parameters())
    text = config.get_text_config()
    num_adapter = _count_adapter(built, model) if model.use_peft else None
    return ModelSize(num_parameters, num_adapter, text.hidden_size, text.num_hidden_layers, text.vocab_size)


def _count_adapter(built: Any, model: ModelConfig) -> int:
    """Parameters that LoRA adds to a model, which is changed."""
    from peft import get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    try:
        lora: Any = get_peft_config(model)
        adapted: Any = get_peft_model(built, lora)
    except Exception as error:  # PEFT lets pass what comes up, such as `re.error` for a name that is no pattern
        reason = str(error).partition("\n")[0] or type(error).__name__
        reason = reason.rstrip(".")
        raise ConfigurationError(f"{_lora_words(model)} must fit the model: {reason}. Correct it.") from error
    if isinstance(adapted.get_output_embeddings(), BaseTunerLayer):
        raise ConfigurationError(
            f"{_lora_words(model)} must leave the LM head out: TRL computes log-probs with its own weights, and would "
            "not train an adapter there. Take it out of `lora_target_modules`."
        )
    num_adapter, _ = adapted.get_nb_trainable_parameters()
    return int(num_adapter)


def _lora_words(model: ModelConfig) -> str:
    """LoRA's fields that are not as they are by default, or the one that depends on the model most."""
    names = [field.name for field in fields(model) if field.name.startswith(("lora_", "use_rslora", "use_dora"))]
    usual = ModelConfig()
    changed = [name for name in names if getattr(model, name) != getattr(usual, name)] or ["lora_target_modules"]
    return ", ".join(f"`{name}` ({getattr(model, name)!r})" for name in changed)
