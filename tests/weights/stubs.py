"""A vLLM server that is only its answers, for clients whose transport is not under test."""

from __future__ import annotations

import json
from types import SimpleNamespace

from trl.generation.vllm_client import VLLMClient


class StubSession:
    """Records POSTs as `(path, params, body)`, and answers 200 or what `answers[path]` says."""

    def __init__(self, base_url: str = "http://stub") -> None:
        self.base_url = base_url
        self.posts: list[tuple[str, dict | None, dict | None]] = []
        self.answers: dict[str, tuple[int, object]] = {}
        self.weight_version = "default"

    @property
    def paths(self) -> list[str]:
        """The POSTs' paths, in order."""
        return [path for path, _, _ in self.posts]

    def post(self, url: str, json: dict | None = None, params: dict | None = None, timeout: object = None) -> object:
        """As `requests.Session.post`."""
        path = url.removeprefix(self.base_url)
        self.posts.append((path, params, json))
        if path == "/update_weight_version":
            self.weight_version = json["new_version"]
        return _response(*self.answers.get(path, (200, {"success": True})))

    def get(self, url: str, params: dict | None = None, timeout: object = None) -> object:
        """As `requests.Session.get`."""
        path = url.removeprefix(self.base_url)
        return _response(*self.answers.get(path, (200, {"weight_version": self.weight_version})))


def _response(status: int, answer: object) -> SimpleNamespace:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return SimpleNamespace(status_code=status, content=text.encode(), text=text, json=lambda: json.loads(text))


def stub_client(cls: type[VLLMClient], base_url: str = "http://stub") -> VLLMClient:
    """A client that did not look for its server."""
    client = object.__new__(cls)
    client.session = StubSession(base_url)
    client.base_url = base_url
    client.host = "127.0.0.1"
    client.communicator = None
    client._updating_weights = False
    return client
