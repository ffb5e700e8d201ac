"""`examples/train_grpo.py` with what the math recipes use: a data set's own columns, conversations, TRL's rewards."""

import importlib.util
import json
import subprocess
import sys

import pytest
import yaml
from datasets import Dataset, DatasetDict
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from trl_darts.errors import ConfigurationError
from trl_darts.recipes import ScriptArguments

from .commands import ROOT


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_grpo", ROOT / "examples" / "train_grpo.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")  # where Python looks when it runs the script
        spec.loader.exec_module(module)
    return module


def test_splits_that_are_not_used_need_no_columns(script, monkeypatch):
    columns = {"train": {"problem": ["1 + 1?"]}, "test": {"other": [1]}}
    splits = DatasetDict({name: Dataset.from_dict(values) for name, values in columns.items()})
    monkeypatch.setattr(script, "load_dataset", lambda *args, **kwargs: splits)
    arguments = ScriptArguments(dataset_name="some/data", prompt_column="problem")
    train, evaluation = script.load_splits(arguments, 0, evaluates=False)
    assert train[0]["prompt"] == [{"role": "user", "content": "1 + 1?"}]
    assert evaluation is None
    with pytest.raises(ConfigurationError, match=r"`prompt_column` \('problem'\) must be a column"):
        script.load_splits(arguments, 0, evaluates=True)


def test_splits_of_the_made_data_set(script):
    arguments = ScriptArguments(dataset_name="tiny_reasoner", num_prompts=3)
    train, evaluation = script.load_splits(arguments, 0, evaluates=True)
    assert (len(train), len(evaluation)) == (3, 64)


def test_no_data_set(script):
    with pytest.raises(ConfigurationError, match=r"`dataset_name` \(empty\) must be a data set"):
        script.load_splits(ScriptArguments(), 0, evaluates=False)


def make_reward_model(out_dir, language_model_dir, tokenizer):
    config = AutoConfig.from_pretrained(language_model_dir, num_labels=1, pad_token_id=tokenizer.pad_token_id)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    (out_dir / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def test_a_math_recipe_trains(tmp_path, tiny_model_dir, tokenizer):
    pytest.importorskip("math_verify")
    AutoModelForCausalLM.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    make_reward_model(tmp_path / "judge", tiny_model_dir, tokenizer)
    (tmp_path / "data").mkdir()
    rows = [{"problem": f"{i} + 1?", "solution": rf"It is $\boxed{{{i + 1}}}$."} for i in range(8)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = yaml.safe_load((ROOT / "configs" / "qwen2.5_3b_math.yaml").read_text())
    for name in ("dataset_config", "vllm_mode", "vllm_server_base_url"):
        recipe.pop(name)
    recipe |= {
        "model_name_or_path": str(tmp_path / "model"),
        "dataset_name": str(tmp_path / "data"),
        "reward_model_name_or_path": str(tmp_path / "judge"),
        "reward_weights": [0.5, *recipe["reward_weights"]],
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
    command = [sys.executable, "examples/train_grpo.py", "--config", str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    state = json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state.json").read_text())
    logged = state["log_history"][0]
    assert any(name.startswith("rewards/") and "judge" in name for name in logged)
    assert logged["rewards/accuracy_reward/mean"] == 0.0  # a random model
    assert -1 <= logged["rewards/soft_overlong_punishment_reward/mean"] < 0  # that mostly goes on to the limit
