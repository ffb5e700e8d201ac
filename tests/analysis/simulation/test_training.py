"""Trainings in virtual time: what is learned over epochs, and what is counted."""

import gc
from itertools import islice

import numpy as np
import pytest

from tests.analysis.simulation.builders import GivenLengths, train_given
from trl_darts.analysis.simulation import (
    ClusterSpec,
    LogNormalLengths,
    SimulatedTraining,
    Workload,
)
from trl_darts.policy import LatencyCurve
from trl_darts.scheduling import Candidate, ScheduleSettings


CLUSTER = ClusterSpec(LatencyCurve([1, 64, 512], [0.010, 0.012, 0.040]), num_engines=2)
LENGTHS = LogNormalLengths(64, median_length=200.0)


def train(schedule="darts", num_steps=12, seed=0, workload=None, **fields):
    settings = ScheduleSettings(schedule, **{"num_generations": 4, **fields})
    training = SimulatedTraining(workload or Workload(LENGTHS, 16, 4096), settings, CLUSTER, seed)
    return training, training.run(num_steps)


def test_grpo_trains_on_all_that_it_samples():
    _, run = train("grpo")
    assert run.pool_tokens == run.kept_tokens
    assert set(run.candidates) == {64.0}
    assert set(run.aborted_candidates) == {0.0}
    assert set(run.kept_vs_pool_length_ratio) == {1.0}


def test_darts_spends_its_budget_and_learns_prompts():
    training, run = train(workload=Workload(LogNormalLengths(512), 128, 16384), num_steps=40)
    assert np.mean(run.candidates) / 512 == pytest.approx(1.5, rel=0.2)
    assert len(training.admission.tracker) == 512
    assert run.saturated_ratio[0] == 0
    assert max(run.saturated_ratio) > 0
    assert sum(run.aborted_candidates) > 0
    assert all(kept <= pool for kept, pool in zip(run.kept_tokens, run.pool_tokens, strict=True))


@pytest.mark.parametrize(
    ("lengths", "limit"),
    [(LogNormalLengths(1024, median_length=200.0), 4096), (LogNormalLengths(1024, endless_share=0.005), 16384)],
)
def test_pruning_does_not_blow_up_what_is_known_of_lengths(lengths, limit):
    """ρ is learned from prompts of which half of the candidates were aborted, and must stay near the truth."""
    drawn = np.minimum(lengths.draw(np.arange(1024), 32, (9, 9)), limit)
    truth = drawn.std() / drawn.mean()
    settings = ScheduleSettings("darts", num_generations=8, max_num_generations=12)
    training = SimulatedTraining(Workload(lengths, 128, limit), settings, CLUSTER)
    rhos, saturated = [], []
    for step in islice(training.optimizer_steps(), 40):
        rhos.append(training.admission.tracker.rho)
        saturated.append(step.num_saturated)
    assert np.mean(saturated) / 128 > 0.8
    assert np.mean(rhos[8:]) == pytest.approx(truth, rel=0.3)  # twice as much without a horizon


def test_where_darts_samples_as_many_and_waits_for_all_it_is_grpo():
    _, grpo = train("grpo")
    _, darts = train("darts", max_num_generations=4, tail_pruning=False)
    assert grpo.pool_tokens == darts.pool_tokens
    assert grpo.rollout_seconds == pytest.approx(darts.rollout_seconds, rel=0.2)  # another order of submission


@pytest.mark.parametrize(
    ("spread", "slots", "spares_cost"), [(0.0, None, (1.1, 1.5)), (0.0, 64, (1.0, 1.02)), (0.6, 4, (0.95, 1.02))]
)
def test_the_default_costs_little_where_nothing_can_be_gained(spread, slots, spares_cost):
    """
    With equal lengths, and on a full engine: a sixteenth of a batch at once. In the first step ρ is unknown. Spare
    candidates that wait behind all rows cost nothing: their groups are complete before their turn comes.
    """
    workload = Workload(LogNormalLengths(64, 200.0, spread, spread), 16, 4096)
    cluster = ClusterSpec(CLUSTER.latency, max_num_seqs=slots)
    schedules = [ScheduleSettings(schedule, num_generations=4) for schedule in ("grpo", "darts")]
    runs = [SimulatedTraining(workload, settings, cluster).run(12) for settings in schedules]
    grpo, darts = (sum(run.rollout_seconds[1:]) for run in runs)
    assert darts < 1.02 * grpo
    spares = SimulatedTraining(workload, ScheduleSettings(num_generations=4, min_num_generations=6), cluster).run(12)
    assert min(spares.candidates) >= 96  # what a user asks for
    assert spares_cost[0] * grpo <= sum(spares.rollout_seconds[1:]) < spares_cost[1] * grpo


def test_seconds_beside_the_rollout():
    workload = Workload(LENGTHS, 16, 4096, prompt_tokens=10, train_seconds_per_token=1e-3, fixed_seconds=2.0)
    _, run = train("grpo", workload=workload)
    for rollout, step, kept in zip(run.rollout_seconds, run.step_seconds, run.kept_tokens, strict=True):
        assert step == pytest.approx(rollout + 2.0 + 1e-3 * (kept + 64 * 10))


