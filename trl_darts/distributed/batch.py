"""The prompts of a generation batch over all processes: which rows are one group, and where each row lives."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from accelerate.utils import gather_object

from ..scheduling import PromptInfo, prompt_key


Tokens = list[int]


@dataclass(frozen=True)
class PromptBatch:
    """
    A generation batch: rows in the order of the processes, `num_generations` in a row for each group.

    Args:
        rows (`list[list[int]]` of shape `(B, ≤ P)`):
            Token IDs of each row's prompt.
        keys (`list[int]` of shape `(B,)`):
            Identity of each row's prompt, see [`prompt_key`].
        sizes (`list[int]`):
            Rows per process.
        process_index (`int`):
            This process.
        num_generations (`int`):
            Rows per group.
        multimodal (`bool`):
            Whether rows come with more than tokens. What comes with a row stays on its process.
    """

    rows: list[Tokens]
    keys: list[int]
    sizes: list[int]
    process_index: int
    num_generations: int
    multimodal: bool

    @classmethod
    def gather(
        cls,
        prompt_rows: Sequence[Tokens],
        images: Sequence[Sequence[Any] | None] | None,
        multimodal: bool,
        num_generations: int,
        process_index: int,
    ) -> "PromptBatch":
        """
        Collects the rows of all processes. Called on every process at once.

        Args:
            prompt_rows (`Sequence[list[int]]` of shape `(B, ≤ P)`):
                This process's rows.
            images (`Sequence[Sequence[PIL.Image.Image] | None]`, *optional*):
                Images of each.
            multimodal (`bool`):
                Whether this process's rows come with other fields than tokens.
            num_generations (`int`):
                Rows per group.
            process_index (`int`):
                This process.

        Returns:
            [`PromptBatch`]: The same batch on every process.
        """
        own = cls.alone(prompt_rows, images, num_generations)
        shares = gather_object([(own.rows, own.keys, multimodal or own.multimodal)])
        return cls(
            rows=[row for rows, _, _ in shares for row in rows],
            keys=[key for _, keys, _ in shares for key in keys],
            sizes=[len(rows) for rows, _, _ in shares],
            process_index=process_index,
            num_generations=num_generations,
            multimodal=any(other for _, _, other in shares),
        )

    @classmethod
    def alone(
        cls, prompt_rows: Sequence[Tokens], images: Sequence[Sequence[Any] | None] | None, num_generations: int
    ) -> "PromptBatch":
        """The batch of this process by itself; see [`PromptBatch.gather`]."""
        digests = _digests(prompt_rows, images)
        keys = [prompt_key(row, digest) for row, digest in zip(prompt_rows, digests, strict=True)]
        return cls(list(prompt_rows), keys, [len(prompt_rows)], 0, num_generations, images is not None)

    @property
    def infos(self) -> list[PromptInfo]:
        """What admission knows of each group's prompt: its first row's."""
        starts = range(0, len(self.rows), self.num_generations)
        return [
            PromptInfo(self.keys[start], len(self.rows[start]), extendable=not mixed)
            for start, mixed in zip(starts, self.mixed, strict=True)
        ]

    @property
    def mixed(self) -> list[bool]:
        """For each group, whether its rows have different prompts, as from environments that each reset anew."""
        starts = range(0, len(self.rows), self.num_generations)
        return [len(set(self.keys[start : start + self.num_generations])) > 1 for start in starts]

    @property
    def mine(self) -> slice:
        """This process's rows."""
        start = sum(self.sizes[: self.process_index])
        return slice(start, start + self.sizes[self.process_index])

    def row_of(self, group: int, index: int) -> int:
        """The row whose prompt a group's candidate answers. Candidates beyond the rows begin at the first again."""
        return group * self.num_generations + index % self.num_generations

    @property
    def owners(self) -> list[int]:
        """The process that holds each row."""
        return [process for process, size in enumerate(self.sizes) for _ in range(size)]


def _digests(prompt_rows: Sequence[Tokens], images: Sequence[Sequence[Any] | None] | None) -> list[bytes]:
    if images is None:
        return [b""] * len(prompt_rows)
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
    return str(image).encode(), b""  # the path or address of one
