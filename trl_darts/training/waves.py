"""
Training while the tail decodes (`stream_training`): the groups of a batch get their passes in waves, as they finish,
and the batch has one optimizer step.

```
rollout   ├ group 3 ┤├ group 0 ┤        ├ group 2 ┤                  ├ group 1 ┤
training             ├ wave 1: 3, 0 ─ passes ┤                        ├ wave 2: 2, 1 ─ passes ┤ optimizer step
```

The gradient is that of the whole batch up to rounding: weights do not change between waves, and advantages are those
of a group. Losses that are divided by the batch's tokens, whose number is only known at the end, are divided by an
estimate, and the gradient is corrected before it is clipped.
"""

import math
from typing import Any, Self

import torch

from ..errors import ConfigurationError


OF_TOKENS = ("dapo", "cispo", "vespo")  # losses that are divided by the tokens of the batch
SUPPORTED = (*OF_TOKENS, "grpo", "dr_grpo", "sapo", "luspo")


class Waves:
    """
    Args:
        num_micro_batches (`int`):
            Micro-batches of a wave, the fewest that are whole groups.
        num_waves (`int`):
            Waves of a batch.
        counts_tokens (`bool`):
            Whether the loss is divided by the batch's tokens.
    """

    def __init__(self, num_micro_batches: int, num_waves: int, counts_tokens: bool) -> None:
        self.num_micro_batches = num_micro_batches
        self.num_waves = num_waves
        self._counts_tokens = counts_tokens
        self._num_tokens = self._estimate = 0.0
        self._loss = torch.tensor(0.0)  # of the batch's micro-batches so far, as returned

    @classmethod
    def of(cls, trainer: Any) -> Self | None:
        """
        Returns the waves of a trainer, `None` without `stream_training`. Raises for what waves would change. The
        config has checked its own fields.
        """
        args = trainer.args
        if not args.stream_training:
            return None
        rows = args.per_device_train_batch_size * trainer.accelerator.num_processes
        size = args.num_generations // math.gcd(rows, args.num_generations)
        if args.steps_per_generation == size:
            raise ConfigurationError(
                f"`stream_training` (True) needs batches of several waves, and one wave has {size} micro-batches of "
                f"{rows} rows, because it has whole groups of `num_generations` ({args.num_generations}). Raise "
                "`gradient_accumulation_steps`, or set it to `False`."
            )
        counts_tokens = args.loss_type in OF_TOKENS
        if counts_tokens and (cause := _beside_the_loss(trainer)) is not None:
            raise ConfigurationError(
                f"`stream_training` (True) does not run with `loss_type` ({args.loss_type!r}) and {cause}. Set "
                "`loss_type='grpo'` or 'dr_grpo', or set it to `False`."
            )
        return cls(size, args.steps_per_generation // size, counts_tokens)

    def is_first(self, micro_step: int) -> bool:
        """Whether a batch begins with this micro-step."""
        return micro_step % (self.num_micro_batches * self.num_waves) == 0

    def is_last(self, micro_step: int) -> bool:
        """Whether the wave of this micro-step is its batch's last."""
        return self.is_first(micro_step + self.num_micro_batches)

    def count(self, output: dict[str, Any], is_first: bool) -> None:
        """Counts the tokens of a wave that was scored. Every wave is divided by the same estimate of the batch's."""
        num_tokens = output["num_items_in_batch"]
        if is_first:
            self._num_tokens, self._loss = 0.0, torch.tensor(0.0)
            self._estimate = max(1.0, float(num_tokens)) * self.num_waves
        self._num_tokens += float(num_tokens)
        output["num_items_in_batch"] = torch.full_like(num_tokens, self._estimate, dtype=torch.float32)

    def finish(self, model: torch.nn.Module, loss: torch.Tensor, ends_step: bool) -> torch.Tensor:
        """
        Corrects the gradient after a batch's last pass, if the loss is divided by tokens. Returns the micro-batch's
        loss for the log, whose sum over the batch is then right too.
        """
        if not self._counts_tokens:
            return loss
        before, self._loss = self._loss.to(loss.device), self._loss.to(loss.device) + loss
        if not ends_step:
            return loss
        factor = self._estimate / max(1.0, self._num_tokens)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return factor * self._loss - before


def _beside_the_loss(trainer: Any) -> str | None:
    """Returns what is not divided by the batch's tokens, or hides the gradient, and could not be corrected."""
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed, which keeps gradients to itself"
    if trainer.aux_loss_enabled:
        return "the auxiliary loss of a mixture of experts, which is not divided by tokens"
    if getattr(trainer, "_entropy_bonus_enabled", False):
        return "an entropy bonus, which is not divided by tokens"
    return None
