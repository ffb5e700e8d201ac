# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-darts[math,peft]"]
# ///
"""
Train with GRPO and shaped rollouts: what `trl-darts grpo` launches, as a script for `accelerate launch`.

    accelerate launch examples/train_grpo.py --config configs/tiny_reasoner.yaml

With a vLLM server (see docs/servers.md), add:

    --use_vllm --vllm_mode server --vllm_server_base_url http://127.0.0.1:8000

After Ctrl-C, the same command with `--resume_from_checkpoint true` goes on from the last checkpoint. Other recipes are
in `configs` (see docs/recipes.md), and `--config hf://org/name` takes one of the Hub. Beside what TRL's script takes,
`--dataset_name tiny_reasoner` makes the data set of examples/tiny_reasoner, and `--prompt_column` and
`--solution_column` bring a data set into the form of TRL's math rewards. `--help` shows the arguments that are neither
TRL's nor transformers', and `--help-all` shows all.

Its header names what it needs, for `uv run` and jobs on the Hub. With a wheel that is not published (`make wheel`):

    uv run --find-links dist examples/train_grpo.py --config configs/tiny_reasoner.yaml
"""

from trl_darts.cli.grpo import run_script


if __name__ == "__main__":
    run_script()
