"""Which engine a trainer's settings ask for, and how transformers decodes for it."""

from collections.abc import Callable
from functools import partial
from typing import Any

from .batch import PromptBatch
from .hf_generate import SchedulerCriterion, stopping_criterion
from .in_process import InProcessEngine
from .main_process import MainProcess
from .servers import ServerEngine
from .share import Share, Slot


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
        return InProcessEngine(main, decode, args.submit_order)
    from .vllm_colocated import decode_colocated  # imports vLLM

    size = args.vllm_tensor_parallel_size
    group = trainer.vllm_generation.tp_group if size > 1 else None
    return InProcessEngine(main, partial(decode_colocated, trainer.vllm_generation), args.submit_order, size, group)


def decode_with_transformers(
    trainer: Any,
    generate: Callable[..., Any],
    process_rows: Callable[[list[int]], tuple[Any, Any]],
    batch: PromptBatch,
    share: Share,
    feed: list[Slot],
) -> None:
    """
    Has TRL generate for a share of the candidates instead of the rows: `generate` is its `_generate_single_turn`, and
    `process_rows` gives images and the processor's fields for rows of this process.
    """
    rows = [batch.row_of(slot.group_id, slot.index) for slot in feed]
    images, fields = batch.images, batch.fields
    if batch.multimodal and rows != list(range(len(batch.rows)))[batch.mine]:
        images, fields = process_rows([row - batch.mine.start for row in rows])
    prompts = [batch.rows[row] for row in rows]
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    if trainer.use_transformers_continuous_batching:
        from .hf_continuous import scheduled_batching  # not in every supported transformers

        with scheduled_batching(model, share, trainer.eos_token_ids):
            generate(prompts, images, fields, batch.num_generations)
    else:
        criterion = SchedulerCriterion(share, trainer.eos_token_ids)
        with stopping_criterion(model, criterion):
            completions, _ = generate(prompts, images, fields, batch.num_generations)
        criterion.finish(completions)
