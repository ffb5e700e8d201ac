"""Two real processes: one decides, both agree, and rows stay with their prompts, also where a group straddles them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import make_letter_model
from tests.servers import free_port, start_vllm_server


pytestmark = pytest.mark.distributed
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tokenizer):
    return make_letter_model(tmp_path_factory.mktemp("models") / "letters", tokenizer)


def launch(model_dir, out, **args) -> list[dict]:
    options = {"model": str(model_dir), "out": str(out), "args": args}
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    command += ["--main_process_port", str(free_port()), "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["-m", "tests.distributed.train", json.dumps(options)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, "\n".join(_last_words(done.stderr))
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def _last_words(stderr: str) -> list[str]:
    """What each process said last; the launcher's own traceback says nothing."""
    lines = [line for line in stderr.splitlines() if line.startswith("[rank")]
    return [line for rank in (0, 1) for line in [x for x in lines if x.startswith(f"[rank{rank}]")][-20:]]


def assert_agreement(ranks: list[dict], steps: int, num_prompts: int) -> None:
    first, second = ranks
    assert first["records"] == second["records"]  # the same budgets and selections on both
    assert len(first["records"]) == steps
    assert first["tracked"] > 0  # the main process learns,
    assert second["tracked"] == 0  # and no other
    for step in range(steps):
        budgets, groups = first["records"][step]
        assert len(budgets) == len(groups) == num_prompts
        rows = [
            row
            for rank in ranks
            for row in zip(
                *(rank["rows"][step][k] for k in ("prompts", "letters", "lengths", "advantages")), strict=True
            )
        ]
        assert all(prompt[-1] == letter for prompt, letter, _, _ in rows)
        for index, (lengths, selected) in enumerate(groups):
            group = rows[4 * index : 4 * index + 4]
            assert len({prompt for prompt, _, _, _ in group}) == 1
            kept = [lengths[i] for i in selected]
            assert [length for _, _, length, _ in group] == kept
            mean = sum(kept) / 4
            for _, _, length, advantage in group:
                assert advantage == pytest.approx(length - mean, abs=1e-3)


@pytest.mark.parametrize("rows_per_process", [8, 6])  # 6: the second of three groups straddles both processes
def test_transformers_engine(model_dir, tmp_path, rows_per_process):
    ranks = launch(model_dir, tmp_path, per_device_train_batch_size=rows_per_process, max_steps=4, scale_rewards=False)
    assert_agreement(ranks, steps=4, num_prompts=rows_per_process // 2)


@pytest.mark.vllm
def test_server_engine(model_dir, tmp_path):
    with start_vllm_server(model_dir, max_model_len=512) as server:
        ranks = launch(
            model_dir,
            tmp_path,
            per_device_train_batch_size=6,
            max_steps=4,
            scale_rewards=False,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=server.base_url,
            vllm_group_port=free_port(),
        )
    assert_agreement(ranks, steps=4, num_prompts=3)


@pytest.mark.vllm
def test_error_on_the_main_process_ends_both(model_dir, tmp_path):
    """The server refuses a prompt that does not fit; the other process must hear of it, and not wait for ever."""
    with (
        start_vllm_server(model_dir, max_model_len=50) as server,
        pytest.raises(AssertionError, match="max_model_len"),
    ):
        launch(
            model_dir,
            tmp_path,
            per_device_train_batch_size=6,
            max_completion_length=49,
            max_steps=1,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=server.base_url,
            vllm_group_port=free_port(),
        )
