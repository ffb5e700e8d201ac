"""To the Hub's stand-in and back: what arrives is what was sent, and every refusal says what to do."""

import pytest
import yaml
from huggingface_hub import constants

from tests.hub.stand_in import READ_TOKEN, TOKEN
from trl_darts import DARTSGRPOConfig
from trl_darts.errors import ConfigurationError
from trl_darts.hub import HubError, pull_config, push_config, transfer
from trl_darts.hub.files import CARD_NAME, CONFIG_NAME, MAX_CARD_BYTES, checksum


REPO = "me/recipe"
RECIPE = {
    "model_name_or_path": "Qwen/Qwen2.5-3B",
    "dataset_name": "org/math",
    "reward_funcs": ["accuracy_reward"],
    "schedule": "darts",
    "num_generations": 4,
    "learning_rate": "1e-6",
    "max_grad_norm": 1.0,
    "long_end_patience": 3.0,
    "output_dir": "/data/jane/outputs",
    "vllm_server_base_url": "http://10.1.2.3:8000",
    "hub_token": TOKEN,
    "vllm_api_key": "very-secret-key",
}
PUBLIC = {
    "model_name_or_path": "Qwen/Qwen2.5-3B",
    "dataset_name": "org/math",
    "reward_funcs": ["accuracy_reward"],
    "num_generations": 4,
    "long_end_patience": 3.0,
}


def one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    return str(error)


def test_push_then_pull_gives_what_differs_from_the_defaults(hub):
    pushed = push_config(RECIPE, REPO, private=True, measured="2 GPUs: 1.3 times as fast")
    pulled = pull_config(REPO)
    assert pulled.data == PUBLIC
    assert pulled.commit == pushed.commit
    assert yaml.safe_load(pulled.path.read_text()) == PUBLIC
    assert pushed.left_out == ["output_dir", "vllm_server_base_url", "hub_token", "vllm_api_key"]
    assert hub.repositories[REPO].private


def test_both_files_are_one_commit_and_the_card_says_what_it_is(hub):
    push_config(RECIPE, REPO, measured="2 GPUs: 1.3 times as fast")
    assert len(hub.repositories[REPO].commits) == 2  # the first made the repository
    card = hub.repositories[REPO].files("main")[CARD_NAME].decode()
    assert "2 GPUs: 1.3 times as fast" in card
    assert "num_generations: 4" in card
    assert "TRL 1.16" in card
    assert f'from_pretrained("{REPO}"' in card
    assert "`output_dir`, `vllm_server_base_url`, `hub_token`, `vllm_api_key`" in card


def test_secrets_and_places_never_leave(hub):
    push_config(RECIPE, REPO)
    assert "num_generations: 4" in hub.sent  # files are looked into
    for kept in ("jane", "10.1.2.3", TOKEN, "very-secret-key"):
        assert kept not in hub.sent


@pytest.mark.parametrize("name", ["system_prompt", "dataset_config"])
def test_a_secret_in_a_public_field_is_refused_before_anything_is_sent(hub, name):
    with pytest.raises(ConfigurationError, match=rf"`{name}` holds what looks like a secret") as refused:
        push_config(RECIPE | {name: f"use {TOKEN}", "prompt_column": "question"}, REPO)
    assert TOKEN not in one_line(refused.value)
    assert hub.requests == []


def test_a_secret_in_what_was_measured_is_refused(hub):
    with pytest.raises(ConfigurationError, match=r"`measured` holds what looks like a secret"):
        push_config(PUBLIC, REPO, measured=f"with {TOKEN}")
    assert hub.requests == []


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("commit_message", f"with {TOKEN}", "holds what looks like a secret"),
        ("revision", TOKEN, "holds what looks like a secret"),
        ("commit_message", "from /data/alice/x", "names a path"),
    ],
)
def test_what_is_said_of_a_push_is_checked(hub, name, text, words):
    with pytest.raises(ConfigurationError, match=rf"`{name}` .*{words}") as refused:
        push_config(PUBLIC, REPO, **{name: text})
    assert TOKEN not in one_line(refused.value)
    assert hub.requests == []


def test_private_is_no_promise_for_a_public_repository(hub):
    commit = push_config(PUBLIC, REPO).commit
    with pytest.raises(HubError, match=r"^`private` \(True\) must hold for 'me/recipe', which exists and is public"):
        push_config(RECIPE, REPO, private=True, revision="mine")
    assert hub.repositories[REPO].branches == {"main": commit}
    push_config(PUBLIC, "me/hidden", private=True)
    push_config(RECIPE, "me/hidden", private=True, revision="mine")
    assert hub.repositories["me/hidden"].private


