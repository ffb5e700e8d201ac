"""Tests model cards: the method, the wait for the long end, the settings and the measured effects."""

import pytest
from trl import GRPOTrainer

from tests.builders import make_args, make_trainer
from trl_darts.policy import LatencyCurve
from trl_darts.telemetry.model_card import EFFECTS, PAPER, add_rollouts


def card_of(trainer, path):
    trainer.create_model_card(model_name="letters")
    return (path / "README.md").read_text()


def section(path, logs=(), **fields):
    """Adds the section to a card of another template, without a trainer."""
    card = path / "card.md"
    card.write_text("---\nlicense: mit\n---\n# Mine\n")
    add_rollouts(card, make_args(path, **fields), list(logs))
    return card.read_text()


def test_a_trained_model(model_dir, tmp_path):
    trainer = make_trainer(model_dir, make_args(tmp_path, max_steps=2, long_end_patience=3.0))
    trainer.train()
    card = card_of(trainer, tmp_path)
    assert "This model was trained with DARTS" in card
    assert "fine-tuned version of a model from a directory." in card  # TRL calls it None
    assert f'model="{tmp_path.name}"' in card
    assert "None" not in card.partition("### Rollouts")[0]
    assert card.index("### Rollouts") < card.index("### Framework versions") < card.index("Cite DARTS as:")
    assert card.index("Cite DARTS as:") < card.index("Cite GRPO as:") < card.index("Cite TRL as:")
    assert PAPER["citation"] in card
    assert GRPOTrainer._paper["citation"] in card
    logs = [entry for entry in trainer.state.log_history if "darts/rollout/seconds" in entry]
    assert len(logs) == 2
    for metric in EFFECTS:
        values = [entry[metric] for entry in logs if metric in entry]
        assert f"(`{metric}`) | {sum(values) / len(values):.4g} | {values[0]:.4g} | {values[-1]:.4g} |" in card


@pytest.mark.parametrize(
    ("patience", "words"),
    [
        ("auto", "`long_end_patience='auto'`. The wait for the long end was not the paper's"),
        (3.0, "`long_end_patience=3.0`. The wait for the long end was not the paper's: it ended at 3.0 × the M-th"),
        (None, "`long_end_patience=None`. The wait for the long end was the paper's."),
    ],
)
def test_the_wait_that_was_used_is_named(tmp_path, patience, words):
    card = section(tmp_path, long_end_patience=patience)
    assert "DARTS, by trl_darts " in card
    assert "with `schedule='darts'`, `num_generations=4`, " in card
    assert words in card
    assert "default" not in card


def test_another_schedule_is_not_called_darts(model_dir, tmp_path):
    card = card_of(make_trainer(model_dir, make_args(tmp_path, schedule="grpo")), tmp_path)
    assert "This model was trained with GRPO" in card
    assert "TRL's GRPO with the schedule `grpo`, by trl_darts " in card
    assert "`long_end_patience" not in card
    assert "2605.30859" not in card
    assert card.count("Cite GRPO as:") == 1
    assert "No rollout was logged before this card was written." in card


def test_paths_stay_off_the_card_and_the_origin_is_on_it(tmp_path):
    curve, card = tmp_path / "curve.json", tmp_path / "card.md"
    LatencyCurve([1, 8], [0.01, 0.02]).save(curve)
    card.write_text("---\nlicense: mit\n---\n# Mine\n")
    config = make_args(tmp_path, latency_curve=str(curve), target_redundancy=1.25)
    config.origin = "hf://me/recipe@abc"
    add_rollouts(card, config, [{"darts/rollout/seconds": 2.0}])
    text = card.read_text()
    assert text.index("license: mit") < text.index("# Mine") < text.index("### Rollouts") < text.index("Cite GRPO as:")
    assert "`target_redundancy=1.25`" in text
    assert "The run was configured with `hf://me/recipe@abc` and additional arguments." in text
    assert "curve.json" not in text
