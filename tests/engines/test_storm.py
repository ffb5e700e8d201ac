"""10,000 candidates at once on 64 stub servers, twice within a minute or two: no server is lost."""

from __future__ import annotations

import multiprocessing

import pytest

from benchmarks.load import measure, run_stubs


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_candidates_lose_no_server():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    stubs = context.Process(target=run_stubs, args=(64, 1000.0, theirs), daemon=True)
    stubs.start()
    try:
        urls = ours.recv()
        for _ in range(2):
            measured = measure(urls, stubs.pid, 10_000, "darts")
            assert (measured["lost servers"], measured["resumed candidates"]) == (0, 0)
    finally:
        stubs.terminate()
