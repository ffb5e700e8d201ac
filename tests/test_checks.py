"""Tests errors that need the built trainer and are raised before the first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset

from tests.builders import letters_dataset, make_args, make_trainer
from trl_darts import DARTSGRPOConfig, DARTSGRPOTrainer
from trl_darts.checks import (
    check_arguments,
    check_path,
    other_model,
    warn_of_cut_long_ends,
    warn_of_lost_gradient,
)
from trl_darts.data_checks import check_data, has_images
from trl_darts.errors import ConfigurationError
from trl_darts.policy import LatencyCurve
from trl_darts.scheduling import ScheduleSettings


def trainer(**changes: Any) -> SimpleNamespace:
    """Returns a stub of a valid trainer with the attributes that the checks read."""
    own = {name: changes[name] for name in ("schedule", "rollout_ahead", "drop_uniform_groups") if name in changes}
    settings = ScheduleSettings(**own)
    args = {
        "use_vllm": False,
        "vllm_mode": "server",
        "generation_kwargs": None,
        "vllm_model_impl": "auto",
        "use_transformers_continuous_batching": False,
        "ds3_gather_for_generation": True,
        "vllm_tensor_parallel_size": 1,
        "vllm_enable_sleep_mode": False,
        **dict.fromkeys(("tool_timeout_s", "conversation_timeout_s", "stop_tools", "max_concurrent_conversations")),
        "schedule": "darts",
        "over_provisions": False,
        "rollout_ahead": 0,
        "drop_uniform_groups": False,
        "scores_early": False,
        "defer_unsettled_groups": False,
        "kv_after_update": None,
        "buffers_prompts": settings.buffers_prompts,
        "own_prompts": settings.own_prompts,
        "save_strategy": "steps",
        "vllm_importance_sampling_correction": False,
    }
    fields: dict[str, Any] = {
        "model": torch.nn.Linear(1, 1),
        "train_dataset": [{"prompt": "Hello"}],
        "processing_class": SimpleNamespace(),
        "_dist": SimpleNamespace(is_fsdp=changes.pop("is_sharded", False), is_zero3=False),
        "is_deepspeed_enabled": False,
        "_is_vlm": False,
        "tools": [],
        "environment_factories": None,
        "rollout_func": None,
        "accelerator": SimpleNamespace(num_processes=2),
    }
    given = {name: changes.pop(name) for name in list(changes) if name in args}
    args |= given
    args["uses_servers"] = args["use_vllm"] and args["vllm_mode"] == "server"
    args["colocates"] = args["use_vllm"] and args["vllm_mode"] == "colocate"
    return SimpleNamespace(**{**fields, **changes}, args=SimpleNamespace(**args))


IMAGES = {"_is_vlm": True, "train_dataset": [{"prompt": "What is this?", "image": None}]}


def test_what_can_work_passes():
    check_path(trainer())
    check_path(trainer(**IMAGES))
    check_path(trainer(use_transformers_continuous_batching=True))
    check_path(
        trainer(use_transformers_continuous_batching=True, is_sharded=True, is_deepspeed_enabled=True)
    )  # gathered for generation
    check_path(trainer(use_vllm=True, **IMAGES, processing_class=SimpleNamespace(image_token_id=7)))
    check_path(trainer(use_vllm=True, vllm_mode="colocate", **IMAGES))
    for tools in ({"tools": [max]}, {"environment_factories": {"game": dict}}):
        check_path(trainer(**tools))
        check_path(trainer(use_vllm=True, is_sharded=True, **tools))
        check_path(trainer(use_vllm=True, vllm_mode="colocate", is_sharded=True, **tools))
        one = {"accelerator": SimpleNamespace(num_processes=1)}
        check_path(trainer(use_vllm=True, vllm_mode="colocate", vllm_tensor_parallel_size=2, **one, **tools))


def test_continuous_batching_of_a_sharded_model():
    for more in ({}, {"is_deepspeed_enabled": True, "ds3_gather_for_generation": False}):
        with pytest.raises(ConfigurationError, match=r"does not run with a sharded model on 2 processes.*DDP"):
            check_path(trainer(use_transformers_continuous_batching=True, is_sharded=True, **more))


def test_processor_without_image_token_on_a_server():
    with pytest.raises(ConfigurationError, match=r"`processing_class` \(SimpleNamespace\) has no `image_token_id`"):
        check_path(trainer(use_vllm=True, **IMAGES))


@pytest.mark.parametrize("tools", [{"tools": [max]}, {"environment_factories": {"game": dict}}])
@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size"),
        ({"is_sharded": True}, "a sharded model"),
        ({"is_sharded": True, "is_deepspeed_enabled": True, "use_transformers_continuous_batching": True}, "sharded"),
        (
            {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True, "is_sharded": True},
            "vllm_enable_sleep_mode",
        ),
    ],
)
def test_tool_loops_whose_turns_are_collectives(changes, cause, tools):
    with pytest.raises(ConfigurationError, match=rf"Tools and environments do not run with .*{cause}.*2 processes"):
        check_path(trainer(**changes, **tools))


IMAGE_PART = {"type": "image", "image": "a.png"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a"}, False),
        ({"prompt": "a", "images": []}, True),
        ({"prompt": [{"role": "user", "content": "a"}]}, False),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "a", "image": None}]}]}, False),
        ({"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": [IMAGE_PART]}]}, True),
    ],
)
def test_images_in_columns_and_in_messages(row, expected):
    assert has_images([row]) is expected
    assert has_images([{"prompt": "a"}, row]) is expected
    assert has_images(IterableDataset.from_generator(lambda: iter([row]))) is None  # not known before the training
    assert not has_images(None)
    assert not has_images([])


def test_model_that_vllm_has_changed():
    class Changed(torch.nn.Linear):
        def __call__(self, *args: Any) -> Any:
            return None

    Changed.__call__.__module__ = "vllm.compilation.decorators"
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), Changed(1, 1))
    with pytest.raises(ConfigurationError, match=r"`vllm_model_impl` \('auto'\) makes vLLM patch Changed"):
        check_path(trainer(use_vllm=True, vllm_mode="colocate", model=model))
    check_path(trainer(use_vllm=True, model=model))  # servers are other processes


@pytest.mark.parametrize("changes", [{"use_vllm": False}, {"use_vllm": True, "vllm_mode": "colocate"}])
def test_schedules_and_options_that_need_servers(changes, tmp_path):
    words = r"`schedule` \('sorted'\) .* with an engine in the trainer's own process. Set `use_vllm=True` and"
    with pytest.raises(ConfigurationError, match=words):
        make_args(tmp_path, schedule="sorted", **changes).check_start()
    with pytest.raises(ConfigurationError, match=r"`rollout_ahead` \(1\) .* `vllm_mode='server'`, or leave it unset"):
        make_args(tmp_path, rollout_ahead=1, **changes).check_start()
    make_args(tmp_path, **changes).check_start()
    make_args(tmp_path, schedule="sorted", use_vllm=True, vllm_mode="server").check_start()


TAIL = {"vllm_tail_server_url": "http://t:1", "tail_switch_at": 4, "use_vllm": True, "vllm_mode": "server"}


@pytest.mark.parametrize("fields", [{"rollout_ahead": 1}, {"drop_uniform_groups": True}, TAIL])
def test_a_rollout_func_takes_its_batch_when_it_comes(tmp_path, fields):
    with pytest.raises(ConfigurationError, match=rf"`{next(iter(fields))}` .* does not run with `rollout_func`"):
        check_arguments(make_args(tmp_path, schedule="grpo", **fields), max)


def test_fields_are_checked_before_the_model_is_loaded(tmp_path):
    with pytest.raises(ConfigurationError, match="with an engine in the trainer's own process"):
        DARTSGRPOTrainer(str(tmp_path / "no-model"), max, make_args(tmp_path, schedule="sorted"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_vllm": True, "environment_factories": {"game": dict}}, "does not run with `environment_factory`"),
        ({"use_vllm": True, **IMAGES, "processing_class": SimpleNamespace(image_token_id=7)}, "with images yet"),
    ],
)
def test_schedules_that_choose_their_prompts(changes, words):
    check_path(trainer(schedule="sorted", use_vllm=True))
    for schedule in ({"schedule": "sorted"}, {"rollout_ahead": 1}):
        with pytest.raises(ConfigurationError, match=words):
            check_path(trainer(**schedule, **changes))


def test_uniform_groups_are_those_of_one_turn():
    with pytest.raises(ConfigurationError, match=r"`drop_uniform_groups` \(True\) .* with `tools`"):
        check_path(trainer(drop_uniform_groups=True, use_vllm=True, tools=[max]))


def test_conversations_that_are_chosen_among_are_of_text():
    words = r"`schedule` \('darts'\) chooses among conversations of text, and does not run with `tools` and a vision"
    with pytest.raises(ConfigurationError, match=words):
        check_path(trainer(over_provisions=True, use_vllm=True, tools=[max], **IMAGES))


def test_a_curve_of_another_model_is_named(tmp_path, caplog):
    curve = LatencyCurve([1, 2], [0.01, 0.02], metadata={"model": "some/Tiny-1B"})
    curve.save(tmp_path / "curve.json")
    args = make_args(tmp_path, latency_curve=str(tmp_path / "curve.json"))
    assert other_model(args, "org/Tiny-1B") is other_model(make_args(tmp_path), "org/Tiny-1B") is None
    with caplog.at_level("WARNING"), pytest.raises(OSError, match="no-model"):  # before the model is loaded
        DARTSGRPOTrainer(str(tmp_path / "no-model"), max, args, letters_dataset())
    assert "was measured with 'some/Tiny-1B', and the model is" in caplog.text


def test_data_that_nothing_can_be_trained_on(tmp_path):
    def refused(words, train, evaluation=None):
        with pytest.raises(ConfigurationError, match=words):
            DARTSGRPOTrainer("no-model", max, make_args(tmp_path), train, evaluation)

    prompts, questions = letters_dataset(4), letters_dataset(4).rename_column("prompt", "question")
    refused("`train_dataset` must have a column 'prompt', and has 'question'. Rename one", questions)
    refused("`train_dataset` must have a column 'prompt', and has 'question'", questions.to_iterable_dataset())
    refused("`hard` must have a column 'prompt'", prompts, {"easy": prompts, "hard": questions})
    refused(
        r"`train_dataset` \(3 prompts\) must have at least the prompts of one generation \(4\)", letters_dataset(3)
    )
    refused(
        r"`train_dataset` \(DatasetDict\) must be a `Dataset` .* Choose a split: 'train'", DatasetDict(train=prompts)
    )
    refused(r"`train_dataset` \(str\) must be a `Dataset` or an `IterableDataset`. Make one", "my/data")
    refused(r"`eval_dataset` \(0 prompts\) must have at least one", prompts, prompts.select([]))
    refused("must have text or a list of messages .* and row 5 has None", rows(["A"] * 5 + [None] + ["A"] * 5))
    refused("must have text or a list of messages .* and row 0 has 1", rows([1] * 8))
    refused(
        "must have text or a list of messages .* and row 0 has \\[{'content': 'A'}\\]", rows([[{"content": "A"}]] * 8)
    )
    check_data(make_args(tmp_path), prompts, prompts)
    check_data(make_args(tmp_path), rows([[{"role": "user", "content": "A"}]] * 8))
    check_data(make_args(tmp_path), None)


def rows(prompts: list[Any]) -> Dataset:
    return Dataset.from_dict({"prompt": prompts})


def test_arguments_of_another_type_are_named(tmp_path):
    args = make_args(tmp_path)
    with pytest.raises(ConfigurationError, match=r"`model` \(None\) must be a name on the Hub, a directory"):
        DARTSGRPOTrainer(None, max, args, letters_dataset())
    with pytest.raises(ConfigurationError, match=r"`callbacks` \(str\) must be a list of `TrainerCallback`s"):
        DARTSGRPOTrainer("no-model", max, args, letters_dataset(), callbacks="log")
    with pytest.raises(ConfigurationError, match=r"`reward_funcs` \('accuracy_reward'\) must be the function itself"):
        DARTSGRPOTrainer("no-model", "accuracy_reward", args, letters_dataset())


def test_an_empty_prompt_is_named_before_the_first_step(tmp_path, model_dir):
    with pytest.raises(ConfigurationError, match="Prompt 5 of the training data set must have at least one token"):
        make_trainer(model_dir, make_args(tmp_path), train_dataset=rows(["A"] * 5 + [""] + ["A"] * 5))


def test_prompts_that_fill_the_model(tmp_path, model_dir):
    """Raises before the first step, also without a server."""
    dataset = rows(["A"] * 9 + ["B" * 5000])
    with pytest.raises(
        ConfigurationError, match=r"1 prompts of the training data set leave no room .*prompt 9 has 5000"
    ):
        make_trainer(model_dir, make_args(tmp_path), train_dataset=dataset)


def test_rows_that_no_checkpoint_can_hold():
    """Deferred prompts are saved as JSON."""
    dataset = [{"prompt": "Hello", "answer": {1, 2}}]
    fields = {"schedule": "partial_rollout", "use_vllm": True, "train_dataset": dataset}
    with pytest.raises(ConfigurationError, match=r"the column 'answer' \(set\).*`save_strategy='no'`"):
        check_path(trainer(**fields))
    check_path(trainer(**fields, save_strategy="no"))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, None),
        ({"top_k": 5}, "top_k"),
        ({"top_k": -1}, None),
        ({"top_p": 0.95}, "top_p"),
        ({"min_p": 0.1}, "min_p"),
        ({"min_p": 0.0}, None),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"generation_kwargs": {"top_k": 5}}, "top_k"),
        ({"generation_kwargs": {"presence_penalty": 0.5}}, "presence_penalty"),
        ({"generation_kwargs": {"seed": 3, "ignore_eos": True}}, None),
        ({"vllm_structured_outputs_regex": "(a|b)"}, "vllm_structured_outputs_regex"),
        ({"top_k": 5, "vllm_importance_sampling_mode": "token_truncate"}, None),
        ({"top_k": 5, "vllm_importance_sampling_mode": "sequence_truncate"}, "top_k"),
        ({"top_k": 5, "vllm_importance_sampling_correction": False}, None),
        ({"top_k": 5, "use_vllm": False}, None),
    ],
)
def test_options_with_which_answers_lose_their_gradient(tmp_path, caplog, fields, name):
    """The effect: `tests/test_trainer_server.py`."""
    warn_of_lost_gradient(make_args(tmp_path, **{"use_vllm": True, "vllm_mode": "server", **fields}))
    assert len(caplog.messages) == (name is not None)
    assert name is None or f"`{name}` (" in caplog.messages[0].partition(" changes the probabilities")[0]


@pytest.mark.parametrize(
    ("ratio", "fields", "warns"),
    [
        (0.4, {}, True),
        (0.5, {}, False),
        (0.0, {"long_end_every": 4}, False),
        (0.0, {"long_end_patience": None}, False),
        (0.0, {"num_longest": 0}, False),
        (0.0, {"schedule": "grpo"}, False),
        (0.0, {"schedule": "tail_batching", "selection": "dual_end"}, True),
    ],
)
def test_long_ends_that_are_mostly_cut_are_told_once(caplog, ratio, fields, warns):
    settings = ScheduleSettings(**fields)
    settings.generation_batch_size = 32
    for count in range(10):
        warn_of_cut_long_ends(settings, [ratio] * count)
    assert len(caplog.messages) == warns
    assert not warns or f"was {ratio:.2f} over the first 8 rollouts: with 4 prompts per batch" in caplog.text


@pytest.mark.parametrize(("size", "is_split"), [(6, True), (8, False)])
def test_where_environments_of_a_group_are_on_several_processes_a_line_says_so(
    tmp_path, caplog, monkeypatch, size, is_split
):
    monkeypatch.setattr(DARTSGRPOConfig, "world_size", 2)
    fields = {"per_device_train_batch_size": size, "use_vllm": True, "vllm_mode": "server"}
    for turns in ("tools", "environment_factory"):
        args = make_args(tmp_path, **fields)
        check_arguments(args, None, turns)
        assert args.over_provisions == (turns == "tools" or not is_split)
    words = [message for message in caplog.messages if "make its 6 rows (`per_device_train_batch_size`" in message]
    assert len(words) == is_split
