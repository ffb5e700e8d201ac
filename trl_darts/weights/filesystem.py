"""The client for weights through a directory."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigurationError, WeightSyncError
from .client import INSTALL, Metadata, NamedParams, SyncedVLLMClient
from .directory import WeightDirectory
from .gloo import SYNC_TIMEOUT_S, is_local
from .rounds import UpdateRound, call


class FilesystemVLLMClient(SyncedVLLMClient):
    """
    Writes weights to a directory and has the server load them. Needs no process group and no weight-transfer engine.

    Overrides `init_communicator`, `beside`, `_sync` and `close_communicator`.

    Args:
        directory ([`WeightDirectory`], *optional*):
            Where weights are written, `DARTSGRPOConfig.weight_sync_dir`. A new temporary directory by default, which
            is for servers on this machine.
        args, kwargs:
            TRL's own arguments.
    """

    def __init__(self, *args: Any, directory: WeightDirectory | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.directory = directory or WeightDirectory()
        self._needs_plugin = False

    def init_communicator(self, device: torch.device | str | int = "cpu") -> None:
        """
        Check that the server can read what is written.

        Args:
            device (`torch.device`, `str` or `int`, *optional*):
                Unused.

        Raises:
            [`ConfigurationError`]: If the server is on another machine and the directory is not.
        """
        self._needs_plugin = self.get_server_info()["device_config"]["device"] == "cpu"
        if self.directory.is_temporary and not is_local(self.host):
            raise ConfigurationError(
                f"`weight_sync_dir` (unset) is a temporary directory of this machine, which the vLLM server at "
                f"{self.base_url} does not see. Set it to a directory that both see under the same path."
            )
        atexit.register(self.close_communicator)

    def disconnect(self) -> None:
        """Nothing to leave: the directory is every server's."""

    def beside(self, base_url: str, group_port: int, **kwargs: Any) -> SyncedVLLMClient:
        """A client like this one, for another server and the same directory."""
        return super().beside(base_url, group_port, directory=self.directory, **kwargs)

    def _sync(self, metadata: Metadata, named_params: NamedParams) -> None:
        load_everywhere([self], self.directory, self.version + 1, named_params)

    def load(self, path: Path) -> None:
        """Have the server load the checkpoint at `path`. For use within an [`UpdateRound`]."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        try:
            answers = call(self, "/collective_rpc", body, timeout_s=SYNC_TIMEOUT_S).get("results", [])
        except WeightSyncError as error:
            raise WeightSyncError(f"{error} Make sure that the server sees {path} under the same path.") from error
        if self._needs_plugin and not all(answers):
            raise ConfigurationError(
                f"The vLLM server at {self.base_url} runs on a CPU without trl_darts, so a model with tied embeddings "
                f"keeps its old LM head, and log-probs are wrong. Run {INSTALL}, and restart it."
            )

    def close_communicator(self) -> None:
        """Remove the written weights. Safe to call twice."""
        self.directory.close()
        atexit.unregister(self.close_communicator)


def load_everywhere(
    clients: Sequence[FilesystemVLLMClient], directory: WeightDirectory, version: int, named_params: NamedParams
) -> None:
    """Write a version once, and have every server load it."""
    try:
        path = directory.write(version, named_params)
    except OSError as error:
        raise WeightSyncError(
            f"The weights could not be written to `weight_sync_dir` ({directory.root.parent}): {error}. Free some "
            "space, or choose another directory."
        ) from error
    with UpdateRound(clients, version) as update:
        update.each(lambda client: client.load(path))
    directory.forget_before(version)
