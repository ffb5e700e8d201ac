"""
The single place that knows a vLLM server's HTTP API.

Requests and responses were checked against vLLM 0.31. Only a `finish_reason` indicates success: when the engine
process behind the API dies, a stream ends normally but without one.
"""

import math
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from ..errors import GenerationError
from ..weights.plugin import IN_USE, NUM_OUTPUTS, PROBE, UNUSED
from .addresses import key_of
from .waiting import Deadlines


# The server closes idle connections after 5 s. A client that keeps one longer may send requests to a closing socket.
KEEPALIVE_TIMEOUT_S = 3.0
CONTROL_TIMEOUT_S = 30.0
TURN_TIMEOUT_S = 120.0  # for sleep and wake-up, which move a large model's weights
COMPLETIONS = "/v1/completions"
TOKEN_ID = "token_id:"  # before a token's ID in log-probs, with `return_tokens_as_token_ids`
LOAD_ADAPTER = "/v1/load_lora_adapter"
UPLOADS = "/trl_darts/adapters/"  # of `trl_darts.serving.adapters`
MAX_MESSAGE = 2000  # characters of a server's message in an error: it may be a proxy's web page


@dataclass(slots=True)
class CompletionChunk:
    """Tokens that arrived together. `finish_reason` is set on the last chunk of a choice."""

    tokens: list[int]
    logprobs: list[float] | None
    finish_reason: str | None
    tops: list[Any] | None = None  # the likeliest tokens at each position, for `top_of`
    index: int = 0  # of the choice, which is that of its prompt


@dataclass(frozen=True, slots=True)
class ServerPrompt:
    """
    A prompt for a server: token IDs, and the server's features of the prompt's images, if any. `problem` says why the
    server can't take it.
    """

    tokens: Sequence[int]
    features: Mapping[str, Any] | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """
    The request of one candidate, or of several. Text goes to `/v1/completions`, which every server has. Only
    `/inference/v1/generate` takes images as features, and from vLLM 0.30 on, a server has it with `--enable-scale-out`
    alone.
    """

    path: str
    body: dict[str, Any]
    options: dict[str, Any]  # of sampling: the part of the body that has them
    internal_ids: list[str]  # by which the server aborts its candidates
    prompt_lengths: list[int]  # of each candidate, without prior tokens

    @classmethod
    def of(
        cls, request_id: str, prompt: ServerPrompt, prior_tokens: Sequence[int], options: Mapping[str, Any]
    ) -> "CompletionRequest":
        own, tokens = dict(options), [*prompt.tokens, *prior_tokens]
        if prompt.features is None:
            own |= {"request_id": request_id, "prompt": tokens}
            # With `return_token_ids`, the server sends the prompt back, to each of its candidates.
            by_logprobs = options.get("logprobs") is not None
            own["return_tokens_as_token_ids" if by_logprobs else "return_token_ids"] = True
            # The internal ID of the only prompt of a completion request. The server silently ignores other IDs.
            return cls(COMPLETIONS, own, own, [f"cmpl-{request_id}-0"], [len(prompt.tokens)])
        body = {"model": own.pop("model"), "request_id": request_id, "token_ids": tokens}
        body |= {"features": prompt.features, "sampling_params": own}
        return cls("/inference/v1/generate", body, own, [f"generate-tokens-{request_id}"], [len(prompt.tokens)])

    @classmethod
    def together(cls, requests: Sequence["CompletionRequest"]) -> "CompletionRequest":
        """Returns one request for the candidates of several, which have the same `kind`."""
        if len(requests) == 1:
            return requests[0]
        lengths = [length for own in requests for length in own.prompt_lengths]
        request_id = f"{prompt_mark(lengths)}-{uuid.uuid4().hex}"
        body = {**requests[0].body, "request_id": request_id, "prompt": [own.body["prompt"] for own in requests]}
        return cls(COMPLETIONS, body, body, [f"cmpl-{request_id}-{index}" for index in range(len(requests))], lengths)

    @property
    def kind(self) -> bytes | None:
        """
        What requests have in common that can be sent as one, `None` if this one can't. With one seed, candidates of a
        prompt would be equal.
        """
        if self.path != COMPLETIONS or self.options.get("seed") is not None:
            return None
        shared = {name: value for name, value in self.body.items() if name not in ("prompt", "request_id")}
        return orjson.dumps(shared, option=orjson.OPT_NON_STR_KEYS)

    def stream(self, interval: int) -> "CompletionRequest":
        """Has the response streamed, with a chunk about every `interval` tokens."""
        self.options["stream_interval"] = interval
        self.body["stream"] = True
        return self


