"""`examples/train_grpo.py` with what the math recipes use: a data set's own columns, conversations, TRL's rewards."""

import json
import subprocess
import sys

import pytest
import yaml
from transformers import AutoModelForCausalLM

from .commands import ROOT


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_a_math_recipe_trains(tmp_path, tiny_model_dir, tokenizer):
    pytest.importorskip("math_verify")
    AutoModelForCausalLM.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (tmp_path / "data").mkdir()
    rows = [{"problem": f"{i} + 1?", "solution": rf"It is $\boxed{{{i + 1}}}$."} for i in range(8)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = yaml.safe_load((ROOT / "configs" / "qwen2.5_3b_math.yaml").read_text())
    for name in ("dataset_config", "vllm_mode", "vllm_server_base_url"):
        recipe.pop(name)
    recipe |= {
        "model_name_or_path": str(tmp_path / "model"),
        "dataset_name": str(tmp_path / "data"),
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
    assert logged["rewards/accuracy_reward/mean"] == 0.0  # a random model
    assert -1 <= logged["rewards/soft_overlong_punishment_reward/mean"] < 0  # that mostly goes on to the limit
