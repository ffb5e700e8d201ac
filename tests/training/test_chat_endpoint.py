"""Conversations that a program leads with OpenAI's client, on a real server."""

import asyncio
import json
import re
from socket import gethostname

import pytest
from aiohttp import ClientSession
from openai import AsyncOpenAI, BadRequestError, InternalServerError

from benchmarks.tool_calls import make_chat_tokenizer
from tests.builders import make_trainer, record_batches, rollout_logs
from tests.launches.scenarios import MULTIPLY
from tests.test_trainer_server import server_args
from tests.trl_parity.common import chats
from tests.trl_parity.tool_calls import multiply
from trl_darts import Session, chat_endpoint, session_reward
from trl_darts.errors import GenerationError


pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")]

SAID_AFTER_CALL = re.compile("</call>(?!<call>|<eos>|$)")
WORDS = [*MULTIPLY, *(f"<{i}>" for i in range(len(MULTIPLY) * 3 // 2))]  # two answers in five are calls
PARAMETERS = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}, "required": ["a", "b"]}
TOOL = {"type": "function", "function": {"name": "multiply", "description": "a · b", "parameters": PARAMETERS}}


def trainer_of(server, model_dir, tmp_path, play, **fields):
    fields = {"max_completion_length": 200, "max_steps": 1, "learning_rate": 0.0, "schedule": "grpo", **fields}
    args = server_args(tmp_path, server, **fields)
    tokenizer = make_chat_tokenizer(WORDS, tools=True)
    data = {"train_dataset": chats(), "reward_funcs": session_reward, "processing_class": tokenizer}
    return make_trainer(model_dir, args, rollout_func=play, **data)


def client_of(url):
    return AsyncOpenAI(base_url=url, api_key="none", max_retries=0)


async def lead(client, messages, max_turns=4):
    """An agent's program, which knows nothing of the training. Returns how often its tool was called."""
    for number in range(max_turns + 1):
        response = await client.chat.completions.create(model="any", messages=messages, tools=[TOOL], temperature=0.7)
        message = response.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        assert response.usage.total_tokens == response.usage.prompt_tokens + response.usage.completion_tokens
        if not message.tool_calls:
            assert response.choices[0].finish_reason in ("stop", "length")
            return number
        assert response.choices[0].finish_reason == "tool_calls"
        if number == max_turns:
            break
        for call in message.tool_calls:
            content = str(multiply(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return max_turns


@pytest.mark.parametrize("schedule", ["grpo", "darts"])
def test_a_program_is_trained(server, model_dir, tmp_path, schedule):
    played, codes = [], set()

    async def play(session: Session, example: dict) -> None:
        messages = [{"role": "system", "content": "be brief"}, *example["prompt"]]
        async with chat_endpoint(session) as url, client_of(url) as client:
            try:
                session.reward = float(await lead(client, messages))
            except BadRequestError as error:  # no room is left
                codes.add(error.code)
                session.reward = 0.0
        played.append((session, messages))

    trainer = trainer_of(server, model_dir, tmp_path, play, schedule=schedule)
    batches = record_batches(trainer)
    trainer.train()
    (entry,), tokenizer = rollout_logs(trainer), trainer.processing_class
    assert entry["sampling/sampling_logp_difference/max"] < 1e-3  # what is trained on is what was sampled
    called = [own for own in played if own[0].reward]
    assert called
    assert codes <= {"context_length_exceeded"}
    as_written = 0
    for session, messages in called:
        template = {"tools": [TOOL], "add_generation_prompt": True, "tokenize": True, "return_dict": False}
        assert session.prompt_ids == tokenizer.apply_chat_template(messages[:2], **template)
        for call in [call for message in messages for call in message.get("tool_calls", [])]:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        text = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
        sampled = tokenizer.decode([*session.prompt_ids, *session.completion_ids])
        if not SAID_AFTER_CALL.search(sampled):  # the template writes what was said before the call
            assert text.startswith(sampled)
            as_written += 1
    assert as_written
    if schedule == "grpo":
        assert len(played) == 16
        masked = sum(own.mask.count(0) for own, _ in played)
        batch = batches[0]
        assert (batch["completion_mask"] * (1 - batch["tool_mask"])).sum() == masked


def test_what_can_not_be_trained_on_is_refused(server, model_dir, tmp_path):
    async def refused(rule, client, messages, **fields):
        with pytest.raises(BadRequestError, match=rule):
            await client.chat.completions.create(model="any", messages=messages, **{"tools": [TOOL], **fields})

    async def play(session: Session, example: dict) -> None:
        messages = list(example["prompt"])
        image = {"type": "image_url", "image_url": {"url": "data:"}}
        async with chat_endpoint(session) as url, client_of(url) as client:
            await refused(r"`n` \(2\)", client, messages, n=2)
            await refused("'image_url'", client, [{"role": "user", "content": [image]}])
            await refused("tool_choice", client, messages, tool_choice="required")
            await refused("KeyError: 'role'", client, [{"content": "who am I?"}])
            await lead(client, messages, max_turns=0)
            more = [*messages[:2], {"role": "user", "content": "go on"}]
            await refused("`tools` must be those", client, more, tools=[])
            await refused("must continue", client, messages[:2])  # nothing new
            other = [{"role": "user", "content": "another"}, *messages[1:], messages[0]]
            await refused("must continue", client, other)
        session.reward = 1.0

    trainer_of(server, model_dir, tmp_path, play).train()


def test_an_error_of_the_servers_is_not_the_programs(server, model_dir, tmp_path):
    async def play(session: Session, example: dict) -> None:
        async def generate(max_tokens=None):
            raise GenerationError("no server is left")

        session.generate = generate
        async with chat_endpoint(session) as url, client_of(url) as client:
            with pytest.raises(InternalServerError):
                await lead(client, list(example["prompt"]))

    with pytest.raises(GenerationError, match="no server is left"):
        trainer_of(server, model_dir, tmp_path, play).train()


def test_where_it_listens():
    async def urls():
        found = []
        for host in ("127.0.0.1", "0.0.0.0"):
            async with chat_endpoint(None, host) as url, ClientSession() as client:
                port = url.rsplit(":", 1)[1].removesuffix("/v1")
                async with client.get(f"http://127.0.0.1:{port}/v1/models") as response:
                    found.append((url.removesuffix(f":{port}/v1"), response.status))
        return found

    assert asyncio.run(urls()) == [("http://127.0.0.1", 404), (f"http://{gethostname()}", 404)]
