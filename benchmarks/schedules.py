"""
Compares all schedules on the same heavy-tailed lengths: seconds, wasted tokens, and the age of trained tokens.

    python -m benchmarks.schedules [--engines virtual] [--titles "Every schedule"] [--repeats 2] [--seeds 2]

Most tables run on a real vLLM server at a GPU's pace (see `pacing.py`), and also show the simulator's ratio for the
same lengths; `--engines virtual` simulates alone. The last ones are simulated clusters of 16, 32 and 64 GPUs.

- At a GPU's pace: the default against grpo, with and without M_low (`min_num_generations`), for several shares of
  endless answers; and two controls: equal lengths, and a full engine that decodes a sixteenth of a batch at once.
- Every schedule: with 0.2 % of endless answers.
- Half a batch of slots: the sorted schedule with the shortest or the longest first.

All rows run the same training loop, see [`SimulatedTraining`], with the trainer's admission, rounds, buffer, scheduler
and tracker. Lengths are drawn once per prompt, epoch and candidate, and are the same for all rows. A restarted
candidate has the same length again. The weights don't change: only the versions of the policy are counted. Rows take
turns step by step, so that the load of a shared machine affects all.

TRL's request for a whole batch with n = M can't have a length per candidate. The row "grpo" represents it: it waits
for the same candidates. `server_overhead.py` measures what a stream for each candidate costs in comparison.

*Wasted* is the share of decoded tokens that are never trained on, and *off-policy* the share of trained tokens that an
older policy sampled.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import requests

from benchmarks import parts
from benchmarks.harness import Benchmark, Shared, main
from benchmarks.models import EOS_ID, make_markov_model, make_tokenizer
from benchmarks.pacing import CURVES, NUM_ENGINES, SCALE, Pace, paced_server, scaled
from trl_darts.analysis.simulation import ClusterSpec, LogNormalLengths, SimulatedRun, SimulatedTraining, Workload
from trl_darts.engines import ServerPrompt, VLLMServerEngine
from trl_darts.policy import LatencyCurve
from trl_darts.scheduling import GroupPlan, Occupancy, RolloutResult, Scheduler, ScheduleSettings, Submit


EPOCHS = 3  # in the first, prompts have no history
MAX_MODEL_LEN = 1024
ROOM = 1024  # slots of a server that never queues
FIRST_TEXT_TOKEN, NUM_TEXT_TOKENS = 3, 96  # tokens of the Markov model that prompts consist of
AUTO = {"long_end_patience": "auto"}
BOTH_ENDS = {"selection": "dual_end", **AUTO}
PACED = scaled(CURVES["llama-8b"], SCALE, NUM_ENGINES)


@dataclass(frozen=True)
class Row:
    """One line of the tables. `capped` rows run on engines that decode at most N × M at once."""

    name: str
    settings: Mapping[str, Any]

    @property
    def capped(self) -> bool:
        """Whether the schedule needs a queue."""
        return str(self.settings["schedule"]) == "sorted"


GRPO, DEFAULT = Row("grpo", {"schedule": "grpo"}), Row("default", {"schedule": "darts"})
PAPER = Row("darts (paper)", {"schedule": "darts", "long_end_patience": None})
ROWS = [
    GRPO,
    PAPER,
    Row("darts, patience 2", {"schedule": "darts", "long_end_patience": 2.0}),
    DEFAULT,
    Row("uniform, auto", {"schedule": "darts", "selection": "uniform", **AUTO}),
    Row("tail batching", {"schedule": "tail_batching"}),
    Row("tail batching, dual-end, auto", {"schedule": "tail_batching", **BOTH_ENDS}),
    Row("partial rollout", {"schedule": "partial_rollout"}),
    Row("partial rollout, dual-end, auto", {"schedule": "partial_rollout", **BOTH_ENDS}),
    Row("sorted, on-policy", {"schedule": "sorted", "sorted_mode": "on_policy"}),
    Row("sorted, partial", {"schedule": "sorted", "sorted_mode": "partial"}),
]


@dataclass(frozen=True)
class Size:
    """Size of a run: N prompts per step, M rows of each, steps per epoch, and the distribution of lengths."""

    prompts: int
    num_generations: int
    median: float
    limit: int
    batches: int = 8
    endless_share: float = 0.002  # half of these answers belong to a tenth of the prompts
    equal: bool = False  # whether all lengths are equal; otherwise, p99 / p50 is about 10

    @property
    def workload(self) -> Workload:
        """Returns the workload with these lengths."""
        spread = (0.0, 0.0) if self.equal else (0.7, 0.6)
        lengths = LogNormalLengths(self.prompts * self.batches, self.median, *spread, endless_share=self.endless_share)
        return Workload(lengths, self.prompts, self.limit)

    @property
    def rows(self) -> int:
        """N × M."""
        return self.prompts * self.num_generations

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return EPOCHS * self.batches

    def __str__(self) -> str:
        lengths = self.workload.lengths.draw(np.arange(self.prompts * self.batches), self.num_generations, (0, 0))
        low, high = np.percentile(np.minimum(lengths, self.limit), (50, 99))
        size = f"{self.prompts} prompts × {self.num_generations}, p50 {low:.0f}, p99 {high:.0f}, limit {self.limit}"
        return f"{size}, {self.endless_share:.1%} never end, {self.steps} steps"


class ServerCluster:
    """Replaces [`SimulatedCluster`] by real servers, which decode a given number of tokens of each candidate."""

    eos_id = EOS_ID
    sampling: Mapping[str, Any] = {}

    def __init__(self, *urls: str) -> None:
        self.engine = VLLMServerEngine([*urls])
        self.model = self.engine.query(lambda server: server.get("/v1/models"))[urls[0]]["data"][0]["id"]

    def prompt(self, key: int) -> list[int]:
        """Returns the tokens of a prompt of the workload."""
        return [FIRST_TEXT_TOKEN + place for place in divmod(key, NUM_TEXT_TOKENS)]

    def of_length(self, tokens: int, max_length: int) -> dict[str, Any]:
        """Returns the parameters of an answer with this length. Endless ones are truncated by `max_tokens`."""
        return {"min_tokens": min(tokens - 1, max_length), "logit_bias": {str(self.eos_id): 100}}

    def run(self, scheduler: Scheduler, plans: Sequence[GroupPlan], lengths: Any, max_length: int) -> RolloutResult:
        """Runs one rollout after resetting the prefix cache, as a weight sync does."""

        def fixed(command: Submit) -> dict[str, Any]:
            return self.of_length(lengths[command.group_id][command.index], max_length)

        for url in self.engine.base_urls:
            requests.post(f"{url}/reset_prefix_cache", timeout=30).raise_for_status()
        prompts = {plan.group_id: [ServerPrompt(self.prompt(plan.prompt_key))] for plan in plans}
        body = {"model": self.model, "max_tokens": max_length, "logprobs": 0, "return_token_ids": True}
        return self.engine.run(scheduler, plans, prompts, body | dict(self.sampling), fixed)

    def seconds_per_request(self, num_candidates: int, step_seconds: float) -> float:
        """Measures the overhead of a request, with rollouts of one token per candidate."""
        plans = [GroupPlan(index, 1, prompt_key=index) for index in range(num_candidates)]
        grpo = ScheduleSettings("grpo", 1).policies()
        rollouts = (self.run(Scheduler(grpo, 1), plans, [[1]] * num_candidates, 1) for _ in range(4))
        seconds = min(Occupancy.of(result).seconds for result in rollouts)
        return max(0.0, seconds - step_seconds) / num_candidates


@dataclass(frozen=True)
class Total:
    """Totals over all steps of a row's run."""

    seconds: float  # of rollouts, from the first submission to the last end
    wasted: float  # share of decoded tokens that are not trained on
    off_policy: float  # share of trained tokens that an older policy sampled


