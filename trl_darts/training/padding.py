"""
Training without padding. TRL pads a process's whole generation batch to its longest row, and then splits it into
micro-batches (https://github.com/huggingface/trl/issues/7179). Here, rows of similar length share a micro-batch, and
each micro-batch is only as wide as its longest prompt and completion.

Invariants: each optimizer step trains on the rows that TRL's shuffle assigned to it, in the same number of
micro-batches of the same size; no column that a mask counts is cut; log-probs are returned in TRL's order and width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from ..trl_compat import split_pixel_values_by_grid, split_tensor_dict, unsplit_pixel_values_by_grid
from .positions import LENGTH_DEPENDENT_ROPE, rope_kinds, uncached_layers
from .shared_prompts import Lengths, SharedPrompts, used


Batch = dict[str, Any]  # rows as TRL's `_generate_and_score_completions` returns them

PROMPT = ("prompt_ids", "prompt_mask")  # (B, P), padded on the left
COMPLETION = (  # (B, C), padded on the right; ratios of whole rows have the shape (B, 1), advantages (B,)
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",
    "advantages",
)
WHOLE = ("token_type_ids", "mm_token_type_ids")  # (B, P + C)
MIN_COLUMNS = 2  # TRL interprets a single column of a completion as one value per row


@dataclass(frozen=True)
class Trimming:
    """
    Orders and cuts micro-batches without changing the gradients.

    Args:
        window (`int`):
            Number of micro-batches over which rows are ordered, all of one optimizer step. 1 keeps the order.
        cuts_prompts (`bool`, *optional*, defaults to `True`):
            Whether to cut the left padding of prompts too.
        multiple (`int`, *optional*, defaults to 1):
            Widths are rounded up to a multiple of this, as with TRL's `pad_to_multiple_of`.
        few_widths (`bool`, *optional*, defaults to `False`):
            Whether widths are also rounded up to powers of two, to limit the recompilations of a compiled model.
        shared ([`SharedPrompts`], *optional*):
            Has rows of a group share their prompt. They are then neighbours where that costs less.
    """

    window: int
    cuts_prompts: bool = True
    multiple: int = 1
    few_widths: bool = False
    shared: SharedPrompts | None = None

    @classmethod
    def of(cls, trainer: Any) -> "Trimming | None":
        """Builds the trimming for a trainer. Returns `None` if a change of width would change the gradients."""
        args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
        kinds, sums = rope_kinds(model.config.get_text_config()), _sums_padding(trainer)
        shared = SharedPrompts.of(
            trainer, "`loss_type` ('vespo') with such bounds, which sums padding" if sums else None
        )
        if not args.trim_padding or kinds & LENGTH_DEPENDENT_ROPE or sums:
            return None
        # In other models, left padding shifts positions or changes a recurrent state.
        is_relative = bool(kinds) and uncached_layers(model) == set()
        # Every optimizer step starts at a multiple of this, also after a shorter step at an epoch's end.
        window = 1 if _mixes_rows(trainer) else gcd(args.steps_per_generation, args.gradient_accumulation_steps)
        compiled = args.torch_compile
        return cls(window, is_relative and not compiled, trainer.pad_to_multiple_of or 1, compiled, shared)

    def micro_batches(self, batches: Sequence[Batch]) -> list[Batch]:
        """Reorders and cuts a generation's micro-batches, longest rows first within each window."""
        return [
            self._cut(batch)
            for start in range(0, len(batches), self.window)
            for batch in self._ordered(batches[start : start + self.window])
        ]

    def per_token_logps(
        self,
        compute: Callable[..., Any],
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **inputs: Any,
    ) -> Any:
        """
        Wraps TRL's `_get_per_token_logps_and_entropies` (`compute`) for rows of shape `(N, P + C)` in micro-batches of
        `batch_size`. Returns log-probs of shape `(N, C)`, 0 in columns that were cut. The loss passes no `batch_size`,
        because its rows are cut already.
        """
        if batch_size is None or inputs.get("compute_entropy") or inputs.get("compute_aux_loss"):
            whole = partial(compute, batch_size=batch_size, **inputs)
            return self._computed(whole, model, input_ids, attention_mask, logits_to_keep)
        widths = [input_ids.shape[1] - logits_to_keep, logits_to_keep]
        parts = [*input_ids.split(widths, dim=1), *attention_mask.split(widths, dim=1)]
        names = ("prompt_ids", "completion_ids", "prompt_mask", "completion_mask")
        inputs = {name: value for name, value in inputs.items() if value is not None}
        rows = split_pixel_values_by_grid({**inputs, **dict(zip(names, parts, strict=True))})
        chunks, found = self._order(rows, batch_size).split(batch_size), []
        for chosen in chunks:
            batch = self._cut(unsplit_pixel_values_by_grid(_take(rows, chosen)))
            ids, mask, columns = _joined(batch, "ids"), _joined(batch, "mask"), batch["completion_ids"].shape[1]
            own = partial(compute, **{name: batch[name] for name in inputs})
            found.append(self._computed(own, model, ids, mask, columns)[0])
        logps = found[0].new_zeros(len(input_ids), logits_to_keep)
        for chosen, part in zip(chunks, found, strict=True):
            logps[chosen, : part.shape[1]] = part
        return logps, None, None

    def _computed(
        self, compute: Callable[..., Any], model: Any, ids: torch.Tensor, mask: torch.Tensor, num_columns: int
    ) -> Any:
        model = model if self.shared is None else self.shared.model(model, num_columns)
        return compute(model, ids, mask, num_columns)

    def _ordered(self, batches: Sequence[Batch]) -> list[Batch]:
        if len(batches) == 1:
            return list(batches)
        rows = _concatenated([split_pixel_values_by_grid(batch) for batch in batches])
        rows = _take(rows, self._order(rows, len(batches[0]["prompt_ids"])))
        ordered: list[Any] = split_tensor_dict(rows, len(batches))
        return [unsplit_pixel_values_by_grid(batch) for batch in ordered]

    def _order(self, rows: Batch, batch_size: int) -> torch.Tensor:
        """Returns an order with the longest rows first, so that a lack of memory shows at once."""
        lengths = _lengths(rows)
        orders = [np.argsort(np.negative(own), stable=True).tolist() for own in (lengths.answers, lengths.whole)]
        if self.shared is not None:
            orders.append(self.shared.order(lengths))

        def cost(order: list[int]) -> float:
            parts = [lengths.take(order[i : i + batch_size]) for i in range(0, len(order), batch_size)]
            if self.shared is not None:
                return sum(self.shared.plan(part)[0] for part in parts)
            return sum(len(part.prompts) * part.padded for part in parts)

        return torch.tensor(min(orders, key=cost))

    def _cut(self, batch: Batch) -> Batch:
        prompt = num_prompt = batch["prompt_ids"].shape[1]
        completion = self._width(batch["completion_mask"], MIN_COLUMNS)
        if self.cuts_prompts:
            prompt = self._width(batch["prompt_mask"].flip(1), 1)
        columns = dict.fromkeys(PROMPT, slice(num_prompt - prompt, None))
        columns |= dict.fromkeys(COMPLETION, slice(completion))
        columns |= dict.fromkeys(WHOLE, slice(num_prompt - prompt, num_prompt + completion))
        return {
            name: value[:, columns[name]] if name in columns and value is not None and value.ndim > 1 else value
            for name, value in batch.items()
        }

    def _width(self, mask: torch.Tensor, least: int) -> int:
        width = max(least, int(used(mask).amax()))
        if self.few_widths:
            width = 1 << (width - 1).bit_length()
        return min(mask.shape[1], -(-width // self.multiple) * self.multiple)


def padding_metrics(
    batches: Sequence[Batch], accelerator: Accelerator, trimming: Trimming | None = None
) -> dict[str, float]:
    """Returns metrics over the micro-batches of all processes. Must be called on every process."""
    sums = torch.zeros(4)
    for batch in batches:
        num_rows, width = batch["completion_ids"].shape
        shared = None if trimming is None or trimming.shared is None else trimming.shared.num_tokens(_lengths(batch))
        computed = num_rows * (batch["prompt_ids"].shape[1] + width) if shared is None else shared
        there = int(batch["prompt_mask"].sum() + batch["completion_mask"].sum())
        sums += torch.tensor([computed, there, num_rows * width, num_rows])
    computed, there, columns, rows = accelerator.gather(sums.to(accelerator.device)).view(-1, 4).sum(0).tolist()
    return {"darts/train/padding_ratio": computed / max(1, there), "darts/train/completion_width": columns / rows}


def _lengths(rows: Batch) -> Lengths:
    return Lengths.of(*(rows[name] for name in (*PROMPT, "completion_mask")))


def _concatenated(batches: Sequence[Batch]) -> Batch:
    def joined(values: list[Any]) -> Any:
        first = values[0]
        if isinstance(first, list):
            return [value for each in values for value in each]
        return first if first is None or first.ndim == 0 else torch.cat(values)

    return {name: joined([batch[name] for batch in batches]) for name in batches[0]}


def _take(rows: Mapping[str, Any], chosen: torch.Tensor) -> Batch:
    def taken(value: Any) -> Any:
        if isinstance(value, list):
            return [value[row] for row in chosen.tolist()]
        return value if value is None or value.ndim == 0 else value[chosen]

    return {name: taken(value) for name, value in rows.items()}


def _joined(batch: Batch, part: str) -> torch.Tensor:
    return torch.cat([batch[f"prompt_{part}"], batch[f"completion_{part}"]], dim=1)


def _mixes_rows(trainer: Any) -> bool:
    """Whether the loss of a row depends on the other rows of its micro-batch."""
    return (
        trainer.loss_type == "bnpo"
        or trainer.top_entropy_quantile < 1.0
        or trainer._entropy_bonus_enabled
        or trainer.aux_loss_enabled
    )


def _sums_padding(trainer: Any) -> bool:
    """Whether the loss depends on padding: VESPO sums the logs of clipped ratios over padding, where they are 1."""
    if trainer.loss_type != "vespo" or not (trainer.use_vllm and trainer.vllm_importance_sampling_correction):
        return False
    low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
    return (low is not None and low > 1) or (high is not None and high < 1)
