"""A wait is logged every ten seconds, and not more often."""

import asyncio
import logging
import time

from trl_darts.engines import waiting
from trl_darts.engines.waiting import Waiting, log_while_waiting


def test_said_every_ten_seconds_with_the_time_that_is_left(clock, monkeypatch, caplog):
    monkeypatch.setattr(time, "monotonic", clock)
    wait = Waiting(limit_s=240)
    for _ in range(251):
        wait.log("No server left; waiting for http://a")
        clock.advance(0.1)
    assert caplog.messages == [f"No server left; waiting for http://a ({seconds} of 240 s)" for seconds in (10, 20)]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_what_is_awaited(monkeypatch, caplog):
    monkeypatch.setattr(waiting, "INTERVAL_S", 0.05)
    monkeypatch.setattr(waiting, "POLL_S", 0.01)

    async def wait():
        async with log_while_waiting("Waiting for http://a"):
            await asyncio.sleep(0.2)
        said = len(caplog.messages)
        assert 2 <= said <= 4
        assert caplog.messages[0] == "Waiting for http://a (0 s)"
        await asyncio.sleep(0.1)
        assert len(caplog.messages) == said

    asyncio.run(wait())
