"""Middleware that requires the server's key on every path. vLLM does not protect its development endpoints."""

import hmac
import os
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from ..engines.addresses import API_KEY_VARIABLE


FREE_PATH = "/health"  # harmless, and health probes have no key


class RequireKey:
    """Class for vLLM's `--middleware`. Reads the key from the environment, without which the server does not start."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._key = os.environ.get(API_KEY_VARIABLE, "").encode()
        if not self._key:
            raise ValueError(
                f"`{API_KEY_VARIABLE}` must be set in the server's environment. Set it to the server's key."
            )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        free = scope["type"] == "lifespan" or scope["path"] == FREE_PATH or scope.get("method") == "OPTIONS"
        if free or self._has_key(Headers(scope=scope)):
            return await self._app(scope, receive, send)
        error = f"The server's key is missing or wrong. Set {API_KEY_VARIABLE} to it."
        await JSONResponse({"error": error}, status_code=401)(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(key.encode(), self._key)
