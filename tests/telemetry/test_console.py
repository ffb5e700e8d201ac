"""Tests the console output of a run: few of our metrics, a first and a last line."""

import ast
import json
import shlex

import pytest
from transformers import ProgressCallback, TrainerCallback

from tests.builders import make_args, make_trainer
from trl_darts.telemetry.console import (
    SHOWN,
    RolloutTotals,
    ShortPrinterCallback,
    first_line,
    last_line,
    shorten_console,
)


class Tracker(TrainerCallback):
    """Records the logs that the trackers of `report_to` get."""

    def __init__(self):
        self.logged = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logged.append(dict(logs))


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_few_values_on_the_console_all_elsewhere_and_a_last_line(model_dir, tmp_path, capsys, disable_tqdm):
    tracker = Tracker()
    args = make_args(tmp_path / "a run", max_steps=2, disable_tqdm=disable_tqdm, save_rollout_trace=True)
    trainer = make_trainer(model_dir, args, callbacks=[tracker])
    trainer.train()
    out, err = capsys.readouterr()
    first, *printed, last = [line for line in out.splitlines() if line]
    assert first == first_line(args)
    steps = [entry for line in printed if "reward" in (entry := ast.literal_eval(line))]
    assert len(steps) == 2
    for entry, tracked, stored in zip(steps, tracker.logged, trainer.state.log_history, strict=False):
        assert entry.pop("darts/step").startswith(f"{stored['darts/step/seconds']:.4g} s: ")
        ours = [name for name in entry if name.startswith("darts/")]
        assert ours == [name for name in stored if name in SHOWN]
        assert 5 <= len(ours) <= 6
        assert len([name for name in tracked if name.startswith("darts/")]) > 20
        assert {name for name in tracked if not name.startswith("darts/")} == set(entry) - set(ours)
        assert tracked.items() <= stored.items()
    written = [json.loads(line) for line in (tmp_path / "a run/rollouts/log.jsonl").read_text().splitlines()]
    assert written[1:3] == trainer.state.log_history[:2]
    assert ("aborted of " in err) is not disable_tqdm  # the counts of candidates, in the bar

    logs = trainer.state.log_history[:2]
    generated, kept = (sum(e[f"darts/rollout/{name}_tokens"] for e in logs) for name in ("generated", "kept"))
    assert last.startswith("Ended at step 2 of 2: 2 rollouts in ")
    assert f", {generated - kept:,.0f} of {generated:,.0f} tokens (" in last
    assert last.endswith(
        f"Traces: {tmp_path}/a run/rollouts. Report: trl-darts report {shlex.quote(f'{tmp_path}/a run')}"
    )


def test_callbacks_of_others_stay():
    class Mine(ProgressCallback):
        pass

    callbacks = [mine := Mine(), ProgressCallback(max_str_len=7)]
    shorten_console(callbacks, RolloutTotals())
    assert callbacks[0] is mine
    assert callbacks[1].max_str_len == 7


def test_without_traces_the_last_line_says_how_to_get_them(tmp_path, capsys):
    callback = ShortPrinterCallback(totals := RolloutTotals())
    state = type("State", (), {"is_world_process_zero": True, "log_history": [], "global_step": 3, "max_steps": 9})()
    callback.on_train_end(make_args(tmp_path), state, None)
    assert capsys.readouterr().out == ""  # nothing was trained
    totals.add({f"darts/rollout/{name}_tokens": 2.0 for name in ("generated", "discarded")} | {SHOWN[0]: 2.0})
    line = last_line(make_args(tmp_path), state, totals)
    assert line.startswith("Ended at step 3 of 9: 1 rollout in 2.0 s, 2 of 2 tokens (100%) in candidates beyond the")
    totals.first_step = 2  # a resumed run
    assert "1 rollout since step 2 in 2.0 s" in last_line(make_args(tmp_path), state, totals)
    assert line.endswith("Set `save_rollout_trace=True` for traces and `trl-darts report`.")


SERVER = {"use_vllm": True, "vllm_mode": "server", "weight_sync": "filesystem"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"schedule": "grpo"}, ["'grpo': 4 prompts x 4 rows, no spare candidates, waits for all cand"]),
        (
            {},
            [
                "about 6 candidates per prompt (6 to 8)",
                "waits for 4 complete answers to each prompt, and for longer ones while another",
            ],
        ),
        ({"long_end_every": 3}, ["while another prompt has fewer, in one rollout of 3 for all. Transformers decodes"]),
        (
            {"long_end_patience": 2.0},
            ["(4 to 8)", "and for longer ones up to 2 times their length, in one rollout of 4 for all."],
        ),
        (
            {"long_end_patience": 2.0, **SERVER},
            [
                "up to 2 times their length, defers groups whose rewards are all equal; "
                "for all while over 3% of answers are cut off."
            ],
        ),
        ({"long_end_patience": None}, ["waits for all candidates, but 4 complete answers to each prompt with 8."]),
        ({"num_longest": 0}, ["waits for 4 complete answers to each prompt."]),
        (
            {"schedule": "partial_rollout", **SERVER},
            [
                "waits for the first 4 of 8 prompts (others continue in the next rollout), ",
                "1 vLLM server, weights through files.",
            ],
        ),
        (
            {"schedule": "tail_batching", **SERVER},
            ["waits for the first 4 of 5 prompts (others restart in a long round)"],
        ),
        ({"drop_uniform_groups": True, "rollout_ahead": 1}, ["samples ahead, replaces groups whose rewards are all"]),
    ],
)
def test_the_first_line_has_the_settings_in_words(tmp_path, fields, expected):
    line = first_line(make_args(tmp_path, **{"num_generations": 4, "per_device_train_batch_size": 16, **fields}))
    assert all(part in line for part in expected), line
    assert "\n" not in line


def test_the_first_line_says_how_weights_are_sent(tmp_path):
    args = make_args(tmp_path, **SERVER)
    assert first_line(args).endswith("weights through files.")
    assert first_line(args, sends_adapters=True).endswith("weights as LoRA adapters.")


def test_columns_of_a_schedule_are_shown_with_it_alone(tmp_path, capsys):
    state = type("State", (), {"is_local_process_zero": True})()
    logs = {"darts/rollout/deferred_groups": 3.0, "darts/buffer/long_round": 0.0, "darts/buffer/waiting": 9.0}
    for schedule in ("darts", "tail_batching"):
        args = make_args(tmp_path, schedule=schedule)
        ShortPrinterCallback(RolloutTotals()).on_log(args, state, None, logs=logs)
    darts, tail_batching = map(ast.literal_eval, capsys.readouterr().out.splitlines())
    assert "darts/rollout/deferred_groups" not in darts
    assert set(tail_batching) == {"darts/rollout/deferred_groups", "darts/buffer/long_round"}
