"""Tests that invalid settings raise when the config is created, with argument, value, rule and remedy."""

import ast
import copy
import inspect
import json
import math
import pickle
import textwrap
from dataclasses import fields, replace
from pathlib import Path
from string import Formatter

import pytest
import torch
import yaml
from trl import GRPOConfig, GRPOTrainer, TrlParser
from trl.generation.vllm_generation import VLLMGeneration

from tests.builders import assert_refused
from trl_darts import DARTSGRPOConfig
from trl_darts.config import OWN_CLASSES, START_CONFLICTS, TRAINING_CONFLICTS, TRL_RULES, VLLM_RULES
from trl_darts.engines.server_fields import SERVER_CONFLICTS
from trl_darts.errors import ConfigurationError
from trl_darts.policy import DecodePoint, LatencyProfile, PrefillPoint
from trl_darts.scheduling.schedule_fields import SCHEDULE_CONFLICTS


CHOICES = {name: rule.choices for name, rule in (TRL_RULES | VLLM_RULES).items() if rule.choices}
CONFLICTS = (*SCHEDULE_CONFLICTS, *SERVER_CONFLICTS, *TRAINING_CONFLICTS, *START_CONFLICTS)
SERVER = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://a:1"}
LISTED = {**SERVER, "vllm_server_base_url": "", "vllm_server_list": "l.json"}
TAIL = {**SERVER, "vllm_tail_server_url": "http://t:1", "tail_switch_at": 4}
AHEAD = {**SERVER, "rollout_ahead": 1}


def config(**kwargs) -> DARTSGRPOConfig:
    return DARTSGRPOConfig(**{"output_dir": "unused", "use_cpu": True, "report_to": [], **kwargs})


def test_defaults():
    """Defaults are the paper's, except for the bounded wait and its spare candidates."""
    args = config()
    assert args.schedule == "darts"
    assert args.max_num_generations == 2 * args.num_generations == 16
    assert args.min_num_generations == 10
    assert (args.num_longest, args.target_redundancy, args.length_ema) == (1, 1.5, 0.5)
    assert args.tail_pruning is True
    assert args.redundancy_cost_weight is None
    assert args.long_end_patience == "auto"


def test_target_redundancy_follows_a_small_upper_bound():
    assert config(max_num_generations=8).target_redundancy == 1.0
    assert config(num_generations=4, max_num_generations=5).target_redundancy == 1.25


