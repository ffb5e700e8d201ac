"""Pictures follow their rows on every engine that takes them, and tell prompts of the same words apart."""

from __future__ import annotations

import pytest

from benchmarks.vllm_server import start_vllm_server
from tests.conformance.images import NUM_PICTURES, STEPS, scenarios
from tests.conformance.process import run_scenarios
from tests.conformance.vlm import make_idefics3
from tests.trl_parity.vlms import make_vlm


ENGINES = ["transformers", *(pytest.param(e, marks=pytest.mark.vllm) for e in ("vllm_colocated", "vllm_server"))]


@pytest.fixture(scope="module", params=ENGINES)
def results(request, tmp_path_factory):
    model_dir = tmp_path_factory.mktemp("models") / "vlm"
    make_idefics3(model_dir) if request.param == "vllm_colocated" else make_vlm(model_dir, kind="llava")
    out = tmp_path_factory.mktemp("results")
    if request.param != "vllm_server":
        return run_scenarios(scenarios, request.param, model_dir, out)
    options = {"max_model_len": 256, "model_impl": "transformers", "enable_scale_out": True}
    with start_vllm_server(model_dir, wait=False, **options) as server:
        return run_scenarios(scenarios, request.param, model_dir, out, server.base_url)


def test_prompts_of_the_same_words_are_told_apart_by_their_pictures(results):
    assert results["tracked"] == NUM_PICTURES
    totals = [float(line["darts/budget/total"]) for line in results["log"] if "darts/budget/total" in line]
    assert len(totals) == STEPS
    assert max(totals) > 16  # over-provisioned


def test_answers_are_to_the_own_picture(results):
    """vLLM's log-probs are those of the trainer with the row's picture; elsewhere it explains the answer best."""
    if results["engine"] != "transformers":
        worst = [float(line[key]) for line in results["log"] for key in line if key.endswith("logp_difference/max")]
        assert len(worst) == STEPS
        assert max(worst) < 1e-3
        return
    own, other = [], []
    for which, scores in zip(results["which"], results["scores"], strict=True):
        for row, picture in enumerate(which):
            own.append(scores[row][row])
            other += [scores[i][row] for i, seen in enumerate(which) if seen != picture]
    assert sum(own) / len(own) > sum(other) / len(other) + 0.05
