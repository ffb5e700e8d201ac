"""
Two real processes under each way to launch them: one decides, both agree, and rows stay with their prompts, also where
a group straddles them. Each backend is launched once, see `scenarios.py`.
"""

import math
from collections import Counter

import numpy as np
import pytest

from tests.launches.scenarios import MULTIPLY
from tests.test_length_recorder import check_traces
from trl_darts.training.reused_logprobs import METRICS


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900), pytest.mark.xdist_group("launches")]


def rows_of(ranks: list[dict], step: int) -> list[tuple]:
    """Prompt, letter, length and advantage of each row of a step, in the order of the processes."""
    columns = ("prompts", "letters", "lengths", "advantages")
    return [row for rank in ranks for row in zip(*(rank["rows"][step][name] for name in columns), strict=True)]


def assert_same_rollouts(ranks: list[dict]) -> None:
    """Three steps of three groups, of which the second straddles both processes."""
    first, second = ranks
    assert first["records"] == second["records"]  # the same budgets and selections on both
    assert len(first["records"]) == 3
    assert first["tracked"] > 0  # the main process learns,
    assert second["tracked"] == 0  # and no other
    for step, (budgets, groups) in enumerate(first["records"]):
        assert len(budgets) == len(groups) == 3
        rows = rows_of(ranks, step)
        assert all(prompt[-1] == letter for prompt, letter, _, _ in rows)
        for index, (lengths, selected) in enumerate(groups):
            group = rows[4 * index : 4 * index + 4]
            assert len({prompt for prompt, _, _, _ in group}) == 1
            kept = [lengths[i] for i in selected]
            assert [length for _, _, length, _ in group] == kept
            assert [row[3] for row in group] == pytest.approx(np.subtract(kept, np.mean(kept)), abs=1e-3)


def assert_shared_work(ranks: list[dict]) -> None:
    """Both decoded, and together every candidate once."""
    totals = [sum(budgets) for budgets, _ in ranks[0]["records"]]
    assert [sum(counts) for counts in zip(*(rank["decoded"] for rank in ranks), strict=True)] == totals
    assert all(count > 0 for rank in ranks for count in rank["decoded"])


def num_aborted(ranks: list[dict]) -> float:
    return sum(float(line.get("darts/rollout/aborted_candidates", 0)) for line in ranks[0]["log"])


def test_transformers_engine(launches):
    ranks = launches("ddp", "transformers")
    assert_same_rollouts(ranks)
    assert_shared_work(ranks)


def test_continuous_batching(launches):
    ranks = launches("ddp", "continuous batching")
    assert_same_rollouts(ranks)
    assert_shared_work(ranks)
    assert num_aborted(ranks) > 0


@pytest.mark.vllm
@pytest.mark.parametrize("backend", ["tensor_parallel", pytest.param("colocated", marks=pytest.mark.slow)])
def test_colocated_vllm(launches, backend):
    ranks = launches(backend, "colocated")
    assert_same_rollouts(ranks)
    assert num_aborted(ranks) > 0
    if backend == "colocated":
        assert_shared_work(ranks)
    else:
        assert ranks[0]["decoded"] == ranks[1]["decoded"]  # the same candidates, half of each layer


@pytest.mark.parametrize(
    ("backend", "distributed_type"),
    [
        ("fsdp2", "FSDP"),
        pytest.param("deepspeed_zero2", "DEEPSPEED", marks=pytest.mark.slow),
        ("deepspeed_zero3", "DEEPSPEED"),
    ],
)
def test_sharded_models(launches, backend, distributed_type):
    """One process's rows end long before the other's: neither may leave the other alone in a collective."""
    ranks = launches(backend, "sharded")
    assert distributed_type in ranks[0]["distributed_type"]
    assert_same_rollouts(ranks)
    assert_shared_work(ranks)


def test_equal_to_trl(launches):
    """Groups straddle the processes, and each process's rows are sampled where TRL samples them."""
    theirs = launches("ddp", "theirs")
    assert launches("ddp", "grpo") == theirs
    assert launches("ddp", "darts") == theirs
    check_traces(launches.root / "ddp" / "theirs", launches.model_dir, 3)  # which `record_lengths` wrote meanwhile


@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "deepspeed_zero3"])
def test_trimmed_padding(launches, backend):
    """Rows of each process have other lengths: its micro-batches are as wide as they are. Siblings share prompts."""
    for rank in launches(backend, "trimmed"):
        assert rank["apart"] < 1e-5
        assert rank["moved"] > 0
        whole, trimmed = ([line["darts/train/padding_ratio"] for line in log[::2]] for log in rank["logs"])
        assert np.mean(trimmed) < (0.9 if "zero3" in backend else 0.6) * np.mean(whole)


@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "deepspeed_zero3"])
def test_reused_logprobs(launches, backend):
    """Rows of the processes differ in their ratios. Metrics are over both."""
    for rank in launches(backend, "reused"):
        assert rank["apart"] < 1e-5
        assert rank["moved"] > 0
        whole, reused = ([{name: line[name] for name in METRICS} for line in log] for log in rank["logs"])
        assert len(whole) == 2
        for line, other in zip(whole, reused, strict=True):
            assert other == pytest.approx(line, rel=1e-4)


