"""Drafts that don't pay are paused, and tried again later."""

import pytest

from trl_darts.speculation.gain import CONTROL_EVERY, FIRST_PAUSE, LONGEST_PAUSE, DraftGain


def run(gain, num_steps, slowdown, tokens_per_sequence, num_sequences=4, hiccups=None):
    """Decodes, drafting where it is allowed, and returns the seconds over those without drafts."""
    seconds = plain = 0.0
    for step in range(num_steps):
        drafts = gain.allows_drafts(num_sequences)
        num_tokens = num_sequences * tokens_per_sequence if drafts else num_sequences
        took = 0.01 * (slowdown if drafts else 1.0) + (1.0 if hiccups and step % hiccups == 0 else 0.0)
        gain.add(num_sequences, 8 if drafts else 0, num_tokens, took)
        seconds += took
        plain += 0.01 * num_tokens / num_sequences
    return seconds / plain


def test_drafts_that_pay_go_on():
    gain = DraftGain()
    assert run(gain, 5000, slowdown=1.2, tokens_per_sequence=2.0) < 0.65
    assert gain.of(4).pause == 0


def test_drafts_that_do_not_pay_cost_little():
    assert run(DraftGain(), 5000, slowdown=1.5, tokens_per_sequence=1.2) < 1.01


def test_pauses_can_be_turned_off():
    gain = DraftGain(pauses=False)
    assert run(gain, 5000, slowdown=1.5, tokens_per_sequence=1.2) > 1.2
    assert gain.of(4).pause == 0


def test_pauses_grow_and_are_forgotten_once_drafts_pay():
    gain, pauses = DraftGain(), []
    while not pauses or pauses[-1] < LONGEST_PAUSE:
        before = gain.of(4).pause
        run(gain, 1, slowdown=1.5, tokens_per_sequence=1.2)
        if gain.of(4).pause > before:
            pauses.append(gain.of(4).pause)
    assert pauses == [FIRST_PAUSE * 2**place for place in range(len(pauses))]
    run(gain, 2 * LONGEST_PAUSE, slowdown=1.2, tokens_per_sequence=2.0)
    while not gain.of(4).pause:
        run(gain, 1, slowdown=1.5, tokens_per_sequence=1.2)
    assert gain.of(4).pause == FIRST_PAUSE


def test_some_steps_have_no_drafts_for_comparison():
    gain = DraftGain()
    assert not gain.allows_drafts(4)  # none is known yet
    gain.add(4, 0, 4, 0.01)
    allowed = [gain.allows_drafts(4) for _ in range(4 * CONTROL_EVERY)]
    assert allowed.count(False) == 4


def test_hiccups_do_not_stop_drafts_that_pay():
    gain = DraftGain()
    run(gain, 2000, slowdown=1.1, tokens_per_sequence=2.5, hiccups=100)
    assert gain.of(4).pause == 0


def test_a_full_engine_does_not_stop_drafts_in_the_tail():
    gain = DraftGain()
    for _ in range(20):
        run(gain, 60, slowdown=1.5, tokens_per_sequence=1.2, num_sequences=128)
        run(gain, 60, slowdown=1.2, tokens_per_sequence=2.0, num_sequences=4)
    assert gain.of(128).pause > 0
    assert gain.of(4).pause == 0


@pytest.mark.parametrize("num_sequences", [1, 3, 64])
def test_steps_of_other_sizes_tell_nothing(num_sequences):
    gain = DraftGain()
    for _ in range(100):
        gain.add(num_sequences, 0, num_sequences, 0.01)
        gain.add(8, 8, 9, 10.0)
    assert gain.of(8).pause == 0
