"""
Schedules whose batches are not the loader's, against small trainings computed by hand; and properties of them all:

- trained_once: each candidate of an epoch is trained on once, where all are kept.
- nothing_wasted: where tokens go on, each one that is decoded is trained on.
"""

from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis.simulation.builders import SECOND_PER_TOKEN, GivenLengths, InOrder, train_given
from trl_darts.analysis.simulation import ClusterSpec, LogNormalLengths, SimulatedTraining, Workload
from trl_darts.policy import LatencyCurve
from trl_darts.scheduling import ScheduleSettings


# Six prompts with two rows each, in batches of two: 10 and 100, 20 and 30, 200 and 40 tokens.
SIX = GivenLengths(
    [[n, n, 1, 1] for n in (10, 100, 20, 30, 200, 40)], again=[[n, n, 1, 1] for n in (7, 50, 7, 7, 60, 7)]
)
FOUR = GivenLengths([[n, n, 1, 1] for n in (10, 40, 20, 30)])


def two_rows(schedule: str, **fields) -> ScheduleSettings:
    return ScheduleSettings(schedule, num_generations=2, **fields)


def test_tail_batching_defers_the_slowest_prompts_to_a_long_round():
    """3 are started: 10, 100, 20 end at 20 without the 100; 30, 200, 40 at 40 without the 200; these two come last."""
    run = train_given(SIX, two_rows("tail_batching", prompt_oversampling=1.5), 3)
    assert run.rollout_seconds == [20.0, 40.0, 200.0]
    assert run.deferred_groups == [1.0, 1.0, 0.0]
    assert run.kept_tokens == [60.0, 140.0, 600.0]
    assert run.pool_tokens == [60.0 + 2 * 20, 140.0 + 2 * 40, 600.0]
    assert run.longest_wait == [0.0, 0.0, 2.0]
    assert run.off_policy_share == run.buffered_tokens == [0.0, 0.0, 0.0]


def test_a_candidate_that_begins_anew_has_its_length_again_or_a_new_one():
    run = train_given(SIX, two_rows("tail_batching", prompt_oversampling=1.5), 3, redraws=True)
    assert run.rollout_seconds == [20.0, 40.0, 60.0]  # 200 in the last step, where it has its length again
    assert run.kept_tokens[2] == 2 * (50 + 60)


def test_partial_rollout_takes_only_the_rest_of_a_resumed_candidate():
    """The 100 has 20 tokens when the first two are done and takes 80 more; the 200 has 80 then, and takes 120."""
    run = train_given(SIX, two_rows("partial_rollout", prompt_oversampling=1.5), 3, redraws=True)
    assert run.rollout_seconds == [20.0, 80.0, 120.0]
    assert run.pool_tokens == [2 * (10 + 20 + 20), 2 * (30 + 80 + 80), 2 * (120 + 40)]
    assert sum(run.pool_tokens) == sum(run.kept_tokens) == 800
    assert run.buffered_tokens == [40.0, 160.0, 0.0]
    assert run.off_policy_share == [0.0, 40 / 260, 160 / 480]
    assert run.longest_wait == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(("max_age", "seconds"), [(1, [20.0, 480.0]), (4, [20.0, 40.0])])
def test_partial_rollout_waits_for_one_that_is_too_old(max_age, seconds):
    lengths = GivenLengths([[n, n, 1, 1] for n in (10, 500, 20, 30, 40, 50)])
    settings = two_rows("partial_rollout", prompt_oversampling=1.5, max_partial_age=max_age)
    assert train_given(lengths, settings, 2).rollout_seconds == seconds


def test_sorted_on_policy_begins_the_rest_anew():
    """4 slots: the 20 follows the 10 and ends at 30, the batch is ready; the 40 has 30 and the 30 none, all lost."""
    run = train_given(FOUR, two_rows("sorted", sorted_group_batches=2), 2, max_num_seqs=4)
    assert run.rollout_seconds == [30.0, 40.0]
    assert run.kept_tokens == [60.0, 140.0]
    assert run.pool_tokens == [60.0 + 2 * 30, 140.0]
    assert run.off_policy_share == [0.0, 0.0]


def test_sorted_partial_goes_on():
    """The 40 has 10 tokens left to decode; the 30 starts in the second rollout."""
    run = train_given(FOUR, two_rows("sorted", sorted_group_batches=2, sorted_mode="partial"), 2, max_num_seqs=4)
    assert run.rollout_seconds == [30.0, 30.0]
    assert run.pool_tokens == [60.0 + 2 * 30, 2 * (10 + 30)]
    assert run.off_policy_share == [0.0, 60 / 140]


