"""
A weight update of one or several servers, and the HTTP calls around it.

Invariants of an [`UpdateRound`]:

- A server is paused before its weights change and resumed afterwards, whether the update succeeded or not.
- A server that fails leaves the round; the others go on and end with the complete new weights.
- A server that ends the round well has the new weights under the round's version and an empty prefix cache.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import requests
from trl.generation.vllm_client import VLLMClient

from ..errors import WeightSyncError


if TYPE_CHECKING:
    from .client import SyncedVLLMClient


CONNECT_TIMEOUT_S = 10.0
CONTROL_TIMEOUT_S = 60.0  # pause, resume and the like, which an engine that is not busy answers within milliseconds
PAUSE_TIMEOUT_S = 15.0  # a frozen server is found here, before the others wait for it in the middle of an update
ABANDON_TIMEOUT_S = 5.0  # the server may be gone
# Requests that someone else runs on the server (nobody, as a rule) freeze and go on under the new weights, their
# cached keys and values computed anew. "abort" would take their results, "wait" would wait for the longest.
PAUSE_MODE = "keep"

logger = logging.getLogger(__name__)


def call(
    client: VLLMClient,
    path: str,
    body: dict[str, Any] | None = None,
    params: dict[str, str] | None = None,
    timeout_s: float = CONTROL_TIMEOUT_S,
    optional: bool = False,
) -> dict[str, Any]:
    """
    POST to a server's development endpoint.

    Args:
        client ([`~trl.generation.vllm_client.VLLMClient`]):
            Whose session and address are used.
        path (`str`):
            Such as `"/pause"`.
        body (`dict[str, Any]`, *optional*):
            JSON body.
        params (`dict[str, str]`, *optional*):
            Query.
        timeout_s (`float`, *optional*):
            Seconds until the answer must be there.
        optional (`bool`, *optional*, defaults to `False`):
            Whether the endpoint may be missing: the answer is `{}` then.

    Returns:
        `dict[str, Any]`: The JSON answer; `{}` if it is empty.

    Raises:
        [`WeightSyncError`]: If there is no answer, or not a good one. Has the server's own words.
    """
    url = client.base_url + path
    try:
        response = client.session.post(url, json=body, params=params, timeout=(CONNECT_TIMEOUT_S, timeout_s))
    except requests.RequestException as error:
        raise WeightSyncError(
            f"The vLLM server at {client.base_url} did not answer `{path}`: {error}. Its log says why."
        ) from error
    return {} if optional and response.status_code == 404 else _checked(client, path, response)


def get(client: VLLMClient, path: str) -> dict[str, Any]:
    """GET from a server's development endpoint; see [`call`]."""
    try:
        response = client.session.get(client.base_url + path, timeout=(CONNECT_TIMEOUT_S, CONTROL_TIMEOUT_S))
    except requests.RequestException as error:
        raise WeightSyncError(f"The vLLM server at {client.base_url} did not answer `{path}`: {error}.") from error
    return _checked(client, path, response)


def _checked(client: VLLMClient, path: str, response: requests.Response) -> dict[str, Any]:
    if response.status_code == 200:
        return response.json() if response.content else {}
    if response.status_code == 404:
        raise WeightSyncError(
            f"The vLLM server at {client.base_url} has no `{path}`. Restart it with `VLLM_SERVER_DEV_MODE=1` in its "
            "environment, which exposes the endpoints that weights are synchronized through."
        )
    raise WeightSyncError(
        f"`{path}` of the vLLM server at {client.base_url} failed ({response.status_code}): {_words(response)}"
    )


def _words(response: requests.Response) -> str:
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


