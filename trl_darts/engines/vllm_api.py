"""
The single place that knows a vLLM server's HTTP API.

What is asked of the server, and what comes back, was checked against vLLM 0.31. A success is a `finish_reason`: when
the engine process behind the API dies, a stream ends like a normal one, only without it.
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


# The server closes an idle connection after 5 s. A client that keeps it longer sends requests into a closing socket.
KEEPALIVE_TIMEOUT_S = 3.0
CONTROL_TIMEOUT_S = 30.0
MAX_MESSAGE = 2000  # characters of a server's own in an error: they may be a proxy's web page


@dataclass(slots=True)
class Chunk:
    """Tokens that arrived together. `finish_reason` is set on the last one of a request."""

    tokens: list[int]
    logprobs: list[float] | None
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class ServerPrompt:
    """A prompt as a server takes it: token IDs, and what it made of the prompt's images, if there are any."""

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
            # The server names the only prompt of a completion request so; a bare ID is ignored with status 200.
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
        """The sampling options, wherever the endpoint has them."""
        options: Mapping[str, Any] = self.body.get("sampling_params", self.body)
        return options

    def streaming(self, interval: int) -> dict[str, Any]:
        """The body of the same request, answered about every `interval` tokens."""
        if "sampling_params" in self.body:
            sampling = {**self.body["sampling_params"], "stream_interval": interval}
            return {**self.body, "stream": True, "sampling_params": sampling}
        return {**self.body, "stream": True, "stream_interval": interval}


class ServerRefusedError(GenerationError):
    """The server answered, and its answer was an error. The message is the server's own."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status  # of the HTTP response, where that is what is wrong


class ServerBrokenError(ServerRefusedError):
    """The server answered that it is broken, or in a way in which only a broken one answers."""


class VLLMServer:
    """One vLLM server, as its development endpoints and its completions endpoint show it."""

    def __init__(self, base_url: str, session: aiohttp.ClientSession, connect_timeout_s: float = 10.0) -> None:
        self.base_url = base_url.rstrip("/")
        self.connect_timeout_s = connect_timeout_s
        self._session = session

    async def get(self, path: str, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
        """The JSON at a path; `None` where the server does not have it."""
        data = await self._get(path, timeout_s)
        try:
            return None if data is None else orjson.loads(data) if data else {}
        except orjson.JSONDecodeError as error:
            raise ServerRefusedError(
                f"{self.base_url} answered {path} with what is no JSON: {data!r:.60}", 200
            ) from error

    async def get_text(self, path: str, timeout_s: float = CONTROL_TIMEOUT_S) -> str:
        """The text at a path; empty where the server does not have it."""
        return (await self._get(path, timeout_s) or b"").decode(errors="replace")

    async def post(
        self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> Any:
        """
        The JSON that is answered; `{}` where the answer is empty. The server closes a connection after some errors,
        and a request that reused it meanwhile would fail, so that no connection is used twice here.
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

    async def complete(self, request: CompletionRequest, timeout_s: float) -> Chunk:
        """One completion, in one piece."""
        async with self._post(request.path, request.body, timeout_s) as response:
            await self._check(response)
            return parse_choice(orjson.loads(await response.read()))

    async def stream(self, request: CompletionRequest, interval: int, timeout_s: float) -> AsyncGenerator[Chunk]:
        """One completion, about every `interval` tokens. Busy servers send more tokens in one chunk."""
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
                        raise ServerRefusedError("The server returned tokens without log-probs, which were asked for.")
                    if room is not None and (room := room - len(chunk.tokens)) < 0:
                        raise ServerRefusedError(f"The server returned {-room} tokens more than `max_tokens`.")
                    finished = finished or chunk.finish_reason is not None
                    yield chunk
        if not finished:
            raise ServerBrokenError(f"{self.base_url} ended a stream without a `finish_reason`: its engine stopped.")

    async def abort(self, internal_ids: Sequence[str], timeout_s: float = CONTROL_TIMEOUT_S) -> bool:
        """Asks the server to end requests now. Each pending response then arrives with what it has."""
        async with self._post("/abort_requests", {"request_ids": list(internal_ids)}, timeout_s) as response:
            if response.status in (404, 405):
                return False
            await self._check(response)
            return True

    async def weight_version(self) -> str | None:
        """`"v<number>"` after an update, `"default"` after a start, `None` from a server without versions."""
        version: str | None = (await self.get("/weight_info") or {}).get("weight_version")
        return version

    async def sleep(self, timeout_s: float) -> None:
        """Frees the GPU: weights go to the host's memory, the KV cache is dropped. Nothing may be decoded."""
        await self.post("/sleep?level=1", timeout_s=timeout_s)

    async def wake_up(self, timeout_s: float, only_weights: bool = False) -> None:
        """Takes the GPU again, with or without the KV cache."""
        await self.post("/wake_up?tags=weights" if only_weights else "/wake_up", timeout_s=timeout_s)

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
    """Sequences that a server decodes at once, all of its copies together; `None` if its `/server_info` lacks it."""
    per_copy = (vllm_config.get("scheduler_config") or {}).get("max_num_seqs")
    copies = (vllm_config.get("parallel_config") or {}).get("data_parallel_size")
    return per_copy * (copies or 1) if per_copy else None


