"""The reason in logs as vLLM 0.31 writes them."""

import pytest

from trl_darts.serving import log
from trl_darts.serving.log import last_error


PREFIX = "(APIServer pid=7) ERROR 11-22 17:40:04 [core.py:845] "
DEAD = "vllm.v1.engine.exceptions.EngineDeadError: It broke. See stack trace (above) for the root cause."


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["ok", "torch.OutOfMemoryError: CUDA out of memory", "INFO: bye"], "torch.OutOfMemoryError: CUDA"),
        ([f'{PREFIX}    raise ValueError("x")', f"{PREFIX}ValueError: x y", f"{PREFIX}{DEAD}"], "ValueError: x y"),
        (["api_server.py: error: unrecognized arguments: --foo"], "api_server.py: error: unrecognized arguments"),
        (
            [
                "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
                "  Value error, max_model_len (9) is too large. [type=value_error, input_value=ArgsKwargs((), {})]",
                "    For further information visit https://errors.pydantic.dev",
            ],
            "max_model_len (9) is too large.",
        ),
        (["RuntimeError: Engine core initialization failed. See root cause above."], None),
        ([f"{PREFIX}Exception caught. Request id: cmpl-vocabulary"], None),
        ([f"{PREFIX}Engine core proc died unexpectedly.", f"{PREFIX}{DEAD}"], "Engine core proc died unexpectedly."),
    ],
)
def test_last_error(tmp_path, lines, reason):
    path = tmp_path / "log"
    path.write_text("\n".join(lines))
    found = last_error(path)
    assert found == reason if reason is None else found.startswith(reason)


def test_where_it_is_looked_for(tmp_path, monkeypatch):
    path = tmp_path / "log"
    assert last_error(path) is None
    path.write_text("ValueError: old\n")
    offset = path.stat().st_size
    assert last_error(path, offset) is None
    with path.open("a") as file:
        file.write("OSError: new\n" + "line\n" * 100)
    assert last_error(path, offset) == "OSError: new"
    monkeypatch.setattr(log, "TAIL_BYTES", 100)  # of a log that may have gigabytes
    assert last_error(path) is None
