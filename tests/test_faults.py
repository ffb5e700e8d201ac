"""A training whose real servers are killed, frozen and started again: it goes on, and its rows are right."""

import signal
import time
from contextlib import ExitStack, suppress
from itertools import pairwise

import pandas as pd
import psutil
import pytest

from benchmarks.vllm_server import start_vllm_server
from tests.builders import make_trainer, record_batches
from tests.test_trainer_server import rollout_logs, server_args
from trl_darts.engines.pool import State
from trl_darts.errors import GenerationError


pytestmark = pytest.mark.vllm
LONG = {"generation_kwargs": {"ignore_eos": True}, "max_completion_length": 400}


def during_rollouts(trainer, act):
    """Calls `act(ledger, number of the rollout)` ten times a second while rollouts run."""
    engine, count = trainer.vllm_generation.engine, [-1]
    run = engine.run

    def watched(scheduler, plans, prompts, body, overrides, on_progress):
        count[0] += 1
        watched.schedulers.append(scheduler)
        return run(scheduler, plans, prompts, body, overrides, lambda ledger: act(ledger, count[0]))

    watched.schedulers = []
    engine.run = watched
    return watched.schedulers


def assert_books(scheduler):
    """Nothing is lost, and no token twice: segments of a candidate follow each other."""
    ledger = scheduler.ledger
    assert ledger.num_lost == 0
    ended = sum(c.finish_reason is not None for c in ledger.candidates)
    assert ended == len(ledger.candidates)
    assert ledger.num_submitted >= ended - ledger.num_aborted
    for candidate in ledger.candidates:
        assert candidate.logprobs is None or len(candidate.logprobs) == len(candidate.tokens)


def send(processes, number):
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # a server starts some that end soon
            process.send_signal(number)


def test_killed_and_restarted_servers(model_dir, tmp_path):
    """Rollout 0: one of two dies, the other takes over. 1: it is back, and the other dies. 2: both."""
    with ExitStack() as stack:
        options = {"max_model_len": 512, "wait": False}
        servers = [stack.enter_context(start_vllm_server(model_dir, **options)) for _ in range(2)]
        urls = ",".join(server.base_url for server in servers)
        # Stale weights would show at once.
        fields = {**LONG, "max_steps": 3, "learning_rate": 3e-3}
        args = server_args(tmp_path, servers[0], vllm_server_base_url=urls, save_rollout_trace=True, **fields)
        trainer = make_trainer(model_dir, args)
        engine = trainer.vllm_generation.engine
        killed = {}

        def kill(index):
            port = int(servers[index].base_url.rsplit(":", 1)[1])
            servers[index].kill()
            return port

        def act(ledger, rollout):
            running = any(c.length > 32 for c in ledger.candidates)
            if rollout == 0 and running and 0 not in killed:
                killed[0] = kill(0)
            if rollout == 1 and running and 1 not in killed:
                killed[1] = kill(1)

        schedulers = during_rollouts(trainer, act)
        batches = record_batches(trainer)
        sync = trainer.vllm_generation.sync_weights

        def restart_first():
            """Between two steps, with the checkpoint's weights."""
            for index in [index for index in killed if servers[index].process.poll() is not None]:
                server = start_vllm_server(model_dir, port=killed[index], max_model_len=512)
                servers[index] = stack.enter_context(server)
            deadline = time.monotonic() + 30
            while State.DOWN in engine.states().values():
                assert time.monotonic() < deadline
                time.sleep(0.1)
            sync()

        trainer.vllm_generation.sync_weights = restart_first
        trainer.train()
        assert set(killed) == {0, 1}
        assert engine.num_losses == 2
        assert engine.states() == dict.fromkeys([server.base_url for server in servers], State.UP)
        for scheduler in schedulers:
            assert_books(scheduler)
        assert [scheduler.ledger.num_resumed > 0 for scheduler in schedulers] == [True, True, False]
        resumed = [c for s in schedulers for c in s.ledger.candidates if c.segment > 0]
        assert any(c.num_prior >= 32 for c in resumed)  # they went on, and did not begin again
        assert len(batches) == 3
        for entry in rollout_logs(trainer):  # also of resumed candidates
            assert entry["sampling/sampling_logp_difference/max"] < 1e-3
        trace = pd.concat(map(pd.read_parquet, sorted((tmp_path / "rollouts").glob("*.parquet"))))
        assert (trace["length"] == 400).all()


def test_frozen_server_is_left_and_taken_back(model_dir, tmp_path):
    with (
        start_vllm_server(model_dir, max_model_len=512, wait=False) as first,
        start_vllm_server(model_dir, max_model_len=512, wait=False) as second,
    ):
        urls = f"{first.base_url},{second.base_url}"
        args = server_args(
            tmp_path,
            first,
            vllm_server_base_url=urls,
            max_steps=3,
            vllm_health_timeout_s=2.0,
            learning_rate=3e-3,
            **LONG,
        )
        trainer = make_trainer(model_dir, args)
        frozen = []

        def act(ledger, rollout):
            if rollout == 0 and not frozen and any(c.length > 32 for c in ledger.candidates):
                frozen.extend(first.session())
                send(frozen, signal.SIGSTOP)

        schedulers = during_rollouts(trainer, act)
        sync, syncs = trainer.vllm_generation.sync_weights, []

        def thaw():
            syncs.append(time.monotonic())
            if len(syncs) == 3:  # the second sync is without it
                send(frozen, signal.SIGCONT)
                deadline = time.monotonic() + 30
                while State.DOWN in trainer.vllm_generation.engine.states().values():
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
            sync()

        trainer.vllm_generation.sync_weights = thaw
        trainer.train()
        assert frozen
        assert max(later - earlier for earlier, later in pairwise(syncs)) < 60
        assert schedulers[0].ledger.num_resumed > 0
        assert {c.engine_id for c in schedulers[1].ledger.candidates} == {second.base_url}
        assert {c.engine_id for c in schedulers[2].ledger.candidates} == {first.base_url, second.base_url}
        for entry in rollout_logs(trainer):
            assert entry["sampling/sampling_logp_difference/max"] < 1e-3


def test_the_only_server_that_does_not_come_back(model_dir, tmp_path):
    with start_vllm_server(model_dir, max_model_len=512) as doomed:
        args = server_args(tmp_path, doomed, max_steps=1, vllm_server_timeout=3.0, **LONG)
        trainer = make_trainer(model_dir, args)
        died = []

        def act(ledger, rollout):
            if ledger.num_running and not died:
                died.append(time.perf_counter())
                doomed.kill()

        during_rollouts(trainer, act)
        with pytest.raises(GenerationError, match=rf"`vllm_server_timeout` \(3 s\). {doomed.base_url}: Client"):
            trainer.train()
        assert 2.5 < time.perf_counter() - died[0] < 5
