"""Sampling options with which a completion can't be continued in another request."""

from dataclasses import fields

import pytest

from trl_darts.engines.sampling import PER_REQUEST, not_carried


def test_options_that_are_not_set_do_not_count():
    assert not_carried({"stop": None, "presence_penalty": 0.0, "bad_words": [], "repetition_penalty": 1.1}) == {}
    assert not_carried({"stop": "\n\n", "temperature": 0.7}) == {"stop": "\n\n"}


@pytest.mark.vllm
def test_every_option_is_known_to_vllm():
    """Contract: a renamed option would be ignored silently. `response_format` is an option of the API only."""
    from vllm import SamplingParams

    names = set(SamplingParams.__struct_fields__) if hasattr(SamplingParams, "__struct_fields__") else set()
    names = names or {field.name for field in fields(SamplingParams)}
    assert set(PER_REQUEST) - {"response_format"} <= names
