"""A lost server's words are those of its cause, where its log is on this machine."""

import pytest

from tests.serving.builders import fake_server, wait_for
from trl_darts.engines.server_log import explain, find_log


DEAD = "http://a answered 500: It broke. See stack trace (above) for the root cause."


def test_the_log_is_where_the_output_goes(tmp_path):
    server = fake_server(tmp_path)
    server.start(0.0)
    try:
        wait_for(server.is_healthy)
        assert find_log(server.command.base_url) == server.log_path
        assert find_log("http://192.0.2.1:" + server.command.base_url.rpartition(":")[2]) is None  # not this machine
    finally:
        server.kill()
    assert find_log(server.command.base_url) is None


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
