"""
Tests that TRL has what we use, and that errors name what is missing.

Invariants:

- No other module of the package imports from TRL's modules; `import trl` and `from trl import …` are its interface.
- Every method of `GRPOTrainer` that the trainer overrides is among the checked hooks.
"""

import ast
import inspect
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import trl
import yaml
from transformers import Trainer
from trl import GRPOTrainer
from trl.trainer import utils

from tests.builders import make_args
from trl_darts import DARTSGRPOTrainer, trl_compat
from trl_darts.checks import check_arguments
from trl_darts.errors import ConfigurationError, UnsupportedTRLError


ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "trl_darts"
PUBLIC = {"train", "training_step", "create_model_card"}  # of transformers' documented interface


@pytest.fixture(autouse=True)
def fresh_check():
    """Clears the cache of the check, which runs once per process."""
    trl_compat.check_trl.cache_clear()
    yield
    trl_compat.check_trl.cache_clear()


@pytest.mark.parametrize("module", trl_compat.NAMES)
def test_names_are_there(module):
    for name in trl_compat.NAMES[module]:
        assert getattr(trl_compat, name) is not None


def test_hooks_are_there(caplog):
    trl_compat.check_trl()
    assert caplog.records == []


def test_other_modules_leave_trls_modules_alone():
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            found += [f"{path.name}: {name}" for name in names if name.startswith("trl.")]
    assert found == []


def test_what_the_trainer_overrides_is_checked():
    overridden = {
        name
        for name, value in vars(DARTSGRPOTrainer).items()
        if inspect.isfunction(value) and (hasattr(GRPOTrainer, name) or hasattr(Trainer, name))
    }
    assert overridden - PUBLIC <= trl_compat.HOOKS["GRPOTrainer"].keys()


def test_a_missing_name_is_refused(monkeypatch):
    monkeypatch.delattr(utils, "use_adapter")
    with pytest.raises(UnsupportedTRLError, match=r"must have `trl.trainer.utils.use_adapter`, which is missing"):
        trl_compat.use_adapter  # noqa: B018
    with pytest.raises(AttributeError, match="no_name"):
        trl_compat.no_name  # noqa: B018


def test_a_missing_hook_is_refused_before_a_model_is_loaded(monkeypatch, tmp_path):
    owner = next(cls for cls in GRPOTrainer.__mro__ if "_tool_call_loop" in vars(cls))
    monkeypatch.delattr(owner, "_tool_call_loop")
    with pytest.raises(UnsupportedTRLError, match=r"must have `GRPOTrainer._tool_call_loop`, which is missing"):
        check_arguments(make_args(tmp_path), None)


def test_a_hook_with_other_arguments_is_refused(monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "_save_checkpoint", lambda self, model, state: None)
    with pytest.raises(UnsupportedTRLError, match=r"_save_checkpoint\(model, trial\)`, .* are \(model, state\)"):
        trl_compat.check_trl()


def test_an_untested_version_warns_once(monkeypatch, caplog):
    monkeypatch.setattr(trl, "__version__", "1.99.0")
    for _ in range(2):
        trl_compat.check_trl()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "TRL 1.99.0 was not tested with trl_darts: 1.14.2 to" in record.getMessage()


def test_streamed_log_probs_need_the_fused_head(monkeypatch, tmp_path):
    args = make_args(tmp_path)
    args.stream_logprobs = True  # needs servers
    monkeypatch.delattr(utils, "add_fused_lm_head", raising=False)
    with pytest.raises(ConfigurationError, match=r"`stream_logprobs` \(True\) needs TRL 1.15"):
        check_arguments(args, None)


@pytest.mark.parametrize("takes_tools", [True, False])
def test_tools_reach_parse_response_where_it_takes_them(monkeypatch, takes_tools):
    def with_tools(tokenizer, ids, prefix=None, tools=None):
        return tools

    def without_tools(tokenizer, ids, prefix=None):
        return "none"

    parse = with_tools if takes_tools else without_tools
    monkeypatch.setattr("trl.chat_template_utils.parse_response", parse)
    assert trl_compat.parse_completion(None, [1], [], ["tool"]) == (["tool"] if takes_tools else "none")


def test_the_matrix_has_the_versions_that_are_called_tested():
    versions = re.search(r"^VERSIONS \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert tuple(version.partition("_")[0] for version in versions) == trl_compat.TESTED
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "versions.yml").read_text())
    assert workflow["jobs"]["versions"]["strategy"]["matrix"]["versions"] == versions


@pytest.mark.parametrize("before", [{}, {"name": 1}, {"name": None}])
def test_a_replaced_attribute_is_as_it_was(before):
    """Also after an error, and if it was `None`."""
    instance = SimpleNamespace(**before)
    with pytest.raises(RuntimeError), trl_compat.replaced(instance, "name", 2):
        raise RuntimeError(instance.name)
    assert vars(instance) == before
