"""TRL's generation with vLLM, with weights that reach several servers, of which some may be lost."""

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import torch

from ..errors import ConfigurationError
from ..trl_compat import VLLMGeneration, grpo_trainer
from ..weights import SyncRecord
from ..weights.client import image_features
from ..weights.fleet import FleetVLLMClient
from .addresses import check_address
from .connection import ServerSettings, connect, server_settings
from .in_process.hf_generate import replaced
from .main_process import MainProcess
from .pool import State
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
        self._sync: SyncRecord | None = None
        self._draft_counts: dict[str, DraftCounts] = {}  # by server, at the last look
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        if self.mode != "server":
            super()._init_vllm()
            from .in_process.vllm_colocated import keep_expanded_images  # imports vLLM

            keep_expanded_images(self.llm)
            return
        self.facts = self.main.broadcast(self._connect)

    def _connect(self) -> Any:
        self.vllm_client = FleetVLLMClient(
            self.engine,
            self.settings.directory,
            _dtype(self.facts),
            self.accelerator.device,
            self.group_port,
            self.server_timeout,
            self.settings.api_key,
        )
        self.vllm_client.init_communicator()
        self.drafted()  # what others had them draft does not count
        return self.facts

    # Weights

    def sync_weights(self) -> None:
        """TRL's sync, timed. Servers that don't take the weights are lost until they do."""
        start = time.perf_counter()
        layers: AbstractContextManager[None] = nullcontext()
        if self.mode == "colocate" and self.accelerator.device.type == "cpu":
            from ..weights.reload import reloaded_layers  # imports vLLM

            # Layers on a CPU multiply with packed copies of their weights, which loading in place leaves as they were.
            layers = reloaded_layers(self.llm)
        with layers:
            super().sync_weights()
        if self.mode == "colocate":  # TRL drops the prompts' KV cache alone, and not what the old encoder saw
            self.llm.llm_engine.reset_encoder_cache()
        num_bytes = self.vllm_client.num_bytes if self.mode == "server" and self.main.is_here else None
        self._sync = SyncRecord(time.perf_counter() - start, num_bytes)

    def pop_sync(self) -> SyncRecord | None:
        """What the last weight sync took, once; `None` if there was none since the last call."""
        sync, self._sync = self._sync, None
        return sync

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

    def bring_back(self) -> None:
        """
        Sends the weights of the last sync, which are still the trainer's, to servers that wait for them: over NCCL
        they have no other way. Parameters of a sharded model can't be gathered while the other processes wait for a
        rollout: its servers wait for the next sync.
        """
        sharded = (self._dist.is_fsdp or self._dist.is_zero3) and self.main.num_processes > 1
        if self.settings.directory is not None or sharded or self._weight_metadata is None:
            return
        if any(member.waits for member in self.engine.members.values()):
            self.vllm_client.catch_up(self._weight_metadata, self._iter_named_params())

    def image_features(self, images: list[Any]) -> list[dict[str, Any] | None]:
        """What a server makes of images: each process asks by itself."""
        up = [url for url, state in self.engine.states().items() if state is State.UP]
        return image_features(up, self.settings.api_key, images)

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
            self.vllm_client.leave(url)

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
            self.vllm_client.admit(url, _dtype(facts))
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


def _dtype(facts: ServerFacts) -> torch.dtype | None:
    """Of the servers' weights, where it is known and the same."""
    return getattr(torch, (facts.dtype or "").removeprefix("torch."), None)


@contextmanager
def synced_generation(args: Any, model: Any, train_dataset: Any) -> Iterator[None]:
    """
    Inside, TRL's `GRPOTrainer.__init__` builds a [`SyncedGeneration`] where it would build its `VLLMGeneration`. The
    main process connects to the servers first; an error inside closes the connections.

    The class is looked up as a global of TRL's module, and there is no other way to hand it another one; building
    TRL's first would open its NCCL communicator, which fails without CUDA. It can go when TRL takes the class as an
    argument.
    """
    settings = server_settings(args, model, train_dataset) if args.uses_servers else None
    engine, facts = connect(settings) if settings is not None and args.process_index == 0 else (None, None)
    make = partial(SyncedGeneration, settings=settings, engine=engine, facts=facts, pool_ratio=args.pool_ratio)
    try:
        with replaced(grpo_trainer, "VLLMGeneration", make):
            yield
    except BaseException:
        if engine is not None:
            engine.close()
        raise
