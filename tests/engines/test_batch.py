"""The prompts of a batch over processes, their keys, and the number of candidates from admission."""

import hashlib
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from trl_darts.engines import batch
from trl_darts.engines.batch import PromptBatch
from trl_darts.policy import BudgetController, LengthTracker
from trl_darts.scheduling import PromptInfo, VarianceAdmission, prompt_key


M, M_UP = 4, 8


def gather(monkeypatch: pytest.MonkeyPatch, shares: list[dict[str, Any]], num_generations: int) -> list[PromptBatch]:
    """Returns the batch on every process. All contribute first, then all get the result."""
    sent: list[Any] = []

    def collect(objects: list[Any]) -> list[Any]:
        sent.extend(pickle.loads(pickle.dumps(objects)))
        return objects

    def gathered(process: int) -> PromptBatch:
        return PromptBatch.gather(num_generations=num_generations, process_index=process, **shares[process])

    monkeypatch.setattr(batch, "gather_object", collect)
    for process in range(len(shares)):
        gathered(process)
    monkeypatch.setattr(batch, "gather_object", lambda objects: list(sent))
    return [gathered(process) for process in range(len(shares))]


# Rows and groups


def test_gather_on_one_process_is_alone():
    rows = [[3, 4]] * 2 + [[5]] * 2
    gathered = PromptBatch.gather(rows, 2, 0)
    assert gathered == PromptBatch.alone(rows, 2)
    assert (gathered.rows, gathered.sizes, gathered.mine) == (rows, [4], slice(0, 4))
    assert gathered.infos == [PromptInfo(prompt_key([3, 4]), 2), PromptInfo(prompt_key([5]), 1)]
    assert gathered.mixed == [False, False]
    assert gathered.owners == [0] * 4
    assert not gathered.multimodal


def test_groups_of_a_buffer_are_told_by_their_ids():
    own = PromptBatch.alone([[3, 4]] * 2 + [[5], [6]], 2, ids=[7, 4])
    assert own.longest == {7: [3, 4], 4: [5]}
    assert [own.row_of(4, index) for index in range(3)] == [2, 3, 2]
    assert own.mixed[own.places[4]]
    assert PromptBatch.alone([[3]] * 4, 2).longest == {0: [3], 1: [3]}


def test_groups_that_straddle_processes(monkeypatch):
    """Three groups of four over processes with 6, 0, 1 and 5 rows."""
    rows = [[group, 9] for group in range(3) for _ in range(4)]
    shares = [{"rows": part} for part in (rows[:6], [], rows[6:7], rows[7:])]
    batches = gather(monkeypatch, shares, num_generations=4)
    for process, own in enumerate(batches):
        assert own.process_index == process
        assert own.rows[own.mine] == shares[process]["rows"]
        assert (own.rows, own.keys, own.sizes) == (rows, batches[0].keys, [6, 0, 1, 5])
        assert own.infos == batches[0].infos == [PromptInfo(prompt_key([group, 9]), 2) for group in range(3)]
    assert batches[0].owners == [0] * 6 + [2] + [3] * 5
    assert [own.mine for own in batches] == [slice(0, 6), slice(6, 6), slice(6, 7), slice(7, 12)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=5), st.integers(1, 4), st.data())
