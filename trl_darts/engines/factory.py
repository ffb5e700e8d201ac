"""Which engine a trainer's settings ask for."""

from collections.abc import Callable
from functools import partial
from typing import Any

from .hf_generate import decode_with_transformers
from .in_process import InProcessEngine
from .main_process import MainProcess
from .servers import ServerEngine


def make_engine(
    trainer: Any,
    main: MainProcess,
    generate: Callable[..., Any],
    process_rows: Callable[[list[int]], tuple[Any, Any]],
) -> ServerEngine | InProcessEngine:
    """The engine of a trainer; `generate` and `process_rows` as in [`decode_with_transformers`]."""
    args = trainer.args
    if args.uses_servers:
        return ServerEngine(trainer.vllm_generation)
    if not args.use_vllm:
        decode = partial(decode_with_transformers, trainer, generate, process_rows)
        return InProcessEngine(main, decode, args.length_ranked)
    from .vllm_colocated import decode_colocated  # imports vLLM

    size = args.vllm_tensor_parallel_size
    group = trainer.vllm_generation.tp_group if size > 1 else None
    return InProcessEngine(main, partial(decode_colocated, trainer.vllm_generation), args.length_ranked, size, group)
