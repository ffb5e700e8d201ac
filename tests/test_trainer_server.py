"""Tests the trainer with real vLLM servers: rollouts, weights, faults."""

import time
import urllib.error
from dataclasses import replace

import pandas as pd
import pytest
from transformers import TrainerCallback

from benchmarks.vllm_server import free_port
from tests.builders import ON_POLICY, letter_of, letters_dataset, make_args, make_trainer, record_batches, rollout_logs
from tests.engines.fake_server import answer, fake_server
from trl_darts.engines.batch import PromptBatch
from trl_darts.engines.preflight import ServerUnreachableError
from trl_darts.errors import ConfigurationError, GenerationError


pytestmark = pytest.mark.vllm


def server_args(output_dir, server, **kwargs):
    fields = {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": server.base_url,
        "vllm_group_port": free_port(),
        "max_completion_length": 96,
    }
    return make_args(output_dir, **{**fields, **kwargs})


def test_server_follows_the_trainer_and_rows_stay_together(server, model_dir, tmp_path):
    matches = []

    def reward(prompts, completion_ids, **kwargs):
        matches.append([prompt[-1] == letter_of(ids[0]) for prompt, ids in zip(prompts, completion_ids, strict=True)])
        return [float(len(ids) % 5) for ids in completion_ids]

    # A learning rate at which stale weights would be visible.
    args = server_args(tmp_path, server, max_steps=5, learning_rate=3e-3, **ON_POLICY)
    trainer = make_trainer(model_dir, args, reward_funcs=reward)
    batches = record_batches(trainer)
    trainer.train()
    logs = rollout_logs(trainer)
    assert len(logs) == 5
    assert all(matches[0])  # later ones are blurred by training
    for entry in logs:
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3
        assert entry["darts/sync/seconds"] > 0
        assert entry["darts/rollout/tokens_per_second"] > 0
    # The first batch is sampled with the initial weights of both sides. Later ones must differ from it.
    assert abs(logs[-1]["entropy"] - logs[0]["entropy"]) > 1e-3
    for batch in batches:
        assert batch["completion_ids"].shape[0] == 16
        assert batch["sampling_per_token_logps"].shape == batch["completion_ids"].shape


def test_over_provisioning_saturates_and_aborts(server, model_dir, tmp_path):
    fields = {"max_steps": 6, "per_device_train_batch_size": 40, "learning_rate": 0.0, "save_rollout_trace": True}
    fields["defer_unsettled_groups"] = False  # its first round would be a long one
    fields["min_num_generations"] = 4  # of an average budget of 6, so that others can have 8
    trainer = make_trainer(model_dir, server_args(tmp_path, server, **fields), train_dataset=letters_dataset(10))
    trainer.train()
    traces = pd.concat(pd.read_parquet(path) for path in sorted((tmp_path / "rollouts").glob("*.parquet")))
    saturated = traces[(traces.num_candidates == 8) & (traces.step > 0)]
    assert len(saturated)
    complete = saturated[saturated.finish_reason == "stop"].groupby(["step", "group"]).size()
    aborted = saturated[saturated.finish_reason == "abort"].groupby(["step", "group"]).size()
    assert (complete >= 4).any()
    assert aborted.sum() > 0
    assert (traces.groupby(["step", "group"]).selected.sum() == 4).all()


def test_seeded_run_repeats_its_decisions(server, model_dir, tmp_path):
    traces = []
    for name in ("first", "second"):
        fields = {
            "max_steps": 3,
            "save_rollout_trace": True,
            "generation_kwargs": {"seed": 3},
            "max_num_generations": 6,
            "tail_pruning": False,
            "long_end_patience": None,  # no aborts, whose timing would differ
        }
        args = server_args(tmp_path / name, server, **fields)
        make_trainer(model_dir, args).train()
        paths = sorted((tmp_path / name / "rollouts").glob("*.parquet"))
        traces.append(pd.concat(pd.read_parquet(path) for path in paths))
    pd.testing.assert_frame_equal(*(trace.drop(columns=["start_seconds", "end_seconds"]) for trace in traces))


def test_evaluation_runs_on_the_server_without_redundancy(server, model_dir, tmp_path):
    seen = []

    def reward(completion_ids, **kwargs):
        seen.append(len(completion_ids))
        return [0.0] * len(completion_ids)

    args = server_args(
        tmp_path,
        server,
        max_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=8,
        num_generations_eval=2,
    )
    make_trainer(model_dir, args, eval_dataset=letters_dataset(4), reward_funcs=reward).train()
    assert seen == [16, 8]


def test_structured_outputs_reach_the_server(server, model_dir, tmp_path):
    texts = []

    def reward(completions, **kwargs):
        texts.extend(completions)
        return [0.0] * len(completions)

    args = server_args(tmp_path, server, max_steps=1, vllm_structured_outputs_regex="(ab|ba){2}")
    make_trainer(model_dir, args, reward_funcs=reward).train()
    assert set(texts) <= {"abab", "abba", "baab", "baba"}


