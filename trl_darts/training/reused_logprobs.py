"""
One forward pass less. To correct for the log-probs of vLLM, TRL computes those of the policy when it scores a batch,
and again when it trains on it. If the policy does not change in between, the second pass has the log-probs of the
first, and the correction can wait for it:

```
TRL     rollout, forward pass, correction, forward pass, loss, backward pass
ours    rollout,                           forward pass, correction, loss, backward pass
```

Invariants (`tests/training/test_reused_logprobs.py`): the gradient is TRL's up to rounding; TRL's metrics of the
correction are logged in the same step, over the same tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.logging import get_logger
from torch.nn.functional import pad

from ..errors import ConfigurationError
from ..telemetry.metrics import ratio_metrics
from ..trl_compat import replaced


logger = get_logger(__name__)

Batch = dict[str, Any]

OLD, SAMPLED, RATIO = "old_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio"
METRICS = (
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
)
# Methods with which a subclass may read the log-probs, or their correction, before the training pass.
READERS = ("_generate_and_score_completions", "compute_loss", "_compute_loss")

OF_OTHER_HEADS = ("classifier", "summary")  # rates in a config that causal language models don't use


@dataclass
class ReusedLogprobs:
    """Leaves the correction out when a batch is scored, and computes it in the training pass."""

    _corrected: list[Batch] = field(default_factory=list)  # micro-batches since the batch was scored

    @classmethod
    def of(cls, trainer: Any) -> "ReusedLogprobs | None":
        """
        Builds it for a trainer, `None` where `reuse_logprobs` is unset and its model or settings need TRL's pass.
        Raises [`ConfigurationError`] if it is `True` there.
        """
        if trainer.args.reuse_logprobs is False:
            return None
        unneeded, needed = _without_a_pass(trainer), _needs_the_pass(trainer)
        if unneeded is None and needed is None:
            return cls()
        if trainer.args.reuse_logprobs:
            raise ConfigurationError(
                f"`reuse_logprobs` (True) does not run with {unneeded or needed}. Leave it unset."
            )
        if unneeded is None:
            logger.warning(f"Log-probs are computed once more before the training pass, because of {needed}.")
        return None

    def score(self, trainer: Any, score: Callable[..., Batch], *args: Any, **kwargs: Any) -> Batch:
        """Wraps TRL's `_generate_and_score_completions` (`score`) during training."""
        compute = trainer._get_per_token_logps_and_entropies
        skipped: list[Any] = []

        def compute_others(model: Any, ids: torch.Tensor, mask: torch.Tensor, columns: int, **inputs: Any) -> Any:
            # TRL asks for the policy's before those of the reference model, and without entropies, unlike the check of
            # the servers' weights. Filler rows count in TRL's metrics, but not in the loss.
            if skipped or inputs.get("compute_entropy") or trainer._batch.fillers:
                return compute(model, ids, mask, columns, **inputs)
            skipped.append(model)
            return torch.zeros(len(ids), columns, device=ids.device), None, None

        with replaced(trainer, "_get_per_token_logps_and_entropies", compute_others):
            output = score(*args, **kwargs)
        self._corrected.clear()
        if skipped:
            del output[OLD], output[RATIO]
            logged = trainer._metrics["train"]
            for name in METRICS:
                logged[name].pop()
                if not logged[name]:  # TRL divides by the number of values
                    del logged[name]
        return output

    def loss(self, trainer: Any, compute_loss: Callable[..., Any], model: Any, inputs: Batch) -> Any:
        """Wraps TRL's `_compute_loss`, which asks for the log-probs before it reads the correction."""
        if RATIO in inputs:
            return compute_loss(model, inputs)
        compute = trainer._get_per_token_logps_and_entropies

        def compute_and_correct(*args: Any, **kwargs: Any) -> Any:
            found = compute(*args, **kwargs)
            self._correct(trainer, inputs, found[0].detach())
            return found

        with replaced(trainer, "_get_per_token_logps_and_entropies", compute_and_correct):
            return compute_loss(model, inputs)

    def _correct(self, trainer: Any, inputs: Batch, logps: torch.Tensor) -> None:
        """Adds the correction. TRL takes the detached log-probs of the pass for the missing `old_per_token_logps`."""
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        inputs[RATIO] = importance_ratios(trainer, logps, inputs[SAMPLED], mask)
        self._corrected.append({"completion_mask": mask, OLD: logps, SAMPLED: inputs[SAMPLED], RATIO: inputs[RATIO]})
        if len(self._corrected) == trainer._num_micro_batches:
            batch = {name: _joined([own[name] for own in self._corrected]) for name in self._corrected[0]}
            trainer._log_all(correction_metrics(trainer, batch))
            if trainer._batches is not None:
                trainer._log_all(ratio_metrics(batch, trainer.accelerator))


