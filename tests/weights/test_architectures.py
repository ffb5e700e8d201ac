"""
Log-probs of real servers after weight syncs, for each kind of model, and runs that a server with other weights ends.

Invariant: after each sync, log-probs are those of a forward pass, to the precision of float32. Servers are the
session's and the package's, except that of the mixture of experts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from benchmarks.models import make_random_moe
from benchmarks.vllm_server import start_vllm_server
from tests.builders import make_args, make_trainer, rollout_logs
from tests.weights.conftest import put_back
from tests.weights.probes import PROBE, greedy_error, load_model, max_error, perturb, server_logprobs, sync
from trl_darts.errors import WeightSyncError
from trl_darts.weights.files import WeightDirectory


pytestmark = pytest.mark.vllm

MAX_ERROR = 2e-6


@pytest.fixture(scope="module")
def moe(tmp_path_factory, tokenizer, log_of):
    """A server of a mixture whose experts have a size that is padded."""
    model_dir = make_random_moe(tmp_path_factory.mktemp("models") / "moe", tokenizer)
    with start_vllm_server(model_dir, log_path=log_of("moe"), max_model_len=512) as server:
        yield server


def shared(kind: str, group: str) -> Any:
    """A parameter whose test runs in the process that has the session's server."""
    return pytest.param(kind, marks=pytest.mark.xdist_group(group))


@pytest.fixture(params=["moe", shared("tied", "markov"), shared("dense", "markov")])
def served(request):
    name = {"moe": "moe", "tied": "pair", "dense": "vllm_server"}[request.param]
    server = request.getfixturevalue(name)
    yield server[0] if request.param == "tied" else server
    put_back(server[0] if request.param == "tied" else server)


def test_log_probs_after_three_syncs(served, fleet_of, rng):
    """Of a prompt and of decoding, with the trainer's names, which fuse experts."""
    model = load_model(served.model_dir)
    fleet, _ = fleet_of([served.base_url], WeightDirectory())
    fleet.init_communicator()
    for _ in range(3):
        perturb(model, rng)
        assert max_error(served, model) > 0.01  # the step is visible, so agreement means something
        sync(fleet, model)
        scale = max(1.0, float(server_logprobs(served, PROBE).abs().max()))  # float32 is relative
        assert max_error(served, model) <= MAX_ERROR * scale
        assert greedy_error(served, model) <= MAX_ERROR * scale


def test_names_of_a_checkpoint(moe, rng, tmp_path):
    """These have one tensor per expert."""
    model = load_model(moe.model_dir)
    perturb(model, rng)
    model.save_pretrained(tmp_path)
    moe.request("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}})
    moe.request("/reset_prefix_cache", {})
    assert max_error(moe, model) <= MAX_ERROR


def test_experts_after_a_reload_that_failed(moe, fleet_of, rng, monkeypatch):
    """Layers without new weights keep theirs, which are packed already."""
    model = load_model(moe.model_dir)
    fleet, engine = fleet_of([moe.base_url], WeightDirectory())
    fleet.init_communicator()
    perturb(model, rng)
    sync(fleet, model)
    write = WeightDirectory.write

    def spoiled(self, version, params, num_bytes):
        path = write(self, version, list(params)[:1], num_bytes)
        (path / "model-99999.safetensors").write_bytes(b"no checkpoint")
        return path

    with monkeypatch.context() as patch:
        patch.setattr(WeightDirectory, "write", spoiled)
        sync(fleet, model)
    assert "under the same path" in engine.members[moe.base_url].reason
    assert max_error(moe, model) <= MAX_ERROR


def run_args(output_dir, server, **fields):
    return make_args(
        output_dir,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=server.base_url,
        **{"max_completion_length": 24, "learning_rate": 3e-3, **fields},
    )


def test_adapters_are_merged(server, model_dir, tmp_path):
    """In TRL's own way, by a run of three steps. Its canary agrees too."""
    adapter = LoraConfig(r=4, lora_alpha=64, target_modules="all-linear")
    trainer = make_trainer(model_dir, run_args(tmp_path, server), peft_config=adapter)
    errors = []
    sync_weights = trainer.vllm_generation.sync_weights

    def measured():
        sync_weights()
        merged = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        with torch.no_grad():
            trainer.model.merge_adapter()
            state = {
                name.removeprefix("base_model.model.").replace("base_layer.", ""): value.clone()
                for name, value in trainer.model.state_dict().items()
                if "lora" not in name
            }
            trainer.model.unmerge_adapter()
        merged.load_state_dict(state)
        scale = max(1.0, float(server_logprobs(server, PROBE).abs().max()))
        errors.append(max_error(server, merged) / scale)

    trainer.vllm_generation.sync_weights = measured
    trainer.train()
    assert len(errors) == 3
    assert max(errors) <= MAX_ERROR
    moved = [p.abs().max().item() for name, p in trainer.model.named_parameters() if "lora_B" in name]
    assert max(moved) > 1e-3
    assert rollout_logs(trainer)[0]["darts/sync/logp_difference"] < 1e-5


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0.7, "top_p": 0.9}, {"rollout_ahead": "continuous"}, {"compare_weights": False}],
)
def test_sound_run(server, model_dir, tmp_path, fields):
    """The canary changes nothing, runs once, and is logged."""
    trainer = make_trainer(model_dir, run_args(tmp_path, server, **fields))
    trainer.train()
    values = [entry.get("darts/sync/logp_difference") for entry in rollout_logs(trainer)]
    assert values[1:] == [None, None]
    assert values[0] is None if not trainer.args.compare_weights else values[0] < 1e-5
    assert trainer.model.training


@pytest.mark.parametrize("kind", [shared("dense", "letters"), "moe"])
def test_a_server_that_was_given_other_weights_ends_the_run(request, kind, tmp_path, rng):
    server = request.getfixturevalue({"dense": "server", "moe": "moe"}[kind])
    other = load_model(server.model_dir)
    perturb(other, rng, 0.05)
    other.save_pretrained(tmp_path / "other")
    trainer = make_trainer(server.model_dir, run_args(tmp_path / "run", server))
    sync_weights = trainer.vllm_generation.sync_weights

    def spoiled():
        sync_weights()
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "other")}}
        server.request("/collective_rpc", body)
        server.request("/reset_prefix_cache", {})

    trainer.vllm_generation.sync_weights = spoiled
    with pytest.raises(WeightSyncError, match=rf"{server.base_url} does not have the trainer's weights.*float32"):
        trainer.train()
    assert trainer.state.global_step == 0
