"""TRL's generation with vLLM, with weights that reach several servers, of which some may be lost."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from trl.generation.vllm_generation import VLLMGeneration

from .engines.pool import State
from .engines.vllm_server import VLLMServerEngine
from .errors import WeightSyncError
from .servers import ServerSettings
from .weights import SyncedVLLMClient, make_client


logger = logging.getLogger(__name__)


class SyncedGeneration(VLLMGeneration):
    """
    [`~trl.generation.vllm_generation.VLLMGeneration`] whose weights go through our clients.

    Overrides `_init_vllm` and `sync_weights`.

    Args:
        settings ([`ServerSettings`], *optional*):
            What we need to know of servers.
        engine ([`VLLMServerEngine`], *optional*):
            The engine of servers, on the main process.
        kwargs:
            TRL's own arguments.
    """

    def __init__(
        self, *args: Any, settings: ServerSettings | None, engine: VLLMServerEngine | None, **kwargs: Any
    ) -> None:
        self.settings = settings
        self.engine = engine
        self._sync_seconds: float | None = None
        self._num_syncs = 0
        self.is_sharded: Callable[[], bool] = lambda: False  # set by the trainer
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        if self.mode != "server":
            super()._init_vllm()
            from .engines.vllm_colocated import keep_expanded_images  # imports vLLM

            keep_expanded_images(self.llm)
            return
        if self.accelerator.is_main_process:
            self.vllm_client = make_client(
                self.settings.base_urls,
                self.settings.weight_sync,
                device=self.accelerator.device,
                group_port=self.group_port,
                connection_timeout=self.server_timeout,
                sync_dir=self.settings.weight_sync_dir,
                api_key=self.settings.api_key,
            )
            self.vllm_client.init_communicator(device=self.accelerator.device)
        if self.engine is not None:
            self.engine.refresh = self.refresh
        self.accelerator.wait_for_everyone()

    def sync_weights(self) -> None:
        """
        TRL's sync, timed. Servers that don't take the weights are left out until they do; without any, the rollout
        waits for one.
        """
        start = time.perf_counter()
        self._num_syncs += 1
        # Layers on a CPU multiply with packed copies of their weights, which loading in place leaves as they were.
        packed = self.mode == "colocate" and self.accelerator.device.type == "cpu"
        with reloaded_layers(self.llm) if packed else nullcontext(), self._servers_left_out():
            super().sync_weights()
        if self.mode == "colocate":  # TRL drops the prompts' KV cache alone, and not what the old encoder saw
            self.llm.llm_engine.reset_encoder_cache()
        self._sync_seconds = time.perf_counter() - start

    @contextmanager
    def _servers_left_out(self) -> Iterator[None]:
        """Inside, a sync goes to the servers that are up; those that fail are taken out of the rollouts."""
        if self.mode != "server" or not self.accelerator.is_main_process:
            yield
            return
        states = self.engine.states()
        back = [url for url, state in states.items() if state is State.RETURNED and self.vllm_client.rejoin(url)]
        taking_part = {url for url, state in states.items() if state is State.UP} | set(back)
        self.vllm_client.excluded = set(states) - taking_part
        words = ""
        try:
            yield
        except WeightSyncError as error:
            words = str(error)
            logger.warning("%s", words)
        behind = self.vllm_client.behind
        for url in taking_part:
            if url in behind:
                self.engine.lose(url, words)
            elif url in back:
                self.engine.join(url)

    def refresh(self, url: str) -> bool:
        """
        Brings a server that has come back to the weights of the last sync.

        Args:
            url (`str`):
                Its address.

        Returns:
            `bool`: Whether it has them. Parameters of a sharded model can't be sent while the other processes wait for
            a rollout, so such a server waits for the next sync, unless weights are files.

        Raises:
            [`WeightSyncError`]: If it does not take them.
        """
        if self._num_syncs == 0:
            return True
        if not self.accelerator.is_main_process:  # the main process sees to it
            client = SyncedVLLMClient(base_url=url, api_key=self.settings.api_key)
            return client.weight_version() == f"v{self._num_syncs}"
        params = None if self.is_sharded() else self._iter_named_params()
        return self.vllm_client.refresh(url, self._weight_metadata, params)

    def take_sync_seconds(self) -> float | None:
        """Seconds of the last weight sync, once; `None` if there was none since the last call."""
        seconds, self._sync_seconds = self._sync_seconds, None
        return seconds


@contextmanager
def reloaded_layers(llm: Any) -> Iterator[None]:
    """Inside, weights that are loaded into a colocated engine take effect layer by layer; see `weights/reload.py`."""
    from .weights.reload import (  # imports vLLM
        finish_reload,
        initialize_layerwise_reload,
        restore_unfinished_layers,
    )

    worker = llm.llm_engine.model_executor.driver_worker.model_runner
    initialize_layerwise_reload(worker.model)
    try:
        yield
    except BaseException:
        restore_unfinished_layers(worker.model, worker.vllm_config)
        raise
    finish_reload(worker.model, worker.model_config)
