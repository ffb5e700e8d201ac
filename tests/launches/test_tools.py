"""Tools with servers on two processes: their later turns differ in number, and none waits for the other's."""

import json

import pytest

from testing.servers import start_vllm_server
from tests.launches.test_two_processes import CONFIGS, run_launcher
from tests.trl_parity.tool_calls import RIGHT, caller_maker


pytestmark = [pytest.mark.distributed, pytest.mark.vllm]


def turns_per_step(turns: list[str]) -> list[int]:
    """Later turns after each first one."""
    counts: list[int] = []
    for turn in turns:
        if turn == "training":
            counts.append(0)
        else:
            counts[-1] += 1
    return counts


def test_tool_loops_of_different_length(tmp_path):
    model_dir = caller_maker(lambda: tmp_path / "caller")(RIGHT, share=0.35)
    with start_vllm_server(model_dir, max_model_len=1024, wait=False) as server:
        run_launcher(CONFIGS / "ddp.yaml", "tests.launches.tools", [model_dir, tmp_path, server.base_url])
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    later = [turns_per_step(rank["turns"]) for rank in ranks]
    assert len(later[0]) == len(later[1]) == 4
    assert later[0] != later[1]  # else nothing was tested
    for rank in ranks:
        assert any(rank["calls"])
        for calls, answers in zip(rank["calls"], rank["answers"], strict=True):
            assert answers == ["12"] * len(calls)
    totals = [float(line["darts/budget/total"]) for line in ranks[0]["log"] if "darts/budget/total" in line]
    assert max(totals) > 16  # first turns are over-provisioned