def test_every_field_is_documented_and_an_argument_of_a_script():
    own = {field.name: field for field in fields(DARTSGRPOConfig)}
    for name in own.keys() - {field.name for field in fields(GRPOConfig)}:
        assert len(own[name].metadata["help"]) > 20, name
    given = {
        "schedule": "tail_batching",
        "max_num_generations": 12,
        "target_redundancy": 1.25,
        "selection": "uniform",
        "prompt_oversampling": 1.5,
        "submit_order": "arrival",
        "tail_switch_at": 8,
        "vllm_tail_server_url": "http://tail:1",
        "long_end_patience": 2.5,
        "tail_pruning": False,
        "stream_logprobs": True,
        "vllm_token_timeout_s": 5.5,
        **SERVER,
    }
    args = ["--output_dir", "unused", "--use_cpu", "true", "--report_to", "none"]
    for name, value in given.items():
        args += [f"--{name}", str(value)]
    (parsed,) = TrlParser([DARTSGRPOConfig]).parse_args_and_config(args)
    assert {name: getattr(parsed, name) for name in given} == given


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_num_generations": 6}, "must be at least `num_generations` (8). Raise it, or leave it unset for 2"),
        ({"redundancy_cost_weight": 0.1}, "needs `latency_curve`, which says what a candidate costs. Measure one"),
        ({"weight_sync": "gloo"}, "must be one of 'auto', 'nccl', 'filesystem', 'adapter'."),
        ({"schedule": "partial_rollout", "vllm_structured_outputs_regex": "a+"}, "does not run with `schedule`"),
        ({**AHEAD, "schedule": "partial_rollout", "mask_stale_after": 1, "num_iterations": 2}, "would mask all"),
        ({**AHEAD, "stream_logprobs": True}, "does not run with `rollout_ahead` (1): the model trains while"),
        ({"tail_switch_at": 4}, "has no effect without `vllm_tail_server_url`, the servers that take over."),
        ({"tail_share": 0.1}, "has no effect without `vllm_tail_server_url`, the servers that take over."),
        ({"vllm_tail_server_url": "http://t:1"}, "would not be used: with `use_vllm` (False) and `vllm_mode`"),
        (TAIL | {"vllm_tail_server_url": "t:1"}, "must be an address with a scheme and a host. Write it like"),
        (TAIL | {"vllm_tail_server_url": "http://t:1,http://t:1"}, "names a server twice. Name each address once."),
        (TAIL | {"vllm_server_base_url": "http://t:1"}, "must name other servers than `vllm_server_base_url`"),
        (TAIL | {"tail_switch_at": 0}, "would not be used with `tail_switch_at` (0), which is never, and"),
        (TAIL | {"tail_switch_at": None}, "takes over when that is predicted to pay, and needs `latency_curve`, a"),
        (TAIL | {"tail_share": 0.1, "vllm_tail_shares_gpus": True}, "needs tail servers that decode from the start"),
        ({"generation_kwargs": {"stop": "x"}, **TAIL, "tail_switch_at": 8}, "does not run with a switch to"),
        ({"generation_kwargs": {"stop_strings": ["x"]}}, "must not have `stop_strings` or `eos_token_id` with"),
        ({"generation_kwargs": {"eos_token_id": [1, 7]}}, "must not have `stop_strings` or `eos_token_id` with"),
        (SERVER | {"vllm_server_base_url": "http://a:1,http://a:1/"}, "names a server twice"),
        (LISTED | {"vllm_server_base_url": "http://a:1"}, "replaces `vllm_server_base_url` ... or set the addresses"),
        (LISTED | {"vllm_server_list": "ray://head:10001"}, "must be a file or a directory of `trl-darts serve"),
        (TAIL | LISTED | {"vllm_tail_shares_gpus": True}, "does not run with `vllm_tail_shares_gpus` (True): a"),
        ({"vllm_server_list": "l.json"}, "would not be used: with `use_vllm` (False) and `vllm_mode` ('colocate')"),
        ({"on_generation_error": "skip"}, "must be one of 'raise', 'drop_group'."),
        ({"on_generation_error": "drop_group"}, "would not be used: with `use_vllm` (False) and `vllm_mode`"),
        (SERVER | {"weight_sync_dir": "/tmp", "weight_sync": "nccl"}, "has no effect with `weight_sync` ('nccl')."),
        (SERVER | {"vllm_server_base_url": " , "}, "names no server. Name one, or"),
        ({"vllm_server_base_url": "http://a:1"}, "would not be used: with `use_vllm` (False) and `vllm_mode`"),
        ({"use_vllm": True, "vllm_server_base_url": "http://a:1"}, "would not be used: with `use_vllm` (True) and"),
        ({"vllm_mode": "server", "vllm_server_host": "a"}, "would not be used: with `use_vllm` (False) and"),
        ({"max_completion_length": 0}, "must be at least 1. Correct it, or leave it unset."),
        ({"loss_type": "gpro"}, "must be one of 'grpo', 'dr_grpo', 'dapo', 'bnpo', 'cispo', 'sapo'"),
        ({"use_vllm": True, "vllm_importance_sampling_mode": "mask"}, "must be one of 'token_truncate'"),
        ({"use_vllm": True, "loss_type": "vespo"}, "weights sequences itself, and does not run with"),
        ({"temperature": 0.0}, "must be positive and finite: logits are divided by it. Correct it, or"),
        ({"learning_rate": -1.0}, "must be at least 0 and finite. Correct it, or leave it unset."),
        ({"gradient_accumulation_steps": 0}, "must be at least 1. Correct it, or leave it unset."),
        ({"sync_ref_model": True}, "needs a reference model, and with `beta` (0.0) there is none. Leave it"),
        ({"temperature": None}, "must be positive and finite: logits are divided by it. Correct it, or"),
        ({"max_completion_length": None}, "must be at least 1. Correct it, or leave it unset."),
        ({"max_completion_length": 16.5}, "must be of type int or None. Correct it, or leave it out."),
        ({"learning_rate": "1e-6"}, "must be of type float. Correct it, or leave it out."),
        ({"per_device_train_batch_size": "8"}, "must be of type int. Correct it, or leave it out."),
        ({"max_steps": "4"}, "must be of type int. Correct it, or leave it out."),
        ({"mask_truncated_completions": "false"}, "must be of type bool. Correct it, or leave it out."),
        (SERVER | {"vllm_server_base_url": ["http://a:1"]}, "must be of type str or None. Correct it, or leave it"),
        ({"generation_kwargs": {"num_return_sequences": 3}}, "must not have `n` or `num_return_sequences`:"),
        ({"adam_beta1": 2.0}, "must be at least 0 and less than 1. Correct it, or leave it unset."),
        ({"generation_kwargs": "top_k=3"}, "must be a dictionary, or one as JSON. Correct it, or leave it unset."),
        ({"reward_weights": [math.nan]}, "must be a list of finite numbers. Correct it, or leave it unset."),
        ({"reward_weights": ["1"]}, "must be a list of finite numbers. Correct it, or leave it unset."),
        ({"reward_weights": "1"}, "must be of type list or None. Correct it, or leave it out."),
        ({"beta": -0.1}, "must be at least 0 and finite. Correct it, or leave it unset."),
        ({"delta": 0.0}, "must be positive. Correct it, or leave it unset."),
        ({"top_entropy_quantile": 2.0}, "must be greater than 0 and at most 1, which uses all tokens. Correct it"),
        ({"max_grad_norm": -1.0}, "must be at least 0. Correct it, or leave it unset."),
        ({"generation_batch_size": 0}, "must be at least 1. Correct it, or leave it unset."),
        ({"steps_per_generation": 0}, "must be at least 1. Correct it, or leave it unset."),
        ({"target_redundancy": math.nan}, "must be finite. Correct it, or leave it unset."),
        ({"use_vllm": True, "vllm_tensor_parallel_size": 0}, "must be at least 1. Correct it, or leave it unset."),
        ({"weight_sync": "filesystem"}, "would not be used: with `use_vllm` (False) and `vllm_mode` ('colocate') no"),
        ({"weight_sync_dir": "/tmp"}, "would not be used: with `use_vllm` (False) and `vllm_mode` ('colocate') no"),
        ({"vllm_token_timeout_s": 5.0}, "would not be used: with `use_vllm` (False) and `vllm_mode` ('colocate') no"),
        (SERVER | {"stream_logprobs": True, "stream_chunk_tokens": 9000}, "leaves no room for a chunk in a pass:"),
        (SERVER | {"stream_chunk_tokens": 64}, "has no effect without `stream_logprobs`. Leave it unset, or change"),
        (SERVER | {"stream_reward_timeout_s": 5.0}, "has no effect without `stream_rewards`. Leave it unset, or"),
        (SERVER | {"stream_logprobs": True, "stream_cache_gib": math.inf}, "must be positive and finite. Correct"),
        ({"learning_rate": math.nan}, "must be at least 0 and finite. Correct it, or leave it unset."),
        ({"top_p": 0.0}, "must be greater than 0 and at most 1, which keeps all tokens. Correct it"),
        ({"min_p": -0.1}, "must be between 0 and 1. Correct it, or leave it unset."),
        ({"repetition_penalty": 0.0}, "must be positive and finite; 1 has no effect. Correct it, or leave it"),
        ({"top_k": -1}, "must be at least 1, or 0, which keeps all tokens. Correct it, or leave it"),
        ({"num_train_epochs": 0}, "must be positive and finite where `max_steps` (-1) does not end the run."),
        ({"num_train_epochs": math.inf, "max_steps": 0}, "must be positive and finite where `max_steps` (0) does"),
        *[
            (SERVER | {"vllm_server_base_url": url}, "must be an address with a scheme and a host. Write it like")
            for url in ("a:1", "127.0.0.1:8000", "htp://a", "http:", "http://a:x", "http://http://a:1")
        ],
    ],
)
def test_refused(fields, words):
    assert_refused(config, fields, words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"generation_kwargs": {"topk": 3}},
            r"^`generation_kwargs` \('topk'\) must have names .* Did you mean `top_k`",
        ),
        (
            {"use_vllm": True, "vllm_mode": "server", "vllm_server_host": "http://a"},
            r"`vllm_server_host` \('http://htt",
        ),
        (
            {"use_vllm": True, "vllm_mode": "server", "vllm_server_port": -5},
            r"\('http://0.0.0.0:-5'\) must be an a",
        ),
    ],
)
def test_refused_with_another_value(fields, words):
    with pytest.raises(ConfigurationError, match=words):
        config(**fields)


