"""Connects the trainer to its vLLM servers, and checks them."""

import asyncio
import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from ..data_checks import has_images
from ..errors import ConfigurationError
from ..weights.adapter_fleet import refresh_adapter
from ..weights.files import WeightDirectory
from ..weights.fleet import resolve_weight_sync
from ..weights.update import refresh
from .monitor import Refresh
from .pool import Member, ServerPool
from .preflight import AdapterNeeds, AdapterRoom, Requirements, ServerFacts, ServerUnreachableError, check_server
from .ray_list import RaySource
from .sampling import request_body
from .server_list import RAY_PREFIX, FileSource, ServerList, ServerListError, ServerSource, check_source
from .vllm_api import VLLMServer
from .vllm_server import VLLMServerEngine
from .waiting import Deadlines, Waiting


JOIN_TIMEOUT_S = 10.0  # for a listed server, which was healthy, to answer
LIST_POLL_S = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerSettings:
    """Settings for servers in addition to TRL's arguments. Most are fields of the config."""

    base_urls: list[str]  # with a list, known once it was read
    directory: WeightDirectory | None  # for weights as files; `None` for NCCL
    deadlines: Deadlines
    api_key: str | None
    requirements: Requirements
    tail_urls: tuple[str, ...] = ()  # the tail servers among `base_urls`
    takes_turns: bool = False  # whether main and tail servers share GPUs
    source: ServerSource | None = None  # of the list of servers, if there is one
    seed: int = 0  # of the run
    adapters: WeightDirectory | None = None  # for weights as LoRA adapters, where they can be
    num_versions: int = 1  # of adapters in use at once


def server_settings(args: Any, model: Any, train_dataset: Any = None) -> ServerSettings:
    """Returns the settings for a run. The data set determines whether servers must support images."""
    weight_sync = resolve_weight_sync(args.weight_sync, args.device, args.weight_sync_dir)
    directory = WeightDirectory(args.weight_sync_dir) if weight_sync != "nccl" else None
    return ServerSettings(
        base_urls=[*args.server_urls, *args.tail_urls],
        tail_urls=tuple(args.tail_urls),
        takes_turns=args.vllm_tail_shares_gpus,
        source=None if args.vllm_server_list is None else make_source(args.vllm_server_list),
        directory=directory if weight_sync == "filesystem" else None,
        adapters=directory or WeightDirectory() if args.weight_sync in ("auto", "adapter") else None,
        num_versions=num_versions(args),
        deadlines=args.deadlines,
        seed=args.seed,
        api_key=args.api_key,
        requirements=Requirements(
            max_completion_length=args.max_completion_length,
            model_config=model_config(args, model),
            processed_logprobs=args.vllm_importance_sampling_correction,
            weight_transfer=weight_sync if weight_sync == "nccl" else None,
            timeout_s=args.vllm_server_timeout,
            images=has_images(train_dataset) is True,
            sampling=request_body("", args, args.vllm_structured_outputs_regex),
            sleep_mode=args.vllm_tail_shares_gpus,
            continuous=args.is_continuous,
            adapters=AdapterNeeds(num_versions=num_versions(args)) if weight_sync == "adapter" else None,
        ),
    )


def num_versions(args: Any) -> int:
    """
    Returns how many versions of an adapter are in use at once. A rollout without an end has answers of all versions
    that a batch may still have when the next one is loaded; others wait for the end of their rollout.
    """
    return 1 + args.max_staleness // args.steps_per_batch if args.is_continuous else 1


def make_source(value: str) -> ServerSource:
    """Returns the source for a value of `vllm_server_list`."""
    if value.startswith(RAY_PREFIX):
        return RaySource(value.removeprefix(RAY_PREFIX))
    return FileSource(value)


def listed_urls(value: str) -> list[str]:
    """Returns the servers of a list now. Raises [`ConfigurationError`] if there are none, or a trainer uses them."""
    check_source(value)
    source = make_source(value)
    try:
        urls = list(source.read().urls)
    except ServerListError as error:
        raise ConfigurationError(str(error)) from error
    finally:
        source.close()
    if not urls:
        raise ConfigurationError(f"`vllm_server_list` ({value!r}) has no healthy server. Wait for their start.")
    return urls


