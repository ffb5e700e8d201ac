"""
Middleware that takes LoRA adapters over HTTP, for servers that can't read the trainer's files. vLLM loads an adapter
from a directory of the server's machine, and has no upload.

`PUT /trl_darts/adapters/NAME` with the server's key and one safetensors file, which has the adapter's config in its
metadata. The answer names the directory, from which `/v1/load_lora_adapter` loads it. Nothing else is written, and no
name leaves the directory for uploads, which is removed when the server ends.
"""

import asyncio
import json
import re
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from starlette.requests import Request
from starlette.responses import JSONResponse

from ..engines.vllm_api import UPLOADS
from ..weights import ADAPTER, ADAPTER_CONFIG
from .middleware import RequireKey


MAX_BYTES = 4 << 30  # of one adapter: rank 512 of a model with 70 billion parameters
MAX_ADAPTERS = 16  # the newest ones; a server has fewer at once
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
# What vLLM reads of a config, and the types of the values.
CONFIG = {"peft_type": str, "task_type": str, "bias": str, "r": int, "lora_alpha": int, "target_modules": list}


class RefusedError(ValueError):
    """Raised for an upload that is not an adapter."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class TakeAdapters(RequireKey):
    """Class for vLLM's `--middleware`, in place of [`RequireKey`], which it is too."""

    def __init__(self, app: Any) -> None:
        super().__init__(self._take_or_pass)
        self._server = app
        self._directory = Path(tempfile.mkdtemp(prefix="trl_darts-adapters-"))
        weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)

    async def _take_or_pass(self, scope: Any, receive: Any, send: Any) -> None:
        """Takes an upload. The key was checked before."""
        if scope["type"] != "http" or not scope["path"].startswith(UPLOADS) or scope["method"] != "PUT":
            return await self._server(scope, receive, send)
        name = scope["path"].removeprefix(UPLOADS)
        try:
            path = await self._take(name, Request(scope, receive))
        except RefusedError as error:
            return await JSONResponse({"error": str(error)}, error.status)(scope, receive, send)
        await JSONResponse({"path": str(path)})(scope, receive, send)

    async def _take(self, name: str, request: Request) -> Path:
        if not NAME.fullmatch(name):
            raise RefusedError(f"An adapter's name must match {NAME.pattern}.")
        partial = Path(tempfile.mkdtemp(prefix=".", dir=self._directory))
        try:
            await self._receive(request, partial / ADAPTER)
            config = await asyncio.to_thread(read_config, partial / ADAPTER)
            (partial / ADAPTER_CONFIG).write_text(json.dumps(config))
            shutil.rmtree(self._directory / name, ignore_errors=True)
            return partial.rename(self._directory / name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            self._remove_oldest()

    async def _receive(self, request: Request, path: Path) -> None:
        num_bytes = 0
        with path.open("wb") as file:
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes > MAX_BYTES:
                    raise RefusedError(f"An adapter may have {MAX_BYTES} bytes, and this one has more.", 413)
                file.write(chunk)

    def _remove_oldest(self) -> None:
        found = sorted(self._directory.glob("[!.]*"), key=lambda path: path.stat().st_mtime_ns)
        for path in found[:-MAX_ADAPTERS]:
            shutil.rmtree(path, ignore_errors=True)


def read_config(path: Path) -> dict[str, Any]:
    """Returns the config in a file's metadata. Raises [`RefusedError`] unless it is an adapter."""
    try:
        with safe_open(path, "pt") as file:
            names, text = list(file.keys()), (file.metadata() or {}).get(ADAPTER_CONFIG, "")
        config = json.loads(text)
    except (SafetensorError, ValueError) as error:
        raise RefusedError(
            f"An adapter must be a safetensors file with `{ADAPTER_CONFIG}` in its metadata."
        ) from error
    if not isinstance(config, dict) or config.keys() - CONFIG.keys():
        raise RefusedError(f"`{ADAPTER_CONFIG}` must be an object with some of {', '.join(CONFIG)}.")
    if wrong := [name for name, value in config.items() if type(value) is not CONFIG[name]]:
        raise RefusedError(f"`{ADAPTER_CONFIG}` must have {wrong[0]} of type {CONFIG[wrong[0]].__name__}.")
    if not names or not all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in names):
        raise RefusedError("An adapter must have matrices of LoRA, and nothing else.")
    return config
