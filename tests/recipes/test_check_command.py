"""`trl-darts config check`: exit codes, the table, findings, and an example in `--help` that works."""

import re
import shlex
import subprocess
import sys

import pytest

from tests.test_imports import loaded

from .commands import ROOT, run


def words(result):
    return " ".join(result.stdout.split())


def test_table(recipe):
    result = run(
        recipe(), "--num-processes", 3, "--num-prompts", 50, "--max-prompt-length", 20, "--max-model-len", 120
    )
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    text = words(result)
    assert "processes 3 " in text
    assert "generation batch 48 rows: 12 prompts × 4 " in text
    assert "optimizer step 12 prompts; steps per generation: 1 " in text
    assert "candidates 48 to 72 per generation, 60 on average" in text
    assert "tokens at most 7,200 per generation" in text
    assert "optimizer steps 4 per epoch, 8 in all" in text
    assert "20 + 100 tokens, and the server takes 120" in text
    assert re.search(r"memory per GPU 0\.\d GiB, an estimate for [\d,.e+]+ parameters", text)


def test_what_is_not_known_says_how_to_give_it(recipe):
    text = words(run(recipe(model_name_or_path="/no/model")))
    assert "unknown (--num-prompts) per epoch" in text
    assert "unknown (--max-prompt-length) + 100" in text
    assert "memory per GPU unknown. `model_name_or_path` ('/no/model') could not be read" in text
    assert "Give `--num-parameters`, such as 7.6e9." in text


def test_processes_of_the_accelerate_config(recipe):
    ddp = ROOT / "configs" / "accelerate" / "ddp.yaml"
    assert "processes 2 " in words(run(recipe(), "--accelerate-config", ddp))
    assert "processes 4 " in words(run(recipe(), "--accelerate-config", ddp, "--num-processes", 4))


def test_memory_that_does_not_fit(recipe):
    result = run(recipe(), "--num-parameters", 2**30, "--gpu-memory", 15.9)  # 16 GiB
    assert result.exit_code == 2
    assert "take 16.0 GiB per GPU, and must fit into 15.9 GiB. Use more processes" in result.stderr
    assert run(recipe(), "--num-parameters", 2**30, "--gpu-memory", 16.1).exit_code == 0


def test_an_optimizer_in_8_bits_takes_less(recipe):
    args = ("--num-parameters", 7.6e9, "--gpu-memory", 80)
    assert run(recipe(), *args).exit_code == 2
    result = run(recipe(optim="adamw_bnb_8bit"), *args)
    assert result.exit_code == 0, result.output
    assert "memory per GPU 70.8 GiB" in words(result)


def test_a_rough_estimate_is_only_a_warning(recipe):
    result = run(recipe(per_device_train_batch_size=1024), "--gpu-memory", 0.1)
    assert result.exit_code == 0
    assert re.search(r"Warning: .*The estimate of \d+\.\d GiB per GPU is over 0.1 GiB", result.stderr)


def test_vllm_in_the_same_process_takes_its_share(recipe):
    path = recipe(use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.5)
    result = run(path, "--num-parameters", 2**30, "--gpu-memory", 30)
    assert result.exit_code == 2
    assert "must fit into 15.0 GiB that vLLM leaves of 30 GiB" in result.stderr


@pytest.mark.parametrize("prompt", [(), ("--max-prompt-length", 30)])
def test_sequences_that_the_server_would_refuse(recipe, prompt):
    result = run(recipe(), "--max-model-len", 129 if prompt else 100, *prompt)
    assert result.exit_code == 2
    assert "must be at least prompt and completion together" in result.stderr
    assert run(recipe(), "--max-model-len", 130 if prompt else 101, *prompt).exit_code == 0


def test_length_of_the_colocated_engine(recipe):
    result = run(recipe(use_vllm=True, vllm_mode="colocate", vllm_max_model_length=100))
    assert result.exit_code == 2
    assert "`vllm_max_model_length` (100) must be at least" in result.stderr


