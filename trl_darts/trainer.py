"""`DARTSGRPOTrainer`: TRL's `GRPOTrainer` with rollouts of our making."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer import TRAINER_STATE_NAME
from trl import GRPOTrainer

from .callbacks import RunLogCallback, VarianceTrackerCallback
from .checks import check_arguments, check_path, check_prompt_lengths, warn_of_other_model
from .config import DARTSGRPOConfig
from .distributed import Share, Slot
from .engines.hf_generate import SchedulerCriterion, replaced, stopping_criterion
from .generation import rollout_generation
from .hub.model_card import PAPER, add_rollouts
from .metrics import RolloutRecord
from .policy import LengthTracker
from .prompt_checkpoint import load_rounds, warn_of_lost_prompts
from .prompt_feed import PromptFeed, skip_epochs
from .prompt_rounds import PromptRounds
from .rollout import RolloutConductor, Turn
from .rollout_log import RolloutLog
from .rows import KeptRows, forget_stale, mask_stale, repeat_rewards, take_weight
from .servers import connect, server_settings
from .streaming.setup import called_model, make_streams
from .streaming.streams import Streams


class DARTSGRPOTrainer(GRPOTrainer):
    """
    Trainer for GRPO that does not wait for its slowest rollout
    ([DARTS](https://huggingface.co/papers/2605.30859)).

    It is TRL's [`~trl.GRPOTrainer`] with the same arguments. For each prompt it samples more candidates than rows are
    trained on, decides while they decode which ones are worth waiting for, keeps `num_generations` of them and aborts
    the rest; discarded candidates reach neither rewards nor loss. Evaluation and the later turns of a tool loop are
    not over-provisioned.

    Overrides `_generate_single_turn`, `_tokenize_prompts`, `_tool_call_loop`, `_calculate_rewards`,
    `_generate_and_score_completions`, `_get_per_token_logps_and_entropies`, `get_batch_samples`, `_get_train_sampler`,
    `_load_optimizer_and_scheduler` and `create_model_card`, each around TRL's own.

    Args:
        model (`str`, [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model to be trained, as in [`~trl.GRPOTrainer`].
        reward_funcs (`RewardFunc` or `list[RewardFunc]`, *optional*):
            As in [`~trl.GRPOTrainer`].
        args ([`DARTSGRPOConfig`], *optional*):
            Configuration. Defaults to one with the model's name.
        callbacks (`list[TrainerCallback]`, *optional*):
            As in [`~trl.GRPOTrainer`]. A [`VarianceTrackerCallback`] among them is used instead of a new one.
        kwargs:
            The other arguments of [`~trl.GRPOTrainer`].

    Raises:
        [`ConfigurationError`]: If settings can't work together, or a server can't serve this training. Raised before
            the model is loaded; what depends on the model, on the prompts' lengths or on the connection for weights is
            raised once it is loaded, before the first step.
        [`ServerUnreachableError`]: If a server does not answer within `vllm_server_timeout`.

    Example:

    ```python
    from trl_darts import DARTSGRPOConfig, DARTSGRPOTrainer

    trainer = DARTSGRPOTrainer(
        model="Qwen/Qwen2.5-7B",
        reward_funcs=accuracy_reward,
        train_dataset=dataset,
        args=DARTSGRPOConfig(use_vllm=True, vllm_mode="server", num_generations=8),
    )
    trainer.train()
    ```
    """

    _tag_names = ["trl", "grpo", "darts"]  # noqa: RUF012  (TRL's form)
    _name = "DARTS"
    _paper = PAPER
    # Class-level: TRL's own tests build trainers without __init__.
    _conductor: RolloutConductor | None = None
    _rounds: PromptRounds | None = None
    _sampler: Any = None
    _ready: KeptRows | None = None  # completions of a batch that is not the loader's, until TRL asks for them
    _in_tool_loop = False
    _streams = Streams()

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: DARTSGRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable] | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Any = None,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = DARTSGRPOConfig(f"{name.rstrip('/').split('/')[-1]}-DARTS")
        check_arguments(args, rollout_func)
        settings = engine = facts = None
        if args.uses_servers:
            settings = server_settings(args, model, train_dataset)
            if args.process_index == 0:
                engine, facts = connect(settings)
        try:
            with rollout_generation(settings, engine, facts, args.pool_ratio):
                super().__init__(
                    model=model,
                    reward_funcs=reward_funcs,
                    args=args,
                    train_dataset=train_dataset,
                    eval_dataset=eval_dataset,
                    processing_class=processing_class,
                    reward_processing_classes=reward_processing_classes,
                    callbacks=callbacks,
                    optimizers=optimizers,
                    quantization_config=quantization_config,
                    peft_config=peft_config,
                    tools=tools,
                    rollout_func=rollout_func,
                    environment_factory=environment_factory,
                )
            self._init_conductor()
            check_path(self)
            if settings is not None:
                self._conductor.agree(lambda: check_prompt_lengths(self))
        except BaseException:
            if engine is not None:
                engine.close()
            self._streams.close()
            raise

    def _init_conductor(self) -> None:
        args = self.args
        callback = next((c for c in self.callback_handler.callbacks if isinstance(c, VarianceTrackerCallback)), None)
        if callback is None:
            callback = VarianceTrackerCallback()
            self.add_callback(callback)
        if callback.tracker is None:
            callback.tracker = args.tracker(args.max_completion_length)
        curve = args.load_latency_curve()
        warn_of_other_model(curve, args.latency_curve, self.model)
        callback.admission = args.admission(callback.tracker, curve, args.num_engines)
        self._rollout_log = RolloutLog(self)
        self._tracker_callback = callback
        if args.save_rollout_trace:
            self.add_callback(RunLogCallback())
        self._conductor = RolloutConductor(
            self.accelerator,
            args,
            callback.admission,
            args.num_generations,
            show_progress=not args.disable_tqdm,
            drop_failed_groups=args.on_generation_error == "drop_group",
        )
        policy = args.rounds(args.generation_batch_size // args.num_generations)
        if policy is not None:
            feed = PromptFeed(args.steps_per_generation * args.num_iterations)
            self._rounds = self._conductor.rounds = callback.rounds = PromptRounds(
                policy,
                callback.admission,
                args.num_generations,
                feed,
                self.accelerator,
                self._conductor.agree,
                lambda prompts: super(DARTSGRPOTrainer, self)._tokenize_prompts(prompts)[0],
                lambda: self._step % feed.repeats != 0,
            )
        if args.use_vllm:
            self.vllm_generation.conductor = self._conductor
            # In the later turns of a tool loop each process asks the servers by itself.
            self.vllm_generation.facts = self._conductor.agree(lambda: self.vllm_generation.facts)
            self.vllm_generation.is_sharded = lambda: self.is_sharded
        self._streams = self._conductor.streams = make_streams(self)

    @property
    def length_tracker(self) -> LengthTracker:
        """What is known of response lengths on the main process. Stays empty without `length_ranked`, as with GRPO."""
        return self._tracker_callback.tracker

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: list | None,
        multimodal_fields: dict,
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        conductor = self._conductor
        if conductor is None:
            return super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, num_generations, has_tool_images
            )
        if self._ready is not None:
            ready, self._ready = self._ready, None
            self._generated_at = time.perf_counter()
            return ready.completion_ids, ready.logprobs
        training = self.model.training
        turn = Turn.LATER if self._in_tool_loop else Turn.TRAINING if training else Turn.EVALUATION
        with conductor.during(turn):
            if turn is Turn.TRAINING and not self.use_vllm:
                output = self._generate_in_process(prompt_ids, images, multimodal_fields, num_generations), None
            else:
                output = super()._generate_single_turn(
                    prompt_ids, images, multimodal_fields, num_generations, has_tool_images
                )
        if turn is Turn.TRAINING:
            self._log_rollout(conductor.record)
            self._generated_at = time.perf_counter()
        elif conductor.repeats and turn is Turn.EVALUATION:
            self._metrics["eval"]["darts/rollout/dropped_groups"].append(float(conductor.record.num_dropped))
        return output

    def _tokenize_prompts(self, prompts: list) -> tuple[list[list[int]], list | None, dict]:
        self._rollout_prompts = prompts
        return super()._tokenize_prompts(prompts)

    def _process_rows(self, rows: list[int]) -> tuple[list | None, dict]:
        """
        Images and the processor's fields for candidates of some rows of this process, each as often as it is named.

        The fields of a batch are cut in a different way for each kind of model, so the processor makes them anew.
        """
        prompts = [self._rollout_prompts[row] for row in rows]
        if self.environment_factories is None:
            return super()._tokenize_prompts(prompts)[1:]
        with replaced(self, "_batch_environments", [self._batch_environments[row] for row in rows]):
            return super()._tokenize_prompts(prompts)[1:]

    def _tool_call_loop(
        self, prompts: list, prompt_ids: list, completion_ids: list, completions: list, *args: Any
    ) -> tuple:
        repeats = {} if self._conductor is None else self._conductor.repeats
        first = self.accelerator.process_index * len(prompts)
        for row in repeats.keys() & range(first, first + len(prompts)):
            completions[row - first][0].pop("tool_calls", None)  # they weigh nothing, and their prompts were refused
        self._in_tool_loop = True
        try:
            return super()._tool_call_loop(prompts, prompt_ids, completion_ids, completions, *args)
        finally:
            self._in_tool_loop = False

    def _generate_in_process(
        self, prompt_ids: list[list[int]], images: list | None, multimodal_fields: dict, num_generations: int
    ) -> list[list[int]]:
        """The transformers paths: TRL generates for a share of the candidates instead of the rows."""
        batch = self._conductor.gather(prompt_ids, images, multimodal_fields, num_generations)
        first_row = batch.mine.start

        def decode(share: Share, feed: list[Slot]) -> None:
            rows = [batch.row_of(slot.group_id, slot.index) for slot in feed]
            prompts = [batch.rows[row] for row in rows]
            own_images, fields = images, multimodal_fields
            if batch.multimodal and rows != list(range(len(batch.rows)))[batch.mine]:
                own_images, fields = self._process_rows([row - first_row for row in rows])
            model = self.accelerator.unwrap_model(self.model_wrapped)
            turn = super(DARTSGRPOTrainer, self)._generate_single_turn
            if self.use_transformers_continuous_batching:
                from .engines.hf_continuous import scheduled_batching  # not in every supported transformers

                with scheduled_batching(model, share, self.eos_token_ids):
                    turn(prompts, own_images, fields, num_generations)
            else:
                criterion = SchedulerCriterion(share, self.eos_token_ids)
                with stopping_criterion(model, criterion):
                    completions, _ = turn(prompts, own_images, fields, num_generations)
                criterion.finish(completions)

        return self._conductor.in_process(batch, decode).completion_ids

    @property
    def is_sharded(self) -> bool:
        """Whether a forward pass is a collective."""
        sharded = self.is_fsdp_enabled or (self.is_deepspeed_enabled and is_deepspeed_zero3_enabled())
        return sharded and self.accelerator.num_processes > 1

    def _log_rollout(self, record: RolloutRecord) -> None:
        self._rollout_log.rollout(record)

    def _calculate_rewards(self, *args: Any) -> torch.Tensor:
        with self._streams.serving_rewards() if self.model.training else nullcontext():
            rewards = super()._calculate_rewards(*args)
        if self._conductor is None:
            return rewards
        rewards = repeat_rewards(rewards, self._conductor.repeats)
        record = self._conductor.record
        if self.model.training and record is not None:
            size = self.args.num_generations
            first_rows = {summary.group_id: summary.group_id * size for summary in record.summaries}
            if self._rounds is not None:
                first_rows = self._rounds.harvested.first_rows
            self._rollout_log.bias(record, first_rows, rewards)
        return rewards

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._sampler = super()._get_train_sampler(dataset)
        return self._sampler

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple:
        if self._rounds is not None:
            epoch_iterator = self._rounds.feed.follow(epoch_iterator)
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _harvest(self, num_rows: int) -> list[dict[str, Any]]:
        """The rows of this process in a batch that is not the loader's; their completions wait for TRL."""
        rounds, conductor = self._rounds, self._conductor
        if rounds.prepare(self.state.global_step):
            with conductor.during(Turn.TRAINING):
                super()._generate_single_turn([], None, {}, self.num_generations)
            self._log_rollout(conductor.record)
            harvested = rounds.harvested
        else:
            harvested = conductor.agree(lambda: rounds.end(None))
            conductor.repeats, conductor.record = harvested.repeats, None
        inputs, self._ready = rounds.finish(harvested, num_rows)
        if self.args.mask_stale_after is not None:
            forget_stale(self._ready, self._ages(num_rows), self.args.mask_stale_after)
        self._rollout_log.harvest(harvested)
        return inputs

    def _ages(self, num_rows: int) -> list[list[tuple[int, int]]]:
        """How old the tokens of this process's rows are; see [`HarvestedRows`]."""
        first = self.accelerator.process_index * num_rows
        return self._rounds.harvested.ages[first : first + num_rows]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._generated_at: float | None = None
        rounds = self._rounds if self.model.training else None
        with self._streams.serving(inputs if self.model.training else None) as streamed:
            if rounds is not None:
                inputs = self._harvest(len(inputs))
            output = super()._generate_and_score_completions(inputs)
        for name, value in streamed.items():
            self._metrics["train"][name].append(value)
        if self._conductor is not None:
            take_weight(output, self._conductor.repeats, self.accelerator)
        if rounds is not None and self.args.mask_stale_after is not None:
            mask_stale(output, self._ages(len(inputs)), self.args.mask_stale_after, self.accelerator)
        if self._generated_at is not None:
            self._metrics["train"]["darts/score/seconds"].append(time.perf_counter() - self._generated_at)
        return output

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        compute = super()._get_per_token_logps_and_entropies
        stream = self._streams.log_probs
        if stream is None or not stream.active or not stream.serves(name := called_model(self, model)):
            return compute(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)

        def rest(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return compute(model, ids, mask, logits_to_keep, *args, **kwargs)[0]

        return stream.log_probs(name, input_ids, attention_mask, logits_to_keep, rest), None, None

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            if self._rounds is not None:
                self._rounds.forget()
            return
        self._conductor.agree(lambda: self._tracker_callback.load(Path(checkpoint)))
        if self._rounds is None:
            warn_of_lost_prompts(Path(checkpoint))
        else:
            load_rounds(self._rounds, Path(checkpoint), skips=not self.args.ignore_data_skip)
            epochs = int(TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME)).epoch)
            skip_epochs(self._sampler, epochs)

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        if self.args.schedule != "darts":  # what another paper describes; the card's section on rollouts names it
            self._name, self._paper = GRPOTrainer._name, GRPOTrainer._paper
        super().create_model_card(model_name, dataset_name, tags)
        if self.is_world_process_zero():
            add_rollouts(Path(self.args.output_dir) / "README.md", self.args, self.state.log_history)
