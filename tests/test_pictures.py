"""The pictures of README and docs are those that `benchmarks/pictures.py` draws."""

import pandas as pd
import pytest

from benchmarks import pictures


@pytest.fixture(scope="module")
def drawn():
    return pictures.pictures()


def test_pictures_are_drawn_from_what_is_there(drawn):
    """Run `python -m benchmarks.pictures` if a picture differs."""
    for name, picture in drawn.items():
        assert (pictures.FIGURES / name).read_text() == picture, name


def test_the_rollout_shown_is_typical():
    recorded = pd.read_parquet(pictures.RECORDED)
    ratios = pictures.speedups(recorded)
    assert len(ratios) == pictures.BATCHES * pictures.EPOCHS
    assert ratios[pictures.typical(recorded)] == pytest.approx(ratios.median(), rel=0.05)
    prompts = recorded.groupby(["step", "run"])["prompt_key"].agg(frozenset).unstack()
    assert (prompts["grpo"] == prompts["darts"]).all()  # the same prompts
    assert (recorded[recorded["selected"]].groupby(["step", "run"]).size() == 64).all()
