"""Log-probs computed from new tokens equal those of TRL's single forward pass, for each kind of attention."""

import random

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from trl_darts.streaming.forward import NewTokens, forward_new
from trl_darts.trl_compat import has_fused_lm_head


pytestmark = pytest.mark.skipif(not has_fused_lm_head(), reason="TRL before 1.15 has no fused LM head")

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SINKS = {"sliding_window": 16, "num_local_experts": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES)),
    "experts": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **EXPERTS)),
    "routed": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **EXPERTS, output_router_logits=True)),
    "sliding": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=16)),
    "soft-capped": (Gemma2ForCausalLM, Gemma2Config(**SIZES, sliding_window=16)),
    "sinks": (GptOssForCausalLM, GptOssConfig(**SIZES, **SINKS)),
}


def make_model(name, dtype=torch.float32, attention="sdpa"):
    from trl.trainer.utils import add_fused_lm_head

    torch.manual_seed(0)
    model_class, config = MODELS[name]
    config._attn_implementation = attention if name != "sinks" else "eager"
    model = model_class(config).to(dtype).eval()
    add_fused_lm_head(model, temperature=0.7)
    return model


def full_log_probs(model, prompts, completions):
    """Computes log-probs as TRL does: prompts padded on the left, completions on the right."""
    width, depth = max(map(len, prompts)), max(map(len, completions))
    ids = torch.zeros(len(prompts), width + depth, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start, end = width - len(prompt), width + len(completion)
        ids[row, start:end] = torch.tensor(prompt + completion)
        mask[row, start:end] = 1
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :width] = -100
    with torch.no_grad():
        output = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs
    return [output[row, width - 1 : width - 1 + len(completion)] for row, completion in enumerate(completions)]


def streamed_log_probs(model, prompts, completions, rng, max_chunk=14):
    """Computes log-probs in chunks of any length, in batches of any candidates."""
    texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    pasts, done, parts = [None] * len(texts), [0] * len(texts), [[] for _ in texts]
    while any(count < len(text) - 1 for count, text in zip(done, texts, strict=True)):
        left = [i for i, text in enumerate(texts) if done[i] < len(text) - 1]
        chosen = rng.sample(left, rng.randint(1, len(left)))
        ends = [min(len(texts[i]) - 1, done[i] + rng.randint(1, max_chunk)) for i in chosen]
        rows = [
            NewTokens(pasts[i], texts[i][done[i] : end], texts[i][done[i] + 1 : end + 1])
            for i, end in zip(chosen, ends, strict=True)
        ]
        with torch.no_grad():
            routes = hasattr(model.config, "output_router_logits")
            log_probs, caches = forward_new(model, rows, torch.device("cpu"), routes)
        for i, end, values, cache in zip(chosen, ends, log_probs, caches, strict=True):
            pasts[i], done[i] = cache, end
            parts[i].append(values)
    return [torch.cat(part)[len(prompt) - 1 :] for part, prompt in zip(parts, prompts, strict=True)]


def make_texts(rng, lengths):
    return [[rng.randrange(1, VOCABULARY) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize(("name", "attention"), [*((name, "sdpa") for name in MODELS), ("llama", "eager")])
def test_chunks_equal_one_pass(name, attention):
    rng = random.Random(0)
    model = make_model(name, attention=attention)
    prompts, completions = make_texts(rng, [5, 9, 1, 3]), make_texts(rng, [40, 7, 20, 61])
    full = full_log_probs(model, prompts, completions)
    for expected, streamed in zip(full, streamed_log_probs(model, prompts, completions, rng), strict=True):
        torch.testing.assert_close(streamed, expected, atol=1e-5, rtol=0)


def test_the_cache_is_a_copy():
    """A view would keep the batch alive, with the caches of all its candidates."""
    model = make_model("llama")
    with torch.no_grad():
        _, caches = forward_new(model, [NewTokens(None, [1, 2, 3]), NewTokens(None, [4])], torch.device("cpu"))
    keys = caches[1][0][0]
    assert keys.shape[0] == 1
    assert keys.untyped_storage().nbytes() == keys.nbytes
