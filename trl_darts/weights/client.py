"""TRL's blocking client of one server, for a user's `rollout_func` and for images."""

from collections.abc import Coroutine, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import aiohttp

from ..engines.failures import describe
from ..engines.vllm_api import ServerBrokenError
from ..engines.vllm_server import VLLMServerEngine
from ..errors import GenerationError
from ..trl_compat import VLLMClient


IMAGES = "/v1/chat/completions/render"
IMAGE_TIMEOUT_S = 120.0  # for the images of one prompt, queued behind those of up to 64 others


class EngineSession:
    """What TRL's client uses of a `requests.Session`, on an engine's connections, with its keys and its errors."""

    def __init__(self, engine: VLLMServerEngine, url: str) -> None:
        self._engine = engine
        self._server = engine.members[url].server

    def get(self, url: str, params: Mapping[str, Any] | None = None) -> Any:
        return self._response(self._server.get(self._path(url) + (f"?{urlencode(params)}" if params else "")))

    def post(self, url: str, json: Mapping[str, Any] | None = None) -> Any:
        path = self._path(url)
        return self._response(self._server.post(path, json, IMAGE_TIMEOUT_S if path == IMAGES else None))

    def _path(self, url: str) -> str:
        return url.removeprefix(self._server.base_url)

    def _response(self, request: Coroutine[Any, Any, Any]) -> Any:
        """Returns what TRL reads of a response. The server's JSON is `None` if it does not have the path."""
        content = self._engine.call(request)
        return SimpleNamespace(status_code=404 if content is None else 200, text="", json=lambda: content)


class BlockingVLLMClient(VLLMClient):
    """TRL's client on the engine's connections. Weights are sent by `FleetVLLMClient`."""

    def __init__(self, engine: VLLMServerEngine, url: str) -> None:
        self._engine = engine
        super().__init__(base_url=url)

    def check_server(self, *args: Any, **kwargs: Any) -> None:
        """
        Replaces the session. TRL's constructor calls this before any other request. TRL's own check takes another
        session, and waits for ever if the server answers 503.
        """
        self.session = EngineSession(self._engine, self.base_url)


def image_features(engine: VLLMServerEngine, urls: Sequence[str], images: list[Any]) -> list[dict[str, Any] | None]:
    """
    Returns the image features from the first server that answers. They do not depend on the weights. A server that
    rejects an image raises [`GenerationError`].
    """
    messages = []
    for url in urls:
        try:
            return BlockingVLLMClient(engine, url).image_features(images)
        except (ServerBrokenError, aiohttp.ClientError, TimeoutError) as error:  # the next server may answer
            messages.append(f"{url}: {describe(error, f'images within {IMAGE_TIMEOUT_S:g} s')}")
    raise GenerationError(f"No vLLM server processed the images. {'; '.join(messages)}")
