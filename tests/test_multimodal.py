"""Tests that candidates get the images and processor fields of their rows, in the right order."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_darts import DARTSGRPOTrainer
from trl_darts.engines.factory import process_rows


class Processor:
    """Stub of Qwen2-VL's processor: all images of a batch share one tensor, with more patches for larger ones."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    def apply_chat_template(self, conversation: list[Any], tools: Any = None, **_: Any) -> dict[str, Any]:
        self.calls.append([(self._number(prompt), tools) for prompt in conversation])
        images = [part["image"] for prompt in conversation for part in prompt[0]["content"] if part["type"] == "image"]
        fields: dict[str, Any] = {"token_type_ids": [[self._number(prompt)] * 2 for prompt in conversation]}
        if images:
            fields["pixel_values"] = torch.cat([torch.full((image, 4), float(image)) for image in images])
            fields["image_grid_thw"] = torch.tensor([[1, 1, image] for image in images])
        ids = [[self._number(prompt), 9] for prompt in conversation]
        return {"input_ids": ids, "attention_mask": [[1, 1] for _ in conversation], **fields}

    @staticmethod
    def _number(prompt: list[Any]) -> int:
        return int(prompt[0]["content"][0]["text"])


# Row r has IMAGES[r], which are identified by their numbers of patches.
IMAGES = [[4], [], [6, 2], [1], []]
PROMPTS = [
    [
        {
            "role": "user",
            "content": [{"type": "text", "text": str(row)}, *({"type": "image", "image": i} for i in images)],
        }
    ]
    for row, images in enumerate(IMAGES)
]


@pytest.fixture
def trainer():
    trainer = object.__new__(DARTSGRPOTrainer)  # `__init__` needs a model
    attributes = {"_is_vlm": True, "environment_factories": None, "tools": None, "chat_template": None}
    vars(trainer).update(attributes, chat_template_kwargs={}, processing_class=Processor())
    trainer._prompts = PROMPTS
    return trainer


@pytest.mark.parametrize("rows", [[2, 0, 2, 2, 3], [1, 2], [4, 3, 2, 1, 0], [0], [1, 1, 0]])
def test_fields_are_those_of_the_rows(trainer, rows):
    """Rows are repeated and reordered, with several images or none. Fields equal the processor's for them."""
    images, fields = process_rows(trainer, rows)
    assert images == [IMAGES[row] or None for row in rows]
    numbers = [float(image) for row in rows for image in IMAGES[row] for _ in range(image)]
    assert fields["pixel_values"][:, 0].tolist() == numbers
    assert fields["image_grid_thw"][:, 2].tolist() == [image for row in rows for image in IMAGES[row]]
    assert fields["token_type_ids"] == [[row] * 2 for row in rows]


def test_rows_without_images_have_no_fields_of_images(trainer):
    images, fields = process_rows(trainer, [1, 4, 1])
    assert images is None
    assert fields == {"token_type_ids": [[1, 1], [4, 4], [1, 1]]}


def test_rows_are_those_of_the_batch_that_was_tokenized_last(trainer):
    trainer._prompts = PROMPTS[2:]
    assert process_rows(trainer, [0, 1])[0] == [[6, 2], [1]]
    assert process_rows(trainer, [2, 0])[0] == [None, [6, 2]]  # not the last processed ones


def test_rows_of_environments_keep_their_tools(trainer):
    """Each environment renders its own tools into its prompts."""
    names = ["a", "b", "a", "c", "b"]
    trainer.environment_factories = {}
    trainer._env_tools = {name: [SimpleNamespace(name=name)] for name in names}
    trainer._batch_environments = names
    trainer.processing_class.calls.clear()
    images, _ = process_rows(trainer, [3, 1, 3])
    assert images == [[1], None, [1]]
    seen = [(row, tools[0].name) for call in trainer.processing_class.calls for row, tools in call]
    assert seen == [(3, "c"), (1, "b"), (3, "c")]
    assert trainer._batch_environments is names
