"""
Trains the agent with a loop of one's own, instead of TRL's: a coroutine that leads one conversation.

    trl-darts serve examples/agent/checkpoint &
    python examples/agent/train_loop.py [--schedule darts] [--steps 40]
"""

import asyncio
from typing import Any

from task import TOOLS
from train import make_parser, run

from trl_darts import Session, session_reward


MAX_CALLS = 6
FUNCTIONS = {tool.__name__: tool for tool in TOOLS}


async def answer(call: dict[str, Any]) -> dict[str, str]:
    """Calls a tool in a thread, while other conversations go on. The model reads its error, if it has one."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    try:
        content = str(await asyncio.to_thread(FUNCTIONS[name], **arguments))
    except Exception as error:
        content = str({"error": str(error)})
    return {"role": "tool", "name": name, "content": content}


async def play(session: Session, example: dict[str, Any]) -> None:
    """Leads a conversation, and rates it."""
    session.begin(example["prompt"], TOOLS)
    for _ in range(MAX_CALLS):
        await session.generate()
        calls = session.message.get("tool_calls")
        if not calls or not session.append([await answer(call) for call in calls]):
            break
    else:
        await session.generate()
    session.reward = float(session.message["content"].strip() == str(example["answer"]))


def main() -> None:
    run(make_parser(__doc__).parse_args(), rollout_func=play, reward_funcs=session_reward)


if __name__ == "__main__":
    main()
