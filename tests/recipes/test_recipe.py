"""Tests that recipes are parsed by the script's classes, and that invalid ones give one clear error."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from accelerate.data_loader import prepare_data_loader
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import Trainer
from trl.trainer.utils import RepeatSampler
from typer.testing import CliRunner

from tests.test_imports import loaded
from trl_darts.cli import app
from trl_darts.errors import ConfigurationError
from trl_darts.recipes.fields import actions, checked, hints
from trl_darts.recipes.other_names import OTHER_NAMES, VERL
from trl_darts.recipes.recipe import read_command_line, read_recipe, steps_per_epoch


ROOT = Path(__file__).resolve().parents[2]
RECIPE = str(ROOT / "configs" / "tiny_reasoner.yaml")
SMALL = {
    "model_name_or_path": "some/model",
    "dataset_name": "some/data",
    "reward_funcs": ["think_format_reward"],
    "num_generations": 4,
    "max_num_generations": 6,
    "target_redundancy": 1.25,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 100,
    "num_train_epochs": 2,
    "report_to": "none",
}
NO_SPARE = {"max_num_generations": None, "target_redundancy": None}  # for schedules that keep all candidates
OVERLONG = ["get_soft_overlong_punishment"]


@pytest.fixture
def recipe(tmp_path):
    def write(name="recipe.yaml", **fields):
        path = tmp_path / name
        path.write_text(yaml.safe_dump(SMALL | fields))
        return path

    return write


def check(*words):
    return CliRunner().invoke(app, ["config", "check", *map(str, words)])


def test_values_are_those_of_the_file_for_processes_that_are_not_there(recipe, monkeypatch):
    monkeypatch.delenv("RECIPE_VARIABLE", raising=False)
    read = read_recipe(
        recipe(
            learning_rate="1e-6",
            reward_weights=["1e-1"],
            bf16=True,
            tf32=True,
            use_peft=True,
            env={"RECIPE_VARIABLE": "1"},
        ),
        5,
    )
    assert read.config.reward_weights == [0.1]
    assert (read.config.learning_rate, read.config.bf16, read.model.use_peft) == (1e-6, True, True)
    assert (read.config.world_size, read.config.generation_batch_size) == (5, 8 * 5 * 2)
    assert "RECIPE_VARIABLE" not in os.environ


@pytest.mark.parametrize(
    "fields",
    [
        {"reward_weights": [1, "2e-1"], "reward_model_name_or_path": "some/reward"},
        {"reward_funcs": None, "reward_model_name_or_path": "some/reward", "reward_weights": [1.0]},
        {"dataset_name": None, "datasets": [{"path": "some/data"}, {"path": "other/data", "split": "test"}]},
        {"reward_funcs": ["my_package.rewards.mine"], "long_end_patience": 3, "max_grad_norm": float("inf")},
        {"use_peft": True, "load_in_4bit": True, "lora_target_modules": "all-linear", "scale_rewards": False},
        {"use_vllm": "yes", "vllm_mode": "server", "vllm_tensor_parallel_size": 2, "schedule": "sorted", **NO_SPARE},
        {"gradient_checkpointing_kwargs": {"use_reentrant": False}, "max_num_generations": None},
    ],
)
def test_recipes_that_run(recipe, fields):
    result = check(recipe(**fields))
    assert result.exit_code == 0, result.output
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_generation": 8}, "yaml: `num_generation` is not a field of .* Did you mean `num_generations`"),
        ({"num_generations": "eight"}, r"`num_generations` \('eight'\) must be of type int"),
        ({"num_generations": True}, r"`num_generations` \(True\) must be of type int"),
        ({"reward_funcs": "accuracy_reward"}, r"`reward_funcs` .* must be of type list or None"),
        ({"lr_scheduler_type": "straight"}, r"`lr_scheduler_type` \('straight'\) must be one of 'linear', "),
        ({"reward_funcs": ["acuracy_reward"]}, r"`reward_funcs` \(\['acuracy_reward'\]\) must be among accuracy_rew"),
        ({"reward_weights": [1.0, 2.0]}, r"`reward_weights` \(\[1.0, 2.0\]\) must be as many as the rewards \(1\)"),
        ({"dataset_name": None}, r"`dataset_name` \(empty\) must be a data set of the Hub"),
        ({"num_prompts": 8}, r"`num_prompts` \(8\) is only for `dataset_name` 'tiny_reasoner'"),
        ({"num_prompts": 0}, r"`num_prompts` \(0\) must be at least 1"),
        ({"system_prompt": "Think."}, r"`system_prompt` \('Think.'\) only has an effect with `prompt_column`"),
        ({"reward_funcs": OVERLONG}, r"`reward_funcs` .* needs `soft_punish_cache` with 'get_soft_overlong"),
        ({"reward_funcs": OVERLONG, "soft_punish_cache": 101}, r"\(101\) must be at most `max_completion_length`"),
        ({"per_device_train_batch_size": 0}, r"`per_device_train_batch_size` \(0\) must be at least 1"),
        (
            {"per_device_train_batch_size": 5},
            r"5\) × 1 process × `steps_per_generation` \(2\)\) must be divisible by `num_g",
        ),
        ({"num_generations": 0}, r"`num_generations` \(0\) must be at least 1"),
        (
            {"model_name_or_path": "no/such/model"},
            r"`model_name_or_path` \(.no/such/model.\) must be a directory with",
        ),
        (
            {"use_vllm": True, "vllm_mode": "server", "weight_sync_dir": "no/such"},
            r"`weight_sync_dir` \('no/such'\) must be a directory that exists",
        ),
        ({"use_vllm": True, "vllm_tensor_parallel_size": 2}, r"`vllm_tensor_parallel_size` \(2\) must divide the pro"),
        ({"use_vllm": True, "vllm_max_model_length": 100}, r"`vllm_max_model_length` \(100\) must be at least prompt"),
        ({"load_in_4bit": True}, r"`load_in_4bit` \(True\) needs `use_peft`"),
        (
            {"use_vllm": True, "vllm_mode": "server", "weight_sync": "adapter"},
            r"`weight_sync` \('adapter'\) needs `use_peft`",
        ),
        ({"sync_ref_model": True, "beta": 0.1, "use_peft": True}, r"`sync_ref_model` \(True\) does not run with `use"),
        # Errors of the config and the trainer.
        ({"max_num_generations": 2}, r"`max_num_generations` \(2\) must be at least `num_generations` \(4\)"),
        ({"schedule": "sorted", **NO_SPARE}, r"`schedule` \('sorted'\) takes prompts before or out of their turn"),
    ],
)
def test_recipes_that_would_end_the_training(recipe, fields, message):
    path = recipe(**fields)
    result = check(path)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"Error: {path}: ")
    with pytest.raises(ConfigurationError, match=message):
        raise ConfigurationError(line)


@pytest.mark.parametrize(
    ("fields", "attributes"),
    [
        ({"report_to": ["tensorboard", "wandb"]}, {"report_to": ["tensorboard", "wandb"]}),
        ({"report_to": "tensorboard"}, {"report_to": ["tensorboard"]}),
        ({"report_to": []}, {"report_to": []}),
        ({"optim_target_modules": ["q_proj", "v_proj"]}, {"optim_target_modules": ["q_proj", "v_proj"]}),
        ({"optim_target_modules": "all-linear"}, {"optim_target_modules": "all-linear"}),
        ({"debug": "underflow_overflow"}, {"debug": ["underflow_overflow"]}),
        ({"debug": ["underflow_overflow"]}, {"debug": ["underflow_overflow"]}),
        ({"fsdp": ["full_shard"]}, {"fsdp": True}),
        ({"fsdp": True, "resume_from_checkpoint": True}, {"fsdp": True, "resume_from_checkpoint": True}),
        ({"run_name": 7, "learning_rate": 1, "use_cpu": 1}, {"run_name": "7", "learning_rate": 1.0}),
        ({"label_names": ["a"], "include_for_metrics": ["loss"]}, {"label_names": ["a"]}),
    ],
)
def test_a_field_that_takes_a_list_or_a_word_takes_both(recipe, fields, attributes):
    config = read_recipe(recipe(**fields)).config
    assert {name: getattr(config, name) for name in attributes} == attributes


def test_every_field_with_a_list_in_its_type_takes_one():
    """Found by their types, so that a field of a later version is too."""
    found = [name for name, hint in hints().items() if "list[str]" in str(hint) and name in actions()]
    assert {"report_to", "optim_target_modules", "label_names", "reward_funcs", "lora_target_modules"} <= {*found}
    for name in found:
        assert checked(name, ["a", "b"]) == ["a", "b"]


def test_all_that_is_wrong_with_a_file_is_told_at_once(recipe):
    """Unknown names, wrong types, and values that don't go together; each once, with its line, and no follow-up."""
    path = recipe(
        model_name_or_path="no/such/model",
        num_generations="eight",
        per_device_train_batch_size=9,  # no error: what it must be a multiple of is unknown
        num_generatoins=4,
        max_prompt_length=512,
        eval_strategy=False,
        use_vllm=True,
        vllm_mode="local",
        top_p=2,
        reward_weights=[1.0, 2.0],
        report_to=["wandb"],
    )
    result = check(path)
    assert result.exit_code == 2
    first, *lines = result.stderr.splitlines()
    assert first == f"Error: {path}: 8 errors:"
    assert result.stderr.count(str(path)) == 1
    written = path.read_text().splitlines()
    names = [re.match(r"  `(\w+)`.*\(line (\d+)\)$", line).groups() for line in lines]
    assert [name for name, line in names] == [written[int(line) - 1].partition(":")[0] for _, line in names]
    names_and_types = {"num_generations", "num_generatoins", "max_prompt_length", "eval_strategy"}
    together = {"model_name_or_path", "vllm_mode", "top_p", "reward_weights"}
    assert {name for name, _ in names} == names_and_types | together
    assert "Did you mean `num_generations`" in result.stderr
    assert "quote it" in result.stderr
    with pytest.raises(ConfigurationError, match=r"8 errors:\n(.*\n){7}.*"):
        read_command_line(["--config", str(path), "--use_cpu", "--bf16", "false"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("max_prompt_length", "was removed from TRL. Leave it out, and filter the data set"),
        ("torch_dtype", "was removed from TRL. Set `dtype` instead."),
        ("vllm_guided_decoding_regex", "was removed from TRL. Set `vllm_structured_outputs_regex` instead."),
        ("use_liger_loss", "was removed from TRL. Leave it out"),
        ("evaluation_strategy", "was removed from transformers. Set `eval_strategy` instead."),
        ("warmup_ratio", "was removed from transformers. Set `warmup_steps`, which takes a share"),
        ("dataset_prompt_column", "is a field of open-r1. Set `prompt_column` instead."),
        ("n_samples_per_prompt", "is a field of OpenRLHF. Set `num_generations` instead."),
    ],
)
def test_names_of_other_versions_and_libraries(recipe, name, words):
    assert f"`{name}` {words}" in check(recipe(**{name: 1})).stderr
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        read_command_line(["--config", RECIPE, f"--{name}", "1"])