@pytest.mark.parametrize(
    ("fields", "warning"),
    [
        (
            {"steps_per_generation": 3},
            "`steps_per_generation` (3) is no multiple of `gradient_accumulation_steps` (2)",
        ),
        ({"per_device_train_batch_size": 3, "steps_per_generation": 4}, "An optimizer step has 1.5 prompts"),
    ],
)
def test_batches_that_run_but_should_not(recipe, fields, warning):
    result = run(recipe(**fields))
    assert result.exit_code == 0, result.output
    assert f"Warning: {recipe()}: {warning}" in result.stderr


def test_math_verify_is_missing(recipe, monkeypatch):
    monkeypatch.setattr("trl_darts.recipes.findings.is_math_verify_available", lambda: False)
    result = run(recipe(reward_funcs=["accuracy_reward"]))
    assert result.exit_code == 0
    assert "pip install 'trl-darts[math]'" in result.stderr


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 1},
            "The generation batch (5 rows: 5 per dev",
        ),
        ({"num_longst": 1}, "`num_longst` must be a field of the script's, the trainer's or the model's arguments."),
        ({"num_longest": 9}, "`num_longest` (9)"),
    ],
)
def test_bad_recipe(recipe, fields, message):
    path = recipe(**fields)
    result = run(path)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {path}: {message}")
    assert len(result.stderr.splitlines()) == 1


def test_a_made_data_set_has_the_recipes_number_of_prompts(recipe):
    path = recipe(dataset_name="tiny_reasoner", num_prompts=50)
    assert "optimizer steps 12 per epoch, 24 in all" in words(run(path))
    assert "optimizer steps 12 per epoch, 24 in all" in words(run(path, "--num-prompts", 50))
    assert "optimizer steps 128 per epoch" in words(run(recipe("default.yaml", dataset_name="tiny_reasoner")))


def test_another_number_of_prompts_than_is_made(recipe):
    result = run(recipe(dataset_name="tiny_reasoner", num_prompts=50), "--num-prompts", 512)
    assert result.exit_code == 2
    assert "`--num-prompts` (512) must be the recipe's `num_prompts` (50)" in result.stderr


def test_too_few_prompts(recipe):
    result = run(recipe(), "--num-prompts", 3)
    assert result.exit_code == 2
    assert "`num_prompts` (3) must be at least the prompts of one generation (4)" in result.stderr


def test_all_files_are_checked_although_one_fails(recipe):
    bad, good = recipe("bad.yaml", nothing=1), recipe("good.yaml")
    result = run(bad, good, bad.with_name("none.yaml"))
    assert result.exit_code == 2
    assert str(good) in words(result)
    assert [line.split(": ")[1] for line in result.stderr.splitlines()] == [str(bad), str(bad.with_name("none.yaml"))]


@pytest.mark.parametrize("args", [(), ("--num-processes", "0"), ("--accelerate-config", "nowhere.yaml")])
def test_bad_options(recipe, args):
    files = [recipe()] if args else []
    result = run(*files, *args)
    assert result.exit_code == 2
    assert result.stdout == ""


def test_an_accelerate_config_that_can_not_work(recipe, tmp_path):
    path = tmp_path / "accelerate.yaml"
    path.write_text("{distributed_type: DEEPSPEED, deepspeed_config: ds.json}")
    result = run(recipe(), "--accelerate-config", path)
    assert result.exit_code == 2
    assert "`deepspeed_config` ('ds.json')" in result.stderr


def test_example_of_the_help_works(monkeypatch):
    text = " ".join(run("--help").stdout.replace("│", " ").split())
    (example,) = re.findall(r"trl-darts config check (.*?--gpu-memory \d+)", text)
    monkeypatch.chdir(ROOT)
    result = run(*shlex.split(example))
    assert result.exit_code == 0, result.output


def test_in_a_process_of_its_own(recipe):
    command = [sys.executable, "-m", "trl_darts.cli", "config", "check", str(recipe()), "--num-processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "generation batch" in done.stdout


def test_help_does_not_wait_for_torch():
    assert "torch" not in loaded("import trl_darts.cli.config.check")
