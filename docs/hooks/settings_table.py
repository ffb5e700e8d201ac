"""
Makes docs/settings.md of the dataclasses: `python -m docs.hooks.settings_table`, after a change of a field. A test
compares them.
"""

import re
from dataclasses import Field
from pathlib import Path
from typing import get_type_hints

from trl_darts.analysis.simulation.sweep import has_effect
from trl_darts.config import DARTSGRPOConfig
from trl_darts.recipes.own_fields import own_fields
from trl_darts.scheduling import SCHEDULES, ScheduleSettings


PAGE = Path(__file__).resolve().parents[1] / "settings.md"
HINTS = get_type_hints(DARTSGRPOConfig)  # building a parser changes the fields' own types
# What the simulator, which knows no other, can't say.
READ_BY = {
    "schedule": "all",
    **dict.fromkeys(("max_staleness", "kv_after_update"), "darts, grpo"),
    "submit_order": "all",
    "length_ema": "all; grpo with `submit_order`",
    "length_history": "all; grpo with `submit_order`",
    "drop_uniform_groups": "darts, grpo",
    "skip_uniform_prompts": "all",
    **dict.fromkeys(("reuse_answers", "reuse_answers_gib"), 'all with `selection` "all"'),
    "max_prompt_oversampling": "darts, grpo",
}
HEAD = """# All settings

The fields that `DARTSGRPOConfig` adds to TRL's [`GRPOConfig`](https://huggingface.co/docs/trl/grpo_trainer), all of
whose fields it has too. [Schedules](schedules.md#settings-by-symptom) says which one to change when. In a terminal,
`trl-darts grpo --help` has them with their whole help.

*Read by* names the schedules for which a setting means something. "darts, `selection`" is `"darts"`, and any other but
`"grpo"` with a `selection` of `"dual_end"` or `"uniform"`. *computed*: the next column says how. Symbols in brackets
are the paper's.
"""


def settings_page() -> str:
    """The whole page."""
    lines = [HEAD.rstrip()]
    for heading, group in own_fields().items():
        lines += [f"\n## {heading}\n", "| field | type | default | what it does | read by |", "|---" * 5 + "|"]
        lines += [table_row(field, HINTS[field.name]) for field in group]
    return "\n".join([*lines, ""])


def table_row(field: Field, hint: object) -> str:
    """A field's row: the first sentence of its help, and those about a default that is computed."""
    sentences = re.split(r"(?<=\.)\s+", field.metadata["help"])
    computed = [text for text in sentences if field.default is None and "efaults to" in text]
    text = " ".join(dict.fromkeys([sentences[0], *computed]))
    text = re.sub(r"docs/((\w+)\.md)", r"[\2](\1)", text)
    default = "*computed*" if computed else f"`{field.default!r}`"
    kind = hint.__name__ if isinstance(hint, type) else str(hint)
    cells = [f"`{field.name}`", f"`{kind}`", default, text, read_by(field.name)]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def read_by(name: str) -> str:
    """The schedules that read a field."""
    if name in READ_BY or not hasattr(ScheduleSettings, name):
        return READ_BY.get(name, "all")
    alone, selecting = (
        [own for own in SCHEDULES if has_effect(name, own, {"selection": given or SCHEDULES[own]})]
        for given in (None, "dual_end")
    )
    if len(alone) >= len(SCHEDULES) - 1:
        return "all" if len(alone) == len(SCHEDULES) else "all but " + (set(SCHEDULES) - set(alone)).pop()
    return ", ".join([*alone, *(["`selection`"] if selecting != alone else [])])


if __name__ == "__main__":
    PAGE.write_text(settings_page(), encoding="utf-8")
