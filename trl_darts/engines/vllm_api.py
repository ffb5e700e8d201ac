"""
The single place that knows a vLLM server's HTTP API.

Requests and responses were checked against vLLM 0.31. Only a `finish_reason` indicates success: when the engine
process behind the API dies, a stream ends normally but without one.
"""

import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import aiohttp
import orjson

from ..errors import GenerationError
from ..scheduling.concurrency import ServerLoad
from ..weights.plugin import NUM_OUTPUTS
from .deadlines import Deadlines


# The server closes idle connections after 5 s. A client that keeps one longer may send requests to a closing socket.
KEEPALIVE_TIMEOUT_S = 3.0
CONTROL_TIMEOUT_S = 30.0
TURN_TIMEOUT_S = 120.0  # for sleep and wake-up, which move a large model's weights
MAX_MESSAGE = 2000  # characters of a server's message in an error: it may be a proxy's web page


@dataclass(slots=True)
class CompletionChunk:
    """Tokens that arrived together. `finish_reason` is set on the last chunk of a request."""

    tokens: list[int]
    logprobs: list[float] | None
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class ServerPrompt:
    """A prompt for a server: token IDs, and the server's features of the prompt's images, if any."""

    tokens: Sequence[int]
    features: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One candidate's request."""

    path: str
    body: dict[str, Any]
    internal_id: str

    @classmethod
    def of(
        cls, request_id: str, prompt: ServerPrompt, prior_tokens: Sequence[int], options: Mapping[str, Any]
    ) -> "CompletionRequest":
        tokens = [*prompt.tokens, *prior_tokens]
        if prompt.features is None:
            body = {
                **options,
                "request_id": request_id,
                "prompt": tokens,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
            }
            # The internal ID of the only prompt of a completion request. The server silently ignores other IDs.
            return cls("/v1/completions", body, f"cmpl-{request_id}-0")
        sampling = {name: value for name, value in options.items() if name != "model"}
        body = {
            "model": options["model"],
            "request_id": request_id,
            "token_ids": tokens,
            "features": prompt.features,
            "sampling_params": sampling,
        }
        return cls("/inference/v1/generate", body, f"generate-tokens-{request_id}")

    @property
    def sampling(self) -> Mapping[str, Any]:
        """Sampling options, whose place depends on the endpoint."""
        options: Mapping[str, Any] = self.body.get("sampling_params", self.body)
        return options

    def streaming(self, interval: int) -> dict[str, Any]:
        """Returns the body of the same request, streamed with a chunk about every `interval` tokens."""
        if "sampling_params" in self.body:
            sampling = {**self.body["sampling_params"], "stream_interval": interval}
            return {**self.body, "stream": True, "sampling_params": sampling}
        return {**self.body, "stream": True, "stream_interval": interval}


