"""Code blocks of the README and of `docs/`: each is run and succeeds, or says why not, and then names what exists."""

import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import call, create_autospec

import pytest
import typer
from transformers import TrainerCallback

import trl_darts
from tests.builders import letters_dataset, make_args, make_trainer
from tests.docs.blocks import PAGES, ROOT, Block, blocks_of, check
from trl_darts.cli import app
from trl_darts.engines.vllm_generation import SyncedGeneration
from trl_darts.policy import DecodePoint, LatencyProfile, PrefillPoint


CODE = [block for page in PAGES for block in blocks_of(page.name, page.read_text()) if block.language != "text"]
# What pages have imported before, where a block does not say it again; configs without a device are the CPU's.
NAMES = {
    "DARTSGRPOConfig": partial(trl_darts.DARTSGRPOConfig, use_cpu=True, bf16=False),
    "DARTSGRPOTrainer": trl_darts.DARTSGRPOTrainer,
    "TrainerCallback": TrainerCallback,
}


@pytest.fixture(scope="module")
def reader(model_dir, tmp_path_factory) -> Path:
    """A folder like a reader's: the repository's examples and configs, a latency file, and two recorded runs."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("examples", "configs"):
        (folder / name).symlink_to(ROOT / name)
    for schedule in ("grpo", "darts"):
        args = make_args(
            folder / "outputs" / schedule,
            schedule=schedule,
            num_generations=8,  # as on the pages, whose sweeps begin above it
            per_device_train_batch_size=32,
            save_rollout_trace=True,
            max_steps=2,
            learning_rate=0.0,
        )
        make_trainer(model_dir, args, train_dataset=letters_dataset(8)).train()
    grid = [(2**i, context) for i in range(6) for context in (128, 512)]
    points = [DecodePoint(size, length, size * length, 0.01 + 1e-4 * size, 0.0, (0.01,)) for size, length in grid]
    prompts = [PrefillPoint(128 * 2**i, 0.01 * (i + 1), 0.0) for i in range(4)]
    LatencyProfile.fit(points, prompts, {}).save(folder / "latency.json")
    return folder


def run_commands(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the installed scripts would run, in this process: a new one takes seconds to import what it needs."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line)
        (program,) = entry_points(group="console_scripts", name=words[0])
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            program.load()()
        assert not ended.value.code


@pytest.mark.parametrize("page", sorted({block.page for block in CODE if block.runs}))
def test_pages_run(page, reader, monkeypatch):
    monkeypatch.chdir(reader)
    names = dict(NAMES)
    for block in (block for block in CODE if block.page == page and block.runs):
        if block.language == "python":
            exec(compile(block.code, str(block), "exec"), names)
        else:
            run_commands(block.code, monkeypatch)


@pytest.mark.parametrize("block", CODE, ids=str)
def test_what_it_names_exists(block):
    check(block)


def commands(app: typer.Typer) -> Iterator[Callable]:
    yield from (command.callback for command in app.registered_commands)
    for group in app.registered_groups:
        yield from commands(group.typer_instance)


@pytest.mark.parametrize("command", commands(app), ids=lambda command: command.__name__)
def test_examples_of_help_can_be_copied(command):
    code = command.__doc__.partition("Example:")[2]
    assert code.strip().startswith("trl-darts ")
    check(Block(command.__name__, 1, "bash", code, False))


def test_the_callback_that_follows_a_cluster():
    (block,) = [block for block in CODE if "class FollowTheCluster" in block.code]
    generation = create_autospec(SyncedGeneration, instance=True)
    names = {**NAMES, "trainer": SimpleNamespace(vllm_generation=generation)}
    exec(block.code, names)
    for step in range(99, 103):
        names["FollowTheCluster"]().on_step_end(None, SimpleNamespace(global_step=step), None, model=None)
    assert generation.mock_calls == [
        call.add_server("http://10.0.0.7:8000"),
        call.remove_server("http://10.0.0.3:8000"),
    ]


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("bash", "trl-darts nothing"),
        ("bash", "trl-darts serve MODEL --no-such 1"),
        ("bash", "trl-darts grpo --config tiny_reasoner --max_stepz 3"),
        ("bash", "trl-darts config push a.yaml a/b --wihout nothing"),
        ("bash", "A=1 accelerate launch examples/train_grpo.py --config configs/two_gpu_server.yaml --schedul darts"),
        ("bash", "python examples/train_grpo.py --config configs/nothing.yaml"),
        ("bash", "python examples/tiny_reasoner/measure.py --nope"),
        ("bash", "make nothing"),
        ("bash", "pip install -e '.[nothing]'"),
        ("bash", "frobnicate"),
        ("python", "from trl_darts import Nothing"),
        ("python", "DARTSGRPOConfig(patience=2)"),
        ("python", "DARTSGRPOConfig.from_pretrained('x', max_num_generation=3)"),
        ("ruby", "puts 1"),
    ],
)
def test_what_does_not_exist_is_found(language, code):
    with pytest.raises(ValueError, match=r"page\.md:1"):
        check(Block("page.md", 1, language, code, False))


@pytest.mark.parametrize(
    "text", ["~~~bash\nx\n~~~\n", "> ```bash\n> x\n> ```\n", "```bash\nx\n", "```python title=''\nx\n```\n"]
)
def test_no_fence_is_passed_over(text):
    with pytest.raises(ValueError, match=r"page.md has a fence"):
        blocks_of("page.md", "```text\nout\n```\n\n" + text)
