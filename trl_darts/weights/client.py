"""One server's HTTP calls for weights, on TRL's `VLLMClient`, whose NCCL broadcast and generation are unchanged."""

import json
import logging
from pathlib import Path
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from trl.generation.vllm_client import VLLMClient
from urllib3.util.retry import Retry

from ..errors import ConfigurationError, GenerationError, WeightSyncError
from ..waiting import said_meanwhile


CONNECT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 60.0  # resume and the like, which an engine that is not busy answers within milliseconds
PAUSE_TIMEOUT_S = 15.0  # a frozen server is found here, before the others wait for it in the middle of an update
ABANDON_TIMEOUT_S = 5.0  # the server may be gone
SYNC_TIMEOUT_S = 1800.0  # a large model from a slow disk
IMAGE_TIMEOUT_S = 120.0  # the images of one prompt, behind those of up to 64 others
# Requests that someone else runs on the server (nobody, as a rule) freeze and go on under the new weights, their
# cached keys and values computed anew. "abort" would take their results, "wait" would wait for the longest.
PAUSE_MODE = "keep"

logger = logging.getLogger(__name__)


class _Adapter(HTTPAdapter):
    """
    Repeats no POST, and gives requests without a timeout one, where there is one.

    TRL repeats POSTs, five times. A repeated start or broadcast of an update is an error, or a hang. What may be
    repeated is the connection.
    """

    def __init__(self, read_timeout_s: float | None = None) -> None:
        self.default_timeout = None if read_timeout_s is None else (CONNECT_TIMEOUT_S, read_timeout_s)
        retry = Retry(total=2, connect=2, read=0, status=0, backoff_factor=0.2, allowed_methods=["GET"])
        super().__init__(max_retries=retry, pool_maxsize=64)

    def send(self, *args: Any, **kwargs: Any) -> requests.Response:
        kwargs["timeout"] = kwargs.get("timeout") or self.default_timeout
        return super().send(*args, **kwargs)


