"""The prompts of a generation batch over all processes."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from accelerate.utils import gather_object

from ..scheduling import PromptInfo, prompt_key
from ..training.rows import Tokens


@dataclass(frozen=True)
class PromptBatch:
    """A generation batch. Rows are in the order of the processes, with `num_generations` adjacent rows per group."""

    rows: list[Tokens]  # (B, ≤ P), each row's prompt
    keys: list[int]  # (B,), identity of each row's prompt, see `prompt_key`
    sizes: list[int]  # rows per process
    process_index: int  # this process
    num_generations: int  # rows per group
    multimodal: bool = False  # whether rows have images or other fields, which stay on their process
    images: Sequence[Sequence[Any] | None] | None = None  # of this process's rows
    fields: Mapping[str, Any] = field(default_factory=dict)  # the processor's output for these besides tokens
    ids: Sequence[int] | None = None  # (N,), of its prompts in the buffer; without one, groups are told by their place

    @classmethod
    def alone(
        cls,
        rows: Sequence[Tokens],
        num_generations: int,
        images: Sequence[Sequence[Any] | None] | None = None,
        ids: Sequence[int] | None = None,
    ) -> "PromptBatch":
        """Builds a batch with only the rows of one process."""
        digests = _digests(rows, images)
        keys = [prompt_key(row, digest) for row, digest in zip(rows, digests, strict=True)]
        return cls(list(rows), keys, [len(rows)], 0, num_generations, images is not None, images, ids=ids)

    @classmethod
    def gather(
        cls,
        rows: Sequence[Tokens],
        num_generations: int,
        process_index: int,
        images: Sequence[Sequence[Any] | None] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> "PromptBatch":
        """Builds a batch with the rows of all processes. Must be called on every process, with its rows."""
        own = cls.alone(rows, num_generations, images)
        known: dict[int, Tokens] = {}
        rows = [known.setdefault(key, row) for key, row in zip(own.keys, own.rows, strict=True)]  # one per group
        shares = gather_object([(rows, own.keys, bool(fields) or own.multimodal)])
        return cls(
            rows=[row for rows, _, _ in shares for row in rows],
            keys=[key for _, keys, _ in shares for key in keys],
            sizes=[len(rows) for rows, _, _ in shares],
            process_index=process_index,
            num_generations=num_generations,
            multimodal=any(other for _, _, other in shares),
            images=images,
            fields=fields or {},
        )

    @property
    def infos(self) -> list[PromptInfo]:
        """Information for admission about each group's prompt, from its first row."""
        return [
            PromptInfo(self.keys[start], len(self.rows[start]), extendable=not mixed)
            for start, mixed in zip(self._starts, self.mixed, strict=True)
        ]

    @cached_property
    def places(self) -> dict[int, int]:
        """Place of each group in the batch, by its ID."""
        return {group_id: place for place, group_id in enumerate(self.group_ids)}

    @property
    def group_ids(self) -> Sequence[int]:
        return range(len(self._starts)) if self.ids is None else self.ids

    @cached_property
    def mixed(self) -> list[bool]:
        """Whether the rows of each group have different prompts, for example from separate environments."""
        return [len(set(self.keys[start : start + self.num_generations])) > 1 for start in self._starts]

    @property
    def longest(self) -> dict[int, Tokens]:
        """Longest prompt of each group, by its ID."""
        rows = [max(self.rows[start : start + self.num_generations], key=len) for start in self._starts]
        return dict(zip(self.group_ids, rows, strict=True))

    @property
    def mine(self) -> slice:
        """Rows of this process."""
        start = sum(self.sizes[: self.process_index])
        return slice(start, start + self.sizes[self.process_index])

    @property
    def owners(self) -> list[int]:
        """Process of each row."""
        return [process for process, size in enumerate(self.sizes) for _ in range(size)]

    def row_of(self, group_id: int, index: int) -> int:
        """Returns the row with the prompt of a group's candidate. More candidates than rows repeat the rows."""
        return self.places[group_id] * self.num_generations + index % self.num_generations

    @property
    def _starts(self) -> range:
        return range(0, len(self.rows), self.num_generations)


def _digests(rows: Sequence[Tokens], images: Sequence[Sequence[Any] | None] | None) -> list[bytes]:
    if images is None:
        return [b""] * len(rows)
    known: dict[int, bytes] = {}  # the rows of a group share their images
    return [b"".join(_digest(image, known) for image in row or ()) for row in images]


def _digest(image: Any, known: dict[int, bytes]) -> bytes:
    if id(image) not in known:
        known[id(image)] = hashlib.blake2b(b"".join(_content(image)), digest_size=16).digest()
    return known[id(image)]


def _content(image: Any) -> tuple[bytes, bytes]:
    """Returns an image's bytes and their format."""
    if hasattr(image, "getpalette"):  # a PIL image
        return image.tobytes(), f"{image.mode}{image.size}{image.getpalette()}".encode()
    if hasattr(image, "__array__"):
        array = np.asarray(image)
        return array.tobytes(), f"{array.dtype}{array.shape}".encode()
    return str(image).encode(), b""  # its path or URL
