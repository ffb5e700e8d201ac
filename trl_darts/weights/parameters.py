"""The trainer's parameters, as TRL yields them, and as servers are given them."""

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
    The first `num_params` items; what is behind them runs when the context is left, also after an error.

    TRL's iterator gathers sharded parameters with the other processes, which wait for each item to be asked for, and
    unmerges LoRA adapters *in place* once it is asked for one more than there are: tensors that were not sent by then
    are sent without their adapter. (TRL 1.16 does that to the last packed buffer of each sync over NCCL.)
    """
    try:
        yield itertools.islice(named_params, num_params)
    except Exception:
        for _ in named_params:
            pass
        raise
    surplus = [name for name, _ in named_params]
    if surplus:
        raise WeightSyncError(f"{len(surplus)} tensors were not announced, and not sent: {', '.join(surplus[:5])}.")


def as_served(metadata: Metadata, dtype: torch.dtype | None) -> Metadata:
    """
    Metadata of what is sent to servers of a dtype (`None`: of several): matrices in theirs, where that takes fewer
    bytes. Vectors take few, and some of them servers keep in float32.
    """
    if dtype is None:
        return metadata

    def served(name: str, own: str, shape: list[int]) -> tuple[str, str, list[int]]:
        found = getattr(torch, own)
        smaller = found.is_floating_point and dtype.itemsize < found.itemsize and len(shape) > 1
        return name, str(dtype).removeprefix("torch.") if smaller else own, shape

    return [served(*entry) for entry in metadata]


def cast(metadata: Metadata, named_params: Iterable[tuple[str, torch.Tensor]]) -> NamedParams:
    """The parameters in the dtypes of their metadata."""
    for (name, dtype, _), (_, tensor) in zip(metadata, named_params, strict=True):
        yield name, tensor.detach().to(getattr(torch, dtype))


def num_bytes(metadata: Metadata) -> int:
    return sum(math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape in metadata)
