"""`DARTSGRPOConfig`: TRL's `GRPOConfig` with fields for rollouts, servers and training."""

import math
import os
from dataclasses import dataclass
from typing import Annotated, Any

from transformers import GenerationConfig
from trl import GRPOConfig  # type: ignore[attr-defined]

from .engines.sampling import not_carried, user_seed
from .engines.server_fields import SERVER_CONFLICTS, ServerFields
from .errors import ConfigurationError, did_you_mean
from .policy import LatencyCurve
from .recipes.hub import PublishedConfig
from .scheduling.rules import (
    POSITIVE,
    Conflict,
    Rule,
    at_least,
    check_conflicts,
    check_fields,
    check_types,
    one_of,
    setting,
    unmarked,
)
from .scheduling.schedule_fields import PLAIN, ScheduleFields
from .scheduling.settings import Facts


DICTIONARY = Rule(lambda value: isinstance(value, dict), "a dictionary, or one as JSON")
# TRL does not check these values before it uses them or passes them to an engine: a run would fail in its first step,
# or learn something else. Others, such as `seed`, are refused when the trainer is built.
TRL_RULES = {
    "loss_type": one_of(("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")),
    "importance_sampling_level": one_of(("token", "sequence")),
    "multi_objective_aggregation": one_of(("sum_then_normalize", "normalize_then_sum")),
    "scale_rewards": one_of(("group", "batch", "none")),
    **dict.fromkeys(("learning_rate", "beta"), Rule(lambda value: 0 <= value < math.inf, "at least 0 and finite")),
    **dict.fromkeys(("epsilon", "epsilon_high", "weight_decay", "max_grad_norm"), at_least(0)),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), Rule(lambda value: 0 <= value < 1, "at least 0 and less than 1")),
    "delta": POSITIVE,
    "top_entropy_quantile": Rule(lambda value: 0 < value <= 1, "greater than 0 and at most 1, which uses all tokens"),
    "reward_weights": Rule(lambda values: all(map(math.isfinite, values)), "a list of finite numbers"),
    **dict.fromkeys(("generation_kwargs", "chat_template_kwargs", "model_init_kwargs"), DICTIONARY),
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps"), at_least(1)),
    **dict.fromkeys(("steps_per_generation", "num_iterations", "max_completion_length"), at_least(1)),
    "temperature": Rule(lambda value: 0 < value < math.inf, "positive and finite: logits are divided by it"),
    "top_p": Rule(lambda value: 0 < value <= 1, "greater than 0 and at most 1, which keeps all tokens"),
    "top_k": Rule(lambda value: value >= 0, "at least 1, or 0, which keeps all tokens"),
    "min_p": Rule(lambda value: 0 <= value <= 1, "between 0 and 1"),
    "repetition_penalty": Rule(lambda value: 0 < value < math.inf, "positive and finite; 1 has no effect"),
}
VLLM_RULES = {  # with `use_vllm`
    "vllm_mode": one_of(("server", "colocate")),
    "vllm_importance_sampling_mode": one_of(("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")),
    "top_k": Rule(lambda value: value >= -1, "at least 1, or 0 or -1, which keep all tokens"),
    "vllm_tensor_parallel_size": at_least(1),
    "vllm_group_port": Rule(lambda value: 0 < value < 65536, "between 1 and 65535"),
}
NEVER_UNSET = ("temperature", "max_completion_length")  # other fields may be `None`: the engine's default then
# TRL's fields whose types are checked, because it computes with a wrong one or takes 'false' for true.
TRL_FIELDS = GRPOConfig.__annotations__.keys() | TRL_RULES.keys() | {"max_steps", "num_train_epochs", "seed"}
TRL_FIELDS -= {"scale_rewards"}  # may be a bool too, and has choices
BATCH_ERROR = "must be divisible by num_generations"  # TRL's error does not say how the batch size was computed

PER_GROUP = "sum_then_normalize"
NUMBERS = ("n", "num_return_sequences")
ENDS = {"stop_strings", "eos_token_id"}

