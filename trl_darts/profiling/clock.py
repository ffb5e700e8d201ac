"""
The server's own clock of decoding: its engine stamps each token when it is there, and `/metrics` has the sums.

What a client sees is later by the time that the server's front end and the client itself take. Where one of them is
held up, tokens come in heaps: a window that begins after a heap looks much shorter than it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from ..engines.capacity import LoadSample
from ..engines.vllm_api import VLLMServer
from ..errors import ConfigurationError


SECONDS = "vllm:inter_token_latency_seconds_sum"
TOKENS = "vllm:generation_tokens_total"


@dataclass(frozen=True, slots=True)
class Reading:
    """
    A look at the clock.

    Args:
        load ([`LoadSample`]):
            What the server decodes.
        seconds (`float`):
            Seconds between tokens, of all sequences together since the server started.
        tokens (`float`):
            Tokens, likewise.
    """

    load: LoadSample
    seconds: float
    tokens: float

    @classmethod
    def parse(cls, text: str) -> Reading:
        """
        From the text of `/metrics`; the engines of one server (data parallel) are added up.

        Raises:
            `ValueError`: If something is missing.
        """
        load = LoadSample.parse(text)
        values: dict[str, list[float]] = {SECONDS: [], TOKENS: []}
        lines = [line for line in text.splitlines() if line.startswith(tuple(values))]  # of a thousand
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                if sample.name in values:
                    values[sample.name].append(sample.value)
        if missing := [name for name, found in values.items() if not found]:
            raise ValueError(f"The server's metrics have no {', '.join(f'`{name}`' for name in missing)}.")
        return cls(load, sum(values[SECONDS]), sum(values[TOKENS]))

    def seconds_per_token_since(self, before: Reading) -> float:
        """Mean over all sequences and tokens since an earlier reading; NaN if there were none."""
        tokens = self.tokens - before.tokens
        return (self.seconds - before.seconds) / tokens if tokens > 0 else math.nan


async def read_clock(server: VLLMServer) -> Reading:
    """
    Looks at a server's clock.

    Args:
        server ([`VLLMServer`]):
            The server.

    Returns:
        [`Reading`]: What it shows.

    Raises:
        [`ConfigurationError`]: If the server keeps no statistics.
    """
    text = await server.get_text("/metrics")
    try:
        return Reading.parse(text)
    except ValueError as error:
        raise ConfigurationError(
            f"`url` ({server.base_url!r}) must be a server with statistics, by which it is measured: {error} Start it "
            "without `--disable-log-stats`, with vLLM 0.22 or newer."
        ) from error
