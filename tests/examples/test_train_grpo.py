"""`trl_darts/cli/train.py` works as TRL's script does: data sets, rewards, and errors before the first step."""

import json
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from datasets import Dataset, IterableDataset
from packaging.requirements import Requirement
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import DatasetMixtureConfig
from trl.rewards import think_format_reward

from benchmarks.vllm_server import free_port
from trl_darts.errors import ConfigurationError
from trl_darts.recipes.script import OVERLONG, ScriptArguments


ROOT = Path(__file__).resolve().parents[2]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def script():
    from trl_darts.cli import train

    return train


@pytest.mark.parametrize("make", [Dataset.from_list, lambda rows: IterableDataset.from_generator(lambda: iter(rows))])
def test_columns_become_conversations(script, make):
    arguments = ScriptArguments(prompt_column="problem", solution_column="answer", system_prompt="Think.")
    (row,) = script.to_conversations(make([{"problem": "1 + 1?", "answer": "2"}]), arguments)
    assert row["prompt"] == [{"role": "system", "content": "Think."}, {"role": "user", "content": "1 + 1?"}]
    assert row["solution"] == "2"


def test_other_data_sets_stay_and_missing_columns_are_named(script):
    rows = Dataset.from_list([{"prompt": "a"}])
    assert script.to_conversations(rows, ScriptArguments()) is rows
    with pytest.raises(ConfigurationError, match=r"`prompt_column` \('question'\) must be a column .*: prompt"):
        script.to_conversations(rows, ScriptArguments(prompt_column="question"))


def test_splits(script, tmp_path):
    def recipe(**fields):
        mixture = DatasetMixtureConfig(fields.pop("datasets", []))
        return SimpleNamespace(script=ScriptArguments(**fields), datasets=mixture, config=SimpleNamespace(seed=0))

    arguments = ScriptArguments()
    made = script.load_splits(recipe(dataset_name="tiny_reasoner", num_prompts=3))
    assert {name: len(split) for name, split in made.items()} == {"train": 3, "test": 64}
    assert script.split_of(made, "dataset_test_split", arguments) is made["test"]
    arguments.dataset_train_split = "trian"
    with pytest.raises(ConfigurationError, match=r"`dataset_train_split` \('trian'\) must be a split .*: train, test"):
        script.split_of(made, "dataset_train_split", arguments)
    (tmp_path / "train.jsonl").write_text('{"prompt": "A"')
    for given, words in [
        ({"dataset_name": "no/such/data"}, "`dataset_name`"),
        ({"datasets": [{"path": str(tmp_path / "none")}]}, "`datasets`"),
    ]:
        with pytest.raises(ConfigurationError, match=rf"{words}.* can't be loaded: "):
            script.load_splits(recipe(**given))
    with pytest.raises(ConfigurationError, match=r"`dataset_name` .* can't be loaded: JSON parse error"):
        script.load_splits(recipe(dataset_name=str(tmp_path)))


def test_the_header_names_what_the_project_has():
    """PEP 723: for `uv run` and jobs on the Hub."""
    block = re.search(r"(?m)^# /// script\n((?:#.*\n)+?)# ///$", (ROOT / "examples" / "train_grpo.py").read_text())
    header = tomllib.loads(re.sub(r"(?m)^# ?", "", block[1]))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert header["requires-python"] == project["requires-python"]
    (needed,) = map(Requirement, header["dependencies"])
    assert needed.name == project["name"]
    assert needed.extras <= project["optional-dependencies"].keys()