# fmt: off
# What the trainer's fields can't be combined with. Rows have two lines, which is why they are not formatted.
TRAINING_CONFLICTS = (
    Conflict("redundancy_cost_weight", lambda s: s.latency_curve is None,
             "needs `latency_curve`, which says what a candidate costs",
             "Measure one with `trl-darts profile`, or leave it unset for a budget by `target_redundancy`."),
    Conflict("length_history", lambda s: not s.reads_lengths,
             "has no effect with {schedule} and {submit_order}, which do not depend on lengths"),
    Conflict("num_train_epochs", lambda s: s.max_steps <= 0 and not 0 < s.num_train_epochs < math.inf,
             "must be positive and finite where {max_steps} does not end the run"),
    Conflict("sync_ref_model", lambda s: s.beta == 0, "needs a reference model, and with {beta} there is none"),
    Conflict("loss_type", lambda s: s.loss_type == "vespo" and s.corrects_sequences,
             "weights sequences itself, and does not run with {vllm_importance_sampling_mode}",
             "Set that to 'token_truncate' or 'token_mask', or change the loss."),
    # Sampling
    Conflict("generation_kwargs", lambda s: any(s.generation_kwargs.get(name, 1) != 1 for name in NUMBERS),
             "must not have `n` or `num_return_sequences`: completions per prompt are {num_generations}",
             "Leave them out, or change that."),
    Conflict("generation_kwargs",
             lambda s: not s.use_vllm and s.schedule != "grpo" and not ENDS.isdisjoint(s.generation_kwargs),
             "must not have `stop_strings` or `eos_token_id` with {schedule} and {use_vllm}: a completion is "
             "complete at an end-of-sequence token of the model",
             "Set them in its `generation_config`, set `schedule='grpo'`, or use vLLM with `stop`."),
    Conflict("vllm_structured_outputs_regex generation_kwargs", lambda s: s.keeps_tokens and s.not_carried,
             "does not run with {schedule}, which continues completions in new requests: it would start again there",
             "Leave it out, or use a schedule that keeps no tokens."),
    Conflict("vllm_structured_outputs_regex generation_kwargs",
             lambda s: s.tail_urls and s.tail_switch_at != 0 and s.not_carried,
             "does not run with a switch to {vllm_tail_server_url}, where it would start again",
             "Leave it out, or set `tail_switch_at=0` with a `tail_share`."),
    # Streams
    Conflict("stream_batch_tokens stream_chunk_tokens", lambda s: s.stream_batch_tokens < s.stream_chunk_tokens,
             "leaves no room for a chunk in a pass: {stream_batch_tokens} must be at least {stream_chunk_tokens}"),
    Conflict("stream_logprobs stream_rewards stream_training", lambda s: not s.uses_servers,
             "only has an effect with vLLM servers: an in-process engine leaves no time for it",
             "Set it to `False`, or set `use_vllm=True` and `vllm_mode='server'`."),
    Conflict("stream_chunk_tokens stream_batch_tokens stream_cache_gib", lambda s: not s.stream_logprobs,
             "has no effect without `stream_logprobs`"),
    Conflict("stream_reward_timeout_s", lambda s: not s.stream_rewards, "has no effect without `stream_rewards`"),
    Conflict("stream_logprobs", lambda s: s.drop_uniform_groups,
             "does not run with {drop_uniform_groups}: which groups are trained on is only known once rewards are"),
    Conflict("stream_logprobs", lambda s: s.rollout_ahead,
             "does not run with {rollout_ahead}: the model trains while candidates decode"),
    # Tools
    Conflict("tool_timeout_s conversation_timeout_s stop_tools max_concurrent_conversations",
             lambda s: not s.uses_servers,
             "only has an effect with vLLM servers, where conversations run each by itself",
             "Leave it unset, or set `use_vllm=True` and `vllm_mode='server'`."),
    # Answers of earlier epochs
    Conflict("reuse_answers", lambda s: not s.uses_servers,
             "needs vLLM servers, which verify earlier answers", "Set `use_vllm=True` and `vllm_mode='server'`."),
    Conflict("reuse_answers", lambda s: s.over_provisions,
             "does not run with {selection}: what a selection keeps has other lengths than what the policy writes, "
             "more so each time it is reused", "Set `schedule='grpo'`, or another one with `selection='all'`."),
    Conflict("reuse_answers", lambda s: s.is_continuous or s.stream_training,
             "does not run with {rollout_ahead} and {stream_training}, whose prompts enter a rollout that runs"),
    Conflict("reuse_answers", lambda s: not s.samples_plainly,
             "needs plain sampling, whose probabilities a server can compute of a given answer: {temperature}, "
             "{top_p}, {top_k}, {min_p} and {repetition_penalty} must be 1, 1, 0, `None` and 1, and "
             "{generation_kwargs} and {vllm_structured_outputs_regex} unset"),
    Conflict("reuse_answers_gib", lambda s: not s.reuse_answers, "has no effect without `reuse_answers`"),
    # Waves
    Conflict("stream_training",
             lambda s: s.steps_per_generation != s.gradient_accumulation_steps or s.num_iterations > 1,
             "needs one optimizer step per batch: {steps_per_generation} must be {gradient_accumulation_steps}, and "
             "{num_iterations} must be 1"),
    Conflict("stream_training", lambda s: s.schedule not in PLAIN or s.rollout_ahead,
             "does not run with {schedule} and {rollout_ahead}: a batch is trained on while it decodes"),
    Conflict("stream_training", lambda s: s.drop_uniform_groups or s.defer_unsettled_groups or s.audit_share,
             "does not run with {drop_uniform_groups}, {defer_unsettled_groups} and {audit_share}: other groups would "
             "take the place of some that were trained on"),
    Conflict("stream_training", lambda s: s.stream_logprobs or s.stream_rewards,
             "replaces `stream_logprobs` and `stream_rewards`: each group is scored once it has finished"),
    Conflict("stream_training", lambda s: s.tail_urls, "does not run with {vllm_tail_server_url}"),
    Conflict("stream_training", lambda s: s.loss_type == "bnpo",
             "does not run with {loss_type}, which divides a micro-batch by its own tokens"),
    Conflict("stream_training", lambda s: s.scale_rewards == "batch" or s.multi_objective_aggregation != PER_GROUP,
             "does not run with {scale_rewards} and {multi_objective_aggregation}, which compare rewards over the "
             "whole batch"),
    # Tokens of older policies
    Conflict("mask_stale_after", lambda s: s.max_staleness is not None and s.mask_stale_after >= s.max_staleness,
             "has no effect with {max_staleness}: no token is older"),
    Conflict("mask_stale_after", lambda s: s.rollout_ahead and s.mask_stale_after < s.steps_per_batch,
             "would mask all tokens with {rollout_ahead}, which are {steps_per_batch} optimizer steps old or older"),
)
START_CONFLICTS = (  # checked when the trainer is built, where its files are
    Conflict("length_history", lambda s: not os.path.exists(s.length_history),
             "must be a checkpoint, its `darts_lengths.npz`, or the `output_dir` of a run with `save_rollout_trace`",
             "It does not exist. Correct its path."),
    Conflict("weight_sync_dir", lambda s: not os.path.isdir(s.weight_sync_dir),
             "must be a directory that exists and that the servers see under the same path",
             "Create it, or correct the path."),
    Conflict("stream_logprobs", lambda s: not s.needs_logprobs,
             "has nothing to compute with {vllm_importance_sampling_correction} and {beta}", "Set it to `False`."),
)
# fmt: on


