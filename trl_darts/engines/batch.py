"""The prompts of a generation batch over all processes: which rows are one group, and where each row lives."""

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
    """A generation batch: rows in the order of the processes, `num_generations` in a row for each group."""

    rows: list[Tokens]  # (B, ≤ P), each row's prompt
    keys: list[int]  # (B,), identity of each row's prompt, see `prompt_key`
    sizes: list[int]  # rows per process
    process_index: int  # this process
    num_generations: int  # rows per group
    multimodal: bool = False  # whether rows come with more than tokens. What comes with a row stays on its process
    images: Sequence[Sequence[Any] | None] | None = None  # of this process's rows
    fields: Mapping[str, Any] = field(default_factory=dict)  # what TRL's processor made of these beside tokens

    @classmethod
    def alone(
        cls, rows: Sequence[Tokens], num_generations: int, images: Sequence[Sequence[Any] | None] | None = None
    ) -> "PromptBatch":
        """The rows of one process by itself."""
        digests = _digests(rows, images)
        keys = [prompt_key(row, digest) for row, digest in zip(rows, digests, strict=True)]
        return cls(list(rows), keys, [len(rows)], 0, num_generations, images is not None, images)

    @classmethod
    def gather(
        cls,
        rows: Sequence[Tokens],
        num_generations: int,
        process_index: int,
        images: Sequence[Sequence[Any] | None] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> "PromptBatch":
        """The rows of all processes. Called on every process at once, with its own."""
        own = cls.alone(rows, num_generations, images)
        shares = gather_object([(own.rows, own.keys, bool(fields) or own.multimodal)])
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
        """What admission knows of each group's prompt: its first row's."""
        return [
            PromptInfo(self.keys[start], len(self.rows[start]), extendable=not mixed)
            for start, mixed in zip(self._starts, self.mixed, strict=True)
        ]

    @cached_property
    def mixed(self) -> list[bool]:
        """For each group, whether its rows have different prompts, as from environments that each reset anew."""
        return [len(set(self.keys[start : start + self.num_generations])) > 1 for start in self._starts]

    @property
    def longest(self) -> list[Tokens]:
        """The longest prompt of each group."""
        return [max(self.rows[start : start + self.num_generations], key=len) for start in self._starts]

    @property
    def mine(self) -> slice:
        """This process's rows."""
        start = sum(self.sizes[: self.process_index])
        return slice(start, start + self.sizes[self.process_index])

    @property
    def owners(self) -> list[int]:
        """The process that holds each row."""
        return [process for process, size in enumerate(self.sizes) for _ in range(size)]

    def row_of(self, group: int, index: int) -> int:
        """The row whose prompt a group's candidate answers. Candidates beyond the rows begin at the first again."""
        return group * self.num_generations + index % self.num_generations

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
    """An image's bytes and what they mean."""
    if hasattr(image, "getpalette"):  # PIL's
        return image.tobytes(), f"{image.mode}{image.size}{image.getpalette()}".encode()
    if hasattr(image, "__array__"):
        array = np.asarray(image)
        return array.tobytes(), f"{array.dtype}{array.shape}".encode()
    return str(image).encode(), b""  # its path or URL
