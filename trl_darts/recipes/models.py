"""Sizes of a model, without its weights."""

from __future__ import annotations

from trl import ModelConfig, get_peft_config  # type: ignore[attr-defined]  # TRL exports them lazily

from ..errors import ConfigurationError
from .memory import ModelSize


def read_model_size(model: ModelConfig) -> ModelSize:
    """
    Counts the parameters of a model that is built on the meta device, where they take no memory.

    Args:
        model ([`~trl.ModelConfig`]):
            With `model_name_or_path`, and LoRA's settings.

    Returns:
        [`ModelSize`]: Its sizes.

    Raises:
        [`ConfigurationError`]: If the model's config can't be read, or is of no causal language model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    name = model.model_name_or_path or ""
    try:
        config = AutoConfig.from_pretrained(name, revision=model.model_revision, trust_remote_code=False)
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        adapter = get_peft_config(model)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"`model_name_or_path` ({name!r}) could not be read: {str(error).splitlines()[0]} Give "
            "`--num-parameters`, such as 7.6e9."
        ) from error
    num_parameters = sum(parameter.numel() for parameter in built.parameters())
    text = config.get_text_config()
    num_adapter = None
    if adapter is not None:
        from peft import get_peft_model

        num_adapter, _ = get_peft_model(built, adapter).get_nb_trainable_parameters()
    return ModelSize(num_parameters, num_adapter, text.hidden_size, text.num_hidden_layers, text.vocab_size)
