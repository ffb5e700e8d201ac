"""
Conversations of several processes, each of which plays those of its rows: the main process decides and decodes as if
all were its own, and no process waits for one that failed.
"""

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.threads import at_once, in_threads, open_mailboxes
from trl_darts.engines.batch import PromptBatch
from trl_darts.errors import EnvironmentLost, GenerationError
from trl_darts.scheduling import GroupPlan, SchedulePolicies, Scheduler
from trl_darts.scheduling.policies import DualEnd
from trl_darts.training.candidates import CandidateRun
from trl_darts.training.conversations import Over
from trl_darts.training.players import Played, Player, Players
from trl_darts.training.remote_players import Link, Message, RemotePlayers, RemoteStage


M = 2


class Decoder:
    """Decodes a turn of as many tokens as asked for, all of them the conversation's number. Some turns never end."""

    def __init__(self, never=()):
        self.never, self.waiting, self.lock = set(never), {}, threading.Lock()
        self.started = []

    def start(self, conversation, turn, prompt, most):
        with self.lock:
            self.started.append((conversation, turn, list(prompt)))
        future = Future()
        if conversation in self.never:
            self.waiting[conversation] = future
        else:
            future.set_running_or_notify_cancel()
            future.set_result(([conversation] * most, [-1.0] * most))
        return future

    def tend(self):
        pass


class Actors(Players[Player]):
    """Each has as many turns as its row says, of one, two, … tokens. `act` is called before each."""

    player_class = Player

    def __init__(self, prompts, turns, act=lambda player, turn: None):
        super().__init__()
        self.prompts, self.turns, self.act = prompts, turns, act
        self.begun, self.futures, self.threads = [], {}, []

    def _begin(self, player):
        self.begun.append((player.key, player.row, player.is_first))
        thread = threading.Thread(target=self.play, args=[player], daemon=True)
        self.threads.append(thread)
        thread.start()

    def play(self, player):
        try:
            tokens = []
            for turn in range(self.turns[player.row]):
                self.act(player, turn)
                if player.over.is_set():
                    raise Over
                prompt = [*self.prompts[player.row], *tokens]
                future = self.futures[player.candidate_id] = self._stage.start(player.key, turn, prompt, turn + 1)
                if player.over.is_set():
                    future.cancel()
                tokens += future.result()[0]
        except BaseException as error:
            self._failed(player, error)
        else:
            played = Played(player.candidate_id, (tokens, None), player.row, turn + 1, 0.0)
            self._stage.ended(player.key, played, False)

    def _end(self, player):
        player.over.set()
        if player.candidate_id in self.futures:
            self.futures[player.candidate_id].cancel()

    def _close(self):
        for thread in self.threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in self.threads)