class UpdateRound:
    """
    One weight update: a context that is entered with all servers running and left with all running.

    Args:
        clients (`Sequence[SyncedVLLMClient]`):
            One per server.
        version (`int`):
            Number of the new weights. The servers show it as `"v<version>"` in `/weight_info`.
        concurrent (`bool`, *optional*, defaults to `True`):
            Whether [`~UpdateRound.each`] acts on all servers at once.

    Raises:
        [`WeightSyncError`]: On leaving, if a server failed. Names each and has its words.
    """

    def __init__(self, clients: Sequence[SyncedVLLMClient], version: int, concurrent: bool = True) -> None:
        self.clients = list(clients)
        self.version = version
        self.concurrent = concurrent
        self.failures: dict[SyncedVLLMClient, Exception] = {}

    @property
    def alive(self) -> list[SyncedVLLMClient]:
        """The servers that did not fail."""
        return [client for client in self.clients if client not in self.failures]

    def each(self, action: Callable[[SyncedVLLMClient], Any]) -> None:
        """Act on every server that is still in the round; one whose action raises leaves it."""
        clients = self.alive
        if len(clients) > 1 and self.concurrent:
            with ThreadPoolExecutor(len(clients)) as executor:
                outcomes = [executor.submit(action, client).exception for client in clients]
        else:  # in this thread: the current CUDA device is a thread's own
            outcomes = [partial(_outcome, action, client) for client in clients]
        for client, outcome in zip(clients, outcomes, strict=True):
            error = outcome()
            if isinstance(error, Exception):
                self.failures[client] = error
            elif error is not None:
                raise error

    def __enter__(self) -> UpdateRound:
        self.each(lambda client: call(client, "/pause", params={"mode": PAUSE_MODE}, timeout_s=PAUSE_TIMEOUT_S))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        broken = self.alive if error is not None else []
        if error is None:
            self.each(self._commit)
        for client in [*self.failures, *broken]:
            _abandon(client, self.version)
        if error is not None:
            return
        self.each(lambda client: call(client, "/resume"))
        if self.failures:
            raise _summary(self.failures) from next(iter(self.failures.values()))

    def _commit(self, client: SyncedVLLMClient) -> None:
        """Empty the prefix cache, stamp the version and read it back."""
        if not call(client, "/reset_prefix_cache", params={"reset_running_requests": "true"}).get("success", True):
            raise WeightSyncError(
                f"The vLLM server at {client.base_url} could not empty its prefix cache, so it holds keys and values "
                "of the old weights. A transfer of its KV cache may be under way."
            )
        version = f"v{self.version}"
        if call(client, "/update_weight_version", {"new_version": version}, optional=True):
            self._verify(client, version)
        client.version = self.version

    @staticmethod
    def _verify(client: VLLMClient, version: str) -> None:
        found = get(client, "/weight_info")["weight_version"]
        if found != version:
            raise WeightSyncError(
                f"The vLLM server at {client.base_url} shows the weight version {found!r} after an update to "
                f"{version!r}. Another trainer may be using it: give each training its own servers."
            )


def _outcome(action: Callable[[SyncedVLLMClient], Any], client: SyncedVLLMClient) -> Exception | None:
    try:
        action(client)
    except Exception as error:
        return error
    return None


def _abandon(client: VLLMClient, version: int) -> None:
    """After a failed update: leave the server usable and its version telling. It may be gone, so nothing is raised."""
    for path, body in (
        ("/finish_weight_update", {}),
        ("/update_weight_version", {"new_version": f"v{version}-incomplete"}),
        ("/resume", None),
    ):
        try:
            call(client, path, body, timeout_s=ABANDON_TIMEOUT_S)
        except WeightSyncError as error:
            logger.debug("While giving up an update: %s", error)


def _summary(failures: dict[SyncedVLLMClient, Exception]) -> WeightSyncError:
    lines = [f"- {client.base_url}: {error}" for client, error in failures.items()]
    return WeightSyncError(
        "The weights could not be brought to "
        + ("the vLLM server:" if len(lines) == 1 else f"{len(lines)} vLLM servers:")
        + "\n"
        + "\n".join(lines)
    )
