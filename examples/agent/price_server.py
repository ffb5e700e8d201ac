"""
The price list as an [OpenEnv](https://github.com/huggingface/OpenEnv) environment: each connection is a session.

    pip install openenv-core
    uvicorn --app-dir examples/agent price_server:app --port 8100
"""

from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_app
from task import calculate, search


TOOLS = {"search": search, "calculate": calculate}
MOST_SESSIONS = 512


class Call(Action):
    tool: str
    text: str


class Answer(Observation):
    text: str = ""


class PriceList(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Answer:
        self._state = State(episode_id=episode_id)
        return Answer()

    def step(self, action: Call, timeout_s: float | None = None, **kwargs: Any) -> Answer:
        self._state.step_count += 1
        try:
            return Answer(text=TOOLS[action.tool](action.text))
        except ValueError as error:
            return Answer(text=str({"error": str(error)}))

    @property
    def state(self) -> State:
        return self._state


app = create_app(PriceList, Call, Answer, "price_list", MOST_SESSIONS)
"""The server's application."""
