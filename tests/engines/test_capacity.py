"""
The cap of one server.

- in_bounds: it is always between 1 and its limit.
- decrease: a preemption, or a queue before a full cache, takes it to at most three quarters of what runs.
- increase: room in the cache lets it grow by a twentieth, at least by one.
- steady: nothing else moves it.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_darts.engines.capacity import DECREASE, FULL, INCREASE, ROOM, AdaptiveCapacity, LoadSample


METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 5.0
# HELP vllm:num_requests_waiting_by_reason Number of waiting requests by reason.
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 100.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
vllm:num_preemptions_total{engine="1",model_name="m"} 1.0
# HELP vllm:num_preemptions_created Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
vllm:num_preemptions_created{engine="1",model_name="m"} 1.7e+09
# HELP vllm:request_queue_time_seconds Histogram of time spent in WAITING phase for request.
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{engine="0",le="0.3",model_name="m"} 7.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} 0.01
vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 7.0
"""

counts = st.integers(0, 300)
samples = st.builds(
    LoadSample,
    kv_usage=st.one_of(st.floats(0, 1), st.just(float("nan"))),
    num_running=counts,
    num_waiting=st.integers(0, 3),
    num_preemptions=st.integers(0, 5),
)


def trajectory(limit: int, seen: list[LoadSample]):
    """`(before, after, preempted, sample)` of each step."""
    cap, preemptions = AdaptiveCapacity(limit), None
    for sample in seen:
        before = cap.capacity
        after = cap.update(sample)
        assert after == cap.capacity
        yield before, after, preemptions is not None and sample.num_preemptions > preemptions, sample
        preemptions = sample.num_preemptions


@given(st.integers(1, 400), st.lists(samples, max_size=40))
def test_in_bounds(limit, seen):
    assert all(1 <= after <= limit for _, after, _, _ in trajectory(limit, seen))


@given(st.integers(1, 400), st.lists(samples, max_size=40))
def test_decrease_increase_steady(limit, seen):
    for before, after, preempted, sample in trajectory(limit, seen):
        full = sample.kv_usage >= FULL and sample.num_waiting > 0
        if preempted or full:
            assert after <= before
            assert after <= max(1, DECREASE * sample.num_running)
            assert after == before or after > DECREASE * sample.num_running - 1
        elif sample.kv_usage < ROOM:
            assert min(limit, before + 1) <= after <= min(limit, before + INCREASE * before + 1)
        else:
            assert after == before


@given(st.integers(2, 400), st.integers(1, 399))
def test_room_brings_it_back_to_its_limit(limit, num_running):
    cap = AdaptiveCapacity(limit)
    cap.update(LoadSample(1.0, num_running, 1, 0))
    low = cap.capacity
    for _ in range(limit):
        cap.update(LoadSample(0.1, 0, 0, 0))
    assert low <= cap.capacity == limit


def test_first_look_at_a_server_is_no_preemption():
    cap = AdaptiveCapacity(100)
    assert cap.update(LoadSample(0.9, 50, 0, 1000)) == 100
    assert cap.update(LoadSample(0.9, 50, 0, 1001)) == 37
    assert cap.update(LoadSample(0.9, 30, 0, 0)) == 37  # it has been restarted


def test_parse_adds_engines_up():
    assert LoadSample.parse(METRICS) == LoadSample(kv_usage=0.5, num_running=7, num_waiting=5, num_preemptions=3)


@given(st.lists(st.tuples(st.floats(0, 1), counts, counts, counts), min_size=1, max_size=4))
def test_parse_any_number_of_engines(engines):
    names = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting", "num_preemptions_total")
    lines = [f'vllm:{name}{{engine="{i}"}} {row[j]}' for j, name in enumerate(names) for i, row in enumerate(engines)]
    usage, *totals = zip(*engines, strict=True)
    sample = LoadSample.parse("\n".join(lines))
    assert sample.kv_usage == pytest.approx(sum(usage) / len(engines))
    assert [sample.num_running, sample.num_waiting, sample.num_preemptions] == [sum(column) for column in totals]


def test_parse_counts_what_is_not_finite_as_nothing():
    sample = LoadSample.parse(METRICS.replace('running{engine="0",model_name="m"} 3.0', "running NaN"))
    assert sample.num_running == 4


@pytest.mark.parametrize("name", ["kv_cache_usage_perc", "requests_running", "requests_waiting{", "preemptions_total"])
def test_missing_metric_is_no_zero(name):
    """A zero would say that there is room, and the next look would find preemptions since."""
    with pytest.raises(ValueError, match="have no `vllm:"):
        LoadSample.parse("\n".join(line for line in METRICS.splitlines() if name not in line))


@pytest.mark.parametrize(
    "text",
    ["", "<html>Bad Gateway</html>", "vllm:num_requests_running", 'vllm:num_requests_running{engine="0" 3.0', "\0"],
)
def test_garbage_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011  (the parser's words, or ours)
        LoadSample.parse(text)


@given(st.text(max_size=30), st.sampled_from(METRICS.splitlines()), st.integers(0, 80))
def test_parse_answers_or_raises_value_error(garbage, line, at):
    text = METRICS.replace(line, line[:at] + garbage + line[at:])
    try:
        sample = LoadSample.parse(text)
    except ValueError:
        return
    assert isinstance(sample.num_running, int)
