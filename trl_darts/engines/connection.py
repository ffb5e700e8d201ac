"""Connects the trainer to its vLLM servers, and checks them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from ..checks import has_images
from ..errors import ConfigurationError
from ..weights.files import WeightDirectory
from ..weights.fleet import resolve_weight_sync
from ..weights.update import refresh
from .deadlines import Deadlines
from .pool import Member, Refresh
from .preflight import Requirements, ServerFacts, check_server
from .vllm_server import VLLMServerEngine


@dataclass(frozen=True)
class ServerSettings:
    """Settings for servers in addition to TRL's arguments. Most are fields of the config."""

    base_urls: list[str]
    directory: WeightDirectory | None  # for weights as files; `None` for NCCL
    deadlines: Deadlines
    api_key: str | None
    requirements: Requirements
    tail_urls: tuple[str, ...] = ()  # the tail servers among `base_urls`
    takes_turns: bool = False  # whether main and tail servers share GPUs


def server_settings(args: Any, model: Any, train_dataset: Any = None) -> ServerSettings:
    """Returns the settings for a run. The data set determines whether servers must support images."""
    weight_sync = resolve_weight_sync(args.weight_sync, args.device, args.weight_sync_dir)
    return ServerSettings(
        base_urls=[*args.server_urls, *args.tail_urls],
        tail_urls=tuple(args.tail_urls),
        takes_turns=args.vllm_tail_shares_gpus,
        directory=WeightDirectory(args.weight_sync_dir) if weight_sync == "filesystem" else None,
        deadlines=args.deadlines,
        api_key=args.api_key,
        requirements=Requirements(
            max_completion_length=args.max_completion_length,
            model_config=model_config(args, model),
            processed_logprobs=args.vllm_importance_sampling_correction,
            weight_transfer=None if weight_sync == "filesystem" else weight_sync,
            timeout_s=args.vllm_server_timeout,
            images=has_images(train_dataset),
            sampling={"min_p": args.min_p, **(args.generation_kwargs or {})},
            sleep_mode=args.vllm_tail_shares_gpus,
        ),
    )


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
    directory = settings.directory

    async def bring_back(member: Member, version: int) -> bool:
        return await refresh(member, version, None if directory is None else directory.path(version))

    engine = open_engine(settings, bring_back)
    try:
        facts = engine.query(lambda server: check_server(server, settings.requirements))
        return engine, _merge(dict(zip(settings.base_urls, facts, strict=True)), settings.tail_urls)
    except BaseException:
        engine.close()
        raise


def open_engine(settings: ServerSettings, refresh: Refresh) -> VLLMServerEngine:
    tail = settings.tail_urls, settings.takes_turns
    return VLLMServerEngine(settings.base_urls, settings.deadlines, settings.api_key, *tail, refresh)


def _merge(facts: Mapping[str, ServerFacts], tail_urls: Collection[str]) -> ServerFacts:
    """Returns the common properties of all servers, with the slots of the main ones. Raises if servers don't match."""
    names = sorted({fact.model for fact in facts.values()})
    if len(names) > 1:
        both = " and `vllm_tail_server_url`" if tail_urls else ""
        raise ConfigurationError(
            f"The servers of `vllm_server_base_url`{both} serve under different names "
            f"({', '.join(map(repr, names))}). Start them with the same model or `--served-model-name`."
        )
    main = [fact for url, fact in facts.items() if url not in tail_urls]
    limit, drafts = min(fact.max_model_len for fact in main), any(fact.drafts for fact in facts.values())
    for url in tail_urls:
        if facts[url].max_model_len < limit:
            raise ConfigurationError(
                f"The vLLM server at {url} of `vllm_tail_server_url` has `max_model_len` "
                f"({facts[url].max_model_len}), which must be at least that of the main servers ({limit}): it takes "
                "over their longest sequences. Restart it with a larger `--max-model-len`."
            )
    dtypes = {fact.dtype for fact in facts.values()}
    slots = [fact.max_num_seqs for fact in main]
    all_slots = None if None in slots else sum(filter(None, slots))
    return ServerFacts(names[0], limit, drafts, all_slots, dtypes.pop() if len(dtypes) == 1 else None)