def model_config(args: Any, model: Any) -> PretrainedConfig:
    """Returns the model's config without loading its weights."""
    if not isinstance(model, str):
        return model.config
    init_kwargs = args.model_init_kwargs or {}
    if init_kwargs.get("config") is not None:
        return init_kwargs["config"]
    names = ("cache_dir", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")
    options = {name: init_kwargs[name] for name in names if name in init_kwargs}
    return AutoConfig.from_pretrained(model, **{"trust_remote_code": args.trust_remote_code, **options})


def connect(settings: ServerSettings) -> tuple[VLLMServerEngine, ServerFacts]:
    """Connects to all servers, waits for those that start, and checks them."""
    if settings.source is not None:
        settings = replace(settings, base_urls=[*_listed(settings), *settings.tail_urls])

    async def bring_back(pool: ServerPool, member: Member) -> bool:
        if member.adapter is not None and settings.adapters is not None:
            return await refresh_adapter(pool, member, settings.adapters)
        return await refresh(pool, member, settings.directory)

    engine = open_engine(settings, bring_back)
    try:
        return engine, _merge(_check_all(engine, settings), settings.tail_urls)
    except BaseException:
        engine.close()
        raise


def _check_all(engine: VLLMServerEngine, settings: ServerSettings) -> dict[str, ServerFacts]:
    """Checks all servers. A listed one that does not answer is left out, unless it is the last."""
    if settings.source is None:
        return engine.query(lambda server: check_server(server, settings.requirements))
    needs = replace(settings.requirements, timeout_s=JOIN_TIMEOUT_S)

    async def check(server: VLLMServer) -> ServerFacts | ServerUnreachableError:
        try:
            return await check_server(server, needs)
        except ServerUnreachableError as error:
            if server.base_url in settings.tail_urls:
                raise
            return error

    facts: dict[str, ServerFacts] = {}
    answers = engine.query(check)
    for url, answer in answers.items():
        if isinstance(answer, ServerFacts):
            facts[url] = answer
        elif set(engine.base_urls) == {url, *settings.tail_urls}:
            raise answer
        else:
            logger.warning("%s is listed and does not answer. It joins once it does.", url)
            engine.remove(url)
    return facts


def _listed(settings: ServerSettings) -> list[str]:
    """Waits until the list has all servers that it should have, or for the timeout if it has only some of them."""
    assert settings.source is not None
    waiting = Waiting(settings.requirements.timeout_s)
    while True:
        try:
            found, problem = settings.source.read(), ""
        except ServerListError as error:
            found, problem = ServerList(), str(error)
        state = problem or f"The list has {len(found.urls)} of {found.num_servers} servers."
        if found.urls and len(found.urls) >= found.num_servers:
            return list(found.urls)
        if waiting.seconds > settings.requirements.timeout_s:
            break
        waiting.log(f"Waiting for servers. {state}")
        time.sleep(LIST_POLL_S)
    if not found.urls:
        raise ServerUnreachableError(
            f"`vllm_server_list` has no server after `vllm_server_timeout` ({waiting.limit_s:g} s). {state} Start "
            "servers with `trl-darts serve` that write it."
        )
    logger.warning("%s The training starts with these, and the others join later.", state)
    return list(found.urls)


async def check_joining(
    settings: ServerSettings, facts: ServerFacts, server: VLLMServer, timeout_s: float | None = None
) -> None:
    """Raises if a server can't join the run. `facts` are those of the first servers."""
    timeout_s = JOIN_TIMEOUT_S if timeout_s is None else timeout_s
    found = await check_server(server, replace(settings.requirements, timeout_s=timeout_s))
    found.check_like(server.base_url, facts)
    if settings.directory is not None:
        await asyncio.to_thread(settings.directory.check_server, server.base_url)


def open_engine(settings: ServerSettings, refresh: Refresh, num_sharing: int = 1) -> VLLMServerEngine:
    tail = settings.tail_urls, settings.takes_turns
    return VLLMServerEngine(settings.base_urls, settings.deadlines, settings.api_key, *tail, refresh, num_sharing)


def _merge(facts: Mapping[str, ServerFacts], tail_urls: Collection[str]) -> ServerFacts:
    """
    Returns the common properties of all servers, with the slots of the main ones. Raises if servers don't match: tail
    servers take over the longest sequences.
    """
    main = [fact for url, fact in facts.items() if url not in tail_urls]
    dtypes = {fact.dtype for fact in facts.values()}
    slots = [fact.max_num_seqs for fact in main]
    merged = ServerFacts(
        model=main[0].model,
        max_model_len=min(fact.max_model_len for fact in main),
        drafts=any(fact.drafts for fact in facts.values()),
        max_num_seqs=None if None in slots else sum(filter(None, slots)),
        dtype=dtypes.pop() if len(dtypes) == 1 else None,
        adapters=AdapterRoom.common(fact.adapters for fact in facts.values()),
    )
    for url, fact in facts.items():
        fact.check_like(url, merged)
    return merged
