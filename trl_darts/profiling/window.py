"""
The stretch in which all sequences of a batch decode: from the first tokens of the last one until each has decoded
enough.

Invariant: no token counts that came before the last sequence's first, so that prefill, and batches that are not yet
full, stay outside.
"""

from __future__ import annotations


class DecodeWindow:
    """
    Follows the tokens that come from a batch, and tells when to read the server's clock.

    ```
    waiting for first tokens → (all began) → open → (each decoded enough) → complete
                    └────────── a sequence ends early ──────┴──────────────→ failed
    ```

    Args:
        num_sequences (`int`):
            Sequences of the batch.
        num_tokens (`int`):
            Tokens that each must decode in the window.
    """

    def __init__(self, num_sequences: int, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.failed = False
        self._counts = [0] * num_sequences
        self._num_silent = num_sequences
        self._marks: list[int] | None = None
        self._num_short = num_sequences

    def add(self, sequence: int, num_tokens: int, finished: bool = False) -> None:
        """
        Tokens have come.

        Args:
            sequence (`int`):
                Of which sequence.
            num_tokens (`int`):
                How many.
            finished (`bool`, *optional*, defaults to `False`):
                Whether these were its last ones. If the window is not complete by then, it has failed: the batch
                shrinks.
        """
        if self.over or not num_tokens:
            self.failed = self.failed or (finished and not self.complete)
            return
        before = self._counts[sequence]
        self._counts[sequence] = after = before + num_tokens
        self._num_silent -= before == 0
        if self._marks is not None:
            needed = self._marks[sequence] + self.num_tokens
            self._num_short -= before < needed <= after
        self.failed = finished and not self.complete

    def open(self) -> None:
        """The clock was read: what comes from here on counts."""
        self._marks = list(self._counts)

    @property
    def began(self) -> bool:
        """Whether each sequence has a token."""
        return self._num_silent == 0

    @property
    def complete(self) -> bool:
        """Whether each sequence has decoded enough since the window was opened."""
        return self._num_short == 0

    @property
    def over(self) -> bool:
        """Whether nothing more needs to come."""
        return self.complete or self.failed

    @property
    def completion_tokens(self) -> float:
        """Tokens that all sequences together had generated in the middle of the window."""
        return (sum(self._marks or [0]) + sum(self._counts)) / 2