def test_rewards(script, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    arguments = ScriptArguments(reward_model_name_or_path="some/model", reward_funcs=["think_format_reward"])
    assert script.load_rewards(arguments, 100) == ["some/model", think_format_reward]
    (reward,) = script.load_rewards(ScriptArguments(reward_funcs=[OVERLONG], soft_punish_cache=20), 100)
    # DAPO, Eq. 13
    assert reward(completion_ids=[[1] * length for length in (80, 85, 100, 101)]) == [0.0, -0.25, -1.0, -1.0]
    (tmp_path / "rewards_of_mine.py").write_text("def one(**kwargs):\n    return [1.0]\n")
    monkeypatch.chdir(tmp_path)  # TRL's script finds reward functions of the working directory
    (reward,) = script.load_rewards(ScriptArguments(reward_funcs=["rewards_of_mine.one"]), 100)
    assert reward() == [1.0]
    with pytest.raises(ConfigurationError, match=r"`reward_funcs` \('rewards_of_mine.two'\) can't be imported: .*two"):
        script.load_rewards(ScriptArguments(reward_funcs=["rewards_of_mine.two"]), 100)
    sys.modules.pop("rewards_of_mine")


def test_a_math_recipe_trains(script, monkeypatch, tmp_path, tiny_model_dir, tokenizer):
    """From another directory, with a mixture of data sets, a reward model, TRL's rewards and one of that directory."""
    pytest.importorskip("math_verify")
    model, judge = tmp_path / "model", tmp_path / "judge"
    AutoModelForCausalLM.from_pretrained(tiny_model_dir).save_pretrained(model)
    config = AutoConfig.from_pretrained(tiny_model_dir, num_labels=1, pad_token_id=tokenizer.pad_token_id)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(judge)
    for directory in (model, judge):
        tokenizer.save_pretrained(directory)
        (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    for name in ("one", "two"):
        rows = [{"problem": f"{i} + 1?", "solution": rf"It is $\boxed{{{i + 1}}}$."} for i in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.py").write_text(
        "def brevity(completion_ids, **kwargs):\n    return [0.0] * len(completion_ids)\n"
    )
    recipe = yaml.safe_load((ROOT / "configs" / "qwen2.5_3b_math.yaml").read_text())
    for name in ("dataset_name", "dataset_config", "vllm_mode", "vllm_server_base_url"):
        recipe.pop(name)
    recipe |= {
        "model_name_or_path": str(model),
        "datasets": [{"path": "json", "data_files": str(tmp_path / f"{name}.jsonl")} for name in ("one", "two")],
        "reward_model_name_or_path": str(judge),
        "reward_funcs": [*recipe["reward_funcs"], "mine.brevity"],
        "reward_weights": [0.5, *recipe["reward_weights"], 1.0],
        "output_dir": str(tmp_path / "out"),
        "use_vllm": False,
        "stream_logprobs": False,
        "use_cpu": True,
        "bf16": False,
        "max_completion_length": 16,
        "soft_punish_cache": 8,
        "gradient_accumulation_steps": 2,
        "max_steps": 1,
        "save_steps": 1,
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script adds the working directory
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", "--config", "recipe.yaml"])
    script.main()
    sys.modules.pop("mine")
    state = json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state.json").read_text())
    logged = state["log_history"][0]
    assert any(name.startswith("rewards/") and "judge" in name for name in logged)
    assert logged["rewards/accuracy_reward/mean"] == logged["rewards/brevity/mean"] == 0.0  # a random model
    assert -1 <= logged["rewards/soft_overlong_punishment_reward/mean"] < 0  # that mostly goes on to the limit


@pytest.mark.vllm
def test_a_training_with_a_server(script, server, model_dir, monkeypatch, tmp_path):
    words = ["--config", "configs/tiny_reasoner.yaml", "--model_name_or_path", str(model_dir)]
    words += ["--use_vllm", "--vllm_mode", "server", "--vllm_server_base_url", server.base_url]
    words += ["--vllm_group_port", str(free_port()), "--output_dir", str(tmp_path), "--max_steps", "3"]
    words += ["--per_device_train_batch_size", "16", "--max_completion_length", "64", "--save_steps", "3"]
    words += ["--defer_unsettled_groups", "false"]  # surplus groups would be trained on one step later
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script adds the working directory
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", *words])
    script.main()
    state = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    logs = [entry for entry in state["log_history"] if "darts/rollout/seconds" in entry]
    assert len(logs) == 3
    assert all(entry["sampling/sampling_logp_difference/max"] < 1e-3 for entry in logs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--config", "hf://a/b"],
            "Error: `repo_id` ('a/b') can't be looked up: https://huggingface.co can't be reache",
        ),
        (
            ["--max_num_generations", "3"],
            "Error: `max_num_generations` (3) must be at least `num_generations` (8). Ra",
        ),
        (
            ["--num_generations", "eight"],
            "Error: Argument --num_generations/--num-generations: invalid int value: 'eig",
        ),
        (["--report_to", "wandbb"], "Error: wandbb is not supported, only "),
        (
            ["--dataset_train_split", "trian"],
            "Error: `dataset_train_split` ('trian') must be a split of the data set: tra",
        ),
        (["--num_prompts", "7"], "Error: `train_dataset` (7 prompts) must have at least the prompts of one gener"),
        (["--model_name_or_path", "examples/none/checkpoint"], "Error: `model_name_or_path` ('examples/none/chec"),
        (["--model_name_or_path", "examples/notebooks"], "Error: `model_name_or_path` ('examples/notebooks') can't b"),
    ],
)
def test_before_the_training_an_error_is_one_line(script, monkeypatch, tmp_path, capsys, arguments, message):
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script adds the working directory
    monkeypatch.chdir(ROOT)
    config = [] if "--config" in arguments else ["--config", "configs/tiny_reasoner.yaml"]
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", *config, *arguments, "--output_dir", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(message)
