"""
Builds small language models and Markov chains. Vision-language models are in `tests/trl_parity/vlms.py`.

All have a token per printable character, `<eos>` = 1, `<pad>` = 0, and a chat template with images and tools. Language
models end after about `mean_length` tokens. Each is saved reproducibly as a float32 checkpoint with its tokenizer, for
transformers and vLLM.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.models import EOS_ID, PAD_ID
from benchmarks.tool_calls import make_chat_tokenizer


VOCAB_SIZE = 128  # of every model; tokenizers may use fewer
HIDDEN_SIZE = 32


def make_lm(out_dir: Path) -> Path:
    """
    Saves a random Qwen3 whose answers have about six tokens. Not a Qwen2, for which `AutoTokenizer` of transformers
    5.17 replaces the saved pre-tokenizer and loses spaces.
    """
    tokenizer = make_chat_tokenizer()
    model = random_model("Qwen3ForCausalLM", text_config("qwen3"), seed=0)
    set_odds(model, tokenizer, {EOS_ID: 1 / 6})
    return save(out_dir, model, tokenizer)


def make_chain(
    out_dir: Path, tokenizer: PreTrainedTokenizerBase, after: Mapping[str, Mapping[str, float]], floor: float = 1e-6
) -> Path:
    """
    Saves a Markov chain, whose next token only depends on the last one. `after` has the odds of the next tokens by the
    last one; `""` represents all that are not named, such as the last one of a prompt. `floor` is the odds of all
    other next tokens.
    """
    ids = tokenizer.convert_tokens_to_ids
    table = torch.full((VOCAB_SIZE, VOCAB_SIZE), floor)  # row = last token
    for word, odds in sorted(after.items()):  # "" first
        rows = ids(word) if word else slice(None)
        table[rows] = floor
        for follower, weight in odds.items():
            table[rows, ids(follower)] = weight
    config = text_config("llama", hidden_size=VOCAB_SIZE, num_hidden_layers=1)
    model = random_model("LlamaForCausalLM", config, seed=0)
    scale = (1 / VOCAB_SIZE + config.rms_norm_eps) ** -0.5
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                param.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB_SIZE))
        model.lm_head.weight.copy_(((table / table.sum(1, keepdim=True)).log() / scale).T)
    return save(out_dir, model, tokenizer)


def text_options(kind: str, hidden_size: int = HIDDEN_SIZE, **fields: Any) -> dict[str, Any]:
    """Returns the fields of a small text model's config."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": hidden_size // 32,  # vLLM's CPU attention needs heads of at least 32
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,  # so that the context has an effect
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        **({"head_dim": 32} if kind.startswith("qwen3") else {}),
        **fields,
    }


def text_config(kind: str, **fields: Any) -> transformers.PretrainedConfig:
    """Returns a small text model's config."""
    return getattr(transformers, f"{kind.capitalize()}Config")(**text_options(kind, **fields))


def random_model(class_name: str, config: transformers.PretrainedConfig, seed: int) -> PreTrainedModel:
    """Builds a random model. Preserves the state of torch's default generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return getattr(transformers, class_name)(config).to(torch.float32)


def set_odds(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, odds: Mapping[int, float]) -> None:
    """
    Gives some tokens approximate probabilities in every context. Special tokens other than `<eos>` are never sampled.

    The first hidden dimension is 1.5 for every token in all layers, so that it hardly depends on the context after the
    last norm, and a token's weight for it is a constant in its logit.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    never = {*tokenizer.all_special_ids, *range(len(tokenizer), VOCAB_SIZE)} - {*odds}
    others = [token for token in range(VOCAB_SIZE) if token not in never and token not in odds]
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                param[..., 0, :] = 0.0
        head[:, 0] = 0.0
        embedding[:, 0] = 1.5
        hidden = model.model(torch.tensor([tokenizer("any words")["input_ids"]])).last_hidden_state[0, -1]  # (H,)
        rest = (head[others] @ hidden).logsumexp(0) - math.log(1 - sum(odds.values()))
        for token in (*never, *odds):
            logit = rest + math.log(odds.get(token, 1e-9))
            head[token, 1:] = 0.0
            head[token, 0] = logit / hidden[0]


def tokenizer_of(
    state: Mapping[str, Any], chat_template: str, extra_special_tokens: Mapping[str, str] | None = None
) -> PreTrainedTokenizerBase:
    """Builds a tokenizer from the state of a `tokenizers.Tokenizer`."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        chat_template=chat_template,
        extra_special_tokens=dict(extra_special_tokens or {}),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def save(out_dir: Path, model: PreTrainedModel, processing_class: Any) -> Path:
    """Saves a model with its tokenizer or processor."""
    if model.can_generate():
        model.generation_config.eos_token_id = EOS_ID
        model.generation_config.pad_token_id = PAD_ID
    model.save_pretrained(out_dir)
    processing_class.save_pretrained(out_dir)
    return Path(out_dir)
