"""The benchmark for one GPU, at a tiny size on the CPU."""

import pytest

from benchmarks import gpu
from benchmarks.harness import main


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_all_parts_run(capsys):
    with pytest.raises(SystemExit) as ended:
        main(gpu.BENCHMARK, ["--quick"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert "| darts (paper) |" in printed
    assert all(f"| {arm} |" in printed for arm in gpu.ARMS)
