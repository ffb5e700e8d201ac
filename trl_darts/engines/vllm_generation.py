"""TRL's generation with vLLM, with weights that reach several servers, of which some may be lost."""

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, replace
from functools import partial
from typing import Any

from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from ..errors import ConfigurationError, GenerationError, WeightSyncError
from ..weights.client import SyncedVLLMClient
from ..weights.fleet import make_client
from .addresses import check_address
from .connection import ServerSettings
from .hf_generate import replaced
from .main_process import MainProcess
from .pool import TURN_TIMEOUT_S, State
from .preflight import ServerFacts, check_server
from .vllm_api import DraftCounts, draft_counts
from .vllm_server import VLLMServerEngine


class SyncedGeneration(VLLMGeneration):
    """
    [`~trl.generation.vllm_generation.VLLMGeneration`] whose weights go through our clients, to servers that come and
    go.

    Overrides `_init_vllm` and `sync_weights`.
    """

    vllm_client: Any  # a `FleetVLLMClient`, on the main process

    def __init__(
        self,
        *args: Any,
        settings: ServerSettings | None = None,
        engine: VLLMServerEngine | None = None,
        facts: ServerFacts | None = None,
        pool_ratio: float = 1.0,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("max_num_seqs") is not None:
            kwargs["max_num_seqs"] = math.ceil(kwargs["max_num_seqs"] * pool_ratio)
        self.settings: Any = settings
        self.engine: Any = engine
        self.facts: Any = facts  # on every process, once vLLM is initialized
        self.main = MainProcess(kwargs["accelerator"])
        self._sync_seconds: float | None = None
        self._num_syncs = 0
        self._draft_counts: dict[str, DraftCounts] = {}  # by server, at the last look
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        if self.mode != "server":
            super()._init_vllm()
            from .vllm_colocated import keep_expanded_images  # imports vLLM

            keep_expanded_images(self.llm)
            return
        self.facts = self.main.broadcast(self._connect)

    def _connect(self) -> Any:
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
        self.drafted()  # what others had them draft does not count
        return self.facts

    # Weights

    def sync_weights(self) -> None:
        """
        TRL's sync, timed. Servers that don't take the weights are left out until they do; without any, the rollout
        waits for one.
        """
        start = time.perf_counter()
        self._num_syncs += 1
        layers: AbstractContextManager[None] = nullcontext()
        if self.mode == "colocate" and self.accelerator.device.type == "cpu":
            from ..weights.reload import reloaded_layers  # imports vLLM

            # Layers on a CPU multiply with packed copies of their weights, which loading in place leaves as they were.
            layers = reloaded_layers(self.llm)
        with layers, self._servers_left_out():
            super().sync_weights()
        if self.mode == "colocate":  # TRL drops the prompts' KV cache alone, and not what the old encoder saw
            self.llm.llm_engine.reset_encoder_cache()
        self._sync_seconds = time.perf_counter() - start

    def pop_sync_seconds(self) -> float | None:
        """Seconds of the last weight sync, once; `None` if there was none since the last call."""
        seconds, self._sync_seconds = self._sync_seconds, None
        return seconds

    def drafted(self) -> DraftCounts | None:
        """
        What the servers have drafted since the last call, on the main process; `None` where they don't. One that does
        not answer, or is new, counts from the next call on.
        """
        if self.engine is None or not self.facts.drafts or not self.main.is_here:
            return None
        now = dict(zip(self.engine.base_urls, self.engine.query(draft_counts), strict=True))
        before, self._draft_counts = self._draft_counts, {url: n for url, n in now.items() if n is not None}
        new = [counts.since(before[url]) for url, counts in self._draft_counts.items() if url in before]
        return DraftCounts(*map(sum, zip(*map(astuple, new), strict=True))) if new else None

    @contextmanager
    def _servers_left_out(self) -> Iterator[None]:
        """Inside, a sync goes to the servers that are up; those that fail are taken out of the rollouts."""
        if self.mode != "server" or not self.main.is_here:
            yield
            return
        states = self.engine.states()
        back = [url for url, state in states.items() if state is State.RETURNED and self.vllm_client.rejoin(url)]
        taking_part = {url for url, state in states.items() if state is State.UP} | set(back)
        self.vllm_client.excluded = set(states) - taking_part
        self._tell_tail("/wake_up", tags="weights")
        problem = WeightSyncError("")
        try:
            yield
        except WeightSyncError as error:
            problem = error
        self._tell_tail("/sleep", level="1")
        behind = self.vllm_client.behind
        for url in taking_part:
            if url in behind:
                self.engine.lose(url, problem.failures.get(url, str(problem)))
            elif url in back:
                self.engine.join(url)

    def _tell_tail(self, path: str, **params: str) -> None:
        """Tail servers that sleep have no weights to update: they are woken meanwhile, without their caches."""
        if not self.settings.takes_turns:
            return
        for client in [client for client in self.vllm_client.active if client.base_url in self.settings.tail_urls]:
            try:
                client.call(path, params=params, timeout_s=TURN_TIMEOUT_S)
            except WeightSyncError as error:
                self.engine.lose(client.base_url, str(error))
                self.vllm_client.excluded.add(client.base_url)

    def bring_back(self) -> None:
        """Uses servers again that have come back, once they have the current weights."""
        for url, state in self.engine.states().items():
            if state is not State.RETURNED:
                continue
            try:
                if self.refresh(url):
                    self.engine.join(url)
            except Exception as error:
                self.engine.lose(url, f"{type(error).__name__}: {error}")

    def refresh(self, url: str) -> bool:
        """
        Brings a server that has come back to the weights of the last sync, and returns whether it has them. Parameters
        of a sharded model can't be sent while the other processes wait for a rollout, so such a server waits for the
        next sync, unless weights are files. [`WeightSyncError`] if it does not take them.
        """
        if self._num_syncs == 0:
            return True
        if not self.main.is_here:  # the main process sees to it
            client = SyncedVLLMClient(base_url=url, api_key=self.settings.api_key)
            return client.weight_version() == f"v{self._num_syncs}"
        sharded = (self._dist.is_fsdp or self._dist.is_zero3) and self.main.num_processes > 1
        params = None if sharded else self._iter_named_params()
        return self.vllm_client.refresh(url, self._weight_metadata, params)

    def image_features(self, images: list[Any]) -> list[dict[str, Any] | None]:
        """What a server makes of images, by the first that answers: it does not depend on weights."""
        if self.main.is_here:
            return self.vllm_client.image_features(images)
        messages = []
        for url in [url for url, state in self.engine.states().items() if state is State.UP]:
            try:
                return SyncedVLLMClient(base_url=url, api_key=self.settings.api_key).image_features(images)
            except OSError as error:  # also those of requests; the next server may be there
                messages.append(f"{url}: {type(error).__name__}: {error}")
        raise GenerationError(f"No vLLM server processed the images. {'; '.join(messages)}")

    # Servers that come and go

    def add_server(self, url: str) -> None:
        """
        Adds a server between two steps, for example in a callback. Called on every process at once.

        It gets the current weights before it is asked for a token. With FSDP or ZeRO-3 that is in the next weight
        sync, unless `weight_sync="filesystem"`.

        Args:
            url (`str`):
                Its address.

        Raises:
            [`ConfigurationError`]: If it can't serve this training, or is one of the servers already.
            [`ServerUnreachableError`]: If it does not answer within `vllm_server_timeout`.
        """
        url = url.strip().rstrip("/")
        check_address("url", url)
        self.facts = self.main.broadcast(lambda: self._add(url))
        self._set_servers([*self.settings.base_urls, url])

    def remove_server(self, url: str) -> None:
        """
        Removes a server between two steps. Called on every process at once.

        Args:
            url (`str`):
                Its address.

        Raises:
            [`ConfigurationError`]: If it is none of the servers, or the last.
        """
        url = url.strip().rstrip("/")

        def remove() -> None:
            self.engine.remove(url)
            self.vllm_client.remove(url)

        self.main.run(remove)
        self._set_servers([known for known in self.settings.base_urls if known != url])

    def _add(self, url: str) -> ServerFacts:
        facts = self.engine.add(url, lambda server: check_server(server, self.settings.requirements))
        try:
            if facts.model != self.facts.model:
                raise ConfigurationError(
                    f"The vLLM server at {url} serves {facts.model!r}, and the others {self.facts.model!r}. Start "
                    "it with the same model or `--served-model-name`."
                )
            self.vllm_client.add(url)
        except BaseException:
            self.engine.remove(url)
            raise
        return replace(self.facts, max_model_len=min(facts.max_model_len, self.facts.max_model_len))

    def _set_servers(self, base_urls: list[str]) -> None:
        """The other processes connect for the later turns of a tool loop, when they need to."""
        self.settings = replace(self.settings, base_urls=base_urls)
        if not self.main.is_here and self.engine is not None:
            self.engine.close()
            self.engine = None


def synced_generation(
    settings: ServerSettings | None, engine: VLLMServerEngine | None, facts: ServerFacts | None, pool_ratio: float
) -> AbstractContextManager[None]:
    """
    Inside, TRL's `GRPOTrainer.__init__` builds a [`SyncedGeneration`] where it would build its `VLLMGeneration`.

    The class is looked up as a global of TRL's module, and there is no other way to hand it another one; building
    TRL's first would open its NCCL communicator, which fails without CUDA. It can go when TRL takes the class as an
    argument.
    """
    make = partial(SyncedGeneration, settings=settings, engine=engine, facts=facts, pool_ratio=pool_ratio)
    return replaced(grpo_trainer, "VLLMGeneration", make)
