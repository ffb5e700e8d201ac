"""TRL's generation with vLLM, extended by weight syncs to several servers, some of which may be lost."""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import torch
from accelerate.utils import is_peft_model

from ..errors import ConfigurationError, WeightSyncError
from ..trl_compat import VLLMGeneration, grpo_trainer, replaced
from ..weights import SyncRecord
from ..weights.adapter import Adapter, is_quantized, why_no_adapter
from ..weights.adapter_fleet import AdapterFleet, check_own, unload_run
from ..weights.client import image_features
from ..weights.files import WeightDirectory
from ..weights.fleet import FleetVLLMClient
from .addresses import check_address
from .connection import ServerSettings, check_joining, connect, open_engine, server_settings
from .discovery import Discovery
from .main_process import MainProcess
from .monitor import shows_weights
from .pool import State
from .preflight import AdapterNeeds, ServerFacts
from .server_metrics import DraftCounts, draft_counts
from .vllm_server import VLLMServerEngine


logger = logging.getLogger(__name__)


class SyncedGeneration(VLLMGeneration):
    """
    [`~trl.generation.vllm_generation.VLLMGeneration`] that sends weights through [`FleetVLLMClient`], to servers that
    can be added, removed and lost. Overrides `_init_vllm` and `sync_weights`.
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
        self.engine: Any = engine  # on other processes than the main one, `None` until it is needed
        self.facts: Any = facts  # on every process, once vLLM is initialized
        self.main = MainProcess(kwargs["accelerator"])
        self._sync: SyncRecord | None = None
        self._adapter: Adapter | None = None  # on every process, if weights are adapters
        self._run: str | None = None  # name of the run's adapters
        self._draft_counts: dict[str, DraftCounts] = {}  # by server, at the last call
        super().__init__(*args, **kwargs)

    def _init_vllm(self) -> None:
        if self.mode != "server":
            super()._init_vllm()
            from .in_process.vllm_colocated import keep_expanded_images  # imports vLLM

            keep_expanded_images(self.llm)
            return
        self.facts, base_urls, self._run = self.main.broadcast(self._connect)
        self.settings = replace(self.settings, base_urls=base_urls)
        if self._run is not None:
            self._adapter = Adapter(self.model, self._served_dtype)

    @property
    def _served_dtype(self) -> torch.dtype | None:
        dtype: torch.dtype | None = getattr(torch, (self.facts.dtype or "").removeprefix("torch."), None)
        return dtype

    def _connect(self) -> Any:
        run = self._send_adapters()
        if run is None:
            self.engine.query(check_own)
            self.vllm_client = FleetVLLMClient(
                self.engine,
                self.settings.directory,
                self._served_dtype,
                self.accelerator.device,
                self.group_port,
                self.server_timeout,
            )
            self.vllm_client.init_communicator()
        self.drafted()  # excludes drafts of earlier runs
        base_urls = self.engine.base_urls
        if self.settings.source is not None:
            check = partial(check_joining, self.settings, self.facts)
            listed = set(base_urls) - set(self.settings.tail_urls)
            self.engine.discover(Discovery(self.settings.source, check, listed))
        return self.facts, base_urls, run

    def _send_adapters(self) -> str | None:
        """
        Makes weights LoRA adapters if the model's are one and all servers load it. Returns the name of the run's
        adapters. Otherwise logs why they are merged, or raises if they can't be.
        """
        files, required = self.settings.adapters, self.settings.requirements.adapters is not None
        if files is None or not (required or is_peft_model(self.model)):
            return None
        why = why_no_adapter(self.model, self._dist.fsdp_version) or self._try_adapter(files)
        if why is None:
            name: str = files.name
            self.engine.use_adapters(name)
            self.engine.before_close(partial(unload_run, self.engine.call(self.engine.pool())))
            logger.info("Weights are sent as LoRA adapters, without a pause. The servers' own weights stay.")
            return name
        if required or is_quantized(self.model):
            given = "`weight_sync` ('adapter')" if required else "The model's quantized weights can't be merged, which"
            remedy = " Correct that, or set `weight_sync='auto'`, which sends whole weights then." if required else ""
            raise ConfigurationError(f"{given} needs a LoRA adapter that all servers load, and {why}.{remedy}")
        logger.warning("The LoRA adapter is merged into the model, all of which is sent in each weight sync: %s.", why)
        return None

    def _try_adapter(self, files: WeightDirectory) -> str | None:
        """Has all servers load an adapter of the same shape. Returns why it does not work, with the remedy."""
        if self.settings.takes_turns:
            return "`vllm_tail_shares_gpus` (True) lets servers sleep. Use separate GPUs for the tail servers"
        adapter = Adapter(self.model, self._served_dtype)
        needs = AdapterNeeds(adapter.rank, self.settings.num_versions)
        if (why := self.facts.adapters.problem(needs)) is not None:
            return why
        fleet = AdapterFleet(self.engine, files)
        try:
            fleet.try_zeros(adapter)
        except WeightSyncError as error:
            return str(error).rstrip(".")
        self.vllm_client = fleet
        # Servers that join must load it too.
        requirements = replace(self.settings.requirements, adapters=needs, weight_transfer=None)
        self.settings = replace(self.settings, requirements=requirements, directory=None)
        return None

    @property
    def own_engine(self) -> VLLMServerEngine:
        """This process's engine, which other processes than the main one create for their first later turn."""
        if self.engine is None:
            self.engine = open_engine(self.settings, shows_weights, self.main.num_processes)
            if self._run is not None:
                self.engine.use_adapters(self._run)
        engine: VLLMServerEngine = self.engine
        return engine

    @property
    def num_main_servers(self) -> int:
        """Number of servers at the start, without the tail servers."""
        return len(self.settings.base_urls) - len(self.settings.tail_urls)

    # Weights

    @property
    def sends_adapters(self) -> bool:
        """Whether weights are sent as LoRA adapters."""
        return self._adapter is not None

    def sync_weights(self) -> None:
        """Runs TRL's sync and measures it. A server whose update fails is lost until it has the weights."""
        start = time.perf_counter()
        layers: AbstractContextManager[None] = nullcontext()
        if self.mode == "colocate" and self.accelerator.device.type == "cpu":
            from ..weights.reload import reloaded_layers  # imports vLLM

            # Layers on a CPU multiply with packed copies of their weights, which loading in place does not update.
            layers = reloaded_layers(self.llm)
        with layers:
            if self._adapter is None:
                super().sync_weights()
            else:
                self._sync_adapter(self._adapter)
        if self.mode == "colocate":  # TRL resets only the prefix cache, not the image encoder's
            self.llm.llm_engine.reset_encoder_cache()
        num_bytes = self.vllm_client.num_bytes if self.mode == "server" and self.main.is_here else None
        self._sync = SyncRecord(time.perf_counter() - start, num_bytes)

    def _sync_adapter(self, adapter: Adapter) -> None:
        tensors = adapter.tensors(self._dist.gather_params, self.accelerator.device)
        if self.main.is_here:
            self.vllm_client.update_adapter(tensors, adapter.config)

    def end_run(self) -> None:
        """Unloads the run's adapters. Weights must be synced before the next rollout. Each process can call this."""
        if self._adapter is not None and self.main.is_here:
            self.vllm_client.unload_all()

    def pop_sync(self) -> SyncRecord | None:
        """Returns the record of the last weight sync, or `None` if there was none since the last call."""
        sync, self._sync = self._sync, None
        return sync

    def pop_share(self) -> float | None:
        """
        Returns the share of this run in the requests on its servers since the last call, on the main process. `None`
        if it is unknown, or no other run can use them.
        """
        if self._adapter is None or not self.main.is_here:
            return None
        share: float | None = self.engine.call(self.engine.pool()).pop_share()
        return share

    def drafted(self) -> DraftCounts | None:
        """
        Returns the servers' draft counts since the last call, on the main process, or `None` if they do not draft. A
        server that does not answer or is new is counted from the next call on.
        """
        if self.engine is None or not self.facts.drafts or not self.main.is_here:
            return None
        now = self.engine.query(draft_counts)
        before, self._draft_counts = self._draft_counts, {url: n for url, n in now.items() if n is not None}
        new = [counts.since(before[url]) for url, counts in self._draft_counts.items() if url in before]
        return DraftCounts(*map(sum, zip(*map(astuple, new), strict=True))) if new else None

    def bring_back(self) -> None:
        """
        Sends the weights of the last sync, which the trainer still has, to waiting servers over NCCL. With files,
        servers load them themselves. Parameters of a sharded model can't be gathered while the other processes wait
        for a rollout, so the servers then wait for the next sync.
        """
        sharded = (self._dist.is_fsdp or self._dist.is_zero3) and self.main.num_processes > 1
        has_files = self.settings.directory is not None or self._adapter is not None
        if has_files or sharded or self._weight_metadata is None:
            return
        if any(member.waits for member in self.engine.members.values()):
            self.vllm_client.catch_up(self._weight_metadata, self._iter_named_params())

    def image_features(self, images: list[Any], prompts: list[list[int]]) -> list[dict[str, Any] | None]:
        """Requests the features of the images of each prompt from a server. Each process can call this alone."""
        up = [url for url, state in self.own_engine.states().items() if state is State.UP]
        features = image_features(self.own_engine, up, images)
        return [self._place_features(*pair) for pair in zip(features, prompts, strict=True)]

    # Servers are added and removed. The engines of other processes follow the main one's after each rollout.

    def add_server(self, url: str) -> None:
        """
        Adds a server between two steps, for example in a callback. Called on every process at once.

        It gets the current weights before its first request. With FSDP or ZeRO-3, it gets them in the next weight
        sync, unless `weight_sync="filesystem"`.

        Args:
            url (`str`):
                Its address.

        Raises:
            [`ConfigurationError`]: If it can't serve this run, or is one of the servers already.
            [`ServerUnreachableError`]: If it does not answer within `vllm_server_timeout`.
        """
        url = url.strip().rstrip("/")
        check_address("url", url)
        check = partial(check_joining, self.settings, self.facts, timeout_s=self.settings.requirements.timeout_s)
        self.main.run(lambda: self.engine.add(url, check))

    def remove_server(self, url: str) -> None:
        """
        Removes a server between two steps. Called on every process at once.

        Args:
            url (`str`):
                Its address.

        Raises:
            [`ConfigurationError`]: If it is not one of the servers, or is the last one.
        """
        self.main.run(lambda: self.engine.remove(url.strip().rstrip("/")))


@contextmanager
def synced_generation(args: Any, model: Any, train_dataset: Any) -> Iterator[None]:
    """
    Inside this context, TRL's `GRPOTrainer.__init__` builds a [`SyncedGeneration`] instead of its `VLLMGeneration`.
    The main process connects to the servers first; an error inside closes the connections.

    TRL looks the class up in its module's globals and takes no other. Building TRL's own first would form its NCCL
    group, which fails without CUDA. Remove this when TRL takes the class as an argument.
    """
    settings = server_settings(args, model, train_dataset) if args.uses_servers else None
    engine = None
    try:
        engine, facts = connect(settings) if settings is not None and args.process_index == 0 else (None, None)
        make = partial(SyncedGeneration, settings=settings, engine=engine, facts=facts, pool_ratio=args.pool_ratio)
        with replaced(grpo_trainer, "VLLMGeneration", make):
            yield
    except BaseException:
        if engine is not None:
            engine.close()
        if settings is not None and settings.source is not None:
            settings.source.close()
        raise