def test_every_row_has_one_owner_and_every_group_its_rows(sizes, num_generations, data):
    sizes[-1] += -sum(sizes) % num_generations  # whole groups
    num_rows = sum(sizes)
    rows = [[row // num_generations] for row in range(num_rows)]
    keys = [prompt_key(row) for row in rows]
    batches = [PromptBatch(rows, keys, sizes, process, num_generations, False) for process in range(len(sizes))]
    assert [process for own in batches for process in [own.process_index] * len(rows[own.mine])] == batches[0].owners
    assert [row for own in batches for row in range(num_rows)[own.mine]] == list(range(num_rows))
    for group in range(num_rows // num_generations):
        index = data.draw(st.integers(0, 3 * num_generations))
        row = batches[0].row_of(group, index)
        assert rows[row] == [group]
        assert row == batches[0].row_of(group, index + num_generations)
        assert [batches[0].row_of(group, i) for i in range(num_generations)] == [
            row for row, tokens in enumerate(rows) if tokens == [group]
        ]


def test_a_group_of_different_prompts_is_mixed_and_not_extendable(monkeypatch):
    rows = [[1], [1], [2], [3], [4], [4]]
    first, _ = gather(monkeypatch, [{"rows": rows[:3]}, {"rows": rows[3:]}], num_generations=2)
    assert first.mixed == [False, True, False]  # the two rows that differ are on two processes
    assert first.infos == [
        PromptInfo(prompt_key([1]), 1),
        PromptInfo(prompt_key([2]), 1, extendable=False),
        PromptInfo(prompt_key([4]), 1),
    ]


def test_a_group_whose_rows_differ_in_their_images_is_mixed():
    red, blue = Image.new("RGB", (2, 2), "red"), Image.new("RGB", (2, 2), "blue")
    own = PromptBatch.alone([[1]] * 4, 2, [[red], [red], [red], [blue]])
    assert own.mixed == [False, True]
    assert own.mixed is own.mixed  # asked for each group, computed once
    assert [info.extendable for info in own.infos] == [True, False]


@pytest.mark.parametrize(("images", "fields"), [(True, False), (False, True), (True, True)])
def test_one_multimodal_process_makes_the_batch_multimodal(monkeypatch, images, fields):
    """If any process has images or other fields, every process keeps its own rows."""
    other = {
        "rows": [[2]],
        "images": [[Image.new("L", (1, 1))]] if images else None,
        "fields": {"x": 1} if fields else {},
    }
    batches = gather(monkeypatch, [{"rows": [[1]]}, other], num_generations=1)
    assert [own.multimodal for own in batches] == [True, True]
    assert batches[0] != batches[1]
    assert batches[0].keys == batches[1].keys
    text = gather(monkeypatch, [{"rows": [[1]]}, {"rows": [[2]]}], num_generations=1)
    assert [own.multimodal for own in text] == [False, False]


def test_images_stay_where_they_are(monkeypatch):
    """Only digests are gathered: the pixels of a batch have megabytes."""
    images = [[Image.effect_noise((300, 300), 50)] for _ in range(2)]
    sent: list[Any] = []
    monkeypatch.setattr(batch, "gather_object", lambda objects: sent.extend(objects) or objects)
    PromptBatch.gather([[1], [2]], 1, 0, images)
    assert len(pickle.dumps(sent)) < 1000


# What identifies a prompt


def key_of(*images: Any, tokens: tuple[int, ...] = (7, 8)) -> int:
    return PromptBatch.alone([list(tokens)], 1, [list(images)]).keys[0]


def noise(seed: int, mode: str = "RGB", size: tuple[int, int] = (6, 4)) -> Image.Image:
    channels = {"RGB": 3, "RGBA": 4, "L": 1}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], channels), dtype=np.uint8)
    return Image.fromarray(pixels.squeeze(-1) if channels == 1 else pixels, mode)


def test_prompts_with_the_same_tokens_are_told_apart_by_their_images():
    text = PromptBatch.alone([[7, 8]], 1).keys[0]
    assert text == PromptBatch.alone([[7, 8]], 1, [None]).keys[0] == key_of()  # no image is no image
    first, second = noise(1), noise(2)
    keys = [text, key_of(first), key_of(second), key_of(first, second), key_of(second, first), key_of(first, first)]
    assert len(set(keys)) == len(keys)
    assert key_of(first, tokens=(7, 9)) != key_of(first)


IMAGES = {
    "RGB": lambda seed: noise(seed),
    "L": lambda seed: noise(seed, "L"),
    "RGBA": lambda seed: noise(seed, "RGBA"),
    "array": lambda seed: np.asarray(noise(seed)).copy(),
    "float array": lambda seed: np.asarray(noise(seed), dtype=np.float32) / 255,
    "tensor": lambda seed: torch.from_numpy(np.asarray(noise(seed, size=(40, 40)), dtype=np.float32).copy()),
    "path": lambda seed: f"/images/{seed}.png",
    "Path": lambda seed: Path(f"/images/{seed}.png"),
    "bytes": lambda seed: {"bytes": b"PNG" + bytes([seed]), "path": None},
}


