"""Vision-language models: each candidate sees its prompt's images, whatever else is in the batch."""

import pytest
import torch
from datasets import Dataset, Features, Image, List, Value
from peft import LoraConfig
from transformers import AutoModelForImageTextToText

from tests.builders import record_batches
from tests.trl_parity.common import make_args, make_trainer, params_of, step_logs, train, variety
from tests.trl_parity.vlms import load_processor, make_vlm, picture
from tests.zoo import tool_call


KINDS = ["llava", "gemma3", "qwen2_vl"]
SIZES = [(16, 16), (24, 16), (32, 24), (16, 32)]


def messages(index):
    return [{"role": "user", "content": f"{index % 2} what is it"}]


def one_image(num_rows=8):
    """A column `image`."""
    rows = [{"prompt": messages(i), "image": picture(i, *SIZES[i % 4])} for i in range(num_rows)]
    return _dataset(rows, image=Image())


def some_images(counts, num_rows=8):
    """A column `images`, of as many as `counts` says in turn."""
    rows = []
    for i in range(num_rows):
        images = [picture(2 * i + k, *SIZES[(i + k) % 4]) for k in range(counts[i % len(counts)])]
        rows.append({"prompt": messages(i), "images": images})
    return _dataset(rows, images=List(Image()))


def images_in_messages(num_rows=8):
    """Placeholders within the messages."""
    rows = []
    for i in range(num_rows):
        content = [{"type": "text", "text": "left "}, {"type": "image", "text": None}, {"type": "text", "text": "?"}]
        rows.append({"prompt": [{"role": "user", "content": content}], "images": [picture(i)]})
    return Dataset.from_list(rows, features=None).cast_column("images", List(Image()))


def no_images(num_rows=8):
    """Text alone."""
    return Dataset.from_list([{"prompt": messages(i)} for i in range(num_rows)])


def _dataset(rows, **columns):
    prompt = List({"role": Value("string"), "content": Value("string")})
    return Dataset.from_list(rows, features=Features({"prompt": prompt, **columns}))


LAYOUTS = {
    "image": one_image,
    "images": lambda: some_images([1]),
    "several": lambda: some_images([2, 1, 3]),
    "batches without": lambda: some_images([2, 1, 0, 0]),  # TRL's batches have images in all rows or in none
    "no images": no_images,
}


def vlm_trainer(zoo, tmp_path, kind, layout="image", **kwargs):
    model_dir = zoo.vlm(kind)
    args = make_args(tmp_path, shuffle_dataset=False, **kwargs.pop("fields", {}))
    return make_trainer(
        kwargs.pop("model", model_dir),
        args,
        processing_class=load_processor(model_dir),
        train_dataset=LAYOUTS[layout](),
        **kwargs,
    )


def train_text(trainer):
    """All parameters of the text model must change; of the vision tower some are not used. Returns those that are."""
    before = params_of(trainer.model)
    vision = {name for name in before if "language_model" not in name and "lm_head" not in name}
    changed = train(trainer)
    assert before.keys() - changed <= vision
    return changed & vision


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_training(zoo, tmp_path, kind, layout):
    trainer = vlm_trainer(zoo, tmp_path, kind, layout)
    batches = record_batches(trainer)
    assert bool(train_text(trainer)) == (layout != "no images")
    for batch in batches:
        counts = [len(row.get("images") or []) or ("image" in row) for row in batch["inputs"]]
        assert batch.get("num_images", [0] * 8) == counts
        assert counts == [count for count in counts[::4] for _ in range(4)]


