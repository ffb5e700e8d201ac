"""
Builds models and a tokenizer reproducibly, without downloads.

All models have `VOCAB_SIZE` tokens, `eos` = 1 and `pad` = 0, for the tokenizer of [`make_tokenizer`].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)


VOCAB_SIZE = 128
PAD_ID, EOS_ID, UNK_ID = 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# (share of the completions, mean length in tokens): heavy-tailed, p50 36, p90 310, p99 1545.
HEAVY_TAIL = ((0.40, 20), (0.30, 60), (0.18, 180), (0.09, 500), (0.03, 1500))
# The same distribution at a fifth of the length, for tests with a real server: p50 8, p90 67, p99 394.
SHORT_HEAVY_TAIL = tuple((share, mean_length / 5) for share, mean_length in HEAVY_TAIL)
FIRST_CLASS_TOKEN, CLASS_SIZE = 99, 5  # filler tokens, which no text contains


def make_tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Builds a tokenizer of printable ASCII characters and newline (IDs 3 to 98), and fillers `<99>`, `<100>`, …"""
    tokens = ["<pad>", "<eos>", "<unk>", "\n", *map(chr, range(32, 127))]
    if vocab_size < len(tokens):
        raise ValueError(f"`vocab_size` ({vocab_size}) must be at least {len(tokens)}, one per printable character.")
    tokens += [f"<{index}>" for index in range(len(tokens), vocab_size)]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _config(hidden_size: int, num_layers: int, tied: bool, **sizes: int) -> Qwen2Config:
    defaults = {
        "vocab_size": VOCAB_SIZE,
        "intermediate_size": 64,
        "num_attention_heads": hidden_size // 32,  # vLLM's CPU attention needs heads of at least 32
        "num_key_value_heads": hidden_size // 64,
        "max_position_embeddings": 4096,
    }
    return Qwen2Config(
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        **(defaults | sizes),
    )


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out_dir: str | Path) -> Path:
    """Saves a model with its tokenizer."""
    model.generation_config.eos_token_id = EOS_ID
    model.generation_config.pad_token_id = PAD_ID
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    return Path(out_dir)


def make_random_model(
    out_dir: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    tied: bool = False,
    hidden_size: int = 64,
    num_layers: int = 2,
    seed: int = 0,
    **sizes: int,
) -> Path:
    """
    Saves a random float32 Qwen2 model with its tokenizer. Its next-token probabilities are nearly uniform. The state
    of torch's default generator is preserved.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(_config(hidden_size, num_layers, tied, **sizes)).to(torch.float32)
    return save_model(model, tokenizer, out_dir)


def make_random_moe(out_dir: str | Path, tokenizer: PreTrainedTokenizerBase, expert_size: int = 48) -> Path:
    """Saves a random float32 Qwen3 mixture of 8 experts. A size that is no multiple of 32 is padded on a CPU."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_experts": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    tokens = {"vocab_size": VOCAB_SIZE, "bos_token_id": None, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": expert_size, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**sizes, **heads, **tokens, **experts, max_position_embeddings=4096)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config).to(torch.float32)
    return save_model(model, tokenizer, out_dir)


def markov_transitions(
    follow: float = 0.97, classes: Sequence[tuple[float, float]] = HEAVY_TAIL, floor: float = 1e-6
) -> torch.Tensor:
    """
    Returns next-token probabilities of the Markov chain, `(VOCAB_SIZE, VOCAB_SIZE)`, row = last token.

    Class `c` has the five tokens from `99 + 5 c` on, which no text contains. After a token of a class, the chain ends
    with probability 1 / mean length. Otherwise it stays in the class: with probability `follow` it takes the next
    token in the class's cycle, else a random one. After any other token, such as the last one of a prompt, it enters
    class `c` with the class's share. For every prompt, the length of a completion, including `eos`, is therefore one
    more than a mixture of geometric distributions.
    """
    if FIRST_CLASS_TOKEN + CLASS_SIZE * len(classes) > VOCAB_SIZE:
        raise ValueError(f"`classes` ({len(classes)}) must be at most {(VOCAB_SIZE - 99) // CLASS_SIZE}.")
    starts = [FIRST_CLASS_TOKEN + CLASS_SIZE * index for index in range(len(classes))]
    entry = torch.full((VOCAB_SIZE,), floor)
    for start, (share, _) in zip(starts, classes, strict=True):
        entry[start : start + CLASS_SIZE] += share / CLASS_SIZE
    transitions = entry.repeat(VOCAB_SIZE, 1)
    for start, (_, mean_length) in zip(starts, classes, strict=True):
        for position in range(CLASS_SIZE):
            row = torch.full((VOCAB_SIZE,), floor)
            row[EOS_ID] += 1 / mean_length
            row[start : start + CLASS_SIZE] += (1 - 1 / mean_length) * (1 - follow) / CLASS_SIZE
            row[start + (position + 1) % CLASS_SIZE] += (1 - 1 / mean_length) * follow
            transitions[start + position] = row
    return transitions / transitions.sum(1, keepdim=True)  # (V, V)


def make_markov_model(
    out_dir: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    follow: float = 0.97,
    classes: Sequence[tuple[float, float]] = HEAVY_TAIL,
) -> Path:
    """Saves the chain of [`markov_transitions`], whose completions are heavy-tailed."""
    return save_model(chain_model(markov_transitions(follow, classes)), tokenizer, out_dir)


def chain_model(transitions: torch.Tensor, dtype: torch.dtype = torch.float32, **sizes: int) -> Qwen2ForCausalLM:
    """
    Builds a Qwen2 model that is a Markov chain with these next-token probabilities, `(V, V)`, row = last token.
    `sizes` are fields of its config.

    Attention and MLP have no effect, because their output projections are zero. Each embedding is a unit vector,
    RMSNorm scales it by a constant, and the LM head divides by the constant and holds the logarithms of the
    transition probabilities.
    """
    config = _config(sizes.pop("hidden_size", VOCAB_SIZE), sizes.pop("num_hidden_layers", 1), tied=False, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config).to(dtype)
    scale = (1 / config.hidden_size + config.rms_norm_eps) ** -0.5
    size = len(transitions)  # other tokens of a larger vocabulary are never sampled
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                param.zero_()
        embeddings, head = model.model.embed_tokens.weight, model.lm_head.weight
        embeddings.copy_(torch.eye(*embeddings.shape))
        head.fill_(math.log(1e-9) / scale)
        head[:size, :size] = (transitions.log() / scale).T.to(head)
    return model
