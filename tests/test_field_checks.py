"""Values that TRL has no list of are those that its code compares with: no more, no fewer."""

import ast
import inspect
import textwrap

import pytest
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from trl_darts import DARTSGRPOConfig
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
        {"sync_ref_model": True, "beta": 0.1},
    ],
)
def test_no_false_alarm(fields):
    DARTSGRPOConfig(output_dir="unused", use_cpu=True, report_to=[], **fields)
