"""
What is compared, and what is said of it.

Invariants: numbers of several runs are over the same steps; runs that did different work are not compared in silence.
"""

import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_darts.reporting import read_runs
from trl_darts.reporting.compare import Comparison, Window, common_window, compare_settings, same_prompts, typical_step
from trl_darts.reporting.formats import faster, number, percent, plus_minus, time_unit, times
from trl_darts.reporting.summary import quantities, reward_ends, weighted_mean
from trl_darts.reporting.verdict import cards, cautions, verdict
from trl_darts.scheduling import ScheduleSettings

from .builders import ROLLOUT, SETTINGS, make_entry, make_trace, write_run


def entries(steps):
    return st.lists(st.integers(1, 5), min_size=1, max_size=steps).map(
        lambda widths: pd.DataFrame({"num_steps": widths}, index=pd.Index(widths).to_series().cumsum().to_numpy())
    )


@given(st.lists(entries(12), min_size=1, max_size=4))
def test_all_tables_cover_the_common_steps(tables):
    window = common_window(tables)
    assert window == Window(1, min(int(table.index[-1]) for table in tables))
    for table in tables:
        part = window.of(table)
        assert part["num_steps"].sum() <= window.last
        assert (part.index <= window.last).all()


def test_no_common_step():
    tables = [pd.DataFrame({"x": 0}, index=steps) for steps in ([1, 2], [3, 4])]
    assert common_window(tables) is None
    assert common_window([]) is None
    assert str(Window(3, 3)) == "step 3"


def compare(tmp_path, **runs):
    return Comparison.of(read_runs([write_run(tmp_path / name, **kwargs) for name, kwargs in runs.items()]))


def rows_by_key(comparison):
    return {row.key: row for row in quantities(comparison)}


def slow(step):
    """Nothing is called off: 20 s, and 26 tokens, all kept."""
    everything = {
        key: [(length, "stop", True, start, 2 * end) for length, _, _, start, end in group]
        for key, group in ROLLOUT.items()
    }
    return make_trace(everything, step=step)


@pytest.fixture
def pair(tmp_path):
    """A slow run of four steps and a fast one of two."""
    traces = {f"rollout_{step:05d}_00.parquet": slow(step) for step in range(4)}
    log = [make_entry(s, **{"step_time": 30.0 * s, "darts/rollout/seconds": 20.0}) for s in (1, 2, 3, 4)]
    grpo = {"traces": traces, "log": log, "settings": {**SETTINGS, "schedule": "grpo"}}
    return compare(tmp_path, grpo=grpo, darts={"traces": 2, "log": 2})


def test_numbers_over_the_common_steps(pair):
    rows = rows_by_key(pair)
    expected = {
        "step": [45, 18],  # (30 + 60) / 2: the third and the fourth step don't count
        "share": [20 / 45, 10 / 18],
        "rollout": [20, 10],
        "longest": [9, 9],
        "tokens": [26, 26],
        "waste": [0, 8 / 26],
        "aborted": [0, 4 / 26],
        "candidates": [1, 1.5],
        "shape": [1, (18 / 4) / (26 / 6)],
        "reward_last": [0.2, 0.2],
    }
    for key, values in expected.items():
        assert rows[key].values == pytest.approx(values), key
        assert "steps 1 to 2" in rows[key].over
    assert rows["rollout"].ratio(0) == ""
    assert rows["rollout"].ratio(1) == "0.50×"
    assert rows["reward_last"].ratio(1) == ""  # a ratio of rewards says nothing


def test_verdict_says_what_was_gained_and_why(pair):
    ((heading, sentences),) = verdict(pair, quantities(pair))
    assert heading == "darts against grpo"
    text = " ".join(sentences)
    assert "A step took 18.0 s instead of 45.0 s: 2.50× faster." in text
    assert "A rollout took 10.0 s instead of 20.0 s: 2.00× faster." in text
    assert "threw away 31 % of them (grpo: 0 %)" in text
    assert "longer than all it sampled (1.04× in the mean)" in text
    assert "Reward at the end" in text
    assert [card.title for card in cards(quantities(pair))][:2] == ["Seconds per step", "Seconds per rollout"]
    steps, busy = cautions(pair, compare_settings(pair.runs))
    assert steps.startswith("The runs have different numbers of steps (grpo 4 and darts 2). Comparisons are over")
    assert "took 22.0 s a step in grpo and 5.00 s in darts" in busy  # of rows of about the same length


def test_training_of_longer_rows_may_take_longer(tmp_path):
    def run(scale):
        rows = {1: [(round(length * scale), "stop", True, 0.0, 1.0) for length in (2, 4, 6)]}
        return {"traces": {"rollout_00000_00.parquet": make_trace(rows)}, "log": [make_entry(1, step_time=13 + scale)]}

    assert cautions(compare(tmp_path, a=run(1), b=run(4)), []) == []


def test_a_single_run(tmp_path):
    comparison = compare(tmp_path, one={"traces": 2, "log": 2})
    ((heading, sentences),) = verdict(comparison, quantities(comparison))
    assert heading == "one, by itself"
    assert "56 % of it in rollouts" in sentences[0]
    assert 'schedule="grpo"' in sentences[-1]
    assert cautions(comparison, compare_settings(comparison.runs)) == []