def test_lengths_are_learned_where_a_switch_to_tail_servers_is_predicted():
    workload, expected = Workload(LogNormalLengths(8, 100.0), 4, 1000), {}
    curve = LatencyCurve([1, 32], [0.01, 0.02])
    for name, tail in (("none", None), ("tail", ClusterSpec(curve))):
        training = SimulatedTraining(workload, ScheduleSettings("grpo", 8), ClusterSpec(curve, tail=tail))
        *_, last = islice(training.optimizer_steps(), 3)
        expected[name] = [summary.expected_length for summary in last.observed]
    assert expected["none"] == [None] * 4
    assert np.std(expected["tail"]) > 10  # the second epoch knows each prompt


def test_a_rollout_ahead_hides_behind_the_training_before_it():
    workload = Workload(LENGTHS, 16, 4096, fixed_seconds=1.0, train_seconds_per_token=1e-4)
    (_, apart), (_, ahead) = (train("grpo", workload=workload, rollout_ahead=number) for number in (0, 1))
    assert ahead.rollout_seconds == apart.rollout_seconds
    longer = [max(pair) for pair in zip(apart.rollout_seconds[1:], apart.train_seconds, strict=False)]
    assert ahead.step_seconds == [apart.rollout_seconds[0], *longer]
    assert ahead.off_policy_share == [0.0] + [1.0] * 11


@pytest.mark.parametrize("schedule", ["grpo", "darts"])
def test_a_rollout_without_an_end_hides_all_but_the_training(schedule):
    """Seconds are at least those of the training, and the lag is within the bound."""
    workload = Workload(LENGTHS, 16, 4096, fixed_seconds=1.0, train_seconds_per_token=1e-4)
    fields = {"workload": workload, "num_steps": 20}
    (_, ahead), (_, run) = (train(schedule, rollout_ahead=value, **fields) for value in (1, "continuous"))
    assert sum(run.step_seconds) < sum(ahead.step_seconds)
    assert all(step >= trained for step, trained in zip(run.step_seconds, run.train_seconds, strict=True))
    assert max(run.longest_wait) <= 4
    assert 1 < np.mean(run.mean_lag[5:]) < 3
    assert run.kept_tokens != ahead.kept_tokens  # other prompts share a batch
    if schedule == "grpo":
        assert set(run.kept_vs_pool_length_ratio) == {1.0}


def test_a_continuous_step_by_hand():
    """A token takes a second, however many run. The bound of 2 steps makes the long prompt's batch wait."""
    first = [[4], [2], [30], [2], [6], [6], [6], [6]]
    settings = ScheduleSettings("grpo", 1, rollout_ahead="continuous", max_staleness=2)
    run = train_given(GivenLengths(first), settings, 4)
    assert run.longest_kept == [2.0, 6.0, 30.0, 6.0]
    assert np.cumsum(run.step_seconds).tolist() == [2.0, 8.0, 30.0, 30.0]


@pytest.mark.parametrize("fields", [{"schedule": "grpo"}, {}, {"rollout_ahead": 1}])
def test_uniform_groups_are_replaced_within_their_step(fields):
    """Half of the groups teach nothing: a step has half a batch of lessons, or twice as many prompts."""
    workload = Workload(LogNormalLengths(160, median_length=200.0), 16, 4096, uniform_share=0.5)
    _, kept = train(workload=workload, num_steps=10, **fields)
    _, dropped = train(workload=workload, num_steps=10, drop_uniform_groups=True, **fields)
    assert np.mean(kept.informative_groups) == pytest.approx(8, abs=1)
    assert set(dropped.informative_groups) == {16.0}
    ratio = sum(dropped.candidates) / sum(kept.candidates)
    assert 1.9 < ratio < 2.7  # prompts that don't fit into a step are sampled again
    assert np.mean(dropped.rollout_seconds) > np.mean(kept.rollout_seconds)


def test_few_prompts_that_teach_leave_a_batch_short():
    workload = Workload(LogNormalLengths(640, median_length=200.0), 16, 4096, uniform_share=0.9)
    _, run = train(workload=workload, drop_uniform_groups=True, max_prompt_oversampling=2.0, num_steps=5)
    assert 0 < np.mean(run.informative_groups) < 8
    assert max(run.candidates) <= 2 * 16 * 8


def test_shaping_unlearns_never_ending_answers():
    """Where the short ones are preferred, until rollouts no longer wait for the limit."""
    lengths = LogNormalLengths(64, median_length=200.0, endless_share=0.02)
    plain, shaped = (Workload(lengths, 16, 4096, shaping=shaping) for shaping in (0.0, 0.05))
    paper = {"num_steps": 60, "long_end_patience": None, "tail_pruning": False}
    training, run = train(workload=shaped, **paper)
    assert training.stop_rate > 1 / 4096
    _, unshaped = train(workload=plain, **paper)
    assert np.mean(run.rollout_seconds[-8:]) < 0.5 * np.mean(unshaped.rollout_seconds[-8:])
    same, _ = train("grpo", workload=shaped)
    assert same.stop_rate == pytest.approx(0.0, abs=1e-15)  # nothing is selected, so nothing is preferred


def test_no_candidate_outlives_its_step():
    """The collector is off meanwhile, so a reference cycle would keep them all."""

    def count() -> int:
        return sum(type(thing) is Candidate for thing in gc.get_objects())

    gc.collect()
    before = count()  # other tests may have left some
    train(num_steps=3)
    assert gc.isenabled()
    assert count() == before