class ServerRefusedError(GenerationError):
    """Raised when the server answers with an error or with invalid data. Has the server's own message."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status  # of the HTTP response, if it is the cause


class ServerBrokenError(ServerRefusedError):
    """Raised when the server failed on a request that it accepted. Another server, or another try, may succeed."""


class ServerBusyError(ServerBrokenError):
    """Raised when the server did not try because it has too much to do, or its engine is gone."""


class VLLMServer:
    """Client of one vLLM server: its development endpoints and its completions endpoint."""

    def __init__(
        self, base_url: str, session: aiohttp.ClientSession, connect_timeout_s: float = Deadlines.connect_s
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.connect_timeout_s = connect_timeout_s
        self._session = session
        self._key: str | None = None  # from its file, once it was found

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
        self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = CONTROL_TIMEOUT_S
    ) -> Any:
        """
        Returns the JSON of the response, `{}` if it is empty. Connections are not reused here: the server closes them
        after some errors, and a request that reuses one would fail.
        """
        async with self._post(path, body or {}, timeout_s, {"Connection": "close"}) as response:
            await self._check(response)
            data = await response.read()
            return orjson.loads(data) if data else {}

    async def _do(self, path: str, body: Mapping[str, Any], timeout_s: float) -> None:
        """Posts, and ignores the response, which is a text."""
        async with self._post(path, body, timeout_s, {"Connection": "close"}) as response:
            await self._check(response)
            await response.read()

    async def _get(self, path: str, timeout_s: float) -> bytes | None:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self.connect_timeout_s)
        async with self._session.get(self.base_url + path, timeout=timeout, headers=self._authorization()) as response:
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

    async def prompt_logprobs(self, body: Mapping[str, Any], start: int, timeout_s: float) -> list[dict[int, float]]:
        """Returns log-probs of a prompt's positions from `start` on: of its own token, and of the likeliest ones."""
        answer = await self.post("/v1/completions", body, timeout_s)
        try:
            found = answer["choices"][0]["prompt_logprobs"][start:]
            return [{int(token): own["logprob"] for token, own in position.items()} for position in found]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            message = f"{self.base_url} returned no log-probs of a prompt: {str(answer)[:100]}"
            raise ServerRefusedError(message, 200) from error

    async def open(
        self,
        request: CompletionRequest,
        interval: int,
        timeout_s: float | None = None,
        on_sent: Callable[[], None] | None = None,
    ) -> AsyncGenerator[CompletionChunk]:
        """
        Sends a completion request and returns its chunks of about `interval` tokens, which are larger if the server is
        busy. The connection is open until they were read, or the generator is closed. Calls `on_sent` once it is
        connected and the request was sent.
        """
        response = await self._post(request.path, request.stream(interval).body, timeout_s, on_sent=on_sent)
        try:
            await self._check(response)
        except BaseException:
            response.close()
            raise
        return self._chunks(response, request)

    async def _chunks(
        self, response: aiohttp.ClientResponse, request: CompletionRequest
    ) -> AsyncGenerator[CompletionChunk]:
        num_choices, limit = len(request.internal_ids), request.options.get("max_tokens")
        with_logprobs = request.options.get("logprobs") is not None
        num_tokens, unfinished = [0] * num_choices, set(range(num_choices))
        async with response:
            async for data in _server_sent_events(response.content):
                if data == b"[DONE]":
                    break
                message = orjson.loads(data)
                if "error" in message:
                    raise _error_of(message, data)
                if message.get("choices"):
                    chunk = parse_choice(message, num_choices)
                    if with_logprobs and chunk.tokens and chunk.logprobs is None:
                        raise ServerRefusedError("The server returned tokens without the requested log-probs.")
                    num_tokens[chunk.index] += len(chunk.tokens)
                    if limit is not None and num_tokens[chunk.index] > limit:
                        excess = num_tokens[chunk.index] - limit
                        raise ServerRefusedError(f"The server returned {excess} tokens more than `max_tokens`.")
                    if chunk.finish_reason is not None:
                        unfinished.discard(chunk.index)
                    yield chunk
        if unfinished:
            raise ServerBrokenError(f"{self.base_url} ended a stream without a `finish_reason`: its engine stopped.")

    async def abort(self, internal_ids: Sequence[str], timeout_s: float = CONTROL_TIMEOUT_S) -> bool:
        """Aborts requests. Their pending responses then arrive with the tokens so far. Returns whether supported."""
        if not internal_ids:  # an empty list would abort everything, also of other clients
            return True
        async with self._post("/abort_requests", {"request_ids": list(internal_ids)}, timeout_s) as response:
            if response.status in (404, 405):
                return False
            await self._check(response)
            return True

    async def weight_version(self) -> str | None:
        """Returns `"v<number>"` after an update, `"default"` after a start, `None` if versions are not supported."""
        version: str | None = (await self.get("/weight_info") or {}).get("weight_version")
        return version

    # LoRA adapters. Each is a model of its own, which requests name

    async def adapters(self) -> dict[str, str]:
        """Returns the loaded adapters' names, with the directories from which they were loaded."""
        models = (await self.get("/v1/models") or {}).get("data", [])
        return {model["id"]: model["root"] for model in models if model.get("parent") is not None}

    async def load_adapter(self, name: str, path: str, timeout_s: float) -> None:
        """Loads an adapter from a directory that the server can read. Running requests continue meanwhile."""
        await self._do(LOAD_ADAPTER, {"lora_name": name, "lora_path": path}, timeout_s)

    async def unload_adapter(self, name: str) -> None:
        """Unloads an adapter, which no request may name."""
        await self._do("/v1/unload_lora_adapter", {"lora_name": name}, CONTROL_TIMEOUT_S)

    async def unused_layers(self) -> set[str]:
        """Returns the layers of loaded adapters that the server does not use. Needs our plugin."""
        return await self._names(UNUSED)

    async def adapters_in_use(self) -> set[str]:
        """Returns the adapters that unfinished requests decode with, of any client. Needs our plugin."""
        return await self._names(IN_USE)

    async def _names(self, method: str) -> set[str]:
        answers = (await self.post("/collective_rpc", {"method": method})).get("results", [])
        return {name for answer in answers for name in answer}

    async def upload_adapter(self, name: str, path: Path, timeout_s: float) -> str | None:
        """
        Sends the file of an adapter to a server of `trl-darts serve`. Returns the directory where the server has it,
        `None` if the server takes none.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self.connect_timeout_s)
        headers = {"Content-Type": "application/octet-stream", "Connection": "close", **self._authorization()}
        url = f"{self.base_url}{UPLOADS}{name}"
        with path.open("rb") as file:
            async with self._session.put(url, data=file, headers=headers, timeout=timeout) as response:
                if response.status in (404, 405):
                    return None
                await self._check(response)
                found: str = orjson.loads(await response.read())["path"]
                return found

    async def num_outputs(self) -> dict[str, int]:
        """Returns the number of tokens of each unfinished request, by its internal ID. Needs our plugin."""
        answers = (await self.post("/collective_rpc", {"method": NUM_OUTPUTS})).get("results", [])
        # vLLM appends a random suffix to the ID.
        return {name.rpartition("-")[0]: count for answer in answers for name, count in answer.items()}

    async def spares_generators(self) -> bool:
        """Whether seeded requests can be prefilled in parts on a CPU. Needs our plugin."""
        try:
            answers = (await self.post("/collective_rpc", {"method": PROBE})).get("results", [])
        except ServerRefusedError:  # no plugin, or an older one
            return False
        return bool(answers) and all(isinstance(answer, dict) and answer.get("seeds") for answer in answers)

    async def sleep(self) -> None:
        """Moves the weights to the host's memory and drops the KV cache. The server must be idle."""
        await self.post("/sleep?level=1", timeout_s=TURN_TIMEOUT_S)

    async def wake_up(self, only_weights: bool = False) -> None:
        """Moves the weights back to the GPU, and allocates the KV cache unless `only_weights`."""
        await self.post("/wake_up?tags=weights" if only_weights else "/wake_up", timeout_s=TURN_TIMEOUT_S)

    def _post(
        self,
        path: str,
        body: Mapping[str, Any],
        timeout_s: float | None,
        headers: Mapping[str, str] | None = None,
        on_sent: Callable[[], None] | None = None,
    ) -> Any:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self.connect_timeout_s)
        return self._session.post(
            self.base_url + path,
            data=orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS),  # `logit_bias` has token IDs
            headers={"Content-Type": "application/json", **self._authorization(), **(headers or {})},
            timeout=timeout,
            trace_request_ctx=on_sent,
        )

    def _authorization(self) -> dict[str, str]:
        """Returns the header with the key of a server of this user, unless the session has a key."""
        if "Authorization" not in self._session.headers:
            self._key = self._key or key_of(self.base_url)
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status == 200:
            return
        if response.status == 401:
            self._key = None  # it may have been started again, with another one
        data = await response.read()
        try:
            message = _error_message(orjson.loads(data), data)
        except orjson.JSONDecodeError:
            message = data.decode(errors="replace")
        text = f"{self.base_url} answered {response.status}: {message[:MAX_MESSAGE] or response.reason}"
        raise _kind(response.status)(text, response.status)


