"""
Read by every Python process that a test starts, because `tests/conftest.py` puts this folder on their path. Importing
torch and vLLM makes a million objects, and with Python's defaults a fifth of that time goes to the garbage collector.
"""

import gc
import multiprocessing
import sys


gc.set_threshold(100_000, 20, 20)


def _get_context(method=None):
    """On a CPU, a vLLM server spawns its engine, which imports torch and vLLM again. A fork is ready 8 s earlier."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    is_server = spec is not None and spec.name.startswith("vllm.entrypoints.")
    return _plain("fork" if is_server and method == "spawn" else method)


_plain, multiprocessing.get_context = multiprocessing.get_context, _get_context
