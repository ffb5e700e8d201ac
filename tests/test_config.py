"""Settings that can't work are refused when the config is made: argument, value, rule, remedy."""

import copy
import io
import json

import pytest
import torch

from trl_darts import DARTSGRPOConfig
from trl_darts.errors import ConfigurationError, TRLDARTSError


def config(**kwargs) -> DARTSGRPOConfig:
    return DARTSGRPOConfig(**{"output_dir": "unused", "use_cpu": True, "report_to": [], **kwargs})


def test_defaults():
    """The paper's, but for the wait, which is bounded."""
    args = config()
    assert args.schedule == "darts"
    assert args.max_num_generations == 2 * args.num_generations == 16
    assert (args.num_longest, args.target_redundancy, args.length_ema) == (1, 1.5, 0.5)
    assert args.tail_pruning is True
    assert args.redundancy_cost_weight is None
    assert args.long_end_patience == "auto"


def test_target_redundancy_follows_a_small_upper_bound():
    assert config(max_num_generations=8).target_redundancy == 1.0
    assert config(num_generations=4, max_num_generations=5).target_redundancy == 1.25


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"num_longest": 8}, r"`num_longest` \(8\) must be at least 0 and less than `num_generations` \(8\)"),
        ({"num_longest": -1}, r"`num_longest` \(-1\)"),
        (
            {"max_num_generations": 6},
            r"`max_num_generations` \(6\) must be at least `num_generations` \(8\). Raise it",
        ),
        ({"target_redundancy": 0.9}, r"`target_redundancy` \(0.9\) must be between 1 and .* \(2\)"),
        ({"target_redundancy": 2.1}, r"`target_redundancy` \(2.1\)"),
        ({"target_redundancy": float("nan")}, r"`target_redundancy` \(nan\)"),
        ({"target_redundancy": 1.5, "max_num_generations": 8}, r"between 1 and .* \(1\)"),
        ({"schedule": "fastest"}, r"`schedule` \('fastest'\) must be one of 'grpo', 'darts'"),
        (
            {"schedule": "partial_rollout", "vllm_structured_outputs_regex": "a+"},
            r"`vllm_structured_outputs_regex` \('a\+'\) does not run with `schedule` \('partial_rollout'\)",
        ),
        (
            {"schedule": "sorted", "sorted_mode": "partial", "generation_kwargs": {"stop": ["x"]}},
            r"`stop` \(\['x'\]\) does not run with `schedule` \('sorted'\)",
        ),
        ({"num_long_servers": 1}, r"`num_long_servers` \(1\) must be less than the number of vLLM servers \(0\)"),
        ({"long_end_patience": 0.5}, r"`long_end_patience` \(0.5\) must be at least 1"),
        ({"redundancy_cost_weight": 0.0}, r"`redundancy_cost_weight` \(0.0\) must be positive"),
        ({"redundancy_cost_weight": float("inf")}, r"`redundancy_cost_weight` \(inf\)"),
        ({"generation_kwargs": {"stop_strings": ["x"]}}, r"`generation_kwargs\['stop_strings'\]`"),
        ({"generation_kwargs": {"eos_token_id": [1, 7]}}, r"`generation_kwargs\['eos_token_id'\]` \(\[1, 7\]\)"),
        (
            {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://a:1,http://a:1/"},
            "names a server twice",
        ),
        ({"length_ema": 0.0}, r"`length_ema` \(0.0\)"),
        ({"length_ema": 1.5}, r"`length_ema` \(1.5\)"),
        ({"vllm_request_timeout_s": 0}, r"`vllm_request_timeout_s` \(0\) must be positive"),
        ({"on_generation_error": "skip"}, r"`on_generation_error` \('skip'\) must be one of 'raise', 'drop_group'"),
        ({"on_generation_error": "drop_group"}, r"only has an effect with vLLM servers"),
        ({"weight_sync": "carrier pigeon"}, r"`weight_sync` \('carrier pigeon'\) must be one of"),
        ({"weight_sync_dir": "/tmp"}, r"`weight_sync_dir` \('/tmp'\) is only used with `weight_sync='filesystem'`"),
        ({"generation_kwargs": {"n": 4}}, r"`generation_kwargs\['n'\]` \(4\) must be left out"),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": " , "}, "names no server"),
        ({"latency_curve": "/nowhere/curve.json"}, "/nowhere/curve.json"),
        ({"loss_type": "gpro"}, r"`loss_type` \('gpro'\) must be one of 'grpo', 'dr_grpo'"),
        ({"scale_rewards": "rows"}, r"`scale_rewards` \('rows'\) must be one of 'group', 'batch', 'none'"),
        (
            {"importance_sampling_level": "word"},
            r"`importance_sampling_level` \('word'\) must be one of 'token', 'seq",
        ),
        ({"multi_objective_aggregation": "sum"}, r"`multi_objective_aggregation` \('sum'\) must be one of 'sum_then"),
        ({"use_vllm": True, "vllm_mode": "local"}, r"`vllm_mode` \('local'\) must be one of 'server', 'colocate'"),
        (
            {"use_vllm": True, "vllm_importance_sampling_mode": "mask"},
            r"`vllm_importance_sampling_mode` \('mask'\) must be one of 'token_truncate', 'token_mask'",
        ),
        (
            {"use_vllm": True, "loss_type": "vespo"},
            r"`vllm_importance_sampling_mode` \('sequence_mask'\) must be one of 'token_truncate', 'token_mask' wi",
        ),
        ({"temperature": 0.0}, r"`temperature` \(0.0\) must be positive"),
        ({"temperature": None}, r"`temperature` \(None\) must be positive"),
        ({"temperature": float("nan")}, r"`temperature` \(nan\) must be positive"),
        ({"learning_rate": -1.0}, r"`learning_rate` \(-1.0\) must be at least 0"),
        ({"epsilon": -1.0}, r"`epsilon` \(-1.0\) must be at least 0"),
        ({"epsilon_high": -0.1}, r"`epsilon_high` \(-0.1\) must be at least 0"),
        (
            {"sync_ref_model": True},
            r"`sync_ref_model` \(True\) needs a reference model, and with `beta` \(0.0\) there",
        ),
    ],
)
def test_refused(kwargs, words):
    with pytest.raises(ConfigurationError, match=words) as caught:
        config(**kwargs)
    assert isinstance(caught.value, TRLDARTSError | ValueError)


