"""Servers that can't serve a run are rejected before the model is loaded, with the setting to change."""

import copy
import socket
import threading
from contextlib import contextmanager, suppress

import pytest
from aiohttp import web
from transformers import AutoConfig, Qwen2Config

from tests.builders import make_args
from tests.engines.fake_server import HEALTHY, answer, completion, fake_server
from trl_darts.engines import VLLMServerEngine, preflight, waiting
from trl_darts.engines.connection import ServerSettings, connect, server_settings
from trl_darts.engines.preflight import Requirements, ServerUnreachableError, check_server
from trl_darts.engines.sampling import request_body
from trl_darts.engines.waiting import Deadlines
from trl_darts.errors import ConfigurationError


def needs(config, **kwargs) -> Requirements:
    defaults = {"max_completion_length": 256, "processed_logprobs": True, "weight_transfer": "nccl", "timeout_s": 5.0}
    return Requirements(model_config=config, **{**defaults, **kwargs})


def check(url, requirements):
    engine = VLLMServerEngine([url])
    try:
        return engine.query(lambda server: check_server(server, requirements))[url]
    finally:
        engine.close()


OPTIONS = (
    *("model", "max_tokens", "min_tokens", "top_p", "top_k", "min_p"),
    *("logit_bias", "logprobs", "structured_outputs", "seed"),
)


def routes(vllm_config, max_model_len=1024, vocabulary=128, without=(), asked=None):
    asked = [] if asked is None else asked  # bodies of its completion requests

    async def health(request):
        return await answer({})

    async def info(request):
        return await answer({"vllm_config": vllm_config})

    async def models(request):
        return await answer({"data": [{"id": "served", "max_model_len": max_model_len}]})

    async def completions(request):
        body = await request.json()
        asked.append(body)
        if "1000000000" in str(body.get("logit_bias")):
            return await answer({"error": {"message": f"out-of-vocab token ids. Vocabulary size: {vocabulary}"}}, 400)
        if body.get("top_p", 1.0) > 1.0:
            return await answer({"error": {"message": f"top_p must be in (0, 1], got {body['top_p']}."}}, 400)
        if body.get("structured_outputs") == "abc":  # vLLM does not expect a string
            return await answer({"error": {"message": "Internal Server Error"}}, 500)
        return web.json_response(completion([5], "length"))

    async def openapi(request):
        return web.json_response(
            {"components": {"schemas": {"CompletionRequest": {"properties": dict.fromkeys(OPTIONS)}}}}
        )

    async def version(request):
        return await answer({"version": "0.31.0"})

    table = {
        "GET /health": health,
        "GET /version": version,
        "GET /server_info": info,
        "GET /v1/models": models,
        "POST /v1/completions": completions,
        "GET /openapi.json": openapi,
    }
    return {route: handler for route, handler in table.items() if route not in without}


def test_server_without_the_endpoints_for_images_is_refused_if_there_are_images():
    async def openapi(request):
        return await answer({"paths": {"/v1/completions": {}, "/inference/v1/generate": {}}})

    with fake_server({**routes(HEALTHY), "GET /openapi.json": openapi}) as url:
        check(url, needs(CONFIG))
        with pytest.raises(ConfigurationError, match=r"'/v1/chat/completions/render'.*`--enable-scale-out`"):
            check(url, needs(CONFIG, images=True))


def changed(**fields):
    config = copy.deepcopy(HEALTHY)
    config["model_config"].update(fields.pop("model_config", {}))
    return {**config, **fields}


CONFIG = Qwen2Config(vocab_size=128)


def test_good_server_passes():
    with fake_server(routes(HEALTHY)) as url:
        facts = check(url, needs(CONFIG))
    assert (facts.model, facts.max_model_len, facts.max_num_seqs) == ("served", 1024, 256)


