"""Fixture of a Hub stub, with this process's client connected to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from huggingface_hub import constants

from tests.recipes.stand_in import TOKEN, StandIn, stand_in


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Iterator[StandIn]:
    """Yields the running stub, with a valid token in the environment and an empty cache."""
    with stand_in() as state:
        # `huggingface_hub` reads these from the environment only when it is imported.
        monkeypatch.setattr(constants, "ENDPOINT", state.url)
        template = state.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield state
