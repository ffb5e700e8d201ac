"""Vision-language models: each candidate sees its prompt's images, whatever else is in the batch."""

import pytest
from datasets import Image as ImageColumn
from transformers import AutoModelForImageTextToText

from benchmarks.tool_calls import tool_call
from tests.builders import record_batches
from tests.trl_parity.common import make_args, make_trainer, step_logs, train, variety
from tests.trl_parity.vlms import load_processor, make_vlm, picture, some_images


def one_image():
    """A column `image`."""
    dataset = some_images([1]).map(lambda row: {"image": row["images"][0]}, remove_columns="images")
    return dataset.cast_column("image", ImageColumn())


def image_trainer(model_dir, tmp_path, dataset, fields=(), **kwargs):
    args = make_args(tmp_path, shuffle_dataset=False, **dict(fields))
    processor = load_processor(model_dir)
    return make_trainer(model_dir, args, processing_class=processor, train_dataset=dataset, **kwargs)


@pytest.mark.parametrize(
    ("kind", "num_images"), [("llava", [2, 1, 0, 0]), ("gemma3", [2, 1, 3]), ("qwen2_vl", [2, 1, 3])]
)
def test_completions_are_what_the_model_says_to_these_images(vlm, tmp_path, kind, num_images):
    """
    Greedy, with a model that never ends: alone and in the batch the same. TRL's batches have images in all rows or in
    none.
    """
    model_dir = vlm(kind, mean_length=10_000, seed=int(kind == "qwen2_vl"))  # 0 says one thing to all
    seen = []

    def reward(prompts, completion_ids, **kwargs):
        seen.extend(zip(prompts, completion_ids, strict=True))
        return [0.0] * len(prompts)

    fields = {"temperature": 1e-4, "learning_rate": 0.0, "max_steps": 4}
    trainer = image_trainer(model_dir, tmp_path, some_images(num_images), fields, reward_funcs=reward)
    assert train(trainer) == set()
    model = AutoModelForImageTextToText.from_pretrained(model_dir)
    said = {}
    for prompt, ids in seen:
        inputs = trainer.processing_class.apply_chat_template(
            [prompt], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        own = model.generate(
            **inputs, max_new_tokens=12, do_sample=False, suppress_tokens=[model.config.image_token_id]
        )
        assert own[0, inputs["input_ids"].shape[1] :].tolist() == ids
        said[tuple(ids)] = prompt
    assert len(said) > 2


def test_training_and_evaluation(vlm, tmp_path):
    """All that the text model has is trained, and images go with their rows to rewards and loss."""

    def reward(prompts, completions, images, **kwargs):
        for prompt, row in zip(prompts, images, strict=True):
            parts = [part for message in prompt for part in message["content"]]
            inside = [part["image"] for part in parts if part["type"] == "image"]
            assert [image.getpixel((0, 0)) for image in inside] == [image.getpixel((0, 0)) for image in row]
        return variety(completions)

    fields = {"eval_strategy": "steps", "eval_steps": 2, "num_iterations": 2, "beta": 0.1}
    data = {"eval_dataset": some_images([1, 2], 4), "reward_funcs": reward}
    trainer = image_trainer(vlm("gemma3"), tmp_path, some_images([2, 1, 3]), fields, **data)
    batches = record_batches(trainer)
    changed = train(trainer)
    vision = {n for n, _ in trainer.model.named_parameters() if "language_model" not in n and "lm_head" not in n}
    assert {name for name, _ in trainer.model.named_parameters()} - changed <= vision
    assert changed & vision
    for batch in batches:
        counts = [len(row["images"]) for row in batch["inputs"]]
        assert batch["num_images"] == counts == [count for count in counts[::4] for _ in range(4)]
    assert len(step_logs(trainer, "eval_loss")) == 1
    assert step_logs(trainer, "kl")[0] == pytest.approx(0, abs=1e-5)


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

    fields = {"max_completion_length": 200, "max_tool_calling_iterations": 2, "learning_rate": 1e-3}
    trainer = image_trainer(model_dir, tmp_path, one_image(), fields, reward_funcs=reward, tools=[look])
    batches = record_batches(trainer)
    train(trainer)
    assert 0 < sum(map(bool, shown)) < len(shown)
    assert [sum(batch["num_images"]) for batch in batches] == [8 + sum(shown[:8]), 8 + sum(shown[8:])]
