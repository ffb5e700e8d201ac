"""Tests that traces are read as they were written."""

import math

import pandas as pd
import pytest

from tests.analysis.report.builders import make_trace, write_run
from trl_darts.errors import ConfigurationError
from trl_darts.scheduling import GroupSummary
from trl_darts.telemetry.traces import read_traces, write_trace


def group(key: int, group_id: int = 0, **more) -> GroupSummary:
    times = [(5.0, 6.5), (5.5, 6.0)]
    return GroupSummary(group_id, key, [3, 2], ["stop", "abort"], [0], num_prompt_tokens=7, times=times, **more)


def test_one_row_per_candidate(tmp_path):
    write_trace(tmp_path, 4, 1, [group(2**64 - 1, expected_length=2.5)])
    traces, notes = read_traces(tmp_path)
    first, second = traces.to_dict("records")
    assert first == {
        "step": 5,  # file names count from 0
        "group": 0,
        "prompt_key": 2**64 - 1,
        "candidate": 0,
        "num_candidates": 2,
        "length": 3,
        "finish_reason": "stop",
        "selected": True,
        "num_prompt_tokens": 7,
        "start_seconds": 0.0,
        "end_seconds": 1.5,
        "num_carried_tokens": 0,
        "carried_over": False,
        "expected_length": 2.5,
        "versions": "",
        "micro": 1,
    }
    assert (second["finish_reason"], second["selected"], second["start_seconds"]) == ("abort", False, 0.5)
    assert notes == []


def test_deferred_groups_are_carried_over_where_tokens_are_kept(tmp_path):
    for step, keeps_tokens in enumerate((True, False)):
        deferred = [group(8, group_id=0, carried=[1, 2])]
        write_trace(tmp_path, step, 0, [group(7, group_id=1), *deferred], deferred if keeps_tokens else ())
    traces, _ = read_traces(tmp_path)
    assert traces["carried_over"].tolist() == [True, True, False, False, False, False, False, False]
    assert traces["num_carried_tokens"].tolist() == [1, 2, 0, 0] * 2
    assert math.isnan(traces["expected_length"][0])


def test_prompts_keep_all_digits_of_their_hashes(tmp_path):
    """pandas alone would read the keys of the files as int64 and uint64, and both together as floats."""
    keys = [2**60 + 1, 2**64 - 1]
    for step, key in enumerate(keys):
        write_trace(tmp_path, step, 0, [group(key)])
    assert read_traces(tmp_path)[0]["prompt_key"].tolist() == [keys[0], keys[0], keys[1], keys[1]]


def test_files_that_can_not_be_read_are_noted(tmp_path):
    write_run(tmp_path, traces=1)
    (tmp_path / "rollouts" / "rollout_00001_00.parquet").write_bytes(b"PAR1 half a file")
    write_trace(tmp_path, 2, 0, [])
    traces, notes = read_traces(tmp_path)
    assert set(traces["step"]) == {1}
    assert notes[0].startswith("rollout_00001_00.parquet is left out. ")
    assert notes[1:] == ["rollout_00002_00.parquet is left out. It has no candidates."]


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (
            make_trace().drop(columns=["start_seconds", "length"]),
            r"must have the columns that .*'length', 'start_seconds'.*Train again",
        ),
        (make_trace().assign(length="long"), "must have the columns that .*Train again"),
        (pd.DataFrame({"step": []}), "must be a Parquet file with candidates. It has no candidates"),
    ],
)
def test_what_is_no_trace(tmp_path, broken, rule):
    write_run(tmp_path, traces={"rollout_00000_00.parquet": broken})
    with pytest.raises(ConfigurationError, match=rule) as raised:
        read_traces(tmp_path)
    assert str(raised.value).startswith("`run_dir`")
    assert "\n" not in str(raised.value)
