"""Detects models whose positions, states or rotary frequencies depend on padding."""

from typing import Any

from accelerate.utils import is_peft_model


CACHED_LAYERS = {"full_attention", "sliding_attention"}
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}  # frequencies depend on the length of the text


def rope_kinds(config: Any) -> set[str]:
    """Returns the kinds of rotary positions in a text config, over all layers. Empty without rotary positions."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    return {kind for part in parts if (kind := part.get("rope_type"))}


def uncached_layers(model: Any) -> set[str] | None:
    """
    Returns the kinds of layers other than full and sliding attention, such as recurrent ones. `None` if the whole
    model is stateful.
    """
    base = model.get_base_model() if is_peft_model(model) else model
    if getattr(base, "_is_stateful", False):
        return None
    return set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - CACHED_LAYERS
