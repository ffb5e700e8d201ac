"""The arithmetic of TRL's GRPO batches: processes, rows, prompts and optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigurationError


@dataclass(frozen=True)
class BatchPlan:
    """
    How a training is cut into generations and optimizer steps.

    Args:
        num_processes (`int`):
            Processes that train.
        per_device_batch_size (`int`):
            Rows of one forward and backward pass on one process.
        gradient_accumulation_steps (`int`):
            Passes per optimizer step.
        steps_per_generation (`int`):
            Passes that are fed by one generation.
        num_iterations (`int`):
            Times that a generation is trained on.
        num_generations (`int`):
            Rows per prompt.
    """

    num_processes: int
    per_device_batch_size: int
    gradient_accumulation_steps: int
    steps_per_generation: int
    num_iterations: int
    num_generations: int

    @classmethod
    def of(cls, values: Mapping[str, Any], num_processes: int) -> BatchPlan:
        """
        The plan of parsed arguments, by TRL's rules.

        Args:
            values (`Mapping`):
                Values of `GRPOConfig`'s fields by name.
            num_processes (`int`):
                Processes that train.

        Raises:
            [`ConfigurationError`]: If the batches don't divide, which TRL refuses too.
        """
        least = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "num_iterations": 1}
        for name, bound in {**least, "num_generations": 2}.items():
            if values[name] is None or values[name] < bound:
                raise ConfigurationError(f"`{name}` ({values[name]}) must be at least {bound}. Raise it.")
        plan = cls(
            num_processes,
            values["per_device_train_batch_size"],
            values["gradient_accumulation_steps"],
            _steps_per_generation(values, num_processes),
            values["num_iterations"],
            values["num_generations"],
        )
        if plan.generation_batch_size % plan.num_generations:
            raise ConfigurationError(
                f"The generation batch ({plan.generation_batch_size} rows: {plan.per_device_batch_size} per device × "
                f"{num_processes} processes × {plan.steps_per_generation} passes) must be divisible by "
                f"`num_generations` ({plan.num_generations}): a prompt's rows are in one batch. Change "
                "`per_device_train_batch_size`, `gradient_accumulation_steps` or the number of processes."
            )
        return plan

    @property
    def rows_per_pass(self) -> int:
        """Rows of one pass on all processes."""
        return self.per_device_batch_size * self.num_processes

    @property
    def generation_batch_size(self) -> int:
        """Rows of one generation."""
        return self.rows_per_pass * self.steps_per_generation

    @property
    def prompts_per_generation(self) -> int:
        """Prompts of one generation."""
        return self.generation_batch_size // self.num_generations

    @property
    def prompts_per_step(self) -> float:
        """Prompts of one optimizer step; no whole number where a step ends within a prompt's rows."""
        return self.rows_per_pass * self.gradient_accumulation_steps / self.num_generations

    @property
    def steps_of_generation(self) -> float:
        """Optimizer steps that one generation is good for."""
        return self.steps_per_generation * self.num_iterations / self.gradient_accumulation_steps

    def steps_per_epoch(self, num_prompts: int) -> int:
        """
        Optimizer steps of one pass through the data. Prompts that do not fill a last generation are left out.

        Args:
            num_prompts (`int`):
                Size of the data set.

        Raises:
            [`ConfigurationError`]: If they do not fill one generation.
        """
        num_full = num_prompts // self.prompts_per_generation
        if num_full < 1:
            raise ConfigurationError(
                f"`num_prompts` ({num_prompts}) must be at least the prompts of one generation "
                f"({self.prompts_per_generation}): TRL leaves out what does not fill one, and would train on nothing. "
                "Take a larger data set, or a smaller batch."
            )
        passes = num_full * self.steps_per_generation * self.num_iterations
        return -(-passes // self.gradient_accumulation_steps)

    def num_steps(self, num_prompts: int | None, num_train_epochs: float, max_steps: int) -> int | None:
        """
        Optimizer steps of the whole training; `None` if that is not known.

        Args:
            num_prompts (`int`, *optional*):
                Size of the data set.
            num_train_epochs (`float`):
                Passes through the data.
            max_steps (`int`):
                The number of steps, if it is positive.
        """
        if max_steps > 0:
            return max_steps
        return None if num_prompts is None else math.ceil(num_train_epochs * self.steps_per_epoch(num_prompts))


def _steps_per_generation(values: Mapping[str, Any], num_processes: int) -> int:
    steps, batch_size = values["steps_per_generation"], values["generation_batch_size"]
    if steps is not None and batch_size is not None:
        raise ConfigurationError(
            f"`generation_batch_size` ({batch_size}) and `steps_per_generation` ({steps}) must not be given both: one "
            "follows from the other. Leave one out."
        )
    if batch_size is None:
        steps = values["gradient_accumulation_steps"] if steps is None else steps
        if steps < 1:
            raise ConfigurationError(f"`steps_per_generation` ({steps}) must be at least 1.")
        return int(steps)
    rows = values["per_device_train_batch_size"] * num_processes
    if batch_size < 1 or batch_size % rows:
        raise ConfigurationError(
            f"`generation_batch_size` ({batch_size}) must be a multiple of `per_device_train_batch_size` × processes "
            f"({rows}). Change one of them."
        )
    return int(batch_size // rows)
