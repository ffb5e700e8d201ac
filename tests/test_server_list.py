"""A training on real servers that are found by a list."""

import signal

import pytest

from tests.builders import make_trainer, rollout_logs
from tests.test_faults import LONG, assert_nothing_lost, during_rollouts, send
from tests.test_trainer_server import served_requests, server_args
from trl_darts.engines.pool import State
from trl_darts.engines.server_list import ServerList


pytestmark = pytest.mark.vllm


def test_a_server_at_a_new_address_takes_over_in_the_middle_of_a_rollout(
    server, second_server, model_dir, tmp_path, monkeypatch
):
    """In the second rollout the first server freezes, and the list names another, on which the candidates continue."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")  # of the second server
    path, before = tmp_path / "servers.json", served_requests(second_server)
    ServerList((server.base_url,), 1).write(path)
    fields = {**LONG, "vllm_server_base_url": None, "vllm_server_list": str(path), "learning_rate": 3e-3}
    trainer = make_trainer(model_dir, server_args(tmp_path, server, max_steps=3, **fields))

    frozen = []

    def act(ledger, rollout):
        if rollout == 1 and not frozen and any(candidate.length > 32 for candidate in ledger.candidates):
            frozen.extend(server.session())
            send(frozen, signal.SIGSTOP)
            ServerList((second_server.base_url,), 1).write(path)

    schedulers = during_rollouts(trainer, act)
    try:
        trainer.train()
    finally:
        send(frozen, signal.SIGCONT)
    assert trainer.vllm_generation.engine.states() == {second_server.base_url: State.UP}
    assert served_requests(second_server) > before
    assert [scheduler.ledger.num_resumed > 0 for scheduler in schedulers] == [False, True, False]
    for scheduler in schedulers:
        assert_nothing_lost(scheduler)
    assert len(rollout_logs(trainer)) == 3
    for entry in rollout_logs(trainer):
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3
