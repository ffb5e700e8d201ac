"""Values that TRL has no list of are those that its code compares with: no more, no fewer."""

import ast
import inspect
import math
import textwrap

import pytest
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from trl_darts import DARTSGRPOConfig
from trl_darts.errors import ConfigurationError
from trl_darts.field_checks import TRL_CHOICES, TRL_VLLM_CHOICES, VESPO_SAMPLING_MODES


CHOICES = TRL_CHOICES | TRL_VLLM_CHOICES


def compared(cls: type, name: str) -> set[str]:
    """The strings that the class compares its attribute with."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == f"self.{name}":
            for value in map(ast.literal_eval, node.comparators):
                found |= {value} if isinstance(value, str) else set(value)
    return found


@pytest.mark.parametrize("name", CHOICES)
def test_choices_are_those_of_trl(name):
    used = compared(VLLMGeneration, "mode") if name == "vllm_mode" else compared(GRPOTrainer, name)
    assert used == set(CHOICES[name])


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in CHOICES for value in CHOICES[name]])
def test_what_trl_takes_is_taken(name, value):
    loss = {"loss_type": "vespo"} if value in VESPO_SAMPLING_MODES else {}
    fields = {"use_vllm": name in TRL_VLLM_CHOICES, "vllm_server_base_url": "http://a:1", name: value, **loss}
    made = DARTSGRPOConfig(output_dir="unused", use_cpu=True, report_to=[], **fields)
    assert getattr(made, name) == value


@pytest.mark.parametrize(
    "fields",
    [
        {"scale_rewards": True},
        {"scale_rewards": False},
        {"vllm_mode": "unused", "vllm_importance_sampling_mode": "unused"},  # without `use_vllm`
        {"loss_type": "vespo"},
        {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_correction": False},
        {"learning_rate": 0.0, "epsilon": 0.0, "epsilon_high": 5.0},
        {"epsilon_high": math.inf},
        {"top_p": 0.1, "min_p": 0.0, "top_k": 0, "repetition_penalty": 0.1},
        {"top_p": 1.0, "min_p": 1.0, "top_k": 1, "repetition_penalty": 2.0},
        {"min_p": None, "top_k": None},
        {"top_k": -1, "use_vllm": True, "vllm_server_base_url": "http://a:1"},
        {"num_train_epochs": 0.01},
        {"num_train_epochs": 0, "max_steps": 1},
        {"sync_ref_model": True, "beta": 0.1},
    ],
)
def test_no_false_alarm(fields):
    DARTSGRPOConfig(output_dir="unused", use_cpu=True, report_to=[], **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": math.inf}, r"`temperature` \(inf\) must be positive and finite"),
        ({"temperature": None}, r"`temperature` \(None\) must be positive"),
        ({"learning_rate": math.inf}, r"`learning_rate` \(inf\) must be finite"),
        ({"learning_rate": math.nan}, r"`learning_rate` \(nan\) must be finite"),
        ({"top_p": 0.0}, r"`top_p` \(0.0\) must be greater than 0 and at most 1"),
        ({"top_p": 1.1}, r"`top_p` \(1.1\) must be"),
        ({"min_p": -0.1}, r"`min_p` \(-0.1\) must be between 0 and 1"),
        ({"min_p": 1.1}, r"`min_p` \(1.1\) must be between 0 and 1"),
        ({"repetition_penalty": 0.0}, r"`repetition_penalty` \(0.0\) must be positive"),
        ({"repetition_penalty": math.inf}, r"`repetition_penalty` \(inf\) must be positive and finite"),
        ({"top_k": -1}, r"`top_k` \(-1\) must be at least 1, or 0"),
        ({"top_k": -2, "use_vllm": True, "vllm_server_base_url": "http://a:1"}, r"`top_k` \(-2\) must be at least 1"),
        ({"num_train_epochs": 0}, r"`num_train_epochs` \(0\) must be positive and finite where `max_steps` \(-1\)"),
        ({"num_train_epochs": math.nan}, r"`num_train_epochs` \(nan\) must be positive"),
        ({"num_train_epochs": math.inf, "max_steps": 0}, r"`num_train_epochs` \(inf\) .* `max_steps` \(0\)"),
    ],
)
def test_numbers_out_of_bounds(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        DARTSGRPOConfig(output_dir="unused", use_cpu=True, report_to=[], **fields)
