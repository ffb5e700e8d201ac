"""Converts the trainer's parameters, as TRL yields them, for servers."""

import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from ..errors import WeightSyncError


NamedParams = Iterator[tuple[str, torch.Tensor]]
Metadata = list[tuple[str, str, list[int]]]  # name, dtype (`"bfloat16"`) and shape of each


@contextmanager
def whole(named_params: NamedParams, num_params: int) -> Iterator[NamedParams]:
    """
    Yields the first `num_params` items, and exhausts the iterator when the context is left, also after an error.

    TRL's iterator gathers sharded parameters together with the other processes, so every item must be requested. After
    its last item it unmerges LoRA adapters *in place*, so tensors must be sent before it is exhausted. (TRL 1.16 sends
    the last packed buffer of each sync over NCCL too late, without its adapters.)
    """
    try:
        yield itertools.islice(named_params, num_params)
    except Exception:
        for _ in named_params:
            pass
        raise
    surplus = [name for name, _ in named_params]
    if surplus:
        raise WeightSyncError(f"{len(surplus)} tensors without metadata were not sent: {', '.join(surplus[:5])}.")


def as_served(metadata: Metadata, dtype: torch.dtype | None) -> Metadata:
    """
    Returns the metadata with the dtypes to send: matrices in the servers' `dtype` if it is smaller (`None` if the
    servers differ). Vectors keep their dtype, because they are small, and servers keep some of them in float32.
    """
    if dtype is None:
        return metadata

    def served(name: str, current: str, shape: list[int]) -> tuple[str, str, list[int]]:
        found = getattr(torch, current)
        sent = smaller_dtype(found, dtype) if len(shape) > 1 else found
        return name, str(sent).removeprefix("torch."), shape

    return [served(*entry) for entry in metadata]


def smaller_dtype(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the servers' `dtype` if it is smaller than that of a parameter, which is kept otherwise."""
    is_smaller = dtype is not None and own.is_floating_point and dtype.itemsize < own.itemsize
    return dtype if is_smaller and dtype is not None else own


def cast(metadata: Metadata, named_params: Iterable[tuple[str, torch.Tensor]]) -> NamedParams:
    """Casts the parameters to the dtypes of their metadata."""
    for (name, dtype, _), (_, tensor) in zip(metadata, named_params, strict=True):
        yield name, tensor.detach().to(getattr(torch, dtype))


def num_bytes(metadata: Metadata) -> int:
    return sum(math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape in metadata)
