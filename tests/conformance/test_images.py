"""
Pictures follow their rows on vLLM, and tell prompts of the same words apart. On transformers:
`tests/trl_parity/test_vlm.py`.
"""

from __future__ import annotations

import pytest

from benchmarks.vllm_server import start_vllm_server
from tests.conformance.images import NUM_PICTURES, STEPS, scenarios
from tests.conformance.process import run_scenarios
from tests.conformance.vlm import make_idefics3
from tests.trl_parity.vlms import make_vlm


pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", params=["vllm_colocated", "vllm_server"])
def results(request, tmp_path_factory):
    model_dir = tmp_path_factory.mktemp("models") / "vlm"
    out = tmp_path_factory.mktemp("results")
    if request.param == "vllm_colocated":
        make_idefics3(model_dir)
        return run_scenarios(scenarios, request.param, model_dir, out)
    make_vlm(model_dir, kind="llava")
    options = {"max_model_len": 256, "model_impl": "transformers", "enable_scale_out": True}
    with start_vllm_server(model_dir, wait=False, **options) as server:
        return run_scenarios(scenarios, request.param, model_dir, out, server.base_url)


def test_prompts_of_the_same_words_are_told_apart_by_their_pictures(results):
    assert results["tracked"] == NUM_PICTURES
    totals = [float(line["darts/budget/total"]) for line in results["log"] if "darts/budget/total" in line]
    assert len(totals) == STEPS
    assert max(totals) > 16  # over-provisioned


def test_answers_are_to_the_own_picture(results):
    """Their log-probs are those of the trainer, which sees each row's picture."""
    worst = [float(line[key]) for line in results["log"] for key in line if key.endswith("logp_difference/max")]
    assert len(worst) == STEPS
    assert max(worst) < 1e-3