def test_a_push_in_between_is_refused(hub, monkeypatch):
    push_config(PUBLIC, REPO)
    check = transfer._check_card

    def overtaken(*args):
        check(*args)
        hub.add(REPO, {CARD_NAME: b"# A model"})

    monkeypatch.setattr(transfer, "_check_card", overtaken)
    with pytest.raises(HubError, match=r"the Hub answered 412: .*A commit has happened since"):
        push_config(PUBLIC | {"num_generations": 16}, REPO)
    assert hub.repositories[REPO].files("main")[CARD_NAME] == b"# A model"


def test_a_branch_is_made_and_pulled(hub):
    main = push_config(PUBLIC, REPO)
    branch = push_config(PUBLIC | {"num_generations": 16}, REPO, revision="wide")
    assert pull_config(REPO, revision="wide").data["num_generations"] == 16
    assert pull_config(REPO).data["num_generations"] == 4
    assert pull_config(REPO, revision=main.commit).data["num_generations"] == 4
    assert pull_config(REPO, revision="wide").commit == branch.commit


def test_a_commit_stays_what_it_was(hub):
    first = push_config(PUBLIC, REPO).commit
    push_config(PUBLIC | {"num_generations": 16}, REPO)
    assert pull_config(REPO, revision=first).data["num_generations"] == 4
    assert pull_config(REPO).data["num_generations"] == 16


def test_wrong_token(hub, monkeypatch):
    push_config(PUBLIC, REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    for ask in (lambda: push_config(PUBLIC, REPO), lambda: pull_config(REPO)):
        with pytest.raises(
            HubError, match=r"`token` is refused for 'me/recipe' \(401.*Log in with `hf auth login`"
        ) as e:
            ask()
        assert "hf_wrong" not in one_line(e.value)


def test_a_token_that_may_only_read(hub, monkeypatch):
    push_config(PUBLIC, REPO)
    monkeypatch.setenv("HF_TOKEN", READ_TOKEN)
    assert pull_config(REPO).data == PUBLIC
    for repo_id in (REPO, "me/another"):
        with pytest.raises(HubError, match=r"`token` is refused for .* \(403.*not the required perm") as refused:
            push_config(PUBLIC, repo_id)
        one_line(refused.value)


def test_no_token(hub, monkeypatch, tmp_path):
    push_config(PUBLIC, REPO)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(HubError, match=r"`token` is refused for 'me/recipe' \(401"):
        push_config(PUBLIC, REPO)
    with pytest.raises(HubError, match=r"`token` \(True\) needs one that was saved"):
        pull_config(REPO, token=True)
    assert pull_config(REPO).data == PUBLIC  # a public one needs none


def test_missing_repository(hub):
    with pytest.raises(
        HubError, match=r"`repo_id` \('me/nothing'\) must be a repository of the Hub that you may see"
    ) as e:
        pull_config("me/nothing")
    one_line(e.value)


def test_gated_repository(hub):
    push_config(PUBLIC, REPO)
    hub.repositories[REPO].gated = True
    for ask in (lambda: pull_config(REPO), lambda: push_config(PUBLIC, REPO)):
        with pytest.raises(HubError, match=rf"Ask for access on its page, {hub.url}/{REPO}, and log in") as e:
            ask()
        assert "there is none" not in one_line(e.value)


def test_missing_revision(hub):
    push_config(PUBLIC, REPO)
    with pytest.raises(HubError, match=r"`revision` \('v9'\) must be a branch, a tag or a commit of 'me/recipe'") as e:
        pull_config(REPO, revision="v9")
    one_line(e.value)


def test_not_a_name(hub):
    with pytest.raises(ConfigurationError, match=r"`repo_id` \('a/b/c'\) must be a name on the Hub"):
        pull_config("a/b/c")


def test_offline(hub, monkeypatch):
    push_config(PUBLIC, REPO)
    commit = pull_config(REPO).commit
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert pull_config(REPO).commit == commit  # from the cache
    for ask in (lambda: pull_config("me/other"), lambda: push_config(PUBLIC, REPO)):
        with pytest.raises(HubError, match=r"the Hub can't be reached.*`HF_HUB_OFFLINE`") as e:
            ask()
        one_line(e.value)


def test_no_config_in_the_repository(hub):
    hub.add("org/model", {CARD_NAME: b"# A model"})
    with pytest.raises(ConfigurationError, match=r"`org/model` has no darts_config.yaml"):
        pull_config("org/model")


def test_another_card_is_not_overwritten(hub):
    hub.add("me/model", {CARD_NAME: b"---\nlicense: mit\n---\n# A model"})
    with pytest.raises(HubError, match=r"^`repo_id` \('me/model'\) must be a repository of its own"):
        push_config(PUBLIC, "me/model")
    assert CONFIG_NAME not in hub.repositories["me/model"].files("main")
    with pytest.raises(HubError, match=r"must be a repository of its own"):
        push_config(PUBLIC, "me/model", revision="config")
    assert hub.repositories["me/model"].branches.keys() == {"main"}


def test_tampered_file(hub):
    push_config(PUBLIC, REPO)
    hub.add(REPO, {CONFIG_NAME: b"num_generations: 64\n"})
    with pytest.raises(
        ConfigurationError, match=r"`me/recipe`: darts_config.yaml .* is not the file that its card"
    ) as e:
        pull_config(REPO)
    one_line(e.value)


def test_without_a_checksum(hub):
    hub.add(REPO, {CONFIG_NAME: b"num_generations: 64\n", CARD_NAME: b"# Mine"})
    with pytest.raises(ConfigurationError, match=r"was written for \(none\)"):
        pull_config(REPO)


ALIASES = b"a: &a [x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (name, name, b",".join([b"*%c" % (name - 1)] * 10)) for name in b"bcdefghijk"
)


