"""Our patches of vLLM, on stubs. `test_server.py` has the real vLLM."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trl_darts.speculation import vllm_patches
from trl_darts.speculation.drafter import SuffixDrafter
from trl_darts.speculation.vllm_patches import (
    fix_expand,
    notify_drafter,
    pass_batch,
    spare_generators,
    spares_generators,
)


def forgetful(output, values, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):
    right(output.to(torch.int64), values.to(torch.int64), cu_num_tokens, replace_from, replace_to)


def right(output, values, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):
    start = 0
    for value, end in zip(values.tolist(), cu_num_tokens.tolist(), strict=True):
        output[start:end] = replace_to if value == replace_from else value
        start = end


@pytest.mark.parametrize("kernel", [forgetful, right])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_values_are_repeated_whatever_the_kernel_does(kernel, dtype):
    module = SimpleNamespace(_expand_kernel_impl=kernel)
    fix_expand(module)
    fix_expand(module)
    output = torch.full((6,), 99, dtype=dtype)
    values = torch.tensor([3, 0, 5], dtype=dtype)
    module._expand_kernel_impl(output, values, torch.tensor([2, 2, 6], dtype=torch.int32), 5, 1, MAX_NUM_TOKENS=128)
    assert output.tolist() == [3, 3, 1, 1, 1, 1]
    assert vllm_patches._loses_result(kernel) == (kernel is forgetful)


@pytest.mark.parametrize("for_training", [True, False])
def test_our_drafter_gets_the_batch_and_others_what_vllm_gives_them(for_training, monkeypatch):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", str(int(for_training)))
    drafter = SuffixDrafter.__new__(SuffixDrafter)
    drafter.draft = lambda batch, sampled: ("ours", batch, sampled)

    class GPUModelRunner:
        input_batch = "batch"
        drafter = object()
        speculative_config = SimpleNamespace(method="eagle")

        def propose_draft_token_ids(self, scheduler_output, sampled_token_ids, *rest):
            return "vLLM's"

        def _input_fits_in_drafter(self, metadata):
            return False

    module = SimpleNamespace(GPUModelRunner=GPUModelRunner)
    pass_batch(module)
    pass_batch(module)
    runner = GPUModelRunner()
    assert runner._input_fits_in_drafter("metadata") is False
    runner.speculative_config = SimpleNamespace(method="ngram")
    assert runner._input_fits_in_drafter("metadata") is for_training
    assert runner.propose_draft_token_ids("scheduled", [[1]], "more") == "vLLM's"
    runner.drafter = drafter
    assert runner.propose_draft_token_ids("scheduled", [[1]], "more") == ("ours", "batch", [[1]])
    assert runner._input_fits_in_drafter("metadata") is True
    assert runner._input_fits_in_drafter(None) is False


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_discarded_tokens_are_sampled_without_the_requests_generator(device):
    class GPUModelRunner:
        def __init__(self, fails=False):
            self.device = torch.device(device)
            self.input_batch = SimpleNamespace(generators={0: "a", 2: "c", 3: "d"}, num_reqs=3)
            self.discard_request_mask = SimpleNamespace(np=np.array([False, True, True, True]))  # 3 is an old row's
            self.fails = fails

        def sample_tokens(self, grammar_output):
            if self.fails:
                raise KeyError(grammar_output)
            return dict(self.input_batch.generators), grammar_output

    module = SimpleNamespace(GPUModelRunner=GPUModelRunner)
    assert not spares_generators(GPUModelRunner())
    spare_generators(module)
    spare_generators(module)
    runner = GPUModelRunner()
    assert spares_generators(runner)
    every = {0: "a", 2: "c", 3: "d"}
    assert runner.sample_tokens("grammar") == ({0: "a", 3: "d"} if device == "cpu" else every, "grammar")
    assert runner.input_batch.generators == every
    failing = GPUModelRunner(fails=True)
    with pytest.raises(KeyError):
        failing.sample_tokens("grammar")
    assert failing.input_batch.generators == every


def test_new_weights_are_a_new_policy():
    drafter = SuffixDrafter.__new__(SuffixDrafter)
    policies = []
    drafter.new_policy = lambda: policies.append("new")

    class Worker:
        model_runner = SimpleNamespace(drafter=drafter)

        def reload_weights(self):
            return "answer"

        def finish_weight_update(self):
            pass

    notify_drafter(Worker)
    assert Worker().reload_weights() == "answer"
    Worker().finish_weight_update()
    assert policies == ["new", "new"]
    Worker.model_runner = SimpleNamespace()  # a server without drafts
    assert Worker().reload_weights() == "answer"