class ServerRefusedError(GenerationError):
    """Raised when the server answers with an error or with invalid data. Has the server's own message."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status  # of the HTTP response, if it is the cause


class ServerBrokenError(ServerRefusedError):
    """Raised when the answer shows that the server itself is broken."""


class VLLMServer:
    """Client of one vLLM server: its development endpoints and its completions endpoint."""

    def __init__(
        self, base_url: str, session: aiohttp.ClientSession, connect_timeout_s: float = Deadlines.connect_s
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.connect_timeout_s = connect_timeout_s
        self._session = session

    async def get(self, path: str, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
        """Returns the JSON at a path, `None` if the server does not have it."""
        data = await self._get(path, timeout_s)
        try:
            return None if data is None else orjson.loads(data) if data else {}
        except orjson.JSONDecodeError as error:
            raise ServerRefusedError(
                f"{self.base_url} answered {path} with invalid JSON: {data!r:.60}", 200
            ) from error

    async def get_text(self, path: str, timeout_s: float = CONTROL_TIMEOUT_S) -> str:
        """Returns the text at a path, empty if the server does not have it."""
        return (await self._get(path, timeout_s) or b"").decode(errors="replace")

    async def post(
        self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> Any:
        """
        Returns the JSON of the response, `{}` if it is empty. Connections are not reused here: the server closes them
        after some errors, and a request that reuses one would fail.
        """
        async with self._post(path, body or {}, timeout_s, {"Connection": "close"}) as response:
            await self._check(response)
            data = await response.read()
            return orjson.loads(data) if data else {}

    async def _get(self, path: str, timeout_s: float) -> bytes | None:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self.connect_timeout_s)
        async with self._session.get(self.base_url + path, timeout=timeout) as response:
            if response.status == 404:
                return None
            await self._check(response)
            return await response.read()

    async def complete(self, request: CompletionRequest, timeout_s: float, rank: int | None = None) -> CompletionChunk:
        """Requests one completion without streaming, from the engine of a data-parallel rank if one is given."""
        headers = None if rank is None else {"X-data-parallel-rank": str(rank)}
        async with self._post(request.path, request.body, timeout_s, headers) as response:
            await self._check(response)
            return parse_choice(orjson.loads(await response.read()))

    async def stream(
        self, request: CompletionRequest, interval: int, timeout_s: float
    ) -> AsyncGenerator[CompletionChunk]:
        """Streams one completion in chunks of about `interval` tokens. Busy servers send larger chunks."""
        finished = False
        room, logprobs = request.sampling.get("max_tokens"), request.sampling.get("logprobs") is not None
        async with self._post(request.path, request.streaming(interval), timeout_s) as response:
            await self._check(response)
            async for data in _server_sent_events(response.content):
                if data == b"[DONE]":
                    break
                message = orjson.loads(data)
                if "error" in message:
                    raise _error_of(message, data)
                if message.get("choices"):
                    chunk = parse_choice(message)
                    if logprobs and chunk.tokens and chunk.logprobs is None:
                        raise ServerRefusedError("The server returned tokens without the requested log-probs.")
                    if room is not None and (room := room - len(chunk.tokens)) < 0:
                        raise ServerRefusedError(f"The server returned {-room} tokens more than `max_tokens`.")
                    finished = finished or chunk.finish_reason is not None
                    yield chunk
        if not finished:
            raise ServerBrokenError(f"{self.base_url} ended a stream without a `finish_reason`: its engine stopped.")

    async def abort(self, internal_ids: Sequence[str], timeout_s: float = CONTROL_TIMEOUT_S) -> bool:
        """Aborts requests. Their pending responses then arrive with the tokens so far. Returns whether supported."""
        async with self._post("/abort_requests", {"request_ids": list(internal_ids)}, timeout_s) as response:
            if response.status in (404, 405):
                return False
            await self._check(response)
            return True

    async def weight_version(self) -> str | None:
        """Returns `"v<number>"` after an update, `"default"` after a start, `None` if versions are not supported."""
        version: str | None = (await self.get("/weight_info") or {}).get("weight_version")
        return version

    async def num_outputs(self) -> dict[str, int]:
        """Returns the number of tokens of each unfinished request, by its internal ID. Needs our plugin."""
        answers = (await self.post("/collective_rpc", {"method": NUM_OUTPUTS})).get("results", [])
        # vLLM appends a random suffix to the ID.
        return {name.rpartition("-")[0]: count for answer in answers for name, count in answer.items()}

    async def sleep(self) -> None:
        """Moves the weights to the host's memory and drops the KV cache. The server must be idle."""
        await self.post("/sleep?level=1", timeout_s=TURN_TIMEOUT_S)

    async def wake_up(self, only_weights: bool = False) -> None:
        """Moves the weights back to the GPU, and allocates the KV cache unless `only_weights`."""
        await self.post("/wake_up?tags=weights" if only_weights else "/wake_up", timeout_s=TURN_TIMEOUT_S)

    def _post(
        self, path: str, body: Mapping[str, Any], timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Any:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self.connect_timeout_s)
        return self._session.post(
            self.base_url + path,
            data=orjson.dumps(body),
            headers={"Content-Type": "application/json", **(headers or {})},
            timeout=timeout,
        )

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status == 200:
            return
        data = await response.read()
        try:
            message = _error_message(orjson.loads(data), data)
        except orjson.JSONDecodeError:
            message = data.decode(errors="replace")
        kind = ServerBrokenError if response.status >= 500 else ServerRefusedError
        raise kind(
            f"{self.base_url} answered {response.status}: {message[:MAX_MESSAGE] or response.reason}", response.status
        )