@pytest.mark.parametrize(("second", "slots"), [(HEALTHY, 512), ({**HEALTHY, "scheduler_config": None}, None)])
def test_slots_of_all_servers_count_together(second, slots):
    with fake_server(routes(HEALTHY, 900)) as one, fake_server(routes(second)) as other:
        engine, facts = connect(ServerSettings([one, other], None, Deadlines(), None, needs(CONFIG)))
        engine.close()
    assert (facts.max_model_len, facts.max_num_seqs) == (900, slots)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"vllm_config": HEALTHY, "without": ("GET /server_info",)}, "VLLM_SERVER_DEV_MODE=1"),
        (
            {"vllm_config": HEALTHY, "max_model_len": 256},
            r"`max_model_len` \(256\), which must be greater than .* \(256\)",
        ),
        ({"vllm_config": HEALTHY, "vocabulary": 64}, "vocabulary of 64 tokens, but the trainer's model has 128"),
        (
            {"vllm_config": changed(model_config={"logprobs_mode": "raw_logprobs"})},
            "--logprobs-mode processed_logprobs",
        ),
        ({"vllm_config": changed(weight_transfer_config=None)}, "no weight-transfer engine, and .* needs 'nccl'"),
        (
            {"vllm_config": changed(parallel_config={"_api_process_count": 2})},
            r"has `--api-server-count` \(2\), which must be 1",
        ),
        ({"vllm_config": changed(weight_transfer_config={"backend": "ipc"})}, "backend 'ipc', and .* needs 'nccl'"),
    ],
)
def test_refused(kwargs, words):
    with fake_server(routes(**kwargs)) as url, pytest.raises(ConfigurationError, match=words):
        check(url, needs(CONFIG))


def test_what_the_training_does_not_need_is_not_asked_for():
    config = changed(model_config={"logprobs_mode": "raw_logprobs"}, weight_transfer_config=None)
    with fake_server(routes(config)) as url:
        check(url, needs(CONFIG, processed_logprobs=False, weight_transfer=None))


def test_another_model_is_refused(tiny_model_dir):
    config = changed(model_config={"model": str(tiny_model_dir)})
    other = AutoConfig.from_pretrained(tiny_model_dir)
    other.num_hidden_layers += 1
    with fake_server(routes(config)) as url:
        check(url, needs(AutoConfig.from_pretrained(tiny_model_dir)))
        with pytest.raises(ConfigurationError, match=r"serves another model .*`num_hidden_layers`"):
            check(url, needs(other))


@pytest.mark.parametrize("name", ["min_p", "logit_bias"])
def test_what_vllm_refuses_where_it_verifies_drafts(name):
    drafting = changed(speculative_config={"method": "custom_class"})
    with fake_server(routes(drafting)) as url:
        assert check(url, needs(CONFIG, sampling={"min_p": 0.0, "logit_bias": None})).drafts
        with pytest.raises(
            ConfigurationError, match=rf"`{name}` \(0.1\). Leave it out, or .* without `--speculative`"
        ):
            check(url, needs(CONFIG, sampling={name: 0.1}))
    with fake_server(routes(HEALTHY)) as url:
        assert not check(url, needs(CONFIG, sampling={name: 0.1})).drafts


def test_a_name_that_the_server_would_ignore_is_refused_with_the_nearest():
    with fake_server(routes(HEALTHY)) as url:
        with pytest.raises(ConfigurationError, match=r"has 'top_kk' \(5\), which is no option .*Did you mean `top_k`"):
            check(url, needs(CONFIG, sampling={"top_k": 0, "top_kk": 5}))
        with pytest.raises(ConfigurationError, match=r"has 'do_it' \(True\), which is no option .*Leave it out\."):
            check(url, needs(CONFIG, sampling={"do_it": True}))
    with fake_server(routes(HEALTHY, without=("GET /openapi.json",))) as url:  # it does not say what it knows
        check(url, needs(CONFIG, sampling={"top_kk": 5}))


