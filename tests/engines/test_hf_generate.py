"""The stopping criterion inside transformers' `generate`."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.policies import make_policies
from trl_darts.engines.in_process.hf_generate import SchedulerCriterion, stopping_criterion
from trl_darts.engines.in_process.share import MainLink, Share
from trl_darts.scheduling import CandidateState, FinishReason, GroupPlan, Scheduler


EOS, PAD = 1, 0


@pytest.fixture(scope="module")
def model(markov_model_dir):
    return AutoModelForCausalLM.from_pretrained(markov_model_dir, dtype=torch.float32).eval()


def generate(model, criterion, prompts, max_new_tokens=200, seed=0):
    """Calls `generate` once for all rows, then cuts after the first end-of-sequence token, as TRL does."""
    torch.manual_seed(seed)
    ids = torch.tensor(prompts)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=True,
        top_k=0,
        eos_token_id=EOS,
        pad_token_id=PAD,
        disable_compile=True,
    )
    with stopping_criterion(model, criterion):
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    completions = []
    for row in output[:, ids.shape[1] :].tolist():
        completions.append(row[: row.index(EOS) + 1] if EOS in row else row)
    return completions


def rollout(model, counts, schedule="darts", max_new_tokens=200, seed=0, **kwargs):
    policies = make_policies(schedule, 4, **kwargs)
    main = MainLink(Scheduler(policies, 4), [GroupPlan(i, n) for i, n in enumerate(counts)])
    share = Share(main.slots[0], main, main.scheduler.needs_progress)
    criterion = SchedulerCriterion(share, [EOS])
    prompts = [[60 + slot.group_id, 61] for slot in share.slots]
    completions = generate(model, criterion, prompts, max_new_tokens, seed)
    criterion.finish(completions)
    share.exchange()
    result = main.result()
    for candidate in (c for group in result.groups for c in group.candidates):
        tokens, logprobs = share.rows[candidate.candidate_id]
        assert len(tokens) == candidate.length
        assert logprobs is None
        candidate.tokens = tokens  # the scheduler has none
    return result, completions, criterion


def test_pruned_groups_end_the_loop(model):
    natural = rollout(model, [8, 8], tail_pruning=False)[2].steps
    result, _, criterion = rollout(model, [8, 8])
    assert criterion.steps < natural
    candidates = [c for group in result.groups for c in group.candidates]
    assert criterion.steps == max(c.length for c in candidates)
    for group in result.groups:
        lengths = sorted(row.length for row in group.rows)
        complete = [row for row in group.rows if row.finish_reason is FinishReason.STOP]
        if len(complete) == 4:
            assert all(c.length >= lengths[-1] for c in group.candidates if c.state is CandidateState.ABORTED)
    assert any(c.state is CandidateState.ABORTED for c in candidates)


def test_tokens_of_the_scheduler_are_those_of_generate(model):
    result, completions, criterion = rollout(model, [6, 7, 5])
    candidates = {c.candidate_id: c for group in result.groups for c in group.candidates}
    assert len(candidates) == len(completions)
    for slot, completion in zip(criterion.share.slots, completions, strict=True):
        candidate = candidates[slot.candidate_id]
        assert candidate.tokens == completion[: candidate.length]
        if candidate.finish_reason is FinishReason.STOP:
            assert candidate.tokens == completion
            assert candidate.tokens[-1] == EOS


def test_rows_at_the_limit_are_truncated(model):
    result, _, _ = rollout(model, [8, 8, 8], max_new_tokens=5, tail_pruning=False)
    candidates = [c for group in result.groups for c in group.candidates]
    truncated = [c for c in candidates if c.finish_reason is FinishReason.LENGTH]
    assert truncated
    assert all(c.length == 5 and EOS not in c.tokens for c in truncated)
