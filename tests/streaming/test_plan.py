"""The next candidates to score: limits that hold for any rollout, and an order that prefers likely rows."""

from hypothesis import given
from hypothesis import strategies as st

from trl_darts.scheduling import Candidate, CandidateState, FinishReason, Group, GroupPlan
from trl_darts.streaming.plan import Limits, Track, hopeless, keep_chance, plan_batch


@st.composite
def any_tracks(draw):
    tracks = []
    prompts = [draw(st.integers(1, 50)) for _ in range(4)]  # tokens by group: its candidates share the prompt
    for candidate_id in range(draw(st.integers(0, 12))):
        scored = draw(st.integers(0, 300))
        available = scored + draw(st.integers(0, 300))
        if not available:
            continue
        group = draw(st.integers(0, 3))
        track = Track(candidate_id, group, prompts[group], available, scored)
        track.final = draw(st.booleans())
        track.chance = draw(st.sampled_from([1.0, 0.5, 0.25]))
        tracks.append(track)
    return tracks


@st.composite
def any_limits(draw):
    chunk = draw(st.integers(1, 64))
    return Limits(chunk, draw(st.integers(chunk, 1000)), draw(st.integers(2, 4000)))


def held_after(tracks, batch, prefixes):
    """Returns the number of tokens that a process holds after the batch."""
    numbers = {track.candidate_id: num for track, num in batch}
    held = sum(prefixes.values())
    for track in tracks:
        num = numbers.get(track.candidate_id, 0)
        ends = track.final and num == track.pending and track.candidate_id in numbers
        held += 0 if ends or not track.scored + num else track.cached_after(num)
    new = {track.group_id: track.num_prompt - 1 for track, num in batch if num and track.group_id not in prefixes}
    return held + sum(new.values())


@given(any_tracks(), any_limits(), st.dictionaries(st.integers(0, 3), st.integers(0, 49)))
def test_bounds_hold(tracks, limits, prefixes):
    too_long = hopeless(tracks, limits)
    tracks = [track for track in tracks if track not in too_long]
    before = held_after(tracks, [], prefixes)
    batch = plan_batch(tracks, limits, prefixes)
    working = [(track, num) for track, num in batch if num]
    if working:
        width = max(num for _, num in working)
        context = max(track.cached_after(num) for track, num in working)
        assert len(working) * width <= limits.batch_tokens
        assert len(working) * context <= limits.room
        assert held_after(tracks, batch, prefixes) <= max(limits.room, before)
    for track, num in batch:
        assert 0 <= num <= track.pending
        assert num > 0 or not track.pending
        assert track.final or num >= limits.chunk_tokens
    assert len({track.candidate_id for track, _ in batch}) == len(batch)


@given(any_tracks(), any_limits())
def test_everything_is_scored_in_the_end(tracks, limits):
    """
    With room for all, a plan is never empty while a candidate is due. Otherwise, the main process would wait forever.
    """
    limits = Limits(limits.chunk_tokens, limits.batch_tokens, 10**6)
    tracks = [track for track in tracks if track not in hopeless(tracks, limits)]
    prefixes = {}
    for _ in range(sum(track.pending + 1 for track in tracks)):
        batch = plan_batch(tracks, limits, prefixes)
        if not batch:
            break
        for track, num in batch:
            track.scored += num
            prefixes[track.group_id] = track.num_prompt - 1
        tracks = [track for track in tracks if track.pending or not track.final]
    assert not any(track.due(limits.chunk_tokens) for track in tracks)


def test_likely_ones_come_first():
    tracks = [Track(0, 0, 5, 100, chance=0.25), Track(1, 0, 5, 100), Track(2, 0, 5, 100, chance=0.5)]
    assert [track.candidate_id for track, _ in plan_batch(tracks, Limits(10, 200, 10**6), {})] == [1, 2]


def test_a_short_rest_does_not_cut_the_chunks_of_others():
    """An ended candidate has one token left, five running ones have 300."""
    tracks = [Track(0, 0, 5, 300, 299, final=True), *(Track(i, 0, 5, 300) for i in range(1, 6))]
    batch = {track.candidate_id: num for track, num in plan_batch(tracks, Limits(64, 8192, 10**6), {})}
    assert batch == {0: 1, **dict.fromkeys(range(1, 6), 300)}


def test_a_full_cache_lets_what_has_ended_go_on():
    """Both hold 50 tokens of 100, and only the one that has ended needs no more."""
    tracks = [Track(0, 0, 1, 70, 50), Track(1, 0, 1, 70, 50, final=True)]
    assert [track.candidate_id for track, _ in plan_batch(tracks, Limits(1, 100, 300), {0: 0})] == [1]


def test_a_candidate_that_is_too_long_is_hopeless():
    tracks = [Track(0, 0, 1, 90, 50), Track(1, 0, 1, 120, 50)]
    assert [track.candidate_id for track in hopeless(tracks, Limits(1, 100, 300))] == [1]


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