def test_other_work_is_said(tmp_path):
    other = {**SETTINGS, "model": "some/Other-7B", "num_longest": 3}
    one_prompt = make_trace({5: ROLLOUT[7]})
    comparison = compare(
        tmp_path,
        a={"traces": 1, "log": 1},
        b={"traces": {"rollout_00000_00.parquet": one_prompt}, "log": 1, "settings": other},
        c={"log": 1, "settings": None},
    )
    settings = compare_settings(comparison.runs)
    by_name = {setting.name: setting for setting in settings}
    assert by_name["model"].matters
    assert by_name["prompts per rollout"].matters
    assert (by_name["num_longest"].differs, by_name["num_longest"].matters) == (False, False)  # one run tells it
    assert not by_name["schedule"].differs
    first, unknown, prompts = cautions(comparison, settings)
    assert "differ in model and prompts per rollout" in first
    assert "Settings of c are unknown" in unknown
    assert "same prompts in 0 of 1 common steps" in prompts
    (heading, _), (other_heading, _) = verdict(comparison, quantities(comparison), settings)
    assert heading == "b against a (not the same work: model and prompts per rollout)"
    assert other_heading == "c against a"


def test_what_a_schedule_sets_is_not_other_work(tmp_path):
    """All of the trainer's own settings, as its log has them: two schedules differ in many."""
    runs = {}
    for schedule in ("grpo", "sorted"):
        own = vars(ScheduleSettings(schedule, num_generations=2))
        runs[schedule] = {"traces": 1, "log": 1, "settings": {**SETTINGS, **own}}
    settings = compare_settings(compare(tmp_path, **runs).runs)
    assert {"selection", "sorted_mode", "length_ranked"} <= {setting.name for setting in settings}
    assert "max_partial_age" not in {setting.name for setting in settings}  # of neither
    assert not any(setting.matters for setting in settings)


def test_unknown_settings_and_no_common_steps_are_said(tmp_path):
    late = {f"rollout_{step:05d}_00.parquet": make_trace(step=step) for step in (5, 6)}
    comparison = compare(tmp_path, a={"traces": 2}, b={"traces": late})
    text = " ".join(cautions(comparison, compare_settings(comparison.runs)))
    assert "Settings of a and b are unknown" in text
    assert "no step of which all runs have rollouts" in text
    assert quantities(comparison) == []


def test_log_and_traces_have_windows_of_their_own(tmp_path):
    comparison = compare(tmp_path, a={"traces": 4, "log": 4}, b={"log": 3}, c={"traces": 2})
    assert comparison.log_window == Window(1, 3)
    assert comparison.rollout_window == Window(1, 2)
    assert [len(table) for table in comparison.common_traces()] == [12, 0, 12]


def test_same_prompts(pair, tmp_path):
    assert same_prompts(pair.runs) == (2, 2)
    assert same_prompts(pair.runs[:1]) is None


def test_typical_step(tmp_path):
    def took(seconds, step):
        return make_trace({1: [(5, "stop", True, 0.0, seconds)]}, step=step)

    traces = {f"rollout_{step:05d}_00.parquet": took(s, step) for step, s in enumerate([9.0, 1.0, 4.0, 8.0])}
    comparison = compare(tmp_path, a={"traces": traces}, b={"log": 2})
    assert typical_step(comparison.runs, comparison.rollouts) == 3  # 4 s, the lower of the two in the middle
    assert typical_step(comparison.runs[1:], comparison.rollouts[1:]) is None


def test_reward_ends():
    first, last = reward_ends(pd.Series([0.0, 1.0, 5.0, None, 5.0, 2.0, 4.0]))
    assert (first.mean, first.num, str(first)) == (0.5, 2, "0.50 ± 0.71")
    assert (last.mean, last.num) == (3, 2)
    alone, same = reward_ends(pd.Series([0.25]))
    assert alone.num == same.num == 1
    assert str(alone) == "0.250"
    assert math.isnan(reward_ends(pd.Series(dtype=float))[0].mean)


def test_entries_weigh_as_many_steps_as_they_stand_for():
    table = pd.DataFrame({"total": [1.0, 4.0, None], "num_steps": [1, 3, 9]})
    assert weighted_mean(table, "total") == 13 / 4


def test_formats():
    assert [number(x) for x in (0, 1234.5, 12.345, 0.012345, float("nan"))] == ["0", "1,234", "12.3", "0.0123", "–"]
    assert [percent(x) for x in (0, 0.0312, 0.5, 1)] == ["0 %", "3.1 %", "50 %", "100 %"]
    assert [faster(x) for x in (0.5, 1.25, 1.0, 0.0)] == ["2.00× faster", "1.25× slower", "equally fast", "–"]
    assert [times(x) for x in (0.5, 12.34)] == ["0.50×", "12.3×"]
    assert plus_minus(0.6543, 0.0696) == "0.654 ± 0.070"
    assert [time_unit(x)[0] for x in (60, 601, 4 * 3600)] == ["seconds", "minutes", "hours"]
