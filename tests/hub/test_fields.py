"""What may stand in a published config: each field has been looked at, and each value is."""

from pathlib import Path

import pytest

from tests.hub.stand_in import TOKEN
from trl_darts.errors import ConfigurationError
from trl_darts.hub.fields import KEYS, PUBLIC, WITHHELD, known_fields
from trl_darts.hub.files import MAX_BYTES, check_published, publishable, read_yaml


CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def test_every_field_is_in_one_class():
    unclassified = known_fields().keys() - PUBLIC - WITHHELD.keys()
    assert sorted(unclassified) == [], "new fields: may they be published? See trl_darts/hub/fields.py"
    gone = (PUBLIC | WITHHELD.keys()) - known_fields().keys()
    assert gone == {"env"}, "no fields any more"
    assert PUBLIC & WITHHELD.keys() == set()


def test_every_public_dictionary_has_its_keys():
    dictionaries = {name for name, field in known_fields().items() if "dict" in str(field.type)}
    assert dictionaries - WITHHELD.keys() == KEYS.keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("output_dir", "out"),
        ("resume_from_checkpoint", "https://example.com/checkpoint"),
        ("latency_curve", "latency.json"),
        ("vllm_server_base_url", "http://attacker"),
        ("vllm_server_host", "attacker"),
        ("vllm_api_key", "key"),
        ("hub_token", TOKEN),
        ("push_to_hub", True),
        ("report_to", ["wandb"]),
        ("log_completions_hub_repo", "attacker/log"),
        ("trust_remote_code", True),
        ("model_init_kwargs", {"trust_remote_code": True}),
        ("deepspeed", "ds.json"),
        ("fsdp_config", {"fsdp_version": 2}),
        ("accelerator_config", {"split_batches": True}),
        ("optim_args", "a=b"),
        ("env", {"LD_PRELOAD": "evil.so"}),
    ],
)
def test_withheld_fields(name, value):
    with pytest.raises(ConfigurationError, match=rf"`{name}` must not stand in a published config: it is "):
        check_published({name: value})
    assert publishable({name: value, "seed": 1}) == ({"seed": 1}, [name])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("num_generation", 4, r"`num_generation` is no field .* Did you mean `num_generations`"),
        ("zzz", 4, r"`zzz` is no field .* TRL\.$"),
        ("num_generations", "eight", r"`num_generations` \('eight'\) must be of type .*int.*, not str"),
        ("use_vllm", 1, r"`use_vllm` \('1'\) must be of type bool, not int"),
        ("save_strategy", False, r"`save_strategy` \('False'\) must be of type"),
        ("learning_rate", [1], r"`learning_rate` \('\[1\]'\) must be of type float, not list"),
        ("model_name_or_path", "/data/model", r"`model_name_or_path` \('/data/model'\) names a path"),
        ("model_name_or_path", "~/model", r"`model_name_or_path` \('~/model'\) names a path"),
        ("model_name_or_path", "a/b/c", r"`model_name_or_path` \('a/b/c'\) must be a name on the Hub"),
        ("dataset_name", "https://example.com/data", r"`dataset_name` .* must be a name on the Hub"),
        ("dataset_name", "../data", r"`dataset_name` \('../data'\) names a path"),
        ("reward_funcs", ["os.system"], r"`reward_funcs` \('os.system'\) must be a name of `trl.rewards`"),
        ("attn_implementation", "evil/kernel", r"`attn_implementation` \('evil/kernel'\) must be one of transformers"),
        ("generation_kwargs", {"custom_generate": "evil/code"}, r"`generation_kwargs\['custom_generate'\]` must not"),
        ("generation_kwargs", {"stop": [["x"]]}, r"`generation_kwargs` must be a plain value"),
        ("generation_kwargs", '{"custom_generate": "evil/code"}', r"`generation_kwargs` .* must be a mapping"),
        ("chat_template_kwargs", {"token": "x"}, r"`chat_template_kwargs\['token'\]` must not"),
        ("system_prompt", "see /home/jane/notes", r"`system_prompt` \('see /home/jane/notes'\) names a path"),
        ("system_prompt", "http://jane:pw@host/", r"`system_prompt` holds what looks like a secret \(a URL with"),
        ("system_prompt", "sk-" + "a1" * 12, r"`system_prompt` holds what looks like a secret \(sk-…\)"),
        ("system_prompt", "Bearer " + "a1" * 12, r"`system_prompt` holds what looks like a secret \(a bearer"),
        ("generation_kwargs", {"stop": [TOKEN]}, r"`generation_kwargs` holds what looks like a secret \(hf_…\)"),
        ("lora_target_modules", ["q_proj", TOKEN], r"`lora_target_modules` holds what looks like a secret"),
    ],
)
def test_refused(name, value, words):
    for refuse in (check_published, publishable):
        with pytest.raises(ConfigurationError, match=words) as refused:
            refuse({name: value})
        assert "\n" not in str(refused.value)
        assert TOKEN not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_name_or_path", "Qwen/Qwen2.5-3B"),
        ("dataset_name", "tiny_reasoner"),
        ("reward_funcs", ["accuracy_reward", "get_soft_overlong_punishment"]),
        ("attn_implementation", "kernels-community/flash-attn2"),
        ("attn_implementation", "sdpa"),
        ("system_prompt", "Think in <think> </think>, true and/or false, then answer: https://example.com ~ 1/2."),
        ("system_prompt", "/no_think"),
        ("generation_kwargs", {"stop": ["</answer>"], "min_tokens": 2}),
        ("gradient_checkpointing_kwargs", {"use_reentrant": False}),
        ("vllm_structured_outputs_regex", r"\d+ sk-\w"),
        ("long_end_patience", 3.0),
        ("lr_scheduler_type", "cosine"),
    ],
)
def test_allowed(name, value):
    assert publishable({name: value}) == ({name: value}, [])


