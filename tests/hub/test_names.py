"""Names on the Hub: with a revision or beside one, and those that a card gives."""

import re

import pytest

from tests.hub.test_transfer import REPO
from trl_darts import DARTSGRPOConfig
from trl_darts.errors import ConfigurationError
from trl_darts.hub import pull_config, push_config
from trl_darts.hub.files import CARD_NAME


ARGS = {"use_cpu": True, "bf16": False}


@pytest.mark.parametrize("name", [f"{REPO}@wide", f"hf://{REPO}@wide"])
def test_a_revision_in_the_name(hub, name):
    push_config(ARGS, REPO)
    commit = push_config(ARGS | {"num_generations": 4}, REPO, revision="wide").commit
    pulled = pull_config(name)
    assert (pulled.address, pulled.data["num_generations"]) == (f"hf://{REPO}@{commit}", 4)
    assert DARTSGRPOConfig.from_pretrained(name).num_generations == 4


def test_a_revision_is_said_once(hub):
    words = r"^`revision` \('main'\) must be left out where the name has one, and that is 'me/recipe@wide'\."
    with pytest.raises(ConfigurationError, match=words):
        DARTSGRPOConfig.from_pretrained(f"{REPO}@wide", revision="main")
    assert hub.requests == []


@pytest.mark.parametrize("name", ["", "hf://", "@v1", "me/recipe@"])
def test_malformed(name):
    with pytest.raises(ConfigurationError, match=r"must be of the form org/name or org/name@revision"):
        pull_config(name)


def test_a_branchs_card_gives_names_of_the_branch(hub):
    push_config(ARGS, REPO)
    commit = push_config(ARGS | {"num_generations": 4}, REPO, revision="wide").commit
    card = hub.repositories[REPO].files("wide")[CARD_NAME].decode()
    name, revision = re.search(r'from_pretrained\("(.*?)", revision="(.*?)"', card).groups()
    assert pull_config(name, revision=revision).commit == commit
    assert pull_config(re.search(r"--config (\S+) ", card)[1]).commit == commit