@pytest.mark.vllm
def test_server_engine(launches):
    assert_same_rollouts(launches("ddp", "server"))


def checked_groups(rows):
    """Splits a batch into groups. Asserts that prompts, answers and advantages of each belong together."""
    groups = [rows[start : start + 4] for start in range(0, 12, 4)]
    for group in groups:
        assert len({prompt for prompt, _, _, _ in group}) == 1
        assert all(prompt[-1] == letter for prompt, letter, _, _ in group)
        lengths = [length for _, _, length, _ in group]
        assert [row[3] for row in group] == pytest.approx(np.subtract(lengths, np.mean(lengths)), abs=1e-3)
    return groups


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("backend", "scenario"),
    [
        ("ddp", "partial_rollout"),
        ("ddp", "interrupted"),
        ("ddp", "ahead"),
        ("fsdp2", "ahead"),
        ("deepspeed_zero3", "ahead"),
        ("ddp", "continuous"),
        ("fsdp2", "continuous"),
        ("deepspeed_zero3", "continuous"),
    ],
)
def test_batches_that_are_not_the_loaders(launches, backend, scenario):
    """Three groups on two processes, one on both: whichever are done, rows and rewards belong together."""
    ranks = launches(backend, scenario)
    epochs = [Counter(), Counter()]
    for step in range(num_steps := len(ranks[0]["rows"])):
        rows = rows_of(ranks, step)
        assert len(rows) == 12
        for group in checked_groups(rows):
            epochs[step // 3][group[0][0]] += 1
    assert num_steps == (6 if scenario == "partial_rollout" else 3)
    assert all(
        len(counts) == 9 for counts in epochs[: num_steps // 3]
    )  # of 10 prompts, 9 fill three batches; none came twice


@pytest.mark.vllm
@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_waves_are_of_whole_groups(launches, backend):
    """Two waves of three groups each, of which one is on both processes, make a batch."""
    ranks = launches(backend, "waves")
    waves = [rows_of(ranks, step) for step in range(len(ranks[0]["rows"]))]
    assert len(waves) == 6
    assert [len(checked_groups(rows)) for rows in waves] == [3] * 6
    for first, second in zip(waves[::2], waves[1::2], strict=True):
        assert len({prompt for prompt, _, _, _ in first + second}) == 6
    assert all(0 < float(line["grad_norm"]) < math.inf for line in ranks[0]["log"] if "grad_norm" in line)


@pytest.mark.vllm
def test_uniform_groups_leave_on_both(launches):
    """Rewards are scored before the batch is full, in shares that are no whole groups."""
    ranks = launches("ddp", "uniform groups")
    for step in range(3):
        rows = rows_of(ranks, step)
        for start in range(0, 12, 4):
            group = rows[start : start + 4]
            assert len({prompt for prompt, _, _, _ in group}) == 1
            assert all(prompt[-1] == letter and letter in "CE" for prompt, letter, _, _ in group)
            lengths = [length for _, _, length, _ in group]
            assert [row[3] for row in group] == pytest.approx(np.subtract(lengths, np.mean(lengths)), abs=1e-3)
            assert np.ptp(lengths) > 0
    assert sum(float(line["darts/uniform/dropped"]) for line in ranks[0]["log"] if "darts/uniform/dropped" in line) > 0


@pytest.mark.vllm
def test_groups_are_deferred_and_audited_on_both(launches):
    """Rows of a group belong together, and an audited prompt's second sample is trained on nowhere."""
    ranks = launches("ddp", "deferred")
    for step in range(24):
        rows = rows_of(ranks, step)
        for start in range(0, 12, 4):
            group = [row for row in rows[start : start + 4] if row[2]]  # filler rows have no tokens that count
            assert len({prompt for prompt, _, _, _ in group}) <= 1
            assert all(prompt[-1] == letter for prompt, letter, _, _ in group)
    log = ranks[0]["log"]
    assert sum(float(line.get("darts/deferral/sampled", 0)) for line in log) >= 24 * 3
    assert any(float(line.get("darts/buffer/long_round", 0)) for line in log)
    assert any("darts/audit/groups" in line for line in log)


@pytest.mark.vllm
def test_dropped_group_straddles_both(launches):
    """The second of three groups has rows on both processes: neither gives them any weight."""
    ranks = launches("ddp", "dropped group")
    for first, second in zip(ranks[0]["rows"], ranks[1]["rows"], strict=True):
        lengths, advantages = first["lengths"] + second["lengths"], first["advantages"] + second["advantages"]
        assert lengths[4:8] == advantages[4:8] == [0] * 4
        assert all(lengths[:4] + lengths[8:])
        for group in (slice(4), slice(8, 12)):  # the reward is the length; equal ones have no advantage
            assert advantages[group] == pytest.approx(np.subtract(lengths[group], np.mean(lengths[group])))
        assert first["num_items"] == second["num_items"] == sum(lengths)
    assert [float(line["darts/rollout/dropped_groups"]) for line in ranks[0]["log"][:2]] == [1.0, 1.0]


@pytest.mark.vllm
@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "deepspeed_zero3"])
def test_streamed_log_probs_and_rewards(launches, backend):
    """Each process is served its own rows, also those of the group that straddles both."""
    ranks = launches(backend, "streamed")
    for rank in ranks:
        assert [name for name, _, _ in rank["streamed"]] == ["policy", "reference"] * 3
        assert max(difference for _, difference, _ in rank["streamed"]) < 1e-5
        assert not any(missed for _, _, missed in rank["streamed"])
        for batch in rank["rows"]:  # the reward is the length, and its mean over a group is not in the advantage
            differences = np.subtract(batch["advantages"], batch["lengths"])
            assert np.ptp(differences[:2]) == np.ptp(differences[-2:]) == pytest.approx(0)
    assert sum("darts/stream/chunks" in line for line in ranks[0]["log"]) == 3
    assert float(ranks[0]["log"][0]["darts/sync/logp_difference"]) < 1e-5  # a forward pass of both processes