def max_num_seqs(vllm_config: Mapping[str, Any]) -> int | None:
    """Returns the number of sequences that a server decodes at once, over all copies of the model, if known."""
    per_copy = (vllm_config.get("scheduler_config") or {}).get("max_num_seqs")
    copies = (vllm_config.get("parallel_config") or {}).get("data_parallel_size")
    return per_copy * (copies or 1) if per_copy else None


async def vocabulary_size(server: VLLMServer, model: str) -> int | None:
    """
    Returns the vocabulary size of a server's model, `None` if the server accepts any token. No endpoint has it, but
    the error for a token beyond the vocabulary does, without any decoding.
    """
    options = {"model": model, "max_tokens": 1, "logit_bias": {str(10**9): 0.0}}
    try:
        await server.complete(CompletionRequest.of("vocabulary", ServerPrompt([0]), [], options), timeout_s=60.0)
    except ServerRefusedError as refusal:
        if match := re.search(r"Vocabulary size: (\d+)", str(refusal)):
            return int(match[1])
        raise
    return None


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


def new_session(api_key: str | None = None) -> aiohttp.ClientSession:
    """Creates a session for many long concurrent requests. Must be called inside the event loop that uses it."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_TIMEOUT_S),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
    )


def parse_choice(message: Mapping[str, Any]) -> CompletionChunk:
    """Parses the only choice of a completion or of a stream's chunk."""
    choices = message["choices"]
    if len(choices) != 1 or choices[0].get("index", 0) != 0:  # otherwise, tokens of two completions would be mixed
        raise ServerRefusedError(f"The server returned other choices than requested: {str(choices)[:100]}.")
    choice = choices[0]
    tokens = choice.get("token_ids")
    if tokens is None:
        raise ServerRefusedError("The server returned no `token_ids`. It is too old: use vLLM 0.22 or newer.")
    logprobs = choice.get("logprobs")
    if logprobs is not None:
        content = logprobs.get("content")
        logprobs = logprobs["token_logprobs"] if content is None else [entry["logprob"] for entry in content]
        # JSON has no NaN, so a server sends null. TRL treats NaN as an unknown log-prob with ratio 1.
        logprobs = logprobs and [math.nan if logprob is None else logprob for logprob in logprobs]
    _check_numbers(tokens, logprobs)
    return CompletionChunk(tokens, logprobs, choice.get("finish_reason"))


def _check_numbers(tokens: Any, logprobs: Any) -> None:
    if not (isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens)):
        raise ServerRefusedError(f"The server returned invalid `token_ids`: {str(tokens)[:100]}.")
    if logprobs is None:
        return
    # Log-probs are at most 0 up to rounding. An unknown one is NaN.
    if wrong := [x for x in logprobs if not (type(x) in (float, int) and not x > 1e-3)]:
        raise ServerRefusedError(f"The server returned {wrong[0]!r} for a token's log-prob.")
    if len(logprobs) != len(tokens):
        raise ServerRefusedError(f"The server returned {len(logprobs)} log-probs for {len(tokens)} tokens.")


async def _server_sent_events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    buffer = b""
    async for data in content.iter_any():
        buffer += data
        *events, buffer = buffer.split(b"\n\n")
        for line in (line for event in events for line in event.split(b"\n")):
            if line.startswith(b"data: "):
                yield line[6:]
            elif line and not line.startswith((b":", b"event:", b"id:", b"retry:")):  # tokens may be lost
                raise ServerBrokenError(f"The stream has an invalid line: {line[:100].decode(errors='replace')!r}.")


def _error_of(message: Mapping[str, Any], raw: bytes) -> ServerRefusedError:
    """Builds the error of a stream from its JSON, which has the status: 4xx is the request's fault."""
    error = message["error"]
    code = error.get("code") if isinstance(error, dict) else None
    refused = isinstance(code, int) and 400 <= code < 500
    return (ServerRefusedError if refused else ServerBrokenError)(_error_message(message, raw))


def _error_message(message: Any, raw: bytes) -> str:
    error = message.get("error", message) if isinstance(message, dict) else message
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail")
    return str(error) if error else raw.decode(errors="replace")