def test_a_value_that_the_server_refuses_is_refused_before_the_first_rollout():
    asked = []
    with fake_server(routes(HEALTHY, asked=asked)) as url:
        check(url, needs(CONFIG, sampling={"top_p": 0.9, "max_tokens": 256, "min_tokens": 20}))
        assert {name: asked[-1][name] for name in ("top_p", "max_tokens", "min_tokens")} == {
            "top_p": 0.9, "max_tokens": 1, "min_tokens": 1
        }  # fmt: skip
        with pytest.raises(ConfigurationError) as error:
            check(url, needs(CONFIG, sampling={"top_p": 7.0, "top_k": 5}))
        words = "would refuse each request: " + url + " answered 400: top_p must be in (0, 1], got 7.0. "
        assert str(error.value).endswith(words + "Correct `top_p` (7.0).")
        for value, message in (("abc", "answered 500: Internal Server Error"), ({5}, "Type is not JSON serializable")):
            with pytest.raises(ConfigurationError) as error:
                check(url, needs(CONFIG, sampling={"top_p": 1.0, "structured_outputs": value, "top_k": 5}))
            assert message in str(error.value)
            assert str(error.value).endswith(f"Correct `structured_outputs` ({value!r}).")
        check(url, needs(CONFIG, sampling={"logit_bias": {5: 1.0}}))
        assert asked[-1]["logit_bias"] == {"5": 1.0}


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"top_kk": 5}, r"'top_kk' \(5\), which is no option of the vLLM server at .* Did you mean `top_k`"),
        ({"do_sample": True}, r"'do_sample' \(True\), which is no option of the vLLM server"),
        ({"top_k": "five"}, r"body.top_k.*valid integer.* Correct `top_k` \('five'\)"),
        ({"top_p": 7.0}, r"top_p must be in \(0, 1\], got 7.0.* Correct `top_p` \(7.0\)"),
        ({"stop": 5}, r"body.stop.* Correct `stop` \(5\)"),
        ({"stop_token_ids": [9999]}, r"out-of-vocab token ids.* Correct `stop_token_ids` \(\[9999\]\)"),
        ({"allowed_token_ids": []}, r"Correct `allowed_token_ids` \(\[\]\)"),
        ({"structured_outputs": {"regex": "("}, "top_k": 5}, r"invalid regex.* Correct `structured_outputs` \(\{"),
        ({"structured_outputs": "abc", "top_k": 5}, r"Correct `structured_outputs` \('abc'\)"),
        ({"min_tokens": 500, "max_tokens": 256}, r"Correct `min_tokens` \(500\), `max_tokens` \(256\)"),
        ({"max_tokens": 0}, r"max_tokens must be at least 1.* Correct `max_tokens` \(0\)"),
    ],
)
def test_options_that_a_real_server_ignores_or_refuses(vllm_server, markov_model_dir, sampling, words):
    """`stop_token_ids` and further ones are checked after `logit_bias`, so that request alone would not do."""
    config = AutoConfig.from_pretrained(markov_model_dir)
    with pytest.raises(ConfigurationError, match=f"(?s){words}"):
        check(vllm_server.base_url, needs(config, weight_transfer=None, sampling=sampling))


def test_unreachable(monkeypatch, caplog):
    monkeypatch.setattr(preflight, "RETRY_INTERVAL_S", 0.1)
    monkeypatch.setattr(waiting, "INTERVAL_S", 0.3)
    words = r"http://127.0.0.1:9 after `vllm_server_timeout` \(1 s\): nothing listens there\. Make sure"
    with pytest.raises(ServerUnreachableError, match=words):
        check("http://127.0.0.1:9", needs(CONFIG, timeout_s=1.0))
    words = "Waiting for the vLLM server at http://127.0.0.1:9: nothing listens there ("
    assert 2 <= len(caplog.messages) <= 3
    assert all(message.startswith(words) and message.endswith(" of 1 s)") for message in caplog.messages)


def not_http(connection):
    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")


