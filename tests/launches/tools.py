"""One process of a training with tools and vLLM servers: `accelerate launch … tools.py MODEL OUT URL`."""

import json
import sys
from pathlib import Path

from tests.engines.settings import engine_settings
from tests.launches.leaving import leave
from tests.trl_parity.test_tools import multiply
from tests.trl_parity.tool_calls import Reader, said, tool_messages, tool_trainer


def main() -> None:
    model_dir, out, url = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    reader, turns = Reader(), []
    fields = {"max_completion_length": 400, "max_steps": 4, **engine_settings("vllm_server", url)}
    trainer = tool_trainer(model_dir, out / "run", reader, tools=[multiply], fields=fields)
    rollout, later_turn = trainer._rollout, trainer._engine.later_turn
    trainer._rollout = lambda *args: turns.append("training") or rollout(*args)
    trainer._engine.later_turn = lambda batch: turns.append("later") or later_turn(batch)
    trainer.train()
    rows = [row for batch in reader.batches for row in batch]
    result = {
        "turns": turns,
        "calls": [
            [text for m in messages if m["role"] == "assistant" for text in said(m)[1:]] for _, messages, _ in rows
        ],
        "answers": [[message["content"] for message in tool_messages(row)] for row in rows],
        "log": [{name: value for name, value in line.items() if "/" in name} for line in trainer.state.log_history],
    }
    (out / f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(result))
    leave(trainer.accelerator)


if __name__ == "__main__":
    main()
