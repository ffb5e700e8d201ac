"""
Forward passes over nothing but new tokens
([DARTS](https://huggingface.co/papers/2605.30859), Appendix E: a KV cache per trajectory, processed tokens padded).

```
row 0   · · · · k k k k k k | n n n n n        k: cached, right-aligned     n: new, left-aligned
row 1   k k k k k k k k k k | n n ·            so that each row's own tokens are next to each other, as sliding
row 2   · · · · · · · · · · | n n n n n        windows need them
```
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from ..errors import ConfigurationError


IGNORED = -100  # no log-prob is computed for such a label
# By layer, keys and values of shape (tokens, heads, size).
KeyValues = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class NewTokens:
    """
    One row of a forward pass.

    Args:
        past (`list[tuple[torch.Tensor, torch.Tensor]]` of shape `(layers, 2, D, heads, size)`, *optional*):
            Keys and values of the D tokens before. `None` where there are none.
        inputs (`list[int]` of shape `(n,)`):
            Token IDs.
        labels (`list[int]` of shape `(n,)`, *optional*):
            For each input, the token after it. `None` where no log-probs are wanted.
        ends (`bool`, *optional*, defaults to `False`):
            Whether no tokens follow: the keys and values are not wanted.
    """

    past: KeyValues | None
    inputs: Sequence[int]
    labels: Sequence[int] | None = None
    ends: bool = False


def num_cached(past: KeyValues | None) -> int:
    """D, the tokens of a cache."""
    return 0 if past is None else len(past[0][0])


def forward_new(
    model: Callable[..., Any], rows: Sequence[NewTokens], device: torch.device, routes: bool = False
) -> tuple[list[torch.Tensor], list[KeyValues | None]]:
    """
    Computes log-probs, and keys and values, of new tokens alone.

    Args:
        model (`Callable`):
            A model with TRL's fused LM head, which has its temperature and computes in chunks.
        rows (`Sequence[NewTokens]`):
            At least one, each with at least one input.
        device (`torch.device`):
            Of the model.
        routes (`bool`, *optional*, defaults to `False`):
            Whether the model has experts and takes `output_router_logits`.

    Returns:
        `tuple[list[torch.Tensor], list[KeyValues | None]]`: For each row, log-probs of shape `(n,)` of its labels, and
        the keys and values of all its tokens so far.

    Raises:
        [`ConfigurationError`]: If the model keeps no keys and values that could be cut.
    """
    lengths = [num_cached(row.past) for row in rows]
    context, width = max(lengths), max(len(row.inputs) for row in rows)
    inputs = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), IGNORED)
    mask = torch.zeros(len(rows), context + width, dtype=torch.long)
    for b, row in enumerate(rows):
        count = len(row.inputs)
        inputs[b, :count] = torch.tensor(row.inputs)
        mask[b, context - lengths[b] : context + count] = 1
        if row.labels is not None:
            labels[b, :count] = torch.tensor(row.labels)
    positions = torch.tensor(lengths)[:, None] + torch.arange(width)
    cache = _batched_cache([row.past for row in rows])
    # Experts' auxiliary loss is of no use here, and can't be computed from new tokens alone.
    extra = {"output_router_logits": False} if routes else {}
    output = model(
        input_ids=inputs.to(device),
        attention_mask=mask.to(device),
        position_ids=positions.to(device),
        past_key_values=cache,
        shift_labels=labels.to(device),
        fused_lm_head=True,
        **extra,
    )
    log_probs = [output.log_probs[b, : len(row.inputs)] for b, row in enumerate(rows)]
    _check_cache(cache, context + width)
    starts = [context - length for length in lengths]
    ends = [context + len(row.inputs) for row in rows]
    return log_probs, [
        None
        if rows[b].ends
        else [(_own(layer.keys, b, start, end), _own(layer.values, b, start, end)) for layer in cache.layers]
        for b, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def _batched_cache(pasts: Sequence[KeyValues | None]) -> DynamicCache:
    cache = DynamicCache()  # without the model's config: a layer with a sliding window would cut what it gets
    like = next((past for past in pasts if past is not None), None)
    if like is not None:
        for index, (keys, values) in enumerate(like):
            own_keys = [keys[:0] if past is None else past[index][0] for past in pasts]
            own_values = [values[:0] if past is None else past[index][1] for past in pasts]
            cache.update(_batched(own_keys), _batched(own_values), index)
    return cache


def _batched(rows: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(rows, batch_first=True, padding_side="left").transpose(1, 2)


def _own(batched: torch.Tensor, row: int, start: int, end: int) -> torch.Tensor:
    return batched[row, :, start:end].transpose(0, 1).clone()  # no view, which would keep the whole batch


def _check_cache(cache: DynamicCache, length: int) -> None:
    layers = [getattr(layer, "keys", None) for layer in cache.layers]
    if not layers or any(keys is None or keys.shape[-2] != length for keys in layers):
        raise ConfigurationError(
            "`stream_logprobs` (True) needs a model whose layers all keep the keys and values of every token, and "
            "this one's do not. Set it to `False`."
        )
