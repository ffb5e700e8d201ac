"""
Makes the price list, and trains an agent from scratch on conversations that often go wrong. Takes minutes on a CPU.

    python examples/agent/pretrain.py [--steps 600]

The agent knows the form of a conversation. It often guesses a price instead of searching for it, searches for another
item, or guesses a result instead of calculating it: that is what GRPO is for.
"""

import argparse
import json
import random
import re
import sqlite3
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from task import DATABASE, MOST, draw_question, is_test, prices
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


CHECKPOINT = Path(__file__).parent / "checkpoint"
NUM_ITEMS, HIGHEST_PRICE = 60, 49
HIGHEST = 2 * MOST * HIGHEST_PRICE
FIRST, SECOND = ("Nor", "Bel", "Tam", "Ur", "Kes", "Vol", "Ri", "Dra"), ("van", "mir", "dol", "ka", "sen", "lit", "po")
GUESSES = 0.35  # share of steps at which it guesses, instead of using a tool
FLAWLESS = 0.7  # share of the steps
WRONG_SEARCH, NOTICES = 0.3, 0.5  # share of searches for another item, and of these that are noticed
SEARCH_OPEN = '<call>{"name": "search", "arguments": {"query": "'
CALCULATE_OPEN = '<call>{"name": "calculate", "arguments": {"expression": "'
CLOSE = '"}}</call>'
TEMPLATE = """
{%- for message in messages %}
    {{- message['role'] + ':' }}
    {%- if message['content'] %}{{ message['content'] }}{% endif %}
    {%- for call in message['tool_calls'] or [] %}
        {{- '<call>{"name": "' + call['function']['name'] + '", "arguments": ' }}
        {{- call['function']['arguments'] | tojson }}
        {{- '}</call>' }}
    {%- endfor %}
    {{- '<eos>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""
# With it, transformers finds tool calls in an answer.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant:",
    "fields": {
        "tool_calls": {
            "open": "<call>",
            "close_pattern": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": "<eos>", "content": "text"},
    },
}

Part = tuple[str, bool]  # a piece of a conversation, and whether the agent writes it


def make_database() -> None:
    """Makes a price list with full-text search."""
    rng = random.Random(0)
    names = rng.sample([a + b for a, b in product(FIRST, SECOND)], min(NUM_ITEMS, len(FIRST) * len(SECOND)))
    DATABASE.unlink(missing_ok=True)
    connection = sqlite3.connect(DATABASE)
    connection.execute("CREATE VIRTUAL TABLE prices USING fts5(text)")
    lines = [(f"{name} costs {rng.randint(2, HIGHEST_PRICE)}",) for name in names]
    connection.executemany("INSERT INTO prices VALUES (?)", lines)
    connection.commit()
    connection.close()


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a tokenizer with one token per character, and one per number, item and frame of a call."""
    frames = [" costs ", "user:", "assistant:", "tool:", "nothing", SEARCH_OPEN, CALCULATE_OPEN, CLOSE]
    words = [*sorted(prices()), *frames]
    numbers = map(str, range(10, 1000))
    tokens = ["<pad>", "<eos>", "<unk>", "\n", *map(chr, range(32, 127)), *numbers, *words]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    pattern = "|".join([*map(re.escape, words), r"[1-9][0-9]{0,2}", r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template, fast.response_template = TEMPLATE, RESPONSE_TEMPLATE
    return fast


def conversation(rng: random.Random, price_of: dict[str, int], is_flawed: bool) -> list[Part]:
    """Writes a conversation, which may go wrong if it is flawed."""

    def happens(share: float) -> bool:
        return is_flawed and rng.random() < share

    items = sorted(price_of)
    question = draw_question(rng, items)
    while is_test(question):
        question = draw_question(rng, items)
    parts: list[Part] = [("user:" + " + ".join(f"{count} {item}" for count, item in question) + "<eos>\n", False)]

    def says(text: str, answer: str | None = None) -> None:
        parts.append(("assistant:", False))
        parts.append((text + "<eos>", True))
        parts.append(("\n" if answer is None else f"\ntool:{answer}<eos>\n", False))

    believed = []
    for _, item in question:
        if happens(GUESSES):
            believed.append(rng.randint(2, HIGHEST_PRICE))
            continue
        other = rng.choice(items) if happens(WRONG_SEARCH) else item
        says(SEARCH_OPEN + other + CLOSE, f"{other} costs {price_of[other]}")
        if other != item and rng.random() < NOTICES:
            says(SEARCH_OPEN + item + CLOSE, f"{item} costs {price_of[item]}")
            other = item
        believed.append(price_of[other])
    counts = [count for count, _ in question]
    result = sum(count * price for count, price in zip(counts, believed, strict=True))
    if happens(GUESSES):
        says(str(rng.randint(10, HIGHEST)))
    else:
        terms = "+".join(f"{count}*{price}" for count, price in zip(counts, believed, strict=True))
        says(CALCULATE_OPEN + terms + CLOSE, str(result))
        says(str(result))
    return parts


def encode(tokenizer: PreTrainedTokenizerFast, parts: list[Part]) -> tuple[list[int], list[int]]:
    """Returns tokens and labels."""
    ids: list[int] = []
    labels: list[int] = []
    for text, own in parts:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += tokens
        labels += tokens if own else [-100] * len(tokens)
    return ids, labels


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Builds a random Qwen2."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(do_sample=True, **ends)
    return model


def train(model: Any, tokenizer: PreTrainedTokenizerFast, steps: int, batch_size: int, learning_rate: float) -> None:
    """Trains a language model on what the agent writes: without flaws at first, so that it learns to copy."""
    rng, price_of, begin = random.Random(1), prices(), time.monotonic()
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, steps, pct_start=0.1)
    for step in range(1, steps + 1):
        examples = [encode(tokenizer, conversation(rng, price_of, step > FLAWLESS * steps)) for _ in range(batch_size)]
        width = max(len(ids) for ids, _ in examples)
        ids = torch.tensor([own + [tokenizer.pad_token_id] * (width - len(own)) for own, _ in examples])
        labels = torch.tensor([own + [-100] * (width - len(own)) for _, own in examples])
        loss = model(ids, attention_mask=(ids != tokenizer.pad_token_id).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == 1:
            print(f"step {step} of {steps}, loss {loss.item():.3f}, {time.monotonic() - begin:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--output-dir", type=Path, default=CHECKPOINT)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.output_dir == CHECKPOINT or not DATABASE.exists():
        make_database()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    train(model, tokenizer, args.steps, args.batch_size, args.learning_rate)
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    print(json.dumps({"parameters": model.num_parameters(), "saved in": str(args.output_dir)}))


if __name__ == "__main__":
    main()
