"""
Code blocks of the README and of `docs/`.

Invariants:

- What a block names exists: modules, fields, arguments, commands, flags, files, targets.
- A block is run and succeeds, or says why it is not run.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from transformers import TrainerCallback

import trl_darts
from tests.builders import letters_dataset, make_args, make_trainer
from tests.docs.blocks import PAGES, ROOT, Block, blocks_of, commands, mistakes
from trl_darts.policy import DecodePoint, LatencyProfile, PrefillPoint


BLOCKS = [block for page in PAGES for block in blocks_of(page.name, page.read_text())]
RUN = {page.name: [b for b in BLOCKS if b.page == page.name and b.reason is None] for page in PAGES}
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
        output_dir = folder / "outputs" / schedule
        args = make_args(output_dir, schedule=schedule, save_rollout_trace=True, max_steps=4, learning_rate=0.0)
        make_trainer(model_dir, args, train_dataset=letters_dataset(8)).train()
    grid = [(2**i, context) for i in range(6) for context in (128, 512)]
    points = [DecodePoint(size, length, size * length, 0.01 + 1e-4 * size, 0.0, (0.01,)) for size, length in grid]
    prompts = [PrefillPoint(128 * 2**i, 0.01 * (i + 1), 0.0) for i in range(4)]
    LatencyProfile.fit(points, prompts, {}).save(folder / "latency.json")
    return folder


def run_shell(block: Block, folder: Path) -> None:
    """As it stands, until the first command that fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", "-euo", "pipefail", "-c", block.code]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{block}:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_what_it_names_exists(block):
    assert mistakes(block) == []


@pytest.mark.parametrize("page", [page for page, blocks in RUN.items() if blocks])
def test_pages_run(page, reader, monkeypatch):
    monkeypatch.chdir(reader)
    names = dict(NAMES)
    for block in RUN[page]:
        if block.language == "python":
            exec(compile(block.code, str(block), "exec"), names)
        elif block.language == "bash":
            run_shell(block, reader)


def test_most_pages_have_something_to_run():
    assert sum(len(blocks) for blocks in RUN.values()) >= 12
    assert len(BLOCKS) >= 25


@pytest.mark.parametrize(
    ("language", "code", "words"),
    [
        ("bash", "trl-darts serve MODEL --no-such 1", "trl-darts serve has no flag --no-such"),
        ("bash", "trl-darts nothing", "trl-darts has no command nothing"),
        (
            "bash",
            "for s in a; do\n    trl-darts report x \\\n        --stp 1\ndone",
            "trl-darts report has no flag --stp",
        ),
        ("bash", "A=1 accelerate launch examples/train_grpo.py --schedul darts", "has no flag --schedul"),
        ("bash", "python examples/train_grpo.py --config configs/nothing.yaml", "configs/nothing.yaml does not exist"),
        ("bash", "make nothing", "make has no target nothing"),
        ("bash", "pip install -e '.[plots,nothing]'", "there is no extra nothing"),
        ("bash", "frobnicate", "frobnicate is no command that is known here"),
        ("python", "from trl_darts import Nothing", "trl_darts has no Nothing"),
        ("python", "DARTSGRPOConfig(patience=2)", "DARTSGRPOConfig has no argument patience"),
        ("python", "DARTSGRPOTrainer(modell='x')", "DARTSGRPOTrainer has no argument modell"),
        ("ruby", "puts 1", "`ruby` is no language that is checked"),
    ],
)
def test_a_mistake_is_found(language, code, words):
    (mistake,) = mistakes(Block("page.md", 1, language, code, None))
    assert words in mistake


def test_flags_after_two_dashes_are_vllms():
    block = Block("page.md", 1, "bash", "trl-darts serve MODEL --port 1 -- --gpu-memory-utilization 0.8", None)
    assert mistakes(block) == []


def test_broken_syntax_is_found():
    with pytest.raises(subprocess.CalledProcessError):
        list(commands("for x in a; do"))
    with pytest.raises(SyntaxError):
        mistakes(Block("page.md", 1, "python", "f(a=1, ...)", None))


def test_marks_and_lines():
    text = "Text\n\n<!-- not run: no GPU -->\n```bash\nmake test\n```\n\n```\nout\n```\n"
    text += "- a\n\n    ```python\n    x = 1\n    ```\n"
    marked, run = blocks_of("page.md", text)
    assert (marked.reason, str(marked), marked.code) == ("no GPU", "page.md:4", "make test\n")
    assert (run.reason, str(run), run.code) == (None, "page.md:13", "x = 1\n")


def test_a_mark_needs_a_reason():
    (block,) = blocks_of("page.md", "<!-- not run: -->\n```bash\nmake test\n```\n")
    assert block.reason is None
