"""
Trains the agent with a task and a harness of verifiers, through an OpenAI-compatible endpoint for each conversation.

    trl-darts serve examples/agent/checkpoint &
    python examples/agent/train_verifiers.py [--schedule darts] [--steps 40]
"""

import json
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient
from task import TOOLS
from train import make_parser, run
from train_loop import MAX_CALLS, answer
from transformers.utils import get_json_schema

from trl_darts import Session, chat_endpoint, session_reward


class PriceData(vf.TaskData):
    answer: int


class PriceTask(vf.Task[PriceData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 if the conversation ends with the answer, else 0."""
        return float(trace.last_reply.strip() == str(self.data.answer))


class PriceHarness(vf.Harness[vf.HarnessConfig]):
    """A loop with tools. It only knows an endpoint, as a program would that others start here."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        tools: Any = [get_json_schema(tool) for tool in TOOLS]
        http = DefaultAsyncHttpxClient(timeout=None, verify=False)  # loading certificates takes 40 ms for each
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, http_client=http) as client:
            for _ in range(MAX_CALLS + 1):
                try:
                    response = await client.chat.completions.create(model=ctx.model, messages=messages, tools=tools)
                except BadRequestError:  # no token is left
                    break
                message = response.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls or []:
                    arguments = json.loads(call.function.arguments)
                    told = await answer({"function": {"name": call.function.name, "arguments": arguments}})
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": told["content"]})
                if not message.tool_calls:
                    break
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["PriceHarness"]  # as verifiers finds it by the name of this module


async def play(session: Session, example: dict[str, Any]) -> None:
    """Has verifiers lead a conversation, and rate it."""
    task = PriceTask(PriceData(prompt=example["prompt"][0]["content"], answer=example["answer"]))
    async with chat_endpoint(session) as url:
        config = vf.AgentConfig(
            model="policy",
            client=vf.EvalClientConfig(base_url=url),
            harness=vf.HarnessConfig(id="train_verifiers"),
            runtime=vf.SubprocessConfig(),
        )
        trace = await vf.make_agent(config).run(task)
    if not trace.ok:
        raise RuntimeError(trace.errors[-1].message)
    session.reward = trace.reward


def main() -> None:
    run(make_parser(__doc__).parse_args(), rollout_func=play, reward_funcs=session_reward)


if __name__ == "__main__":
    main()
