"""Answers are available to later servers, but not to one with another tokenizer."""

import logging

import numpy as np
import pytest

from benchmarks.drafts import Decoding, make_drafter
from benchmarks.models import make_tokenizer
from trl_darts.errors import ConfigurationError
from trl_darts.serving.command import make_commands
from trl_darts.serving.options import ServeOptions, check_options
from trl_darts.speculation import store as module
from trl_darts.speculation.answers import History
from trl_darts.speculation.drafter import HISTORY_VARIABLE
from trl_darts.speculation.store import Store

from ..serving.builders import CPU, free_ports
from .test_drafter import ANSWER, PROMPT


@pytest.fixture
def model(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    return str(tmp_path / "model")


def test_a_new_server_begins_with_the_answers_of_the_last(tmp_path, model, monkeypatch):
    monkeypatch.setenv(HISTORY_VARIABLE, str(tmp_path / "history"))
    first = Decoding(make_drafter(tokenizer=model))
    first.add("a", PROMPT, ANSWER)
    first.run()
    first.drafter.new_policy()
    second = Decoding(make_drafter(tokenizer=model))
    second.add("a", PROMPT, ANSWER)
    assert second.run() < len(ANSWER) // 3
    assert second.written == second.going_to_write
    second.drafter.new_policy()
    assert len(list((tmp_path / "history").glob("*.parquet"))) == 2
    assert first.drafter.num_failures == second.drafter.num_failures == 0


def test_a_full_disk_costs_the_store_and_not_the_history(tmp_path, model, monkeypatch, caplog):
    monkeypatch.setenv(HISTORY_VARIABLE, str(tmp_path / "history"))
    monkeypatch.setattr(logging.getLogger("vllm.trl_darts"), "handlers", [caplog.handler])
    monkeypatch.setattr(logging.getLogger("vllm.trl_darts"), "propagate", False)
    monkeypatch.setattr(module.pq, "write_table", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left")))
    decoding = Decoding(make_drafter(tokenizer=model))
    for name in ("a", "b"):
        decoding.add(name, PROMPT, ANSWER)
        steps = decoding.run()
        decoding.drafter.new_policy()
    assert steps < len(ANSWER) // 3
    assert caplog.text.count("no longer stored") == 1
    assert decoding.drafter.num_failures == 0


def test_files_are_read_oldest_first_and_are_not_kept_for_ever(tmp_path, model, monkeypatch):
    monkeypatch.setattr(module, "MAX_FILES", 2)
    store, history = Store(tmp_path / "history", model), History()
    prompt = history.prompt_of(np.array(PROMPT, dtype=np.int32))
    for length in (5, 6, 7):
        history.add(prompt, range(length))
        store.save(history)
        history.version += 1
    store.save(history)  # nothing new
    store.load(read := History())
    answers = read.prompt_of(np.array(PROMPT, dtype=np.int32)).answers
    assert [(answer.version, len(answer.tokens)) for answer in answers] == [(0, 6), (1, 7)]


def test_what_can_not_be_used_is_refused_before_a_server_starts(tmp_path, model, monkeypatch, caplog):
    history = tmp_path / "history"
    other = make_tokenizer(100)
    other.save_pretrained(tmp_path / "other")
    answers = History()
    answers.add(answers.prompt_of(np.array(PROMPT, dtype=np.int32)), ANSWER)
    Store(history, str(tmp_path / "other")).save(answers)

    def check(speculative="suffix", directory=history):
        check_options(
            ServeOptions(model, port=free_ports(1)[0], speculative=speculative, draft_history=directory), CPU
        )

    monkeypatch.setattr("trl_darts.serving.options._takes_a_drafter", lambda: True)
    with pytest.raises(
        ConfigurationError, match=r"`draft_history` .* same tokenizer, and 'answers-.*' has a different one"
    ):
        check()
    with pytest.raises(ConfigurationError, match=r"`draft_history` .* needs `speculative='suffix'`"):
        check("ngram")
    with pytest.raises(ConfigurationError, match="must be a directory, not a file"):
        check(directory=tmp_path / "model" / "config.json")
    check(directory=tmp_path / "new")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "answers-1.parquet").write_text("no Parquet")
    with pytest.raises(ConfigurationError, match=r"reading 'answers-1.parquet' failed: .* Remove this file"):
        check(directory=tmp_path / "broken")
    # A server that is started without the command drafts without them, and leaves them alone.
    monkeypatch.setenv(HISTORY_VARIABLE, str(history))
    monkeypatch.setattr(logging.getLogger("vllm.trl_darts"), "handlers", [caplog.handler])
    drafter = make_drafter(tokenizer=model)
    assert drafter.num_failures == 1
    assert "same tokenizer" in caplog.text
    drafter.new_policy()
    assert len(list(history.iterdir())) == 1


def test_servers_are_told_of_it(tmp_path):
    options = ServeOptions("M", speculative="suffix", draft_history=tmp_path, num_servers=2)
    assert [command.env[HISTORY_VARIABLE] for command in make_commands(options, CPU, {})] == [str(tmp_path)] * 2
