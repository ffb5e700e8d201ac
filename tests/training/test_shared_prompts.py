"""
Tests that rows that share a prompt train the same model as TRL's rows do, by the parameters after two optimizer steps.
On two processes: `tests/launches/test_two_processes.py::test_trimmed_padding`.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig

from tests.given_completions import make_model, rows_of_prompts, trained
from tests.training.test_padding import MODELS, SETTINGS, TOLERANCE
from tests.trl_parity import common
from trl_darts.errors import ConfigurationError
from trl_darts.training import shared_prompts as module
from trl_darts.training.shared_prompts import Layout, Lengths, SharedPrompts, visible


LONG = {"train_dataset": rows_of_prompts(least=30)}
# Rows of a group stay in the same micro-batches there, where few of them meet.
FEW = {"one row per micro-batch"}


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("lm"))


@pytest.fixture
def forwards(monkeypatch):
    """Counts the forward passes with shared prompts."""
    counted, plain = [], SharedPrompts._forward

    def forward(self, *args):
        counted.append(args)
        return plain(self, *args)

    monkeypatch.setattr(SharedPrompts, "_forward", forward)
    return counted


def difference(model_dir, tmp_path, **settings):
    """Returns the difference by sharing relative to the change of the parameters, and our trainer."""
    settings = {**LONG, **settings}
    whole, before = trained(model_dir, tmp_path / "whole", False, **settings)
    shared, _ = trained(model_dir, tmp_path / "shared", True, share_prompts=True, **settings)
    after, ours = dict(whole.model.named_parameters()), dict(shared.model.named_parameters())
    moved = torch.cat([(after[name] - value).flatten() for name, value in before.items()]).norm()
    apart = torch.cat([(after[name] - ours[name]).flatten() for name in before]).norm()
    assert moved > 0
    return (apart / moved).item(), shared


@pytest.mark.parametrize("setting", SETTINGS)
def test_same_parameters(lm, tmp_path, forwards, setting):
    apart, trainer = difference(lm, tmp_path, **SETTINGS[setting])
    assert apart < TOLERANCE
    assert len(forwards) > 1 or setting in FEW  # the first is the probe
    ratio = np.mean(common.step_logs(trainer, "darts/train/padding_ratio"))
    assert ratio < 0.9 or setting in FEW or trainer._trimming.window == 1


def test_gradient_checkpointing_and_eager_attention(lm, tmp_path, forwards):
    assert difference(lm, tmp_path / "checkpoints", gradient_checkpointing=True)[0] < TOLERANCE
    eager = {"model_init_kwargs": {"attn_implementation": "eager"}}
    assert difference(lm, tmp_path / "eager", **eager)[0] < TOLERANCE
    assert len(forwards) > 4


def test_mixed_precision(lm, tmp_path, forwards):
    """In 16 bits over weights of 32, log-probs differ by rounding. The probe must not take that for another mask."""
    trainer, _ = trained(lm, tmp_path, True, share_prompts=True, bf16=True, max_steps=1, **LONG)
    assert trainer._trimming.shared.is_mixed
    assert len(forwards) > 1


@pytest.mark.parametrize("fault", ["a mask without segments", "positions that go on", "a label further"])
def test_the_comparison_can_fail(lm, tmp_path, monkeypatch, fault):
    monkeypatch.setattr(SharedPrompts, "_probe", lambda self, model: True)
    of = Layout.of

    def faulty(*args):
        layout = of(*args)
        if fault == "positions that go on":
            layout.positions[:] = np.arange(layout.positions.shape[1])
        if fault == "a label further":
            layout.labels[layout.labels > 0] += 1
        return layout

    monkeypatch.setattr(module.Layout, "of", faulty)
    if fault == "a mask without segments":
        monkeypatch.setattr(module, "visible", lambda segments, is_key: visible(segments.clamp(max=0), is_key))
    assert difference(lm, tmp_path)[0] > 1000 * TOLERANCE


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("fault", ["mask", "positions"])
def test_a_model_that_computes_something_else_is_found(lm, tmp_path, caplog, fault, is_mixed):
    """As one that ignores masks of this form, or positions."""
    trainer, _ = trained(lm, tmp_path / "found", True, max_steps=1, **LONG)
    model, ignored = trainer.model, {"mask": "attention_mask", "positions": "position_ids"}[fault]

    class Other:
        parameters, modules, eval = model.parameters, model.modules, model.eval

        def __call__(self, **inputs):
            return model(**{name: value for name, value in inputs.items() if name != ignored or value.ndim < 2})

    other = Other()
    shared = SharedPrompts(1e-3, is_mixed=is_mixed)
    assert not shared._probe(other)
    assert "Other computes something else if prompts are shared" in caplog.text
    with pytest.raises(ConfigurationError, match=r"`share_prompts` \(True\): Other computes something else"):
        SharedPrompts(1e-3, is_asked=True)._probe(other)


@pytest.mark.parametrize("name", ["learned positions", "sliding windows"])
def test_models(tmp_path, forwards, name):
    class_name, make_config, _ = MODELS[name]
    config = make_config()
    config.sliding_window = 12
    model_dir = make_model(tmp_path / "model", class_name, config)
    if name == "learned positions":
        with pytest.raises(ConfigurationError, match=r"`share_prompts` \(True\) does not run with GPT2LMHeadModel"):
            difference(model_dir, tmp_path)
        assert trained(model_dir, tmp_path / "unset", True, **LONG)[0]._trimming.shared is None
    else:  # rows are longer than the window, so each is passed on alone
        assert difference(model_dir, tmp_path)[0] < TOLERANCE
        assert len(forwards) == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"trim_padding": False}, r"`trim_padding` \(False\)"),
        ({"torch_compile": True}, r"`torch_compile` \(True\)"),
    ],
)
def test_what_is_refused(lm, tmp_path, settings, words):
    fields = {"schedule": "grpo", "share_prompts": True, **settings}
    with pytest.raises(ConfigurationError, match=rf"`share_prompts` \(True\) does not run with {words}"):
        common.make_trainer(lm, common.make_args(tmp_path, **fields))


def test_dropout_stays(lm, tmp_path):
    trainer, _ = trained(lm, tmp_path, True, peft_config=LoraConfig(target_modules="all-linear", lora_dropout=0.5))
    assert trainer.model.training
    assert trainer._trimming.shared._fits == {id(trainer.model_wrapped): True}


lengths = st.integers(1, 8).flatmap(
    lambda size: st.builds(
        Lengths,
        *(st.lists(st.integers(low, high), min_size=size, max_size=size) for low, high in ((1, 1), (0, 30), (0, 2))),
    )
)


prompts = st.lists(st.integers(1, 40), min_size=3, max_size=3)


@given(lengths=lengths, prompts=prompts, cost=st.sampled_from([0, 1e-3, 1]))
def test_each_answer_is_computed_once_and_no_plan_costs_more(lengths, prompts, cost):
    lengths = Lengths([prompts[group] for group in lengths.groups], lengths.answers, lengths.groups)
    shared = SharedPrompts(cost)
    found, rows = shared.plan(lengths)
    alone = len(lengths.prompts) * (width := max(lengths.prompts) + max(lengths.answers)) * (1 + cost * width)
    assert found <= alone * (1 + 1e-9)
    if rows is None:
        return
    assert sorted(row for own in rows for row in own) == [i for i, answer in enumerate(lengths.answers) if answer]
    assert all(len({lengths.groups[row] for row in own}) == 1 for own in rows)
    layout = Layout.of(lengths, rows, max(prompts) + 30, 30)
    assert len(layout.sources) == len(set(layout.targets.tolist())) == sum(lengths.answers)
    assert shared.num_tokens(lengths) == layout.tokens.size


@given(lengths=lengths)
def test_siblings_are_neighbours_and_the_longest_come_first(lengths):
    order = SharedPrompts(0).order(lengths)
    assert sorted(order) == list(range(len(lengths.groups)))
    groups = [lengths.groups[row] for row in order]
    assert len({*groups}) == sum(a != b for a, b in zip(groups, [None, *groups], strict=False))


def test_an_answer_sees_the_prompt_and_itself():
    segments = torch.tensor([[0, 0, 1, 1, 2, -1]])
    seen = visible(segments, segments >= 0)[0, 0].int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]
