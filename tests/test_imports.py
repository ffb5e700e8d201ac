"""What may load what, in a fresh interpreter."""

import subprocess
import sys

import pytest


HEAVY = ("torch", "accelerate", "transformers", "trl", "vllm", "aiohttp", "requests", "httpx", "matplotlib")


def loaded(statement: str) -> set[str]:
    script = f"{statement}\nimport sys\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    return set(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    )


@pytest.mark.parametrize(
    "statement",
    [
        "import trl_darts",
        "import trl_darts.policy",
        "import trl_darts.scheduling",
        "import trl_darts.analysis.simulation",
    ],
)
def test_decisions_load_neither_torch_nor_http(statement):
    assert loaded(statement) == set()


def test_engines_never_import_the_trainer():
    modules = "sys, trl_darts.engines.vllm_server, trl_darts.engines.hf_generate"
    script = f"import {modules}; print('trl_darts.trainer' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "False"


def test_public_names():
    import trl_darts

    assert set(trl_darts.__all__) <= set(dir(trl_darts))
    assert trl_darts.DARTSGRPOTrainer.__module__ == "trl_darts.trainer"
    with pytest.raises(AttributeError, match="DARTSGRPOTrainr"):
        trl_darts.DARTSGRPOTrainr  # noqa: B018