def test_what_stays_and_is_as_by_default_need_not_be_named():
    assert publishable({"report_to": "none", "push_to_hub": False, "hub_strategy": "end"}) == ({}, ["hub_strategy"])


def test_a_word_in_place_of_a_number():
    assert check_published({"long_end_patience": "auto"}) == {"long_end_patience": "auto"}


def test_numbers_and_defaults():
    data = {"learning_rate": "2e-5", "num_train_epochs": 1, "epsilon": 0.2, "beta": 0, "seed": 42}
    assert publishable(data) == ({"learning_rate": 2e-5, "num_train_epochs": 1.0}, [])


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_our_recipes_can_be_published(path):
    recipe = read_yaml(path)
    if path.stem == "tiny_reasoner":  # its model and its reward are files of this repository
        del recipe["model_name_or_path"], recipe["reward_funcs"]
    public, left_out = publishable(recipe)
    assert check_published(public) == public
    assert set(left_out) <= {"output_dir", "report_to", "vllm_server_base_url", "run_name"}


def test_a_local_model_is_no_name_of_the_hub(tmp_path, monkeypatch):
    (tmp_path / "outputs" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"`model_name_or_path` \('outputs/model'\) .* is a path here"):
        publishable({"model_name_or_path": "outputs/model"})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"!!python/object/apply:os.system ['touch ran']", "must be YAML without tags of Python"),
        (b"a: [", "must be YAML"),
        (b"\xff\xfe\x00", "must be YAML"),
        (b"[" * 20_000, "must be YAML"),
        (b"- a\n- b", "must be a YAML mapping"),
        (b"1: 2", "must be a YAML mapping"),
        (b"a: b\n" * MAX_BYTES, "must be a config of at most 65536 bytes"),
    ],
)
def test_not_a_config(tmp_path, monkeypatch, content, words):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=words) as refused:
        read_yaml(path)
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == [path]


def test_no_such_file(tmp_path):
    with pytest.raises(ConfigurationError, match=r"none.yaml` must be a file that can be read: No such file"):
        read_yaml(tmp_path / "none.yaml")
