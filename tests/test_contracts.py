"""Tests the hooks that we use beyond TRL's documented interface. Failures name the hook and our requirement."""

import inspect
import re

from transformers import Trainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from tests.builders import letters_dataset, make_args, make_trainer
from trl_darts.buffer.feed import skip_passes
from trl_darts.training.padding import COMPLETION, PROMPT, WHOLE


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)[1:]


def test_generate_single_turn_is_the_seam():
    expected = ["prompt_ids", "images", "multimodal_fields", "num_generations"]
    assert parameters(GRPOTrainer._generate_single_turn)[:4] == expected, (
        "GRPOTrainer._generate_single_turn: we override it, and call it with more rows than it is given"
    )
    source = inspect.getsource(GRPOTrainer._generate_single_turn)
    assert "return completion_ids, logprobs" in source, "GRPOTrainer._generate_single_turn must return these two"
    assert "unwrapped_model.generate(" in source, (
        "GRPOTrainer._generate_single_turn must call `generate` of the unwrapped model: we add a stopping criterion"
    )
    assert "if self.state.global_step != self._last_loaded_step:" in source, (
        "GRPOTrainer._generate_single_turn must sync weights once per step: we have the same lines"
    )


def test_the_training_loop_takes_its_items_from_the_iterator_that_we_look_ahead_in():
    assert parameters(Trainer.get_batch_samples) == ["epoch_iterator", "num_batches", "device"], (
        "Trainer.get_batch_samples: we hand it an iterator that looks ahead"
    )
    assert "next(epoch_iterator)" in inspect.getsource(Trainer.get_batch_samples), (
        "Trainer.get_batch_samples must take one item at a time"
    )
    source = inspect.getsource(Trainer._run_epoch)
    assert "self.get_batch_samples(epoch_iterator, num_batches, self.args.device)" in source, (
        "Trainer._run_epoch must ask get_batch_samples with the same iterator throughout an epoch"
    )
    assert "skip_first_batches(train_dataloader, steps_trained_in_current_epoch)" in source, (
        "Trainer._run_epoch must skip what was trained on before a resume: our buffer has the rest of it"
    )
    assert "self._generate_and_score_completions(generation_batch)" in inspect.getsource(
        GRPOTrainer._prepare_inputs
    ), "GRPOTrainer._prepare_inputs must train on what _generate_and_score_completions returns, whatever the rows"
    assert ") = self._generate(prompts)" in inspect.getsource(GRPOTrainer._generate_and_score_completions), (
        "GRPOTrainer._generate_and_score_completions must call `_generate`: the next rollout is launched after it"
    )
    assert 'inputs["tool_mask"]' in inspect.getsource(GRPOTrainer._compute_loss), (
        "GRPOTrainer._compute_loss must leave out what `tool_mask` masks: stale tokens"
    )


def test_the_loss_reads_its_correction_after_its_log_probs():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    places = [source.find(text) for text in ("._get_per_token_logps_and_", '.get("old_', '["importance_sampling_')]
    assert -1 < places[0] < places[1] < places[2], (
        "GRPOTrainer._compute_loss must compute log-probs, take them for missing `old_per_token_logps`, and then read "
        "`importance_sampling_ratio`, which we add in between"
    )
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    first = source[source.index("self._get_per_token_logps_and_entropies(") :]
    assert first.split()[1] == "self.model,", (
        "GRPOTrainer._generate_and_score_completions must ask for the policy's log-probs first: we leave them out"
    )


def test_sampler_draws_one_order_per_epoch_from_a_generator_of_its_own():
    sampler = RepeatSampler(list(range(12)), mini_repeat_count=1, shuffle=True, seed=3)
    first, second = list(sampler), list(sampler)
    again = RepeatSampler(list(range(12)), mini_repeat_count=1, shuffle=True, seed=3)
    skip_passes(again, 1)
    assert list(again) == second != first, (
        "RepeatSampler must draw each epoch's order with one `randperm` of `sampler.generator`: we skip epochs by it"
    )


def test_generation_class_is_a_global_of_the_trainers_module():
    assert grpo_trainer.VLLMGeneration is VLLMGeneration, (
        "trl.trainer.grpo_trainer.VLLMGeneration: we put our subclass in its place while the trainer is built"
    )
    assert "self.vllm_generation = VLLMGeneration(" in inspect.getsource(GRPOTrainer.__init__), (
        "GRPOTrainer.__init__ must build VLLMGeneration by its global name"
    )


def test_vllm_generation_hooks():
    assert parameters(VLLMGeneration.generate) == ["prompts", "images", "num_generations", "profiler"], (
        "VLLMGeneration.generate: we override it"
    )
    source = inspect.getsource(VLLMGeneration.__init__)
    assert "self._init_vllm()" in source, "VLLMGeneration.__init__ must connect in `_init_vllm`, which we override"
    source = inspect.getsource(VLLMGeneration.sync_weights)
    for call in ("vllm_client.update_named_params(", "vllm_client.reset_prefix_cache()"):
        assert call in source, f"VLLMGeneration.sync_weights must call {call}: our clients implement it"


def test_vllm_generation_in_this_process():
    """See `tests/engines/test_vllm_contracts.py` for its call of the engine."""
    source = inspect.getsource(VLLMGeneration.generate)
    for call, why in {
        "torch.distributed.all_gather_object(gathered_prompts, prompts, group=self.tp_group)": "each process of a "
        "tensor-parallel group brings its part of the prompts",
        "self.llm.sleep(level=2)": "sleep mode surrounds our rollout",
        'self.llm.wake_up(tags=["kv_cache"])': "sleep mode surrounds our rollout",
    }.items():
        assert call in source, f"VLLMGeneration.generate must call `{call}`: {why}"
    assert parameters(VLLMGeneration._place_features) == ["features", "prompt_ids"], (
        "VLLMGeneration._place_features: we place a server's image features with it"
    )


