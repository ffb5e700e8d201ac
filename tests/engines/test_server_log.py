"""The reason of a failure in a server's log, as vLLM 0.31 writes it, if the log is on this machine."""

import pytest

from tests.serving.builders import fake_server
from tests.waits import wait_for
from trl_darts.engines import server_log
from trl_darts.engines.addresses import is_this_machine
from trl_darts.engines.server_log import explain, find_logs, last_error


DEAD = "http://a answered 500: It broke. See stack trace (above) for the root cause."
PREFIX = "(APIServer pid=7) ERROR 11-22 17:40:04 [core.py:845] "
ENGINE_DEAD = "vllm.v1.engine.exceptions.EngineDeadError: It broke. See stack trace (above) for the root cause."


def test_the_log_is_where_the_output_goes(tmp_path):
    server = fake_server(tmp_path)
    server.start(0.0)
    try:
        wait_for(server.is_healthy)
        url = server.command.base_url
        others = ["http://192.0.2.1:" + url.rpartition(":")[2], "http://no.such.host.invalid", "http://127.0.0.1:9"]
        assert find_logs([*others, url]) == {url: server.log_path}
    finally:
        server.kill()
    assert find_logs([url]) == {}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("RuntimeError: boom", "http://a answered 500: It broke. RuntimeError: boom. Its log: "),
        ("", "http://a answered 500: It broke. Its log has the cause. Its log: "),
        (None, "http://a answered 500: It broke. Its log has the cause."),
    ],
)
def test_the_cause_instead_of_a_pointer_to_it(tmp_path, content, words):
    log = None if content is None else tmp_path / "server.log"
    if log is not None:
        log.write_text(content)
    assert explain(DEAD, log) == words + str(log or "")
    assert explain("gone", log) == ("gone" if log is None else f"gone. Its log: {log}")


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["ok", "torch.OutOfMemoryError: CUDA out of memory", "INFO: bye"], "torch.OutOfMemoryError: CUDA"),
        (
            [f'{PREFIX}    raise ValueError("x")', f"{PREFIX}ValueError: x y", f"{PREFIX}{ENGINE_DEAD}"],
            "ValueError: x y",
        ),
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
        (
            [f"{PREFIX}Engine core proc died unexpectedly.", f"{PREFIX}{ENGINE_DEAD}"],
            "Engine core proc died unexpectedly.",
        ),
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
    monkeypatch.setattr(server_log, "TAIL_BYTES", 100)  # of a log that may have gigabytes
    assert last_error(path) is None


def test_addresses_of_this_machine():
    assert all(map(is_this_machine, ["127.0.0.1", "localhost", "0.0.0.0"]))
    assert not is_this_machine("192.0.2.1")  # reserved for documentation