def batch_of(sizes):
    """Rows whose prompts are their numbers."""
    rows = [[row] for row in range(sum(sizes))]
    return PromptBatch(rows, [row // M for row in range(len(rows))], list(sizes), 0, M)


def rollout(sizes, num_candidates, turns, decoder, policies=None, act=lambda player, turn: None, drops=False):
    """Plays on a thread for each process. Returns the run, its result or error, and the players of each process."""
    batch, mailboxes, done = batch_of(sizes), open_mailboxes(len(sizes)), threading.Event()
    own_rows = [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    actors = [Actors([[row] for row in rows], [turns[row] for row in rows], act) for rows in own_rows]
    links = [Link(mailbox, 1) for mailbox in mailboxes]
    run = CandidateRun(decoder, batch, actors[0], RemotePlayers(links[0]) if len(sizes) > 1 else None)

    def lead():
        try:
            plans = [GroupPlan(group, num_candidates) for group in range(len(batch.rows) // M)]
            return run.run(Scheduler(policies or SchedulePolicies(), M, drops), plans)
        finally:
            done.set()

    def follow(index):
        stage = RemoteStage(links[index], actors[index])
        with actors[index].on(stage):
            while not done.is_set():
                stage.tend()
                time.sleep(0.001)

    results, errors = in_threads(lead, *(lambda i=i: follow(i) for i in range(1, len(sizes))))
    return SimpleNamespace(run=run, result=results[0], errors=errors, actors=actors)


SIZES = st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda sizes: sum(sizes) % M == 0)


@settings(max_examples=40, deadline=None)
@given(SIZES, st.data())
def test_as_if_all_were_on_one(sizes, data):
    """Each conversation is played once, by the process of its row, with its own prompt and turns."""
    turns = [data.draw(st.integers(1, 3)) for _ in range(sum(sizes))]
    num_candidates, decoder = data.draw(st.integers(M, M + 2)), Decoder()
    policies = SchedulePolicies(DualEnd(M, num_candidates, num_longest=1))
    played = rollout(sizes, num_candidates, turns, decoder, policies)
    assert not played.errors
    batch = batch_of(sizes)
    begun = [(key, sum(sizes[:process]) + row, process, first) for process, own in enumerate(played.actors)
             for key, row, first in own.begun]  # fmt: skip
    assert len({key for key, *_ in begun}) == len(begun)
    for (candidate_id, _), row, process, first in begun:
        group, index = divmod(candidate_id, num_candidates)
        assert row == batch.row_of(group, index)
        assert process == batch.owners[row]
        assert first == (index < M)
    for group in played.result.groups:
        assert len(group.rows) == M
        for own in group.rows:
            row = batch.row_of(own.group_id, own.index)
            assert own.length == sum(range(1, turns[row] + 1))
            assert own.tokens == [own.candidate_id] * own.length == played.run.played[own.candidate_id].tokens[0]
            assert played.run.played[own.candidate_id].num_turns == turns[row]
    assert len(decoder.started) == len({(conversation, turn) for conversation, turn, _ in decoder.started})
    for conversation, turn, prompt in decoder.started:
        row = batch.row_of(*divmod(conversation, num_candidates))
        assert prompt == [row, *[conversation] * sum(range(1, turn + 1))]


def test_a_turn_that_nobody_waits_for_is_aborted():
    """On the process of its row, and where it decodes."""
    decoder = Decoder(never=[2, 5])  # the spare candidate of each group
    policies = SchedulePolicies(DualEnd(M, M + 1, num_longest=1))
    played = rollout([2, 2], M + 1, [2] * 4, decoder, policies)
    assert not played.errors
    assert [[row.index for row in group.rows] for group in played.result.groups] == [[0, 1]] * 2
    assert all(future.cancelled() for future in decoder.waiting.values())


def test_a_lost_environment_begins_again_on_its_process():
    lost, lock = set(), threading.Lock()

    def act(player, turn):
        with lock:
            if turn == 1 and player.candidate_id == 3 and player.segment not in lost and len(lost) < 2:
                lost.add(player.segment)
                raise EnvironmentLost("the container is gone")

    played = rollout([2, 2], M, [3] * 4, Decoder(), act=act)
    assert not played.errors
    assert played.run.num_lost == 2
    begun = [(row, first) for (candidate_id, _), row, first in played.actors[1].begun if candidate_id == 3]
    assert begun == [(1, True), (1, False), (1, False)]
    assert all(len(group.rows) == M and row.length == 6 for group in played.result.groups for row in group.rows)


class Unknown(Exception):
    """What can't be sent as it is."""

    def __init__(self, number, text):
        super().__init__(text)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyError("the board"), (KeyError, "'the board'")),
        (Unknown(3, "no such board"), (GenerationError, "Unknown: no such board")),
        (GenerationError("no server is left"), (GenerationError, "no server is left")),
    ],
)
def test_an_error_of_another_process_is_raised_here(error, expected):
    def act(player, turn):
        if player.candidate_id == 3:
            raise error

    played = rollout([2, 2], M, [2] * 4, Decoder(), act=act)
    (found,) = played.errors.values()
    assert (type(found), expected[1] in str(found)) == (expected[0], True)


def test_its_group_alone_is_dropped():
    def act(player, turn):
        if player.candidate_id == 3:
            raise GenerationError("no board is free")

    played = rollout([2, 2], M, [2] * 4, Decoder(), act=act, drops=True)
    assert not played.errors
    assert list(played.result.dropped) == [1]


def test_a_server_that_refuses_a_turn():
    """The conversation's process raises what the main one was told, and the rollout ends with it."""
    decoder = Decoder()
    start = decoder.start

    def refuse(conversation, turn, prompt, most):
        if conversation == 3 and turn == 1:
            raise GenerationError("the prompt is too long")
        return start(conversation, turn, prompt, most)

    decoder.start = refuse
    (error,) = rollout([2, 2], M, [2] * 4, decoder).errors.values()
    assert "the prompt is too long" in str(error)


def test_a_process_that_breaks_ends_the_rollout():
    """Here what it plays can't begin."""
    mailboxes = open_mailboxes(2)
    main, other = (Link(mailbox, 1) for mailbox in mailboxes)
    actors = Actors([[0], [1]], [1, 1])
    actors.begin = lambda *part: 1 / 0
    stage = RemoteStage(other, actors)

    def follow():
        while True:
            stage.tend()
            time.sleep(0.001)

    run = CandidateRun(Decoder(), batch_of([2, 2]), Actors([[0], [1]], [1, 1]), RemotePlayers(main))
    plans = [GroupPlan(0, M), GroupPlan(1, M)]
    _, errors = in_threads(lambda: run.run(Scheduler(SchedulePolicies(), M), plans), follow)
    assert {type(error) for error in errors.values()} == {ZeroDivisionError}
    assert len(errors) == 2


def test_messages_of_an_earlier_rollout_are_forgotten():
    first, second = open_mailboxes(2)
    Link(second, 1).send(0, "ended", (0, 0))
    second.post(0, "of something else")
    Link(second, 2).send(0, "ended", (7, 0))
    assert at_once(lambda: list(Link(first, 2).receive())) == [[Message(2, 1, "ended", ((7, 0),))]]
    assert first.next_exchange() == second.next_exchange() == 1
