"""
Read by every Python process that a test starts, because `tests/conftest.py` puts this folder on their path. It saves
seconds of each start: importing torch and vLLM makes a million objects, and with Python's defaults a fifth of that
time goes to the garbage collector. What it changes of a vLLM server, no test is about.
"""

import gc
import importlib.util
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


def _get_env_info():
    """For `/server_info`, a server asks pip, dpkg and others about its machine, which takes 5 s. Here, lscpu alone."""
    path = sys.modules["vllm"].__path__[0] + "/collect_env.py"
    spec = importlib.util.spec_from_file_location("vllm_collect_env", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    run = module.run
    module.run = lambda command: run(command) if command == "lscpu" else (0 if "list" in command else 1, "", "")
    return module.get_env_info()


_quick = types.ModuleType("vllm.collect_env")
_quick.get_env_info, _quick.main = _get_env_info, None
sys.modules["vllm.collect_env"] = _quick