@pytest.mark.parametrize("row", CONFLICTS, ids=lambda row: f"{row.fields} {row.rule}"[:60])
def test_a_conflict_names_fields_and_properties(row):
    named = {name for _, name, _, _ in Formatter().parse(row.rule) if name}
    assert [name for name in (*row.fields.split(), *named) if not hasattr(DARTSGRPOConfig, name)] == []


@pytest.mark.parametrize("name", [name for cls in OWN_CLASSES for name in cls.__annotations__])
def test_every_field_has_its_type_checked_before_it_is_read(name):
    with pytest.raises(ConfigurationError, match=rf"^`{name}` \(b'8'\) must be of type "):
        config(**{name: b"8"})


def test_a_path_may_be_one():
    assert config(latency_curve=Path("curve.json")).latency_curve == "curve.json"


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"use_cpu": False, "bf16": True}, "setup doesn't support bf16/gpu"),
        ({"eval_strategy": "stepz"}, "^stepz is not a valid IntervalStrategy"),
        ({"bf16": True, "fp16": True}, "^At most one of fp16 and bf16 can be True"),
        ({"generation_batch_size": 60, "steps_per_generation": 2}, "can not be both configured"),
        ({"num_generations": 1}, "GRPO requires at least 2 generations per prompt"),
        ({"eval_strategy": "steps", "per_device_eval_batch_size": 6}, r"^The global eval batch size \(6 \* 1\)"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU does bfloat16")
def test_what_trl_refuses_comes_through_alone(kwargs, words):
    with pytest.raises(ValueError, match=words) as caught:
        config(**kwargs)
    assert not isinstance(caught.value, ConfigurationError)
    assert caught.value.__context__ is None


def test_a_batch_that_is_not_divisible_is_told_once():
    with pytest.raises(ConfigurationError, match=r"\(6 rows: `per_device_train_batch_size` \(6\) × 1 proc") as caught:
        config(per_device_train_batch_size=6)
    assert caught.value.__context__ is None


def compared(cls: type, name: str) -> set[str]:
    """Returns the strings that the class compares its attribute with."""
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


@pytest.mark.parametrize(
    "kwargs",
    [
        {"scale_rewards": True},
        {"learning_rate": 1, "reward_weights": [1, 0.5], "generation_kwargs": {"top_k": 5}, "max_grad_norm": None},
        {"generation_kwargs": '{"top_k": 5}'},
        {"scale_rewards": False},
        {"vllm_mode": "unused", "vllm_importance_sampling_mode": "unused"},  # without `use_vllm`
        {"loss_type": "vespo"},
        {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_correction": False},
        {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_mode": "token_mask"},
        {"learning_rate": 0.0, "epsilon": 0.0, "epsilon_high": 5.0},
        {"epsilon_high": math.inf},
        {"top_p": 0.1, "min_p": 0.0, "top_k": 0, "repetition_penalty": 0.1},
        {"top_p": 1.0, "min_p": 1.0, "top_k": 1, "repetition_penalty": 2.0},
        {"min_p": None, "top_k": None},
        {"top_k": -1, **SERVER},
        {"num_train_epochs": 0.01},
        {"num_train_epochs": 0, "max_steps": 1},
        {"sync_ref_model": True, "beta": 0.1},
    ],
)
def test_no_false_alarm(kwargs):
    config(**kwargs)


def test_an_output_directory_that_is_none_is_refused_before_the_model_is_loaded(tmp_path):
    path = tmp_path / "out"
    path.touch()
    for value in (str(path), ""):
        with pytest.raises(ConfigurationError, match=rf"`output_dir` \('{value}'\) must be a directory, or a new one"):
            config(output_dir=value).check_start()


@pytest.mark.parametrize(
    "content", [None, "not json", "{}", json.dumps({"version": 1, "kind": "latency_curve", "knots": []})]
)
def test_a_latency_file_is_read_when_the_trainer_is_built(tmp_path, content):
    """A config can be created without the file. The trainer raises before it loads a model."""
    path = tmp_path / "curve.json"
    if content is not None:
        path.write_text(content)
    args = config(latency_curve=str(path), redundancy_cost_weight=0.1)
    with pytest.raises(ConfigurationError, match=r"curve\.json"):
        args.check_start()


def test_several_servers():
    args = config(**SERVER | {"vllm_server_base_url": "http://a:1/, http://b:2"})
    assert args.server_urls == ["http://a:1", "http://b:2"]
    assert config().server_urls == ["http://0.0.0.0:8000"]
    listed = config(**LISTED)
    assert (listed.server_urls, listed.num_engines) == ([], 1)


def test_copies_have_the_servers_key_and_files_do_not(monkeypatch):
    """It comes from the environment, so that copies and launched processes have it, but saved configs don't."""
    monkeypatch.setenv("VLLM_API_KEY", "sesame-street")
    args = config()
    saved = pickle.dumps(args)
    for twin in (args, copy.copy(args), copy.deepcopy(args), pickle.loads(saved)):
        assert twin.api_key == "sesame-street"
    assert b"sesame" not in saved
    assert "sesame" not in f"{args} {args!r} {args.to_dict()}"


def test_a_copy_with_other_fields_computes_its_defaults_again():
    args = config()
    again = replace(args, num_generations=4, generation_batch_size=None)  # TRL's computed values are kept
    assert (again.max_num_generations, again.min_num_generations) == (8, 6)
    assert "max_num_generations" not in again.given_fields
    grpo = replace(args, schedule="grpo", generation_batch_size=None)
    assert (grpo.selection, grpo.submit_order, grpo.over_provisions) == ("all", "arrival", False)
    assert replace(args, max_num_generations=16, generation_batch_size=None).given_fields["max_num_generations"] == 16
    chosen = replace(args, num_generations=4, max_num_generations=16, generation_batch_size=None)
    assert chosen.max_num_generations == 16


def test_files_have_plain_values():
    values = config(schedule="sorted").to_dict()
    assert yaml.safe_load(yaml.safe_dump(values)) == json.loads(json.dumps(values)) == values
    assert (values["max_num_generations"], values["sorted_mode"]) == (8, "on_policy")


def test_a_predicted_switch_needs_a_profile_of_both_layouts(tmp_path):
    point = DecodePoint(1, 10, 10.0, 1.0, 0.0, (1.0,))
    profile = LatencyProfile.fit([point], [PrefillPoint(1, 1.0, 0.0), PrefillPoint(2, 2.0, 0.0)])
    path = tmp_path / "latency.json"
    profile.save(path)
    fields = {**TAIL, "tail_switch_at": None, "latency_curve": str(path)}
    with pytest.raises(ConfigurationError, match=r"`latency_curve` .* has none of `vllm_tail_server_url` .*--tail-of"):
        config(**fields).check_start()
    replace(profile, tail=profile).save(path)
    args = config(**fields, vllm_tail_shares_gpus=True)
    args.check_start()
    tail = args.tail_servers()
    assert (tail.times.switch_seconds, tail.takes_turns, tail.max_completion_length) == (5.5, True, 512)
    assert (args.server_urls, args.tail_urls, args.num_engines) == (["http://a:1"], ["http://t:1"], 1)
    assert config(**TAIL).tail_servers().times is None
    assert config().tail_servers() is None