@pytest.mark.vllm
def test_error_on_the_main_process_ends_both(launches):
    """The server refuses a request; the other process must hear of it, and not wait for ever."""
    errors = [rank["error"] for rank in launches("ddp", "refused group")]
    assert errors[0] == errors[1]
    assert errors[0].startswith("GenerationError")
    assert "top_p must be in" in errors[0]


def test_error_on_the_other_process_ends_both(launches):
    first, second = (rank["error"] for rank in launches("ddp", "broken process"))
    assert second.startswith("ZeroDivisionError")
    assert "division by zero" in first


def test_a_long_wait_is_not_a_collective(launches):
    """The main process may wait for a server for longer than a collective would let the others wait for it."""
    for rank in launches("ddp", "long wait"):
        assert rank["values"] == ["after a while", "at once", "division by zero"]


def turns_per_step(turns: list[str]) -> list[int]:
    """Later turns after each first one."""
    counts: list[int] = []
    for turn in turns:
        if turn == "training":
            counts.append(0)
        else:
            counts[-1] += 1
    return counts


def check_answers(rank):
    """Each call got its answer, or had no room for it."""
    for calls, answers in zip(rank["calls"], rank["answers"], strict=True):
        assert answers == [MULTIPLY[call] for call in calls[: len(answers)]]


def check_candidates(ranks, num_rows):
    """More than are trained on, and no process decodes turns of its own."""
    assert any(rank["answers"] for rank in ranks)
    for rank in ranks:
        check_answers(rank)
        assert rank["turns"] == ["training"] * 6
        assert len(rank["calls"]) == 6 * num_rows
    log = [line for line in ranks[0]["log"] if "darts/budget/total" in line]
    assert all(float(line["darts/budget/total"]) > 2 * num_rows for line in log)
    assert sum(float(line["darts/rollout/aborted_candidates"]) for line in log) > 0
    assert sum(float(line["darts/tools/turns"]) for line in log) > 0.0
    return log


@pytest.mark.vllm
def test_each_process_plays_the_conversations_of_its_rows(launches):
    check_candidates(launches("ddp", "tools"), 8)


@pytest.mark.vllm
def test_spare_environments_are_on_the_process_of_their_rows(launches):
    """Rewards see those of the kept conversations, and a lost one is replaced."""
    ranks = launches("ddp", "environments")
    log = check_candidates(ranks, 8)
    assert all(rank["num_environments"] > 8 for rank in ranks)
    assert sum(float(line["darts/tools/lost_environments"]) for line in log) == 2  # one on each


@pytest.mark.vllm
def test_tool_loops_of_different_length(launches):
    """
    Where a group's environments are on two processes, none are chosen among. Later turns differ in number, and no
    process waits for the other's.
    """
    ranks = launches("ddp", "split groups")
    later = [turns_per_step(rank["turns"]) for rank in ranks]
    assert len(later[0]) == len(later[1]) == 6
    assert later[0] != later[1]  # else nothing was tested
    for rank in ranks:
        assert any(rank["answers"])
        check_answers(rank)
        assert rank["num_environments"] == 6
    totals = [float(line["darts/budget/total"]) for line in ranks[0]["log"] if "darts/budget/total" in line]
    assert {*totals} == {12.0}  # no candidate is chosen by its first turn


@pytest.mark.vllm
def test_coroutines_lead_the_conversations_of_each_process(launches):
    """More than are trained on, and each process has its rows with their rewards."""
    ranks = launches("ddp", "sessions")
    assert sum(len(rank["led"]) for rank in ranks) > 2 * 16
    for rank in ranks:
        assert len(rank["led"]) >= 2 * 8
        assert len(rank["evaluated"]) == 4
        assert len(rank["seen"]) == 4 + 2 * 8
        assert all(reward == ord(letter) for letter, _, reward in rank["seen"])
        assert all(2 < length <= 13 for _, length, _ in rank["seen"])
    assert any("darts/rollout/aborted_candidates" in line for line in ranks[0]["log"])