def test_continuous_batching_is_one_call():
    source = inspect.getsource(GRPOTrainer._generate_single_turn)
    assert "unwrapped_model.generate_batch(" in source, (
        "GRPOTrainer._generate_single_turn must call `generate_batch` of the unwrapped model: its manager is ours"
    )


def test_tool_loop_asks_again_with_one_generation():
    assert "self._tool_call_loop(" in inspect.getsource(GRPOTrainer._generate), (
        "GRPOTrainer._generate must run `_tool_call_loop`: inside it, turns are later ones"
    )
    source = inspect.getsource(GRPOTrainer._tool_call_loop)
    assert "self._generate_single_turn(" in source, (
        "GRPOTrainer._tool_call_loop must generate with `_generate_single_turn`"
    )
    assert "num_generations=1" in source, "GRPOTrainer._tool_call_loop must ask for one completion per row"


def test_constructor_arguments_are_those_that_we_pass_on():
    from trl_darts import DARTSGRPOTrainer

    assert parameters(DARTSGRPOTrainer.__init__) == parameters(GRPOTrainer.__init__), (
        "GRPOTrainer.__init__: a drop-in subclass takes the same arguments in the same order"
    )


def test_attributes_that_we_read(model_dir, tmp_path):
    trainer = make_trainer(model_dir, make_args(tmp_path))
    for name in ("use_vllm", "num_generations", "eos_token_ids", "model_wrapped", "_step", "_metrics"):
        assert hasattr(trainer, name), f"GRPOTrainer.{name}: we read it"
    assert trainer._metrics["train"].default_factory is list, (
        "GRPOTrainer._metrics: we append to lists by mode and name"
    )
    unwrapped = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    assert unwrapped is trainer.model, (
        "accelerator.unwrap_model(model_wrapped) must be the model whose `generate` runs"
    )


def test_checkpoint_hook_gets_the_directory(model_dir, tmp_path):
    args = make_args(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    make_trainer(model_dir, args).train()
    assert (tmp_path / "checkpoint-1" / "darts_lengths.npz").exists(), (
        "Trainer._save_checkpoint must be called for each checkpoint, and write to `_get_output_dir(trial)`"
    )
    trainer = make_trainer(model_dir, make_args(tmp_path, max_steps=1))
    seen = []
    trainer._tracker_callback.load = seen.append
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert seen == [tmp_path / "checkpoint-1"], (
        "Trainer._load_optimizer_and_scheduler must be called with the checkpoint's path on resume"
    )


def test_the_trainers_state_is_written_last():
    assert parameters(GRPOTrainer._save_checkpoint) == parameters(Trainer._save_checkpoint) == ["model", "trial"], (
        "Trainer._save_checkpoint: our files are written before it"
    )
    source = inspect.getsource(Trainer._save_checkpoint)
    calls = ["self.save_model(", "_save_optimizer_and_scheduler(", "_save_rng_state(", "save_to_json(", "rotate_check"]
    places = [source.find(call) for call in calls]
    assert places == sorted(set(places) - {-1}), (
        f"Trainer._save_checkpoint must call {calls} in this order: the state's file says that a checkpoint is whole"
    )


def test_a_training_begins_with_nothing_of_trls():
    source = inspect.getsource(GRPOTrainer._prepare_inputs)
    assert "if self._step % generate_every == 0 or self._buffered_inputs is None:" in source, (
        "GRPOTrainer._prepare_inputs must generate where `_buffered_inputs` is None: a second training begins so"
    )


def test_micro_batches_are_cut_where_trl_keeps_them():
    source = inspect.getsource(GRPOTrainer._prepare_inputs)
    assert "inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]" in source, (
        "GRPOTrainer._prepare_inputs must train on `_buffered_inputs` in turn: we cut their padding there"
    )
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert source.count("batch_size=batch_size,") == 3, (
        "GRPOTrainer._generate_and_score_completions must give `batch_size` in the passes before the loss"
    )
    source += inspect.getsource(GRPOTrainer._compute_loss)
    assert source.count("self._get_per_token_logps_and_entropies(") == 4, (
        "GRPOTrainer._compute_loss must call `_get_per_token_logps_and_entropies` once, without `batch_size`"
    )
    assert "if x.shape[1] == 1:" in source, (
        "GRPOTrainer._compute_loss takes a single column for one value per row: we leave at least two"
    )


def test_columns_of_a_batch_are_known():
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    first = source[source.index("output = {") : source.index("}", source.index("output = {"))]
    columns = {*re.findall(r'"(\w+)":', first), *re.findall(r'output\["(\w+)"\] =', source)}
    images = {"pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes"}
    images |= {"image_position_ids", "num_images", "num_tiles"}
    known = {*PROMPT, *COMPLETION, *WHOLE, *images, "num_items_in_batch"}
    assert columns <= known, f"GRPOTrainer._generate_and_score_completions: how is {columns - known} padded?"
    assert len(columns) > 15, "GRPOTrainer._generate_and_score_completions must return a dictionary `output`"


def test_rows_of_a_batch_repeat_each_prompt(model_dir, tmp_path):
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.append(prompts)
        return [0.0] * len(prompts)

    make_trainer(
        model_dir, make_args(tmp_path, max_steps=1), reward_funcs=reward, train_dataset=letters_dataset()
    ).train()
    assert [seen[0][i] for i in range(0, 16, 4) for _ in range(4)] == seen[0], (
        "TRL's sampler must repeat each prompt `num_generations` times in a row: groups are cut out of that order"
    )