@pytest.mark.parametrize("layout", ["image", "several", "batches without"])
@pytest.mark.parametrize("kind", KINDS)
def test_completions_are_what_the_model_says_to_these_images(zoo, tmp_path, kind, layout):
    """Greedy, with a model that never ends: alone and in the batch the same."""
    model_dir = zoo.vlm(kind, mean_length=10_000, seed=int(kind == "qwen2_vl"))  # 0 says one thing to all
    processor = load_processor(model_dir)
    fields = {"temperature": 1e-4, "learning_rate": 0.0, "max_steps": 4, "shuffle_dataset": False}
    seen = []

    def reward(prompts, completion_ids, **kwargs):
        seen.extend(zip(prompts, completion_ids, strict=True))
        return [0.0] * len(prompts)

    trainer = make_trainer(
        model_dir,
        make_args(tmp_path, **fields),
        processing_class=processor,
        train_dataset=LAYOUTS[layout](),
        reward_funcs=reward,
    )
    assert train(trainer) == set()
    model = AutoModelForImageTextToText.from_pretrained(model_dir)
    said = {}
    for prompt, ids in seen:
        inputs = processor.apply_chat_template(
            [prompt], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        own = model.generate(
            **inputs, max_new_tokens=12, do_sample=False, suppress_tokens=[model.config.image_token_id]
        )
        assert own[0, inputs["input_ids"].shape[1] :].tolist() == ids
        said[tuple(ids)] = prompt
    assert len(said) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_reference_model(zoo, tmp_path, kind):
    trainer = vlm_trainer(zoo, tmp_path, kind, "several", fields={"beta": 0.1})
    assert train_text(trainer)
    kl = step_logs(trainer, "kl")
    assert kl[0] == pytest.approx(0, abs=1e-5)
    assert kl[1] > 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_adapter(zoo, tmp_path, kind):
    model = AutoModelForImageTextToText.from_pretrained(zoo.vlm(kind), dtype=torch.float32)
    config = LoraConfig(target_modules=r".*language_model.*\.(q_proj|v_proj)")
    trainer = vlm_trainer(zoo, tmp_path, kind, model=model, peft_config=config, fields={"max_steps": 3})
    assert train(trainer) == {name for name, _ in trainer.model.named_parameters() if "lora_" in name}


@pytest.mark.parametrize("fields", [{"steps_per_generation": 2}, {"num_iterations": 2}])
@pytest.mark.parametrize("layout", ["image", "several"])
@pytest.mark.parametrize("kind", KINDS)
def test_old_log_probs_fit_the_shuffled_rows(zoo, tmp_path, kind, layout, fields):
    trainer = vlm_trainer(zoo, tmp_path, kind, layout, fields=fields)
    differences, compute = [], trainer._compute_loss

    def recorded(model, inputs):
        images = {
            name: inputs[name]
            for name in ("pixel_values", "image_grid_thw", "num_images", "token_type_ids", "mm_token_type_ids")
            if name in inputs
        }
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad():
            now, _, _ = trainer._get_per_token_logps_and_entropies(
                model, ids, mask, inputs["completion_ids"].shape[1], **images
            )
        differences.append(((now - inputs["old_per_token_logps"]) * inputs["completion_mask"]).abs().max().item())
        return compute(model, inputs)

    trainer._compute_loss = recorded
    train(trainer)
    assert len(differences) == 2
    assert differences[0] < 1e-4 < differences[1]


def test_rewards_are_given_images_and_messages_with_them(zoo, tmp_path):
    seen = []

    def reward(prompts, completions, images, **kwargs):
        for prompt, row in zip(prompts, images, strict=True):
            parts = [part for message in prompt for part in message["content"]]
            inside = [part["image"] for part in parts if part["type"] == "image"]
            assert [image.getpixel((0, 0)) for image in inside] == [image.getpixel((0, 0)) for image in row]
            seen.append(len(row))
        return variety(completions)

    trainer = vlm_trainer(zoo, tmp_path, "llava", "several", reward_funcs=reward)
    train(trainer)
    assert len(seen) == 16


def test_placeholders_within_messages(zoo, tmp_path):
    model_dir = zoo.vlm("llava")
    trainer = make_trainer(
        model_dir,
        make_args(tmp_path),
        processing_class=load_processor(model_dir),
        train_dataset=images_in_messages(),
    )
    batches = record_batches(trainer)
    assert train_text(trainer)
    for ids, mask in zip(batches[0]["prompt_ids"], batches[0]["prompt_mask"].bool(), strict=True):
        assert trainer.processing_class.decode(ids[mask]) == "user: left " + "<image>" * 4 + "?<eos>\nassistant: "


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation(zoo, tmp_path, kind):
    fields = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8}
    trainer = vlm_trainer(zoo, tmp_path, kind, fields=fields, eval_dataset=some_images([1, 2], 4))
    train(trainer)
    assert len(step_logs(trainer, "eval_loss")) == 1


def test_tool_shows_a_picture(tmp_path):
    """The later turns see it; over-provisioning ended with the first."""

    def look() -> list:
        """Looks around."""
        return [{"type": "image", "image": picture(5)}, {"type": "text", "text": "there"}]

    model_dir = make_vlm(tmp_path / "vlm", "qwen2_vl", mean_length=4, words=[tool_call("look")])
    shown = []

    def reward(completions, **kwargs):
        shown.extend(sum(message["role"] == "tool" for message in messages) for messages in completions)
        return [float(len(messages[0]["content"])) for messages in completions]

    trainer = make_trainer(
        model_dir,
        make_args(tmp_path, max_completion_length=200, max_tool_calling_iterations=2, learning_rate=1e-3),
        processing_class=load_processor(model_dir),
        train_dataset=one_image(),
        reward_funcs=reward,
        tools=[look],
    )
    batches = record_batches(trainer)
    train(trainer)
    assert 0 < sum(map(bool, shown)) < len(shown)
    assert [sum(batch["num_images"]) for batch in batches] == [8 + sum(shown[:8]), 8 + sum(shown[8:])]


def test_images_need_conversations(zoo, tmp_path):
    dataset = one_image().remove_columns("prompt").add_column("prompt", ["what"] * 8)
    model_dir = zoo.vlm("llava")
    trainer = make_trainer(
        model_dir, make_args(tmp_path), processing_class=load_processor(model_dir), train_dataset=dataset
    )
    with pytest.raises(ValueError, match="requires conversational prompts"):
        trainer.train()