class Replay(SimulatedTraining):
    """
    Runs a row step by step, on simulated engines or on `server`. Equal workloads and seeds give equal lengths to all
    rows. A capped row needs a server with as many slots as the batch has rows.
    """

    def __init__(
        self, row: Row, size: Size, spec: ClusterSpec, server: ServerCluster | None = None, seed: int = 0
    ) -> None:
        slots = spec.max_num_seqs or (size.rows // spec.num_engines if row.capped else None)
        settings = ScheduleSettings(num_generations=size.num_generations, **row.settings)
        super().__init__(size.workload, settings, replace(spec, max_num_seqs=slots), seed)
        if server is not None:
            self.cluster = server  # type: ignore[assignment]
        self.outcome = SimulatedRun()

    def steps(self) -> Iterator[None]:
        """Yields after each optimizer step, endlessly."""
        for step in self.optimizer_steps():
            self.outcome.add(step, self.workload)
            yield

    @property
    def total(self) -> Total:
        """Returns the totals so far. The buffer must be empty, as at the end of an epoch."""
        run = self.outcome
        decoded, trained = sum(run.pool_tokens), sum(run.kept_tokens)
        stale = sum(share * kept for share, kept in zip(run.off_policy_share, run.kept_tokens, strict=True))
        return Total(sum(run.rollout_seconds), 1 - trained / decoded, stale / trained)


def train(replays: Sequence[Replay], steps: int) -> list[Total]:
    """Runs one step of each in turn. The order rotates."""
    running = [replay.steps() for replay in replays]
    for step in range(steps):
        for training in islice(cycle(running), step, step + len(running)):
            next(training)
    return [replay.total for replay in replays]


@contextmanager
def server_of(curve: LatencyCurve, slots: int | None, size: Size) -> Iterator[tuple[ServerCluster, ClusterSpec]]:
    """Yields a warm paced server with `slots`, and its description for the simulator. Prints its pace at the end."""
    with TemporaryDirectory() as directory:
        model_dir = make_markov_model(Path(directory) / "markov", make_tokenizer())
        with paced_server(model_dir, curve, max_model_len=MAX_MODEL_LEN, max_num_seqs=slots or ROOM) as (server, pace):
            cluster = ServerCluster(server.base_url)
            cost = cluster.seconds_per_request(size.rows, curve(min(slots or ROOM, size.rows)))
            before: Pace = pace()
            yield cluster, ClusterSpec(curve, max_num_seqs=slots, seconds_per_request=cost)
            print(f"{pace().since(before)}; {cost * 1e3:.1f} ms per request")
            cluster.engine.close()


# Tables


@dataclass(frozen=True)
class Case:
    """A table: its rows, their lengths, and the engines."""

    rows: Sequence[Row]
    size: Size
    curve: LatencyCurve = PACED
    slots: int | None = None
    num_engines: int = 0  # of a simulated cluster; 0: a server

    @property
    def spec(self) -> ClusterSpec:
        """Describes the engines for the simulator."""
        return ClusterSpec(self.curve, self.num_engines or 1, max_num_seqs=self.slots)


SIZE, CLUSTER = Size(32, 8, 25.0, 300, batches=4), Size(64, 8, 250.0, 5_120)
BARE = Row("default, M_low = M", {**DEFAULT.settings, "min_num_generations": SIZE.num_generations})
EQUAL = replace(SIZE, median=4 * SIZE.median, endless_share=0.0, equal=True)
ORDERS = [Row(f"sorted, {own} first", {"schedule": "sorted", "submit_order": own}) for own in ("shortest", "longest")]
CASES = {
    **{
        f"At a GPU's pace, {share:.1%} never end": Case([GRPO, DEFAULT, BARE], replace(SIZE, endless_share=share))
        for share in (0.0, 0.002, 0.01)
    },
    "Control, equal lengths": Case([GRPO, DEFAULT], EQUAL),
    "Control, a full engine": Case([GRPO, DEFAULT], SIZE, slots=SIZE.rows // 16),
    "Every schedule": Case([row for row in ROWS if not row.capped], SIZE),
    "Every schedule, with a queue": Case([GRPO, *(row for row in ROWS if row.capped)], SIZE, slots=SIZE.rows),
    "Half a batch of slots": Case([GRPO, *ORDERS], SIZE, slots=SIZE.rows // 2),
    **{f"{gpus} GPUs": Case(ROWS, CLUSTER, CURVES["darts"], num_engines=gpus // 2) for gpus in (16, 32, 64)},
}


def run(shared: Shared, engine: str, title: str, repeats: int, seeds: int, shrink: int) -> dict[str, Any]:
    """Runs all rows of a table on the server and in the simulator, whose first seed has the server's lengths."""
    case = CASES[title]
    size, spec = replace(case.size, prompts=case.size.prompts // shrink), case.spec
    runs: dict[str, list[list[Total]]] = {}
    if engine == "server" and not case.num_engines:
        with server_of(case.curve, case.slots, size) as (cluster, spec):
            own = [train([Replay(row, size, spec, cluster) for row in case.rows], size.steps) for _ in range(repeats)]
            runs["measured"] = own
    runs["simulated"] = [
        train([Replay(row, size, spec, seed=seed) for row in case.rows], size.steps) for seed in range(seeds)
    ]
    found: dict[str, Any] = {"size": str(size)}
    for kind, every in runs.items():
        totals = zip(case.rows, zip(*every, strict=True), strict=True)
        found[kind] = {row.name: [asdict(total) for total in own] for row, own in totals}
    return found


BENCHMARK = Benchmark(
    "schedules",
    __doc__,
    {"engine": ["server", "virtual"], "title": list(CASES)},
    run,
    parts.schedules,
    options={"repeats": 2, "seeds": 2, "shrink": 1},
    usual={"engine": ["server"]},
    quick={"title": ["At a GPU's pace, 0.2% never end", "16 GPUs"], "repeats": 1, "seeds": 1, "shrink": 8},
)

if __name__ == "__main__":
    main(BENCHMARK)
