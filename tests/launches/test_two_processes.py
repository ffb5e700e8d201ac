"""
Two real processes under each way to launch them: one decides, both agree, and rows stay with their prompts, also where
a group straddles them.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml

from testing.servers import free_port, start_vllm_server


pytestmark = pytest.mark.distributed
ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs" / "accelerate"


def launch(
    model_dir, out, config=CONFIGS / "ddp.yaml", engine="transformers", url=None, refused=(), **args
) -> list[dict]:
    """`refused` are the groups that a server is asked for in a way that it refuses."""
    options = {"model": str(model_dir), "out": str(out), "engine": engine, "url": url}
    options |= {"refused": list(refused), "args": args}
    run_launcher(config, "tests.launches.train", [json.dumps(options)])
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def run_launcher(config: Path, module: str, arguments: list) -> None:
    """`accelerate launch --config_file CONFIG -m MODULE ARGUMENTS`, which must end well."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += ["--main_process_port", str(free_port()), "-m", module, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, "\n".join(_last_words(done.stderr))


def _last_words(stderr: str) -> list[str]:
    """What each process said last; the launcher's own words come after that, and say nothing."""
    lines = stderr.splitlines()
    words = [line for rank in (0, 1) for line in [x for x in lines if x.startswith(f"[rank{rank}]")][-20:]]
    ends = (index for index, line in enumerate(lines) if "Signal" in line or "failed (exitcode" in line)
    end = next(ends, len(lines))
    return [*words, *lines[max(0, end - 30) : end + 10]]


def rows_of(ranks: list[dict], step: int) -> list[tuple]:
    """Prompt, letter, length and advantage of each row of a step, in the order of the processes."""
    columns = ("prompts", "letters", "lengths", "advantages")
    return [row for rank in ranks for row in zip(*(rank["rows"][step][name] for name in columns), strict=True)]


def assert_agreement(ranks: list[dict], steps: int, num_prompts: int) -> None:
    first, second = ranks
    assert first["records"] == second["records"]  # the same budgets and selections on both
    assert len(first["records"]) == steps
    assert first["tracked"] > 0  # the main process learns,
    assert second["tracked"] == 0  # and no other
    for step in range(steps):
        budgets, groups = first["records"][step]
        assert len(budgets) == len(groups) == num_prompts
        rows = rows_of(ranks, step)
        assert all(prompt[-1] == letter for prompt, letter, _, _ in rows)
        for index, (lengths, selected) in enumerate(groups):
            group = rows[4 * index : 4 * index + 4]
            assert len({prompt for prompt, _, _, _ in group}) == 1
            kept = [lengths[i] for i in selected]
            assert [length for _, _, length, _ in group] == kept
            mean = sum(kept) / 4
            for _, _, length, advantage in group:
                assert advantage == pytest.approx(length - mean, abs=1e-3)


SCHEDULES = {
    "tail_batching": {"prompt_oversampling": 1.5},
    "partial_rollout": {"max_partial_age": 1, "mask_stale_after": 1},
    "sorted": {"sorted_group_batches": 3, "sorted_mode": "partial"},
}


