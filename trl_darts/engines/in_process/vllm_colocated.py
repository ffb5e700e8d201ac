"""
Decodes with a vLLM engine inside the trainer's process, step by step.

TRL calls `LLM.generate` once per rollout, which returns when the last request has ended. [`SteppedLLM`] replaces it,
runs the same engine's loop, and applies the scheduler's decisions after each step. Sampling parameters, sleep mode,
tensor-parallel groups and images are still handled by TRL.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.sampling_params import RequestOutputKind

from ...scheduling import FinishReason
from ...trl_compat import replaced
from ..batch import PromptBatch
from ..sampling import RolloutSeed
from .hf_generate import PROGRESS_INTERVAL
from .share import Share, Slot


def keep_expanded_images(llm: Any) -> None:
    """
    Makes a colocated engine accept prompts with expanded image tokens, one for each part of an image.

    TRL passes expanded prompts. vLLM expects one token per image and expands the first one again: the model then
    answers another prompt than it is trained on, and log-probs are off by about 1, without any error. Remove this when
    TRL passes one token per image (https://github.com/huggingface/trl/issues/6294).
    """
    processor = llm.llm_engine.renderer.mm_processor
    if processor is None:  # a text-only model
        return
    expand = processor._apply_prompt_updates

    def expand_once(token_ids: list[int], updates: Mapping[str, Sequence[Any]]) -> tuple[list[int], Mapping[str, Any]]:
        placeholders = processor._find_mm_placeholders(token_ids, updates)
        if all(len(placeholders.get(modality, ())) == len(items) for modality, items in updates.items()):
            return token_ids, placeholders
        return expand(token_ids, updates)

    processor._apply_prompt_updates = expand_once


def decode_colocated(generation: Any, batch: PromptBatch, share: Share, own_slots: list[Slot]) -> None:
    """Decodes a share with TRL's generation, which calls `LLM.generate` once with the prompts of this process."""
    rows = [batch.row_of(slot.group_id, slot.index) for slot in own_slots]
    images = None if batch.images is None else [batch.images[row - batch.mine.start] for row in rows]
    with replaced(generation, "llm", SteppedLLM(generation.llm, share)):
        generation.generate([batch.rows[row] for row in rows], images, batch.num_generations)


class SteppedLLM:
    """`vllm.LLM` with a `generate` that decodes a share."""

    def __init__(self, llm: Any, share: Share) -> None:
        self._llm = llm
        self._share = share
        self._request_of: dict[int, str] = {}  # the engine's request ID of each running candidate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(self, prompts: Sequence[Any], sampling_params: Any, use_tqdm: bool = False) -> list[Any]:
        """
        Decodes until every candidate has ended or was aborted. `prompts` has one prompt per candidate, in the order of
        the share. The results are in the share; the returned list is empty.
        """
        engine = self._llm.llm_engine
        try:
            for slot, prompt in zip(self._share.slots, prompts, strict=True):
                params = sampling_params.clone()
                params.output_kind = RequestOutputKind.FINAL_ONLY
                if params.seed is not None:
                    params.seed = RolloutSeed(params.seed, self._share.rollout).of(slot.group_id, slot.index)
                self._request_of[slot.candidate_id] = engine.add_request(str(slot.candidate_id), prompt, params)
            self._decode(engine)
        finally:
            if self._request_of:  # after an error or Ctrl-C, so that the next rollout does not continue them
                engine.abort_request(list(self._request_of.values()), internal=True)
        return []

    def _decode(self, engine: Any) -> None:
        steps = 0
        while self._share.running and engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    self._end(output)
            steps += 1
            if self._share.needs_progress and steps % PROGRESS_INTERVAL == 0:
                for candidate_id in self._share.running:
                    self._share.progress(candidate_id, len(self._so_far(engine, candidate_id)[0]))
            for candidate_id in self._share.exchange():
                tokens, logprobs = self._so_far(engine, candidate_id)
                engine.abort_request([self._request_of.pop(candidate_id)], internal=True)
                self._share.end(candidate_id, tokens, logprobs, FinishReason.ABORT)

    def _end(self, output: Any) -> None:
        candidate_id, completion = int(output.request_id), output.outputs[0]
        self._request_of.pop(candidate_id)
        tokens = list(completion.token_ids)
        # A completion that vLLM's `repetition_detection` cut off counts as one at the length limit.
        reason = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "repetition": FinishReason.LENGTH}.get(
            completion.finish_reason
        )
        if reason is None:
            self._share.fail(candidate_id, f"vLLM ended it with {completion.finish_reason!r}")
        else:
            self._share.end(candidate_id, tokens, _sampled(tokens, completion.logprobs), reason)

    def _so_far(self, engine: Any, candidate_id: int) -> tuple[list[int], list[float] | None]:
        """Returns a running request's tokens from the engine's state. Partial outputs would cost time in each step."""
        state = engine.output_processor.request_states[self._request_of[candidate_id]]
        tokens = list(state.detokenizer.output_token_ids)
        return tokens, _sampled(tokens, state.logprobs_processor.logprobs)


def _sampled(tokens: Sequence[int], logprobs: Sequence[Any] | None) -> list[float] | None:
    """Returns the log-prob of each sampled token."""
    return None if logprobs is None else [entry[token].logprob for token, entry in zip(tokens, logprobs, strict=True)]