@pytest.mark.parametrize("mode", ["sequence_mask", "token_truncate"])
def test_an_option_whose_correction_leaves_no_gradient_gets_a_warning(server, model_dir, tmp_path, caplog, mode):
    """vLLM's probabilities are those of half of the tokens; the product of the ratios to the trainer's falls to 0."""
    fields = {"max_steps": 1, "top_p": 0.5, "vllm_importance_sampling_mode": mode, **ON_POLICY}
    fields["generation_kwargs"] = {"ignore_eos": True}  # a short answer would keep some of its weight

    def reward(completion_ids, **kwargs):
        return [float(row) for row in range(len(completion_ids))]  # no group without a spread, whatever is sampled

    trainer = make_trainer(model_dir, server_args(tmp_path, server, **fields), reward_funcs=reward)
    trainer.train()
    (entry,) = rollout_logs(trainer)
    assert entry["frac_reward_zero_std"] == 0
    warned = "`top_p` (0.5) changes the probabilities that vLLM samples from" in caplog.text
    assert warned == (mode == "sequence_mask")
    if warned:
        assert entry["sampling/importance_sampling_ratio/mean"] < 0.01
        assert entry["grad_norm"] < 0.01
    else:
        assert entry["sampling/importance_sampling_ratio/mean"] > 0.1
        assert entry["grad_norm"] > 0.02


def test_prompts_that_do_not_fit_are_named_by_index(server, model_dir, tmp_path):
    dataset = letters_dataset(8).map(
        lambda row, i: {"prompt": "x" * 500 * (i in (2, 5)) + row["prompt"]}, with_indices=True
    )
    words = r"2 prompts of the training data set are longer than 416 tokens \(prompt 2 has 502, prompt 5 has 502\)"
    with pytest.raises(ConfigurationError, match=words):
        make_trainer(model_dir, server_args(tmp_path, server), train_dataset=dataset)
    # Prompts that can't be checked before training are checked by batch.
    args = server_args(tmp_path, server, max_steps=2, accelerator_config={"dispatch_batches": False})
    trainer = make_trainer(model_dir, args, train_dataset=dataset.to_iterable_dataset())
    with pytest.raises(ConfigurationError, match=r"prompts of this batch are longer than 416 tokens"):
        trainer.train()


def test_a_later_turn_gets_the_tokens_that_are_left(server, model_dir, tmp_path):
    """A conversation with tool results may exceed the limit of prompts. TRL trains on what fits."""
    trainer = make_trainer(model_dir, server_args(tmp_path, server, generation_kwargs={"ignore_eos": True}))
    later_turn = trainer._engine.later_turn
    rows = later_turn(PromptBatch.alone([[5] * 20, [5] * 480, [5] * 511], 1))
    assert [len(ids) for ids in rows.completion_ids] == [96, 32, 1]
    with pytest.raises(ConfigurationError, match="prompt 1 has 512"):
        later_turn(PromptBatch.alone([[5] * 20, [5] * 512], 1))
    trainer.model.eval()
    with pytest.raises(ConfigurationError, match=r"longer than 416 tokens \(prompt 1 has 480\)"):
        trainer._generate_single_turn([[5] * 20, [5] * 480], None, {}, 1)


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_rollout_func_asks_the_server_as_with_trl(server, model_dir, tmp_path):
    """Generates turn by turn and prompt by prompt, with other groups than the trainer's."""
    lengths = []

    def rollout(prompts, trainer):
        output = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for prompt in prompts:
            ids = trainer.processing_class(text=prompt)["input_ids"]
            _, completions, logprobs, _ = trainer.vllm_generation.generate([ids], None, 1)
            lengths.append(len(completions[0]))
            for name, value in zip(output, (ids, completions[0], [row[0] for row in logprobs[0]]), strict=True):
                output[name].append(value)
        return output

    args = server_args(tmp_path, server, schedule="grpo", max_steps=2)
    trainer = make_trainer(model_dir, args, rollout_func=rollout)
    trainer.train()
    assert trainer.state.log_history[0]["darts/sync/logp_difference"] < 1e-5  # its sync is compared too
    assert len(lengths) == 2 * args.per_device_train_batch_size
    assert len(set(lengths)) > 1


def test_refused_before_the_model_is_loaded(server, model_dir, tmp_path):
    start = time.perf_counter()
    args = server_args(tmp_path, server, max_completion_length=512)
    with pytest.raises(ConfigurationError, match=r"`max_model_len` \(512\)"):
        make_trainer(model_dir, args)
    args = server_args(tmp_path, server, vllm_server_base_url="http://127.0.0.1:9", vllm_server_timeout=1.0)
    with pytest.raises(ServerUnreachableError, match=r"http://127\.0\.0\.1:9"):
        make_trainer(model_dir, args)
    args = server_args(tmp_path, server, weight_sync="nccl")
    with pytest.raises(ConfigurationError, match="nccl"):
        make_trainer(model_dir, args)
    assert time.perf_counter() - start < 60


