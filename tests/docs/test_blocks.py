"""
Code blocks of the README and of `docs/`.

Invariants:

- No block is passed over, however its fence is written, and no command hides in a block of text.
- What a block names exists: modules, attributes, arguments, commands, flags, values, files, targets.
- A block is run and succeeds, or says why it is not run.
"""

import ast
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import call, create_autospec

import pytest
from transformers import TrainerCallback

import trl_darts
from tests.builders import letters_dataset, make_args, make_trainer
from tests.docs.blocks import DATA, PAGES, Block, blocks_of, mistakes
from tests.docs.names import name_mistakes
from tests.docs.shell import ROOT, command_mistakes, commands
from trl_darts.generation import RolloutGeneration
from trl_darts.policy import DecodePoint, LatencyProfile, PrefillPoint


BLOCKS = [block for page in PAGES for block in blocks_of(page.name, page.read_text())]
CODE = [block for block in BLOCKS if block.language not in DATA]
RUN = {page.name: [block for block in CODE if block.page == page.name and block.runs] for page in PAGES}
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
        args = make_args(
            output_dir,
            schedule=schedule,
            num_generations=8,  # as on the pages, whose sweeps begin above it
            per_device_train_batch_size=32,
            save_rollout_trace=True,
            max_steps=4,
            learning_rate=0.0,
        )
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


def test_most_pages_with_code_run_some():
    assert len(CODE) >= 25
    assert sum(map(bool, RUN.values())) > len({block.page for block in CODE}) / 2


def follow(code: str) -> list:
    """What a callback of a page asks of a generation that knows the real one's methods, in steps 99 to 102."""
    generation = create_autospec(RolloutGeneration, instance=True)
    names = {**NAMES, "trainer": SimpleNamespace(vllm_generation=generation)}
    exec(code, names)
    callback = names["FollowTheCluster"]()
    for step in range(99, 103):
        callback.on_step_end(None, SimpleNamespace(global_step=step), None, model=None)
    return generation.mock_calls


def test_the_callback_that_follows_a_cluster():
    (block,) = [block for block in CODE if "class FollowTheCluster" in block.code]
    added, removed = follow(block.code)
    assert added == call.add_server("http://10.0.0.7:8000")
    assert removed == call.remove_server("http://10.0.0.3:8000")
    with pytest.raises(AttributeError, match="add_servr"):
        follow(block.code.replace("add_server", "add_servr"))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("trl-darts serve MODEL --no-such 1", "No such option: --no-such"),
        ("trl-darts serve MODEL --weight-sync carrier-pigeon", "`weight_sync` ('carrier-pigeon') must be one of"),
        ("trl-darts serve MODEL --port", "Option '--port' requires an argument"),
        ("trl-darts serve MODEL --port x", "Invalid value for '--port'"),
        ("trl-darts serve MODEL -- --port 1", "`--port` after `--` contradicts"),
        ("trl-darts nothing", "No such command 'nothing'"),
        ("trl-darts config nothing", "No such command 'nothing'"),
        ("cd repo && trl-darts nothing --x", "No such command 'nothing'"),
        ("export A=1; trl-darts nothing", "No such command 'nothing'"),
        ("make test | tee y && trl-darts nothing", "No such command 'nothing'"),
        ("for s; do trl-darts nothing $s; done", "No such command 'nothing'"),
        ("A=$(trl-darts nothing)", "No such command 'nothing'"),
        ('git log "$(trl-darts nothing)"', "a command inside of a word, are not checked"),
        ("trl-darts report x > y", "redirection, and"),
        ("for s in a; do\n    trl-darts report x \\\n        --stp 1\ndone", "No such option: --stp"),
        ("for s in grpo darst; do trl-darts simulate --schedule $s; done", "`--schedule` ('darst') must be one"),
        ("trl-darts simulate --sweep nothing=1", "`--sweep` ('nothing=1') must be NAME=VALUE"),
        ("trl-darts simulate --schedule foo", "`--schedule` ('foo') must be one or several of"),
        ("trl-darts simulate --schedule grpo darst", "`darst` is one argument too many"),
        ("trl-darts profile localhost", "`url` ('localhost') must be an address"),
        ("trl-darts config push configs/tiny_reasoner.yaml a/b --without nothing", "has no field nothing"),
        ("accelerate nothing", "nothing is no command that is known here"),
        (
            "accelerate launch --confg_file configs/accelerate/ddp.yaml examples/train_grpo.py",
            "unrecognized arguments: --confg_file",
        ),
        ("A=1 accelerate launch examples/train_grpo.py --schedul darts", "arguments: --schedul darts"),
        ("python examples/train_grpo.py --schedule foo", "`schedule` ('foo') must be one of"),
        ("python examples/train_grpo.py --num_longest few", "argument --num_longest/--num-longest: invalid int value"),
        ("python examples/train_grpo.py --config configs/nothing.yaml", "configs/nothing.yaml does not exist"),
        ("python benchmarks/faults.py --kills 1 --nope", "benchmarks/faults.py has no flag --nope"),
        ("python -m trl_darts.nothing", "trl_darts.nothing is no module"),
        ("python -m trl_darts.cli nothing", "No such command 'nothing'"),
        ("make nothing", "make: there is no target nothing"),
        ("pip install -e '.[plots,nothing]'", "there is no extra nothing"),
        ("frobnicate", "frobnicate: is no command that is known here"),
    ],
)
def test_a_mistake_in_a_command_is_found(code, words):
    (mistake,) = mistakes(Block("page.md", 1, "bash", code, None))
    assert words in mistake


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("from trl_darts import Nothing", "trl_darts has no Nothing"),
        ("from trl_darts.nothing import x", "No module named 'trl_darts.nothing'"),
        ("import trl_darts.nothing", "No module named 'trl_darts.nothing'"),
        ("import trl_darts.policy as p\np.Nothing", "p has no Nothing"),
        ("DARTSGRPOConfig(patience=2)", "DARTSGRPOConfig has no argument patience"),
        ("import trl_darts\ntrl_darts.DARTSGRPOConfig(patience=2)", "trl_darts.DARTSGRPOConfig has no argument"),
        ("DARTSGRPOConfig.from_pretrianed('x')", "DARTSGRPOConfig has no from_pretrianed"),
        ("DARTSGRPOConfig.from_pretrained('x', max_num_generation=3)", "no argument max_num_generation"),
        ("DARTSGRPOTrainer(modell='x')", "DARTSGRPOTrainer has no argument modell"),
        ("args.push_config_to_hubb()", "args has no push_config_to_hubb"),
        ("a = DARTSGRPOConfig.from_pretrained('x')\nprint(a.patience)", "a has no patience"),
        ("args.push_config_to_hub('x', privat=True)", "args.push_config_to_hub has no argument privat"),
        ("def f(state):\n    trainer.vllm_generatoin.add_server()", "trainer has no vllm_generatoin"),
        ("vllm_servr_base_url = 'http://127.0.0.1:8000'", "names nothing that is checked"),
    ],
)
def test_a_mistake_in_python_is_found(code, words):
    (mistake,) = mistakes(Block("page.md", 1, "python", code, None))
    assert words in mistake