@pytest.mark.parametrize(
    "content", ["not json", "{}", json.dumps({"version": 1, "kind": "latency_curve", "knots": []})]
)
def test_malformed_latency_file_is_named(tmp_path, content):
    path = tmp_path / "curve.json"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=r"curve\.json"):
        config(latency_curve=str(path))


def test_several_servers():
    args = config(use_vllm=True, vllm_mode="server", vllm_server_base_url="http://a:1/, http://b:2")
    assert args.server_urls == ["http://a:1", "http://b:2"]
    assert config().server_urls == ["http://0.0.0.0:8000"]


def test_round_trip_through_a_dictionary():
    args = config(max_num_generations=12, long_end_patience=2.0)
    fields = {k: v for k, v in args.to_dict().items() if k in ("max_num_generations", "long_end_patience", "schedule")}
    again = config(**fields)
    assert (again.max_num_generations, again.long_end_patience) == (12, 2.0)


def test_the_key_is_not_in_what_transformers_saves_beside_a_model():
    args = config(vllm_api_key="sesame-street")
    saved = io.BytesIO()
    torch.save(args, saved)
    assert b"sesame" not in saved.getvalue()
    saved.seek(0)
    again = torch.load(saved, weights_only=False)
    assert (again.vllm_api_key, again.num_generations) == (None, 8)
    assert args.vllm_api_key == copy.deepcopy(args).vllm_api_key == "sesame-street"
