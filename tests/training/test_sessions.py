"""Coroutines that lead conversations, on a real server: what is trained on, at the same time, and errors."""

import asyncio
import threading
import time
from collections import Counter

import pytest

from benchmarks.tool_calls import make_chat_tokenizer
from tests.builders import letter_of, make_args, make_trainer, record_batches, rollout_logs
from tests.test_trainer_server import server_args
from tests.trl_parity.common import chats
from trl_darts import EnvironmentLost, Session, session_reward
from trl_darts.errors import ConfigurationError, GenerationError


pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")]

FIELDS = {"schedule": "grpo", "max_completion_length": 40}


def trainer_of(server, model_dir, tmp_path, play, **fields):
    args = server_args(tmp_path, server, **{**FIELDS, "max_steps": 2, **fields})
    return make_trainer(model_dir, args, rollout_func=play, reward_funcs=session_reward)


def test_what_the_model_wrote_is_trained_on(server, model_dir, tmp_path):
    played = []

    async def play(session: Session, example: dict) -> None:
        assert example["prompt"] == session.prompt
        first = await session.generate(max_tokens=6)
        before = session.num_left
        assert session.append(session.prompt[-1])  # the model goes on with the same letter
        assert session.num_left == before - 1
        assert not session.append("x" * session.num_left)  # nothing of it
        second = await session.generate()
        session.reward = float(len(second) % 3)
        played.append((first, second, session))

    trainer = trainer_of(server, model_dir, tmp_path, play, learning_rate=0.0)
    batches = record_batches(trainer)
    trainer.train()
    assert len(played) == 32
    for first, second, session in played:
        assert len(session.completion_ids) == len(session.mask) == len(session.logprobs) <= 40
        assert sum(1 - own for own in session.mask) == 1
        answers = [session.completion_ids[0], session.completion_ids[session.mask.index(0) + 1]]
        assert [letter_of(token) for token in answers] == [session.prompt[-1]] * 2  # later ones may stray
        assert first + session.prompt[-1] + second == session.text
    for batch in batches:
        appended = (batch["completion_mask"] - batch["tool_mask"] * batch["completion_mask"]).sum(dim=1)
        assert appended.tolist() == [1] * 16
    for entry in rollout_logs(trainer):  # log-probs are those of the tokens
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    means = [sum(session.reward for *_, session in played[start : start + 16]) / 16 for start in (0, 16)]
    assert rewards == pytest.approx(means)


def test_all_at_once(server, model_dir, tmp_path):
    async def play(session: Session, example: dict) -> None:
        await session.generate(4)
        await asyncio.sleep(0.5)
        await session.generate(4)
        session.reward = float(len(session.text))

    begin = time.monotonic()
    trainer_of(server, model_dir, tmp_path, play, max_steps=1).train()
    assert time.monotonic() - begin < 16 * 0.5


def test_no_token_is_left(server, model_dir, tmp_path):
    async def play(session: Session, example: dict) -> None:
        while session.num_left:
            await session.generate()
            session.append("x")
        assert await session.generate() == ""

    trainer_of(server, model_dir, tmp_path, play, max_steps=1).train()


def test_an_error_ends_the_others(server, model_dir, tmp_path):
    ended = []

    async def play(session: Session, example: dict) -> None:
        try:
            await session.generate(4)
            if not ended:
                raise ValueError("the board is broken")
            await asyncio.sleep(60)
        finally:
            ended.append(session)

    trainer = trainer_of(server, model_dir, tmp_path, play)
    with pytest.raises(ValueError, match="the board is broken"):
        trainer.train()
    assert len(ended) == 16
    assert not any(thread.name == "trl_darts-sessions" for thread in threading.enumerate())


def test_servers_that_fail_before_it_begins_leave_no_thread(server, model_dir, tmp_path, monkeypatch):
    async def play(session: Session, example: dict) -> None:
        await session.generate(4)

    def turns(num_conversations):
        raise GenerationError("no server is left")

    trainer = trainer_of(server, model_dir, tmp_path, play)
    monkeypatch.setattr(trainer._engine, "turns", turns)
    with pytest.raises(GenerationError, match="no server is left"):
        trainer.train()
    assert not any(thread.name == "trl_darts-sessions" for thread in threading.enumerate())


def test_bad_input(server, model_dir, tmp_path):
    async def play(session: Session, example: dict) -> None:
        session.append("only I")

    with pytest.raises(GenerationError, match=r"`rollout_func` \('play'\) ended without `await session.generate"):
        trainer_of(server, model_dir, tmp_path, play).train()
    with pytest.raises(
        ConfigurationError, match=r"`rollout_func` \('play'\) is a coroutine, whose turns vLLM servers"
    ):
        make_trainer(model_dir, make_args(tmp_path, schedule="grpo"), rollout_func=play)


