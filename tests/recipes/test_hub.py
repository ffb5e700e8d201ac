"""Tests pushing configs to a stub of the Hub and pulling them, and that private values are not published."""

import copy
import os
import pickle
import re
import runpy
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants
from trl import TrlParser
from typer.testing import CliRunner

from tests.recipes.stand_in import TOKEN
from trl_darts import DARTSGRPOConfig
from trl_darts.cli import app
from trl_darts.errors import ConfigurationError
from trl_darts.recipes.fields import ARGUMENTS, actions
from trl_darts.recipes.hub import (
    CARD_NAME,
    CONFIG_NAME,
    WITHHELD,
    HubError,
    check_published,
    pull_config,
    push_config,
    resolve_config_arguments,
)
from trl_darts.recipes.recipe import read_fields


ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs" / "tiny_reasoner.yaml"
REPO = "me/recipe"
CPU = {"use_cpu": True, "bf16": False}
PUBLIC = {"model_name_or_path": "Qwen/Qwen2.5-3B", "dataset_name": "org/math", "num_generations": 4}
STAYS = {"output_dir": "/data/jane/out", "vllm_server_base_url": "http://10.1.2.3:8000", "hub_token": TOKEN}
PUSH = ["push", str(RECIPE), REPO, "--without", "model_name_or_path", "--without", "reward_funcs"]
# A few lines that expand to 10¹⁰ values.
ALIASES = b"a: &a [x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (name, name, b",".join([b"*%c" % (name - 1)] * 10)) for name in b"bcdefghijk"
)


def card_of(hub, branch="main"):
    return hub.repositories[REPO].files(branch)[CARD_NAME].decode()


def parsed(words):
    """Parses arguments like the training script."""
    words, origin = resolve_config_arguments(words)
    return TrlParser(ARGUMENTS).parse_args_and_config(words)[1], origin


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, "x") for name in ("output_dir", "resume_from_checkpoint", "latency_curve", "vllm_server_host")],
        *[(name, "x") for name in ("hub_token", "vllm_api_key", "push_to_hub", "report_to", "deepspeed", "env")],
        ("generation_kwargs", {"custom_generate": "evil/code"}),
        ("chat_template_kwargs", {"a": [{"api_key": "x"}]}),
        ("model_init_kwargs", {"trust_remote_code": True}),
        ("datasets", [{"path": "json", "data_files": "passwd.json"}]),
        ("model_name_or_path", "examples/tiny_reasoner/checkpoint"),
        ("dataset_name", "https://example.com/data"),
        ("dataset_name", "../data"),
        ("reward_funcs", ["accuracy_reward", "os.system"]),
        ("attn_implementation", "evil/kernel"),
    ],
)
def test_what_is_refused(name, value):
    with pytest.raises(ConfigurationError) as refused:
        check_published({name: value})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("system_prompt", r"Put your final answer within \boxed{}: A:\frac{1}{2} and/or ~1/2 m/s. /no_think"),
        ("system_prompt", "<think>\n</think> Answer key: photosynthesis. https://huggingface.co/papers/2605.30859"),
        ("vllm_structured_outputs_regex", r"(?:key|token)=\d{1,12}[a-z]+://\S+ sk-\w"),
        ("attn_implementation", "kernels-community/flash-attn2"),
        ("reward_funcs", ["accuracy_reward", "get_soft_overlong_punishment"]),
        ("accelerator_config", {"gradient_accumulation_kwargs": {"sync_each_batch": True}}),
        ("generation_kwargs", {"stop": ["</answer>"], "min_tokens": 2}),
        ("stream_batch_tokens", 8192),
    ],
)
def test_no_false_alarms(name, value):
    check_published({name: value})


def test_fields_that_sound_like_a_machine_or_an_account_are_withheld():
    """Fails for a new field of TRL, until it is listed as withheld or harmless."""
    risky = re.compile(r"dir|path|url|host|_port|file|token$|secret|password|key|hub|repo|_kwargs|code")
    harmless = {"model_name_or_path", "reward_model_name_or_path", "report_to", "generation_kwargs"}
    harmless |= {"lr_scheduler_kwargs", "gradient_checkpointing_kwargs", "chat_template_kwargs"}
    found = {name for name in actions() if risky.search(name)} - harmless
    assert found >= {"output_dir", "hub_token", "push_to_hub", "vllm_server_base_url", "trust_remote_code"}
    kept_here = {name for name in found if any(fnmatch(name, pattern) for pattern in WITHHELD)}
    assert found == kept_here, "withhold it in hub.py, or list it here"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_our_recipes_can_be_published(hub, path):
    local = [name for name in ("model_name_or_path", "reward_funcs") if path.stem == "tiny_reasoner"]
    pushed = push_config(read_fields(path), REPO, without=local)
    assert {*pushed.left_out} <= {*local, "output_dir", "report_to", "vllm_server_base_url"}
    assert pull_config(REPO).data == {k: v for k, v in read_fields(path).items() if k not in pushed.left_out}


