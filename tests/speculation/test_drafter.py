"""The drafter in a decoding loop like vLLM's, without a model: sequences start, change rows and end."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.drafts import MAX_MODEL_LEN, Decoding, make_drafter, replay
from trl_darts.speculation import drafter as module
from trl_darts.speculation.answers import Answer, History
from trl_darts.speculation.index import GRAM


PROMPT = [7, 8, 9]
ANSWER = [*range(20, 90)]


def test_siblings_help_each_other():
    decoding = Decoding(make_drafter())
    decoding.add("a", PROMPT, ANSWER)
    for _ in range(40):
        decoding.step()
    assert decoding.num_accepted == 0
    decoding.add("b", PROMPT, ANSWER)
    decoding.add("other", [1, 2], [*reversed(ANSWER)])
    assert decoding.run() <= 70
    assert decoding.written == decoding.going_to_write
    assert decoding.num_accepted >= 30


def test_so_do_answers_of_earlier_rollouts_from_the_first_token_on():
    decoding = Decoding(make_drafter())
    decoding.add("a", PROMPT, ANSWER)
    assert decoding.run() == len(ANSWER)
    decoding.add("idle", [1], [*range(150)])  # time passes
    decoding.run()
    decoding.add("b", PROMPT, ANSWER)
    assert decoding.step() == [ANSWER[1:3]] or decoding.drafts["b"]
    assert decoding.run() < len(ANSWER) // 3


def test_the_benchmarks_replay_is_faster_with_drafts():
    first, second = replay(num_prompts=2, epochs=2, seed=0, num_servers=1)
    assert first["control"] / first["time"] > 1.2
    assert second["control"] / second["time"] > 1.2


def test_a_sequence_that_goes_on_elsewhere_is_known_by_its_prompt():
    decoding = Decoding(make_drafter())
    decoding.add("a", PROMPT, ANSWER)
    for _ in range(50):
        decoding.step()
    decoding.add("resumed", PROMPT + ANSWER[:10], ANSWER[10:])
    decoding.step()
    assert decoding.drafts["resumed"] == ANSWER[11 : 11 + len(decoding.drafts["resumed"])] != []


def test_a_sequence_drafts_as_much_as_was_accepted():
    """Four tokens at first, then twice what was accepted and two more."""
    decoding = Decoding(make_drafter(num_speculative_tokens=16))
    decoding.add("earlier", PROMPT, ANSWER)
    decoding.run()
    decoding.add("same", PROMPT, ANSWER)
    decoding.add("other", PROMPT, [*ANSWER[:9], *[1] * 20])
    sizes = []
    for _ in range(4):
        decoding.step()
        sizes.append([len(decoding.drafts.get(name, [])) for name in ("same", "other")])
    assert [size for size, _ in sizes] == [4, 10, 16, 16]
    assert max(size for _, size in sizes[2:]) <= 2
    assert decoding.drafter.num_failures == 0


def test_no_index_where_there_is_no_room(monkeypatch):
    monkeypatch.setattr(module, "MAX_INDEXED", 50)
    decoding = Decoding(make_drafter())
    decoding.add("a", PROMPT, ANSWER * 2)
    for _ in range(60):
        decoding.step()
    decoding.add("b", [1], [5] * 60)
    decoding.step()
    kept = {name: one.prompt.index is not None for name, one in decoding.drafter._answering.items()}
    assert kept == {"a": True, "b": False}


def test_indexes_stay_within_their_limit_while_prompts_run(monkeypatch):
    monkeypatch.setattr(module, "MAX_INDEXED", 150)
    decoding = Decoding(make_drafter())
    decoding.add("long", PROMPT, [*range(400)])
    decoding.add("short", [1], [*range(300)])
    for _ in range(module.STEPS_BETWEEN_SWEEPS):
        decoding.step()
        assert sum(index.num_tokens for index in decoding.drafter._indexes().values()) <= 150
    for _ in range(200):
        decoding.step()
    indexes = decoding.drafter._indexes().values()
    assert sum(index.num_tokens for index in indexes) <= 150 + 2 * module.STEPS_BETWEEN_SWEEPS
    decoding.run()
    assert decoding.written == decoding.going_to_write
    assert decoding.drafter.num_failures == 0


def test_only_the_first_rank_drafts():
    """vLLM takes the drafts of the others from nobody."""
    decoding = Decoding(make_drafter())
    decoding.drafter._drafts = False
    decoding.add("a", PROMPT, ANSWER * 2)
    assert decoding.run() == 2 * len(ANSWER)
    assert not decoding.drafter._answering


@pytest.mark.parametrize("name", [f"p3-{'0a' * 16}-5-1-0", f"p2.99.3-{'0a' * 16}-2"])
def test_a_request_that_says_how_long_its_prompt_is_is_not_searched_for(name):
    """Alone, or as the third of a request."""
    name = f"cmpl-{name}-1234abcd"
    decoding = Decoding(make_drafter())
    decoding.add("earlier", PROMPT[:2], ANSWER)  # a known prompt that it begins with
    decoding.step()
    decoding.add(name, PROMPT + ANSWER[:5], ANSWER[5:])
    decoding.step()
    assert decoding.drafter._answering[name].prompt.tokens.tolist() == PROMPT


def test_rows_that_have_no_token_yet_get_none():
    drafter = make_drafter()
    batch = SimpleNamespace(
        req_ids=["prefill"],
        token_ids_cpu=np.zeros((1, 8), dtype=np.int32),
        num_tokens_no_spec=np.array([4]),
        num_prompt_tokens=np.array([4]),
    )
    assert drafter.draft(batch, [[]]) == [[]]
    assert drafter.num_failures == 0


def test_never_beyond_the_models_limit():
    decoding = Decoding(make_drafter())
    answer = [5] * (MAX_MODEL_LEN - len(PROMPT))
    decoding.add("a", PROMPT, answer)
    while decoding.rows:
        (draft,) = decoding.step()
        assert len(PROMPT) + len(decoding.written["a"]) + len(draft) < MAX_MODEL_LEN or not draft


def test_a_failure_is_survived_reported_once_and_counted(monkeypatch, caplog):
    decoding = Decoding(make_drafter())
    logger = logging.getLogger("vllm.trl_darts")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    decoding.add("a", PROMPT, ANSWER)
    with monkeypatch.context() as patch:
        patch.setattr(module.SuffixDrafter, "_draft_one", lambda *args: 1 / 0)
        for _ in range(3):
            assert decoding.step() == [[]]
    assert decoding.drafter.num_failures == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ZeroDivisionError" in caplog.text
    decoding.add("b", PROMPT, ANSWER)
    decoding.run()
    assert decoding.written == decoding.going_to_write
    assert decoding.num_accepted > 0


def test_without_the_plugin_there_are_no_drafts():
    assert make_drafter().propose([[1], [2]], None, None, slot_mappings=None) == [[], []]


def test_the_oldest_policys_longest_answers_go_first():
    history = History(max_tokens=100)
    first, second = (history.prompt_of(np.array([token], dtype=np.int32)) for token in (1, 2))
    history.add(first, range(30))
    history.add(second, range(20))
    history.version += 1
    history.add(first, range(40))
    history.add(second, range(8))
    assert history.num_tokens == 100
    history.add(second, range(5))
    kept = [(a.version, len(a.tokens)) for prompt in (first, second) for a in prompt.answers]
    assert kept == [(1, 40), (0, 20), (1, 8), (1, 5)]
    assert history.num_tokens == 75


def test_a_prompt_without_answers_is_forgotten():
    history = History(max_tokens=10)
    gone = history.prompt_of(np.array([1, 2], dtype=np.int32))
    history.add(gone, range(9))
    assert history.num_tokens == 0
    assert history.prompt_of(np.array([1, 2], dtype=np.int32)) is not gone


def test_an_index_begins_with_the_newest_answers(monkeypatch):
    monkeypatch.setattr("trl_darts.speculation.answers.NUM_INDEXED", 10)
    prompt = History().prompt_of(np.array([1, 2, 3, 4], dtype=np.int32))
    prompt.answers = [Answer(0, np.array([2, 3, 4, 5, last])) for last in (1, 2, 3)]
    index = prompt.make_index()
    text = index.add([2, 3, 4, 5])
    assert prompt.context_start == 4 - GRAM
    assert index.propose(text, 1) == [3]
    assert len(index._texts) == 4  # the prompt, two answers, and this one
