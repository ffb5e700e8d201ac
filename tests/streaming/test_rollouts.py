"""Random rollouts on one or two processes. In the end, each kept row has the log-probs of one forward pass."""

import random
from functools import partial

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
from trl_darts.streaming.forward import Scorer, row_digest
from trl_darts.streaming.logprob_stream import LogprobStream, RoundDone
from trl_darts.streaming.plan import Limits, ScoringPlan, ScoringRound


NUM_GENERATIONS = 2
CPU = torch.device("cpu")


class OtherProcess:
    """Replaces the mailbox and the process behind it, which executes at once."""

    process_index = 0

    def __init__(self, scorers):
        self.scorers = scorers
        self.error = None
        self.answers = []

    def post(self, process, message):
        assert process == 1
        for scorer in self.scorers.values():
            scorer.execute(message)
        self.answers.append(RoundDone(message.rollout, 1, self.error))

    def receive(self):
        answers, self.answers = self.answers, []
        return answers


class Course:
    """A rollout whose candidates get their tokens in a random order."""

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
        """Adds some tokens to one candidate."""
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


def make_scorers(model, sharded=False, passes=None):
    def called(name, **inputs):
        if passes is not None:
            passes.append(name)
        return model(**inputs)

    return {name: Scorer(partial(called, name), torch.no_grad, CPU, sharded) for name in ("policy", "reference")}


def make_stream(scorers, other=None, sharded=False, cache_gib=1.0):
    processes = {} if other is None else {"num_processes": 2, "mailbox": other}
    return LogprobStream(scorers, NUM_GENERATIONS, 8, 64, cache_gib, sharded=sharded, **processes)


def run(course, stream, trained=None, chance=0.5):
    """Runs a rollout and returns the rows to train on."""
    step = stream.watch(dict(enumerate(course.prompts)))
    while not course.scheduler.done:
        course.go_on()
        if course.rng.random() < chance:
            step(course.scheduler.ledger)
    result = course.scheduler.result()
    groups = result.groups[:trained]
    stream.finish(result, None if trained is None else [row.tokens for group in groups for row in group.rows])
    return [(course.prompts[g.plan.group_id], list(row.tokens)) for g in groups for row in g.rows]


def assert_right(model, rows, scorers):
    expected = full_log_probs(model, [prompt for prompt, _ in rows], [completion for _, completion in rows])
    for row, log_probs in zip(rows, expected, strict=True):
        scored = [scorer.complete[row_digest(*row)] for scorer in scorers if row_digest(*row) in scorer.complete]
        assert len(scored) == 2  # policy and reference
        for values in scored:
            torch.testing.assert_close(values, log_probs, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def model():
    return make_model("sliding")


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), processes=st.sampled_from(["one", "two", "sharded"]))
def test_each_row_is_right(model, seed, processes):
    """Sharded processes also run the same passes in the same order."""
    course, sharded = Course(random.Random(seed), num_groups=3), processes == "sharded"
    passes = [[], []]
    other = None if processes == "one" else OtherProcess(make_scorers(model, sharded, passes[1]))
    stream = make_stream(make_scorers(model, sharded, passes[0]), other, sharded)
    rows = run(course, stream)
    scorers = [*stream.scorers.values(), *([] if other is None else other.scorers.values())]
    assert_right(model, rows, scorers)
    assert not any(scorer.num_cached for scorer in scorers)  # all caches are freed
    if sharded:
        assert passes[0] == passes[1] != []


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_little_room(model, seed):
    """Log-probs are right, a third of the cache holds all stored tokens, and some tokens are scored."""
    course = Course(random.Random(seed), num_groups=3)
    scorers, measured = make_scorers(model), make_scorers(model)["policy"]
    measured.execute(ScoringRound(1, prefills=True))
    rows = run(course, make_stream(scorers, cache_gib=2 * 180 * measured.bytes_per_token / 2**30))
    policy = scorers["policy"]
    assert 0 < policy.peak_tokens <= 180 / 3
    scored = [row for row in rows if row_digest(*row) in policy.complete]
    # Alone in a pass, a row of 60 tokens and a prompt of 12 does not fit; most do.
    assert len(scored) >= sum(len(prompt) + len(completion) <= 60 for prompt, completion in rows)
    assert_right(model, scored, scorers.values())


def test_a_failure_elsewhere_ends_the_rollout(model):
    other = OtherProcess(make_scorers(model))
    other.error = "OutOfMemoryError: 7 GiB"
    with pytest.raises(GenerationError, match="Streaming failed on process 1: OutOfMemoryError: 7 GiB"):
        run(Course(random.Random(1), num_groups=3), make_stream(make_scorers(model), other))


def test_an_end_comes_with_all_of_its_tokens():
    """The engine's thread adds the last tokens while the plan reads a candidate."""
    course = Course(random.Random(2), num_groups=1)
    course.go_on()
    candidate = next(c for c in course.scheduler.ledger.candidates if c.length)

    class Racing:
        """A candidate that ends right after its first read."""

        def __getattr__(self, name):
            value = getattr(candidate, name)
            if candidate.candidate_id in course.running:
                course.end(candidate.candidate_id, course.text(5), FinishReason.STOP)
            return value

    plan = ScoringPlan(1, dict(enumerate(course.prompts)), Limits(1, 64, 10**6), NUM_GENERATIONS)
    group = course.scheduler.ledger.groups[0]
    chunks = []
    for _ in range(2):  # what was missed is seen at the next look
        plan.note(Racing(), group)
        for work in plan.rounds([0]).values():
            chunks += work.chunks
    assert [chunk.final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [token for chunk in chunks for token in chunk.tokens] == list(candidate.tokens)


def test_only_what_is_trained_on_is_kept_until_the_next_rollout(model):
    """A schedule with a buffer may keep a complete group for a later batch."""
    stream = make_stream(make_scorers(model))
    rows = run(Course(random.Random(4), num_groups=2), stream, trained=1, chance=0)
    policy = stream.scorers["policy"]
    assert {row_digest(*row) for row in rows} == policy.complete.keys()
    assert not policy.num_cached
    policy.execute(ScoringRound(2))
    assert not policy.complete
