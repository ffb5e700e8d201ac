"""
Trains the agent with GRPO: conversations with a search and a calculator, on a vLLM server.

    trl-darts serve examples/agent/checkpoint &
    python examples/agent/train.py [--schedule darts] [--steps 40] [--seed 0]

Prints the accuracy on held-out questions before and after, and the seconds of the training.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from task import TOOLS, accuracy_reward, make_dataset
from transformers import PreTrainedTokenizerFast

from trl_darts import DARTSGRPOConfig, DARTSGRPOTrainer


CHECKPOINT = Path(__file__).parent / "checkpoint"


def make_trainer(server: str, schedule: str, steps: int, seed: int, output_dir: str, **agent: Any) -> DARTSGRPOTrainer:
    """Returns a trainer of the checkpoint, with `tools`, an `environment_factory`, or a `rollout_func`."""
    args = DARTSGRPOConfig(
        output_dir=output_dir,
        schedule=schedule,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=server,
        num_generations=8,
        per_device_train_batch_size=64,  # 8 questions × 8
        max_completion_length=200,  # of a whole conversation
        max_tool_calling_iterations=6,
        tool_timeout_s=None if "rollout_func" in agent else 10.0,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_steps=steps,
        per_device_eval_batch_size=64,
        num_generations_eval=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        seed=seed,
    )
    return DARTSGRPOTrainer(
        model=str(CHECKPOINT),
        args=args,
        train_dataset=make_dataset(64 * 8, seed),
        eval_dataset=make_dataset(128, 0, "test"),
        # `AutoTokenizer` takes Qwen2's class for a Qwen2, with its own idea of words.
        processing_class=PreTrainedTokenizerFast.from_pretrained(CHECKPOINT),
        **{"reward_funcs": accuracy_reward, **agent},
    )


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser of the options."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="http://0.0.0.0:8000")
    parser.add_argument("--schedule", default="darts", choices=["darts", "grpo"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", default="outputs/agent")
    return parser


def run(own: argparse.Namespace, **agent: Any) -> None:
    """Trains, and prints the accuracy before and after."""
    trainer = make_trainer(own.server, own.schedule, own.steps, own.seed, own.output_dir, **agent)
    before = trainer.evaluate()["eval_reward"]
    begin = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - begin
    after = trainer.evaluate()["eval_reward"]
    print(f"Held-out accuracy {before:.2f} before, {after:.2f} after {own.steps} steps in {seconds:.0f} s.")


def main() -> None:
    run(make_parser(__doc__).parse_args(), tools=TOOLS)


if __name__ == "__main__":
    main()
