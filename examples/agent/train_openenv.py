"""
Trains the agent in environments of an OpenEnv server, instead of with functions. See `price_server.py`.

    trl-darts serve examples/agent/checkpoint &
    uvicorn --app-dir examples/agent price_server:app --port 8100 &
    python examples/agent/train_openenv.py [--environments http://localhost:8100] [--schedule darts] [--steps 40]
"""

import time
from functools import partial
from typing import Any

from openenv.core import GenericEnvClient
from train import make_parser, run
from websockets import WebSocketException

from trl_darts import EnvironmentLost


RESTART_S = 60.0  # until the server is seen as gone for good


class PriceList:
    """A session of the server, for one conversation at a time. Its public methods are the agent's tools."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: Any = None

    def reset(self, **kwargs: Any) -> None:
        deadline = time.monotonic() + RESTART_S
        while True:
            try:
                self._connected().reset()
                return
            except (OSError, WebSocketException):
                self._session = None
                if time.monotonic() > deadline:
                    raise
                time.sleep(1.0)

    def search(self, query: str) -> str:
        """
        Searches the price list.

        Args:
            query: Words to look for.

        Returns:
            The first line that has them.
        """
        return self._call("search", query)

    def calculate(self, expression: str) -> str:
        """
        Calculates.

        Args:
            expression: Numbers with + and *.

        Returns:
            The result.
        """
        return self._call("calculate", expression)

    def _connected(self) -> Any:
        if self._session is None:
            self._session = GenericEnvClient(base_url=self._url).sync()
        return self._session

    def _call(self, tool: str, text: str) -> str:
        try:
            answer = self._connected().step({"tool": tool, "text": text})
        except (OSError, WebSocketException) as error:
            self._session = None
            raise EnvironmentLost(f"the server of {self._url} is gone") from error
        return str(answer.observation["text"])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--environments", default="http://localhost:8100")
    own = parser.parse_args()
    run(own, environment_factory=partial(PriceList, own.environments))


if __name__ == "__main__":
    main()