def test_push_and_pull(hub):
    pushed = push_config(PUBLIC | STAYS, REPO, private=True, measured="2 GPUs: 1.3 times as fast")
    pulled = pull_config(REPO)
    assert pulled.data == PUBLIC
    assert pulled.address == f"hf://{REPO}@{pushed.commit}"
    assert pushed.left_out == [*STAYS]
    assert hub.repositories[REPO].private
    assert len(hub.repositories[REPO].commits) == 2  # the first one created the repository
    assert "num_generations: 4" in hub.sent  # file contents are checked
    assert not any(kept in hub.sent for kept in ("jane", "10.1.2.3", TOKEN))
    assert "`output_dir`, `vllm_server_base_url`, `hub_token`" in card_of(hub)
    assert "2 GPUs: 1.3 times as fast" in card_of(hub)


def test_commands_of_the_card_work(hub, tmp_path):
    push_config(CPU | {"dataset_name": "tiny_reasoner"}, REPO)
    push_config(
        CPU | {"num_generations": 4, "system_prompt": "```\nUse `x`.\n~~~", "prompt_column": "q"},
        REPO,
        revision="wide",
    )
    card = card_of(hub, "wide")
    block = re.search(r"```bash\n(.*?)```", card, re.DOTALL)[1]
    words = shlex.split(block.replace("\\\n", " "))[3:]
    needed = ["model_name_or_path", "dataset_name", "reward_funcs"]  # without which the script can't train
    assert words[-6:] == [word for field in needed for word in (f"--{field}", field.upper())]
    (name,) = re.findall(r'from_pretrained\("(.*?)"', card)
    config = DARTSGRPOConfig.from_pretrained(name)
    assert config.num_generations == 4
    assert (
        config.origin == parsed(["--config", words[1]])[1] == f"hf://{REPO}@{hub.repositories[REPO].branches['wide']}"
    )
    config_block = re.search(r"~~~~~yaml\n(.*?)~~~~~", card, re.DOTALL)[1]
    assert yaml.safe_load(config_block) == pull_config(name).data


def test_a_commit_stays_what_it_was(hub):
    first = push_config(PUBLIC, REPO).commit
    push_config(PUBLIC | {"num_generations": 16}, REPO)
    assert [pull_config(name).data["num_generations"] for name in (f"{REPO}@{first}", REPO)] == [4, 16]
    with pytest.raises(ConfigurationError, match=r"`revision` \('main'\) must be unset if the name has one"):
        pull_config(f"{REPO}@{first}", revision="main")


def test_a_file_edited_on_the_web_page_is_pulled_with_a_warning(hub, caplog):
    push_config(PUBLIC, REPO)
    pull_config(REPO)
    assert caplog.text == ""
    hub.add(REPO, {CONFIG_NAME: b"num_generations: 64\n"})
    assert pull_config(REPO).data == {"num_generations": 64}
    assert "is not the file that its card was written for" in caplog.text
    hub.add("me/bare", {CONFIG_NAME: b"num_generations: 64\n"})  # without a card
    assert pull_config("me/bare").data == {"num_generations": 64}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"trust_remote_code: true\n", "loads code"),
        (b"seed: !!python/object/apply:os.system ['touch ran']", "must be plain YAML: could not determine a constr"),
        (ALIASES + b"learning_rate: *k\n", "no aliases"),
        (b"seed: 1\n" + b"#\n" * 40_000, "at most 65536 bytes"),
        (b"[" * 20_000, "nested too deeply"),
        (b"a: b: " + TOKEN.encode(), "mapping values are not allowed here in line 1"),
    ],
    ids=["code", "tag", "aliases", "large", "deep", "key in an error"],
)
def test_a_hostile_config_is_refused(hub, tmp_path, monkeypatch, content, words):
    monkeypatch.chdir(tmp_path)
    hub.add(REPO, {CONFIG_NAME: content, CARD_NAME: b"---\ndarts_config_sha256: [x]\n%s---\n" % ALIASES})
    with pytest.raises(ConfigurationError, match=words) as refused:
        pull_config(REPO)
    assert len(str(refused.value)) < 500
    assert "\n" not in str(refused.value)
    assert TOKEN not in str(refused.value)
    assert list(tmp_path.glob("ran")) == []


