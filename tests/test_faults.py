"""Tests that a run continues with correct rows when its real servers are killed, frozen and restarted."""

import signal
import threading
import time
from contextlib import ExitStack, suppress
from functools import wraps

import pandas as pd
import psutil
import pytest

from benchmarks.vllm_server import start_vllm_server
from tests.builders import ON_POLICY, make_trainer, record_batches, rollout_logs
from tests.test_agents import agent
from tests.test_trainer_server import server_args
from tests.trl_parity.tool_calls import multiply
from trl_darts.engines.pool import State
from trl_darts.errors import GenerationError


pytestmark = pytest.mark.vllm
LONG = {**ON_POLICY, "generation_kwargs": {"ignore_eos": True}, "max_completion_length": 400}


class Mortal:
    """The session's second server, which can be killed and restarted because no later test uses it."""

    def __init__(self, server):
        self.server = server
        self.stack = ExitStack()

    def start(self):
        port = int(self.server.base_url.rsplit(":", 1)[1])
        options = {"port": port, "max_model_len": 600, "env": {"VLLM_API_KEY": "secret"}}
        self.server = self.stack.enter_context(start_vllm_server(self.server.model_dir, **options))


@pytest.fixture(scope="module")
def mortal(second_server):
    mortal = Mortal(second_server)
    with mortal.stack:
        yield mortal


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    """Sets the key of the second server."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")


def during_rollouts(trainer, act):
    """Calls `act(ledger, number of the rollout)` ten times a second while rollouts run. Returns their schedulers."""
    engine, schedulers = trainer.vllm_generation.engine, []
    run = engine.run

    def watched(scheduler, plans, prompts, body, overrides, on_progress, *more):
        number = len(schedulers)
        schedulers.append(scheduler)
        return run(scheduler, plans, prompts, body, overrides, lambda ledger: act(ledger, number), *more)

    engine.run = watched
    return schedulers


def assert_nothing_lost(scheduler):
    """Asserts that every candidate has ended, and that its segments have no gaps or overlaps."""
    ledger = scheduler.ledger
    assert ledger.num_lost == 0
    assert all(c.finish_reason is not None for c in ledger.candidates)
    assert ledger.num_submitted >= sum(c.started is not None for c in ledger.candidates)
    for candidate in ledger.candidates:
        assert candidate.logprobs is None or len(candidate.logprobs) == len(candidate.tokens)


def send(processes, number):
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # some processes of a server end soon
            process.send_signal(number)


def test_killed_and_frozen_servers(server, mortal, model_dir, tmp_path):
    """
    Rollout 0: one of two servers dies, the other takes over. 1: it is back with new weights, and the other one
    freezes. 2: only the first server runs. 3: both run.
    """
    urls = [server.base_url, mortal.server.base_url]
    # A learning rate at which stale weights would be visible.
    fields = {**LONG, "max_steps": 4, "learning_rate": 3e-3, "vllm_health_timeout_s": 2.0, "save_rollout_trace": True}
    trainer = make_trainer(model_dir, server_args(tmp_path, server, vllm_server_base_url=",".join(urls), **fields))
    engine, sync = trainer.vllm_generation.engine, trainer.vllm_generation.sync_weights
    frozen, killed, syncs = [], [], []

    def act(ledger, rollout):
        writing = {c.engine_id for c in ledger.candidates if 32 < c.length < 350}  # have something to continue from
        if rollout == 0 and urls[1] in writing and not killed:
            killed.append(mortal.server)
            mortal.server.kill()
        if rollout == 1 and urls[0] in writing and not frozen:
            frozen.extend(server.session())
            send(frozen, signal.SIGSTOP)

    def wait_for_all():
        deadline = time.monotonic() + 30
        while State.DOWN in engine.states().values():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def between_steps():
        syncs.append(time.monotonic())
        if len(syncs) == 2:
            mortal.start()  # with the checkpoint's weights
            wait_for_all()
        if len(syncs) == 4:
            send(frozen, signal.SIGCONT)
            wait_for_all()
        sync()

    schedulers = during_rollouts(trainer, act)
    trainer.vllm_generation.sync_weights = between_steps
    batches = record_batches(trainer)
    try:
        trainer.train()
    finally:
        send(frozen, signal.SIGCONT)
    assert killed
    assert frozen
    assert syncs[3] - syncs[2] < 60  # no waiting for the frozen server
    assert engine.num_losses == 2
    assert engine.states() == dict.fromkeys(urls, State.UP)
    for scheduler in schedulers:
        assert_nothing_lost(scheduler)
    assert [scheduler.ledger.num_resumed > 0 for scheduler in schedulers] == [True, True, False, False]
    resumed = [c for s in schedulers for c in s.ledger.candidates if c.segment > 0]
    assert any(c.num_prior >= 32 for c in resumed)  # they continued from their tokens
    used = [{candidate.engine_id for candidate in scheduler.ledger.candidates} for scheduler in schedulers]
    assert used[2:] == [{urls[1]}, set(urls)]
    assert len(batches) == 4
    for entry in rollout_logs(trainer):  # including resumed candidates
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3
    trace = pd.concat(map(pd.read_parquet, sorted((tmp_path / "rollouts").glob("*.parquet"))))
    assert (trace["length"] == 400).all()


def test_no_tool_is_called_twice(server, mortal, model_dir, tmp_path):
    """A server dies while conversations decode and wait for tools; they go on elsewhere."""
    lock, called = threading.Lock(), []

    @wraps(multiply)
    def deadly(a, b):
        with lock:
            called.append(b)
            if len(called) == 5:
                mortal.server.kill()
        time.sleep(0.2)
        return a * b

    urls = ",".join([server.base_url, mortal.server.base_url])
    fields = {"schedule": "grpo", "vllm_server_base_url": urls, "max_steps": 2, "max_completion_length": 400}
    fields["max_tool_calling_iterations"] = 6
    trainer, reader = agent(server, model_dir, tmp_path, tools=[deadly], **fields)
    trainer.train()
    rows = [row for batch in reader.batches for row in batch]
    assert len(rows) == 32
    counted = sum(16 * entry["tools/call_frequency"] for entry in rollout_logs(trainer))  # as TRL counts
    assert len(called) == round(counted) > 5
    assert trainer.vllm_generation.engine.num_losses == 1
    mortal.start()


def test_the_only_server_that_does_not_come_back(mortal, model_dir, tmp_path):
    doomed = mortal.server
    args = server_args(tmp_path, doomed, max_steps=1, vllm_server_timeout=3.0, **LONG)
    trainer = make_trainer(model_dir, args)
    died = []

    def act(ledger, rollout):
        if ledger.num_running and not died:
            died.append(time.perf_counter())
            doomed.kill()

    during_rollouts(trainer, act)
    words = rf"`vllm_server_timeout` \(3 s\). {doomed.base_url}: (nothing listens there|it closed the connection)"
    with pytest.raises(GenerationError, match=words):
        trainer.train()
    assert 2.5 < time.perf_counter() - died[0] < 5
