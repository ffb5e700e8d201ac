"""The main process's link and a share, without other processes."""

from collections.abc import Sequence

import pytest

from tests.policies import make_policies
from trl_darts.engines.in_process.share import MainLink, Report, Share, Slot
from trl_darts.errors import GenerationError
from trl_darts.scheduling import FinishReason, GroupPlan, Scheduler


STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


def darts_link(counts: Sequence[int], num_engines: int = 1, **kwargs) -> MainLink:
    """Returns a link whose scheduler keeps 2 of at most 4 candidates."""
    scheduler = Scheduler(make_policies("darts", 2, **kwargs), 2)
    return MainLink(scheduler, [GroupPlan(index, count) for index, count in enumerate(counts)], range(num_engines))


class Recorder:
    """A link that records the reports, and returns the aborts that the test sets."""

    def __init__(self) -> None:
        self.sent: list[list[Report]] = []
        self.answer: list[int] = []

    def exchange(self, reports: Sequence[Report]) -> list[int]:
        self.sent.append(list(reports))
        answer, self.answer = self.answer, []
        return answer


# MainLink


def test_reports_of_one_message_are_handled_in_turn():
    main = darts_link([4])
    assert main.handle([Report(0, 5, STOP), Report(1, 6, STOP), Report(2, 7, STOP)]) == [(0, 2), (0, 3)]
    assert main.handle([Report(3, 7, ABORT)]) == []
    assert main.result().groups[0].selected == [0, 1]  # the third came after the decision


def test_main_link_counts_tokens_without_having_any():
    main = darts_link([3], long_end_patience=2.0)
    main.handle([Report(0, 3), Report(0, 7), Report(0, 5)])  # the last one was overtaken
    assert main.scheduler.ledger.candidates[0].length == 7
    main.handle([Report(0, 8, STOP), Report(1, 10, STOP)])
    assert main.handle([Report(2, 19)]) == []
    assert main.handle([Report(2, 20)]) == [(0, 2)]
    main.handle([Report(2, 21, ABORT)])
    assert [c.tokens for c in main.result().groups[0].candidates] == [[0] * 8, [0] * 10, [0] * 21]
    assert all(c.logprobs is None for c in main.scheduler.ledger.candidates)


def test_a_candidate_that_cannot_be_decoded_ends_the_rollout():
    main = darts_link([2, 2], num_engines=2)
    assert main.handle([Report(2, 0, error="out of blocks")]) == [(0, 0), (0, 1), (1, 3)]
    main.handle([Report(number, 4, ABORT) for number in (0, 1, 3)])
    assert main.scheduler.done
    with pytest.raises(GenerationError, match="candidate 0 of prompt 1 on 1: out of blocks"):
        main.result()


# Share


def test_share_sends_each_report_once_and_keeps_the_tokens():
    link, calls = Recorder(), []
    share = Share([Slot(7, 0, 0), Slot(8, 0, 1)], link, needs_progress=True, on_exchange=lambda: calls.append(1))
    share.progress(7, 3)
    share.end(8, [5, 6], [-0.5, -0.25], LENGTH)
    assert share.exchange() == []
    assert share.exchange() == []
    assert link.sent == [[Report(7, 3), Report(8, 2, LENGTH)], []]
    assert share.rows == {8: ([5, 6], [-0.5, -0.25])}
    assert share.running == {7}
    assert len(calls) == 2


def test_share_passes_on_only_aborts_of_what_still_runs():
    link = Recorder()
    share = Share([Slot(number, 0, number) for number in range(3)], link, needs_progress=False)
    share.end(1, [4], None, STOP)
    link.answer = [2, 1, 0]
    assert share.exchange() == [2, 0]
