"""
What two processes of one launch play, one scenario after the other: `accelerate launch … scenarios.py BACKEND MODEL
OUT [URL]`. Each process writes what it saw to `OUT/<scenario>/rank<r>.json`. `MODEL` and the server at `URL` are those
of the fixture `launches`; without a URL, scenarios with a server are left out.
"""

import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import _set_pg_timeout
from trl import GRPOTrainer

from benchmarks.models import CLASS_SIZE
from benchmarks.tool_calls import make_chat_tokenizer, tool_call
from tests.builders import compare_with_trl, letter_of, letters_dataset, make_args, make_trainer, record_batches
from tests.engines.settings import engine_settings, prepare_colocated
from tests.given_completions import make_model, rows_of_prompts
from tests.given_completions import trained as trained_on_given
from tests.launches.cpu_sharded import allow_fsdp_on_cpu, compile_no_collective
from tests.test_equivalence import trained
from tests.trl_parity.tool_calls import Reader, multiply, said, tool_messages, tool_trainer
from trl_darts import EnvironmentLost, Session, record_lengths
from trl_darts.engines import main_process
from trl_darts.engines.in_process import processes as in_process


Play = Callable[[Path, Path, str | None], dict[str, Any]]  # model, folder of the scenario, URL
SERVER = "vllm_server"


