"""Tests `on_generation_error="drop_group"` with a real server: a dropped group has zero loss weight."""

from contextlib import nullcontext

import pytest
import torch
from trl import GRPOTrainer

from tests.builders import letter_of, letters_dataset, make_trainer, record_batches, rollout_logs
from tests.test_trainer_server import server_args
from trl_darts.buffer.batch import Batch
from trl_darts.engines import vllm_rollout
from trl_darts.errors import GenerationError


pytestmark = pytest.mark.vllm
REFUSED = {"top_p": 7.0}
TIMEOUT_S = 1000.0


def reward(prompts, completion_ids, **kwargs):
    """Prefers completions that begin with their prompt's letter, as all do at the start."""
    own = [prompt[-1] == letter_of(ids[0]) for prompt, ids in zip(prompts, completion_ids, strict=True)]
    return [len(ids) + 100.0 * is_own for ids, is_own in zip(completion_ids, own, strict=True)]


def refuse(trainer, *groups: int) -> None:
    """Makes the server reject the requests of these groups."""
    trainer._engine.overrides = lambda command: REFUSED if command.group_id in groups else {}


@pytest.mark.parametrize("fields", [{}, {"beta": 0.1, "loss_type": "grpo", "off_policy_mask_threshold": 0.5}])
def test_dropped_group_repeats_another_without_weight(server, model_dir, tmp_path, caplog, fields):
    fields |= {"on_generation_error": "drop_group", "defer_unsettled_groups": False}
    args = server_args(tmp_path, server, max_steps=2, learning_rate=1e-3, **fields)
    trainer = make_trainer(model_dir, args, reward_funcs=reward)
    batches = record_batches(trainer)
    refuse(trainer, 2)
    trainer.train()
    for batch in batches:
        mask, ids = batch["completion_mask"], batch["completion_ids"]
        assert len(mask) == 16
        assert torch.equal(ids[8:12], ids[:4])  # the first group replaces the third
        assert not mask[8:12].any()
        assert not batch["advantages"][8:12].any()
        kept = [*range(8), *range(12, 16)]
        assert mask[kept].any(dim=1).all()
        assert batch["num_items_in_batch"] == mask.sum()
        assert not torch.isnan(batch["sampling_per_token_logps"]).any()
    assert batches[0]["advantages"][:8].any()  # later, all answers of a group may have the same length
    logs = rollout_logs(trainer)
    assert [entry["darts/rollout/dropped_groups"] for entry in logs] == [1.0, 1.0]
    for entry in logs:
        assert entry["sampling/importance_sampling_ratio/max"] < 1.01  # completions have their own prompts
        assert torch.isfinite(torch.tensor(entry["grad_norm"]))
    lengths = batches[0]["completion_mask"].sum(1).float()[kept]
    assert logs[0]["reward"] == pytest.approx(100 + lengths.mean().item())  # fillers have none
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    words = [record.getMessage() for record in caplog.records if "is dropped" in record.getMessage()]
    assert len(words) == 2
    assert f"of prompt 2 on {server.base_url}" in words[0]
    assert "top_p must be in" in words[0]  # the server's message


@pytest.mark.parametrize(
    "fields", [{}, {"scale_rewards": "batch"}, {"multi_objective_aggregation": "normalize_then_sum"}]
)
def test_training_is_as_if_the_dropped_group_had_never_been(server, model_dir, tmp_path, fields):
    """With a token-level loss, the gradient equals that of the other groups alone, in a batch of their size."""
    gradients = []
    for name, num_prompts, dropped in (("with", 4, (3,)), ("without", 3, ())):
        args = server_args(
            tmp_path / name,
            server,
            max_steps=1,
            per_device_train_batch_size=4 * num_prompts,
            loss_type="dapo",
            generation_kwargs={"seed": 1},
            max_num_generations=4,
            shuffle_dataset=False,
            on_generation_error="drop_group",
            **fields,
        )
        trainer = make_trainer(model_dir, args, reward_funcs=reward, train_dataset=letters_dataset(4))
        refuse(trainer, *dropped)
        trainer.train()
        gradients.append(rollout_logs(trainer)[0]["grad_norm"])
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-4)
    assert gradients[0] > 0


