"""
Comparisons of runs, and their cautions.

Invariants: all numbers are over the same steps; a caution names runs that did different work.
"""

import re
from dataclasses import asdict

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_darts.analysis.estimates import Estimate, mean_of, plus_minus
from trl_darts.analysis.report import read_runs, verdict, write_report
from trl_darts.analysis.report.tables import (
    Window,
    common_window,
    compared_steps,
    long_steps,
    median_of,
    time_split,
    traces_within,
    typical_step,
)
from trl_darts.analysis.report.verdict import UNKNOWN, compare_settings, reward_ends
from trl_darts.scheduling import ScheduleSettings

from .builders import ROLLOUT, SETTINGS, make_entry, make_trace, write_run


def summary(runs):
    return verdict.summary(runs, compared_steps(runs))


def cautions(runs):
    return verdict.cautions(runs, compare_settings(runs), compared_steps(runs))


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


def read(tmp_path, **runs):
    return read_runs([write_run(tmp_path / name, **kwargs) for name, kwargs in runs.items()])


def slow(step):
    """Nothing is aborted: 20 s, and 26 tokens, all kept."""
    everything = {
        key: [(length, "stop", True, start, 2 * end) for length, _, _, start, end in group]
        for key, group in ROLLOUT.items()
    }
    return make_trace(everything, step=step)


@pytest.fixture
def pair(tmp_path):
    """A slow run of four steps and a fast one of three."""
    traces = {f"rollout_{step:05d}_00.parquet": slow(step) for step in range(4)}
    log = [make_entry(s, **{"step_time": 30.0 * s, "darts/rollout/seconds": 20.0}) for s in (1, 2, 3, 4)]
    grpo = {"traces": traces, "log": log, "settings": {**SETTINGS, "schedule": "grpo"}}
    return read(tmp_path, grpo=grpo, darts={"traces": 3, "log": 3})


def test_summary_is_over_the_common_steps(pair):
    rows = {row.key: row for row in summary(pair)}
    expected = {
        "step": [75, 18],  # (60 + 90) / 2: step 1 warms up, and the second run has no fourth
        "share": [20 / 75, 10 / 18],
        "rollout": [20, 10],
        "longest": [9, 9],
        "tokens": [26, 26],
        "waste": [0, 8 / 26],
        "aborted": [0, 4 / 26],
        "candidates": [1, 1.5],
        "shape": [1, (18 / 4) / (26 / 6)],
    }
    assert set(rows) == {*expected, "bubble"}
    for key, values in expected.items():
        assert [estimate.mean for estimate in rows[key].estimates] == pytest.approx(values), key
    assert rows["waste"].cells == ["0 %", "31 %"]  # the same in both steps
    assert rows["step"].cells == ["75.0", "18.0"]  # two steps tell nothing of the noise
    assert [rows["rollout"].ratio(i) for i in (0, 1)] == ["", "0.500×"]
    assert rows["candidates"].ratio(1) == ""  # the first run has 1
    (steps,) = cautions(pair)
    assert steps.startswith("The runs have different numbers of steps: grpo 4, darts 3. Comparisons are over")


def test_other_work_is_said(tmp_path):
    other = {**SETTINGS, "model": "some/Other-7B", "num_longest": 3}
    runs = read(
        tmp_path,
        a={"traces": 1, "log": 1},
        b={"traces": {"rollout_00000_00.parquet": make_trace({5: ROLLOUT[7]})}, "log": 1, "settings": other},
        c={"log": 1, "settings": None},
    )
    settings = {setting.name: setting for setting in compare_settings(runs)}
    assert settings["model"].matters
    assert settings["prompts per rollout"].matters
    assert not settings["num_longest"].differs  # only one run has it
    assert not settings["schedule"].differs
    first, unknown, prompts = cautions(runs)
    assert "differ in model, prompts per rollout" in first
    assert unknown.startswith("Settings are unknown: c.")
    assert "same prompts in only 0 of 1 common steps" in prompts
    assert cautions(runs[:1]) == []


