"""Contracts of vLLM's engine, and of TRL's use of it in the trainer's process."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engines.scripted_vllm import NEVER, World, vllm


pytestmark = pytest.mark.vllm


def source(function: Callable[..., Any]) -> str:
    return re.sub(r"\s+", " ", inspect.getsource(function))


def hook(name: str, used_by: str = "engines/in_process/vllm_colocated.py") -> str:
    return f"`{name}` is not what it was. It is used by trl_darts/{used_by}."


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_trl_calls_generate_of_its_llm():
    from trl.generation.vllm_generation import VLLMGeneration, extract_logprobs

    text = source(VLLMGeneration.generate)
    call = "self.llm.generate(vllm_prompts, sampling_params=sampling_params, use_tqdm=False)"
    assert call in text, hook("VLLMGeneration.generate")
    assert '"n": 1' in text, hook("VLLMGeneration.generate (one completion per request)")
    assert extract_logprobs([]) == ([], []), hook("extract_logprobs (of no outputs)")
    from vllm import LLM

    assert {"prompts", "sampling_params", "use_tqdm"} <= set(parameters(LLM.generate)), hook("vllm.LLM.generate")
    assert parameters(vllm.SteppedLLM.generate) == ["self", "prompts", "sampling_params", "use_tqdm"]


def test_colocated_engines_have_seeds_of_their_own():
    """One for each group of processes that decode together. Otherwise their candidates of a prompt could be equal."""
    from trl.generation.vllm_generation import VLLMGeneration

    text = source(VLLMGeneration._init_vllm)
    assert "seed=accelerator.process_index // self.tensor_parallel_size" in text, hook(
        "VLLMGeneration._init_vllm (seed)"
    )


def test_what_a_seed_may_be():
    """`RolloutSeed` derives 62 bits, and -1 is none."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    for seed in (0, 2**62 - 1):
        asked = CompletionRequest(model="m", prompt=[1], seed=seed)
        assert asked.to_sampling_params(1, {}).seed == seed, hook("CompletionRequest.seed", "engines/sampling.py")
        torch.Generator().manual_seed(seed)
    assert vllm.SamplingParams(seed=-1).seed is None, hook("SamplingParams.seed", "engines/sampling.py")


def test_engine_methods():
    assert parameters(vllm.LLMEngine.add_request)[:4] == ["self", "request_id", "prompt", "params"], hook(
        "add_request"
    )
    assert source(vllm.LLMEngine.add_request).count("return req_id") == 2, hook("LLMEngine.add_request (internal ID)")
    assert parameters(vllm.LLMEngine.abort_request) == ["self", "request_ids", "internal"], hook(
        "LLMEngine.abort_request"
    )
    assert parameters(vllm.LLMEngine.step) == ["self"], hook("LLMEngine.step")
    assert parameters(vllm.LLMEngine.has_unfinished_requests) == ["self"], hook("LLMEngine.has_unfinished_requests")


def test_output_processor_keeps_what_a_request_has(tokenizer):
    """`request_states[internal ID]` has the tokens in `detokenizer` and the log-probs in `logprobs_processor`."""
    world = World([NEVER], tokenizer=tokenizer)
    params = vllm.SamplingParams(logprobs=0, output_kind=vllm.RequestOutputKind.FINAL_ONLY)
    name = world.engine.add_request("17", {"prompt_token_ids": [3, 4]}, params)
    assert name != "17", hook("LLMEngine.add_request (internal ID)")
    assert world.engine.step() == world.engine.step() == [], hook("RequestOutputKind.FINAL_ONLY")
    state = world.engine.output_processor.request_states[name]
    assert list(state.detokenizer.output_token_ids) == [10, 11], hook("RequestState.detokenizer.output_token_ids")
    entries = list(state.logprobs_processor.logprobs)
    assert [list(entry) for entry in entries] == [[10], [11]], hook("RequestState.logprobs_processor.logprobs")
    assert entries[1][11].logprob == pytest.approx(-0.02), hook("Logprob.logprob")
    world.engine.abort_request([name], internal=True)
    assert world.core.calls[-1] == ("abort", {17}), hook("LLMEngine.abort_request(internal=True)")
    assert not world.engine.has_unfinished_requests(), hook("LLMEngine.has_unfinished_requests")


def test_a_finished_output_has_the_name_that_we_gave_and_one_completion():
    world = World([2])
    world.engine.add_request(
        "17", {"prompt_token_ids": [3]}, vllm.SamplingParams(output_kind=vllm.RequestOutputKind.FINAL_ONLY)
    )
    world.engine.step()
    (output,) = world.engine.step()
    name = hook("RequestOutput")
    assert (output.request_id, output.finished, len(output.outputs)) == ("17", True, 1), name
    completion = output.outputs[0]
    assert (list(completion.token_ids), completion.finish_reason, completion.logprobs) == ([10, 11], "stop", None), (
        name
    )


def test_prompts_with_images_go_through_the_method_that_is_replaced():
    from trl.generation.vllm_generation import VLLMGeneration
    from vllm.multimodal.processing import BaseMultiModalProcessor
    from vllm.renderers import BaseRenderer

    assert "self.mm_processor" in source(BaseRenderer.__init__), hook("BaseRenderer.mm_processor")
    name = hook("BaseMultiModalProcessor._apply_prompt_updates")
    assert parameters(BaseMultiModalProcessor._apply_prompt_updates)[1:] == ["token_ids", "mm_prompt_updates"], name
    assert "self._apply_prompt_updates(" in source(BaseMultiModalProcessor._maybe_apply_prompt_updates), name
    assert parameters(BaseMultiModalProcessor._find_mm_placeholders)[1:] == ["new_token_ids", "mm_prompt_updates"], (
        hook("BaseMultiModalProcessor._find_mm_placeholders")
    )
    assert parameters(vllm.LLMEngine.reset_encoder_cache) == ["self"], hook("reset_encoder_cache", "generation.py")
    # Once TRL does it, ours can go.
    assert "reset_encoder_cache" not in source(VLLMGeneration), hook("VLLMGeneration.sync_weights", "generation.py")


def test_finish_reasons_of_vllm():
    from vllm.v1.engine import FINISH_REASON_STRINGS

    assert set(FINISH_REASON_STRINGS) == {"stop", "length", "abort", "error", "repetition"}, hook(
        "FINISH_REASON_STRINGS (a new one would fail the rollout)"
    )


def test_reload_of_a_colocated_model():
    """`LLM.llm_engine.model_executor.driver_worker.model_runner` has the model whose weights are loaded."""
    from trl.generation.vllm_generation import VLLMGeneration
    from vllm.model_executor.model_loader import reload
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    path = "self.llm.llm_engine.model_executor.driver_worker.model_runner.model"
    assert path in source(VLLMGeneration.sync_weights) + source(VLLMGeneration), hook(path, "generation.py")
    text = source(vllm.LLMEngine.__init__)
    assert "self.model_executor = self.engine_core.engine_core.model_executor" in text, hook(
        "LLMEngine.model_executor", "generation.py"
    )
    assert "self.driver_worker = " in source(UniProcExecutor._init_executor), hook("driver_worker", "generation.py")
    assert "getattr(self.worker, attr)" in source(WorkerWrapperBase.__getattr__), hook(
        "driver_worker", "generation.py"
    )
    assert "self.model_config = " in source(GPUModelRunner.__init__), hook("model_runner", "generation.py")
    name = hook("vllm.model_executor.model_loader.reload", "weights/reload.py")
    assert parameters(reload.initialize_layerwise_reload) == ["model"], name
    assert callable(reload.finalize_layerwise_reload), name