def test_evaluation_goes_on_and_says_so(server, model_dir, tmp_path):
    args = server_args(tmp_path, server, max_steps=1, per_device_eval_batch_size=8, on_generation_error="drop_group")
    trainer = make_trainer(model_dir, args, reward_funcs=reward, eval_dataset=letters_dataset(2))
    trainer.train()
    refuse(trainer, 0)
    metrics = trainer.evaluate()
    assert metrics["eval_darts/rollout/dropped_groups"] == 1.0
    refuse(trainer)
    assert "eval_darts/rollout/dropped_groups" not in trainer.evaluate()


def test_error_where_nothing_is_left(server, model_dir, tmp_path):
    trainer = make_trainer(model_dir, server_args(tmp_path, server, max_steps=1, on_generation_error="drop_group"))
    refuse(trainer, 0, 1, 2, 3)
    with pytest.raises(GenerationError, match=rf"of prompt \d on {server.base_url}: .*top_p must be in"):
        trainer.train()


def test_a_deadline_drops_what_is_open(server, model_dir, tmp_path, monkeypatch):
    """Two groups are far from their end at the deadline, so the batch has the other two."""
    ledgers = []

    class Waiting(vllm_rollout.Waiting):
        """Expires the rollout as soon as the two short groups are complete."""

        @property
        def seconds(self):
            is_over = self.limit_s == TIMEOUT_S and all(ledgers[0].groups[i].has_rows for i in (0, 2))
            return TIMEOUT_S + 1 if is_over else 0.0

    def run(scheduler, *args, **kwargs):
        ledgers.append(scheduler.ledger)
        return plain_run(scheduler, *args, **kwargs)

    args = server_args(
        tmp_path,
        server,
        max_steps=1,
        max_completion_length=480,
        max_num_generations=16,  # long groups take seconds, and the clock ticks ten times per second
        target_redundancy=4.0,
        vllm_rollout_timeout_s=TIMEOUT_S,
        on_generation_error="drop_group",
        defer_unsettled_groups=False,
    )
    trainer = make_trainer(model_dir, args, reward_funcs=reward)
    batches = record_batches(trainer)
    plain_run, trainer.vllm_generation.engine.run = trainer.vllm_generation.engine.run, run
    monkeypatch.setattr(vllm_rollout, "Waiting", Waiting)
    endless = {"min_tokens": 480, "max_tokens": 480, "ignore_eos": True}
    trainer._engine.overrides = lambda command: endless if command.group_id in (1, 3) else {"max_tokens": 2}
    trainer.train()
    (entry,) = rollout_logs(trainer)
    assert entry["darts/rollout/dropped_groups"] == 2.0
    open_ones = [candidate for candidate in ledgers[0].candidates if candidate.group_id in (1, 3)]
    assert len(open_ones) == 32
    # The rollout did not wait for them. On a busy machine, the deadline can come when the first one has ended.
    assert sum(candidate.length < 480 for candidate in open_ones) > 16
    mask = batches[0]["completion_mask"]
    assert mask.any(dim=1).tolist() == [True] * 4 + [False] * 4 + [True] * 4 + [False] * 4


def test_filler_rows_call_no_tools(server, model_dir, tmp_path, monkeypatch):
    seen = []

    def tool_call_loop(self, prompts, prompt_ids, completion_ids, completions, *args):
        seen.extend(message for (message,) in completions)

    monkeypatch.setattr(GRPOTrainer, "_tool_call_loop", tool_call_loop)
    trainer = make_trainer(model_dir, server_args(tmp_path, server))
    trainer._engine.turns = lambda num_conversations: nullcontext()  # else each row has a loop of its own
    trainer._batch = Batch(fillers=frozenset([1]))
    call = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    trainer._tool_call_loop(["p"] * 3, [[5]] * 3, [[6]] * 3, [[dict(call)] for _ in range(3)], None, None, {})
    assert ["tool_calls" in message for message in seen] == [True, False, True]