async def vocabulary_size(server: VLLMServer, model: str) -> int | None:
    """
    Asks a server how many tokens its model knows; `None` if it takes any. No endpoint tells, but the refusal of a
    token beyond the vocabulary does, without any decoding.
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
    """What was drafted, since a server started or between two looks. The names are those of the counters."""

    num_drafts: float = 0.0  # a draft is for one sequence in one step
    num_draft_tokens: float = 0.0
    num_accepted_tokens: float = 0.0
    generation_tokens: float = 0.0

    def since(self, before: "DraftCounts") -> "DraftCounts":
        """The difference, or all of it where the server was started anew."""
        if self.generation_tokens < before.generation_tokens:
            return self
        return DraftCounts(*(new - old for new, old in zip(astuple(self), astuple(before), strict=True)))


async def draft_counts(server: VLLMServer, timeout_s: float = 2.0) -> DraftCounts | None:
    """What a server has drafted so far; `None` if it does not say."""
    found = await _metrics(server, timeout_s)
    names = [field.name for field in fields(DraftCounts)]
    values = [found.get(name) or found.get(f"spec_decode_{name}") for name in names] if found else []
    return DraftCounts(*(sum(own or ()) for own in values)) if found else None


async def server_load(server: VLLMServer, timeout_s: float = 2.0) -> ServerLoad | None:
    """How busy a server is; `None` if it does not say."""
    found = await _metrics(server, timeout_s)
    names = ("num_requests_running", "num_requests_waiting", "num_preemptions", "generation_tokens")
    if not all(name in found for name in (*names, "kv_cache_usage_perc")):
        return None
    running, waiting, preemptions, tokens = (sum(found[name]) for name in names)
    return ServerLoad(running, waiting, preemptions, max(found["kv_cache_usage_perc"]), tokens)


async def _metrics(server: VLLMServer, timeout_s: float) -> dict[str, list[float]]:
    """
    A server's metrics, by their names without `vllm:` and `_total`, with one value for each of its engines (and for
    each label); empty if it does not say.
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
    """A session for many long requests at once. Must be called inside the event loop that uses it."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_TIMEOUT_S),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
    )


def parse_choice(message: Mapping[str, Any]) -> Chunk:
    """Reads the only choice of a completion or of a stream's chunk."""
    choices = message["choices"]
    if len(choices) != 1 or choices[0].get("index", 0) != 0:  # tokens of another completion would be mixed in
        raise ServerRefusedError(f"The server returned other choices than the one asked for: {str(choices)[:100]}.")
    choice = choices[0]
    tokens = choice.get("token_ids")
    if tokens is None:
        raise ServerRefusedError("The server returned no `token_ids`. It is too old: use vLLM 0.22 or newer.")
    logprobs = choice.get("logprobs")
    if logprobs is not None:
        content = logprobs.get("content")
        logprobs = logprobs["token_logprobs"] if content is None else [entry["logprob"] for entry in content]
        # A server leaves out what is no JSON. TRL takes NaN for a log-prob that is not known: its ratio is 1.
        logprobs = logprobs and [math.nan if logprob is None else logprob for logprob in logprobs]
    _check_numbers(tokens, logprobs)
    return Chunk(tokens, logprobs, choice.get("finish_reason"))


def _check_numbers(tokens: Any, logprobs: Any) -> None:
    if not (isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens)):
        raise ServerRefusedError(f"The server returned `token_ids` that are none: {str(tokens)[:100]}.")
    if logprobs is None:
        return
    # A log-prob above 0 by more than rounding is none; that of a token that was not known is NaN.
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
            elif line and not line.startswith((b":", b"event:", b"id:", b"retry:")):  # it may have been tokens
                raise ServerBrokenError(f"What came is no event of a stream: {line[:100].decode(errors='replace')!r}.")


def _error_of(message: Mapping[str, Any], raw: bytes) -> ServerRefusedError:
    """An error that comes inside a stream has its status in the JSON: 4xx is the request's fault."""
    error = message["error"]
    code = error.get("code") if isinstance(error, dict) else None
    refused = isinstance(code, int) and 400 <= code < 500
    return (ServerRefusedError if refused else ServerBrokenError)(_error_message(message, raw))


def _error_message(message: Any, raw: bytes) -> str:
    error = message.get("error", message) if isinstance(message, dict) else message
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail")
    return str(error) if error else raw.decode(errors="replace")