@contextmanager
def listener(answer_to):
    """Answers each connection in a way that is not HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as sock:

        def listen():
            with suppress(OSError):
                while True:
                    connection, _ = sock.accept()
                    with connection:
                        answer_to(connection)

        threading.Thread(target=listen, daemon=True).start()
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        sock.shutdown(socket.SHUT_RDWR)


async def web_page(request):
    return web.Response(text="<html>It works!</html>", content_type="text/html")


async def forbidden(request):
    return web.Response(status=403, text="Forbidden")


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (lambda: listener(not_http), "it does not speak HTTP"),
        (lambda: fake_server({"GET /health": web_page}), "answered /health with invalid JSON: b'<html>"),
        (lambda: fake_server({"GET /health": forbidden}), "answered 403: Forbidden"),
        (lambda: fake_server({}), "it has no `/version`"),
    ],
    ids=["no HTTP", "a page", "forbidden", "another server"],
)
def test_what_is_no_vllm_server_is_not_waited_for(server, reason):
    with server() as url, pytest.raises(ConfigurationError) as error:
        check(url, needs(CONFIG, timeout_s=240.0))
    assert str(error.value).startswith("`vllm_server_base_url` must be the address of vLLM servers, and http")
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_weights_need_a_directory_that_is_there(tiny_model_dir, tmp_path):
    args = make_args(tmp_path, use_vllm=True, vllm_mode="server", weight_sync_dir=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigurationError, match=r"`weight_sync_dir` \('.*nowhere'\) must be a directory that exists"):
        args.check_start()
    assert list(tmp_path.glob("nowhere")) == []
    (tmp_path / "nowhere").mkdir()
    assert server_settings(args, str(tiny_model_dir)).directory.roots[0].parent == tmp_path / "nowhere"


def test_server_that_starts_late_is_waited_for(monkeypatch):
    monkeypatch.setattr(preflight, "RETRY_INTERVAL_S", 0.1)
    calls = []

    async def health(request):
        calls.append(1)
        return await answer({}, 200 if len(calls) > 2 else 503)

    with fake_server({**routes(HEALTHY), "GET /health": health}) as url:
        check(url, needs(CONFIG, timeout_s=30.0))
    assert len(calls) == 3


@pytest.mark.vllm
def test_real_server(vllm_server, markov_model_dir, tmp_path):
    config = AutoConfig.from_pretrained(markov_model_dir)
    args = make_args(tmp_path, use_vllm=True, vllm_mode="server", generation_kwargs={"seed": 0, "min_tokens": 3})
    sampling = request_body("", args, None)
    facts = check(vllm_server.base_url, needs(config, weight_transfer=None, sampling=sampling))
    assert (facts.model, facts.max_model_len) == (vllm_server.model, 2048)
    assert facts.max_num_seqs > 0
    config.vocab_size = 127  # what the server says of it is read from an error message
    with pytest.raises(ConfigurationError, match="vocabulary of 128 tokens, but the trainer's model has 127"):
        check(vllm_server.base_url, needs(config, weight_transfer=None))


def connected(main, tail, **settings):
    own = ServerSettings([main, tail], None, Deadlines(), None, needs(CONFIG), (tail,), **settings)
    engine, facts = connect(own)
    engine.close()
    return facts


def test_a_tail_server_holds_what_the_main_servers_hold():
    with fake_server(routes(HEALTHY, 900)) as main, fake_server(routes(HEALTHY, 1000)) as tail:
        facts = connected(main, tail)
        assert (facts.max_model_len, facts.max_num_seqs) == (900, 256)  # the tail has no slots for a batch
        with pytest.raises(ConfigurationError, match=rf"{main} has `max_model_len` \(900\), and the others 1000"):
            connected(tail, main)
    other = routes(HEALTHY, vocabulary=64)
    with fake_server(routes(HEALTHY)) as main, fake_server(other) as tail, pytest.raises(ConfigurationError) as error:
        connected(main, tail)
    assert f"{tail} serves 'served' with a vocabulary of 64 tokens" in str(error.value)


def test_servers_on_the_same_gpus_must_be_able_to_sleep():
    with fake_server(routes(HEALTHY)) as url, pytest.raises(ConfigurationError, match="`--enable-sleep-mode`"):
        check(url, needs(CONFIG, sleep_mode=True))
    with fake_server(routes(changed(model_config={"enable_sleep_mode": True}))) as url:
        check(url, needs(CONFIG, sleep_mode=True))
