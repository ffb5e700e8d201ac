"""
What our subclasses of TRL's `VLLMClient` have in common, and the one for NCCL.

They add to TRL's protocol that the server is paused while its weights change, a version that the server can be asked
for, and errors in the server's own words. Generation and everything else is TRL's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import requests
import torch
from requests.adapters import HTTPAdapter
from trl.generation.vllm_client import VLLMClient
from urllib3.util.retry import Retry

from ..errors import GenerationError, WeightSyncError
from .gloo import SYNC_TIMEOUT_S
from .rounds import CONNECT_TIMEOUT_S, UpdateRound, call


Metadata = list[tuple[str, str, list[int]]]
NamedParams = Iterator[tuple[str, torch.Tensor]]

IMAGE_TIMEOUT_S = 120.0  # the images of one prompt, behind those of up to 64 others
INSTALL = "`pip install trl-darts` in the server's environment"


@contextmanager
def whole(named_params: NamedParams, num_params: int) -> Iterator[NamedParams]:
    """
    The first `num_params` items; what is behind them runs when the context is left, also after an error.

    TRL's iterator gathers sharded parameters with the other processes, which wait for each item to be asked for, and
    unmerges LoRA adapters *in place* once it is asked for one more than there are: tensors that were not sent by then
    are sent without their adapter. (TRL 1.16 does that to the last packed buffer of each sync over NCCL.)

    Args:
        named_params (`Iterator[tuple[str, torch.Tensor]]`):
            TRL's iterator.
        num_params (`int`):
            How many tensors were announced.
    """
    try:
        yield itertools.islice(named_params, num_params)
    except Exception:
        for _ in named_params:
            pass
        raise
    surplus = [name for name, _ in named_params]
    if surplus:
        raise WeightSyncError(f"{len(surplus)} tensors were not announced, and not sent: {', '.join(surplus[:5])}.")


def start_update(client: VLLMClient) -> None:
    """Begin an update, also where a trainer that is gone left one open. Several `update_named_params` may follow."""
    try:
        call(client, "/start_weight_update", {})
    except WeightSyncError as error:
        if "already active" not in str(error):
            raise
        call(client, "/finish_weight_update", {})
        call(client, "/start_weight_update", {})
    client._updating_weights = True


def finish_update(client: VLLMClient) -> None:
    """Put the new weights into place."""
    call(client, "/finish_weight_update", {}, timeout_s=SYNC_TIMEOUT_S)


class _PatientAdapter(HTTPAdapter):
    """Gives requests that set no timeout one, where there is one."""

    read_timeout_s: float | None = None

    def send(self, *args: Any, timeout: Any = None, **kwargs: Any) -> Any:
        if timeout is None and self.read_timeout_s is not None:
            timeout = (CONNECT_TIMEOUT_S, self.read_timeout_s)
        return super().send(*args, timeout=timeout, **kwargs)


class SyncedVLLMClient(VLLMClient):
    """
    What our clients have in common: `version`, and an HTTP session that never repeats a request that may have arrived.

    Args:
        api_key (`str`, *optional*):
            Of the server.
        args, kwargs:
            TRL's own arguments.
    """

    version: int = 0  # of the weights that the server has: the number of syncs that succeeded

    def __init__(self, *args: Any, api_key: str | None = None, **kwargs: Any) -> None:
        self._api_key = api_key
        super().__init__(*args, **kwargs)
        # TRL repeats POSTs, five times. A repeated start or broadcast of an update is an error, or a hang. What may be
        # repeated is the connection; and one connection per request, because a server drops idle ones after 5 s.
        retry = Retry(total=2, connect=2, read=0, status=0, backoff_factor=0.2, allowed_methods=["GET"])
        self._adapter = _PatientAdapter(max_retries=retry, pool_maxsize=64)
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, self._adapter)
        self.session.headers["Connection"] = "close"

    def check_server(self, *args: Any, **kwargs: Any) -> None:
        """TRL's, which is the first that it does with its new session; the next is a question that wants the key."""
        if self._api_key:
            self.session.headers["Authorization"] = f"Bearer {self._api_key}"
        super().check_server(*args, **kwargs)

    def image_features(self, images: list[Any], **kwargs: Any) -> list[Any]:
        """TRL's, which waits for ever; a server that refuses an image is named."""
        self._adapter.read_timeout_s = IMAGE_TIMEOUT_S
        try:
            return super().image_features(images, **kwargs)
        except requests.RequestException:
            raise
        except Exception as error:  # TRL's own, without a type
            raise GenerationError(f"The vLLM server at {self.base_url} refused an image: {error}") from error
        finally:
            self._adapter.read_timeout_s = None

    def disconnect(self) -> None:
        """Leave this server; the others' clients go on."""
        self.close_communicator()

    def beside(self, base_url: str, group_port: int, **kwargs: Any) -> SyncedVLLMClient:
        """A client like this one, for another server and a group of its own."""
        return type(self)(base_url=base_url, group_port=group_port, api_key=self._api_key, **kwargs)

    def update_named_params(self, metadata: Metadata, named_params: NamedParams) -> None:
        """
        Bring the server to new weights.

        Args:
            metadata (`list[tuple[str, str, list[int]]]`):
                Name, dtype (`"bfloat16"`) and shape of each tensor.
            named_params (`Iterator[tuple[str, torch.Tensor]]`):
                The tensors, in the same order. It is always run to its end.

        Raises:
            [`WeightSyncError`]: If the server does not have the new weights. It is resumed nevertheless.
        """
        if self._updating_weights:  # between `start_update` and `finish_update`, which belong to the caller
            self._broadcast(metadata, named_params)
            return
        with whole(named_params, len(metadata)) as params:
            self._sync(metadata, params)

    def _sync(self, metadata: Metadata, named_params: NamedParams) -> None:
        """One complete update, which sets `version`."""
        try:
            with UpdateRound([self], self.version + 1) as update:
                update.each(start_update)
                update.each(lambda client: client.update_named_params(metadata, named_params))
                update.each(finish_update)
        finally:
            self._updating_weights = False

    def _broadcast(self, metadata: Metadata, named_params: NamedParams) -> None:
        """Send tensors of an open update, and wait until the server has loaded them."""
        raise NotImplementedError


class NCCLVLLMClient(SyncedVLLMClient):
    """
    TRL's own way, NCCL. Adds what [`SyncedVLLMClient`] adds, and that LoRA adapters stay merged until all is sent, see
    [`whole`].
    """

    def _broadcast(self, metadata: Metadata, named_params: NamedParams) -> None:
        VLLMClient.update_named_params(self, metadata, named_params)
