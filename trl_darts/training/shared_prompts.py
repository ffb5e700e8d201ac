"""
A group as one row. TRL passes each row with its own copy of the prompt through the model. Here, siblings follow each
other behind one copy:

```
TRL     p p p a a a a      ours     p p p a a a a b b c c c
        p p p b b . .
        p p p c c c .
```

A mask hides siblings from each other, and positions restart behind the prompt. The prompt's last token, from which
each answer's first token is predicted, stands in front of each answer instead. An answer's last token predicts
nothing, and is left out.

Invariants (`tests/training/test_shared_prompts.py`): each token sees what it sees in its own row, at the same
distances; log-probs are returned where TRL expects them; the number of forward passes is TRL's.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from numpy.typing import NDArray

from ..errors import ConfigurationError
from ..trl_compat import has_fused_lm_head
from .positions import LENGTH_DEPENDENT_ROPE, rope_kinds, uncached_layers


logger = get_logger(__name__)

MASKED = ("sdpa", "eager")  # attention implementations that take a mask of any form
MAX_LENGTH = 8_192  # of a row with several answers: its mask has as many rows as columns, 128 MiB in 16 bits
MIN_GAIN = 0.95  # of the costs, below which a shared prompt pays for the mask
# The probe's mean difference of a log-prob. A wrong mask or position changes them by more than rounding does.
TOLERANCE, TOLERANCE_16_BITS = 1e-3, 0.2
PROBE = (7, (5, 3, 4))  # tokens of a prompt and of its answers

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Lengths:
    """Tokens of the prompts and of the answers of some rows, and which of them have the same prompt."""

    prompts: list[int]
    answers: list[int]
    groups: list[int]

    @classmethod
    def of(cls, prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, answer_mask: torch.Tensor) -> "Lengths":
        groups = torch.unique(prompt_ids.masked_fill(prompt_mask == 0, -1), dim=0, return_inverse=True)[1]
        return cls(*torch.stack([used(prompt_mask.flip(1)), used(answer_mask), groups]).tolist())

    @property
    def whole(self) -> list[int]:
        """Tokens of each row."""
        return [prompt + answer for prompt, answer in zip(self.prompts, self.answers, strict=True)]

    @property
    def padded(self) -> int:
        """Width of all rows together: prompts are padded on the left, and answers on the right."""
        return max(self.prompts) + max(self.answers)

    def shared(self, rows: Sequence[int]) -> int:
        """Tokens of a new row with the answers of these rows, see [`Layout`]."""
        return self.prompts[rows[0]] - 1 + sum(self.answers[row] for row in rows)

    def take(self, rows: Sequence[int]) -> "Lengths":
        return Lengths(*([own[row] for row in rows] for own in (self.prompts, self.answers, self.groups)))


@dataclass(frozen=True)
class SharedPrompts:
    """
    Has siblings share their prompt in forward and backward passes.

    Args:
        attention_cost (`float`):
            Cost of a pair of tokens in attention, in the cost of a token elsewhere.
        window (`int`, *optional*):
            Tokens that the model's sliding windows see. Longer rows are passed on as they are.
        is_eager (`bool`, *optional*, defaults to `False`):
            Whether the model adds masks to its scores.
        is_asked (`bool`, *optional*, defaults to `False`):
            Whether to raise an error instead of a warning where a model computes something else with shared prompts.
        is_mixed (`bool`, *optional*, defaults to `False`):
            Whether the model computes in 16 bits over weights of 32.
    """

    attention_cost: float
    window: int | None = None
    is_eager: bool = False
    is_asked: bool = False
    is_mixed: bool = False
    _fits: dict[int, bool] = field(default_factory=dict)  # by the model's identity

    @classmethod
    def of(cls, trainer: Any, cause: str | None = None) -> "SharedPrompts | None":
        """
        Builds it for a trainer, `None` where `share_prompts` is unset and its model or settings can't share, or there
        is another `cause`. Raises [`ConfigurationError`] if it is `True` there.
        """
        args = trainer.args
        if args.share_prompts is False or (args.share_prompts is None and not args.trim_padding):
            return None
        config = trainer.accelerator.unwrap_model(trainer.model).config.get_text_config()
        cause = cause or _cause(trainer, config)
        if cause is None:
            kinds = getattr(config, "layer_types", None)
            slides = "sliding_attention" in kinds if kinds else True
            window = getattr(config, "sliding_window", None) if slides else None
            is_eager = config._attn_implementation == "eager"
            # A layer has 12·H² multiplications for a token, and 2·H for a pair of tokens, which take twice as long.
            is_mixed = trainer.accelerator.mixed_precision != "no"
            return cls(1 / (3 * config.hidden_size), window, is_eager, bool(args.share_prompts), is_mixed)
        if args.share_prompts:
            raise ConfigurationError(f"`share_prompts` (True) does not run with {cause}. Leave it unset.")
        logger.warning(f"Each row has its own copy of the prompt (`share_prompts`), because of {cause}.")
        return None

    # Which rows share a prompt

    def order(self, lengths: Lengths) -> list[int]:
        """Returns an order in which siblings are neighbours, with the longest groups and rows first."""
        totals: dict[int, int] = defaultdict(int)
        for group, answer in zip(lengths.groups, lengths.answers, strict=True):
            totals[group] += answer
        rows = range(len(lengths.groups))
        return sorted(rows, key=lambda row: (-totals[lengths.groups[row]], lengths.groups[row], -lengths.answers[row]))

    def plan(self, lengths: Lengths) -> tuple[float, list[list[int]] | None]:
        """
        Chooses how many siblings share a row: many save prompts, and few save attention between rows that don't see
        each other. Returns the cost, and the rows of each new row, `None` if a row each costs least.
        """
        cost, best = self._cost(len(lengths.prompts), lengths.padded), None
        fits = self.window is None or max(lengths.whole) <= self.window
        if min(lengths.prompts) < 1 or not any(lengths.answers) or not fits:
            return cost, None
        members: dict[int, list[int]] = defaultdict(list)
        for row in sorted(range(len(lengths.groups)), key=lambda row: -lengths.answers[row]):
            if lengths.answers[row]:
                members[lengths.groups[row]].append(row)
        size, bound = max(map(len, members.values())), MIN_GAIN * cost
        while size > 1:
            rows = [part for own in members.values() for part in _dealt(own, -(-len(own) // size), lengths.answers)]
            width = max(map(lengths.shared, rows))
            if width <= MAX_LENGTH and (own_cost := self._cost(len(rows), width)) < bound:
                cost, best, bound = own_cost, rows, own_cost
            size //= 2
        return cost, best

    def num_tokens(self, lengths: Lengths) -> int | None:
        """Returns the number of tokens that are computed, padding included, `None` if each row is passed on alone."""
        rows = self.plan(lengths)[1]
        return None if rows is None else len(rows) * max(map(lengths.shared, rows))

    def _cost(self, num_rows: int, width: int) -> float:
        return num_rows * (width + self.attention_cost * width**2)

    # The forward pass

    def model(self, model: Any, num_columns: int) -> Callable[..., Any]:
        """Returns a model for rows of a prompt and `num_columns` of an answer, which TRL calls instead of `model`."""

        def forward(*, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: Any, **others: Any) -> Any:
            fits = self._probe(model)
            if fits and others.keys() == {"fused_lm_head"}:
                prompt_ids, prompt_mask = (rows[:, :-num_columns] for rows in (input_ids, attention_mask))
                lengths = Lengths.of(prompt_ids, prompt_mask, attention_mask[:, -num_columns:])
                rows = self.plan(lengths)[1]
                if rows is not None:
                    return self._forward(model, input_ids, attention_mask, labels, num_columns, lengths, rows)
            return model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **others)

        return forward

    def _forward(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor,
        num_columns: int,
        lengths: Lengths,
        rows: Sequence[Sequence[int]],
    ) -> Any:
        layout = Layout.of(lengths, rows, input_ids.shape[1], num_columns)
        device = input_ids.device
        taken, labelled, segments, positions = (
            torch.as_tensor(own, device=device)
            for own in (layout.tokens, layout.labels, layout.segments, layout.positions)
        )
        is_key = attention_mask.flatten()[taken].bool() & (segments >= 0)
        mask = visible(segments, is_key)
        if self.is_eager:
            dtype = next(model.parameters()).dtype
            mask = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill(~mask, torch.finfo(dtype).min)
        outputs = model(
            input_ids=input_ids.flatten()[taken],
            attention_mask=mask,
            position_ids=positions,
            shift_labels=labels.flatten()[labelled].masked_fill(labelled == 0, -100),
            fused_lm_head=True,
        )
        sources, targets = (torch.as_tensor(own, device=device) for own in (layout.sources, layout.targets))
        shape = (len(input_ids), num_columns)

        def in_rows(values: torch.Tensor | None) -> torch.Tensor | None:
            if values is None:
                return None
            return values.new_zeros(shape[0] * shape[1]).scatter(0, targets, values.flatten()[sources]).view(shape)

        return SimpleNamespace(log_probs=in_rows(outputs.log_probs), entropy=in_rows(outputs.entropy), aux_loss=None)

    def _probe(self, model: Any) -> bool:
        """Whether a model computes the same with shared prompts. Tried once, with a few tokens, on every process."""
        if id(model) not in self._fits:
            difference = self._differs(model)
            self._fits[id(model)] = difference is None
            if difference is not None:
                message = f"{type(model).__name__} computes something else if prompts are shared ({difference})"
                if self.is_asked:
                    raise ConfigurationError(f"`share_prompts` (True): {message}. Leave it unset.")
                logger.warning(f"{message}, so each row has its own copy (`share_prompts`).")
        return self._fits[id(model)]

    def _differs(self, model: Any) -> str | None:
        """Returns how a forward pass with shared prompts differs from one without, `None` if it does not."""
        parameter = next(model.parameters())
        prompt, answers = PROBE
        width = max(answers)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, 32, (len(answers), prompt + width), generator=generator)  # any vocabulary has them
        ids[:, :prompt] = ids[0, :prompt]
        mask = torch.ones_like(ids)
        for row, answer in enumerate(answers):
            mask[row, prompt + answer :] = 0
        ids, mask = ids.to(parameter.device), mask.to(parameter.device)
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :prompt] = -100
        lengths = Lengths([prompt] * len(answers), list(answers), [0] * len(answers))
        modes = [(module, module.training) for module in model.modules()]
        try:
            model.eval()  # no dropout
            with torch.no_grad():
                alone = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs
                rows = [list(range(len(answers)))]
                shared = self._forward(model, ids, mask, labels, width, lengths, rows).log_probs
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            for module, training in modes:
                module.training = training
        num_tokens = sum(answers)
        apart = (alone[:, -width:].float() - shared.float()).abs().sum().item() / num_tokens
        is_exact = parameter.dtype.itemsize >= 4 and not self.is_mixed
        return None if apart <= (TOLERANCE if is_exact else TOLERANCE_16_BITS) else f"log-probs differ by {apart:.2g}"


@dataclass(frozen=True)
class Layout:
    """Where the tokens of new rows of shape `(R, L)` come from, and where their log-probs go. 0 is for padding."""

    tokens: Integers  # (R, L), places in the flattened old rows
    labels: Integers  # (R, L), places of the next tokens
    segments: Integers  # (R, L), 0 of the prompt, then 1, 2, … of the answers, -1 of padding
    positions: Integers  # (R, L)
    sources: Integers  # (T,), places of log-probs in the flattened new rows
    targets: Integers  # (T,), places in the flattened columns of the answers

    @classmethod
    def of(cls, lengths: Lengths, rows: Sequence[Sequence[int]], width: int, num_columns: int) -> "Layout":
        start = width - num_columns  # of the answers
        longest = max(map(lengths.shared, rows))
        tokens, labels, segments, positions = (np.zeros((len(rows), longest), np.int64) for _ in range(4))
        segments -= 1
        sources, targets = [], []
        for place, own in enumerate(rows):
            prompt = lengths.prompts[own[0]] - 1  # without its last token
            tokens[place, :prompt] = own[0] * width + start - prompt - 1 + np.arange(prompt)
            positions[place, :prompt], segments[place, :prompt] = np.arange(prompt), 0
            end = prompt
            for number, row in enumerate(own, start=1):
                steps = np.arange(lengths.answers[row])
                part = slice(end, end + len(steps))
                tokens[place, part] = row * width + start - 1 + steps
                labels[place, part] = row * width + start + steps
                positions[place, part], segments[place, part] = prompt + steps, number
                sources.append(place * longest + end + steps)
                targets.append(row * num_columns + steps)
                end += len(steps)
        return cls(tokens, labels, segments, positions, np.concatenate(sources), np.concatenate(targets))


def used(mask: torch.Tensor) -> torch.Tensor:
    """Returns the number of columns of each row up to the last one in its mask."""
    return (mask.bool() * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(1)


def visible(segments: torch.Tensor, is_key: torch.Tensor) -> torch.Tensor:
    """
    Returns which tokens see which, of shape `(R, 1, L, L)`: the prompt and their own answer, up to themselves. Padding
    sees itself, because attention over nothing is not a number.
    """
    length = segments.shape[1]
    shares = (segments[:, None, :] == 0) | (segments[:, None, :] == segments[:, :, None])
    earlier = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=segments.device)
    return ((shares & earlier & is_key[:, None, :]) | itself)[:, None]


def _dealt(rows: Sequence[int], num_parts: int, answers: Sequence[int]) -> list[list[int]]:
    """Deals rows, longest first, to parts of about equal length."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    sums = [0] * num_parts
    for row in rows:
        part = sums.index(min(sums))
        parts[part].append(row)
        sums[part] += answers[row]
    return parts


def _cause(trainer: Any, config: Any) -> str | None:
    """Returns why a trainer's rows can't share prompts, as it reads after "because of"."""
    args, kinds = trainer.args, rope_kinds(config)
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not args.trim_padding:
        return "`trim_padding` (False)"
    if not has_fused_lm_head():
        return "the installed TRL, older than 1.15"
    if args.torch_compile:
        return "`torch_compile` (True), which would compile each length of a row"
    if trainer._is_vlm:
        return "images yet"
    if trainer._dist.is_zero3:
        return "ZeRO-3, which fetches parameters in the order of the passes before"
    if trainer.aux_loss_enabled:
        return "the router's auxiliary loss, which counts each prompt's tokens once per row"
    if (own := config._attn_implementation) not in MASKED:
        return f"`attn_implementation` ({own!r}), which takes no mask between answers: 'sdpa' does"
    if not kinds or kinds & LENGTH_DEPENDENT_ROPE or uncached_layers(model) != set():
        return f"{type(model).__name__}, whose layers or positions depend on a row's other tokens"
    return None
