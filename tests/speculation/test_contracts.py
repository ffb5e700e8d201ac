"""Contracts of vLLM. `test_server.py` has those that need a running server."""

import inspect
import re

import pytest
import torch


pytestmark = pytest.mark.vllm


def source(thing):
    return re.sub(r"\s+", " ", inspect.getsource(thing))


def hook(name):
    return f"`{name}` is not what it was. It is used by trl_darts/speculation/vllm_patches.py."


def test_runner():
    from vllm.v1.spec_decode import custom_class_proposer  # its file is how `serve` knows that there is one
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert "user_class(vllm_config)" in source(custom_class_proposer), hook("create_custom_proposer")
    parameters = list(inspect.signature(GPUModelRunner.propose_draft_token_ids).parameters)
    assert parameters[:3] == ["self", "scheduler_output", "sampled_token_ids"], hook("propose_draft_token_ids")
    assert list(inspect.signature(GPUModelRunner._input_fits_in_drafter).parameters)[1:] == ["common_attn_metadata"]
    text = source(GPUModelRunner.sample_tokens)
    assert "input_fits_in_drafter = self._input_fits_in_drafter(" in text, hook("_input_fits_in_drafter")
    assert "self._draft_token_ids = self.propose_draft_token_ids(" in text, hook("propose_draft_token_ids")
    for name in ("req_ids", "num_tokens_no_spec", "num_prompt_tokens", "token_ids_cpu"):
        assert f"self.{name}" in source(InputBatch) or f"def {name}(self)" in source(InputBatch), hook(name)


def test_seeded_requests_that_are_discarded():
    """If vLLM no longer rewinds their generators on a CPU, `spare_generators` can go."""
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    bookkeeping, sample = (
        source(GPUModelRunner._bookkeeping_sync),
        source(inspect.unwrap(GPUModelRunner.sample_tokens)),
    )
    assert "self.discard_request_mask.np[:num_reqs]" in bookkeeping, hook("discard_request_mask")
    assert "gen = self.input_batch.generators.get(int(i))" in bookkeeping, hook("InputBatch.generators")
    assert "gen.set_offset(gen.get_offset() - 4)" in bookkeeping, hook("_bookkeeping_sync")
    for name in ("self._sample(", "self._bookkeeping_sync("):  # both inside
        assert name in sample, hook("sample_tokens")
    assert "self.discard_request_mask.np[" in source(GPUModelRunner._prepare_inputs), hook("discard_request_mask")
    assert "generators=self.generators" in source(InputBatch._make_sampling_metadata), hook("generators, not a copy")
    with pytest.raises(RuntimeError, match="offset"):
        torch.Generator().get_offset()


def test_worker():
    from vllm.v1.worker.gpu_worker import Worker

    assert {"reload_weights", "finish_weight_update"} <= vars(Worker).keys(), hook("Worker.finish_weight_update")


def test_cpu_kernel():
    from vllm.utils import cpu_triton_utils

    parameters = list(inspect.signature(cpu_triton_utils._expand_kernel_impl).parameters)
    expected = ["output", "input_val", "cu_num_tokens", "replace_from", "replace_to", "MAX_NUM_TOKENS"]
    assert parameters == expected, hook("_expand_kernel_impl")
