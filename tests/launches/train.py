"""
One process of a training: `accelerate launch … train.py '<json>'`. Each rank writes what it saw to `OUT/rank<r>.json`.
"""

import json
import sys
from pathlib import Path

from tests.builders import compare_with_trl, letter_of, letters_dataset, make_args, make_trainer, record_batches
from tests.engines.settings import engine_settings, prepare_colocated
from tests.launches.cpu_sharded import allow_fsdp_on_cpu
from tests.launches.leaving import leave
from trl_darts.engines import in_process


def record_rollouts(trainer) -> tuple[list, list]:
    """Budgets and selections of each rollout, and how many candidates this process decoded."""
    records, decoded = [], []
    log_rollout, share_class = trainer._log_rollout, in_process.Share

    def logged(record, training):
        records.append([record.admission.num_candidates, [[s.lengths, s.selected] for s in record.summaries]])
        log_rollout(record, training)

    def share(slots, *args, **kwargs):
        decoded.append(len(slots))
        return share_class(slots, *args, **kwargs)

    trainer._log_rollout, in_process.Share = logged, share
    return records, decoded


def main() -> None:
    options = json.loads(sys.argv[1])
    out, engine = Path(options["out"]), options["engine"]
    allow_fsdp_on_cpu()
    if engine == "vllm_colocated":
        prepare_colocated()

    def reward(prompts, completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    settings = {"learning_rate": 0.0, "scale_rewards": False, **engine_settings(engine, options["url"])}
    args = make_args(out / "run", **{**settings, **options["args"]})
    trainer = make_trainer(Path(options["model"]), args, reward_funcs=reward, train_dataset=letters_dataset(10))
    batches = record_batches(trainer)
    differences = compare_with_trl(trainer) if args.stream_logprobs else []
    records, decoded = record_rollouts(trainer)
    refused = options["refused"]
    trainer._conductor.overrides = lambda command: {"top_p": 7.0} if command.group_id in refused else {}
    trainer.train()
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
    result = {
        "records": records,
        "decoded": decoded,
        "rows": rows,
        "tracked": len(trainer.length_tracker),
        "distributed_type": str(trainer.accelerator.distributed_type),
        "log": trainer.state.log_history,
        "streamed": differences,
    }
    (out / f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(result))
    leave(trainer.accelerator)


if __name__ == "__main__":
    main()