def test_another_card_is_not_overwritten(hub, tmp_path):
    hub.add(REPO, {CARD_NAME: b"---\nlicense: mit\n---\n# A model"})
    for revision in (None, "config"):
        with pytest.raises(HubError, match=r"has another README.md, such as a model's"):
            push_config(PUBLIC, REPO, revision=revision)
    assert not any(CONFIG_NAME in files for files in hub.repositories[REPO].commits.values())
    (tmp_path / CARD_NAME).write_text("# A model")
    with pytest.raises(HubError, match=r"has another README.md"):
        DARTSGRPOConfig(**CPU).save_pretrained(tmp_path)


def test_private_is_no_promise_for_a_public_repository(hub):
    commit = push_config(PUBLIC, REPO).commit
    with pytest.raises(HubError, match=r"^`private` \(True\) must hold for 'me/recipe', which exists and is public"):
        push_config(PUBLIC | {"seed": 1}, REPO, private=True)
    assert hub.repositories[REPO].branches == {"main": commit}


def test_what_the_hub_refuses_is_one_line(hub, monkeypatch, tmp_path):
    push_config(PUBLIC, REPO)
    commit = pull_config(REPO).address
    asked = {"Repository Not Found": ("me/nothing", {}), "Revision Not Found": (REPO, {"revision": "v9"})}
    hub.add("org/model", {CARD_NAME: b"# A model"})
    for words, (name, options) in {**asked, CONFIG_NAME: ("org/model", {})}.items():
        with pytest.raises(HubError, match=rf"^`repo_id` \('{name}'\).*{words}.*`hf auth login`") as refused:
            pull_config(name, **options)
        assert "\n" not in str(refused.value)
    with pytest.raises(ConfigurationError, match=r"`repo_id` \('a/b/c'\) must be a name on the Hub"):
        pull_config("a/b/c")
    with monkeypatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_wrong")
        with pytest.raises(HubError, match=r"Invalid credentials.*`hf auth login`") as refused:
            push_config(PUBLIC, REPO)
        assert "hf_wrong" not in str(refused.value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert pull_config(REPO).address == commit  # from the cache
    for ask in (lambda: pull_config("me/other"), lambda: push_config(PUBLIC, REPO)):
        with pytest.raises(HubError, match=r"`HF_HUB_OFFLINE`") as refused:
            ask()
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"generation_batch_size": 64, "per_device_train_batch_size": 4, "num_generations": 16},
        {"max_num_generations": 12, "target_redundancy": 1.25, "long_end_patience": None, "length_ema": 0.25},
        {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}, "loss_type": "grpo"},
    ],
)
def test_what_is_set_is_saved_and_comes_back(tmp_path, given):
    config = DARTSGRPOConfig(str(tmp_path / "out"), **CPU, **given)
    assert config.save_pretrained(tmp_path) == ["output_dir"]
    saved = yaml.safe_load((tmp_path / CONFIG_NAME).read_text())
    assert saved.keys() == {**CPU, **given}.keys()
    assert str(tmp_path) not in (tmp_path / CARD_NAME).read_text()
    for place in (tmp_path, tmp_path / CONFIG_NAME):
        again = DARTSGRPOConfig.from_pretrained(place, output_dir=config.output_dir)
        assert again.to_dict() == config.to_dict()
        assert again.origin is None


def test_fields_of_the_script_are_named_and_a_typo_is_refused(tmp_path, caplog):
    path = tmp_path / "config.yaml"
    path.write_text("num_generations: 4\nuse_cpu: true\nmodel_name_or_path: Qwen/Qwen2.5-3B\n")
    assert DARTSGRPOConfig.from_pretrained(path, num_generations=8).num_generations == 8
    assert "also sets {'model_name_or_path': 'Qwen/Qwen2.5-3B'}" in caplog.text
    path.write_text("num_generation: 4\n")
    with pytest.raises(ConfigurationError, match=r"`num_generation` is not a field .* `num_generations`"):
        DARTSGRPOConfig.from_pretrained(path)


