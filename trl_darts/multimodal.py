"""Rows of a batch with images: the processor's fields for some of them."""

from collections.abc import Sequence
from typing import Any

import torch
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid


def select_rows(fields: dict[str, Any], images: Sequence[Sequence[Any] | None] | None, rows: Sequence[int]) -> dict:
    """
    The processor's fields for some rows of a batch. A row may be chosen several times.

    Args:
        fields (`dict`):
            What the processor made of the batch beside token IDs: `pixel_values`, `image_grid_thw`,
            `token_type_ids`, …, as TRL's `_tokenize_prompts` returns it.
        images (`Sequence[Sequence | None]` of shape `(B,)`, *optional*):
            Images of each row of the batch.
        rows (`Sequence[int]`):
            The rows wanted.

    Returns:
        `dict`: The same fields for those rows, as the processor would have made them; without those of images where
        no row has one.
    """
    if not fields:
        return {}
    if images is not None and "num_images" not in fields:
        fields = {**fields, "num_images": [len(row) if row else 0 for row in images]}
    by_row = split_pixel_values_by_grid(fields)  # patches and images of a row together
    chosen = {}
    for name, values in by_row.items():
        some = [values[row] for row in rows]
        chosen[name] = torch.stack(some) if isinstance(values, torch.Tensor) else some
    chosen = unsplit_pixel_values_by_grid(chosen)
    chosen.pop("num_images", None)
    pixels = chosen.get("pixel_values")
    if pixels is not None and pixels.numel() == 0:
        chosen = {name: value for name, value in chosen.items() if not name.startswith(("pixel_", "image_", "video_"))}
    return chosen
