"""What a vLLM server counts: its load, and drafts."""

import re
from dataclasses import astuple, dataclass, fields

import aiohttp

from ..scheduling.concurrency import ServerLoad
from .vllm_api import ServerRefusedError, VLLMServer


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counters of speculative decoding, since a server's start or between two reads. Named as in vLLM's metrics."""

    num_drafts: float = 0.0  # drafts, each for one sequence in one step
    num_draft_tokens: float = 0.0
    num_accepted_tokens: float = 0.0
    generation_tokens: float = 0.0

    def since(self, before: "DraftCounts") -> "DraftCounts":
        """Returns the difference, or all counts if the server was restarted."""
        if self.generation_tokens < before.generation_tokens:
            return self
        return DraftCounts(*(new - old for new, old in zip(astuple(self), astuple(before), strict=True)))


async def draft_counts(server: VLLMServer, timeout_s: float = 2.0) -> DraftCounts | None:
    """Reads a server's counters of speculative decoding, `None` if it has no metrics."""
    found = await _metrics(server, timeout_s)
    names = [field.name for field in fields(DraftCounts)]
    values = [found.get(name) or found.get(f"spec_decode_{name}") for name in names] if found else []
    return DraftCounts(*(sum(counts or ()) for counts in values)) if found else None


async def server_load(server: VLLMServer, timeout_s: float = 2.0) -> ServerLoad | None:
    """Reads a server's load, `None` if it has no metrics."""
    found = await _metrics(server, timeout_s)
    names = ("num_requests_running", "num_requests_waiting", "num_preemptions", "generation_tokens")
    if not all(name in found for name in (*names, "kv_cache_usage_perc")):
        return None
    running, waiting, preemptions, tokens = (sum(found[name]) for name in names)
    return ServerLoad(running, waiting, preemptions, max(found["kv_cache_usage_perc"]), tokens)


async def num_engines(server: VLLMServer, timeout_s: float = 2.0) -> int:
    """Returns the number of a server's engines, of which it has several with data parallelism."""
    return max(1, len((await _metrics(server, timeout_s)).get("num_requests_running", ())))


async def _metrics(server: VLLMServer, timeout_s: float) -> dict[str, list[float]]:
    """
    Reads a server's metrics, by name without `vllm:` and `_total`, with one value per engine (and label). Empty if it
    has none.
    """
    try:
        text = await server.get_text("/metrics", timeout_s)
    except (aiohttp.ClientError, ServerRefusedError, TimeoutError):
        return {}
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        if line.startswith("vllm:"):
            name = re.split(r"[{ ]", line, maxsplit=1)[0].removeprefix("vllm:").removesuffix("_total")
            found.setdefault(name, []).append(float(line.rpartition(" ")[2]))
    return found
