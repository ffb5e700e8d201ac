"""A rollout of a real server, replayed: the same decisions."""

import pytest

from tests.builders import letters_dataset, make_trainer
from tests.test_trainer_server import server_args
from trl_darts.analysis.simulation import ClusterSpec, RecordedRun
from trl_darts.policy import LatencyCurve


pytestmark = pytest.mark.vllm
LIMIT = 96


@pytest.fixture(scope="module")
def run_dir(server, model_dir, tmp_path_factory):
    """Three steps of 10 prompts, up to 8 candidates each; the third epoch knows the prompts."""
    out = tmp_path_factory.mktemp("recorded")
    # The paper's rule, by which a prompt that is not stopped early keeps the same rows, independent of times.
    fields = {"max_steps": 3, "per_device_train_batch_size": 40, "learning_rate": 0.0, "long_end_patience": None}
    args = server_args(out, server, save_rollout_trace=True, **fields)
    trainer = make_trainer(model_dir, args, train_dataset=letters_dataset(10))
    trainer.train()
    return out, args


def test_the_simulator_keeps_the_same_rows(run_dir):
    """Ends come in the order of lengths, so only a prompt that is stopped early may see a near tie the other way."""
    directory, settings = run_dir
    spec = ClusterSpec(LatencyCurve([1, 128], [0.002, 0.006]))
    same = total = 0
    for rollout in RecordedRun(directory).rollouts():
        result = rollout.replay(settings, spec, LIMIT)
        for group, kept in zip(result.groups, rollout.selected, strict=True):
            same += group.selected == kept
            total += 1
            if group.plan.num_candidates < settings.max_num_generations:
                assert group.selected == kept
    assert same / total >= 0.7
