"""What the trainer asks of its vLLM servers, and the first contact with them."""

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from ..checks import has_images
from ..errors import ConfigurationError
from ..weights.fleet import resolve_weight_sync
from .deadlines import Deadlines
from .preflight import Requirements, ServerFacts, check_server
from .vllm_server import VLLMServerEngine


@dataclass(frozen=True)
class ServerSettings:
    """What is needed of servers beyond TRL's own arguments. Most are fields of the config."""

    base_urls: list[str]
    weight_sync: str
    weight_sync_dir: str | None
    deadlines: Deadlines
    api_key: str | None
    requirements: Requirements


def server_settings(args: Any, model: Any, train_dataset: Any = None) -> ServerSettings:
    """The settings of a training. Images in the data set decide what a server must be able to do."""
    weight_sync = resolve_weight_sync(args.weight_sync, args.device, args.weight_sync_dir)
    return ServerSettings(
        base_urls=args.server_urls,
        weight_sync=weight_sync,
        weight_sync_dir=args.weight_sync_dir,
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
        ),
    )


def model_config(args: Any, model: Any) -> PretrainedConfig:
    """The model's config, without its weights."""
    if not isinstance(model, str):
        return model.config
    init_kwargs = args.model_init_kwargs or {}
    if init_kwargs.get("config") is not None:
        return init_kwargs["config"]
    names = ("cache_dir", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")
    options = {name: init_kwargs[name] for name in names if name in init_kwargs}
    return AutoConfig.from_pretrained(model, **{"trust_remote_code": args.trust_remote_code, **options})


def connect(settings: ServerSettings) -> tuple[VLLMServerEngine, ServerFacts]:
    """Connects to the servers and checks them."""
    engine = VLLMServerEngine(settings.base_urls, settings.deadlines, settings.api_key)
    try:
        facts = engine.query(lambda server: check_server(server, settings.requirements))
    except BaseException:
        engine.close()
        raise
    names = sorted({fact.model for fact in facts})
    if len(names) > 1:
        engine.close()
        raise ConfigurationError(
            f"The servers of `vllm_server_base_url` serve under different names ({', '.join(map(repr, names))}). "
            "Start them with the same model or `--served-model-name`."
        )
    limit, drafts = min(fact.max_model_len for fact in facts), any(fact.drafts for fact in facts)
    slots = [fact.max_num_seqs for fact in facts]
    all_slots = None if None in slots else sum(filter(None, slots))
    return engine, ServerFacts(names[0], limit, drafts, all_slots)
