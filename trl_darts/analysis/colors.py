"""One colour for each method in all pictures: the quickstart's, a report's and a simulation's."""

import re
from collections.abc import Sequence


INK, MUTED, GRID = "#1b1f24", "#57606a", "#d5dae0"  # of text, axes and grids, on white
# Okabe and Ito's colours, darkened until lines on white have a contrast of 4.5; then five more for many lines.
GREY, BLUE, VERMILION, GREEN, PURPLE, OLIVE = "#555555", "#0067a5", "#c24a00", "#007a58", "#a8326f", "#6b5b00"
PALETTE = (GREY, BLUE, VERMILION, GREEN, PURPLE, OLIVE, "#17a2d4", "#8b1a1a", "#7b4fb5", "#e69f00", "#2fb59a")
ON_DARK = {  # what replaces them on dark pages
    GREY: "#aab2bb",
    BLUE: "#5cb3ee",
    VERMILION: "#f28b52",
    GREEN: "#43c59e",
    PURPLE: "#e487b6",
    OLIVE: "#cbb64f",
}
METHODS = {  # by what a name has in it; the first match counts
    r"paper|long_end_patience=none": VERMILION,
    r"grpo|\btrl\b": GREY,
    r"darts": BLUE,
    r"tail_batching": GREEN,
    r"partial_rollout": PURPLE,
    r"sorted": OLIVE,
}


def color_of(name: str) -> str | None:
    """Returns the colour of the method that a run, a schedule or a setting is named after, if it is."""
    return next((color for method, color in METHODS.items() if re.search(method, name.lower())), None)


def colors_of(names: Sequence[str]) -> list[str]:
    """Returns a colour for each name: its method's, or one that is still free."""
    chosen: dict[int, str] = {}
    for place, name in enumerate(names):
        if (color := color_of(name)) is not None and color not in chosen.values():
            chosen[place] = color
    free = [color for color in PALETTE if color not in chosen.values()]
    return [chosen[place] if place in chosen else free.pop(0) if free else GREY for place in range(len(names))]
