"""TRL's blocking client of one server, for a user's `rollout_func` and for images."""

import logging
import os
from collections.abc import Sequence
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

from ..engines.addresses import key_of
from ..engines.waiting import Deadlines
from ..errors import GenerationError
from ..trl_compat import VLLMClient


IMAGE_TIMEOUT_S = 120.0  # for the images of one prompt, queued behind those of up to 64 others

logger = logging.getLogger(__name__)


class _Adapter(HTTPAdapter):
    """Adds a default timeout to requests without one, and does not retry POST (TRL retries it five times)."""

    def __init__(self, read_timeout_s: float | None = None) -> None:
        self.default_timeout = None if read_timeout_s is None else (Deadlines.connect_s, read_timeout_s)
        retry = Retry(total=2, connect=2, read=0, status=0, backoff_factor=0.2, allowed_methods=["GET"])
        super().__init__(max_retries=retry, pool_maxsize=64)

    def send(self, *args: Any, **kwargs: Any) -> requests.Response:
        kwargs["timeout"] = kwargs.get("timeout") or self.default_timeout
        return super().send(*args, **kwargs)


class BlockingVLLMClient(VLLMClient):
    """TRL's client with the servers' API key. Weights are sent by `FleetVLLMClient`."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        self.api_key = api_key or key_of(base_url)
        super().__init__(base_url=base_url)

    def check_server(self, *args: Any, **kwargs: Any) -> None:
        """
        Sets up the session, and checks the server. TRL's constructor calls this before any other request. TRL's own
        check takes another session, and waits for ever if the server answers 503.
        """
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, _Adapter())
        self.session.mount(f"{self.base_url}/v1/chat/completions/render", _Adapter(IMAGE_TIMEOUT_S))
        self.session.headers["Connection"] = "close"  # a server drops idle connections after 5 s
        # As the engine's own client: proxies of the environment would take requests to 127.0.0.1 without `no_proxy`,
        # and `.netrc` would replace the key.
        self.session.trust_env = False
        self.session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or True
        if self.api_key:
            self.session.headers["Authorization"] = f"Bearer {self.api_key}"
        self.session.get(f"{self.base_url}/health", timeout=Deadlines.health_s).raise_for_status()

    def image_features(self, images: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """As TRL, but an error names the server that rejected an image."""
        try:
            return super().image_features(images, *args, **kwargs)
        except OSError:  # includes those of `requests`
            raise
        except Exception as error:  # TRL raises plain exceptions
            raise GenerationError(f"The vLLM server at {self.base_url} rejected an image: {error}") from error


def image_features(urls: Sequence[str], api_key: str | None, images: list[Any]) -> list[dict[str, Any] | None]:
    """Returns the image features from the first server that answers. They do not depend on the weights."""
    messages = []
    for url in urls:
        try:
            return BlockingVLLMClient(url, api_key).image_features(images)
        except OSError as error:  # the next server may answer
            messages.append(f"{url}: {type(error).__name__}: {error}")
    raise GenerationError(f"No vLLM server processed the images. {'; '.join(messages)}")
