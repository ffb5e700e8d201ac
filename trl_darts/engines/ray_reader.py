"""
Prints the list of servers on a Ray cluster as one line of JSON per second, until standard input closes.

A script that imports nothing of trl_darts, so that it starts quickly.
"""

import json
import logging
import select
import sys
from contextlib import suppress
from typing import Any


NAMESPACE = "trl_darts"  # of Ray
POLL_S = 1.0
ANSWER_S = 10.0  # for one reading


def main(name: str, owner: str) -> None:
    """Reads for one trainer, `owner`."""
    import ray

    try:
        ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        show({"error": f"no Ray cluster runs here ({error})"})
        return
    while True:
        show(read(name, owner))
        if select.select([0], [], [], POLL_S)[0]:
            break
    with suppress(Exception):
        ray.get(ray.get_actor(name).release.remote(owner), timeout=ANSWER_S)


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
