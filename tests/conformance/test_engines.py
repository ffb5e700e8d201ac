"""
One suite for all engines: what a rollout yields does not depend on who decodes it.

Each engine runs the scenarios of `run.py` once.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders import letter_of
from tests.conformance.process import run_scenarios
from tests.conformance.run import COUNTS, LIMIT, M_UP, M, scenarios
from tests.engines.settings import ENGINES
from tests.test_docs import documented_metrics
from trl_darts.policy import select_dual_end


ROOT = Path(__file__).resolve().parents[2]


MARKS = {"vllm_colocated": [pytest.mark.vllm], "vllm_server": [pytest.mark.vllm, pytest.mark.xdist_group("letters")]}


@pytest.fixture(scope="session", params=[pytest.param(engine, marks=MARKS.get(engine, ())) for engine in ENGINES])
def results(request, model_dir, tmp_path_factory):
    """What came of the scenarios on one engine."""
    url = request.getfixturevalue("server").base_url if request.param == "vllm_server" else None
    return run_scenarios(scenarios, request.param, model_dir, tmp_path_factory.mktemp("results"), url)


@pytest.fixture(params=["darts", "no_pruning", "patience", "grpo", "mixed"])
def scenario(request, results):
    return request.param, results[request.param]


def test_rows_answer_their_prompts(scenario):
    _, result = scenario
    assert len(result["completions"]) == len(result["prompts"])
    for prompt, completion in zip(result["prompts"], result["completions"], strict=True):
        assert letter_of(completion[0]) == prompt[-1]  # later ones stray now and then


def test_rows_are_the_selected_candidates(scenario):
    _, result = scenario
    kept = [lengths[i] for lengths, _, selected in result["groups"] for i in selected]
    assert [len(completion) for completion in result["completions"]] == kept
    assert all(len(selected) == M and selected == sorted(selected) for _, _, selected in result["groups"])


def test_every_candidate_ends_once_with_its_reason(scenario):
    name, result = scenario
    for budget, (lengths, reasons, _) in zip(result["budgets"], result["groups"], strict=True):
        assert len(lengths) == len(reasons) == budget
        assert set(reasons) <= {"stop", "length", "abort"}
        assert all(length == LIMIT for length, reason in zip(lengths, reasons, strict=True) if reason == "length")
        if budget < M_UP and name != "patience":
            assert "abort" not in reasons  # only a saturated group stops early


def test_log_probs_come_with_every_token_or_not_at_all(results, scenario):
    _, result = scenario
    if results["engine"] in ("transformers", "continuous_batching"):
        assert result["logprobs"] is None
    else:
        assert [len(row) for row in result["logprobs"]] == [len(row) for row in result["completions"]]
        assert all(-20 < logprob <= 1e-6 for row in result["logprobs"] for logprob in row)


@pytest.mark.parametrize("name", ["darts", "no_pruning"])
def test_dual_end(results, name):
    saturated = 0
    for lengths, reasons, selected in results[name]["groups"]:
        complete = [reason == "stop" for reason in reasons]
        if name == "darts" and len(lengths) == M_UP:
            saturated += 1
            stopped = [i for i, reason in enumerate(reasons) if reason == "stop"]
            if len(stopped) == M:  # else several ended before the first abort arrived
                assert selected == stopped
            continue
        assert selected == sorted(select_dual_end(lengths, complete, M - 1, 1))
    assert saturated == (4 if name == "darts" else 0)


def test_saturated_groups_stop_early(results):
    groups = [group for group in results["darts"]["groups"] if len(group[0]) == M_UP]
    reasons = [reason for _, reasons, _ in groups for reason in reasons]
    assert reasons.count("abort") >= 3  # of 16 that were not needed; the shortest end before the abort arrives
    assert all(len(lengths) >= M for lengths, _, _ in groups)
    metrics = results["darts"]["metrics"]
    assert metrics["darts/rollout/aborted_candidates"] == reasons.count("abort")
    assert results["no_pruning"]["metrics"]["darts/rollout/aborted_candidates"] == 0


def test_bounded_wait(results):
    aborted = 0
    for lengths, reasons, selected in results["patience"]["groups"]:
        complete = sorted(length for length, reason in zip(lengths, reasons, strict=True) if reason == "stop")
        cut = [length for length, reason in zip(lengths, reasons, strict=True) if reason == "abort"]
        aborted += len(cut)
        if cut:
            assert len(complete) >= M
            assert min(cut) >= 1.5 * complete[M - 1] - 1e-9
        if len(complete) < M or complete[-1] < 1.5 * complete[M - 1]:  # else one may have ended as it was called off
            assert selected == sorted(select_dual_end(lengths, [r == "stop" for r in reasons], M - 1, 1))
    # A server reports every 16 tokens: what it should stop may have ended. Its own tests have lengths that are given.
    assert aborted > 0 or results["engine"] == "vllm_server"


def test_grpo_samples_what_it_keeps(results):
    assert results["grpo"]["budgets"] == [M] * 10
    assert all(selected == list(range(M)) for _, _, selected in results["grpo"]["groups"])


def test_different_prompts_in_a_group_keep_their_answers(results):
    mixed = results["mixed"]
    assert mixed["budgets"] == [M if index == 2 else count for index, count in enumerate(COUNTS)]
    assert len({prompt[-1] for prompt in mixed["prompts"][8:12]}) == 4
    assert mixed["observed"] == 9  # nothing is learned from the mixed one
    assert mixed["metrics"]["darts/budget/mixed_ratio"] == pytest.approx(0.1)


def test_evaluation_is_not_over_provisioned(results):
    evaluation = results["evaluation"]
    assert evaluation["learned"] == 0
    for prompt, completion in zip(evaluation["prompts"], evaluation["completions"], strict=True):
        assert letter_of(completion[0]) == prompt[-1]  # later ones stray now and then


def test_a_colocated_engine_runs_all_candidates_at_once(results):
    """TRL has it decode as many as there are rows; the others would wait in its queue."""
    assert ("room" in results) == (results["engine"] == "vllm_colocated")
    assert results.get("room", 80) == 80  # 40 rows, twice as many candidates


def test_metrics_are_the_same_on_every_engine(results):
    names = {name for name in results["darts"]["metrics"] if name.startswith("darts/")} - {"darts/sync/seconds"}
    assert "darts/rollout/bubble_ratio" in names
    assert names <= documented_metrics((ROOT / "docs" / "metrics.md").read_text())
    assert results["darts"]["metrics"]["darts/budget/total"] == sum(COUNTS)
    assert results["darts"]["peak"] == sum(COUNTS)


def test_pooled_lengths_are_plausible(results):
    """The model's mean answers to A and E are 4 and 60 tokens; whoever decodes must agree."""
    lengths = {letter: [] for letter in "ABCDE"}
    for name in ("no_pruning", "grpo"):
        for index, (group, _, _) in enumerate(results[name]["groups"]):
            lengths["ABCDE"[index % 5]] += group
    means = {letter: sum(values) / len(values) for letter, values in lengths.items()}
    assert 2 < means["A"] < 9
    assert means["A"] < means["C"] < means["E"]
    assert 25 < means["E"] <= 100
