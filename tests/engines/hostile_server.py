"""
A server that answers each completion request by a plan, most of them bad, and knows what the right answer is.

The right answer is a function of the prompt `[group, index]` and of the position alone, so that a row can be checked
however often it was cut and resumed.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web


MAX_TOKENS = 40
LARGEST_CHUNK = 8
HUGE = "x" * 300_000  # beyond what comes in one read
PAGE = b"<html><body><h1>Bad Gateway</h1></body></html>"
Messages = list[dict[str, Any]]
Mutation = Callable[[random.Random, dict[str, Any]], None]


def right_answer(group: int, index: int) -> tuple[list[int], list[float], str]:
    """Returns tokens, log-probs and `finish_reason` of a candidate."""
    rng = random.Random(1000 * group + index)
    length = rng.choice([rng.randint(1, MAX_TOKENS), rng.randint(1, 5), MAX_TOKENS])
    tokens = [rng.randrange(150_000) for _ in range(length)]
    logprobs = [-5 * rng.random() ** 4 for _ in range(length)]
    return tokens, logprobs, "length" if length == MAX_TOKENS else "stop"


def chunk(tokens: list[Any], logprobs: list[Any] | None, finish_reason: str | None = None) -> dict[str, Any]:
    """Returns a chunk of a stream."""
    logprobs = None if logprobs is None else {"token_logprobs": logprobs}
    return {"choices": [{"index": 0, "token_ids": tokens, "logprobs": logprobs, "finish_reason": finish_reason}]}


def right_messages(rng: random.Random, group: int, index: int, start: int) -> Messages:
    """
    Returns the right answer from a position on, in chunks. The reason is in the last chunk, or in one of its own.
    """
    tokens, logprobs, reason = right_answer(group, index)
    messages = []
    while start < len(tokens):
        end = start + rng.randint(1, LARGEST_CHUNK)
        messages.append(chunk(tokens[start:end], logprobs[start:end]))
        start = end
    if not messages or rng.random() < 0.3:
        messages.append(chunk([], rng.choice([None, []])))
    messages[-1]["choices"][0]["finish_reason"] = reason
    return messages


@dataclass
class Reply:
    """
    What is sent for one request: a raw part of the headers or a whole response, and what happens then: `"end"`,
    `"cut"` (the connection is closed), `"hang"`, or `"drip"` (the body is sent again and again). Without a body, that
    happens before the headers.
    """

    body: bytes | None
    then: str = "end"
    status: int = 200
    raw_headers: bytes = b""


def encode(messages: Messages, done: bool = True) -> bytes:
    """Encodes server-sent events."""
    events = [b"data: " + json.dumps(message).encode() + b"\n\n" for message in messages]
    return b"".join([*events, b"data: [DONE]\n\n"] if done else events)


def _cut(rng: random.Random, messages: Messages) -> Reply:
    data = encode(messages)
    return Reply(data[: rng.randrange(len(data))], "cut")


def _between(rng: random.Random, messages: Messages, *extra: bytes) -> bytes:
    """Inserts something between two chunks of the right stream."""
    at = rng.randrange(len(messages))
    return encode(messages[:at], done=False) + b"".join(extra) + encode(messages[at:])


def _after_finish(rng: random.Random, messages: Messages) -> Reply:
    return Reply(encode([*messages, chunk([1, 2], [-1.0, -1.0], rng.choice([None, "stop", "length"]))]))


def _empty_chunks(rng: random.Random, messages: Messages) -> Reply:
    empty = encode([{"choices": []}, chunk([], []), chunk([], None)], done=False)
    return Reply(_between(rng, messages, b": ping\n\n", empty, b"event: x\n\n", b"\n\n"))


def _huge_chunk(rng: random.Random, messages: Messages) -> Reply:
    messages[rng.randrange(len(messages))]["text"] = HUGE
    return Reply(encode(messages))


def _stream_error(code: Any) -> Callable[[random.Random, Messages], Reply]:
    error = {"error": {"message": "told in the stream", "code": code}}
    return lambda rng, messages: Reply(_between(rng, messages, encode([error], done=False)))


def _status(status: int, body: bytes) -> Callable[[random.Random, Messages], Reply]:
    return lambda rng, messages: Reply(body, status=status)


def _hang(share: float | None) -> Callable[[random.Random, Messages], Reply]:
    def reply(rng: random.Random, messages: Messages) -> Reply:
        data = encode(messages, done=False)
        return Reply(None if share is None else data[: int(share * len(data))], "hang")

    return reply


def _mutated(mutate: Mutation) -> Callable[[random.Random, Messages], Reply]:
    """Changes one chunk with tokens."""

    def reply(rng: random.Random, messages: Messages) -> Reply:
        mutate(rng, rng.choice([m for m in messages if m["choices"][0]["token_ids"]])["choices"][0])
        return Reply(encode(messages))

    return reply


def _token(value: Any) -> Callable[[random.Random, Messages], Reply]:
    def mutate(rng: random.Random, choice: dict[str, Any]) -> None:
        choice["token_ids"][rng.randrange(len(choice["token_ids"]))] = value

    return _mutated(mutate)


def _logprob(value: Any) -> Callable[[random.Random, Messages], Reply]:
    def mutate(rng: random.Random, choice: dict[str, Any]) -> None:
        choice["logprobs"]["token_logprobs"][rng.randrange(len(choice["token_ids"]))] = value

    return _mutated(mutate)


def _field(name: str, value: Any) -> Callable[[random.Random, Messages], Reply]:
    return _mutated(lambda rng, choice: choice.__setitem__(name, value))


def _two_choices(rng: random.Random, messages: Messages) -> Reply:
    message = rng.choice(messages)
    message["choices"].append({**message["choices"][0], "index": 1})
    return Reply(encode(messages))


def _too_many(rng: random.Random, messages: Messages) -> Reply:
    messages.insert(0, chunk([3] * (MAX_TOKENS + 1), [-1.0] * (MAX_TOKENS + 1)))
    return Reply(encode(messages))


JSON_ERROR = b'{"error": {"message": "its own words", "type": "T", "code": 1}}'
ROWS = {
    "good": lambda rng, messages: Reply(encode(messages)),
    "no [DONE]": lambda rng, messages: Reply(encode(messages, done=False)),
    "no end": _hang(1.0),
    "chunks after the finish": _after_finish,
    "empty chunks": _empty_chunks,
    "huge chunk": _huge_chunk,
    "log-prob is null": _logprob(None),  # TRL takes it for one that is not known
}
RESUMES = {
    "cut before the headers": lambda rng, messages: Reply(None, "cut"),
    "cut in the headers": lambda rng, messages: Reply(None, "cut", raw_headers=b"HTTP/1.1 200 OK\r\nContent-Ty"),
    "cut after the headers": lambda rng, messages: Reply(b"", "cut"),
    "no HTTP": lambda rng, messages: Reply(None, "cut", raw_headers=b"SSH-2.0-OpenSSH_9.6\r\n\r\n"),
    "cut at a byte": _cut,
    "no finish_reason": lambda rng, messages: Reply(encode(messages[:-1])),
    "no event": lambda rng, messages: Reply(_between(rng, messages, PAGE, b"\n\n")),
    "500 JSON": _status(500, JSON_ERROR),
    "502 HTML": _status(502, PAGE),
    "503 empty": _status(503, b""),
    "429 JSON": _status(429, JSON_ERROR),
    "aborted by nobody": _field("finish_reason", "abort"),
    "ended with an error": _field("finish_reason", "error"),
    "error 500 in the stream": _stream_error(500),
    "error 503 in the stream": _stream_error(503),
    "error without a code in the stream": _stream_error(None),
}
# With the words that the error must have.
ERRORS = {
    "malformed JSON": (lambda rng, messages: Reply(_between(rng, messages, b'data: {"choi\n\n')), "could not be read"),
    "JSON of another form": (lambda rng, m: Reply(_between(rng, m, b'data: {"choices": 7}\n\n')), "could not be read"),
    "JSON that is no object": (lambda rng, m: Reply(_between(rng, m, b"data: null\n\n")), "could not be read"),
    "token is a string": (_token("7"), "invalid `token_ids`"),
    "token is a float": (_token(7.0), "invalid `token_ids`"),
    "token is a bool": (_token(True), "invalid `token_ids`"),
    "token is negative": (_token(-1), "invalid `token_ids`"),
    "tokens are a string": (_field("token_ids", "7 8"), "invalid `token_ids`"),
    "no tokens": (_field("token_ids", None), "no `token_ids`"),
    "no log-probs": (_field("logprobs", None), "without the requested log-probs"),
    "null for log-probs": (_field("logprobs", {"token_logprobs": None}), "without the requested log-probs"),
    "log-prob is NaN": (_logprob(float("nan")), "could not be read"),
    "log-prob is infinite": (_logprob(float("-inf")), "could not be read"),
    "log-prob is positive": (_logprob(0.5), "returned 0.5 for a token's log-prob"),
    "log-prob is a string": (_logprob("-1.0"), "returned '-1.0' for a token's log-prob"),
    "more log-probs": (_mutated(lambda rng, c: c["logprobs"]["token_logprobs"].append(-1.0)), "log-probs for"),
    "fewer log-probs": (_mutated(lambda rng, c: c["logprobs"]["token_logprobs"].pop()), "log-probs for"),
    "more tokens than log-probs": (_mutated(lambda rng, c: c["token_ids"].append(3)), "log-probs for"),
    "more tokens than max_tokens": (_too_many, "more than `max_tokens`"),
    "unknown finish_reason": (_field("finish_reason", "exploded"), "'exploded' is not a valid FinishReason"),
    "two choices": (_two_choices, "other choices"),
    "another choice": (_field("index", 1), "other choices"),
    "400 JSON": (_status(400, JSON_ERROR), "answered 400: its own words"),
    "404 HTML": (_status(404, PAGE), "answered 404: .*Bad Gateway"),
    "422 empty": (_status(422, b""), "answered 422: Unprocessable"),
    "error 400 in the stream": (_stream_error(400), "told in the stream"),
}
STALLS = {
    "hangs at once": _hang(None),
    "hangs after the headers": _hang(0.0),
    "hangs within the stream": _hang(0.5),
    "comments for ever": lambda rng, messages: Reply(b": ping\n\n", "drip"),
}
EMPTY_FOR_EVER = {"empty chunks for ever": lambda rng, messages: Reply(encode([chunk([], [])], done=False), "drip")}
REPLIES = {**ROWS, **RESUMES, **STALLS, **EMPTY_FOR_EVER, **{kind: reply for kind, (reply, _) in ERRORS.items()}}


class HostileServer:
    """Handles `/v1/completions`. `plan` has the kind of answer for each `(group, index, segment)`."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.plan: Callable[[int, int, int], str] = lambda group, index, segment: "good"
        self.played: dict[tuple[int, int, int], str] = {}  # the kind of each answer
        self.problems: list[str] = []  # requests that should not have been sent

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Answers according to the plan."""
        fields = await request.json()
        segment = int(fields["request_id"].rsplit("-", 1)[1])
        group, index, *prior = fields["prompt"]
        tokens = right_answer(group, index)[0]
        if prior != tokens[: len(prior)] or fields["max_tokens"] != MAX_TOKENS - len(prior):
            self.problems.append(f"{group} {index}: {prior}, {fields['max_tokens']}")
        kind = self.plan(group, index, segment)
        if len(prior) == len(tokens):  # no chunk with tokens is left to be spoiled
            kind = "good"
        self.played[group, index, segment] = kind
        return await self._send(request, REPLIES[kind](self.rng, right_messages(self.rng, group, index, len(prior))))

    async def _send(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        response = web.StreamResponse(status=reply.status, headers={"Content-Type": "text/event-stream"})
        if reply.raw_headers:
            request.transport.write(reply.raw_headers)
        if reply.body is not None:
            await response.prepare(request)
            at = self.rng.randrange(len(reply.body) + 1)
            for piece in (reply.body[:at], reply.body[at:]):
                await response.write(piece)
                await asyncio.sleep(0)
        if reply.then == "cut":
            request.transport.close()
        while reply.then in ("hang", "drip") and request.transport is not None:
            await asyncio.sleep(0.02)
            if reply.then == "drip" and request.transport is not None:
                await response.write(reply.body)
        return response