@pytest.mark.parametrize("make", IMAGES.values(), ids=IMAGES)
def test_equal_content_in_different_objects_is_the_same_image(make):
    assert make(1) is not make(1)
    assert key_of(make(1)) == key_of(make(1)) != key_of(make(2))
    first, second = make(1), make(2)
    rows = PromptBatch.alone([[7]] * 4, 2, [[first], [make(1)], [second], [first]]).keys
    assert rows[0] == rows[1] == rows[3] != rows[2]


def test_an_image_that_is_read_lazily_is_the_same_image(tmp_path):
    noise(1).save(tmp_path / "image.png")
    assert key_of(Image.open(tmp_path / "image.png")) == key_of(noise(1))


def test_the_same_bytes_in_another_shape_are_another_image():
    assert key_of(Image.new("RGB", (2, 8))) != key_of(Image.new("RGB", (8, 2)))
    assert key_of(Image.new("RGBA", (3, 1))) != key_of(Image.new("RGB", (4, 1)))


def test_the_palette_belongs_to_the_image():
    def painted(colour: tuple[int, int, int]) -> Image.Image:
        image = Image.new("P", (4, 4), 1)
        image.putpalette([0, 0, 0, *colour])
        return image

    assert key_of(painted((255, 0, 0))) == key_of(painted((255, 0, 0))) != key_of(painted((0, 0, 255)))


def test_a_tensor_is_told_by_all_of_its_pixels():
    """The `str` of a large tensor omits its middle."""
    image = torch.zeros(3, 64, 64)
    dotted = image.clone()
    dotted[1, 32, 32] = 1.0
    assert key_of(image) != key_of(dotted)


def test_keys_do_not_depend_on_the_process():
    """Keys are saved with the length statistics, and Python's own hash differs between runs."""
    data = struct.pack("<3q", 1, 2, 3)
    assert prompt_key([1, 2, 3]) == int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


# Candidates for groups that can't be extended


def admission(target_redundancy: float = 1.5, max_num_generations: int = M_UP) -> VarianceAdmission:
    """Returns an admission whose tracker knows prompts 0 to 4, with increasing variance."""
    tracker = LengthTracker()
    for key in range(5):
        tracker.update(key, [50 - 10 * key, 50, 50, 50 + 10 * key])
    tracker.end_step()
    return VarianceAdmission(tracker, BudgetController(M, max_num_generations, target_redundancy))


def prompts(extendable: list[bool]) -> list[PromptInfo]:
    return [PromptInfo(key, 10, extendable=flag) for key, flag in enumerate(extendable)]


@pytest.mark.parametrize("flags", [[True, False, True, False, True], [False, True, True, True, True], [True] * 5])
def test_the_budget_goes_to_the_groups_that_can_be_extended(flags):
    plan = admission().plan(prompts(flags))
    assert len(plan.num_candidates) == 5
    assert all(count == M for count, flag in zip(plan.num_candidates, flags, strict=True) if not flag)
    extended = [count for count, flag in zip(plan.num_candidates, flags, strict=True) if flag]
    alone = admission().plan([info for info in prompts(flags) if info.extendable])
    assert extended == alone.num_candidates  # as if the others were not there
    assert sum(extended) == round(1.5 * M * sum(flags))
    assert extended == sorted(extended)  # wilder prompts get more
    assert extended[-1] > M
    assert plan.saturated == alone.saturated == extended.count(M_UP)


def test_prompts_that_differ_only_from_each_other_get_no_spare_candidates():
    tracker = LengthTracker()
    for key in range(5):
        tracker.update(key, [50 + 10 * key] * M, num_prompt_tokens=10)
    tracker.end_step()
    plan = VarianceAdmission(tracker, BudgetController(M, M_UP)).plan(prompts([True] * 5))
    assert plan.num_candidates == [M] * 5
    assert plan.rho > 0.1


def test_without_a_group_that_can_be_extended_there_is_no_budget():
    policy = admission()
    before = policy.budget.state_dict()
    plan = policy.plan(prompts([False] * 3))
    assert plan.num_candidates == [M] * 3
    assert plan.saturated == 0
    assert policy.budget.state_dict() == before  # a batch without prompts is none to calibrate on


def test_groups_that_cannot_be_extended_are_not_saturated_where_m_is_m_up():
    plan = admission(target_redundancy=1.0, max_num_generations=M).plan(prompts([True, False]))
    assert plan.num_candidates == [M, M]
    assert plan.saturated == 0
