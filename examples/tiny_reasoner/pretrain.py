"""
Trains the tiny reasoner from scratch on the writer's texts and saves a checkpoint. Takes minutes on a CPU.

    python examples/tiny_reasoner/pretrain.py --output_dir examples/tiny_reasoner/checkpoint

The loss is that of a language model on the responses. Truncated texts have no end, so the model also learns to
continue.
"""

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from trl_darts.tiny_reasoner.task import ALPHABET, FAMILIES, draw_problem
from trl_darts.tiny_reasoner.writer import MAX_TEXT_CHARS, write_solution


CHECKPOINT_DIR = Path(__file__).parent / "checkpoint"
MAX_POSITIONS = 1024
HARD_SHARE = 0.25  # share of hard problems, which the model solves less often
IGNORED = -100
WARMUP = 0.03

Example = tuple[list[int], list[int]]  # input IDs and labels


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a tokenizer with one token per character."""
    specials = ("<pad>", "<eos>", "<unk>")
    vocab = {token: i for i, token in enumerate((*specials, *ALPHABET))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, hidden_size: int, num_layers: int) -> Qwen2ForCausalLM:
    """Builds a random Qwen2 model with untied embeddings and heads of size 32."""
    num_heads = hidden_size // 32
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=1,  # because `generate` on a CPU is limited by the cache
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def draw_examples(tokenizer: PreTrainedTokenizerFast, num_examples: int, rng: random.Random) -> list[Example]:
    """Draws the writer's solutions to training prompts."""
    to_id = tokenizer.get_vocab()
    examples: list[Example] = []
    while len(examples) < num_examples:
        difficulty = "hard" if rng.random() < HARD_SHARE else "easy"
        problem = draw_problem(rng, FAMILIES[len(examples) % len(FAMILIES)], difficulty)
        if problem.split != "train":
            continue
        text, finished = write_solution(problem, rng)
        prompt_ids = [to_id[char] for char in problem.prompt]
        response_ids = [to_id[char] for char in text] + [tokenizer.eos_token_id] * finished
        examples.append((prompt_ids + response_ids, [IGNORED] * len(prompt_ids) + response_ids))
    return examples


def batches(
    tokenizer: PreTrainedTokenizerFast, batch_tokens: int, rng: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields endless batches with similar numbers of tokens, each with texts of similar length."""
    while True:
        examples = sorted(draw_examples(tokenizer, 8192, rng), key=lambda example: len(example[0]))
        cuts: list[list[Example]] = [[]]
        for example in examples:
            if (len(cuts[-1]) + 1) * len(example[0]) > batch_tokens:
                cuts.append([])
            cuts[-1].append(example)
        rng.shuffle(cuts)
        for rows in cuts:
            width = max(len(ids) for ids, _ in rows)
            input_ids = [ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows]
            labels = [labels + [IGNORED] * (width - len(labels)) for _, labels in rows]
            yield torch.tensor(input_ids), torch.tensor(labels)


def train(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace, rng: random.Random
) -> None:
    """Trains the model in place with AdamW and a cosine schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.learning_rate, total_steps=args.num_steps, pct_start=WARMUP, cycle_momentum=False
    )
    start, running = time.perf_counter(), 0.0
    model.train()
    for step, (input_ids, labels) in zip(
        range(1, args.num_steps + 1), batches(tokenizer, args.batch_tokens, rng), strict=False
    ):
        # Padding is on the right and excluded from the loss, so that causal attention needs no mask.
        loss = model(input_ids=input_ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        running += loss.item()
        if step % 200 == 0:
            print(f"step {step:5d}  loss {running / 200:.4f}  {time.perf_counter() - start:4.0f} s", flush=True)
            running = 0.0
    model.eval()


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=CHECKPOINT_DIR, help="directory of the checkpoint")
    parser.add_argument("--num_steps", type=int, default=4000, help="optimizer steps")
    parser.add_argument("--batch_tokens", type=int, default=4096, help="tokens per step, padding included")
    parser.add_argument("--learning_rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--hidden_size", type=int, default=128, help="width, a multiple of 32")
    parser.add_argument("--num_layers", type=int, default=2, help="depth")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and texts")
    parser.add_argument("--num_threads", type=int, default=1, help="CPU threads; their number affects rounding")
    args = parser.parse_args()
    for name in ("num_steps", "num_layers", "num_threads"):
        if getattr(args, name) < 1:
            parser.error(f"`{name}` ({getattr(args, name)}) must be at least 1.")
    if args.hidden_size < 32 or args.hidden_size % 32:
        parser.error(f"`hidden_size` ({args.hidden_size}) must be a positive multiple of 32, the size of a head.")
    if args.batch_tokens < MAX_POSITIONS:
        parser.error(f"`batch_tokens` ({args.batch_tokens}) must be at least {MAX_POSITIONS}, one long text.")
    if args.learning_rate <= 0:
        parser.error(f"`learning_rate` ({args.learning_rate}) must be positive.")
    if args.output_dir.is_file():
        parser.error(f"`output_dir` ({args.output_dir}) is a file. Name a directory.")
    return args


def main() -> None:
    """Trains and saves the model."""
    assert MAX_TEXT_CHARS + 64 < MAX_POSITIONS
    args = parse_args()
    torch.set_num_threads(args.num_threads)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, args.hidden_size, args.num_layers)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    train(model, tokenizer, args, random.Random(args.seed))
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    print(f"saved to {args.output_dir}")


if __name__ == "__main__":
    main()
