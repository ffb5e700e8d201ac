"""The benchmark for one GPU, at a tiny size on the CPU."""

import pytest

from benchmarks import gpu
from trl_darts.scheduling import GroupPlan, Scheduler, ScheduleSettings


@pytest.mark.parametrize("engine", ["generate", "continuous"])
def test_each_candidate_has_the_length_that_it_was_given(engine):
    cluster = gpu.ModelCluster(gpu.make_model(gpu.countdown(40), {}), engine, 40)
    scheduler = Scheduler(ScheduleSettings("grpo", 3).policies(), 3)
    result = cluster.run(scheduler, [GroupPlan(0, 3), GroupPlan(1, 3)], [[5, 1, 24], [9, 31, 99]], 24)
    rows = [[(row.length, row.finish_reason.value) for row in group.rows] for group in result.groups]
    assert sorted(rows[0]) == [(1, "stop"), (5, "stop"), (24, "stop")]
    assert sorted(rows[1]) == [(9, "stop"), (24, "length"), (24, "length")]


def test_all_parts_run(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu.py", "--size", "tiny", "--steps", "3"])
    gpu.main()
    printed = capsys.readouterr().out
    parts = ("ms per token", "default", "tail batching", "s per rollout", "trim_padding=True")
    for words in (*parts, "size tiny, generate"):
        assert words in printed
