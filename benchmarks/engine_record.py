"""
A vLLM plugin that writes down each step of an engine, with the tokens that it sampled, and each load of weights.

It runs in the server's process, so it imports nothing else of the benchmarks.
"""

import functools
import json
import os
import time
from types import ModuleType
from typing import Any

from trl_darts.weights.plugin import when_imported


RECORD = "IN_FLIGHT_RECORD"  # environment variable of the server: the file that its engine writes


def register() -> None:
    """Entry point of the group `vllm.general_plugins`."""
    when_imported("vllm.v1.engine.core", _record)


def _record(module: ModuleType) -> None:
    """Has the engine write a line for each step with tokens, and for each load of weights."""
    step, call = module.EngineCore.step, module.EngineCore.collective_rpc
    if hasattr(step, "recorded"):
        return
    file = open(os.environ[RECORD], "a", buffering=1)  # noqa: SIM115  (as long as the engine)

    def recorded_step(self: Any) -> Any:
        outputs, executed = step(self)
        tokens = {row.request_id: row.new_token_ids for own in outputs.values() for row in own.outputs}
        if any(tokens.values()):
            file.write(json.dumps({"end": time.monotonic(), "tokens": {k: v for k, v in tokens.items() if v}}) + "\n")
        return outputs, executed

    @functools.wraps(call)  # vLLM reads its signature
    def recorded_call(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        try:
            return call(self, method, *args, **kwargs)
        finally:
            if method == "reload_weights":
                file.write(json.dumps({"start": start, "loaded": time.monotonic()}) + "\n")

    recorded_step.recorded = True  # type: ignore[attr-defined]
    module.EngineCore.step, module.EngineCore.collective_rpc = recorded_step, recorded_call