def test_what_a_schedule_sets_is_not_other_work_and_what_it_does_not_read_is_left_out(tmp_path):
    """All of the trainer's own settings, as its log has them: two schedules differ in many."""
    runs = {}
    for schedule in ("grpo", "sorted"):
        own = asdict(ScheduleSettings(schedule, num_generations=2))
        runs[schedule] = {"traces": 1, "log": 1, "settings": {**SETTINGS, **own}}
    read_in = read(tmp_path, **runs)
    settings = {setting.name: setting for setting in compare_settings(read_in)}
    assert settings["selection"].values == [UNKNOWN, "all"]
    assert settings["sorted_mode"].values == [UNKNOWN, "on_policy"]
    assert not any(setting.matters for setting in settings.values())
    assert "long_end_patience" not in settings  # both keep all that they sample
    of_grpo = {setting.name for setting in compare_settings(read_in[:1])}
    assert of_grpo == {"model", "schedule", "num_generations", "prompts per rollout", "rollouts per step"}
    ahead = {**SETTINGS, **asdict(ScheduleSettings("grpo", num_generations=2, rollout_ahead=1))}
    both = read(tmp_path / "ahead", ahead={"log": 1, "settings": ahead}, grpo=runs["grpo"])
    (setting,) = [setting for setting in compare_settings(both) if setting.name == "rollout_ahead"]
    assert (setting.values, setting.differs, setting.matters) == ([1, 0], True, False)


def test_none_is_a_value(tmp_path):
    """The paper's wait has no bound, and the default has one; what a log lacks is another matter."""
    own = {"paper": {"long_end_patience": None}, "default": {"long_end_every": 4}}
    runs = {
        name: {"log": 1, "settings": {**SETTINGS, **asdict(ScheduleSettings(num_generations=2, **fields))}}
        for name, fields in own.items()
    }
    runs["old"] = {"log": 1, "settings": SETTINGS}
    settings = {setting.name: setting for setting in compare_settings(read(tmp_path, **runs))}
    assert settings["long_end_patience"].values == [None, "auto", UNKNOWN]
    assert settings["long_end_every"].values == [None, 4, UNKNOWN]
    for name in own["paper"] | own["default"]:
        assert (settings[name].differs, settings[name].matters) == (True, False)
    assert not settings["num_longest"].differs
    assert "redundancy_cost_weight" not in settings  # None in all
    page = write_report([tmp_path / name for name in runs], tmp_path / "report.html").read_text()
    page = re.sub(' data-label="[a-z]*"', "", page)
    assert '>long_end_patience</th><td class="text">None</td><td class="text">auto</td>' in page
    assert '>long_end_every</th><td class="text">None</td><td class="text">4</td><td class="text">–</td>' in page
    assert page.index(">long_end_every<") < page.index("All other settings") < page.index(">num_generations<")


def of_trl(step, **metrics):
    """A log entry of TRL's own trainer."""
    return {"step": step, "reward": 0.1, "step_time": 20.0 + step % 3, "completions/max_length": 9.0, **metrics}


def test_what_a_log_of_trl_does_not_say_is_unknown(tmp_path):
    """Not zero: it has no rollouts, no idle engines, and nothing was saved or lost in its rollouts."""
    log = [of_trl(step) for step in range(1, 8)]
    ours = [make_entry(step, step_time=16.0 + step % 2) for step in range(1, 8)]
    runs = read(tmp_path, trl={"log": log, "settings": None}, darts={"log": ours})
    rows = {row.key: row.cells for row in summary(runs)}
    assert rows["share"][0] == "–"
    assert rows["share"][1] != "–"
    assert rows["step"][0].startswith("21")
    assert {"step", "reward_first", "reward_last"} == {row.key for row in summary(runs[:1])}
    split = time_split(runs[0])
    assert split["total"].notna().all()
    assert split[["generate", "score", "train", "sync", "busy", "idle"]].isna().all(axis=None)
    ((saved, unknown),) = verdict.in_short(runs, compare_settings(runs), compared_steps(runs))
    assert "darts took 16.5 s a step, trl 21.0 s: saved" in saved
    assert unknown == "What of this was saved in rollouts is unknown: a log of TRL's own trainer does not say."
    page = write_report([run.directory for run in runs], tmp_path / "report.html").read_text()
    assert ">not known</text>" in page  # the parts of its step
    assert "100 %" not in page.replace("width: 100 %", "")
    assert "−" not in page


