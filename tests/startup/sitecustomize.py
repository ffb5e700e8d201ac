"""
Read by every Python process that a test starts, because `tests/conftest.py` puts this folder on their path. It saves
seconds of each start: importing torch and vLLM makes a million objects, and with Python's defaults a fifth of that
time goes to the garbage collector. What it changes of a vLLM server, no test is about.
"""

import collections
import gc
import multiprocessing
import sys
import types


gc.set_threshold(100_000, 20, 20)


def _get_context(method=None):
    """On a CPU, a vLLM server spawns its engine, which imports torch and vLLM again. A fork is ready 8 s earlier."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if method == "spawn" and spec is not None and spec.name.startswith("vllm.entrypoints."):
        method = "spawn" if sys.modules["torch"].cuda.is_available() else "fork"
    return _plain(method)


_plain, multiprocessing.get_context = multiprocessing.get_context, _get_context

# For `/server_info`, a server asks pip, dpkg and others about its machine, which takes 5 s. Nobody reads the answer.
_collected = types.ModuleType("vllm.collect_env")
_collected.get_env_info = collections.namedtuple("SystemEnv", "cpu_info", defaults=["Model name: a CPU"])
_collected.main = None
sys.modules["vllm.collect_env"] = _collected