SPARE = {"schedule": "darts", "max_num_generations": 12, "target_redundancy": 1.5}


def test_spare_conversations_are_not_waited_for(server, model_dir, tmp_path):
    """Those that an environment holds up are left out, and cancelled."""
    counts = Counter()

    async def play(session: Session, example: dict) -> None:
        number = counts["begun"]
        counts["begun"] += 1
        await session.generate(4)
        if number % 3 == 0:
            try:
                await asyncio.sleep(60)
            finally:
                counts["cancelled"] += 1
        session.append("x")
        await session.generate(4)
        session.reward = float(number % 2)

    begin = time.monotonic()
    trainer = trainer_of(server, model_dir, tmp_path, play, max_steps=1, **SPARE)
    trainer.train()
    assert time.monotonic() - begin < 50
    (entry,) = rollout_logs(trainer)
    assert counts["begun"] > 16
    assert 0 < counts["cancelled"] == counts["begun"] - 16
    assert entry["darts/tools/turns"] == 1
    assert not any(thread.name == "trl_darts-sessions" for thread in threading.enumerate())


def test_a_lost_environment_begins_again(server, model_dir, tmp_path):
    begun, lost = [], []

    async def play(session: Session, example: dict) -> None:
        begun.append(session)
        await session.generate(4)
        if len(lost) < 2:
            lost.append(session)
            raise EnvironmentLost("the container is gone")
        session.reward = float(len(session.text))

    trainer = trainer_of(server, model_dir, tmp_path, play, max_steps=1)
    batches = record_batches(trainer)
    trainer.train()
    (entry,) = rollout_logs(trainer)
    assert entry["darts/tools/lost_environments"] == len(begun) - 16 == 2
    assert len(batches[0]["completion_ids"]) == 16


def test_evaluation_has_one_conversation_for_each_row(server, model_dir, tmp_path):
    prompts = []

    async def play(session: Session, example: dict) -> None:
        prompts.append(example["prompt"])
        await session.generate(4)
        session.reward = 1.0

    fields = {"per_device_eval_batch_size": 4, "num_generations_eval": 1, **SPARE}
    trainer = trainer_of(server, model_dir, tmp_path, play, **fields)
    assert trainer.evaluate(trainer.train_dataset.select(range(8)))["eval_reward"] == 1.0
    assert sorted(prompts) == sorted(trainer.train_dataset[:8]["prompt"])


def test_a_group_without_its_rows_is_dropped(server, model_dir, tmp_path):
    async def play(session: Session, example: dict) -> None:
        if example["prompt"] == first:
            raise GenerationError("no board is free")
        await session.generate(4)
        session.reward = float(len(session.text) % 2)

    trainer = trainer_of(server, model_dir, tmp_path, play, max_steps=1, on_generation_error="drop_group")
    first = next(iter(trainer.get_train_dataloader()))[0]["prompt"]
    trainer.train()
    (entry,) = rollout_logs(trainer)
    assert entry["darts/rollout/dropped_groups"] == 1


def test_a_turn_is_a_message(server, model_dir, tmp_path):
    """Also after more was appended, and messages begin and continue a conversation as the chat template has them."""
    words, seen = [f"<{i}>" for i in range(100)], []

    async def play(session: Session, example: dict) -> None:
        messages = [{"role": "system", "content": "be brief"}, *example["prompt"]]
        session.begin(messages)
        text = await session.generate(60)
        with pytest.raises(ConfigurationError, match=r"`session.begin` must come before"):
            session.begin(messages)
        messages.append(session.message)
        assert messages[-1] == {"role": "assistant", "content": text}
        messages.append({"role": "user", "content": "why"})
        if session.append(messages[-1:]):
            assert session.message == messages[-2]
            seen.append((session.has_ended_turn, messages, [*session.prompt_ids, *session.completion_ids]))
        session.reward = 1.0

    tokenizer = make_chat_tokenizer(words)
    args = server_args(tmp_path, server, **{**FIELDS, "max_completion_length": 120, "max_steps": 1})
    data = {"train_dataset": chats(), "reward_funcs": session_reward, "processing_class": tokenizer}
    make_trainer(model_dir, args, rollout_func=play, **data).train()
    ended = [own for own in seen if own[0]]
    assert ended
    for _, messages, ids in ended:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(ids) == text
