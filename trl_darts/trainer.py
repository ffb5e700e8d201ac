"""`DARTSGRPOTrainer`: TRL's `GRPOTrainer` with rollouts of our own."""

import sys
import time
from contextlib import nullcontext
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
from trl import GRPOTrainer  # type: ignore[attr-defined]  # exported lazily
from trl.extras.profiling import profiling_context

from .buffer.batches import BufferedBatches
from .buffer.feed import EndlessFeed, PromptFeed, skip_passes
from .buffer.rounds import round_policy
from .buffer.scores import GroupScores
from .callbacks import RolloutStateCallback, RunLogCallback, VarianceTrackerCallback, with_tracker
from .checks import (
    check_arguments,
    check_datasets,
    check_path,
    check_positions,
    check_prompt_lengths,
    other_model,
    warn_of_cut_long_ends,
)
from .config import DARTSGRPOConfig
from .engines.batch import PromptBatch
from .engines.connection import connect, server_settings
from .engines.engine import RolloutPlan
from .engines.factory import make_engine
from .engines.hf_generate import replaced
from .engines.main_process import MainProcess
from .engines.vllm_generation import synced_generation
from .errors import WeightsLostError
from .padding import Trimming, padding_metrics
from .policy import LatencyCurve, LengthTracker
from .preemption import EXIT_CODE, Preempted, Preemption
from .resume import checkpoint_to_resume, where_it_stopped
from .rows import KeptRows, forget_filler_rewards, forget_stale_logprobs, mask_fillers, mask_stale
from .scheduling import RolloutResult, SchedulePolicies, Scheduler, TailServers, UniformAdmission
from .streaming import Streams, decode_completions, make_streams
from .telemetry.console import RolloutTotals, shorten_console
from .telemetry.metrics import RolloutRecord, bias_metrics, buffer_metrics, ratio_metrics, rollout_metrics
from .telemetry.model_card import PAPER, add_rollouts
from .telemetry.progress import RolloutProgress, close_bar
from .telemetry.stopwatch import Stopwatch
from .telemetry.traces import write_trace


logger = get_logger(__name__)


