"""Saves answers in files, for servers that start later."""

import hashlib
import json
import os
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoTokenizer

from ..errors import ConfigurationError
from .answers import History


MAX_FILES = 256  # one per server and policy; the oldest are deleted
_SCHEMA = pa.schema({"prompt": pa.list_(pa.int32()), "text": pa.list_(pa.int32())})


class Store:
    """
    A directory with the answers of earlier policies. Several servers may share it.

    Raises [`ConfigurationError`] for files that can't be read, or have the tokens of another tokenizer.
    """

    def __init__(self, directory: Path, tokenizer: str) -> None:
        self.directory = directory
        vocabulary = AutoTokenizer.from_pretrained(tokenizer).get_vocab()
        self._vocabulary = hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()
        if directory.exists() and not directory.is_dir():
            raise ConfigurationError(f"`draft_history` ({str(directory)!r}) must be a directory, not a file.")
        for path in self._files():
            self._check(path)

    def _check(self, path: Path) -> None:
        try:
            metadata = pq.read_schema(path).metadata or {}
        except (OSError, pa.ArrowException) as error:
            raise ConfigurationError(
                f"`draft_history` ({str(self.directory)!r}) must have readable files, and reading {path.name!r} "
                f"failed: {error}. Remove this file."
            ) from error
        if metadata.get(b"vocabulary", b"").decode() != self._vocabulary:
            raise ConfigurationError(
                f"`draft_history` ({str(self.directory)!r}) must come from a model with the same tokenizer, and "
                f"{path.name!r} has a different one. Use another directory."
            )

    def load(self, history: History) -> None:
        """Adds the stored answers to a history, policy by policy."""
        for path in self._files():
            table = pq.read_table(path)
            for prompt, text in zip(table["prompt"], table["text"], strict=True):
                history.add(history.prompt_of(prompt.values.to_numpy()), text.values.to_numpy())
            history.version += 1

    def save(self, history: History) -> None:
        """Writes the answers of the current policy."""
        rows = [(prompt.tokens, answer.tokens) for prompt, answer in history.current_answers()]
        if not rows:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"answers-{time.time_ns()}-{os.getpid()}.parquet"
        columns = [pa.array(column, type=pa.list_(pa.int32())) for column in zip(*rows, strict=True)]
        table = pa.table(columns, schema=_SCHEMA.with_metadata({"vocabulary": self._vocabulary}))
        pq.write_table(table, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        for old in self._files()[:-MAX_FILES]:
            old.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        """Returns the files, oldest first: their names start with the time."""
        return sorted(self.directory.glob("answers-*.parquet"))
