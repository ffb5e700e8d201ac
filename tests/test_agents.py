"""Conversations with tools as candidates, with a real vLLM server: whole rollouts, weights, what is refused."""

import threading
from functools import wraps

import pytest

from benchmarks.tool_calls import make_chat_tokenizer
from tests.builders import record_batches, record_rollouts, rollout_logs
from tests.launches.scenarios import MULTIPLY
from tests.test_trainer_server import server_args
from tests.trl_parity.common import chats
from tests.trl_parity.tool_calls import Reader, multiply, said, tool_messages
from trl_darts import DARTSGRPOTrainer, EnvironmentLost
from trl_darts.engines.turns import TurnRun
from trl_darts.errors import ConfigurationError, GenerationError


pytestmark = pytest.mark.vllm


def agent(server, model_dir, tmp_path, tools=(multiply,), reward=None, environment_factory=None, **fields):
    """Two answers in five of the server's model are calls."""
    words = [*MULTIPLY, *(f"<{i}>" for i in range(len(MULTIPLY) * 3 // 2))]
    fields = {"max_completion_length": 200, "max_steps": 3, "learning_rate": 0.0, **fields}
    reader = Reader()
    trainer = DARTSGRPOTrainer(
        str(model_dir),
        reward or reader,
        server_args(tmp_path, server, **fields),
        chats(),
        processing_class=make_chat_tokenizer(words, tools=True),
        tools=list(tools) or None,
        environment_factory=environment_factory,
    )
    return trainer, reader


def check_rows(reader, batches):
    """Calls were answered, and the tokens that the model did not sample are masked."""
    rows = [row for batch in reader.batches for row in batch]
    for row in rows:
        calls = [text for m in row[1] if m["role"] == "assistant" for text in said(m)[1:]]
        answers = [message["content"] for message in tool_messages(row)]
        assert answers == [MULTIPLY[call] for call in calls[: len(answers)]]
    has_answers = any(tool_messages(row) for row in rows)
    assert has_answers == any((batch["tool_mask"] < batch["completion_mask"]).any().item() for batch in batches)
    return has_answers


@pytest.mark.parametrize("fields", [{}, {"schedule": "grpo"}, {"long_end_patience": "none"}], ids=str)
def test_whole_conversations(server, model_dir, tmp_path, caplog, fields):
    trainer, reader = agent(server, model_dir, tmp_path, **fields)
    batches, rollouts = record_batches(trainer), record_rollouts(trainer)
    trainer.train()
    assert len(reader.batches) == 3
    spare = trainer.args.over_provisions
    assert check_rows(reader, batches) or spare
    for entry in rollout_logs(trainer):
        assert (entry["darts/budget/total"] > 16) == spare
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3  # over all turns, of tokens with loss
        assert spare or entry["darts/tools/turns"] > 0  # conversations without a call end first
        assert entry["darts/tools/kept_vs_pool_turns_ratio"] > 0
    for batch, record in zip(batches, rollouts, strict=True):
        kept = [group.lengths[i] for group in record.summaries for i in group.selected]
        decoded = (batch["tool_mask"] * batch["completion_mask"]).sum(dim=1).tolist()
        assert all(own >= other for own, other in zip(kept, decoded, strict=True))
    assert any("are not deferred" in message for message in caplog.messages) == (fields == {})
    assert not any("first turn" in message for message in caplog.messages)


def test_what_a_slow_tool_holds_up_is_left_out(server, model_dir, tmp_path):
    over, lock, seen = threading.Event(), threading.Lock(), []

    @wraps(multiply)
    def slow(a, b):
        with lock:
            seen.append(b)
            hangs = len(seen) == 1
        if hangs:
            over.wait(120)
        return a * b

    # As many spare candidates as rows: groups stop at their fourth complete one.
    fields = {"max_num_generations": 8, "min_num_generations": 8, "target_redundancy": 2.0, "max_steps": 1}
    trainer, _ = agent(server, model_dir, tmp_path, tools=[slow], **fields)
    trainer.train()
    assert not over.is_set()
    assert len(seen) > 1
    assert rollout_logs(trainer)[0]["darts/rollout/aborted_candidates"] >= 1
    over.set()


class Calculator:
    """An environment with the tool. It counts its calls, and one of its kind may hang."""

    hang = None
    observation = " now"

    def reset(self, **kwargs):
        self.calls = []
        return self.observation

    def multiply(self, a: int, b: int) -> int:
        """
        Multiplies two numbers.

        Args:
            a: One number.
            b: The other.
        """
        self.calls.append(str(a * b))
        if Calculator.hang is not None:
            hang, Calculator.hang = Calculator.hang, None
            hang.append(self)
            hang[0].wait(120)
        return a * b


NOW = {"type": "text", "text": " now"}


@pytest.mark.parametrize(
    ("fields", "observation"),
    [({}, " now"), ({}, [NOW]), ({"schedule": "grpo"}, " now")],
    ids=["default", "observation in parts", "grpo"],
)
@pytest.mark.filterwarnings("ignore:You are using 'environment_factory'")
def test_environments(server, model_dir, tmp_path, monkeypatch, caplog, fields, observation):
    """Rewards see that of each row's own conversation, also of a spare one, which is told what TRL tells its row."""
    monkeypatch.setattr(Calculator, "observation", observation)
    seen = []

    def reward(prompts, completions, environments, **kwargs):
        contents = [prompt[-1]["content"] for prompt in prompts]
        assert all(content[-1] == NOW if observation == [NOW] else content.endswith(" now") for content in contents)
        assert len(set(map(id, environments))) == len(completions) == 16
        for messages, environment in zip(completions, environments, strict=True):
            answers = [message["content"] for message in messages if message["role"] == "tool"]
            assert answers == environment.calls[: len(answers)]  # TRL cuts those that are over the limit
        seen.append([environment.calls for environment in environments])
        return [float(len(environment.calls)) for environment in environments]

    trainer, _ = agent(server, model_dir, tmp_path, (), reward, environment_factory=Calculator, **fields)
    trainer.train()
    assert len(seen) == 3
    spare = trainer.args.over_provisions
    assert any(calls for batch in seen for calls in batch) or spare
    for entry in rollout_logs(trainer):
        assert (entry["darts/budget/total"] > 16) == spare == (fields == {})
    assert (len(trainer._environment_pool[None]) > 16) == spare
    assert not any("first turn" in message for message in caplog.messages)


@pytest.mark.filterwarnings("ignore:You are using 'environment_factory'")
def test_an_environment_that_hangs_is_not_used_again(server, model_dir, tmp_path, monkeypatch):
    hang = [threading.Event()]
    monkeypatch.setattr(Calculator, "hang", hang)
    fields = {"max_num_generations": 8, "min_num_generations": 8, "target_redundancy": 2.0, "max_steps": 2}
    trainer, reader = agent(server, model_dir, tmp_path, (), environment_factory=Calculator, **fields)
    trainer.train()
    assert len(reader.batches) == 2
    assert not hang[0].is_set()
    assert len(hang) == 2
    assert all(own is not hang[1] for own in [*trainer._environment_pool[None], *trainer.environments])
    hang[0].set()


@pytest.mark.parametrize("fields", [{}, {"schedule": "grpo"}], ids=str)
@pytest.mark.filterwarnings("ignore:You are using 'environment_factory'")
def test_a_lost_environment_costs_its_conversation_a_new_beginning(server, model_dir, tmp_path, fields):
    """The first call in each of the rows' own environments loses it, and none in those that replace them."""
    lock, made, lost = threading.Lock(), [], []

    class Fragile(Calculator):
        def __init__(self):
            made.append(self)
            self.is_sound = len(made) > 16

        @wraps(Calculator.multiply)
        def multiply(self, a, b):
            with lock:
                if not self.is_sound and self not in lost:
                    lost.append(self)
                    raise EnvironmentLost("the container is gone")
            return super().multiply(a, b)

    def reward(prompts, completions, environments, **kwargs):
        for messages, environment in zip(completions, environments, strict=True):
            answers = [message["content"] for message in messages if message["role"] == "tool"]
            assert answers == environment.calls[: len(answers)]
            assert environment not in lost
        return [float(len(own.calls)) for own in environments]

    trainer, _ = agent(server, model_dir, tmp_path, (), reward, environment_factory=Fragile, **fields)
    batches = record_batches(trainer)
    trainer.train()
    assert lost
    assert not set(lost) & {*trainer._environment_pool[None], *trainer.environments}
    assert sum(entry["darts/tools/lost_environments"] for entry in rollout_logs(trainer)) == len(lost)
    assert all(entry["tools/failure_frequency"] == 0 for entry in rollout_logs(trainer))
    assert all(len(batch["completion_ids"]) == 16 for batch in batches)
    assert max(entry["sampling/sampling_logp_difference/max"] for entry in rollout_logs(trainer)) < 1e-3


@pytest.mark.filterwarnings("ignore:You are using 'environment_factory'")
def test_an_environment_that_is_always_lost_ends_the_training(server, model_dir, tmp_path):
    class Gone(Calculator):
        @wraps(Calculator.multiply)
        def multiply(self, a, b):
            raise EnvironmentLost("the container is gone")

    trainer, _ = agent(server, model_dir, tmp_path, (), environment_factory=Gone, schedule="grpo")
    with pytest.raises(GenerationError, match=r"the container is gone \(3 environments in a row\)"):
        trainer.train()
    assert not any(thread.name.startswith("trl_darts-conversation") for thread in threading.enumerate())


def test_an_error_before_the_first_turn_is_raised(server, model_dir, tmp_path, monkeypatch):
    async def begin(self, plans):
        raise RuntimeError("the turns can't begin")

    monkeypatch.setattr(TurnRun, "_begin", begin)
    trainer, _ = agent(server, model_dir, tmp_path)
    with pytest.raises(RuntimeError, match="the turns can't begin"):
        trainer.train()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stop_tools": ["multiplies"]}, r"`stop_tools` \('multiplies'\) must be names .*Did you mean `multiply`"),
        ({"stop_tools": []}, "`stop_tools`"),
        (
            {"max_concurrent_conversations": 3, "tools": []},
            r"`max_concurrent_conversations` \(3\) has no effect where",
        ),
        ({"tool_timeout_s": 3.0, "tools": []}, r"`tool_timeout_s` \(3.0\) has no effect without tools"),
        ({"conversation_timeout_s": 0.0}, "`conversation_timeout_s`"),
    ],
)
def test_limits_without_an_effect(server, model_dir, tmp_path, fields, words):
    with pytest.raises(ConfigurationError, match=words):
        agent(server, model_dir, tmp_path, **fields)


def test_evaluation(server, model_dir, tmp_path):
    trainer, _ = agent(server, model_dir, tmp_path, max_steps=1)
    trainer.train()
    metrics = trainer.evaluate(chats())
    assert metrics["eval_tools/call_frequency"] > 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"defer_unsettled_groups": True}, "`defer_unsettled_groups`"),
        ({"audit_share": 0.2}, "`audit_share`"),
    ],
)
def test_refused(server, model_dir, tmp_path, fields, words):
    with pytest.raises(ConfigurationError, match=words):
        agent(server, model_dir, tmp_path, **fields)


@pytest.mark.filterwarnings("ignore:You are using 'environment_factory'")
def test_the_rows_environments_are_reset_at_once(server, model_dir, tmp_path):
    together = threading.Barrier(16)

    class Slow(Calculator):
        def reset(self, **kwargs):
            together.wait(60)
            return super().reset(**kwargs)

    fields = {"schedule": "grpo", "max_steps": 2}
    trainer, reader = agent(server, model_dir, tmp_path, (), environment_factory=Slow, **fields)
    trainer.train()
    assert all(prompt[-1]["content"].endswith(" now") for batch in reader.batches for prompt, *_ in batch)
    assert not any("reset" in vars(own) for own in trainer._environment_pool[None])