@pytest.fixture
def keyed_server(second_server, monkeypatch):
    """The second server rejects requests without its key; `server` has none and accepts all."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    return second_server


def test_two_servers_share_the_work_and_the_weights(server, keyed_server, model_dir, tmp_path):
    urls, served = f"{server.base_url},{keyed_server.base_url}", [*map(served_requests, (server, keyed_server))]
    args = server_args(tmp_path, server, vllm_server_base_url=urls, max_steps=4, learning_rate=3e-3, **ON_POLICY)
    trainer = make_trainer(model_dir, args)
    trainer.train()
    assert len(rollout_logs(trainer)) == 4
    for entry in rollout_logs(trainer):
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3
    assert all(served_requests(s) > before for s, before in zip((server, keyed_server), served, strict=True))


@pytest.mark.parametrize("schedule", ["grpo", "darts"])
def test_tail_servers_take_over_with_the_weights_of_now(server, keyed_server, model_dir, tmp_path, schedule):
    # As soon as one has ended. Later, on a slow machine, the last ones may end before their abort.
    fields = {"vllm_tail_server_url": keyed_server.base_url, "tail_switch_at": 1000, "schedule": schedule}
    fields |= ON_POLICY
    before = served_requests(keyed_server)
    trainer = make_trainer(model_dir, server_args(tmp_path, server, max_steps=4, learning_rate=3e-3, **fields))
    trainer.train()
    logs = rollout_logs(trainer)
    assert sum(entry["darts/tail/switches"] for entry in logs) >= 3
    assert sum(entry["darts/tail/moved_candidates"] for entry in logs) > 4
    assert served_requests(keyed_server) > before
    for entry in logs:
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3
        assert entry["darts/rollout/resumed_candidates"] == 0


@pytest.mark.parametrize("key", [None, "wrong"])
@pytest.mark.parametrize(
    ("path", "payload"),
    [
        *[(path, None) for path in ("/server_info", "/get_world_size", "/weight_info", "/metrics", "/v1/models")],
        *[(path, {}) for path in ("/pause", "/abort_requests", "/collective_rpc", "/start_weight_update", "/sleep")],
    ],
)
def test_every_endpoint_asks_for_the_key(second_server, path, payload, key):
    stranger = replace(second_server, api_key=key)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        stranger.request(path, payload)
    assert stranger.healthy()  # health checks need no key
    assert second_server.request("/get_world_size") == {"world_size": 1}


def test_a_wrong_key_is_refused(keyed_server, model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "wrong")
    with pytest.raises(GenerationError, match=r"401: The server's key .* VLLM_API_KEY"):
        make_trainer(model_dir, server_args(tmp_path, keyed_server))


def test_servers_come_and_go_between_steps(server, keyed_server, model_dir, tmp_path):
    """A server joins after two steps, with current weights. The first one leaves after four."""
    first, second, served = server, keyed_server, [served_requests(keyed_server)]
    last_of_first = []

    class ComeAndGo(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            generation = trainer.vllm_generation
            if state.global_step == 2:
                with pytest.raises(ConfigurationError, match="must not be one of the servers already"):
                    generation.add_server(first.base_url)
                with pytest.raises(ConfigurationError, match="must be one of several"):
                    generation.remove_server(first.base_url)
                served.append(served_requests(second))
                generation.add_server(second.base_url + "/")
            if state.global_step == 4:
                served.append(served_requests(second))
                generation.remove_server(first.base_url)
                last_of_first.append(served_requests(first))

    args = server_args(tmp_path, first, max_steps=6, learning_rate=3e-3, **ON_POLICY)
    trainer = make_trainer(model_dir, args, callbacks=[ComeAndGo()])
    trainer.train()
    served.append(served_requests(second))
    assert served[0] == served[1] < served[2] < served[3]  # it got no requests before
    assert last_of_first == [served_requests(first)]  # the first one got none after it had left
    logs = rollout_logs(trainer)
    assert len(logs) == 6
    for entry in logs:
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3
        assert entry["darts/rollout/resumed_candidates"] == 0


def test_a_server_that_does_not_fit_is_refused(server, model_dir, tiny_model_dir, tmp_path):
    trainer = make_trainer(model_dir, server_args(tmp_path, server, max_steps=1, vllm_server_timeout=2.0))
    generation = trainer.vllm_generation
    assert trainer._admission.budget.num_slots == generation.facts.max_num_seqs > 0
    with pytest.raises(ServerUnreachableError):
        generation.add_server(f"http://127.0.0.1:{free_port()}")
    config = {"model_config": {"logprobs_mode": "processed_logprobs", "model": str(tiny_model_dir)}}
    answers = {
        "GET /health": {},
        "GET /server_info": {"vllm_config": config},
        "GET /v1/models": {"data": [{"id": "other", "max_model_len": 512}]},
    }
    with fake_server({route: lambda _, a=payload: answer(a) for route, payload in answers.items()}) as url:
        with pytest.raises(ConfigurationError, match=rf"{url} serves another model"):
            generation.add_server(url)
        assert list(generation.engine.states()) == generation.vllm_client.base_urls == [server.base_url]
        trainer.train()


def served_requests(server) -> float:
    return server.metric("vllm:request_success_total")
