"""The vLLM plugin is light, can be loaded repeatedly, and does no harm to an unsupported vLLM."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from trl_darts.weights import plugin


def test_loading_it_loads_nothing_heavy():
    """Every vLLM process imports the plugin, and `trl_darts.weights` with it."""
    code = (
        "import sys; before = set(sys.modules); import trl_darts.weights.plugin; "
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "trl", "transformers", "vllm", "requests", "numpy"} & set(loaded)


def test_after_import(tmp_path, monkeypatch):
    (tmp_path / "late_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    finders = len(sys.meta_path)

    def note(module):
        seen.append(module.value)

    plugin.when_imported("late_module", note)
    plugin.when_imported("late_module", note)
    plugin.when_imported("late_module", lambda module: seen.append("another plugin"))
    assert seen == []
    import late_module

    assert seen == [1, "another plugin"]
    assert len(sys.meta_path) == finders
    plugin.when_imported("late_module", lambda module: seen.append("at once"))
    assert seen == [1, "another plugin", "at once"]
    assert late_module.__spec__.origin.endswith("late_module.py")
    del sys.modules["late_module"]


def test_a_vllm_that_differs_is_a_warning_with_its_version(monkeypatch, caplog):
    vllm = ModuleType("vllm")
    vllm.__version__ = "9.9.9"
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, plugin.WORKER_MODULE, ModuleType(plugin.WORKER_MODULE))  # has no `Worker`
    logger = logging.getLogger("vllm.trl_darts")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    plugin.register()
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    (message,) = {record.getMessage() for record in caplog.records}
    assert "(9.9.9)" in message


def test_reload_says_that_it_was_ours(monkeypatch):
    """If vLLM's reload fails, layers are restored and its error is raised."""
    done = []
    steps = SimpleNamespace(
        repack_tied_lm_heads=lambda model: done.append(("repack", model)),
        restore_unfinished_layers=lambda model, config: done.append(("restore", model, config)),
    )
    monkeypatch.setitem(sys.modules, "trl_darts.weights.reload", steps)

    class Worker:
        vllm_config = "config"
        model_runner = SimpleNamespace(get_model=lambda: "model")

        def reload_weights(self, weights_path=None):
            if weights_path == "bad":
                raise KeyError(weights_path)

    module = SimpleNamespace(Worker=Worker)
    plugin._patch_worker(module)
    plugin._patch_worker(module)
    assert Worker().reload_weights(weights_path="good") == {"trl_darts": __import__("trl_darts").__version__}
    assert done == [("repack", "model")]
    with pytest.raises(KeyError, match="bad"):
        Worker().reload_weights(weights_path="bad")
    assert done[1:] == [("restore", "model", "config")]


def test_requests_are_counted_where_the_scheduler_is():
    """Other methods of `/collective_rpc` are vLLM's."""

    adapters = [None, *(SimpleNamespace(lora_name=name) for name in ("run-v2", "run-v1", "run-v2"))]
    requests = {
        f"cmpl-a-{i}-1234abcd": SimpleNamespace(num_output_tokens=7 + i, lora_request=adapter)
        for i, adapter in enumerate(adapters)
    }

    class EngineCore:
        scheduler = SimpleNamespace(requests=requests)

        def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
            return [method]

    module = SimpleNamespace(EngineCore=EngineCore)
    plugin._tell_of_requests(module)
    plugin._tell_of_requests(module)
    counts = {f"cmpl-a-{i}-1234abcd": 7 + i for i in range(4)}
    assert EngineCore().collective_rpc(plugin.NUM_OUTPUTS, None, (), {}) == [counts]
    assert EngineCore().collective_rpc(plugin.IN_USE) == [["run-v1", "run-v2"]]
    assert EngineCore().collective_rpc("reload_weights", None) == ["reload_weights"]
