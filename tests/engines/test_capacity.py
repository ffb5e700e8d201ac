"""What a server says of its load."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_darts.engines.capacity import LoadSample


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