def test_traces_without_times_are_those_of_another_trainer(tmp_path):
    """Lengths are known, seconds are not."""
    traces = {f"rollout_{step:05d}_00.parquet": slow(step) for step in range(5)}
    for trace in traces.values():
        trace[["start_seconds", "end_seconds"]] = float("nan")
    log = [of_trl(step) for step in range(1, 6)]
    runs = read(tmp_path, trl={"log": log, "traces": traces, "settings": None}, darts={"log": 5, "traces": 5})
    rows = {row.key: row.cells for row in summary(runs)}
    assert [rows[key][0] for key in ("rollout", "bubble", "share")] == ["–"] * 3
    assert [rows[key][0] for key in ("longest", "candidates", "waste")] == ["9.00", "1.00", "0 %"]
    assert [rows[key][1] for key in ("rollout", "longest")] == ["10.0", "9.00"]
    assert typical_step(runs, compared_steps(runs)) == 3  # of the other run
    assert typical_step(runs[:1], compared_steps(runs)) is None
    page = write_report([run.directory for run in runs], tmp_path / "report.html").read_text()
    assert "trl: no times of its candidates." in page
    assert ">trl: % of candidates</text>" in page


def test_log_and_traces_have_one_window(tmp_path):
    runs = read(tmp_path, a={"traces": 4, "log": 4}, b={"log": 3}, c={"traces": 4})
    window = compared_steps(runs)
    assert window == Window(2, 3)  # step 1 warms up
    assert [len(table) for table in traces_within(runs, window)] == [12, 0, 12]
    averaged = read(tmp_path, d={"log": [make_entry(2), make_entry(4)]})
    assert compared_steps([*runs, *averaged]) == Window(1, 3)  # its first entry has step 1 in it
    assert compared_steps(read(tmp_path, e={"log": 1})) == Window(1, 1)
    late = read(tmp_path, f={"traces": {"rollout_00008_00.parquet": make_trace(step=8)}})
    assert compared_steps([*runs, *late]) is None
    assert "No step has log entries and rollouts of all runs" in " ".join(cautions([*runs, *late]))
    assert summary([*runs, *late]) == []


def test_drafts_and_switches_are_summed_up_where_a_log_has_them(tmp_path):
    drafts = {"darts/drafts/step_share": 0.25, "darts/drafts/accepted_per_step": 1.5, "darts/tail/switches": 1.0}
    runs = read(tmp_path, a={"log": [make_entry(1, **drafts), make_entry(2, **drafts)]}, b={"log": 2})
    rows = {row.key: row.cells for row in summary(runs)}
    assert rows["darts/drafts/step_share"] == ["25 %", "–"]
    assert rows["darts/drafts/accepted_per_step"] == ["1.50", "–"]
    assert rows["darts/tail/switches"] == ["100 %", "–"]
    assert "darts/tail/gain_seconds" not in rows  # nothing was predicted


def test_typical_and_long_steps(tmp_path):
    def took(seconds, step):
        return make_trace({1: [(5, "stop", True, 0.0, seconds)]}, step=step)

    traces = {f"rollout_{step:05d}_00.parquet": took(s, step) for step, s in enumerate([50.0, 1.0, 4.0, 5.0, 9.0])}
    runs = read(tmp_path, a={"traces": traces}, b={"log": 5})
    window = compared_steps(runs)
    assert typical_step(runs, window) == 3  # 4 s, the lower of the two in the middle
    assert typical_step(runs[1:], window) is None
    assert long_steps(runs[0], window).empty  # 9 s is twice the median
    assert dict(long_steps(runs[0], Window(1, 5))) == {1: 50.0}
    assert median_of(pd.Series({4: 9.0, 8: 12.0, 12: 10.0})) == 12


def test_reward_ends():
    first, last = reward_ends(pd.Series([0.0, 1.0, 5.0, None, 5.0, 2.0, 4.0]))
    assert (list(first), list(last)) == ([0, 1], [2, 4])
    assert plus_minus(mean_of(last)) == "3.00"
    assert [len(end) for end in reward_ends(pd.Series([1.0] * 5))] == [0, 0]


def test_digits():
    assert plus_minus(mean_of(pd.Series([0.0, 1.0, 5.0, 6.0]))) == "3.0 ± 4.7"
    assert plus_minus(Estimate(39.5991, 0.008)) == "39.6"
    assert plus_minus(Estimate(0.0, 0.25)) == "0.00 ± 0.25"
    assert plus_minus(Estimate(12345.0, 67.8), " s") == "12,345 ± 68 s"