@pytest.mark.parametrize(
    ("front", "words"),
    [
        (b"darts_config_sha256: {checksum}", None),
        (b"%sdarts_config_sha256: *k" % ALIASES, r"was written for \(none\)"),
        (b"darts_config_sha256: [{checksum}]", r"was written for \(none\)"),
        (b"darts_config_sha256: {checksum}\nx: %s" % (b"y" * MAX_CARD_BYTES), r"was written for \(none\)"),
        (b"darts_config_sha256: other", r"was written for \('other'…\)"),
    ],
    ids=["right", "aliases", "no string", "large", "other"],
)
def test_a_hostile_card(hub, front, words):
    content = b"num_generations: 64\n"
    card = b"---\n" + front.replace(b"{checksum}", checksum(content).encode()) + b"\n---\n# Mine\n"
    hub.add(REPO, {CONFIG_NAME: content, CARD_NAME: card})
    if words is None:
        assert pull_config(REPO).data == {"num_generations": 64}
        return
    with pytest.raises(ConfigurationError, match=words) as refused:
        pull_config(REPO)
    assert len(one_line(refused.value)) < 500


def test_a_config_that_would_fill_the_memory(hub):
    content = ALIASES + b"learning_rate: *k\n"
    assert len(content) < 500
    hub.add(REPO, {CONFIG_NAME: content, CARD_NAME: b"---\ndarts_config_sha256: x\n---\n"})
    with pytest.raises(ConfigurationError, match=r"`me/recipe` is refused: .* must have no aliases") as refused:
        pull_config(REPO)
    assert len(one_line(refused.value)) < 500


def test_a_prompt_does_not_end_the_cards_block(hub):
    push_config(PUBLIC | {"system_prompt": "Use\n````python\n1\n````\nthen answer."}, REPO)
    blocks = hub.repositories[REPO].files("main")[CARD_NAME].decode().split("\n`````")
    assert len(blocks) == 3
    assert yaml.safe_load(blocks[1].removeprefix("yaml")) == pull_config(REPO).data


def test_from_pretrained_and_push_config_to_hub(hub):
    args = {"use_cpu": True, "bf16": False, "num_generations": 4, "schedule": "sorted", "learning_rate": 3e-6}
    config = DARTSGRPOConfig(output_dir="outputs/mine", vllm_api_key="very-secret-key", **args)
    pushed = config.push_config_to_hub(REPO)
    assert pushed.left_out == ["output_dir", "vllm_api_key"]
    assert "very-secret-key" not in hub.sent
    assert pull_config(REPO).data == args
    again = DARTSGRPOConfig.from_pretrained(REPO, output_dir="outputs/theirs", seed=7)
    assert (again.output_dir, again.seed, again.schedule) == ("outputs/theirs", 7, "sorted")
    assert config.push_to_hub is False  # the trainer's field is what it was
