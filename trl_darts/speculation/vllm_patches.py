"""Patches that let vLLM draft with [`SuffixDrafter`] and sample correctly on a CPU. Applied by our plugin."""

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any


def pass_batch(module: ModuleType) -> None:
    """
    Passes the whole batch to our drafter. vLLM passes a custom drafter neither request IDs nor prompt lengths.

    vLLM also stops drafting for the whole batch once one sequence is near the model's length limit: every sequence
    then drafts token 0 only, and on a CPU the server crashes. Our drafter and `ngram` check the limit per sequence.
    `ngram` is only patched in a server for training: other vLLMs of the environment load this plugin too.
    """
    from .drafter import SuffixDrafter

    for_training = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"

    runner = module.GPUModelRunner
    propose, fits = runner.propose_draft_token_ids, runner._input_fits_in_drafter
    if hasattr(propose, "__wrapped__"):
        return

    @functools.wraps(propose)
    def propose_draft_token_ids(
        self: Any, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kw: Any
    ) -> Any:
        if isinstance(self.drafter, SuffixDrafter):
            return self.drafter.draft(self.input_batch, sampled_token_ids)
        return propose(self, scheduler_output, sampled_token_ids, *args, **kw)

    @functools.wraps(fits)
    def input_fits_in_drafter(self: Any, metadata: Any) -> bool:
        if isinstance(self.drafter, SuffixDrafter) or (for_training and self.speculative_config.method == "ngram"):
            return metadata is not None
        return fits(self, metadata)

    runner.propose_draft_token_ids = propose_draft_token_ids
    runner._input_fits_in_drafter = input_fits_in_drafter


def spare_generators(module: ModuleType) -> None:
    """
    Lets a seeded request be prefilled in parts on a CPU, also after a preemption (seen to fail with vLLM 0.31.0).

    vLLM samples after each part, discards the token, and rewinds the request's generator. torch's CPU generators can't
    be rewound, and the engine dies. Here, these tokens are sampled without the request's generator, so that there is
    nothing to rewind. Remove this with the last supported version of vLLM that needs it.
    """
    sample = module.GPUModelRunner.sample_tokens
    if hasattr(sample, "trl_darts_spares"):
        return

    @functools.wraps(sample)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.device.type != "cpu":
            return sample(self, *args, **kwargs)
        generators = self.input_batch.generators
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        spared = {row: generators.pop(row) for row in discarded if row in generators}
        try:
            return sample(self, *args, **kwargs)
        finally:
            generators.update(spared)

    sample_tokens.trl_darts_spares = True  # type: ignore[attr-defined]
    module.GPUModelRunner.sample_tokens = sample_tokens


def spares_generators(runner: Any) -> bool:
    """Whether a model runner has this patch."""
    return hasattr(runner.sample_tokens, "trl_darts_spares")


def fix_expand(module: ModuleType) -> None:
    """
    Replaces a kernel of vLLM's CPU build that loses its result (seen with 0.31.0): unless the output is `int64`, it
    fills a temporary copy. Temperature, top-k and top-p of drafted tokens then stay uninitialized, and sampling is
    wrong.

    The bug is tested for before first use. Remove this with the last supported version that has it.
    """
    original = module._expand_kernel_impl
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def expand(
        output: Any, values: Any, cu_num_tokens: Any, replace_from: Any, replace_to: Any, *args: Any, **kwargs: Any
    ) -> None:
        import torch

        if not _loses_result(original):
            original(output, values, cu_num_tokens, replace_from, replace_to, *args, **kwargs)
            return
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        output.copy_(torch.repeat_interleave(torch.where(values == replace_from, replace_to, values), counts))

    module._expand_kernel_impl = expand  # type: ignore[attr-defined]


@functools.cache
def _loses_result(expand: Callable[..., Any]) -> bool:
    """Whether the kernel fails to write 0.5, 0.5 and 2.0 to a float tensor."""
    import torch

    output = torch.full((3,), -1.0)
    expand(output, torch.tensor([0.5, 2.0]), torch.tensor([2, 3], dtype=torch.int32), 0, 1, MAX_NUM_TOKENS=128)
    return output.tolist() != [0.5, 0.5, 2.0]


def notify_drafter(worker: Any) -> None:
    """Notifies our drafter after each weight update, by any method."""
    for name in {"reload_weights", "finish_weight_update", "add_lora"} & vars(worker).keys():
        setattr(worker, name, _then_new_policy(getattr(worker, name)))


def _then_new_policy(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def updated(self: Any, *args: Any, **kwargs: Any) -> Any:
        from .drafter import SuffixDrafter

        answer = update(self, *args, **kwargs)
        drafter = getattr(self.model_runner, "drafter", None)
        if isinstance(drafter, SuffixDrafter):
            drafter.new_policy()
        return answer

    return updated
