"""
Prints the list of servers on a Ray cluster as one line of JSON per second, until standard input closes.

A script that imports nothing of trl_darts, so that it starts quickly.
"""

import json
import logging
import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any


NAMESPACE = "trl_darts"  # of Ray
POLL_S = 1.0
ANSWER_S = 10.0  # for one reading


def main(name: str, owner: str) -> None:
    """Reads for one trainer, `owner`."""
    import ray

    closed = threading.Event()
    threading.Thread(target=end_with_input, args=(closed,), daemon=True).start()
    try:
        ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        show({"error": f"no Ray cluster runs here ({error})"})
        return
    while True:
        show(read(name, owner))
        if closed.wait(POLL_S):
            break
    with suppress(Exception):
        ray.get(ray.get_actor(name).release.remote(owner), timeout=ANSWER_S)


def end_with_input(closed: threading.Event) -> None:
    """Tells the reader that standard input has closed, and ends the process if it does not end by itself."""
    sys.stdin.read()
    closed.set()
    time.sleep(ANSWER_S)
    os._exit(1)  # Ray waits for a lost cluster, for minutes and with most of a core


def read(name: str, owner: str) -> dict[str, Any]:
    """Returns the registry's answer, or the error."""
    import ray

    try:
        reference: Any = ray.get_actor(name).read.remote(owner)
        answer: dict[str, Any] = ray.get(reference, timeout=ANSWER_S)
    except ValueError:
        return {"error": f"no servers run under this name. Start them with `trl-darts serve --on ray --name {name}`"}
    except Exception as error:
        return {"error": f"{type(error).__name__} {error}"[:300]}
    return answer


def show(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
