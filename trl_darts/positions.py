"""What a model makes of padding: which of its positions, states and frequencies depend on how a text is padded."""

from typing import Any

from accelerate.utils import is_peft_model


CACHED_LAYERS = {"full_attention", "sliding_attention"}
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}  # their frequencies depend on how long the text is or will be


def rope_kinds(config: Any) -> set[str]:
    """Kinds of rotary positions of a text config, over all of its layers. Empty for a model without any."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    return {kind for part in parts if (kind := part.get("rope_type"))}


def uncached_layers(model: Any) -> set[str] | None:
    """
    Kinds of layers that are neither full nor sliding attention, such as recurrent ones. `None` where the whole model
    is of another kind.
    """
    base = model.get_base_model() if is_peft_model(model) else model
    if getattr(base, "_is_stateful", False):
        return None
    return set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - CACHED_LAYERS
