"""What may stand in a published config: each field has been looked at, and each value is."""

from pathlib import Path

import pytest

from tests.hub.stand_in import TOKEN
from trl_darts.errors import ConfigurationError
from trl_darts.field_types import hints, known_fields
from trl_darts.hub.fields import KEYS, PUBLIC, WITHHELD
from trl_darts.hub.files import MAX_BYTES, check_published, dump, publishable, read_yaml
from trl_darts.hub.values import check_text


CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def test_every_field_is_in_one_class():
    unclassified = known_fields().keys() - PUBLIC - WITHHELD.keys()
    assert sorted(unclassified) == [], "new fields: may they be published? See trl_darts/hub/fields.py"
    gone = (PUBLIC | WITHHELD.keys()) - known_fields().keys()
    assert gone == {"env"}, "no fields any more"
    assert PUBLIC & WITHHELD.keys() == set()


def test_every_public_dictionary_has_its_keys():
    dictionaries = {name for name, hint in hints().items() if "dict" in str(hint) and name in known_fields()}
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


def test_a_boolean_where_trl_takes_one():
    assert check_published({"scale_rewards": False}) == {"scale_rewards": False}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("num_generation", 4, r"'num_generation' is no field .* Did you mean `num_generations`"),
        ("zzz", 4, r"'zzz' is no field .* TRL\.$"),
        ("num_generations", "eight", r"`num_generations` \('eight'\) must be of type .*int.*, not str"),
        ("use_vllm", 3, r"`use_vllm` \(3\) must be of type bool, not int"),
        ("num_generations", 8.5, r"`num_generations` \(8.5\) must be of type int \| None, not float"),
        ("num_generations", True, r"`num_generations` \(True\) must be of type"),
        ("reward_weights", ["x"], r"`reward_weights` .* must be of type list\[float\] \| None, not list"),
        ("reward_funcs", "accuracy_reward", r"`reward_funcs` .* must be of type list\[str\] \| None, not str"),
        ("dataset_config", False, r"`dataset_config` \(False\) must be of type str \| None, not bool"),
        ("save_strategy", False, r"`save_strategy` \(False\) must be of type"),
        ("optim", "nothing", r"`optim` \('nothing'\) must be one of 'adamw_torch', "),
        ("learning_rate", [1], r"`learning_rate` \(\[1\]\) must be of type float, not list"),
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
        ("learning_rate", TOKEN, r"`learning_rate` holds what looks like a secret \(hf_…\)"),
        (TOKEN, 1, r"^a field's name holds what looks like a secret"),
        ("generation_kwargs", {TOKEN: 1}, r"`generation_kwargs` holds what looks like a secret"),
        ("num_generations", [{"a": {"b": TOKEN}}], r"`num_generations` holds what looks like a secret"),
        ("zzz\n\x1b[31mred", 1, r"^'zzz\\n\\x1b\[31mred' is no field"),
        ("dataset_name", "text", r"`dataset_name` \('text'\) .* datasets reads local files by this one"),
        ("dataset_name", "json", r"datasets reads local files by this one"),
        ("dataset_name", "imagefolder", r"datasets reads local files by this one"),
        ("dataset_config", "data/alice/x.json", r"`dataset_config` .* must be the name of a subset, without"),
    ],
)
def test_refused(name, value, words):
    for refuse in (check_published, publishable):
        with pytest.raises(ConfigurationError, match=words) as refused:
            refuse({name: value})
        assert "\n" not in str(refused.value)
        assert TOKEN not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("VLLM_API_KEY=supersecret123456", "a name and its value"),
        ('{"password": "hunter2hunter2"}', "a name and its value"),
        ("https://tok123@host", "a URL with an account"),
        ("nvapi-" + "a1" * 12, "nvapi-…"),
        ("sk_live_" + "a1" * 12, "sk_live_…"),
        ("x_" + TOKEN, "hf_…"),
        ("_AKIA" + "A1" * 8, "AKIA…"),
    ],
)
def test_secrets(text, form):
    with pytest.raises(ConfigurationError, match=rf"`measured` holds what looks like a secret \({form}\)") as refused:
        check_text("measured", text)
    assert text not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("see /data/alice/secret.txt", "a path"),
        ("see /nfs/home2/alice", "a path"),
        ("see C:\\Users\\alice\\x", "a path"),
        ("see C:/Users", "a path"),
        ("see ~/keys", "a path"),
        ("see '/opt/alice'", "a path"),
        ("hello\n/opt/alice/x", "a path"),
        ("log=/scratch/x", "a path"),
        ("see file:///x", "a path"),
        ("see ../x", "a path"),
        ("http://10.0.1.5:8000/v1", "a server's address"),
        ("http://10.0.1.5/v1", "a server's address"),
        ("at 10.0.1.5:8000", "a server's address"),
        ("https://node7:29500", "a server's address"),
        ("http://localhost/v1", "a server's address"),
    ],
)
def test_places_within_a_text(text, what):
    for name in ("measured", "system_prompt"):
        with pytest.raises(ConfigurationError, match=rf"`{name}` .* names {what}"):
            check_text(name, text)


