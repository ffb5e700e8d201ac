"""Cards of trained models: they name the method, the schedule and what it did."""

import re

import pytest
from trl import GRPOTrainer, TrlParser

from tests.builders import make_args, make_trainer
from tests.hub.test_transfer import REPO
from trl_darts import DARTSGRPOConfig
from trl_darts.hub import push_config, resolve_config_arguments
from trl_darts.hub.model_card import EFFECTS, PAPER, add_rollouts
from trl_darts.policy import LatencyCurve


def card_of(trainer, path):
    trainer.create_model_card(model_name="letters")
    return (path / "README.md").read_text()


@pytest.fixture(scope="module")
def trained_card(model_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("trained")
    trainer = make_trainer(model_dir, make_args(path, max_steps=2, long_end_patience=3.0))
    trainer.train()
    return trainer, card_of(trainer, path)


def test_it_names_darts_and_cites_both_papers(trained_card):
    _, card = trained_card
    assert "This model was trained with DARTS" in card
    assert card.index("Cite DARTS as:") < card.index("Cite GRPO as:") < card.index("Cite TRL as:")
    assert PAPER["citation"] in card
    assert GRPOTrainer._paper["citation"] in card


def test_it_shows_the_schedule(trained_card):
    _, card = trained_card
    assert "`schedule='darts'`, `num_generations=4`, `long_end_patience=3.0`; its other settings" in card
    assert card.index("### Rollouts") < card.index("### Framework versions")


def test_it_shows_what_was_measured(trained_card):
    trainer, card = trained_card
    logs = [entry for entry in trainer.state.log_history if "darts/rollout/seconds" in entry]
    assert len(logs) == 2
    for metric in EFFECTS:
        values = [entry[metric] for entry in logs if metric in entry]
        assert f"(`{metric}`) | {sum(values) / len(values):.4g} | {values[0]:.4g} | {values[-1]:.4g} |" in card
    generated, kept = (sum(entry[f"darts/rollout/{name}_tokens"] for entry in logs) for name in ("generated", "kept"))
    assert (
        re.search(r"Of all tokens generated, (\d+)% were not trained on", card)[1]
        == f"{1 - kept / generated:.0%}"[:-1]
    )


def test_before_a_rollout(model_dir, tmp_path):
    card = card_of(make_trainer(model_dir, make_args(tmp_path)), tmp_path)
    assert "No rollout was logged before this card was written." in card


def test_another_schedule_is_not_called_darts(model_dir, tmp_path):
    card = card_of(make_trainer(model_dir, make_args(tmp_path, schedule="grpo")), tmp_path)
    assert "This model was trained with GRPO" in card
    assert "shaped by [trl_darts]" in card
    assert "`schedule='grpo'`" in card
    assert card.count("Cite GRPO as:") == 1


def test_a_latency_curve_is_named_without_its_path(tmp_path):
    path, curve = tmp_path / "README.md", tmp_path / "curve.json"
    path.write_text("# Mine\n")
    LatencyCurve([1, 8], [0.01, 0.02]).save(curve)
    add_rollouts(path, make_args(tmp_path, latency_curve=str(curve)), [])
    assert "`num_generations=4`, and a latency curve of the engine; its other" in path.read_text()
    assert "curve.json" not in path.read_text()


def test_it_names_the_published_config(hub, model_dir, tmp_path):
    published = {"use_cpu": True, "bf16": False, "num_generations": 4, "per_device_train_batch_size": 16}
    commit = push_config(published, REPO).commit
    words = resolve_config_arguments(["--config", f"hf://{REPO}", "--output_dir", str(tmp_path), "--seed=3"])
    (parsed,) = TrlParser((DARTSGRPOConfig,)).parse_args_and_config(words)
    for args in (parsed, DARTSGRPOConfig.from_pretrained(REPO, output_dir=str(tmp_path))):
        card = card_of(make_trainer(model_dir, args), tmp_path)
        assert f"set up with the config `hf://{REPO}@{commit}`, but for what was given beside it" in card
        assert str(tmp_path) not in card.replace(str(model_dir), "")  # which TRL names
    assert "set up with the config" not in card_of(make_trainer(model_dir, make_args(tmp_path)), tmp_path)


def test_another_template_loses_nothing(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("---\nlicense: mit\n---\n# Mine\n")
    add_rollouts(path, make_args(tmp_path), [{"darts/rollout/seconds": 2.0}])
    card = path.read_text()
    assert card.index("license: mit") < card.index("# Mine") < card.index("### Rollouts") < card.index("Cite GRPO as:")
