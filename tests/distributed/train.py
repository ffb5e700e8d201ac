"""
One process of a training: `accelerate launch … train.py '<json>'`. Each rank writes what it saw to `OUT/rank<r>.json`.
"""

import json
import sys
from pathlib import Path

from tests.builders import letter_of, letters_dataset, make_args, make_trainer, record_batches


def main() -> None:
    options = json.loads(sys.argv[1])
    out = Path(options["out"])

    def reward(prompts, completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    args = make_args(out / "run", learning_rate=0.0, **options["args"])
    trainer = make_trainer(Path(options["model"]), args, reward_funcs=reward, train_dataset=letters_dataset(10))
    batches = record_batches(trainer)
    records = []
    log_rollout = trainer._log_rollout

    def recorded(record):
        records.append([record.admission.num_candidates, [[s.lengths, s.selected] for s in record.summaries]])
        log_rollout(record)

    trainer._log_rollout = recorded
    trainer.train()
    rows = []
    for batch in batches:
        lengths = batch["completion_mask"].sum(1).tolist()
        letters = [letter_of(ids[0]) for ids in batch["completion_ids"].tolist()]
        rows.append(
            {
                "prompts": [example["prompt"] for example in batch["inputs"]],
                "letters": letters,
                "lengths": lengths,
                "advantages": batch["advantages"].tolist(),
            }
        )
    result = {"records": records, "rows": rows, "tracked": len(trainer.length_tracker)}
    (out / f"rank{trainer.accelerator.process_index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