@dataclass
class DARTSGRPOConfig(ServerFields, PublishedConfig, GRPOConfig):  # type: ignore[misc]  # TRL's may be `None`
    r"""
    Configuration class for the [`DARTSGRPOTrainer`].

    It adds fields to [`~trl.GRPOConfig`]: those of [`ScheduleSettings`] for rollouts, those of [`ServerFields`] for
    vLLM servers, and its own. Each field's help describes it. [`PublishedConfig`] adds methods to load a config from
    the Hub and to publish it. `vllm_server_base_url` may name several servers, separated by commas. The servers' key
    is read from the environment variable `VLLM_API_KEY`, or from the file of `trl-darts serve` on this machine.

    Defaults that depend on other fields, such as `max_num_generations`, are computed when the config is created, and
    computed again by `dataclasses.replace`. Defaults that TRL computes are kept by `dataclasses.replace`.

    Raises:
        [`ConfigurationError`]: If a value can't work. The message names the field, its value, the rule and a remedy.
    """

    # The budget
    latency_curve: str | None = setting(
        None,
        "Path of a JSON file with the engine's latency per token, as `trl-darts profile` writes it. It "
        "gives the cost of a candidate if `redundancy_cost_weight` is set. Read when the trainer is built.",
    )

    # History
    length_history: str | None = setting(
        None,
        "Response lengths of an earlier run, used from the first step on: a checkpoint or its "
        "`darts_lengths.npz`, or the `output_dir` of a run with `save_rollout_trace`. Model and tokenizer must "
        "be the same; a later checkpoint of the same model is accepted. A resumed run uses its checkpoint's lengths "
        "instead.",
    )

    # Streaming, while vLLM servers decode the last long answers
    stream_logprobs: bool = setting(
        False,
        "Whether log-probs of the policy, and of the reference model if `beta` is not zero, are computed as tokens "
        "arrive, instead of after the rollout. Only with `vllm_mode='server'`, and without images.",
    )
    stream_chunk_tokens: Annotated[int, at_least(1)] = setting(
        256,
        "Fewest new tokens of an unfinished candidate that are scored at once. The rest is scored when the candidate "
        "is finished.",
    )
    stream_batch_tokens: Annotated[int, at_least(1)] = setting(
        8192, "Most tokens of one forward pass of `stream_logprobs`, padding included."
    )
    stream_cache_gib: Annotated[float, Rule(lambda value: 0 < value < math.inf, "positive and finite")] = setting(
        4.0,
        "GiB for keys and values on each process: a third for those that are kept, the rest for the current pass. "
        "When it is full, candidates wait until others have finished. A row that does not fit is scored after the "
        "rollout, as without streaming.",
    )
    stream_rewards: bool = setting(
        False,
        "Whether reward functions are called for each group as soon as its rows are selected, while others decode, "
        "instead of once for the whole batch. With `rollout_ahead='continuous'` they run in other threads while the "
        "trainer trains, on one process only. Rewards are the same for functions that score each sample by itself, "
        "but not for those that compare samples across groups. Only with `vllm_mode='server'`.",
    )
    stream_reward_timeout_s: Annotated[float, POSITIVE] = setting(
        60.0,
        "Deadline of one call of a reward function in seconds. If a call exceeds it, its rows get no reward from that "
        "function.",
    )

    stream_training: bool = setting(
        False,
        "Whether the groups of a batch are trained on as they finish, while others decode, with one optimizer step at "
        "the end. The gradient is that of the whole batch up to rounding, and on-policy. Reward functions are called "
        "for some groups at a time. Only with vLLM servers, one optimizer step per batch "
        "(`gradient_accumulation_steps` micro-batches of several groups), and text.",
    )

    # Tools
    max_concurrent_conversations: Annotated[int | None, at_least(1)] = setting(
        None,
        "Most conversations with tools, environments or a coroutine that are open at once, over all servers: further "
        "candidates begin when others have ended. For conversations whose tokens don't all fit into the servers' "
        "prefix caches, where each turn would prefill all that was said before. Unset, up to 2048.",
    )
    max_concurrent_tools: Annotated[int, at_least(1)] = setting(
        64,
        "Most tools that each process calls at once, in threads, where conversations run each by itself: with "
        "`vllm_mode='server'` and text. Set it to 1 for tools that share something and are not safe for threads.",
    )
    tool_timeout_s: Annotated[float | None, POSITIVE] = setting(
        None,
        "Deadline of one call of a tool in seconds, where conversations run each by itself. The answer is then an "
        "error, as of a tool that raises. A function in a thread can't be stopped: it goes on, and its answer is "
        "ignored.",
    )
    conversation_timeout_s: Annotated[float | None, POSITIVE] = setting(
        None,
        "Deadline of a conversation with tools in seconds, where conversations run each by itself. A tool that is "
        "called then answers with an error, and the conversation ends after the turn that called it.",
    )
    stop_tools: Annotated[list[str] | None, Rule(bool, "names, or unset")] = setting(  # noqa: RUF009  (no default)
        None,
        "Names of tools that end a conversation: once one has answered without an error, no further turn is decoded. "
        "The call is the end of the completion. For tools that submit an answer, where conversations run each by "
        "itself.",
    )

    # Answers of earlier epochs
    reuse_answers: bool = setting(
        False,
        "Whether each prompt's last answers are kept as far as the current policy would have written them too, and "
        "decoded from there, instead of from their beginning (SPEC-RL, with exact draws). Answers still follow the "
        "current policy, but resemble those of the last epoch. For data that are passed several times; only with "
        "`vllm_mode='server'`, a schedule that keeps all it samples, and plain sampling at temperature 1.",
    )
    reuse_answers_gib: Annotated[float, Rule(lambda value: 0 < value < math.inf, "positive and finite")] = setting(
        2.0,
        "GiB for these answers on the main process, and in each checkpoint. A token takes 72 bytes; the answers that "
        "were written longest ago leave first.",
    )

    # Training
    trim_padding: bool = setting(
        True,
        "Whether rows of similar length share a micro-batch, and each micro-batch is only as wide as its longest row. "
        "TRL pads all rows of a process's generation batch to the longest of them. The gradient of an optimizer step "
        "is the same up to rounding. Set it to `False` to reproduce TRL's numbers exactly, or if a subclass adds "
        "tensors to a batch.",
    )
    share_prompts: bool | None = setting(
        None,
        "Whether the rows of a group pass through the model as one row, with one copy of their prompt. The gradient "
        "is the same up to rounding. If it is unset, rows share prompts where the model and `trim_padding` allow it "
        "and it costs less; `True` raises an error elsewhere.",
    )
    reuse_logprobs: bool | None = setting(
        None,
        "Whether the correction for vLLM's log-probs takes those of the policy from the training pass, instead of a "
        "forward pass before it. The gradient is the same up to rounding if the policy does not change in between. If "
        "it is unset, they are reused where each batch is trained on in one optimizer step, and passes of the model "
        "have no dropout; `True` raises an error elsewhere.",
    )

    # Logging
    save_rollout_trace: bool = setting(
        False,
        "Whether to write every rollout's candidates (lengths, finish reasons, selected or not) as Parquet files to "
        "`output_dir/rollouts`.",
    )

    def __post_init__(self) -> None:
        self.forget_filled_in()  # before `PublishedConfig` records which fields were set
        check_fields(self, *OWN_CLASSES)
        check_types(self, GRPOConfig, sorted(TRL_FIELDS - OWN_FIELDS))
        if self.generation_batch_size is not None:  # TRL computes it if it is unset
            at_least(1).check("generation_batch_size", self.generation_batch_size)
        try:
            PublishedConfig.__post_init__(self)  # calls TRL's, which computes fields that are read below
        except ValueError as error:
            if BATCH_ERROR not in str(error):
                raise
        self._check_batch()  # outside of the `except`, because its error replaces TRL's
        self.resolve()
        for name, rule in (TRL_RULES | VLLM_RULES if self.use_vllm else TRL_RULES).items():
            value = getattr(self, name)
            if value is not None or name in NEVER_UNSET:
                rule.check(name, value)
        check_conflicts(self, (*SERVER_CONFLICTS, *TRAINING_CONFLICTS))
        self._check_addresses()
        self._check_generation_kwargs()

    def resolve(self, facts: Facts | None = None) -> None:
        super().resolve(facts or Facts())

    @property
    def cannot_defer(self) -> str | None:
        """As in [`ScheduleSettings`]: rewards must be known before a batch is complete."""
        if (cause := super().cannot_defer) is not None:
            return cause
        if not self.uses_servers:
            name = "vllm_mode" if self.use_vllm else "use_vllm"
            return f"`{name}` ({getattr(self, name)!r}), an engine in the trainer's own process"
        if self.stream_training:
            return "`stream_training` (True), which trains on a group before the others have finished"
        return "`stream_logprobs` (True)" if self.stream_logprobs else None

    @property
    def samples_plainly(self) -> bool:
        """Whether tokens are drawn from the policy as it is."""
        changed = self.temperature != 1 or self.top_p != 1 or self.repetition_penalty != 1 or bool(self.min_p)
        kwargs: Any = self.generation_kwargs or {}
        others = kwargs.keys() - {"seed"} or self.vllm_structured_outputs_regex is not None
        return not (changed or self.top_k not in (0, -1) or others)

    @property
    def buffers_prompts(self) -> bool:
        return super().buffers_prompts or self.stream_training

    @property
    def own_prompts(self) -> str:
        if self.stream_training:
            return "`stream_training` (True) takes the groups of a batch one by one, and does not run"
        return super().own_prompts

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields, including computed ones. A config created from them treats all of them as set."""
        return {name: unmarked(value) for name, value in super().to_dict().items()}

    def _check_batch(self) -> None:
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        processes = self.world_size
        rows = self.generation_batch_size or self.per_device_train_batch_size * processes * steps
        if rows % self.num_generations:
            raise ConfigurationError(
                f"The generation batch ({rows} rows: `per_device_train_batch_size` "
                f"({self.per_device_train_batch_size}) × {processes} process{'es' * (processes != 1)} × "
                f"`steps_per_generation` ({steps})) must be divisible by `num_generations` ({self.num_generations}). "
                "Change one of them."
            )

    def _check_generation_kwargs(self) -> None:
        kwargs: Any = self.generation_kwargs or {}
        user_seed(kwargs)
        known = GenerationConfig().to_dict().keys()  # keeps any other name, and does not read it
        if not self.use_vllm and (unknown := sorted(kwargs.keys() - known)):
            raise ConfigurationError(
                f"`generation_kwargs` ({unknown[0]!r}) must have names of transformers' `GenerationConfig`."
                f"{did_you_mean(unknown[0], known) or ' Leave it out.'}"
            )

    def check_start(self) -> None:
        """
        Raises [`ConfigurationError`] for values with which no trainer can start, such as missing files. A config can
        still be created with them, on a machine without its files and servers.
        """
        self.load_latency_curve()
        self.tail_servers()
        check_conflicts(self, START_CONFLICTS)
        if not self.output_dir or (os.path.exists(self.output_dir) and not os.path.isdir(self.output_dir)):
            raise ConfigurationError(
                f"`output_dir` ({self.output_dir!r}) must be a directory, or a new one. Correct it."
            )
        if self.buffers_prompts and not self.uses_servers:
            raise ConfigurationError(
                f"{self.own_prompts} with an engine in the trainer's own process. Set `use_vllm=True` and "
                "`vllm_mode='server'`, or leave it unset."
            )

    @property
    def needs_logprobs(self) -> bool:
        """Whether log-probs are needed before the loss."""
        steps = (self.steps_per_generation or 1) * self.num_iterations
        corrects = self.vllm_importance_sampling_correction or self.gradient_accumulation_steps % steps != 0
        return corrects or self.beta != 0.0

    @property
    def not_carried(self) -> dict[str, Any]:
        """Sampling options that a completion loses if it continues in another request."""
        kwargs: Any = self.generation_kwargs or {}
        regex = {"vllm_structured_outputs_regex": self.vllm_structured_outputs_regex}
        return {**not_carried(kwargs), **(regex if any(regex.values()) else {})}

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps that share a generation batch."""
        return math.ceil((self.steps_per_generation or 1) * self.num_iterations / self.gradient_accumulation_steps)

    @property
    def colocates(self) -> bool:
        """Whether vLLM generates in the trainer's processes."""
        return self.use_vllm and self.vllm_mode == "colocate"

    def plays_conversations(self, with_environments: bool) -> bool:
        """
        Whether candidates with tools are whole conversations. An environment stays on its process, so that all rows of
        a group must be there.
        """
        is_here = not (with_environments and self.splits_groups)
        return bool(is_here and self.uses_servers and not self.buffers_prompts and not self.tail_urls)

    @property
    def rows_per_process(self) -> int:
        """Rows of a generation batch on each process."""
        return int(self.generation_batch_size // self.world_size)

    @property
    def splits_groups(self) -> bool:
        """Whether rows of a group are on several processes."""
        return self.rows_per_process % self.num_generations != 0

    @property
    def corrects_sequences(self) -> bool:
        """Whether TRL weights whole sequences by vLLM's log-probs."""
        corrects = self.use_vllm and self.vllm_importance_sampling_correction
        return corrects and self.vllm_importance_sampling_mode.startswith("sequence")

    @property
    def num_engines(self) -> int:
        """Number of engines that share a batch: servers (at least one with a list), or groups of processes."""
        if not self.use_vllm:
            return int(self.world_size)
        if self.vllm_mode == "server":
            return max(1, len(self.server_urls))
        return int(self.world_size) // self.vllm_tensor_parallel_size

    @property
    def pool_ratio(self) -> float:
        """Most candidates per trained row."""
        return self.max_num_generations / self.num_generations if self.over_provisions else 1.0

    def load_latency_curve(self) -> LatencyCurve | None:
        """
        Loads the file of `latency_curve`. A config can be created without the file.

        Raises:
            [`ConfigurationError`]: If the file is missing or malformed.
        """
        return None if self.latency_curve is None else LatencyCurve.load(self.latency_curve, "latency_curve")


OWN_CLASSES = (ScheduleFields, DARTSGRPOConfig, ServerFields)
"""Classes of the fields that `DARTSGRPOConfig` adds to TRL's."""
OWN_FIELDS = {name for cls in OWN_CLASSES for name in cls.__annotations__}
