"""Which candidates are scored next: bounds that hold for any rollout, and an order that prefers what is kept."""

from hypothesis import given
from hypothesis import strategies as st

from trl_darts.scheduling import Candidate, CandidateState, FinishReason, Group, GroupPlan
from trl_darts.streaming.plan import Limits, Track, keep_chance, plan_batch, set_aside


@st.composite
def any_tracks(draw):
    tracks = []
    for candidate_id in range(draw(st.integers(0, 12))):
        scored = draw(st.integers(0, 300))
        available = scored + draw(st.integers(0, 300))
        if not available:
            continue
        track = Track(candidate_id, draw(st.integers(0, 3)), draw(st.integers(1, 50)), available, scored)
        track.final, track.closed = draw(st.booleans()), draw(st.integers(0, 4)) == 0
        track.chance = draw(st.sampled_from([1.0, 0.5, 0.25]))
        tracks.append(track)
    return tracks


@st.composite
def any_limits(draw):
    chunk = draw(st.integers(1, 64))
    return Limits(chunk, draw(st.integers(chunk, 1000)), draw(st.integers(2, 4000)))


@given(any_tracks(), any_limits())
def test_bounds_hold(tracks, limits):
    for track in set_aside(tracks, limits):
        track.closed = True
    room = limits.cache_tokens // 2
    assert sum(track.cached for track in tracks) <= room
    batch = plan_batch(tracks, limits)
    working = [(track, num) for track, num in batch if num]
    if working:
        width = max(num for _, num in working)
        context = max(track.cached_after(num) for track, num in working)
        assert len(working) * width <= limits.batch_tokens
        assert len(working) * context <= room or len(working) == 1
        assert context <= room
    for track, num in batch:
        assert not track.closed
        assert 0 <= num <= track.pending
        assert track.final or track.pending >= limits.chunk_tokens
        assert num > 0 or not track.pending
    assert len({track.candidate_id for track, _ in batch}) == len(batch)


@given(any_tracks(), any_limits())
def test_everything_is_scored_in_the_end(tracks, limits):
    """A plan is never empty as long as a candidate is due: the main process would wait for ever."""
    for _ in range(sum(track.pending + 1 for track in tracks)):
        for track in set_aside(tracks, limits):
            track.closed = True
        batch = plan_batch(tracks, limits)
        if not batch:
            break
        for track, num in batch:
            track.scored += num
            track.closed = track.final and not track.pending
    assert not any(track.due(limits.chunk_tokens) for track in tracks)


def test_likely_ones_come_first():
    tracks = [Track(0, 0, 5, 100, chance=0.25), Track(1, 0, 5, 100), Track(2, 0, 5, 100, chance=0.5)]
    assert [track.candidate_id for track, _ in plan_batch(tracks, Limits(10, 200, 10**6))] == [1, 2]


def test_neighbours_are_of_similar_length():
    tracks = [Track(i, 0, 5, pending) for i, pending in enumerate([10, 100, 11, 99])]
    assert [(track.candidate_id, num) for track, num in plan_batch(tracks, Limits(10, 200, 10**6))] == [
        (1, 100),
        (3, 99),
    ]


def test_the_longest_is_set_aside():
    tracks = [Track(0, 0, 1, 60, 50), Track(1, 0, 1, 90, 80), Track(2, 0, 1, 30, 20)]
    assert [track.candidate_id for track in set_aside(tracks, Limits(1, 100, 200))] == [1]


def make_group(states):
    candidates = []
    for index, (state, length) in enumerate(states):
        candidate = Candidate(index, 0, index, tokens=range(length), state=state)
        candidate.finish_reason = FinishReason.STOP if state is CandidateState.FINISHED else None
        candidates.append(candidate)
    complete = sorted(c.length for c in candidates if c.complete)
    unfinished = sum(c.state is CandidateState.RUNNING for c in candidates)
    return Group(GroupPlan(0, len(candidates)), candidates, len(complete), unfinished, complete_lengths=complete)


def test_chances():
    finished, running, aborting = CandidateState.FINISHED, CandidateState.RUNNING, CandidateState.ABORTING
    group = make_group([(finished, 5), (finished, 9), (finished, 7), (running, 20), (running, 20), (aborting, 20)])
    chances = [keep_chance(group, candidate, 2) for candidate in group.candidates]
    assert chances == [1.0, 0.25, 1.0, 0.25, 0.25, 0.0]
    group = make_group([(finished, 5), (running, 20), (running, 20), (running, 1)])
    assert [keep_chance(group, candidate, 2) for candidate in group.candidates] == [1.0, *[1 / 3] * 3]
    group.selected = [0, 3]
    assert [keep_chance(group, candidate, 2) for candidate in group.candidates] == [1.0, 0.0, 0.0, 1.0]
