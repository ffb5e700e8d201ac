"""Rollouts of any course, on one process or two: in the end each kept row has the log-probs of one pass over it."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.streaming.test_forward import VOCABULARY, full_log_probs, make_model
from trl_darts.errors import GenerationError
from trl_darts.scheduling import (
    Abort,
    CandidateEnded,
    EngineLoad,
    FinishReason,
    GroupPlan,
    Scheduler,
    Submit,
    TokensArrived,
)
from trl_darts.scheduling.policies import DualEnd, SchedulePolicies
from trl_darts.streaming.director import StreamDirector
from trl_darts.streaming.rounds import Round, RoundDone
from trl_darts.streaming.worker import ScoredModel, StreamWorker, row_digest


NUM_GENERATIONS = 2


class OtherProcess:
    """Stands for the mailbox and for the process behind it, which executes at once."""

    def __init__(self, worker):
        self.worker = worker
        self.rounds = []
        self.error = None
        self.answers = []

    def post(self, process, message):
        assert process == 1
        assert isinstance(message, Round)
        self.rounds.append(message)
        self.worker.execute(message)
        self.answers.append(RoundDone(message.rollout, 1, self.error))

    def receive(self):
        answers, self.answers = self.answers, []
        return answers


class Course:
    """A rollout whose candidates get their tokens in any order."""

    def __init__(self, rng, num_groups):
        self.rng = rng
        policies = SchedulePolicies(group_stop=DualEnd(NUM_GENERATIONS, 4, 1))
        self.scheduler = Scheduler(policies, NUM_GENERATIONS)
        self.prompts = [self.text(rng.randint(1, 12)) for _ in range(num_groups)]
        self.texts = {}
        self.running = {}
        self.now = 0.0
        plans = [GroupPlan(group_id, rng.randint(2, 4)) for group_id in range(num_groups)]
        self.execute(self.scheduler.start(plans, [EngineLoad("engine", None)], 0.0))

    def text(self, length):
        return [self.rng.randrange(1, VOCABULARY) for _ in range(length)]

    def execute(self, commands):
        for command in commands:
            if isinstance(command, Submit):
                self.texts[command.candidate_id] = self.text(self.rng.randint(1, 60))
                self.running[command.candidate_id] = command.segment
            elif isinstance(command, Abort) and command.candidate_id in self.running:
                self.end(command.candidate_id, (), FinishReason.ABORT)

    def end(self, candidate_id, tokens, reason):
        segment = self.running.pop(candidate_id)
        offset = self.scheduler.ledger.candidates[candidate_id].length
        logprobs = [0.0] * len(tokens)
        event = CandidateEnded(candidate_id, segment, offset, list(tokens), logprobs, reason, self.now)
        self.execute(self.scheduler.handle(event))

    def go_on(self):
        """Some tokens of one candidate."""
        self.now += 1.0
        candidate_id = self.rng.choice(list(self.running))
        offset = self.scheduler.ledger.candidates[candidate_id].length
        rest = self.texts[candidate_id][offset:]
        tokens = rest[: self.rng.randint(1, 20)]
        if len(tokens) == len(rest):
            self.end(candidate_id, tokens, self.rng.choice([FinishReason.STOP, FinishReason.LENGTH]))
            return
        event = TokensArrived(candidate_id, self.running[candidate_id], offset, tokens, [0.0] * len(tokens), self.now)
        self.execute(self.scheduler.handle(event))


def make_worker(model, sharded=False):
    models = {name: ScoredModel(model, torch.no_grad) for name in ("policy", "reference")}
    return StreamWorker(models, torch.device("cpu"), sharded)


def make_director(course, worker, other=None, cache_bytes=2**30, sharded=False):
    return StreamDirector(
        rollout=1,
        scheduler=course.scheduler,
        prompts=course.prompts,
        num_generations=NUM_GENERATIONS,
        chunk_tokens=8,
        batch_tokens=64,
        cache_bytes=cache_bytes,
        worker=worker,
        mailbox=other,
        num_processes=1 if other is None else 2,
        sharded=sharded,
    )


def run(course, director):
    while not course.scheduler.done:
        course.go_on()
        if course.rng.random() < 0.5:
            director.step(course.scheduler.ledger)
    result = course.scheduler.result()
    assert director.finish(result) > 0
    return [(course.prompts[g.plan.group_id], list(row.tokens)) for g in result.groups for row in g.rows]


def assert_right(model, rows, complete):
    expected = full_log_probs(model, [prompt for prompt, _ in rows], [completion for _, completion in rows])
    for row, log_probs in zip(rows, expected, strict=True):
        for scored in complete[row_digest(*row)].values():
            torch.testing.assert_close(scored, log_probs, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def model():
    return make_model("sliding")


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), processes=st.sampled_from(["one", "two", "sharded"]))
def test_each_row_is_right(model, seed, processes):
    course = Course(random.Random(seed), num_groups=3)
    sharded = processes == "sharded"
    worker = make_worker(model, sharded)
    other = None if processes == "one" else OtherProcess(make_worker(model, sharded))
    rows = run(course, make_director(course, worker, other, sharded=sharded))
    complete = {**worker.complete, **(other.worker.complete if other else {})}
    assert_right(model, rows, complete)
    for each in [worker, *([other.worker] if other else [])]:
        assert not each._candidates  # all caches are freed
        assert not each._prefixes


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_little_room(model, seed):
    """Whatever has to wait, nothing is wrong, a third of the bound holds what is kept, and some of it is scored."""
    course = Course(random.Random(seed), num_groups=3)
    worker = make_worker(model)
    bound = 180 * bytes_per_token(model)
    rows = run(course, make_director(course, worker, cache_bytes=bound))
    assert 0 < worker.peak_bytes <= bound / 3
    scored = [row for row in rows if row_digest(*row) in worker.complete]
    # Alone in a pass, a row of 60 tokens and a prompt of 12 does not fit; most do.
    assert len(scored) >= sum(len(prompt) + len(completion) <= 60 for prompt, completion in rows)
    assert_right(model, scored, worker.complete)


def bytes_per_token(model):
    worker = make_worker(model)
    worker.execute(Round(1, prefills=True))
    return worker.bytes_per_token


def test_sharded_processes_go_through_the_same_passes(model):
    """In the same order: prompts and chunks, policy and reference."""
    course = Course(random.Random(5), num_groups=3)
    passes = [[], []]

    def counted(index, name):
        def call(**inputs):
            passes[index].append(name)
            return model(**inputs)

        return call

    workers = [
        StreamWorker(
            {name: ScoredModel(counted(index, name), torch.no_grad) for name in ("policy", "reference")},
            torch.device("cpu"),
            sharded=True,
        )
        for index in range(2)
    ]
    other = OtherProcess(workers[1])
    own_rounds, execute = [], workers[0].execute
    workers[0].execute = lambda work: (own_rounds.append(work), execute(work))
    run(course, make_director(course, workers[0], other, sharded=True))
    assert passes[0] == passes[1] != []
    kinds = [
        [(r.prefills, r.scores) for r in rounds if r.prefills or r.scores] for rounds in (own_rounds, other.rounds)
    ]
    assert kinds[0] == kinds[1]


def test_a_failure_elsewhere_ends_the_rollout(model):
    course = Course(random.Random(1), num_groups=3)
    other = OtherProcess(make_worker(model))
    other.error = "OutOfMemoryError: 7 GiB"
    with pytest.raises(GenerationError, match="Streaming failed on process 1: OutOfMemoryError: 7 GiB"):
        run(course, make_director(course, make_worker(model), other))


def test_an_end_comes_with_all_of_its_tokens(model):
    """The engine's thread adds the last tokens while the director looks."""
    course = Course(random.Random(2), num_groups=1)
    director = make_director(course, make_worker(model))
    ledger = course.scheduler.ledger
    course.go_on()
    candidate = next(c for c in ledger.candidates if c.length)

    class Racing:
        """Its end arrives between two looks at it."""

        def __getattr__(self, name):
            value = getattr(candidate, name)
            if name == "ended" and candidate.candidate_id in course.running:
                course.end(candidate.candidate_id, course.text(5), FinishReason.STOP)
            return value

    director._note(ledger, Racing())
    track = director._tracks[0][candidate.candidate_id]
    assert not track.final or track.available == candidate.length


def test_rows_that_are_not_trained_on_are_dropped(model):
    """A schedule with a buffer may leave a group that has come to its end to a later batch."""
    course = Course(random.Random(4), num_groups=2)
    worker = make_worker(model)
    director = make_director(course, worker)
    while not course.scheduler.done:
        course.go_on()
    result = course.scheduler.result()
    director.finish(result, [row.tokens for row in result.groups[0].rows])
    assert len(worker.complete) == NUM_GENERATIONS
    assert not worker._candidates


def test_a_new_rollout_forgets_the_last(model):
    worker = make_worker(model)
    course = Course(random.Random(0), num_groups=1)
    run(course, make_director(course, worker))
    assert worker.complete
    worker.execute(Round(2))
    assert not worker.complete
    assert worker.num_chunks == 0