OVERSAMPLING = st.sampled_from([1.25, 1.5, 3.0])
SETTINGS = st.one_of(
    st.builds(two_rows, st.just("tail_batching"), prompt_oversampling=OVERSAMPLING),
    st.builds(
        two_rows, st.just("partial_rollout"), prompt_oversampling=OVERSAMPLING, max_partial_age=st.integers(1, 3)
    ),
    st.builds(
        two_rows,
        st.just("sorted"),
        sorted_group_batches=st.integers(2, 4),
        sorted_mode=st.sampled_from(["on_policy", "partial"]),
    ),
)
ENGINES = st.builds(
    ClusterSpec,
    st.sampled_from([SECOND_PER_TOKEN, LatencyCurve([1, 8], [1.0, 1.7])]),
    st.integers(1, 3),
    max_num_seqs=st.sampled_from([None, 1, 4]),
    kv_tokens=st.sampled_from([None, 150]),
)


@settings(max_examples=60, deadline=None)
@given(SETTINGS, ENGINES, st.integers(1, 3), st.integers(1, 6), st.randoms(use_true_random=False))
def test_trained_once_and_nothing_wasted(schedule, spec, num_groups, num_batches, random):
    num_prompts = num_groups * num_batches
    lengths = random.sample(range(1, 400), 2 * num_prompts)  # all different: a length says which candidate it is
    table = [[lengths[2 * prompt], lengths[2 * prompt + 1], 1, 1] for prompt in range(num_prompts)]
    outcomes = SimulatedTraining(InOrder(GivenLengths(table), num_groups, 300), schedule, spec).optimizer_steps()
    for _ in range(2):
        steps = list(islice(outcomes, num_batches))
        assert all(len(step.kept) == 2 * num_groups for step in steps)
        kept = Counter(length for step in steps for length, _ in step.kept)
        assert kept == Counter(min(length, 300) for length in lengths)
        summaries = [summary for step in steps for summary in [*step.complete, *step.deferred]]
        decoded = sum(sum(summary.lengths) - summary.num_carried_tokens for summary in summaries)
        trained = sum(length for step in steps for length, _ in step.kept)
        assert decoded == trained if schedule.keeps_tokens else decoded >= trained
        assert steps[-1].num_buffered_tokens == 0


SCHEDULES = {
    "grpo": ScheduleSettings("grpo", num_generations=4),
    "darts": ScheduleSettings("darts", num_generations=4, max_num_generations=7),
    "tail batching": ScheduleSettings("tail_batching", num_generations=4, selection="dual_end"),
    "partial rollout": ScheduleSettings("partial_rollout", num_generations=4),
    "sorted": ScheduleSettings("sorted", num_generations=4, selection="uniform", max_num_generations=12),
}


@pytest.mark.parametrize("redraws", [False, True])
def test_all_schedules_see_the_same_candidates(redraws):
    """Whenever they start a prompt in an epoch and however many candidates they give it, its i-th one is the same."""
    workload = Workload(LogNormalLengths(48, median_length=100.0), 8, 4096, redraws=redraws)
    seen = {}
    for name, schedule in SCHEDULES.items():
        training = SimulatedTraining(workload, schedule, ClusterSpec(LatencyCurve([1], [1.0])), seed=5)
        seen[name] = lengths_seen(training, num_epochs=3)
        assert seen[name].keys() == {(epoch, prompt) for epoch in range(3) for prompt in range(48)}
    for place, lengths in seen["darts"].items():
        for other in seen.values():
            common = min(len(lengths), len(other[place]))
            assert common >= 4
            assert lengths[:common] == other[place][:common]
    counts = {len(lengths) for lengths in seen["darts"].values()}
    assert len(counts) > 1  # M' differs


def lengths_seen(training: SimulatedTraining, num_epochs: int) -> dict[tuple[int, int], list[int]]:
    """What a training's cluster is given for each prompt and epoch, when it starts it first."""
    seen: dict[tuple[int, int], list[int]] = {}
    run, epoch = training.cluster.run, 0

    def listening(scheduler, plans, lengths, max_length):
        for plan in plans:
            seen.setdefault((epoch, plan.prompt_key), list(lengths[plan.group_id]))
        return run(scheduler, plans, lengths, max_length)

    training.cluster.run = listening
    for number, _ in enumerate(islice(training.optimizer_steps(), 6 * num_epochs)):
        epoch = (number + 1) // 6
    return seen


def test_sorted_starts_the_shortest_first_where_not_all_have_room():
    """Batches are more alike within, and less is thrown away, the more so where prompts are known."""
    workload = Workload(LogNormalLengths(128, 250.0, 0.7, 0.6, endless_share=0.002), 16, 4096, redraws=True)
    half = ClusterSpec(LatencyCurve([1, 64, 256], [0.010, 0.012, 0.020]), max_num_seqs=16 * 4 // 2)
    spread, wasted = {}, {}
    for order in ("longest", "shortest"):
        settings = ScheduleSettings("sorted", num_generations=4, submit_order=order)
        run = SimulatedTraining(workload, settings, half).run(24)
        spread[order] = np.std(run.mean_kept) / np.mean(run.mean_kept)
        wasted[order] = 1 - sum(run.kept_tokens) / sum(run.pool_tokens)
    assert spread["shortest"] > 0.6 > spread["longest"]
    assert wasted["shortest"] < wasted["longest"] - 0.05
