"""The example with tools: what they can reach, questions and answers, and its script on a real server."""

import random
import re
import sqlite3
import sys

import pytest
from transformers import PreTrainedTokenizerFast

from benchmarks.lines import ROOT
from benchmarks.vllm_server import start_vllm_server


FOLDER = ROOT / "examples" / "agent"
MODULES = ("task", "pretrain", "train", "train_loop")


@pytest.fixture
def task(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import task  # the example's

    yield task
    for name in MODULES:
        sys.modules.pop(name, None)


def test_the_price_list(task):
    prices = task.prices()
    assert len(prices) > 50
    for item, price in prices.items():
        assert task.search(item) == f"{item} costs {price}"
    assert task.search("nobody") == "nothing"
    assert task.search('" OR "') == "nothing"
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        task.open_database().execute("DELETE FROM prices")


def test_the_calculator(task):
    assert task.calculate("3*14+2*7") == "56"
    for expression in ("__import__('os')", "9**9", "3*", "open('x')", "1+" * 9 + "1", ""):
        with pytest.raises(ValueError, match="only numbers"):
            task.calculate(expression)


def test_questions(task):
    train, test = task.make_dataset(300, 0), task.make_dataset(100, 0, "test")
    texts = [{row["prompt"][0]["content"] for row in own} for own in (train, test)]
    assert not texts[0] & texts[1]
    prices = task.prices()
    for row in test:
        terms = re.findall(r"(\d+) (\w+)", row["prompt"][0]["content"])
        assert row["answer"] == sum(int(count) * prices[item] for count, item in terms)
    says = [[{"role": "assistant", "content": content}] for content in (str(test[0]["answer"]), "7", None)]
    assert task.accuracy_reward(says, [test[0]["answer"]] * 3) == [1.0, 0.0, 0.0]


def test_conversations_are_written_as_the_chat_template_writes_them(task):
    """What the agent was trained on before is what TRL shows it."""
    import pretrain
    from trl.chat_template_utils import parse_response

    rng, tokenizer = random.Random(0), PreTrainedTokenizerFast.from_pretrained(pretrain.CHECKPOINT)
    assert tokenizer.get_vocab() == pretrain.build_tokenizer().get_vocab()
    for is_flawed in (False, True) * 10:
        text = "".join(part for part, _ in pretrain.conversation(rng, task.prices(), is_flawed))
        messages = []
        for role, said in re.findall(r"(\w+):((?:(?!<eos>)[\s\S])*)<eos>\n", text):
            if role == "assistant":
                ids = tokenizer(said + "<eos>")["input_ids"]
                messages.append(parse_response(tokenizer, ids, prefix=tokenizer("assistant:")["input_ids"]))
            else:
                messages.append({"role": role, "content": said})
        assert tokenizer.apply_chat_template(messages, tokenize=False) == text
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.fixture(scope="module")
def server():
    with start_vllm_server(FOLDER / "checkpoint", max_model_len=512) as server:
        yield server


def accuracies(script, server, monkeypatch, tmp_path, capsys):
    """Runs a script for two steps, and returns what it says of held-out questions."""
    words = ["--server", server.base_url, "--steps", "2", "--output-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    script.main()
    line = capsys.readouterr().out.splitlines()[-1]
    found = re.match(r"Held-out accuracy (\S+) before, (\S+) after 2 steps in \d+ s\.$", line)
    return [float(own) for own in found.groups()]


@pytest.mark.vllm
def test_the_script(task, server, monkeypatch, tmp_path, capsys):
    import train

    def make_dataset(size, seed, split="train"):  # of the example's 128 held-out questions, some samples are below 0.1
        return task.make_dataset(8 * size if split == "test" else size, seed, split)

    monkeypatch.setattr(train, "make_dataset", make_dataset)
    before, after = accuracies(train, server, monkeypatch, tmp_path, capsys)
    assert 0.1 < before < 0.6
    assert after > 0.05


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_ones_own_loop(task, server, monkeypatch, tmp_path, capsys):
    """It makes what TRL's loop makes of the same tools: what the chat template writes, and as many right answers."""
    import train_loop

    play, played = train_loop.play, []

    async def recorded(session, example):
        await play(session, example)
        played.append(session)

    monkeypatch.setattr(train_loop, "play", recorded)
    before, after = accuracies(train_loop, server, monkeypatch, tmp_path, capsys)
    assert 0.05 < before < 0.6
    assert after > 0.05
    texts = [session.text for session in played if session.reward]
    assert texts
    assert all(re.search(r"\d+$", text) for text in texts)
