"""
An OpenAI-compatible endpoint for one conversation, which trains agents that are programs of their own:

```
program ──▶ /v1/chat/completions ──▶ session.append, session.generate ──▶ the servers of the rollout
```
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from socket import gethostname
from typing import Any
from uuid import uuid4

from aiohttp import web

from ..errors import ConfigurationError, GenerationError
from .conversations import Over
from .sessions import Session


ANY = "0.0.0.0"
MAX_BODY = 64 * 2**20  # bytes of a request
# Fields of a request that change what is answered, with the values that don't.
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("stream", "logprobs"), (False,)),
    "n": (1,),
    "functions": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
}
Message = dict[str, Any]


@asynccontextmanager
async def chat_endpoint(session: Session, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """
    Serves `/v1/chat/completions` of OpenAI's API for one conversation, on a port of this machine. What is answered is
    sampled and trained on as [`Session`]'s turns are, with the tokens that were sampled.

    The first request begins the conversation, with its messages and its `tools` instead of the row's prompt. Each
    further one continues it: the messages before, the answer to them, and new ones. Sampling is the trainer's, so that
    `temperature` and its like have no effect; `max_tokens` has. Where nothing fits into `max_completion_length` any
    more, the error is `context_length_exceeded`, as OpenAI's.

    Args:
        session ([`Session`]):
            The conversation, before its first turn.
        host (`str`, *optional*, defaults to `"127.0.0.1"`):
            Address of this machine at which the endpoint listens. With `"0.0.0.0"`, programs in containers and on
            other machines reach it, and so does everybody there: it asks for no key.

    Returns:
        `str`: The base URL, which is that of a client: `AsyncOpenAI(base_url=url, api_key="none")`. With `"0.0.0.0"`,
        it has the name of this machine.

    Raises:
        [`GenerationError`]: At the end of the context, if the servers failed, whatever the program made of it.

    Example:

    ```python
    async def play(session: Session, example: dict) -> None:
        async with chat_endpoint(session) as url:
            session.reward = await run_agent(example, base_url=url)
    ```
    """
    endpoint = ChatEndpoint(session)
    app = web.Application(client_max_size=MAX_BODY)
    app.router.add_post("/v1/chat/completions", endpoint.answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, 0).start()
        yield f"http://{gethostname() if host == ANY else host}:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
        if endpoint.error is not None:
            raise endpoint.error


class ChatEndpoint:
    """The requests of one conversation, see [`chat_endpoint`]."""

    def __init__(self, session: Session) -> None:
        self.error: GenerationError | None = None
        self._session = session
        self._known: list[Message] = []  # the conversation so far
        self._tools: Any = None
        self._lock = asyncio.Lock()

    async def answer(self, request: web.Request) -> web.Response:
        """Answers a request."""
        async with self._lock:
            try:
                return await self._answer(await request.json())
            except GenerationError as error:
                self.error = error
                return _refusal(str(error), "server_error", 500)
            except Over:
                return _refusal("the rollout is over", "server_error", 503)
            except Exception as error:  # of the request, such as messages that the chat template refuses
                return _refusal(f"{type(error).__name__}: {error}")

    async def _answer(self, body: dict[str, Any]) -> web.Response:
        session = self._session
        if given := [name for name, same in REFUSED.items() if body.get(name) not in (None, *same)]:
            return _refusal(f"`{given[0]}` ({body[given[0]]!r:.60}) is not supported. Leave it out.")
        messages, tools = [_normal(message) for message in body["messages"]], body.get("tools")
        if not self._known:
            session.begin(messages, tools)
            self._tools = tools
        elif tools != self._tools:
            return _refusal("`tools` must be those of the first request, which the model has read.")
        elif not _continues(messages, self._known):
            return _refusal(
                "`messages` must continue the conversation: the messages of the last request, the answer to it, and "
                "new ones. What was trained on can't be changed afterwards."
            )
        elif not session.append(_named(messages[len(self._known) :], self._known[-1])):
            return _refusal("the conversation does not fit into `max_completion_length`", "context_length_exceeded")
        before = len(session.completion_ids)
        await session.generate(body.get("max_completion_tokens") or body.get("max_tokens"))
        num_tokens = len(session.completion_ids) - before
        if not num_tokens:
            return _refusal("no token is left of `max_completion_length`", "context_length_exceeded")
        message = _numbered(session.message)
        self._known = [*messages, _normal(message)]
        prompt_tokens = len(session.prompt_ids) + before
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": num_tokens}
        choice = {"index": 0, "message": message, "finish_reason": self._reason(message), "logprobs": None}
        return web.json_response(
            {
                **{"id": f"chatcmpl-{uuid4().hex}", "object": "chat.completion", "created": 0},
                **{"model": body.get("model", ""), "choices": [choice]},
                "usage": {**usage, "total_tokens": prompt_tokens + num_tokens},
            }
        )

    def _reason(self, message: Message) -> str:
        if message.get("tool_calls"):
            return "tool_calls"
        return "stop" if self._session.has_ended_turn else "length"


def _refusal(message: str, code: str = "invalid_request_error", status: int = 400) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": error}, status=status)


def _normal(message: Message) -> Message:
    """Returns a message with one text as its content, and arguments of tools as dictionaries."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        if other := [part["type"] for part in content if part["type"] != "text"]:
            raise ConfigurationError(f"`messages` have a part of the type {other[0]!r}, and must be text.")
        content = "".join(part["text"] for part in content)
    own = {"role": message["role"], "content": content}
    own |= {name: message[name] for name in ("name", "tool_call_id", "reasoning_content") if message.get(name)}
    if message.get("tool_calls"):
        own["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return own


def _call(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {**call, "function": {"name": call["function"]["name"], "arguments": arguments}}


def _numbered(message: Message) -> Message:
    """Returns the model's message as OpenAI's API has it: calls have IDs, and their arguments are JSON."""
    calls = [
        {
            "id": f"call_{uuid4().hex}",
            "type": "function",
            "function": {"name": call["function"]["name"], "arguments": json.dumps(call["function"]["arguments"])},
        }
        for call in message.get("tool_calls") or []
    ]
    return {**message, **({"tool_calls": calls} if calls else {})}


def _named(messages: Sequence[Message], last: Message) -> list[Message]:
    """Returns messages with the names of the tools whose answers they are, which some templates need."""
    names = {call["id"]: call["function"]["name"] for call in last.get("tool_calls", [])}
    return [
        {"name": names[own["tool_call_id"]], **own} if own.get("tool_call_id") in names else own for own in messages
    ]


def _continues(messages: Sequence[Message], known: Sequence[Message]) -> bool:
    def told(message: Message) -> tuple[Any, ...]:
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
        return message["role"], message["content"], calls

    begins = all(told(own) == told(other) for own, other in zip(messages, known, strict=False))
    return len(messages) > len(known) and begins
