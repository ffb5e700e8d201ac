"""
Everything that trl_darts uses of TRL beyond its documented interface: names in its modules, the methods that the
trainer overrides, attributes that it replaces for the time of a call, and features that some versions lack.

Features are detected by name or signature, not by version. A name is imported on first use, because some of TRL's
modules import vLLM, which takes seconds.
"""

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import trl
from packaging.version import Version

from .errors import UnsupportedTRLError


TESTED = ("1.14.2", "1.16.0")  # oldest and newest, by `make test_versions`
NAMES = {
    "trl.chat_template_utils": (
        "add_response_schema",
        "get_training_chat_template",
        "is_chat_template_prefix_preserving",
        "parse_response",
    ),
    "trl.extras.profiling": ("profiling_context",),
    "trl.generation.vllm_client": ("VLLMClient",),
    "trl.generation.vllm_generation": ("VLLMGeneration",),
    "trl.import_utils": ("is_math_verify_available", "is_vllm_available"),
    "trl.models.utils": ("disable_gradient_checkpointing",),
    "trl.scripts.grpo": ("GRPOScriptArguments",),
    "trl.trainer": ("grpo_trainer",),
    "trl.trainer.utils": (
        "get_callable_name",
        "is_async_callable",
        "split_pixel_values_by_grid",
        "split_tensor_dict",
        "start_event_loop_in_daemon",
        "unsplit_pixel_values_by_grid",
        "use_adapter",
    ),
}
# Methods that are overridden or called, with their first arguments. `tests/test_contracts.py` checks their effect.
HOOKS = {
    "GRPOTrainer": {
        "__init__": (
            *("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
            *("reward_processing_classes", "callbacks", "optimizers", "quantization_config", "peft_config", "tools"),
            *("rollout_func", "environment_factory"),
        ),
        "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
        "_compute_loss": ("model", "inputs"),
        "_generate": ("prompts",),
        "_generate_and_score_completions": ("inputs",),
        "_generate_single_turn": ("prompt_ids", "images", "multimodal_fields", "num_generations"),
        # Older versions pass the other arguments on to another method.
        "_get_per_token_logps_and_entropies": ("model",),
        "_get_tool_suffix_ids": ("tool_messages",),
        "_get_train_sampler": ("dataset",),
        "_load_optimizer_and_scheduler": ("checkpoint",),
        "_load_rng_state": ("checkpoint",),
        "_prepare_inputs": ("generation_batch",),
        "_save_checkpoint": ("model", "trial"),
        "_tokenize_prompts": ("prompts",),
        "_tool_call_loop": ("prompts", "prompt_ids", "completion_ids", "completions"),
        "get_batch_samples": ("epoch_iterator", "num_batches", "device"),
        "get_train_dataloader": (),
    },
    "VLLMGeneration": {
        "_init_vllm": (),
        "_iter_named_params": (),
        "_place_features": ("features", "prompt_ids"),
        "generate": ("prompts", "images", "num_generations"),
        "sync_weights": (),
    },
    "VLLMClient": {"check_server": (), "image_features": ("images",)},
}

logger = logging.getLogger(__name__)
_MODULE_OF = {name: module for module, names in NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    hook = f"{_MODULE_OF[name]}.{name}"
    try:
        return getattr(import_module(_MODULE_OF[name]), name)
    except (AttributeError, ModuleNotFoundError) as error:
        raise _unsupported(hook, "which is missing") from error


@cache
def check_trl() -> None:
    """Raises an error that names a missing or changed hook of TRL. Warns once about an untested version."""
    for class_name, hooks in HOOKS.items():
        owner: Any = trl.GRPOTrainer if class_name == "GRPOTrainer" else __getattr__(class_name)  # type: ignore[attr-defined]
        for name, arguments in hooks.items():
            check_hook(owner, name, arguments)
    oldest, newest = map(Version, TESTED)
    if not oldest <= Version(trl.__version__) <= newest:
        logger.warning(
            "TRL %s was not tested with trl_darts: %s to %s were. Its hooks look right. If a run fails, install one "
            "of those.",
            trl.__version__,
            *TESTED,
        )


def check_hook(owner: type, name: str, arguments: tuple[str, ...]) -> None:
    """Raises if a method is missing or has other first arguments."""
    method, hook = getattr(owner, name, None), f"{owner.__name__}.{name}"
    if method is None:
        raise _unsupported(hook, "which is missing")
    found = tuple(inspect.signature(method).parameters)[1 : 1 + len(arguments)]
    if found != arguments:
        raise _unsupported(f"{hook}({', '.join(arguments)})", f"whose arguments are ({', '.join(found)})")


def has_fused_lm_head() -> bool:
    """Whether models can return the log-probs of their labels (`fused_lm_head=True`), as since TRL 1.15."""
    return hasattr(import_module("trl.trainer.utils"), "add_fused_lm_head")


def is_sharded(trainer: Any) -> bool:
    """Whether the model is sharded over several processes, so that a forward pass is a collective operation."""
    return bool(trainer._dist.is_fsdp or trainer._dist.is_zero3) and int(trainer.accelerator.num_processes) > 1


def parse_completion(processing_class: Any, ids: list[int], prefix: list[int], tools: Any) -> Any:
    """Calls TRL's `parse_response`, which since TRL 1.16 converts tool call arguments by the tools' schemas."""
    parse = __getattr__("parse_response")
    extra = {"tools": tools} if "tools" in inspect.signature(parse).parameters else {}
    return parse(processing_class, ids, prefix=prefix, **extra)


@contextmanager
def replaced(instance: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of an instance inside the context. It is restored if it was set on the instance before."""
    was_set = name in vars(instance)
    before = vars(instance).get(name)
    setattr(instance, name, value)
    try:
        yield
    finally:
        if was_set:
            setattr(instance, name, before)
        else:
            delattr(instance, name)


def _unsupported(hook: str, why: str) -> UnsupportedTRLError:
    oldest, newest = TESTED
    return UnsupportedTRLError(
        f"`trl` ({trl.__version__}) must have `{hook}`, {why} there. Install a version that was tested: "
        f"pip install 'trl>={oldest},<={newest}'"
    )
