"""Builds a trainer's engine, and decodes with transformers through TRL."""

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from ..trl_compat import replaced
from .batch import PromptBatch
from .engine import Engine
from .in_process.hf_generate import SchedulerCriterion, stopping_criterion
from .in_process.processes import InProcessEngine
from .in_process.share import Share, Slot
from .main_process import MainProcess
from .servers import ServerEngine


def make_engine(trainer: Any, main: MainProcess, generate: Callable[..., Any]) -> Engine:
    """Builds the engine for a trainer's settings. `generate` is TRL's `_generate_single_turn`."""
    args = trainer.args
    if args.uses_servers:
        return ServerEngine(trainer.vllm_generation)
    if not args.use_vllm:
        # No cycle: the trainer, and with it the engine, is freed when its last reference is deleted.
        owner: Any = weakref.ref(trainer)
        method: Any = weakref.WeakMethod(generate)

        def decode(batch: PromptBatch, share: Share, own_slots: list[Slot]) -> None:
            decode_with_transformers(owner(), method(), batch, share, own_slots)

        num_positions = getattr(trainer.model.config.get_text_config(), "max_position_embeddings", None) or math.inf
        return InProcessEngine(main, decode, args.submit_order, num_positions=num_positions)
    from .in_process.vllm_colocated import decode_colocated  # imports vLLM

    size = args.vllm_tensor_parallel_size
    group = trainer.vllm_generation.tp_group if size > 1 else None
    return InProcessEngine(main, partial(decode_colocated, trainer.vllm_generation), args.submit_order, size, group)


def decode_with_transformers(
    trainer: Any,
    generate: Callable[..., Any],
    batch: PromptBatch,
    share: Share,
    own_slots: list[Slot],
) -> None:
    """Decodes a share with TRL's generation, which gets the prompts of candidates instead of rows."""
    rows = [batch.row_of(slot.group_id, slot.index) for slot in own_slots]
    images, fields = batch.images, batch.fields
    if batch.multimodal and rows != list(range(len(batch.rows)))[batch.mine]:
        images, fields = process_rows(trainer, [row - batch.mine.start for row in rows])
    prompts = [batch.rows[row] for row in rows]
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    if trainer.use_transformers_continuous_batching:
        from .in_process.hf_continuous import scheduled_batching  # not every supported transformers has it

        with scheduled_batching(model, share, trainer.eos_token_ids):
            generate(prompts, images, fields, batch.num_generations)
    else:
        criterion = SchedulerCriterion(share, trainer.eos_token_ids)
        with stopping_criterion(model, criterion):
            completions, _ = generate(prompts, images, fields, batch.num_generations)
        criterion.finish(completions)


def process_rows(trainer: Any, rows: list[int]) -> Any:
    """
    Returns images and the processor's fields for some rows of this process, which may repeat. Each kind of model
    splits the fields of a batch differently, so the processor computes them again.
    """
    has_environments = trainer.environment_factories is not None
    environments = [trainer._batch_environments[row] for row in rows] if has_environments else []
    with replaced(trainer, "_batch_environments", environments):
        return trainer._tokenize_prompts([trainer._prompts[row] for row in rows])[1:]