class SyncedVLLMClient(VLLMClient):
    """TRL's client for one server, with the calls of a weight update; `FleetVLLMClient` makes them in order."""

    version: int = 0  # of the weights that the server has; 0 is those that it loaded

    def __init__(
        self, base_url: str, group_port: int = 51216, connection_timeout: float = 0.0, api_key: str | None = None
    ) -> None:
        self.api_key = api_key
        super().__init__(base_url=base_url, group_port=group_port, connection_timeout=connection_timeout)

    def check_server(self, total_timeout: float = 0.0, *args: Any, **kwargs: Any) -> None:
        """TRL's, which is the first that its constructor does with the new session: the next request wants the key."""
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, _Adapter())
        self.session.mount(f"{self.base_url}/v1/chat/completions/render", _Adapter(IMAGE_TIMEOUT_S))
        self.session.headers["Connection"] = "close"  # a server drops idle connections after 5 s
        if self.api_key:
            self.session.headers["Authorization"] = f"Bearer {self.api_key}"
        with said_meanwhile(f"Waiting for {self.base_url}", total_timeout):
            super().check_server(total_timeout, *args, **kwargs)

    def image_features(self, images: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """TRL's; a server that refuses an image is named."""
        try:
            return super().image_features(images, *args, **kwargs)
        except requests.RequestException:
            raise
        except Exception as error:  # TRL's own, without a type
            raise GenerationError(f"The vLLM server at {self.base_url} refused an image: {error}") from error

    def call(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        params: dict[str, str] | None = None,
        timeout_s: float = CONTROL_TIMEOUT_S,
        method: str = "POST",
        optional: bool = False,
    ) -> dict[str, Any]:
        """
        The server's JSON answer; `{}` if it is empty, or if the endpoint is missing and `optional`. Without an answer,
        or with another status than 200, a [`WeightSyncError`] with the server's own message.
        """
        try:
            with said_meanwhile(f"Waiting for {self.base_url} to answer `{path}`", timeout_s):
                response = self.session.request(
                    method, self.base_url + path, json=body, params=params, timeout=(CONNECT_TIMEOUT_S, timeout_s)
                )
        except requests.RequestException as error:
            late = f" within {timeout_s:g} s" if isinstance(error, requests.Timeout) else ": the connection failed"
            raise WeightSyncError(f"The vLLM server at {self.base_url} did not answer `{path}`{late}.") from error
        if response.status_code == 404 and optional:
            return {}
        if response.status_code == 404:
            raise WeightSyncError(
                f"The vLLM server at {self.base_url} has no `{path}`. Restart it with `VLLM_SERVER_DEV_MODE=1` in its "
                "environment, which exposes the endpoints that weights are synchronized through."
            )
        if response.status_code != 200:
            raise WeightSyncError(
                f"`{path}` of the vLLM server at {self.base_url} failed ({response.status_code}): {_message(response)}"
            )
        return response.json() if response.content else {}

    def weight_version(self) -> str | None:
        """`"v<number>"` after an update, `"default"` after a start, `None` from a server without versions."""
        return self.call("/weight_info", method="GET", optional=True).get("weight_version")

    def pause(self) -> None:
        """Freeze running requests."""
        self.call("/pause", params={"mode": PAUSE_MODE}, timeout_s=PAUSE_TIMEOUT_S)

    def resume(self) -> None:
        self.call("/resume")

    def start_update(self) -> None:
        """Begin an update over NCCL, also where a trainer that is gone left one open."""
        self._updating_weights = True  # TRL's `update_named_params` only sends then
        try:
            self.call("/start_weight_update", {})
        except WeightSyncError as error:
            if "already active" not in str(error):
                raise
            self.call("/finish_weight_update", {})
            self.call("/start_weight_update", {})

    def finish_update(self) -> None:
        """Put weights that came over NCCL into place."""
        self.call("/finish_weight_update", {}, timeout_s=SYNC_TIMEOUT_S)
        self._updating_weights = False

    def load(self, path: Path) -> None:
        """Have the server load a checkpoint. On a CPU, the answer must be that of our plugin."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        try:
            answers = self.call("/collective_rpc", body, timeout_s=SYNC_TIMEOUT_S).get("results", [])
        except WeightSyncError as error:
            raise WeightSyncError(
                f"{error} Make sure that the server sees {path} under the same path, or set `weight_sync_dir` to a "
                "directory that it sees."
            ) from error
        if not all(answers) and self.get_server_info()["device_config"]["device"] == "cpu":
            raise ConfigurationError(
                f"The vLLM server at {self.base_url} runs on a CPU without trl_darts, so a model with tied embeddings "
                "keeps its old LM head, and log-probs are wrong. Run `pip install trl-darts` in the server's "
                "environment, and restart it."
            )

    def commit(self, version: int) -> None:
        """After an update: empty the prefix cache, stamp the version and read it back."""
        if not self.call("/reset_prefix_cache", params={"reset_running_requests": "true"}).get("success", True):
            raise WeightSyncError(
                f"The vLLM server at {self.base_url} could not empty its prefix cache, so it holds keys and values of "
                "the old weights. A transfer of its KV cache may be under way."
            )
        if not self.call("/update_weight_version", {"new_version": f"v{version}"}, optional=True):
            return
        found = self.weight_version()
        if found != f"v{version}":
            raise WeightSyncError(
                f"The vLLM server at {self.base_url} shows the weight version {found!r} after an update to "
                f"'v{version}'. Another trainer may be using it: give each training its own servers."
            )

    def abandon(self, version: int) -> None:
        """After a failed update: leave the server usable and its version telling. It may be gone: raises nothing."""
        steps: list[tuple[str, dict[str, str]]] = [("/finish_weight_update", {})] if self._updating_weights else []
        steps += [("/update_weight_version", {"new_version": f"v{version}-incomplete"}), ("/resume", {})]
        self._updating_weights = False
        for path, body in steps:
            try:
                self.call(path, body, timeout_s=ABANDON_TIMEOUT_S)
            except WeightSyncError as error:
                logger.debug("While giving up an update: %s", error)


def _message(response: requests.Response) -> str:
    """The server's own message, wherever in the answer it stands."""
    try:
        answer = response.json()
    except json.JSONDecodeError:
        return response.text.strip()
    if isinstance(answer, dict):
        answer = answer.get("error", answer.get("detail", answer))
    if isinstance(answer, dict):
        answer = answer.get("message", answer)
    return str(answer)