def test_an_object_on_the_hub(hub):
    config = DARTSGRPOConfig(output_dir="outputs/mine", **CPU, schedule="sorted", learning_rate=3e-6)
    pushed = config.push_config_to_hub(REPO, revision="v1")
    assert pushed.left_out == ["output_dir"]
    again = DARTSGRPOConfig.from_pretrained(f"hf://{REPO}@v1", output_dir="outputs/theirs", seed=7)
    assert (again.output_dir, again.seed, again.schedule) == ("outputs/theirs", 7, "sorted")
    for copied in (again, copy.deepcopy(again), pickle.loads(pickle.dumps(again))):
        assert copied.origin == f"hf://{REPO}@{pushed.commit}"
    assert REPO not in again.to_json_string() + str(again)  # it is not a field
    assert config.push_to_hub is False  # the trainer's field is unchanged


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_command_line_with_a_config_of_the_hub(hub, tmp_path, monkeypatch, caplog, rank):
    commit = push_config(CPU | {"num_generations": 4, "learning_rate": "3e-6"}, REPO).commit
    monkeypatch.setenv("RANK", rank)
    config, origin = parsed(["--config", f"hf://{REPO}", "--output_dir", str(tmp_path), "--num_generations", "8"])
    assert (config.num_generations, config.learning_rate, origin) == (8, 3e-6, f"hf://{REPO}@{commit}")
    assert (f"`--config hf://{REPO}` is hf://{REPO}@{commit}." in caplog.text) == (rank == "0")
    for words in (["--config", "local.yaml"], ["--run_name", "hf://me/recipe"], ["--config"], []):
        assert resolve_config_arguments(words) == (words, None)


def test_a_command_in_a_process_of_its_own_and_what_it_pushed(hub, tmp_path, monkeypatch, capsys):
    """The command finds the stub through the environment."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "trl_darts.cli", "config", *PUSH]
    pushed = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert pushed.returncode == 0, pushed.stderr
    assert pushed.stdout.strip() == f"{REPO}@{hub.repositories[REPO].branches['main']}"
    assert "Left out, to be set where the run is started: model_name_or_path, reward_funcs, rep" in pushed.stderr
    words = ["config", "pull", pushed.stdout.strip(), "--output", str(tmp_path / "mine.yaml")]
    pulled = CliRunner().invoke(app, words)
    assert pulled.exit_code == 0, pulled.stderr
    assert (tmp_path / "mine.yaml").read_bytes() == hub.repositories[REPO].files("main")[CONFIG_NAME]
    hub.add(REPO, {CONFIG_NAME: b"num_generations: 7\nper_device_train_batch_size: 8\nuse_cpu: true\n"})
    monkeypatch.syspath_prepend(ROOT / "examples")  # as Python does for a script
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", "--config", f"hf://{REPO}", "--output_dir", "out"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "examples" / "train_grpo.py"), run_name="__main__")
    assert "must be divisible by `num_generations` (7)" in capsys.readouterr().err


@pytest.mark.parametrize("words", [PUSH, ["pull", REPO]])
def test_commands_without_network_end_before_anything_is_loaded(hub, monkeypatch, words):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "trl_darts.recipes.hub", None)  # would load TRL, so its import fails here
    result = CliRunner().invoke(app, ["config", *words])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith(f"Error: `repo_id` ('{REPO}') can't be looked up: http://127.0.0.1:1 can't be ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["push", str(RECIPE), REPO], "`reward_funcs` ('trl_darts.tiny_reasoner.task.accuracy_reward') must not load"),
        (["pull", "me/typo", "--output", "new.yaml"], "`num_generation` is not a field of"),
        (["pull", "me/ok", "--output", str(RECIPE)], "must be a new file, and exists"),
    ],
)
def test_errors_of_commands_are_one_line_and_exit_code_2(hub, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    hub.add("me/typo", {CONFIG_NAME: b"num_generation: 4\n"})
    hub.add("me/ok", {CONFIG_NAME: b"num_generations: 4\n"})
    result = CliRunner().invoke(app, ["config", *words])
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    assert message in result.stderr.splitlines()[-1]
    assert list(tmp_path.glob("*.yaml")) == []
