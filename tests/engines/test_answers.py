"""The answers of the last epoch: bounded, and restored as they were saved."""

import numpy as np
import pytest

from trl_darts.engines.answers import ANSWERS_FILE, BYTES_PER_TOKEN, GIB, TOP, Answer, AnswerStore, TopTokens


def answer(size, seed=0, ended=True):
    rng = np.random.default_rng(seed)
    top = np.argsort(rng.random((size, 50)))[:, :TOP].astype(np.int32)
    logprobs = np.log(rng.random((size, TOP))).astype(np.float32)
    return Answer(rng.integers(0, 50, size).astype(np.int32), logprobs[:, 0], top, logprobs, ended)


def store_of(num_tokens):
    return AnswerStore(num_tokens * BYTES_PER_TOKEN / GIB)


def assert_same(one, other):
    assert one.ended == other.ended
    for name in ("tokens", "logprobs", "top_tokens", "top_logprobs"):
        assert np.array_equal(getattr(one, name), getattr(other, name))


def test_restored_as_saved(tmp_path):
    store = store_of(1000)
    store.put(2**63 + 5, [answer(3), answer(7, 1, ended=False)])
    store.put(6, [answer(1, 2)])
    store.save(tmp_path)
    restored = store_of(1000)
    assert restored.load(tmp_path) is None
    assert (len(restored), restored.num_tokens) == (2, 11)
    for key in (2**63 + 5, 6):
        for one, other in zip(store.get(key), restored.get(key), strict=True):
            assert_same(one, other)


def test_full(tmp_path):
    store = store_of(25)
    for key in range(5):
        store.put(key, [answer(10, key)])
    assert [bool(store.get(key)) for key in range(5)] == [False, False, False, True, True]
    store.put(3, [answer(5)])  # is now the newest
    store.put(5, [answer(15)])
    assert [bool(store.get(key)) for key in (3, 4, 5)] == [True, False, True]
    assert store.num_tokens == 20
    store.put(6, [answer(26)])  # more than there is room for
    assert (len(store), store.num_tokens) == (0, 0)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a zip", None])
def test_a_file_that_cannot_be_read(tmp_path, content):
    store = store_of(100)
    store.put(1, [answer(4)])
    store.save(tmp_path)
    path = tmp_path / ANSWERS_FILE
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] if content is None else content)
    assert "can't be read" in store.load(tmp_path)
    assert len(store) == 0


def test_arrays_of_other_sizes(tmp_path):
    store = store_of(100)
    store.put(1, [answer(4)])
    store.save(tmp_path)
    with np.load(tmp_path / ANSWERS_FILE) as file:
        arrays = dict(file)
    np.savez(tmp_path / ANSWERS_FILE, **{**arrays, "tokens": arrays["tokens"][:3]})
    assert "differ in length" in store.load(tmp_path)


def test_no_file(tmp_path):
    assert "no answer of earlier epochs" in store_of(10).load(tmp_path)


def test_the_likeliest_tokens():
    tops = TopTokens()
    tops.add({token: -float(token) for token in range(1, TOP + 4)})
    tops.continue_at(3)  # nothing is known of two positions
    tops.add({7: -0.5, 9: -0.1})
    tokens, logprobs = tops.arrays(5)
    assert tokens[0].tolist() == [*range(1, TOP + 1)]
    assert logprobs[0].tolist() == [-float(token) for token in range(1, TOP + 1)]
    assert tokens[1:3].max() == tokens[4].max() == -1
    assert tokens[3].tolist() == [9, 7, *[-1] * (TOP - 2)]
    tops.continue_at(1)  # a server was lost
    assert len(tops) == 1
    own = Answer(np.array([1, 2]), np.zeros(2), *tops.arrays(2), ended=True)
    assert own.top(0)[1] == -1.0
    assert own.top(1) == {}
