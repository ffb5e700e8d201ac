"""`DARTSGRPOTrainer`: TRL's `GRPOTrainer` with other rollouts."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import TrainerCallback
from trl import GRPOTrainer  # type: ignore[attr-defined]  # exported lazily

from .buffer.batch import Batch, Prompts
from .buffer.batches import BufferedBatches
from .buffer.checkpoint import Rollouts, known_columns
from .buffer.feed import PromptFeed
from .buffer.loop import LoopPosition
from .buffer.make import make_batches, make_feed, make_sources
from .buffer.session_source import SessionRollout
from .buffer.sources import Launched, R, RolloutSource, TRLSource
from .callbacks import RolloutStateCallback, RunLogCallback, VarianceTrackerCallback, with_tracker
from .checks import (
    check_arguments,
    check_objects,
    check_path,
    check_prompt_lengths,
    tells_chance,
    warn_of_other_model,
    warn_of_twins,
)
from .config import DARTSGRPOConfig
from .data_checks import check_data
from .engines.batch import PromptBatch
from .engines.engine import Engine
from .engines.factory import make_engine
from .engines.main_process import MainProcess
from .engines.prefixes import VerifiedPrefixes, make_prefixes
from .engines.vllm_generation import SyncedGeneration, synced_generation
from .errors import WeightsLostError
from .policy import LengthTracker
from .policy.siblings import SiblingCheck
from .streaming import Streams, make_streams
from .telemetry.console import shorten_console
from .telemetry.metrics import RolloutRecord
from .telemetry.model_card import PAPER, add_rollouts
from .telemetry.progress import RolloutProgress
from .telemetry.rollout_log import RolloutLog
from .telemetry.stopwatch import REST, StepParts, Stopwatch
from .training.conversations import Conversations
from .training.environments import Environments
from .training.padding import Trimming, padding_metrics
from .training.preemption import Preemption, explained
from .training.resets import reset_together
from .training.resume import checkpoint_to_resume
from .training.reused_logprobs import ReusedLogprobs
from .training.reward_checks import checked_rewards
from .training.rows import forget_filler_rewards, is_uniform
from .training.tool_players import ToolPlayers
from .training.waves import Waves
from .trl_compat import profiling_context, replaced
from .weights.canary import Canary


logger = get_logger(__name__)


class DARTSGRPOTrainer(GRPOTrainer):
    """
    Trainer for GRPO that does not wait for its slowest rollout
    ([DARTS](https://huggingface.co/papers/2605.30859)).

    It is TRL's [`~trl.GRPOTrainer`] with the same arguments. For each prompt it samples more candidates than rows are
    trained on, decides while they decode which ones are worth waiting for, keeps `num_generations` of them and aborts
    the rest; discarded candidates reach neither rewards nor loss. With tools or environments on servers, a candidate
    is a whole conversation. Evaluation is not over-provisioned. `_rollout` has a whole rollout in the order in which
    things happen.

    Args:
        args ([`DARTSGRPOConfig`], *optional*):
            Configuration. By default, `output_dir` is the model's name with `-DARTS`.
        callbacks (`list[TrainerCallback]`, *optional*):
            As in [`~trl.GRPOTrainer`]. A [`VarianceTrackerCallback`] among them is used instead of a new one.
        model, reward_funcs, train_dataset, …:
            As in [`~trl.GRPOTrainer`]; `rollout_func` needs `schedule="grpo"`, or is a coroutine function of a
            [`Session`] and its row of data, which leads one conversation.

    Raises:
        [`ConfigurationError`]: If settings can't work together, or a server can't serve this run. Raised before
            the model is loaded, or before the first step for what depends on the model, the prompts' lengths or the
            connection for weights.
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
    _engine: Engine
    _prompts: list[Any]  # of this process, inside `_generate`: TRL passes only their tokens on
    _tag_names = ["trl", "grpo", "darts"]  # noqa: RUF012  (TRL's form)
    _name = "DARTS"
    _paper = PAPER
    # Class-level: TRL's own tests build trainers without __init__.
    _sources: tuple[TRLSource, TRLSource] = (TRLSource(), TRLSource())  # of training, of evaluation
    _batches: BufferedBatches | None = None  # set if the schedule trains on other batches than the loader's
    _batch = Batch()  # that TRL scores
    _streams = Streams()
    _in_tool_loop = False
    _sampler: Any = None  # of the training data
    _loop = LoopPosition(1, 1)
    _feed = PromptFeed(_loop)
    _batch_in_use = -1  # index of the batch that TRL has buffered
    _siblings: SiblingCheck | None = None  # until it has warned
    _trimming: Trimming | None = None
    _reused: ReusedLogprobs | None = None
    _waves: Waves | None = None  # set if a batch is trained on while it decodes
    _canary: Canary | None = None  # set with servers
    _reuse: VerifiedPrefixes | None = None
    _clock = Stopwatch()

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
        check_objects(model, callbacks)
        name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
        if args is None:
            args = DARTSGRPOConfig(f"{name.rstrip('/').split('/')[-1]}-DARTS")
        leads = iscoroutinefunction(rollout_func)
        turns = "environment_factory" if environment_factory else "tools" if tools else None
        check_arguments(args, rollout_func, "rollout_func" if leads else turns)
        if environment_factory is None:  # otherwise it makes the prompts of each batch
            check_data(args, train_dataset, eval_dataset, None if rollout_func else reward_funcs)
        warn_of_other_model(args, name)
        if leads:
            rollout_func = SessionRollout(rollout_func)
        callbacks = with_tracker(list(callbacks or []), args, model, processing_class)
        first = (model, reward_funcs, args, train_dataset, eval_dataset, processing_class, reward_processing_classes)
        others = (optimizers, quantization_config, peft_config, tools, rollout_func, environment_factory)
        with synced_generation(args, model, train_dataset):
            super().__init__(*first, callbacks, *others)  # in TRL's order
            self._init_rollouts()

    def _init_rollouts(self) -> None:
        args = self.args
        check_path(self)
        servers: Any = self.vllm_generation if self.use_vllm else None
        self._main = MainProcess(self.accelerator) if servers is None else servers.main
        callbacks = self.callback_handler.callbacks
        self._tracker_callback = next(c for c in callbacks if isinstance(c, VarianceTrackerCallback))
        slots = servers.facts.max_num_seqs if args.uses_servers else None
        num_engines = servers.num_main_servers if args.uses_servers else args.num_engines
        self._tail, curve = args.tail_servers(), args.load_latency_curve()
        self._admission = args.admission(self.length_tracker, curve, num_engines, slots, self._tail)
        self._engine = make_engine(self, self._main, super()._generate_single_turn)
        self._streams, self._trimming = make_streams(self), Trimming.of(self)
        self._reused, self._waves = ReusedLogprobs.of(self), Waves.of(self)
        self._reuse = make_prefixes(self)
        self._loop = LoopPosition(args.steps_per_generation * args.num_iterations, args.gradient_accumulation_steps)
        self._feed = make_feed(self)
        self._batches = make_batches(self, self._feed)
        self._sources = make_sources(self)
        self._siblings = SiblingCheck() if tells_chance(args) else None
        self._rollout_log = RolloutLog(args, self._main.is_here, servers)
        if args.uses_servers and args.compare_weights and isinstance(servers, SyncedGeneration):
            self._canary = Canary(servers.engine, self._main)
        columns = known_columns(self.train_dataset)
        answers = None if self._reuse is None else self._reuse.store
        rollouts = Rollouts(args, self._main, columns, self._loop, self._feed, self._batches, answers)
        self._state_callback = RolloutStateCallback(self._tracker_callback, self._admission, rollouts)
        self._preemption = Preemption(self.accelerator, args.uses_servers)
        logs = [RunLogCallback()] if args.save_rollout_trace else []
        for callback in (self._state_callback, self._preemption, StepParts(self), *logs):
            self.add_callback(callback)
        shorten_console(callbacks, self._rollout_log.totals)
        self._main.run(lambda: check_prompt_lengths(self))

    @property
    def length_tracker(self) -> LengthTracker:
        """Response lengths, on the main process. Empty if nothing depends on them, as with GRPO."""
        return self._tracker_callback.tracker

    @property
    def _source(self) -> TRLSource:
        return self._sources[0 if self.model.training else 1]

    # A rollout

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        prompts = Prompts(prompt_ids, num_generations, images, multimodal_fields)
        if self._in_tool_loop:
            rows = self._source.later_turn(prompts)
        elif (rows := self._batch.completions(prompt_ids)) is None:
            with self._clock.on("rollout"):
                rows = self._source.sample(prompts)
            self._batch.fillers = frozenset() if rows is None else rows.fillers
            self._batch.outcome = getattr(rows, "outcome", None)
        if rows is None:
            turn = super()._generate_single_turn
            return turn(prompt_ids, images, multimodal_fields, num_generations, *args, **kwargs)
        return rows.completion_ids, rows.logprobs

    def _rollout(
        self, source: RolloutSource[R], batch: PromptBatch, launched: Launched | None = None
    ) -> tuple[R, RolloutRecord]:
        """
        Runs one rollout of a source, in the order in which things happen, and returns its rows and its record.
        `launched` is given for a rollout that was launched ahead. Called on every process at once.
        """
        main, streams = self._main, source.streams
        meanwhile = streams.follow if streams else None
        plan: Any = main.run(lambda: source.plan(batch)) if launched is None else launched.plan
        try:
            with RolloutProgress(self.callback_handler.callbacks, source.carries_over) as progress:
                watched = self._preemption.watching(progress)
                on_progress = main.run(lambda: streams.watch(batch, watched), meanwhile)
                with profiling_context(self, "vLLM.generate") if self.use_vllm else nullcontext():
                    result: Any = source.run(plan, batch, on_progress, meanwhile)
        except WeightsLostError as error:  # a rollout that was launched ahead
            logger.warning(f"{error} The rollout restarts with the new weights.")
            self._last_loaded_step = -1
            self._sync_weights()
            return self._rollout(source, batch)
        if result is not None and self._siblings is not None and warn_of_twins(self._siblings, result):
            self._siblings = None
        outcome = main.scatter(lambda: source.conclude(plan, result, batch), meanwhile)
        if meanwhile is not None and not main.is_here:
            meanwhile()  # handles the main process's last messages
        return outcome

    def _log_all(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def _sync_weights(self) -> None:
        """Waits for a rollout that was launched ahead, and syncs the weights as two of TRL's methods do inline."""
        with self._clock.on("rollout"):
            self._engine.drain(self.state.global_step)
        if self.use_vllm and self.state.global_step != self._last_loaded_step:
            with profiling_context(self, "sync_weights"), self._clock.on("weights"):
                self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step
            if self._canary is not None:
                self._log_all(self._canary.check(self))

    def _generate(self, prompts: list[Any], *args: Any, **kwargs: Any) -> Any:
        if self.rollout_func is not None:
            self._sync_weights()
        with replaced(self, "_prompts", prompts):
            output = super()._generate(prompts, *args, **kwargs)
        with self._clock.on("rollout"):
            self._source.launch_next()
        return output

    # What TRL does with the rows

    def _score_batch(
        self, score: Callable[..., dict[str, Any]], inputs: list[dict[str, Any]], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Has `score`, TRL's `_generate_and_score_completions` or a subclass's around it, score the next batch."""
        source = self._source
        if self._reused is not None and self.model.training:
            score = partial(self._reused.score, self, score)
        with self._streams.serving(source.input_of(inputs)) as streamed:
            with self._clock.on("rollout"):
                batch = source.next(inputs)
                told = reset_together(self, batch.inputs) if self._resets_together else nullcontext()
            # Also around a subclass's: it scores each row once, maybe before TRL asks for the batch.
            asked = partial(self._rewards_of_batch, self._calculate_rewards)
            with (
                self._clock.on("scoring"),
                told,
                replaced(self, "_batch", batch),
                replaced(self, "_calculate_rewards", asked),
            ):
                output = score(batch.inputs, *args, **kwargs)
        metrics = {**streamed, **batch.mask(output, self.accelerator)}
        if self._waves is not None and source.trains:
            self._waves.count(output, self._waves.is_first(self._step))
        if self._waves is None or self._waves.is_last(self._step):
            metrics["darts/score/seconds"] = self._clock.pop("scoring")
        if source.trains and self.rollout_func is None:  # otherwise its rollout would count as scoring
            self._log_all(metrics)
        return output

    @property
    def _resets_together(self) -> bool:
        """Whether threads may reset environments: their tools run in threads too."""
        return self.environment_factories is not None and self.args.uses_servers and not self._is_vlm

    def _tool_call_loop(
        self,
        prompts: list[Any],
        prompt_ids: Any,
        completion_ids: Any,
        completions: list[Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self._batch.outcome is not None:
            return self._batch.outcome
        first = self.accelerator.process_index * len(prompts)
        for row in self._batch.fillers.intersection(range(first, first + len(prompts))):
            completions[row - first][0].pop("tool_calls", None)  # the server rejected the filler rows' prompts
        rows = prompts, prompt_ids, completion_ids, completions
        with replaced(self, "_in_tool_loop", True):
            outcome = self._converse(*rows, *args, **kwargs)
            return super()._tool_call_loop(*rows, *args, **kwargs) if outcome is None else outcome

    def _converse(
        self,
        prompts: Any,
        prompt_ids: Any,
        completion_ids: Any,
        completions: Any,
        logprobs: Any,
        images: Any,
        *args: Any,
    ) -> Any:
        """Runs the tool loop of each row by itself, where the engine can; `None` where it can't."""
        if images is not None or self._is_vlm:
            return None
        self._sync_weights()
        with self._engine.turns(len(prompts)) as turns:
            if turns is None:
                return None
            conversations = Conversations(self, GRPOTrainer._tool_call_loop, turns)
            outcome = conversations.run(prompts, prompt_ids, completion_ids, completions, logprobs)
        if self._source.trains:
            acting_s = sum(own.acting_s for own in conversations.turns)
            num_turns = sum(own.count for own in conversations.turns)
            totals = {"darts/tools/seconds": acting_s, "darts/tools/turns": num_turns}
            self._log_all({name: total / len(prompts) for name, total in totals.items()})
        return outcome

    def _tool_players(self, parse: Callable[..., Any], batch: PromptBatch) -> ToolPlayers:
        """Returns what plays this process's conversations with tools."""
        messages, prompts = list(self._prompts), batch.rows[batch.mine]
        environments = Environments(self, self._batch.inputs, messages) if self.environments else None
        return ToolPlayers(self, GRPOTrainer._tool_call_loop, parse, prompts, messages, environments)

    def _rewards_of_batch(self, calculate: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        serve, score = self._batch.rewards, partial(self._score_rows, self._batch.numbers, *args, **kwargs)
        with replaced(self, "_calculate_rewards", calculate):
            rewards = score() if serve is None else serve()
        if self._source.trains:
            self._rollout_log.totals.rewards.observe(self.reward_func_names, rewards)
            if self._batches is not None:
                self._batches.observe(lambda rows: is_uniform(rewards[rows], self))
        return forget_filler_rewards(rewards, self._batch.fillers)

    def _score_rows(self, rows: Sequence[int] | None, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the rewards of some rows by number, or of the batch. Streamed rewards are not computed again."""
        streams = self._streams
        streamed = streams.serving_rewards(rows) if self._source.trains else streams.pausing_rewards()
        with self._clock.on("scoring"), streamed, checked_rewards(self):  # also of groups that wait for others
            return self._calculate_rewards(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        compute = super()._get_per_token_logps_and_entropies
        if self._trimming is not None:
            compute = partial(self._trimming.per_token_logps, compute)
        return self._streams.per_token_logps(self, compute, model, *args, **kwargs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        compute_loss = super()._compute_loss
        if self._reused is not None:
            return self._reused.loss(self, compute_loss, model, inputs)
        return compute_loss(model, inputs)

    @property
    def _num_micro_batches(self) -> int:
        """Micro-batches that are scored together."""
        num: int = self.args.steps_per_generation if self._waves is None else self._waves.num_micro_batches
        return num

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        batch = partial(self._score_batch, self._generate_and_score_completions)
        before, steps = self._buffered_inputs, self._num_micro_batches
        with (
            self._clock.on(REST),
            replaced(self, "_generate_and_score_completions", batch),
            replaced(self.args, "steps_per_generation", steps),
        ):
            inputs = super()._prepare_inputs(*args, **kwargs)
            if not self.model.training:
                return inputs
            if self._buffered_inputs is before:  # no new rollout
                return inputs
            self._batch_in_use = self._loop.batch
            if self._trimming is not None:
                self._buffered_inputs = self._trimming.micro_batches(self._buffered_inputs)
            self._log_all(padding_metrics(self._buffered_inputs, self.accelerator, self._trimming))
        return self._buffered_inputs[self._step % steps]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._clock.on("passes"):
            loss: torch.Tensor = super().training_step(*args, **kwargs)
        if self._waves is not None:
            loss = self._waves.finish(self.model, loss, self.accelerator.sync_gradients)
        self._loop.advance(ends_step=self.accelerator.sync_gradients)
        if self.accelerator.sync_gradients:
            self._log_all({"darts/train/seconds": self._clock.pop("passes")})
            self._clock.switch("optimizer")  # until the step ends
        return loss

    # The loader, checkpoints, the model card

    def get_train_dataloader(self) -> Any:
        self._loop.loader = super().get_train_dataloader()
        return self._loop.loader

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self._sampler = super()._get_train_sampler(*args, **kwargs)
        return self._sampler

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        if self.control.should_training_stop:  # transformers checks this only after a step
            return [], None
        if self._loop.loader is None:  # a subclass makes its own
            self._loop.loader = self.callback_handler.train_dataloader
        return super().get_batch_samples(self._feed.follow(epoch_iterator), *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None, *args: Any, **kwargs: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint, *args, **kwargs)
        if checkpoint is not None:
            if self._loop.loader is None:
                self._loop.loader = self.get_train_dataloader()
            step, skips = self.state.global_step, not self.args.ignore_data_skip
            self._buffered_inputs = self._state_callback.load(Path(checkpoint), self._sampler, step, skips)
            self._step, self._batch_in_use = self._loop.num_items, self._loop.batch

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            self._feed.random_state_is_restored()

    def _save_checkpoint(self, model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
        # In a step that is given up, the batch of the last one may be gone.
        has_batch = self._loop.is_within_batch and self._batch_in_use == self._loop.num_done // self._loop.repeats
        batch = self._buffered_inputs if has_batch else None
        with self._state_callback.saving(self._get_output_dir(trial), self.state, batch):
            super()._save_checkpoint(model, trial, *args, **kwargs)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        checkpoint = self._main.broadcast(lambda: checkpoint_to_resume(resume_from_checkpoint, self.args.output_dir))
        # After an earlier `train()`, TRL would continue within its last batch, and with the servers' weights.
        self._step, self._buffered_inputs, self._last_loaded_step = 0, None, -1
        self._clock = Stopwatch()
        self._rollout_log.begin()
        self._loop.begin()
        self._feed.restore()
        self._feed.begin()
        self._sources[0].clear()
        if self._reuse is not None:
            self._reuse.clear()
        self._state_callback.checkpoint = checkpoint
        try:
            # Warnings get lines of their own, apart from the progress bar.
            with self._preemption.exits(self), logging_redirect_tqdm():
                return super().train(checkpoint, *args, **kwargs)
        except KeyboardInterrupt as interrupt:
            raise explained(interrupt, self) from None
        finally:
            self._sources[0].cancel()
            self._end_run()

    def _end_run(self) -> None:
        """Frees what the run holds on servers that it shares. An evaluation after it syncs weights again."""
        generation: Any = getattr(self, "vllm_generation", None)
        if getattr(generation, "sends_adapters", False):
            generation.end_run()
            self._last_loaded_step = -1

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        if self.args.schedule != "darts":  # the card's section on rollouts names another paper
            self._name, self._paper = GRPOTrainer._name, GRPOTrainer._paper
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            add_rollouts(Path(self.args.output_dir) / "README.md", self.args, self.state.log_history)