def train(
    model_dir: Path,
    out: Path,
    url: str | None,
    engine: str = "transformers",
    refused: tuple[int, ...] = (),
    breaks_on: int | None = None,
    uniform: str = "",
    resume: str | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """
    A training on [`letters_dataset`] whose reward is the length. `refused` are groups that a server is asked for in a
    way that it refuses; generation breaks on the process `breaks_on`; answers to `uniform` letters have no reward. An
    error ends the training, and is its result.
    """

    def reward(prompts: Any, completion_ids: Any, **kwargs: Any) -> list[float]:
        return [
            len(ids) * float(prompt[-1] not in uniform) for prompt, ids in zip(prompts, completion_ids, strict=True)
        ]

    settings = {"per_device_train_batch_size": 6, "max_steps": 3, "learning_rate": 0.0, "scale_rewards": False}
    args = make_args(out / "run", **{**settings, **engine_settings(engine, url), **fields})
    trainer = make_trainer(model_dir, args, reward_funcs=reward, train_dataset=letters_dataset(10))
    batches = record_batches(trainer)
    differences = compare_with_trl(trainer) if args.stream_logprobs else []
    if refused:
        trainer._engine.overrides = lambda command: {"top_p": 7.0} if command.group_id in refused else {}
    main_process.RECEIVED_TIMEOUT_S = 5.0 if breaks_on is None else 1.0  # that process hears of nothing any more
    if breaks_on == trainer.accelerator.process_index:
        trainer.model.generate = lambda **kwargs: 1 / 0
    with recorded_rollouts(trainer) as (records, decoded):
        try:
            trainer.train(resume_from_checkpoint=resume)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
    rows = [
        {
            "prompts": [example["prompt"] for example in batch["inputs"]],
            "letters": [letter_of(ids[0]) for ids in batch["completion_ids"].tolist()],
            "lengths": batch["completion_mask"].sum(1).tolist(),
            "advantages": batch["advantages"].tolist(),
            "num_items": batch["num_items_in_batch"].item(),
        }
        for batch in batches
    ]
    return {
        "records": records,
        "decoded": decoded,
        "rows": rows,
        "tracked": len(trainer.length_tracker),
        "distributed_type": str(trainer.accelerator.distributed_type),
        "log": trainer.state.log_history,
        "streamed": differences,
    }


@contextmanager
def recorded_rollouts(trainer: Any) -> Any:
    """Budgets and selections of each rollout, and how many candidates this process decoded."""
    records: list[Any] = []
    decoded: list[int] = []
    source, share_class = trainer._sources[0], in_process.Share
    log = source.log

    def logged(record: Any) -> None:
        records.append([record.admission.num_candidates, [[s.lengths, s.selected] for s in record.summaries]])
        log(record)

    def share(slots: Any, *args: Any, **kwargs: Any) -> Any:
        decoded.append(len(slots))
        return share_class(slots, *args, **kwargs)

    source.log, in_process.Share = logged, share
    try:
        yield records, decoded
    finally:
        in_process.Share = share_class


def interrupted(model_dir: Path, out: Path, url: str | None) -> dict[str, Any]:
    """Two steps of an epoch, and the third by other trainers, from a checkpoint whose buffer has prompts."""
    fields = {"schedule": "partial_rollout", "save_strategy": "steps", "save_steps": 2, **OWN_BATCHES}
    fields["save_only_model"] = True  # torch 2.13 can't load an optimizer to "cpu:0", the device of such a process
    parts = [
        train(model_dir, out, url, resume=resume, max_steps=max_steps, **fields)
        for resume, max_steps in ((None, 2), ("true", 3))
    ]
    return {"rows": [row for part in parts for row in part["rows"]]}


# Answers by call. In the tokenizer that has these as words, the server's answers of the first two classes are calls.
MULTIPLY = {tool_call("multiply", a=3, b=b): str(3 * b) for b in range(2 * CLASS_SIZE)}


class Multiplier:
    """An environment with the tool."""

    def reset(self, **kwargs: Any) -> None:
        """Nothing to begin with."""

    multiply = staticmethod(multiply)


class Calculator(Multiplier):
    """One that remembers its answers. The first call on each process loses it."""

    lost: ClassVar[list[Any]] = []

    def reset(self, **kwargs: Any) -> None:
        """Begins again."""
        self.answers: list[str] = []

    @wraps(multiply)
    def multiply(self, a: int, b: int) -> int:  # type: ignore[override]
        if not self.lost:
            self.lost.append(self)
            raise EnvironmentLost("the container is gone")
        self.answers.append(str(a * b))
        return a * b


class Witness(Reader):
    """Sees that each row has the environment of its own conversation."""

    def __call__(self, prompts: Any, completions: Any, completion_ids: Any, **kwargs: Any) -> list[float]:
        environments = kwargs["environments"]
        assert len(set(map(id, environments))) == len(completions)
        assert not any(own in Calculator.lost for own in environments)
        for row, environment in zip(completions, environments, strict=True):
            answers = [message["content"] for message in row if message["role"] == "tool"]
            assert answers == environment.answers[: len(answers)]
        return super().__call__(prompts, completions, completion_ids)


def call_tools(
    model_dir: Path, out: Path, url: str | None, reader: Callable[[], Reader] = Reader, size: int = 8, **actors: Any
) -> dict[str, Any]:
    """
    Two rows in five go on with a call, so that loops of tools differ in length from process to process, which has
    `size` rows.
    """
    turns: list[str] = []
    own_reader = reader()
    fields = {"max_completion_length": 200, "max_steps": 6, "learning_rate": 0.0, **engine_settings(SERVER, url)}
    fields["per_device_train_batch_size"] = size
    tokenizer = make_chat_tokenizer([*MULTIPLY, *(f"<{token}>" for token in range(3 * CLASS_SIZE))], tools=True)
    trainer = tool_trainer(model_dir, out, own_reader, fields=fields, processing_class=tokenizer, **actors)
    rollout, later_turns = trainer._rollout, trainer._engine.turns
    trainer._rollout = lambda *args: turns.append("training") or rollout(*args)

    @contextmanager
    def counted(num_conversations: int) -> Iterator[Any]:
        with later_turns(num_conversations) as own:
            decode = own.decode
            own.decode = lambda *args: turns.append("later") or decode(*args)
            yield own

    trainer._engine.turns = counted
    trainer.train()
    rows = [row for batch in own_reader.batches for row in batch]
    return {
        "turns": turns,
        "num_environments": sum(map(len, getattr(trainer, "_environment_pool", {}).values())),
        "calls": [[text for m in row[1] if m["role"] == "assistant" for text in said(m)[1:]] for row in rows],
        "answers": [[message["content"] for message in tool_messages(row)] for row in rows],
        "log": [{name: value for name, value in line.items() if "/" in name} for line in trainer.state.log_history],
    }


def lead_sessions(model_dir: Path, out: Path, url: str | None) -> dict[str, Any]:
    """Coroutines lead conversations, whose rewards tell their prompts. Evaluated before, with other prompts each."""
    led, seen = [], []

    async def play(session: Session, example: dict[str, Any]) -> None:
        led.append(example["prompt"])
        await session.generate(6)
        session.append(example["prompt"][-1])
        await session.generate(6)
        session.reward = float(ord(example["prompt"][-1]))

    def reward(prompts: Any, completion_ids: Any, session_reward: Any, **kwargs: Any) -> Any:
        seen.extend(
            (prompt[-1], len(ids), own)
            for prompt, ids, own in zip(prompts, completion_ids, session_reward, strict=True)
        )
        return session_reward

    fields = {"per_device_train_batch_size": 8, "max_steps": 2, "learning_rate": 0.0, "max_num_generations": 6}
    fields |= {"max_completion_length": 40, "num_generations_eval": 1, "per_device_eval_batch_size": 4}
    args = make_args(out, schedule="darts", **fields, **engine_settings(SERVER, url))
    data = {"train_dataset": letters_dataset(10), "reward_funcs": reward}
    trainer = make_trainer(model_dir, args, rollout_func=play, **data)
    trainer.evaluate(letters_dataset(8))
    evaluated, led[:] = list(led), []
    trainer.train()
    return {"evaluated": evaluated, "led": led, "seen": seen, "log": trainer.state.log_history}


def wait_long(model_dir: Path, out: Path, url: str | None) -> dict[str, Any]:
    """The main process takes longer than the group's timeout, also when it is asked first, then fails."""
    accelerator = Accelerator(cpu=True)
    main = main_process.MainProcess(accelerator)
    accelerator.wait_for_everyone()  # the scenario before may have ended at different times
    _set_pg_timeout(timedelta(seconds=1))
    try:
        values = [main.broadcast(lambda: time.sleep(2) or "after a while"), main.broadcast(lambda: "at once")]
        try:
            main.run(lambda: 1 / 0)
        except ZeroDivisionError as error:
            values.append(str(error))
    finally:
        _set_pg_timeout(timedelta(minutes=30))
    return {"values": values}


def train_like_trl(model_dir: Path, out: Path, url: str | None, schedule: str | None) -> dict[str, Any]:
    """Digests of the parameters after a training; `schedule=None` is TRL's own trainer, whose lengths are recorded."""
    more = {"prepare": record_lengths} if schedule is None else {}
    trainer = trained(model_dir, out, schedule, per_device_train_batch_size=6, **more)
    assert (type(trainer) is GRPOTrainer) == (schedule is None)
    parameters = trainer.model.named_parameters()
    return {name: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for name, p in parameters}


def compared(out: Path, *ways: dict[str, Any], **fields: Any) -> tuple[dict[str, Any], Any]:
    """
    Two steps in each of two ways: how far they are apart, over how far they moved the parameters, and their logs. Also
    the last trainer.
    """
    own = out.parent / f"model{os.environ['RANK']}"
    if not own.exists():  # in the first scenario: trainers with shards change how later models are built and saved
        make_model(own)
    states, logs = [load_file(own / "model.safetensors")], []
    for number, way in enumerate(ways):
        trainer, _ = trained_on_given(own, out / f"way{number}", **way, ds3_gather_for_generation=False, **fields)
        trainer.save_model(str(out / f"way{number}"))
        trainer.accelerator.wait_for_everyone()
        states.append(load_file(out / f"way{number}" / "model.safetensors"))
        logs.append(trainer.state.log_history[:-1])
    before, whole, other = (torch.cat([state[name].flatten() for name in sorted(state)]) for state in states)
    apart, moved = (other - whole).norm().item(), (whole - before).norm().item()
    return {"moved": moved, "apart": apart / moved, "logs": logs}, trainer


def trim_padding(model_dir: Path, out: Path, url: str | None) -> dict[str, Any]:
    fields = {"per_device_train_batch_size": 2, "beta": 0.1, "num_iterations": 2}
    ways = [{"trims": trims} for trims in (False, True)]
    found, trainer = compared(out, *ways, train_dataset=rows_of_prompts(least=30), **fields)
    shared = trainer._trimming.shared
    assert shared is None if trainer._dist.is_zero3 else set(shared._fits.values()) == {True}
    return found


def reuse_logprobs(model_dir: Path, out: Path, url: str | None) -> dict[str, Any]:
    fields = {"per_device_train_batch_size": 2, "beta": 0.1, "vllm_importance_sampling_mode": "token_truncate"}
    ways = [{"trims": reuses, "reuses": reuses} for reuses in (False, True)]
    return compared(out, *ways, sampler=True, train_dataset=rows_of_prompts(least=30), **fields)[0]


# Six rows on each process: the second of three groups straddles both. `target_redundancy` at its bound: every group is
# pruned, mostly by what the other process reports.
PRUNED = {"target_redundancy": 2.0}
OWN_BATCHES = {"engine": SERVER, "max_completion_length": 96}
AHEAD = partial(train, rollout_ahead=1, **OWN_BATCHES)
CONTINUOUS = partial(train, rollout_ahead="continuous", **OWN_BATCHES)
WAVES = partial(train, stream_training=True, gradient_accumulation_steps=2, learning_rate=1e-4, **OWN_BATCHES)
STREAMED = {
    "engine": SERVER,
    "learning_rate": 3e-3,
    "beta": 0.1,
    "stream_logprobs": True,
    "stream_chunk_tokens": 16,
    "stream_rewards": True,
}
BACKENDS: dict[str, dict[str, Play]] = {
    "ddp": {
        "trimmed": trim_padding,
        "reused": reuse_logprobs,
        "transformers": train,
        "continuous batching": partial(train, engine="continuous_batching", **PRUNED),
        "broken process": partial(train, breaks_on=1),
        "long wait": wait_long,
        "theirs": partial(train_like_trl, schedule=None),
        "grpo": partial(train_like_trl, schedule="grpo"),
        "darts": partial(train_like_trl, schedule="darts"),
        "server": partial(train, engine=SERVER),
        "partial_rollout": partial(
            train,
            schedule="partial_rollout",
            max_partial_age=1,
            mask_stale_after=1,
            stream_rewards=True,
            max_steps=6,
            **OWN_BATCHES,
        ),
        "interrupted": interrupted,
        "ahead": AHEAD,
        "continuous": CONTINUOUS,
        "waves": WAVES,
        "uniform groups": partial(train, uniform="ABD", drop_uniform_groups=True, stream_rewards=True, **OWN_BATCHES),
        "deferred": partial(
            train,
            uniform="ABD",
            defer_unsettled_groups=True,
            audit_share=0.3,
            max_steps=24,
            # With many truncated answers, all rounds are long, and none is audited.
            **{**OWN_BATCHES, "max_completion_length": 300},
        ),
        "dropped group": partial(
            train,
            engine=SERVER,
            refused=(1,),
            max_steps=2,
            on_generation_error="drop_group",
            defer_unsettled_groups=False,  # a deferred group would take the place of the dropped one
        ),
        "refused group": partial(train, engine=SERVER, refused=(1,)),
        "streamed": partial(train, **STREAMED),
        "tools": partial(call_tools, tools=[multiply]),
        "environments": partial(call_tools, reader=Witness, environment_factory=Calculator),
        "split groups": partial(call_tools, size=6, environment_factory=Multiplier),
        "sessions": lead_sessions,
    },
    "fsdp2": {
        "trimmed": trim_padding,
        "reused": reuse_logprobs,
        "sharded": partial(train, **PRUNED),
        "streamed": partial(train, **STREAMED),
        "ahead": AHEAD,
        "continuous": CONTINUOUS,
        "waves": WAVES,
    },
    "deepspeed_zero2": {"sharded": partial(train, **PRUNED)},
    "deepspeed_zero3": {
        "trimmed": trim_padding,
        "reused": reuse_logprobs,
        "sharded": partial(train, ds3_gather_for_generation=False, **PRUNED),
        "streamed": partial(train, **STREAMED),
        "ahead": AHEAD,
        "continuous": CONTINUOUS,
    },
    "colocated": {"colocated": partial(train, engine="vllm_colocated", **PRUNED)},
    "tensor_parallel": {"colocated": partial(train, engine="vllm_colocated", vllm_tensor_parallel_size=2, **PRUNED)},
}
NEED_A_SERVER = {
    "server",
    "partial_rollout",
    "dropped group",
    "refused group",
    "streamed",
    "tools",
    "environments",
    "split groups",
    "sessions",
    "ahead",
    "continuous",
    "waves",
}
NEED_A_SERVER |= {"uniform groups", "deferred", "interrupted"}


def leave(accelerator: Accelerator) -> None:
    """
    Ends the process without finalizing the interpreter, in which one launch in some ten on a busy machine aborts
    ("terminate called without an active exception"), after everything is done, also where the process group was ended
    before. A thread of torch's is still in native code then; which one is not known.
    """
    accelerator.end_training()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    backend, model_dir, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    url = sys.argv[4] if len(sys.argv) > 4 else None
    allow_fsdp_on_cpu()
    compile_no_collective()
    if backend in ("colocated", "tensor_parallel"):
        prepare_colocated()
    rank = int(os.environ["RANK"])
    gc.freeze()  # as in tests/conftest.py; this process ends without a finalization
    for name, play in BACKENDS[backend].items():
        if name in NEED_A_SERVER and url is None:
            continue
        folder = out / name
        folder.mkdir(exist_ok=True)
        begin, busy = time.perf_counter(), time.process_time()
        result = play(model_dir, folder, url)
        (folder / f"rank{rank}.json").write_text(json.dumps(result))
        seconds, busy = time.perf_counter() - begin, time.process_time() - busy
        print(f"rank {rank}: {name}: {seconds:.1f} s, {busy:.1f} s of the processor", flush=True)
    leave(Accelerator())


if __name__ == "__main__":
    main()
