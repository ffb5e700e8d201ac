"""Records the lengths that TRL's own `GRPOTrainer` sees, so that a run can be looked at before anything is changed."""

import math
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerControl, TrainerState

from .callbacks import RunLogCallback
from .engines.batch import PromptBatch
from .errors import ConfigurationError
from .scheduling import FinishReason, GroupSummary
from .telemetry.traces import write_trace
from .trl_compat import check_hook


Row = tuple[int, int, int, bool]  # key and tokens of the prompt, tokens of the completion, whether it was cut off


def record_lengths(trainer: Any) -> None:
    """
    Records the length of each completion of TRL's [`~trl.GRPOTrainer`], and the seconds of generating and scoring.

    The training stays the same. Files are written to `output_dir/rollouts`, in the form that `trl-darts simulate
    --trace` and `trl-darts report` read, and that `length_history` of a later run takes. TRL does not tell when a
    completion ended, so there are no times of single completions.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            The trainer, before `train()`. With several processes, call this on each.

    Raises:
        [`ConfigurationError`]: If it is a `DARTSGRPOTrainer`, which records more by itself.

    Example:

    ```python
    from trl_darts import record_lengths

    record_lengths(trainer)
    trainer.train()
    ```
    """
    if hasattr(trainer.args, "save_rollout_trace"):
        raise ConfigurationError(
            f"`trainer` ({type(trainer).__name__}) must be TRL's `GRPOTrainer`. Set `save_rollout_trace=True` "
            "instead, which records the times of each candidate too."
        )
    check_hook(type(trainer), "_generate", ("prompts",))
    check_hook(type(trainer), "_generate_and_score_completions", ("inputs",))
    recorder = LengthRecorder(trainer)
    trainer._generate = recorder.generate
    trainer._generate_and_score_completions = recorder.generate_and_score
    trainer.add_callback(recorder)


class LengthRecorder(RunLogCallback):
    """Writes a trace of each training rollout, and the run's log with their mean seconds."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._generate, self._generate_and_score = trainer._generate, trainer._generate_and_score_completions
        # Seconds of the rollouts since the last log entry, and of scoring them.
        self._seconds: dict[str, list[float]] = {"darts/rollout/seconds": [], "darts/score/seconds": []}

    def generate_and_score(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's `_generate_and_score_completions`."""
        begin = time.perf_counter()
        output = self._generate_and_score(*args, **kwargs)
        if self._trainer.model.training:
            generating = self._seconds["darts/rollout/seconds"][-1]
            self._seconds["darts/score/seconds"].append(time.perf_counter() - begin - generating)
        return output

    def generate(self, prompts: list[Any], *args: Any, **kwargs: Any) -> Any:
        """TRL's `_generate`, on every process at once."""
        trainer, begin = self._trainer, time.perf_counter()
        output = self._generate(prompts, *args, **kwargs)
        if trainer.model.training:
            self._seconds["darts/rollout/seconds"].append(time.perf_counter() - begin)
            rows = gather_object(self._rows(output[0], output[1], output[2], output[6]))
            if trainer.is_world_process_zero():
                micro_step = trainer._step % trainer.args.gradient_accumulation_steps
                groups = _groups(rows, trainer.num_generations)
                write_trace(Path(trainer.args.output_dir), trainer.state.global_step, micro_step, groups)
        return output

    def _rows(
        self, prompt_ids: list[list[int]], completion_ids: list[list[int]], sampled: Any, images: Any
    ) -> list[Row]:
        """Returns this process's rows. `sampled` is the mask of tokens that are not a tool's, if there are tools."""
        trainer = self._trainer
        keys = PromptBatch.alone(prompt_ids, 1, None if trainer.tools else images).keys
        lengths = map(len, completion_ids) if sampled is None else map(sum, sampled)
        ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}  # as in TRL's `completions/clipped_ratio`
        cut_off = [ids[-1] not in ends for ids in completion_ids]
        return list(zip(keys, map(len, prompt_ids), lengths, cut_off, strict=True))

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            logs = {**logs, **{name: fmean(seconds) for name, seconds in self._seconds.items() if seconds}}
            self._seconds = {name: [] for name in self._seconds}
        super().on_log(args, state, control, logs=logs, **kwargs)


def _groups(rows: list[Row], num_generations: int) -> list[GroupSummary]:
    """Returns the groups of a batch from the rows of all processes, in the order of the processes."""
    unknown = [(math.nan, math.nan)] * num_generations
    groups: list[GroupSummary] = []
    for first in range(0, len(rows), num_generations):
        keys, num_prompt_tokens, lengths, cut_off = zip(*rows[first : first + num_generations], strict=True)
        reasons = [str(FinishReason.LENGTH if cut else FinishReason.STOP) for cut in cut_off]
        selected = list(range(len(lengths)))
        group = GroupSummary(len(groups), keys[0], list(lengths), reasons, selected, num_prompt_tokens[0], unknown)
        groups.append(group)
    return groups