def test_what_stands_for_other_names_is_a_field():
    for name, (_, remedy) in OTHER_NAMES.items():
        assert name not in actions(), f"{name} is a field again: delete its line"
        assert not remedy.isidentifier() or remedy in actions()
        named = {word.partition(".")[0].partition("=")[0] for word in re.findall(r"`([a-z_.=']+)`", remedy)}
        assert named <= {*actions(), "env"}
    assert {*VERL.values()} <= {*actions()}


def test_a_file_of_verl(recipe):
    result = check(recipe(actor_rollout_ref={"rollout": {"n": 8, "name": "vllm"}, "actor": {"optim": {"lr": 1e-6}}}))
    assert (
        "`actor_rollout_ref` is a section of verl's files, whose settings have other names here: "
        "`actor_rollout_ref.actor.optim.lr` is `learning_rate`, `actor_rollout_ref.rollout.n` is `num_generations`."
    ) in result.stderr
    with pytest.raises(ConfigurationError, match=r"`trainer.total_epochs` is `num_train_epochs`"):
        read_command_line(["--config", RECIPE, "--trainer.total_epochs=3"])


def test_a_file_that_is_no_yaml_is_named_once(tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text("a: [1\n")
    (line,) = check(path).stderr.splitlines()
    assert line.startswith(f"Error: {path}: must be plain YAML: ")
    assert line.count(str(path)) == 1


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--num_longest", "2", "--top_k", "0", "--no_tail_pruning"], {"num_longest": 2, "tail_pruning": False}),
        (["--max-num-generations=9", "--max_num_gen", "10", "--target_redun", "1.25"], {"max_num_generations": 10}),
        (
            ["--scale_rewards", "none", "--long_end_every", "none", "--defer_unsettled_groups", "false"],
            {"scale_rewards": "none", "long_end_every": None, "defer_unsettled_groups": False},
        ),
        (["--tail_pruning", "1", "--long_end_patience", "2"], {"tail_pruning": True, "long_end_patience": 2.0}),
    ],
)
def test_a_command_line_changes_the_file(words, values, tmp_path):
    config = read_command_line(["--config", RECIPE, "--output_dir", str(tmp_path), *words]).config
    assert {name: getattr(config, name) for name in values} == values


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_generationz", "8"], "^`num_generationz` is not a field of .* Did you mean `num_generations`"),
        (["--schedul=grpo", "--frobnicate"], "`frobnicate` is not a field of .* Remove it"),
        (["--use_vlm", "--vllm_mode", "server", "--vllm_server_host", "a"], "^`use_vlm` is not a field"),
        (["--max-num-gen=4"], r"`max_num_generations` \(4\) must be at least `num_generations` \(8\)"),
        (["--long_end_patience", "none"], r"`long_end_every` \(4\) has no effect with `long_end_patience` \(None\)"),
        (["--num_generations", "some"], "Argument --num_generations/--num-generations: invalid int value: 'some'"),
        (["--num_generations"], "--num_generations/--num-generations: expected one argument"),
        (["--num_gen", "8"], "Ambiguous option: --num_gen could match"),
        (["a word"], r"not used by the HfArgumentParser: \['a word'\]"),
        (["--rollout_ahead", "1"], r"`rollout_ahead` \(1\) .* trainer's own process"),
        (["--length_history", "nowhere"], r"`length_history` \('nowhere'\) must be a checkpoint"),
        (
            ["--use_vllm", "--vllm_mode", "server", "--weight_sync_dir", "nowhere"],
            r"`weight_sync_dir` \('nowhere'\) must be a directory that exists",
        ),
        (["--per_device_train_batch_size", "60"], r"\(60 rows: .* × 1 process × .* divisible by"),
        (["--dataset_name", "org/other"], r"`num_prompts` \(64\) .* only for `dataset_name`"),
        (["--reward_funcs", "no_such"], r"`reward_funcs` \(\['no_such'\]\) must be among"),
        (
            ["--resume_from_checkpoint", "true", "--output_dir", "nowhere"],
            r"`resume_from_checkpoint` \(true\) needs a complete checkpoint in `output_dir` \('nowhere'\)",
        ),
    ],
)
def test_command_lines_that_can_not_run(words, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        read_command_line(["--config", RECIPE, *words])
    assert "\n" not in str(caught.value)


def test_all_files_are_checked_although_one_fails(recipe):
    bad, good = recipe("bad.yaml", nothing=1), recipe("good.yaml")
    result = check(bad, good, bad.with_name("none.yaml"))
    assert result.exit_code == 2
    assert re.findall("^.*: ok$", result.stdout, re.MULTILINE) == [f"{good}: ok"]
    assert [line.split(": ")[1] for line in result.stderr.splitlines()] == [str(bad), str(bad.with_name("none.yaml"))]


def test_what_a_recipe_comes_to(recipe):
    path, processes = recipe(), ("--num-processes", 3)
    result = check(path, *processes, "--num-prompts", 50, "--max-prompt-length", 20, "--max-model-len", 120)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "processes 3 generation batch 48 rows: 12 prompts × 4 optimizer step 12 prompts; 1 step per gen" in text
    assert "candidates 48 to 72 per generation, 60 on average tokens at most 7,200 per generation" in text
    assert text.endswith("optimizer steps 4 per epoch, 8 in all")
    assert "unknown (--num-prompts) per epoch" in check(path).stdout
    made = recipe("made.yaml", dataset_name="tiny_reasoner", num_prompts=50)
    assert "12 per epoch, 24 in all" in check(made).stdout
    assert "`--num-prompts` (9) must be the recipe's `num_prompts` (50)" in check(made, "--num-prompts", 9).stderr
    for words in (("--max-model-len", 119, "--max-prompt-length", 20), ("--num-prompts", 3)):
        result = check(path, *processes, *words)
        assert result.exit_code == 2
        assert "must be at least" in result.stderr


@pytest.mark.parametrize(
    ("fields", "warning"),
    [
        (
            {"steps_per_generation": 3},
            "`steps_per_generation` (3) is not a multiple of `gradient_accumulation_steps` (2)",
        ),
        ({"per_device_train_batch_size": 3, "steps_per_generation": 4}, "An optimizer step has 1.5 prompts"),
    ],
)
def test_batches_that_run_but_should_not(recipe, fields, warning):
    result = check(recipe(**fields))
    assert result.exit_code == 0, result.output
    assert f"Warning: {recipe()}: {warning}" in result.stderr


def test_a_recipe_for_another_number_of_processes(recipe, tmp_path, caplog):
    path = recipe(num_processes=4)
    warning = "`num_processes` (4) must be the number of training processes (1): an optimizer step has 4 prompts inst"
    for words in ((), ("--num-processes", 4)):
        result = check(path, *words)
        assert "processes         4\n" in result.stdout
        assert result.stderr == ""
    result = check(path, "--num-processes", 1)
    assert result.exit_code == 0
    assert f"Warning: {path}: {warning}" in result.stderr
    launch = tmp_path / "accelerate.yaml"
    launch.write_text("num_processes: 2")
    assert "must be the number of training processes (2)" in check(path, "--accelerate-config", launch).stderr
    assert "`num_processes` (0) must be at least 1" in check(recipe(num_processes=0)).stderr
    read_command_line(["--config", str(recipe(num_processes=1)), "--use_cpu", "--bf16", "no"])
    assert caplog.text == ""
    read_command_line(["--config", str(recipe(num_processes=4)), "--use_cpu", "--bf16", "no"])
    assert warning in caplog.text


def test_gradients_that_fsdp_keeps_whole(recipe, tmp_path):
    launch = tmp_path / "accelerate.yaml"
    launch.write_text("{distributed_type: FSDP, num_processes: 2}")
    result = check(recipe(), "--accelerate-config", launch)
    assert "processes         2" in result.stdout
    assert "`gradient_accumulation_steps` (2) keeps unsharded gradients on each GPU with FSDP2" in result.stderr
    synced = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    for path in (recipe(**synced), recipe(gradient_accumulation_steps=1)):
        assert check(path, "--accelerate-config", launch).stderr == ""
    assert check(recipe()).stderr == ""


@pytest.mark.parametrize(
    "text",
    [
        "num_generations: 8",
        "{distributed_type: FSDP, num_processes: two}",
        "{distributed_type: 'NO', num_processes: 0}",
    ],
)
def test_a_file_that_is_not_accelerates(recipe, tmp_path, text):
    launch = tmp_path / "accelerate.yaml"
    launch.write_text(text)
    result = check(recipe(), "--accelerate-config", launch)
    assert result.exit_code == 2
    assert f"`--accelerate-config` ('{launch}') must be a file of `accelerate config`" in result.stderr


def test_math_verify_is_missing(recipe, monkeypatch):
    monkeypatch.setattr("trl_darts.recipes.recipe.is_math_verify_available", lambda: False)
    result = check(recipe(reward_funcs=["accuracy_reward"]))
    assert result.exit_code == 0
    assert "pip install 'trl-darts[math]'" in result.stderr


def test_help_does_not_wait_for_torch():
    assert "torch" not in loaded("import trl_darts.cli.config")


def steps_of_the_trainer(config, num_processes, num_prompts, prompts_per_generation):
    """Uses TRL's sampler, accelerate's distributed loader, and the Trainer's number of steps."""
    sampler = RepeatSampler(
        range(num_prompts),
        mini_repeat_count=config.num_generations,
        batch_size=prompts_per_generation,
        repeat_count=config.num_iterations * config.steps_per_generation,
    )
    rows = prompts_per_generation * config.num_generations // num_processes
    loader = DataLoader(range(num_prompts), batch_size=rows, sampler=sampler)
    loader = prepare_data_loader(loader, num_processes=num_processes, process_index=0, put_on_device=False)
    trainer = SimpleNamespace(
        get_total_train_batch_size=lambda args: 1, get_sp_size=lambda: 1, num_examples=lambda loader: num_prompts
    )
    config.max_steps, config.num_train_epochs = -1, 1.0
    return Trainer.set_initial_training_values(trainer, config, loader)[1]


@settings(max_examples=50, deadline=None)
@example(num_processes=1, batch=1, accumulation=5, steps=11, iterations=1, generations=11, num_prompts=25)
@given(
    num_processes=st.integers(1, 4),
    batch=st.integers(1, 4),
    accumulation=st.integers(1, 12),
    steps=st.integers(1, 12),
    iterations=st.integers(1, 3),
    generations=st.integers(2, 12),
    num_prompts=st.integers(1, 60),
)
def test_steps_are_those_of_the_trainer(
    num_processes, batch, accumulation, steps, iterations, generations, num_prompts
):
    steps *= generations if num_processes * batch * steps % generations else 1  # otherwise, TRL would reject it
    config = SimpleNamespace(
        num_generations=generations,
        num_iterations=iterations,
        steps_per_generation=steps,
        gradient_accumulation_steps=accumulation,
    )
    prompts = num_processes * batch * steps // generations
    num_prompts = max(num_prompts, prompts)
    expected = steps_of_the_trainer(config, num_processes, num_prompts, prompts)
    assert steps_per_epoch(num_prompts, prompts, config) == expected
