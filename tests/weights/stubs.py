"""A vLLM server that is only its answers, for clients whose transport is not under test."""

from __future__ import annotations

import json
from types import SimpleNamespace

from trl_darts.weights.client import SyncedVLLMClient


class StubSession:
    """Records POSTs as `(path, body)`, and answers 200 or what `answers[path]` says."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.posts: list[tuple[str, dict | None]] = []
        self.answers: dict[str, tuple[int, object]] = {}
        self.weight_version = "default"

    @property
    def paths(self) -> list[str]:
        """The POSTs' paths, in order."""
        return [path for path, _ in self.posts]

    def request(self, method: str, url: str, json: dict | None = None, **kwargs: object) -> SimpleNamespace:
        """As `requests.Session.request`."""
        path = url.removeprefix(self.base_url)
        default: dict[str, object] = {"weight_version": self.weight_version}
        if method == "POST":
            self.posts.append((path, json))
            default = {"success": True, "results": [{"trl_darts": "1"}]}
        if path == "/update_weight_version":
            self.weight_version = json["new_version"]
        return _response(*self.answers.get(path, (200, default)))

    def post(self, url: str, **kwargs: object) -> SimpleNamespace:
        """As `requests.Session.post`."""
        return self.request("POST", url, **kwargs)

    def get(self, url: str, **kwargs: object) -> SimpleNamespace:
        """As `requests.Session.get`."""
        return self.request("GET", url, **kwargs)


def _response(status: int, answer: object) -> SimpleNamespace:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return SimpleNamespace(status_code=status, content=text.encode(), text=text, json=lambda: json.loads(text))


def stub_client(index: int = 0, host: str = "127.0.0.1") -> SyncedVLLMClient:
    """A client that did not look for its server, `http://stub<index>`."""
    client = object.__new__(SyncedVLLMClient)
    client.base_url = f"http://stub{index}"
    client.session = StubSession(client.base_url)
    client.host = host
    client.group_port = 51216 + index
    client.api_key = None
    client.communicator = None
    client._updating_weights = False
    client.session.answers["/server_info"] = (200, {"vllm_config": {"device_config": {"device": "cpu"}}})
    return client