@pytest.mark.parametrize(
    "schedule",
    [
        "partial_rollout",
        pytest.param("tail_batching", marks=pytest.mark.slow),
        pytest.param("sorted", marks=pytest.mark.slow),
    ],
)
def test_batches_that_are_not_the_loaders(server, model_dir, tmp_path, schedule):
    """Three groups on two processes, one on both: whichever are done, rows and rewards belong together."""
    fields = {"schedule": schedule, **SCHEDULES[schedule]}
    ranks = launch(
        model_dir,
        tmp_path,
        engine="vllm_server",
        url=server.base_url,
        per_device_train_batch_size=6,
        max_completion_length=96,
        max_steps=6,
        **fields,
    )
    epochs = [Counter(), Counter()]
    for step in range(6):
        rows = rows_of(ranks, step)
        assert len(rows) == 12
        for start in range(0, 12, 4):
            group = rows[start : start + 4]
            assert len({prompt for prompt, _, _, _ in group}) == 1
            assert all(prompt[-1] == letter for prompt, letter, _, _ in group)
            mean = sum(length for _, _, length, _ in group) / 4
            assert [advantage for *_, advantage in group] == pytest.approx([row[2] - mean for row in group], abs=1e-3)
            epochs[step // 3][group[0][0]] += 1
    assert all(len(counts) == 9 for counts in epochs)  # of 10 prompts, 9 fill three batches; none came twice


def assert_shared_work(ranks: list[dict]) -> None:
    """Both decoded, and together every candidate once."""
    totals = [sum(budgets) for budgets, _ in ranks[0]["records"]]
    assert [sum(counts) for counts in zip(*(rank["decoded"] for rank in ranks), strict=True)] == totals
    assert all(count > 0 for rank in ranks for count in rank["decoded"])


@pytest.mark.parametrize("rows_per_process", [8, 6])  # 6: the second of three groups straddles both processes
def test_transformers_engine(model_dir, tmp_path, rows_per_process):
    ranks = launch(model_dir, tmp_path, per_device_train_batch_size=rows_per_process, max_steps=4)
    assert_agreement(ranks, steps=4, num_prompts=rows_per_process // 2)
    assert_shared_work(ranks)


@pytest.mark.parametrize(
    ("engine", "tensor_parallel"),
    [
        ("continuous_batching", 1),
        pytest.param("vllm_colocated", 1, marks=pytest.mark.vllm),
        pytest.param("vllm_colocated", 2, marks=pytest.mark.vllm),
    ],
)
def test_engines_of_each_process(model_dir, tmp_path, engine, tensor_parallel):
    """`target_redundancy` at its bound: every group is pruned, mostly by what the other process reports."""
    more = {"vllm_tensor_parallel_size": tensor_parallel} if engine == "vllm_colocated" else {}
    ranks = launch(
        model_dir, tmp_path, engine=engine, per_device_train_batch_size=6, max_steps=3, target_redundancy=2.0, **more
    )
    assert_agreement(ranks, steps=3, num_prompts=3)
    if tensor_parallel == 1:
        assert_shared_work(ranks)
    else:
        assert ranks[0]["decoded"] == ranks[1]["decoded"]  # the same candidates, half of each layer
    assert sum(line.get("darts/rollout/aborted_candidates", 0) for line in map(_numbers, ranks[0]["log"])) > 0


def _numbers(line: dict) -> dict:
    return {name: float(value) for name, value in line.items() if name.startswith("darts/")}


@pytest.mark.parametrize(
    ("name", "distributed_type"),
    [
        ("fsdp2", "FSDP"),
        pytest.param("deepspeed_zero2", "DEEPSPEED", marks=pytest.mark.slow),
        ("deepspeed_zero3", "DEEPSPEED"),
    ],
)
def test_sharded_models(model_dir, tmp_path, name, distributed_type):
    """One process's rows end long before the other's: neither may leave the other alone in a collective."""
    config = CONFIGS / f"{name}.yaml"
    args = {"ds3_gather_for_generation": False} if name == "deepspeed_zero3" else {}
    if name == "deepspeed_zero3":  # its default leaves parameters as small as these unsharded
        config = _with_every_parameter_sharded(config, tmp_path)
    ranks = launch(
        model_dir, tmp_path, config, per_device_train_batch_size=6, max_steps=3, target_redundancy=2.0, **args
    )
    assert distributed_type in ranks[0]["distributed_type"]
    assert_agreement(ranks, steps=3, num_prompts=3)
    assert_shared_work(ranks)


def _with_every_parameter_sharded(config: Path, out: Path) -> Path:
    settings = yaml.safe_load(config.read_text())
    stage3 = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    batch = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    path = out / "deepspeed.json"
    path.write_text(json.dumps({"zero_optimization": stage3, **batch, "train_batch_size": "auto"}))
    settings["deepspeed_config"] = {"deepspeed_config_file": str(path), "zero3_init_flag": True}
    settings.pop("mixed_precision")  # DeepSpeed's file decides about it
    (out / "accelerate.yaml").write_text(yaml.safe_dump(settings))
    return out / "accelerate.yaml"


@pytest.mark.vllm
def test_server_engine(server, model_dir, tmp_path):
    ranks = launch(
        model_dir, tmp_path, engine="vllm_server", url=server.base_url, per_device_train_batch_size=6, max_steps=4
    )
    assert_agreement(ranks, steps=4, num_prompts=3)


@pytest.mark.vllm
def test_dropped_group_straddles_both(server, model_dir, tmp_path):
    """The second of three groups has rows on both processes: neither gives them any weight."""
    ranks = launch(
        model_dir,
        tmp_path,
        engine="vllm_server",
        url=server.base_url,
        refused=[1],
        per_device_train_batch_size=6,
        max_steps=2,
        on_generation_error="drop_group",
    )
    for first, second in zip(ranks[0]["rows"], ranks[1]["rows"], strict=True):
        lengths, advantages = first["lengths"] + second["lengths"], first["advantages"] + second["advantages"]
        assert lengths[4:8] == advantages[4:8] == [0] * 4
        assert all(lengths[:4] + lengths[8:])
        for group in (slice(4), slice(8, 12)):  # the reward is the length; equal ones have no advantage
            assert advantages[group] == pytest.approx(np.subtract(lengths[group], np.mean(lengths[group])))
        assert first["num_items"] == second["num_items"] == sum(lengths)
    assert [float(line["darts/rollout/dropped_groups"]) for line in ranks[0]["log"][:2]] == [1.0, 1.0]


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["ddp", "fsdp2", pytest.param("deepspeed_zero3", marks=pytest.mark.slow)])
def test_streamed_log_probs(server, model_dir, tmp_path, name):
    """Each process is served its own rows, also those of the group that straddles both."""
    config = CONFIGS / f"{name}.yaml"
    if name == "deepspeed_zero3":
        config = _with_every_parameter_sharded(config, tmp_path)
    ranks = launch(
        model_dir,
        tmp_path,
        config,
        engine="vllm_server",
        url=server.base_url,
        per_device_train_batch_size=6,
        max_steps=3,
        learning_rate=3e-3,
        beta=0.1,
        stream_logprobs=True,
        stream_chunk_tokens=16,
        stream_rewards=True,
    )
    for rank in ranks:
        assert [name for name, _, _ in rank["streamed"]] == ["policy", "reference"] * 3
        assert max(difference for _, difference, _ in rank["streamed"]) < 1e-5
        assert not any(missed for _, _, missed in rank["streamed"])
        for batch in rank["rows"]:  # the reward is the length, and its mean over a group is not in the advantage
            differences = np.subtract(batch["advantages"], batch["lengths"])
            assert np.ptp(differences[:2]) == np.ptp(differences[-2:]) == pytest.approx(0)
    assert sum("darts/stream/chunks" in line for line in ranks[0]["log"]) == 3


@pytest.mark.vllm
def test_error_on_the_main_process_ends_both(model_dir, tmp_path):
    """The server refuses a prompt that does not fit; the other process must hear of it, and not wait for ever."""
    with (
        start_vllm_server(model_dir, max_model_len=50, wait=False) as server,
        pytest.raises(AssertionError, match="max_model_len"),
    ):
        launch(
            model_dir,
            tmp_path,
            engine="vllm_server",
            url=server.base_url,
            per_device_train_batch_size=6,
            max_completion_length=49,
            max_steps=1,
        )


def test_a_long_wait_is_not_a_collective(tmp_path):
    """The main process may wait for a server for longer than a collective would let the others wait for it."""
    run_launcher(CONFIGS / "ddp.yaml", "tests.launches.wait", [tmp_path])
    for rank in (0, 1):
        values = (tmp_path / f"rank{rank}.txt").read_text().splitlines()
        assert values == ["at once", "after a while", "division by zero"]