class DARTSGRPOTrainer(GRPOTrainer):
    """
    Trainer for GRPO that does not wait for its slowest rollout
    ([DARTS](https://huggingface.co/papers/2605.30859)).

    It is TRL's [`~trl.GRPOTrainer`] with the same arguments. For each prompt it samples more candidates than rows are
    trained on, decides while they decode which ones are worth waiting for, keeps `num_generations` of them and aborts
    the rest; discarded candidates reach neither rewards nor loss. Evaluation and the later turns of a tool loop are
    not over-provisioned. `_rollout` has a whole rollout in the order in which things happen.

    Overrides `_generate_single_turn`, `_generate`, `_tokenize_prompts`, `_tool_call_loop`, `_calculate_rewards`,
    `_generate_and_score_completions`, `_get_per_token_logps_and_entropies`, `get_batch_samples`, `_get_train_sampler`,
    `_load_optimizer_and_scheduler`, `_save_checkpoint`, `_prepare_inputs`, `training_step`, `train` and
    `create_model_card`, each around TRL's own.

    Args:
        args ([`DARTSGRPOConfig`], *optional*):
            Configuration. Defaults to one with the model's name.
        callbacks (`list[TrainerCallback]`, *optional*):
            As in [`~trl.GRPOTrainer`]. A [`VarianceTrackerCallback`] among them is used instead of a new one.
        model, reward_funcs, train_dataset, …:
            As in [`~trl.GRPOTrainer`]; `rollout_func` needs `schedule="grpo"`.

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

    args: Any  # `DARTSGRPOConfig`
    model: Any
    vllm_generation: Any  # `SyncedGeneration`
    _tag_names = ["trl", "grpo", "darts"]  # noqa: RUF012  (TRL's form)
    _name = "DARTS"
    _paper = PAPER
    # Class-level: TRL's own tests build trainers without __init__.
    _engine: Any = None  # an `Engine`
    _batches: Any = None  # `BufferedBatches` where the schedule trains on other batches than the loader's
    _scores: Any = None  # `GroupScores` where groups are scored before their batch is full
    _tail: TailServers | None = None
    _sampler: Any = None
    _streams = Streams()
    _record: RolloutRecord | None = None  # of the last rollout, on every process
    _fillers: frozenset[int] = frozenset()  # of the last rollout, on every process; see `KeptRows`
    _ready: KeptRows | None = None  # completions of a batch that is not the loader's, until TRL asks for them
    _ahead: Any = None  # the next batch and its plan, while its rollout is under way; see `_launch_ahead`
    _generated_at: float | None = None
    _in_tool_loop = False
    _trimming: Trimming | None = None
    _train_clock = Stopwatch()

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
        tools: list[Any] | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
        if args is None:
            args = DARTSGRPOConfig(f"{name.rstrip('/').split('/')[-1]}-DARTS")
        check_arguments(args, rollout_func)
        if environment_factory is None:  # else prompts are made when their batch comes
            check_datasets(args, train_dataset, eval_dataset)
        curve = args.load_latency_curve()
        if (warning := other_model(curve, args.latency_curve, name)) is not None:
            logger.warning(warning)
        callbacks = with_tracker(list(callbacks or []), args, model, processing_class)
        settings = server_settings(args, model, train_dataset) if args.uses_servers else None
        servers, facts = connect(settings) if settings is not None and args.process_index == 0 else (None, None)
        first = (model, reward_funcs, args, train_dataset, eval_dataset, processing_class, reward_processing_classes)
        others = (optimizers, quantization_config, peft_config, tools, rollout_func, environment_factory)
        try:
            with synced_generation(settings, servers, facts, args.pool_ratio):
                super().__init__(*first, callbacks, *others)  # in TRL's order
            self._init_rollouts(curve)
        except BaseException:
            if servers is not None:
                servers.close()
            self._streams.close()
            raise

    def _init_rollouts(self, curve: LatencyCurve | None) -> None:
        args = self.args
        check_path(self)
        self._main = self.vllm_generation.main if self.use_vllm else MainProcess(self.accelerator)
        callbacks = self.callback_handler.callbacks
        self._tracker_callback = next(c for c in callbacks if isinstance(c, VarianceTrackerCallback))
        slots = self.vllm_generation.facts.max_num_seqs if args.uses_servers else None
        self._tail = args.tail_servers()
        self._admission = args.admission(self.length_tracker, curve, args.num_engines, slots, self._tail)
        self._engine = make_engine(self, self._main, super()._generate_single_turn, self._process_rows)
        if (policy := round_policy(args, args.generation_batch_size // args.num_generations)) is not None:
            repeats = args.steps_per_generation * args.num_iterations
            feed: Any = PromptFeed(repeats)
            if args.drop_uniform_groups:
                num_rows = args.generation_batch_size // self.accelerator.num_processes
                feed = EndlessFeed(repeats, num_rows, lambda: self.callback_handler.train_dataloader)
            tokenize, steps = super()._tokenize_prompts, lambda: self._step
            self._batches = BufferedBatches(
                policy, self._admission, args.num_generations, feed, self._main, tokenize, steps
            )
        self._streams, self._trimming, self._train_clock = make_streams(self), Trimming.of(self), Stopwatch()
        if self._batches is not None and (args.drop_uniform_groups or args.stream_rewards):
            decode = partial(decode_completions, self)
            self._scores = GroupScores(self, self._batches, self._serve_rewards, decode, self._streams.owners)
        lengths = self._tracker_callback
        self._state_callback = RolloutStateCallback(lengths, self._admission, self._batches, self._main, args.schedule)
        self.add_callback(self._state_callback)
        self._preemption = Preemption(self.accelerator, args.uses_servers)
        self.add_callback(self._preemption)
        if args.save_rollout_trace:
            self.add_callback(RunLogCallback())
        self._totals = RolloutTotals()
        self._long_ends: list[float] = []
        shorten_console(callbacks, self._totals)
        if not args.colocates:  # vLLM in this process refuses them itself, in their step
            check = self._engine.check_prompts if args.uses_servers else partial(check_positions, self.model.config)
            self._main.run(lambda: check_prompt_lengths(self, check))

    @property
    def length_tracker(self) -> LengthTracker:
        """What is known of response lengths on the main process. Stays empty where nothing asks, as with GRPO."""
        return self._tracker_callback.tracker

    @property
    def _num_rollouts(self) -> int:
        """How many came before this one. By the optimizer's steps: a resumed training goes on counting."""
        args, passes = self.args, self.args.gradient_accumulation_steps
        done = self.state.global_step * passes + self._step % passes
        return int(done // (args.steps_per_generation * args.num_iterations))

    @property
    def is_sharded(self) -> bool:
        """Whether a forward pass is a collective."""
        return (self._dist.is_fsdp or self._dist.is_zero3) and self.accelerator.num_processes > 1

    # A rollout

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: list[Any] | None,
        multimodal_fields: dict[str, Any],
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        training = self.model.training
        ours = self._engine is not None and (self.args.uses_servers or (training and not self._in_tool_loop))
        if not ours:
            return super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, num_generations, has_tool_images
            )
        if self._ready is not None:
            rows, self._ready = self._ready, None
        elif self._in_tool_loop:
            self._sync_weights()
            rows = self._engine.later_turn(PromptBatch.alone(prompt_ids, num_generations, images))
        else:
            self._sync_weights()
            batch = PromptBatch.gather(prompt_ids, num_generations, self._main.index, images, multimodal_fields)
            rows = self._rollout(batch, training)[batch.mine]
        if training and not self._in_tool_loop:
            self._generated_at = time.perf_counter()
        return rows.completion_ids, rows.logprobs

    def _rollout(self, batch: PromptBatch, training: bool = True, ahead: Any = None) -> Any:
        """
        One rollout, in the order in which things happen. Called on every process at once. `ahead` is what
        `_launch_ahead` has left, where it is under way already.
        """
        main, streams = self._main, self._streams if training else Streams()
        meanwhile = streams.follow if streams else None
        plan = main.run(lambda: self._plan(batch, training)) if ahead is None else ahead[1]
        try:
            with RolloutProgress(self.callback_handler.callbacks) as progress:
                ids = self._batches if training else None
                watched = self._preemption.watching(progress)
                on_progress = main.run(lambda: streams.watch(batch.longest, watched, ids and ids.round_ids), meanwhile)
                with profiling_context(self, "vLLM.generate") if self.use_vllm else nullcontext():
                    result = self._engine.run(plan, batch, on_progress, meanwhile)
        except WeightsLostError as error:  # of one that was launched ahead
            logger.warning(f"{error} The rollout begins anew with those.")
            self._last_loaded_step = -1
            self._sync_weights()
            return self._rollout(batch, training)
        rows, record = main.broadcast(lambda: self._conclude(plan, result, batch, training), meanwhile)
        if meanwhile is not None and not main.is_here:
            meanwhile()  # what the main process sent last
        self._fillers, self._record = rows.fillers, record
        if not (training and self.args.drop_uniform_groups):  # else once for all rollouts of the batch
            self._log_rollout(record, training)
        return rows

    def _plan(self, batch: PromptBatch, training: bool, ahead: bool = False) -> RolloutPlan:
        """What is decided before a rollout, on the main process."""
        args, number = self.args, self._num_rollouts + ahead
        if not training:
            admission = UniformAdmission(batch.num_generations).plan(batch.infos)
            groups, policies = admission.plans(batch.infos), SchedulePolicies()
        elif self._batches is not None:
            admission, groups = self._batches.plan(self.state.global_step)
            stop = self._batches.batch_stop
            policies = args.policies(admission.expected_lengths, batch_stop=stop, rollout=number, tail=self._tail)
        else:
            admission = self._admission.plan(batch.infos)
            groups = admission.plans(batch.infos)
            placement = self._engine.placement(admission, batch)
            policies = args.policies(admission.expected_lengths, placement=placement, rollout=number, tail=self._tail)
        drops = args.on_generation_error == "drop_group"
        scheduler = Scheduler(policies, batch.num_generations, drops, carries_tokens=not args.not_carried)
        return RolloutPlan(admission, groups, scheduler)

    def _conclude(
        self, plan: RolloutPlan, result: RolloutResult, batch: PromptBatch, training: bool
    ) -> tuple[Any, RolloutRecord]:
        """What is trained on, and what is learned, on the main process."""
        for reason in result.dropped.values():
            logger.warning(f"{reason}. The group is dropped, and filler rows without weight are in its place.")
        batches = self._batches if training else None
        rows: Any
        if batches is None:
            rows = KeptRows.of_result(result, batch.num_generations)
        else:
            rows = batches.collect(self.state.global_step, result)
        carries_over = batches is not None and batches.buffer.keeps_tokens
        long_end_below = self.args.max_num_generations if training and self.args.keeps_long_end else 0
        has_tail = training and self._tail is not None
        record = RolloutRecord.of(plan.admission, result, batch, carries_over, long_end_below, has_tail)
        if training:
            self._streams.finish(result, None if batches is None else rows.kept.completion_ids)
            # Nothing is learned from groups of different prompts, or from what goes on: that comes to its end first.
            if uniform := [group for group in record.ended if not batch.mixed[group.group_id]]:
                self._admission.observe(uniform)
        return rows, record

    def _log_rollout(self, record: RolloutRecord, training: bool) -> None:
        servers = self.vllm_generation if self.use_vllm else None
        drafted = None if servers is None else servers.drafted()
        if not training:
            if self._fillers:
                self._metrics["eval"]["darts/rollout/dropped_groups"].append(float(record.num_dropped))
            return
        metrics = rollout_metrics(record, None if servers is None else servers.pop_sync(), drafted)
        self._log_all(metrics)
        self._totals.add(metrics)
        if (ratio := metrics.get("darts/selection/long_end_ratio")) is not None:
            self._long_ends.append(ratio)
            warn_of_cut_long_ends(self.args, self._long_ends)
        if self.args.save_rollout_trace and self._main.is_here:
            # Several rollouts can belong to one optimizer step; the micro-step tells them apart, also after a resume.
            micro_step = self._step % self.args.gradient_accumulation_steps
            write_trace(Path(self.args.output_dir), self.state.global_step, micro_step, record)

    def _log_all(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def _sync_weights(self) -> None:
        """TRL's own lines: there is no seam, it has them in two methods itself. No rollout is under way then."""
        if self._ahead is not None:
            self._engine.drain()
        if self.use_vllm and self.state.global_step != self._last_loaded_step:
            with profiling_context(self, "sync_weights"):
                self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step

    def _generate(self, prompts: list[Any]) -> Any:
        output = super()._generate(prompts)
        if self._batches is not None and self.args.rollout_ahead and self.model.training:
            begin = time.perf_counter()
            self._launch_ahead()
            self._generated_at = (self._generated_at or begin) + time.perf_counter() - begin
        return output

    def _launch_ahead(self) -> None:
        """
        Starts the next batch's rollout with the weights of now, once this batch's is over with all of its turns; it
        goes on while this batch is trained on. At the end of an epoch there is no next batch yet, and none follows the
        training's last.
        """
        args = self.args
        num_passes = self.state.max_steps * args.gradient_accumulation_steps
        if self._num_rollouts + 1 >= num_passes / (args.steps_per_generation * args.num_iterations):
            return
        batch = self._batches.next_round(ahead=True)
        if batch is None:
            return
        self._sync_weights()
        plan = self._main.run(lambda: self._plan(batch, True, ahead=True))
        self._engine.launch(plan, batch)
        self._ahead = batch, plan

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        self._rollout_prompts = prompts
        return super()._tokenize_prompts(prompts)

    def _process_rows(self, rows: list[int]) -> Any:
        """
        Images and the processor's fields for candidates of some rows of this process, each as often as it is named.
        The fields of a batch are cut in a different way for each kind of model, so the processor makes them anew.
        """
        prompts = [self._rollout_prompts[row] for row in rows]
        environments = [] if self.environment_factories is None else [self._batch_environments[row] for row in rows]
        with replaced(self, "_batch_environments", environments):
            return super()._tokenize_prompts(prompts)[1:]

    # What TRL does with the rows

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._generated_at, self._fillers = None, frozenset()
        batches = self._batches if self.model.training else None
        input_of = inputs.__getitem__ if batches is None else batches.input_of
        # Also an error ends what waits in `_ready`: an evaluation could follow.
        serving = self._streams.serving(input_of if self.model.training else None)
        with serving as streamed, replaced(self, "_ready", None):
            if batches is not None:
                inputs = self._collect_inputs(len(inputs))
            output = super()._generate_and_score_completions(inputs)
        self._log_all(streamed)
        mask_fillers(output, self._fillers, self.accelerator)
        if batches is not None and self.args.mask_stale_after is not None:
            mask_stale(output, batches.ages(len(inputs)), self.args.mask_stale_after, self.accelerator)
        if batches is not None:
            self._log_all(ratio_metrics(output, self.accelerator))
        if self._generated_at is not None:
            self._log_all({"darts/score/seconds": time.perf_counter() - self._generated_at})
        return output

    def _collect_inputs(self, num_rows: int) -> list[dict[str, Any]]:
        """The rows of this process in a batch that is not the loader's; their completions wait for TRL."""
        batches, max_age, step = self._batches, self.args.mask_stale_after, self.state.global_step
        ahead, self._ahead = self._ahead, None
        batch = self._next_round() if ahead is None else ahead[0]
        begin = time.perf_counter()
        if batch is not None and not self.args.drop_uniform_groups:
            rows = self._rollout(batch, ahead=ahead)
        else:
            self._sample_informative(batch, ahead)
            rows, self._record = self._main.broadcast(lambda: batches.collect(step)), None
            self._fillers = rows.fillers
        if self.args.rollout_ahead:
            self._log_all({"darts/rollout/wait_seconds": time.perf_counter() - begin})
        if self.args.drop_uniform_groups:
            self._log_all(self._scores.pop_metrics(len(rows.fillers) // self.args.num_generations))
        inputs, self._ready = batches.finish(rows, num_rows)
        if max_age is not None:
            forget_stale_logprobs(self._ready, batches.ages(num_rows), max_age)
        self._log_all(buffer_metrics(rows, max_age))
        return inputs

    def _next_round(self) -> PromptBatch | None:
        batch: PromptBatch | None = self._batches.next_round()
        if batch is not None:
            self._sync_weights()
        return batch

    def _sample_informative(self, batch: PromptBatch | None, ahead: Any) -> None:
        """Rollouts until the batch has its groups with a spread of rewards, or as many prompts as it may take."""
        records: list[Any] = []
        while batch is not None:
            self._rollout(batch, ahead=ahead)
            records.append(self._record)
            self._scores.drop_uniform()
            batch, ahead = self._next_round(), None
        if records:
            self._log_rollout(reduce(RolloutRecord.then, records), training=True)

    def _tool_call_loop(
        self, prompts: list[Any], prompt_ids: Any, completion_ids: Any, completions: list[Any], *args: Any
    ) -> Any:
        first = self.accelerator.process_index * len(prompts)
        for row in self._fillers.intersection(range(first, first + len(prompts))):
            completions[row - first][0].pop("tool_calls", None)  # they weigh nothing, and their prompts were refused
        with replaced(self, "_in_tool_loop", True):
            return super()._tool_call_loop(prompts, prompt_ids, completion_ids, completions, *args)

    def _calculate_rewards(self, *args: Any) -> torch.Tensor:
        training = self.model.training
        rewards: torch.Tensor
        if training and self._scores is not None:
            rewards = self._scores.serve(len(args[0]))
        elif training:
            rewards = self._serve_rewards(None, *args)
        else:
            rewards = super()._calculate_rewards(*args)
        rewards = forget_filler_rewards(rewards, self._fillers)
        if training and self._record is not None:
            first_rows = None if self._batches is None else self._batches.last.first_rows
            self._log_all(bias_metrics(self._record, rewards, self.reward_weights, first_rows))
        return rewards

    def _serve_rewards(self, rows: list[int] | None, *args: Any) -> torch.Tensor:
        """TRL's rewards for some rows by their numbers, or the batch, from what was scored while they decoded."""
        with self._streams.serving_rewards(rows):
            return super()._calculate_rewards(*args)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        compute = super()._get_per_token_logps_and_entropies
        if self._trimming is not None:
            compute = partial(self._trimming.per_token_logps, compute)
        return self._streams.per_token_logps(self, compute, model, *args, **kwargs)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        before = self._buffered_inputs
        with self._train_clock.paused():
            inputs = super()._prepare_inputs(generation_batch)
            if self._buffered_inputs is before:  # of an earlier rollout
                return inputs
            if self._trimming is not None:
                self._buffered_inputs = self._trimming.micro_batches(self._buffered_inputs)
            self._log_all(padding_metrics(self._buffered_inputs, self.accelerator))
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._train_clock.running():
            loss: torch.Tensor = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            self._log_all({"darts/train/seconds": self._train_clock.pop()})
        return loss

    # The loader, checkpoints, the model card

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._sampler = super()._get_train_sampler(dataset)
        return self._sampler

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        if self.control.should_training_stop:  # before the first step; transformers looks only after one
            return [], None
        if self._batches is not None:
            epoch_iterator = self._batches.feed.follow(epoch_iterator)
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        self._state_callback.load(Path(checkpoint), skips=not self.args.ignore_data_skip)
        if self._batches is not None:
            skip_passes(self._sampler, self._batches.feed.passes_behind(Path(checkpoint)))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        directory = Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        self._state_callback.save(directory, mid_epoch=not float(self.state.epoch).is_integer())
        super()._save_checkpoint(model, trial)
        self._state_callback.checkpoint = str(directory)

    def _forget_training(self) -> None:
        """
        What an earlier `train()` has left. Also of TRL's, which would go on within its last batch, and takes the
        servers' weights for those of this training's first step.
        """
        self._step, self._buffered_inputs, self._last_loaded_step = 0, None, -1
        self._long_ends, self._train_clock = [], Stopwatch()
        for left in (self._batches, self._scores):
            if left is not None:
                left.clear()

    def _save_last_step(self) -> None:
        """Saves a checkpoint of the last whole step, unless there is one. Called on every process at once."""
        if self.model.training and self._batches is not None:  # an evaluation comes between two steps
            self._batches.feed.rewind()
        step, saved = self.state.global_step, self._state_callback.checkpoint
        is_saved = saved is not None and Path(saved).name == f"{PREFIX_CHECKPOINT_DIR}-{step}"
        if step and not is_saved and self.args.save_strategy != SaveStrategy.NO:
            self._save_checkpoint(self.model, None)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        checkpoint = self._main.broadcast(lambda: checkpoint_to_resume(resume_from_checkpoint, self.args.output_dir))
        self._forget_training()
        self._state_callback.checkpoint = checkpoint
        try:
            with self._preemption.handled(), logging_redirect_tqdm():  # a warning has its own line, not the bar's
                try:
                    output = super().train(checkpoint, *args, **kwargs)
                except Preempted:
                    self._save_last_step()
                    self._exit_preempted()
                if self._preemption.stops:
                    self._exit_preempted()
                return output
        except KeyboardInterrupt as interrupt:
            logger.debug("Interrupted here:", exc_info=True)
            close_bar(self.callback_handler.callbacks)
            if self.is_world_process_zero():  # the last line of the traceback, which begins here
                interrupt.args = (where_it_stopped(self.args, self.state, self._state_callback.checkpoint),)
            raise interrupt.with_traceback(None) from None
        finally:
            self._cancel_ahead()

    def _cancel_ahead(self) -> None:
        if self._ahead is not None:  # nobody waits for it any more
            self._engine.cancel()
            self._ahead = None

    def _exit_preempted(self) -> None:
        """
        Ends the process. All processes leave together: where one has ended, torchrun kills the others, of which the
        main one may still be saving.
        """
        self._cancel_ahead()
        close_bar(self.callback_handler.callbacks)
        if self._main.is_here:
            if self.args.uses_servers:
                engine = self.vllm_generation.engine
                engine.call(engine.idle())  # until its requests have ended
            stopped = where_it_stopped(self.args, self.state, self._state_callback.checkpoint)
            print(f"SIGTERM: {stopped}", file=sys.stderr, flush=True)  # noqa: T201  (no log level hides it)
        self.accelerator.wait_for_everyone()
        sys.exit(EXIT_CODE)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        if self.args.schedule != "darts":  # what another paper describes; the card's section on rollouts names it
            self._name, self._paper = GRPOTrainer._name, GRPOTrainer._paper
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            add_rollouts(Path(self.args.output_dir) / "README.md", self.args, self.state.log_history)