@pytest.mark.parametrize(
    "code",
    [
        "args = parse()\nargs.anything",
        "def f(args):\n    args.anything\nargs.max_num_generations",
        "trainer.vllm_generation.engine.anything",
        "import numpy as trl_darts\ntrl_darts.anything\nargs.seed",
    ],
)
def test_what_is_not_known_is_no_mistake(code):
    assert set(name_mistakes(ast.parse(code))) <= {
        "names nothing that is checked: use it as an argument, or in a call"
    }


@pytest.mark.parametrize(
    "code",
    [
        "trl-darts serve MODEL --port 1 -- --gpu-memory-utilization 0.8",  # the last one is vLLM's
        "trl-darts simulate --schedule 'grpo,darts' --sweep long_end_patience=none,2",
        "for a in 1 2; do for s in grpo darts; do trl-darts simulate --steps $a --schedule $s; done; done",
        "CUDA_VISIBLE_DEVICES=0 accelerate launch -m trl_darts.cli simulate",
        "python benchmarks/faults.py --kills=3  # and no freezes",
    ],
)
def test_what_is_right_is_no_mistake(code):
    assert command_mistakes(code) == []


@pytest.mark.parametrize(("language", "code"), [("", "$ x"), ("text", "out\n  trl-darts nothing\n")])
def test_commands_are_not_hidden_as_text(language, code):
    (mistake,) = mistakes(Block("page.md", 1, language, code, None))
    assert "is a command in a block of text" in mistake


@pytest.mark.parametrize("language", ["ruby", "shell-session", "python title='a.py'", "python "])
def test_other_languages_are_not_passed_over(language):
    (block,) = blocks_of("page.md", f"Text\n\n```{language}\nputs 1\n```\n")
    (mistake,) = mistakes(block)
    assert f"`{language}` is no language that is checked" in mistake


@pytest.mark.parametrize(
    "text",
    [
        "~~~bash\ntrl-darts nothing\n~~~\n",
        "> ```bash\n> trl-darts nothing\n> ```\n",
        "- ```bash\n  trl-darts nothing\n  ```\n",
        "1. ```bash\n   trl-darts nothing\n   ```\n",
        "````bash\ntrl-darts nothing\n````\n",
        "```bash\ntrl-darts nothing\n  ```\n",
        "```bash\ntrl-darts nothing\n",
    ],
)
def test_no_fence_is_passed_over(text):
    with pytest.raises(ValueError, match=r"page.md: \d fences, but \d blocks"):
        blocks_of("page.md", "```\nout\n```\n\n" + text)


def test_broken_syntax_is_found():
    with pytest.raises(subprocess.CalledProcessError):
        list(commands("for x in a; do"))
    with pytest.raises(SyntaxError):
        mistakes(Block("page.md", 1, "python", "f(a=1, ...)", None))


def test_marks_and_lines():
    text = "Text\n\n<!-- not run: no GPU -->\n```bash\nmake test\n```\n\n```\nout\n```\n"
    text += "- a\n\n    ```python\n    x = 1\n    ```\n"
    marked, data, run = blocks_of("page.md", text)
    assert (marked.reason, str(marked), marked.code) == ("no GPU", "page.md:4", "make test\n")
    assert (run.reason, str(run), run.code) == (None, "page.md:13", "x = 1\n")
    assert [marked.runs, data.runs, run.runs] == [False, False, True]


def test_a_mark_needs_a_reason():
    (block,) = blocks_of("page.md", "<!-- not run: -->\n```bash\nmake test\n```\n")
    assert block.reason is None
