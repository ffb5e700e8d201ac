"""Cards of published configs: what they tell to type works, and says what is still missing."""

import re
import shlex
from email.message import Message
from pathlib import Path

import pytest
import yaml
from trl import ModelConfig, TrlParser

from trl_darts import DARTSGRPOConfig
from trl_darts.errors import ConfigurationError
from trl_darts.hub import card as card_module
from trl_darts.hub.files import publishable
from trl_darts.hub.transfer import Publication
from trl_darts.recipes import ScriptArguments


RECIPE = Path(__file__).resolve().parents[2] / "configs" / "tiny_reasoner.yaml"
NEEDED = {"model_name_or_path": "Qwen/Qwen2.5-3B", "dataset_name": "org/math", "reward_funcs": ["accuracy_reward"]}


def card_of(data, address="hf://me/tiny", without=()):
    return Publication.of("me/tiny", address, data, None, without).card


def command_of(card):
    """The words after the script's name."""
    block = re.search(r"```bash\n(.*?)```", card, re.DOTALL)[1]
    return shlex.split(block.replace("\\\n", " ").splitlines()[-1])[3:]


def options_of(card):
    return [word.removeprefix("--") for word in command_of(card) if word.startswith("--")]


def test_what_was_left_out_is_named_and_shown():
    card = card_of(yaml.safe_load(RECIPE.read_text()), without=["model_name_or_path", "reward_funcs"])
    assert "started: `model_name_or_path`, `reward_funcs`, `output_dir`.\n" in card
    assert options_of(card) == ["config", "output_dir", "model_name_or_path", "reward_funcs"]
    assert "MODEL_NAME_OR_PATH" in card
    assert "The config does not say what stands there in capitals" in card


def test_the_command_parses(tmp_path):
    publication = Publication.of("me/tiny", "mine.yaml", {"use_cpu": True, "bf16": False}, None)
    (tmp_path / "mine.yaml").write_text(publication.config)
    words = [str(tmp_path / word) if word == "mine.yaml" else word for word in command_of(publication.card)]
    script, args, model = TrlParser((ScriptArguments, DARTSGRPOConfig, ModelConfig)).parse_args_and_config(words)
    assert (args.output_dir, model.model_name_or_path) == ("outputs/grpo", "MODEL_NAME_OR_PATH")
    assert (script.dataset_name, script.reward_funcs) == ("DATASET_NAME", ["REWARD_FUNCS"])


@pytest.mark.parametrize(
    ("data", "missing"),
    [
        (NEEDED, []),
        ({"seed": 3}, list(NEEDED)),  # of an object, which knows no model
        ({**NEEDED, "vllm_server_base_url": "http://10.1.2.3", "vllm_api_key": "k"}, ["vllm_server_base_url"]),
        (
            {"reward_model_name_or_path": "org/judge", "dataset_name": "org/math"},
            ["model_name_or_path"],
        ),
    ],
)
def test_the_command_shows_what_a_training_needs(data, missing):
    card = card_of(data)
    assert options_of(card) == ["config", "output_dir", *missing]
    assert ("in capitals" in card) == bool(missing)


def test_a_name_that_is_no_field_stays_off_the_card():
    secret = "hf_" + "Ab1" * 10
    data = {**NEEDED, secret: 1, "seed": 42}
    assert publishable(data, [secret, "seed"]) == (NEEDED, [])  # and a seed as by default need not be set
    assert secret not in card_of(data, without=[secret])


def test_only_what_is_set_can_be_left_out():
    with pytest.raises(ConfigurationError, match=r"^`without` \('beta'\) must be a field of the config"):
        publishable(NEEDED, ["beta"])


def test_a_branch_is_part_of_what_to_type():
    card = card_of(NEEDED, "hf://me/tiny@v1")
    assert command_of(card)[:2] == ["--config", "hf://me/tiny@v1"]
    assert 'from_pretrained("me/tiny", revision="v1", output_dir="outputs/grpo")' in card
    card = card_of(NEEDED)
    assert command_of(card)[:2] == ["--config", "hf://me/tiny"]
    assert 'from_pretrained("me/tiny", output_dir="outputs/grpo")' in card


def test_a_branch_with_a_word_of_the_shell():
    assert command_of(card_of(NEEDED, "hf://me/tiny@a;b'c"))[1] == "hf://me/tiny@a;b'c"


@pytest.mark.parametrize(
    ("urls", "words"),
    [
        ([], "in a clone of the repository of trl_darts:"),
        (["Documentation, https://docs.example.org"], "in a clone of the repository of trl_darts:"),
        (
            ["Documentation, https://docs.example.org", "Repository, https://git.example.org/darts"],
            "in a clone of [the repository of trl_darts](https://git.example.org/darts):",
        ),
    ],
)
def test_the_script_is_in_a_clone(monkeypatch, urls, words):
    found = Message()
    for url in urls:
        found["Project-URL"] = url
    monkeypatch.setattr(card_module, "metadata", lambda name: found)
    card = card_of(NEEDED)
    assert words in card
    assert card.index(words) < card.index("pip install -e .") < card.index("examples/train_grpo.py")
