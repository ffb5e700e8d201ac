"""
`RolloutSettings`: the fields that `DARTSGRPOConfig` adds to TRL's, each with its help and its check.

Neither torch nor TRL is imported, which takes seconds: `fields.py` checks the values of a command line with this
before they are. TRL's own fields are read where a check needs them.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .engines.sampling import not_carried
from .errors import ConfigurationError
from .policy import LatencyCurve
from .scheduling import ScheduleSettings
from .scheduling.policies import check_choice
from .scheduling.setting import check_types, setting
from .server_fields import ServerFields


# TRL compares these strings where it computes, without a list of them; other values end a training in its first step.
TRL_CHOICES = {
    "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "scale_rewards": ("group", "batch", "none"),
}
TRL_LEAST = {
    **dict.fromkeys(("learning_rate", "epsilon", "epsilon_high"), 0),
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps"), 1),
    **dict.fromkeys(("steps_per_generation", "num_iterations"), 1),
}
SCALED = {True: "group", False: "none"}  # of `scale_rewards`: older values, which TRL replaces
# The same, of what only vLLM reads.
TRL_VLLM_CHOICES = {
    "vllm_mode": ("server", "colocate"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
# TRL hands these on as they are, and the engines of vLLM and transformers refuse what is out of bounds.
SAMPLING_RULES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: 0 < value < math.inf, "positive and finite: log-probs are of logits divided by it"),
    "top_p": (lambda value: 0 < value <= 1, "greater than 0 and at most 1, which leaves all tokens in"),
    "min_p": (lambda value: 0 <= value <= 1, "between 0 and 1"),
    "repetition_penalty": (lambda value: 0 < value < math.inf, "positive and finite, and 1 is none"),
}
VESPO_SAMPLING_MODES = ("token_truncate", "token_mask")


@dataclass
class RolloutSettings(ServerFields, ScheduleSettings):
    """
    Those of the schedule and of servers are inherited. Combinations that depend on the trainer are checked when it is
    built.
    """

    # The budget
    latency_curve: str | None = setting(
        None,
        "Path of a JSON file with the engine's latency per token, as `trl-darts profile` writes it. Gives the cost of "
        "a candidate where `redundancy_cost_weight` is set. Read when the trainer is built.",
    )

    # History
    length_history: str | None = setting(
        None,
        "What an earlier run has learned of response lengths, for the budget from the first step on: a checkpoint or "
        "its `darts_lengths.npz`, or the `output_dir` of a run with `save_rollout_trace`. Of the same model and "
        "tokenizer. A resumed training takes its checkpoint's lengths instead.",
    )

    # Streaming: what the trainer computes while vLLM servers still write the last long answers
    stream_logprobs: bool = setting(
        False,
        "Whether log-probs of the policy, and of the reference model where `beta` is not zero, are computed as tokens "
        "arrive, instead of all of them after the rollout. Only with `vllm_mode='server'`, and with text.",
    )
    stream_chunk_tokens: int = setting(
        256,
        "Fewest new tokens of a candidate that is scored while it goes on decoding. What is left is scored when it "
        "has come to its end.",
    )
    stream_batch_tokens: int = setting(8192, "Most tokens of one such forward pass, padding included.")
    stream_cache_gib: float = setting(
        4.0,
        "GiB for keys and values on each process: a third for what is kept, the rest for the pass in work. Where "
        "there is no more room, candidates wait until others have ended. A row that does not fit by itself is scored "
        "as without streaming.",
    )
    stream_rewards: bool = setting(
        False,
        "Whether reward functions are called for each group once its rows are chosen, while others decode, instead of "
        "once for the whole batch. The same for functions that look at each sample by itself; one that compares "
        "samples across groups means something else then. Only with `vllm_mode='server'`.",
    )
    stream_reward_timeout_s: float = setting(
        60.0,
        "Deadline of one call of a reward function in seconds. The rows of one that is later get no reward from it.",
    )

    # Training
    trim_padding: bool = setting(
        True,
        "Whether rows of like length share a micro-batch, and each micro-batch is as wide as its own longest row. TRL "
        "pads all rows of a process's generation batch to the longest of them. The gradient of an optimizer step is "
        "the same up to rounding. Set it to `False` for TRL's numbers to the last bit, or where a subclass adds "
        "tensors of its own to a batch.",
    )

    # Logging
    save_rollout_trace: bool = setting(
        False,
        "Whether to write every rollout's candidates (lengths, ends, what was kept) as Parquet files to "
        "`output_dir/rollouts`.",
    )

    def check_types(self) -> None:
        """Of its own fields and those that it inherits. TRL's are TRL's to check."""
        check_types(self, RolloutSettings)

    def check(self) -> None:
        """Refuses what can't work. Raises [`ConfigurationError`]."""
        self.check_group()
        ScheduleSettings.__post_init__(self)
        if self.redundancy_cost_weight is not None and self.latency_curve is None:
            raise ConfigurationError(
                f"`redundancy_cost_weight` ({self.redundancy_cost_weight}) needs `latency_curve`, which says what a "
                "candidate costs. Measure one with `trl-darts profile`, or leave it unset for a budget by "
                "`target_redundancy`."
            )
        if self.length_history is not None and not (self.over_provisions or self.ranks or self.predicts_switch):
            raise ConfigurationError(
                f"`length_history` ({self.length_history!r}) has no effect with `schedule` ({self.schedule!r}) and "
                f"`submit_order` ({self.submit_order!r}): nothing depends on lengths. Leave it unset."
            )
        self._check_trl()
        self._check_sampling()
        self._check_servers()
        self._check_generation_kwargs()
        self._check_streams()
        self._check_ahead()

    def check_start(self) -> None:
        """
        Refuses what no trainer can start with, whatever its model and data. Not part of `check`: a published config
        can be built where its files and servers are not. Raises [`ConfigurationError`].
        """
        self.load_latency_curve()
        self.tail_servers()
        if self.length_history is not None and not os.path.exists(self.length_history):
            raise ConfigurationError(
                f"`length_history` ({self.length_history!r}) must be a checkpoint, its `darts_lengths.npz`, or the "
                "`output_dir` of a run with `save_rollout_trace`, and is not there. Correct its path."
            )
        if self.buffers_prompts and not self.uses_servers:
            raise ConfigurationError(
                f"{self.own_prompts} with an engine in the trainer's own process. Set `use_vllm=True` and "
                f"`vllm_mode='server'`, or {self.without_own_prompts}."
            )
        if not self.stream_logprobs or self.vllm_importance_sampling_correction or self.beta != 0.0:
            return
        if self.gradient_accumulation_steps % (self.steps_per_generation * self.num_iterations) == 0:
            raise ConfigurationError(
                "`stream_logprobs` (True) has nothing to compute: with `vllm_importance_sampling_correction=False` "
                "and `beta=0.0` no log-probs are needed before the loss. Set it to `False`."
            )

    def check_batch(self, num_processes: int) -> None:
        """TRL refuses it too, and names what it has computed of the fields that were set."""
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        rows = self.generation_batch_size or self.per_device_train_batch_size * num_processes * steps
        if rows % self.num_generations:
            raise ConfigurationError(
                f"The generation batch ({rows} rows: `per_device_train_batch_size` "
                f"({self.per_device_train_batch_size}) × {num_processes} process{'es' * (num_processes != 1)} × "
                f"`steps_per_generation` ({steps})) must be divisible by `num_generations` ({self.num_generations}). "
                "Change one of them."
            )

    def check_group(self) -> None:
        """Before TRL, whose error says less."""
        if self.num_generations < 2:
            raise ConfigurationError(
                f"`num_generations` ({self.num_generations}) must be at least 2: an advantage compares the answers to "
                "a prompt. Raise it."
            )

    def _check_trl(self) -> None:
        """What TRL and PyTorch refuse too, but later: when the model is loaded, or the first rollout is paid for."""
        for name, choices in (TRL_CHOICES | TRL_VLLM_CHOICES if self.use_vllm else TRL_CHOICES).items():
            value = getattr(self, name)
            check_choice(name, SCALED.get(value, value) if name == "scale_rewards" else value, choices)
        if self.max_steps <= 0 and not 0 < self.num_train_epochs < math.inf:
            raise ConfigurationError(
                f"`num_train_epochs` ({self.num_train_epochs}) must be positive and finite where `max_steps` "
                f"({self.max_steps}) does not say when the training ends. Correct it, or set `max_steps`."
            )
        if not self.learning_rate < math.inf:
            raise ConfigurationError(f"`learning_rate` ({self.learning_rate}) must be finite. Lower it.")
        for name, least in TRL_LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ConfigurationError(f"`{name}` ({value}) must be at least {least}. Raise it.")
        if self.sync_ref_model and self.beta == 0:
            raise ConfigurationError(
                f"`sync_ref_model` (True) needs a reference model, and with `beta` ({self.beta}) there is none. Set "
                "`beta` to a positive value, or leave it out."
            )
        mode = self.vllm_importance_sampling_mode
        corrects = self.use_vllm and self.vllm_importance_sampling_correction
        if self.loss_type == "vespo" and corrects and mode not in VESPO_SAMPLING_MODES:
            raise ConfigurationError(
                f"`vllm_importance_sampling_mode` ({mode!r}) must be one of "
                f"{', '.join(map(repr, VESPO_SAMPLING_MODES))} with `loss_type='vespo'`, which weights sequences "
                "itself."
            )

    def _check_sampling(self) -> None:
        for name, (is_allowed, rule) in SAMPLING_RULES.items():
            value = getattr(self, name)
            if value is None and name != "temperature":
                continue  # the engine's own default
            if value is None or not is_allowed(value):
                raise ConfigurationError(f"`{name}` ({value}) must be {rule}. Correct it, or leave it out.")
        least = -1 if self.use_vllm else 0  # vLLM takes -1 for 0, and transformers does not
        if self.top_k is not None and self.top_k < least:
            raise ConfigurationError(
                f"`top_k` ({self.top_k}) must be at least 1, or 0, which leaves all tokens in. Correct it, or leave "
                "it out."
            )

    def _check_generation_kwargs(self) -> None:
        kwargs: Any = self.generation_kwargs or {}
        if kwargs.get("n", 1) != 1:
            raise ConfigurationError(
                f"`generation_kwargs['n']` ({kwargs['n']}) must be left out. The number of completions per prompt is "
                "`num_generations`, and of candidates `max_num_generations`."
            )
        for name, value in self.not_carried.items():
            if self.keeps_tokens:
                raise ConfigurationError(
                    f"`{name}` ({value!r}) does not run with `schedule` ({self.schedule!r}), whose unfinished "
                    "completions go on in another request: the server would begin it anew there. Leave it out, or "
                    "use a schedule that keeps no tokens."
                )
            if self.tail_urls and self.tail_switch_at != 0:
                raise ConfigurationError(
                    f"`{name}` ({value!r}) does not run with a switch to `vllm_tail_server_url` "
                    f"({self.vllm_tail_server_url!r}): completions would begin anew there. Leave it out, or set "
                    "`tail_switch_at=0` with a `tail_share`."
                )
        remedies = {
            "stop_strings": "Leave it out, or set `schedule='grpo'`, or use vLLM with `stop`.",
            "eos_token_id": "Set it in the `generation_config` of the model, or set `schedule='grpo'`.",
        }
        for name, remedy in remedies.items():
            if kwargs.get(name) and self.schedule != "grpo" and not self.use_vllm:
                raise ConfigurationError(
                    f"`generation_kwargs[{name!r}]` ({kwargs[name]!r}) does not run with `schedule` "
                    f"({self.schedule!r}) on the transformers engines: a completion is complete at an end-of-sequence "
                    f"token of the model. {remedy}"
                )

    @property
    def not_carried(self) -> dict[str, Any]:
        """Sampling options with which a completion that moves to another server begins anew."""
        regex = {"vllm_structured_outputs_regex": self.vllm_structured_outputs_regex}
        return {**not_carried(self.generation_kwargs or {}), **(regex if any(regex.values()) else {})}

    def _check_streams(self) -> None:
        for name in ("stream_chunk_tokens", "stream_batch_tokens"):
            if not getattr(self, name) >= 1:
                raise ConfigurationError(f"`{name}` ({getattr(self, name)}) must be at least 1.")
        for name in ("stream_cache_gib", "stream_reward_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"`{name}` ({getattr(self, name)}) must be positive.")
        if self.stream_batch_tokens < self.stream_chunk_tokens:
            raise ConfigurationError(
                f"`stream_batch_tokens` ({self.stream_batch_tokens}) must be at least `stream_chunk_tokens` "
                f"({self.stream_chunk_tokens}): a forward pass takes whole chunks. Raise it, or lower that."
            )
        for name in ("stream_logprobs", "stream_rewards"):
            if getattr(self, name) and not self.uses_servers:
                raise ConfigurationError(
                    f"`{name}` (True) only has an effect on vLLM servers: an engine in the trainer's own process "
                    "leaves it no time. Set it to `False`, or set `use_vllm=True` and `vllm_mode='server'`."
                )
        reasons = {
            "drop_uniform_groups": "which groups are trained on is only known once their rewards are",
            "rollout_ahead": "the model trains while candidates decode",
        }
        for name, reason in reasons.items():
            if self.stream_logprobs and (value := getattr(self, name)):
                raise ConfigurationError(
                    f"`stream_logprobs` (True) does not run with `{name}` ({value}): {reason}. Set one of them to its "
                    "default."
                )

    def _check_ahead(self) -> None:
        """A batch is sampled before the optimizer's steps on the one before it."""
        steps = (self.steps_per_generation or 1) * self.num_iterations // self.gradient_accumulation_steps
        if self.rollout_ahead and self.mask_stale_after is not None and self.mask_stale_after < steps:
            raise ConfigurationError(
                f"`mask_stale_after` ({self.mask_stale_after}) would mask all tokens with `rollout_ahead` "
                f"({self.rollout_ahead}), which are {steps} optimizer steps old or older. Raise it to {steps} at "
                "least, or leave it unset."
            )

    @property
    def colocates(self) -> bool:
        """Whether vLLM generates in the trainer's own processes, on their GPUs."""
        return self.use_vllm and self.vllm_mode == "colocate"

    @property
    def num_engines(self) -> int:
        """Engines that decode a batch together: servers, or groups of processes."""
        if not self.use_vllm:
            return int(self.world_size)
        if self.vllm_mode == "server":
            return len(self.server_urls)
        return int(self.world_size) // self.vllm_tensor_parallel_size

    @property
    def pool_ratio(self) -> float:
        """Candidates per row, at most."""
        return self.max_num_generations / self.num_generations if self.over_provisions else 1.0

    def load_latency_curve(self) -> LatencyCurve | None:
        """
        The curve that `latency_curve` names. Not read before it is asked for: a published config can be built where
        the file is missing.

        Raises:
            [`ConfigurationError`]: If the file is missing or malformed.
        """
        return None if self.latency_curve is None else LatencyCurve.load(self.latency_curve, "latency_curve")