def _kind(status: int | None) -> type[ServerRefusedError]:
    """Returns the class of an error with an HTTP status, `None` if it has none: 4xx is mostly the request's fault."""
    if status in (429, 503):
        return ServerBusyError
    is_timeout = status in (408, 425)  # of a proxy
    return ServerRefusedError if status is not None and 400 <= status < 500 and not is_timeout else ServerBrokenError


def new_session(api_key: str | None = None) -> aiohttp.ClientSession:
    """Creates a session for many long concurrent requests. Must be called inside the event loop that uses it."""
    tracing = aiohttp.TraceConfig()
    tracing.on_request_headers_sent.append(_call_on_sent)
    return aiohttp.ClientSession(
        trace_configs=[tracing],
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_TIMEOUT_S),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
    )


async def _call_on_sent(session: aiohttp.ClientSession, context: Any, parameters: Any) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx()


def prompt_mark(lengths: Sequence[int]) -> str:
    """
    Returns the beginning of a request's ID. A drafter on the server reads each prompt's length from it: what follows
    the prompt may be part of an answer.
    """
    return f"p{'.'.join(map(str, lengths))}"


def parse_choice(message: Mapping[str, Any], num_choices: int = 1) -> CompletionChunk:
    """Parses the only choice of a completion or of a stream's chunk. The request has `num_choices`."""
    choices = message["choices"]
    index = choices[0].get("index", 0) if len(choices) == 1 else None
    if type(index) is not int or not 0 <= index < num_choices:  # else tokens of two completions would be mixed
        raise ServerRefusedError(f"The server returned other choices than requested: {str(choices)[:100]}.")
    choice, tops = choices[0], None
    tokens, logprobs = choice.get("token_ids"), choice.get("logprobs")
    if tokens is None and logprobs and "tokens" in logprobs:
        tokens = orjson.loads(f"[{','.join(logprobs['tokens'])}]".replace(TOKEN_ID, ""))  # a third of `int`'s time
    if tokens is None:
        raise ServerRefusedError("The server returned no `token_ids`. It is too old: use vLLM 0.22 or newer.")
    if logprobs is not None:
        content, tops = logprobs.get("content"), logprobs.get("top_logprobs")
        logprobs = logprobs["token_logprobs"] if content is None else [entry["logprob"] for entry in content]
        # JSON has no NaN, so a server sends null. TRL treats NaN as an unknown log-prob with ratio 1.
        logprobs = logprobs and [math.nan if logprob is None else logprob for logprob in logprobs]
    _check_numbers(tokens, logprobs)
    return CompletionChunk(tokens, logprobs, choice.get("finish_reason"), tops, index)


def top_of(position: Mapping[str, float]) -> dict[int, float]:
    """Parses the likeliest tokens at one position of a chunk."""
    return {int(token.removeprefix(TOKEN_ID)): logprob for token, logprob in position.items()}


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
    """Builds the error of a stream from its JSON, which has the status."""
    error = message["error"]
    code = error.get("code") if isinstance(error, dict) else None
    return _kind(code if isinstance(code, int) else None)(_error_message(message, raw))


def _error_message(message: Any, raw: bytes) -> str:
    error = message.get("error", message) if isinstance(message, dict) else message
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail")
    return str(error) if error else raw.decode(errors="replace")