def importance_ratios(
    trainer: Any, logps: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:  # (B, T), or (B, 1) of whole rows
    """Returns the ratios that TRL's `_generate_and_score_completions` computes inline."""
    logs = ((logps - sampled) * mask).nan_to_num(nan=0.0)
    kind, effect = trainer.vllm_importance_sampling_mode.split("_")
    ratios = (logs.sum(dim=-1, keepdim=True) if kind == "sequence" else logs).exp()
    low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
    if effect == "truncate":
        return ratios.clamp(min=low, max=high)
    outside = torch.zeros_like(ratios, dtype=torch.bool)
    if low is not None:
        outside |= ratios < low
    if high is not None:
        outside |= ratios > high
    return ratios.masked_fill(outside, 0.0)


def correction_metrics(trainer: Any, batch: Batch) -> dict[str, float]:
    """Returns TRL's metrics of the correction: means of the processes' means. Must be called on every process."""
    mask, ratios = batch["completion_mask"].bool(), batch[RATIO]
    apart = (batch[OLD] - batch[SAMPLED]).abs()
    apart = apart[mask & ~apart.isnan()]
    ratios = ratios.flatten() if trainer.vllm_importance_sampling_mode.startswith("sequence") else ratios[mask]
    apart, ratios = (own if own.numel() else own.new_zeros(1) for own in (apart, ratios))
    own = torch.stack([apart.mean(), apart.max(), ratios.min(), ratios.mean(), ratios.max()])
    all_processes = trainer.accelerator.gather(own).view(-1, len(METRICS)).unbind(dim=1)
    reduce: tuple[Any, ...] = (torch.mean, torch.max, torch.min, torch.mean, torch.max)
    return {name: by(own).item() for name, by, own in zip(METRICS, reduce, all_processes, strict=True)}


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Joins rows of micro-batches that were cut to different widths."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, width - part.shape[1])) for part in parts])


def _without_a_pass(trainer: Any) -> str | None:
    """Returns with what TRL has no pass that could be left out, or computes it for another policy."""
    args = trainer.args
    if not trainer.use_vllm:
        return "`use_vllm` (False), where no log-probs are corrected"
    if not trainer.vllm_importance_sampling_correction:
        return "`vllm_importance_sampling_correction` (False)"
    if args.stream_logprobs:
        return "`stream_logprobs` (True), which computes them during the rollout"
    if args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations):  # TRL's condition
        return (
            f"`gradient_accumulation_steps` ({args.gradient_accumulation_steps}), which is no multiple of "
            f"`steps_per_generation` ({args.steps_per_generation}) × `num_iterations` ({args.num_iterations}): "
            "a batch is trained on by several versions of the policy"
        )
    return None


def _needs_the_pass(trainer: Any) -> str | None:
    """Returns why the training pass has other log-probs, or others are read, as it reads after "because of"."""
    args = trainer.args
    if args.mask_stale_after is not None:
        return f"`mask_stale_after` ({args.mask_stale_after}), whose tokens count in TRL's metrics and not in the loss"
    if args.neftune_noise_alpha:
        return f"`neftune_noise_alpha` ({args.neftune_noise_alpha}), which differs from pass to pass"
    if (name := _random_part(trainer.model)) is not None:
        return f"{name} of the model, which differs from pass to pass"
    for name in READERS:
        owner = next(cls for cls in type(trainer).__mro__ if name in vars(cls))
        if owner.__module__.split(".")[0] not in ("trl", "trl_darts", "transformers"):
            return f"{owner.__name__}.{name}, which may read them"
    return None


def _random_part(model: Any) -> str | None:
    """Returns the name of a dropout rate or of noise that is not 0. Some models read a rate from their config."""
    owners: dict[str, Mapping[str, Any]] = {"config": vars(model.config.get_text_config())}
    for path, module in model.named_modules():
        is_dropout = isinstance(module, torch.nn.modules.dropout._DropoutNd)
        owners[path] = {"dropout": module.p} if is_dropout else vars(module)
    for path, values in owners.items():
        for name, value in values.items():
            is_rate = ("drop" in name or "jitter" in name) and not name.startswith(OF_OTHER_HEADS)
            if is_rate and isinstance(value, float) and value > 0:
                return f"`{path}.{name}` ({value})"
    return None
