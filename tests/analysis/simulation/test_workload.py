"""Length models: what they draw, and that two schedules see the same candidates; and workloads."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis.simulation.builders import GivenLengths
from trl_darts.analysis.simulation import ENDLESS, WORKLOADS, LogNormalLengths, RecordedLengths, Workload
from trl_darts.analysis.simulation.workload import BatchLengths
from trl_darts.errors import ConfigurationError


MODELS = [
    LogNormalLengths(50, endless_share=0.05),
    RecordedLengths([[5, 9, 30]] * 25 + [[7, 7]] * 25, [[False, False, True]] * 25 + [[False, True]] * 25),
]


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8), st.integers(0, 8), st.integers(0, 1000))
def test_further_candidates_change_no_earlier_one(model, few, more, seed):
    prompts = np.arange(0, 50, 7)
    narrow, wide = (model.draw(prompts, count, (seed, 0)) for count in (few, few + more))
    assert narrow.shape == (len(prompts), few)
    assert (narrow == wide[:, :few]).all()
    assert narrow.min() >= 1


def test_log_normal_has_the_moments_that_were_asked_for():
    model = LogNormalLengths(4000, median_length=600.0, inter_prompt_std=0.5, intra_prompt_std=0.4, endless_share=0.02)
    lengths = np.concatenate([model.draw(np.arange(4000), 16, (seed, 0)) for seed in range(4)], axis=1)
    endless = lengths == ENDLESS
    assert endless.mean() == pytest.approx(0.02, rel=0.1)
    by_prompt = np.sort(endless.mean(1))[::-1]
    assert by_prompt[:400].sum() / by_prompt.sum() > 0.45  # half of them in a tenth of the prompts
    logs = np.log(np.where(endless, np.nan, lengths))
    assert np.exp(np.nanmedian(logs)) == pytest.approx(600, rel=0.03)
    assert np.nanmean(logs, axis=1).std() == pytest.approx(0.5, rel=0.05)
    assert np.median(np.nanstd(logs, axis=1, ddof=1)) == pytest.approx(0.4, rel=0.05)


@pytest.mark.parametrize(
    ("name", "quantiles"),
    [
        ("llama_8b_deepscaler", {0.5: 2748, 0.9: 8540, 0.99: 21525}),
        ("deepseek_r1", {0.5: 833, 0.9: 4541, 0.99: 13915}),
    ],
)
def test_published_workloads_have_the_quantiles_that_were_published(name, quantiles):
    lengths = WORKLOADS[name].draw(np.arange(1024), 64, (0, 0))
    assert np.quantile(lengths, list(quantiles)) == pytest.approx(list(quantiles.values()), rel=0.2)


def test_shaping_shortens_the_longest_most_and_ends_the_endless():
    batch = BatchLengths(GivenLengths([[1, 100, 1000, ENDLESS]]), 0, 0, np.array([0]))
    assert batch.all(4, 0.0) == [[1, 100, 1000, ENDLESS]]
    assert batch.all(4, 0.001) == [[1, 91, 500, 1000]]
    assert batch.of(0, 4, 0, 0.001) == [1, 91, 500, 1000]
    assert batch.all(4, -0.002) == [[1, 125, ENDLESS, ENDLESS]]


def test_recorded_candidates_come_back_and_cut_ones_grow():
    model = RecordedLengths([[10, 20], [100, 50], [400, 3]], [[False, False], [False, True], [True, False]])
    first, second, third = model.draw(np.array([0, 1, 2]), 4000, (0, 0))
    assert set(first) == {10, 20}
    assert np.mean(first == 10) == pytest.approx(0.5, abs=0.03)
    assert set(second) == {100}  # the only complete one longer than 50 is 100
    assert set(third) == {3, ENDLESS}  # none is longer than 400


def test_a_cut_candidate_is_replaced_by_any_longer_one():
    model = RecordedLengths([[5], [10, 20, 30, 40]], [[True], [False] * 4])
    (drawn,) = model.draw(np.array([0]), 8000, (0, 0))
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [10, 20, 30, 40]
    assert counts / 8000 == pytest.approx([0.25] * 4, abs=0.02)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LogNormalLengths(intra_prompt_std=-1.0), r"`intra_prompt_std` \(-1.0\)"),
        (lambda: LogNormalLengths(endless_share=0.2), r"`endless_share` \(0.2\)"),
        (lambda: RecordedLengths([[1]], [[False, True]]), "as many flags"),
        (lambda: RecordedLengths([[5, -1]], [[False, False]]), r"`lengths` \(-1.0 is one of 1"),
        (lambda: RecordedLengths([[5], [math.nan]], [[False]] * 2), r"`lengths` \(nan is .* finite and not negative"),
        (lambda: Workload(LogNormalLengths(64), 65, 64), r"`prompts_per_step` \(65\).*\(64\)"),
        (lambda: Workload(LogNormalLengths(64), 16, 64, shaping=math.inf), r"`shaping` \(inf\)"),
    ],
)
def test_what_can_not_be(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()