@pytest.mark.parametrize(
    "text",
    [
        r"Please reason step by step, and put your final answer within \boxed{}.",
        "Answer: \\boxed{\\frac{1}{2}} and/or A:\\frac{1}{2}, about ~1/2 or 1/2 m/s, TCP/IP",
        "<think>\n...\n</think>\n<answer>\n...\n</answer>",
        "Do not think. /no_think",
        "https://huggingface.co/papers/2605.30859",
        "Answer key: photosynthesis. The token: <answer>. Set `key=value`. The secret: thoroughly check 12 times.",
        r"(?:key|token)=\d{1,12}[a-z]+://\S+ sk-\w (\d+)/(\d+) ~?/\w+ \d{1,3}(?:\.\d{1,3}){3}:\d",
        "write to team@example.com at 10:30, ratio 3:4, version 1.2.3.4",
    ],
)
def test_no_false_alarms(text):
    check_text("system_prompt", text)
    assert publishable({"vllm_structured_outputs_regex": text}) == ({"vllm_structured_outputs_regex": text}, [])


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


@pytest.mark.parametrize(
    ("name", "value", "as_parsed"),
    [
        ("reward_weights", [1, "2e-1"], [1.0, 0.2]),
        ("lora_target_modules", "all-linear", "all-linear"),
        ("num_generations", "16", 16),
        ("use_vllm", "yes", True),
        ("use_vllm", 1, True),
        ("dataset_config", 2024, "2024"),
        ("long_end_patience", 3, 3.0),
        ("max_num_generations", None, None),
    ],
)
def test_values_are_what_the_parser_makes_of_them(name, value, as_parsed):
    checked = check_published({name: value})[name]
    assert (checked, type(checked)) == (as_parsed, type(as_parsed))


def test_what_is_published_has_no_aliases(tmp_path):
    names = ["q_proj"]
    path = tmp_path / "config.yaml"
    path.write_text(dump({"lora_target_modules": names, "lora_modules_to_save": names}))
    assert read_yaml(path) == {"lora_target_modules": names, "lora_modules_to_save": names}


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
    with pytest.raises(ConfigurationError, match=r"`dataset_name` \('outputs/model'\) .* is a path here"):
        check_published({"dataset_name": "outputs/model"})  # of others: the directory here would win


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"!!python/object/apply:os.system ['touch ran']", "must be plain YAML: it must have no tags"),
        (b"a: !!binary aGVsbG8=", r"must have no tags \(`!name`\) in line 1"),
        (b"a: &a [x]\nb: *a", r"must have no aliases \(`\*name`\) in line 2"),
        (b"a: [", "must be plain YAML: expected the node content"),
        (b"\xff\xfe\x00", "it is no text in UTF-8"),
        (b"[" * 20_000, "it is nested too deeply"),
        (b"- a\n- b", "must be a YAML mapping of names to values, not a list"),
        (b"", "must be a YAML mapping of names to values, not a NoneType"),
        (b"1: 2", "each key must be a string in line 1"),
        (b"a:\n  yes: 2", "each key must be a string in line 2"),
        (b"a: 1\na: 2", "each key must stand there once in line 2"),
        (b"a: 0x" + b"f" * 60_000, "an integer must have at most 64 bits in line 1"),
        (b"a: " + b"9" * 6_000, "a number, a date or a character in it is none"),
        (b"a: 2024-13-45", "a number, a date or a character in it is none"),
        (b"a: b: " + TOKEN.encode(), "mapping values are not allowed here in line 1"),
        (b"a: b\n" * MAX_BYTES, "must have at most 65536 bytes"),
    ],
)
def test_not_a_config(tmp_path, monkeypatch, content, words):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=words) as refused:
        read_yaml(path)
    assert "\n" not in str(refused.value)
    assert TOKEN not in str(refused.value)
    assert list(tmp_path.iterdir()) == [path]


def test_no_such_file(tmp_path):
    with pytest.raises(ConfigurationError, match=r"none.yaml'\) must be a file that can be read: No such file"):
        read_yaml(tmp_path / "none.yaml")
