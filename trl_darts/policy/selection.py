"""
Selects the candidates of a prompt to train on.

Invariants: a selection has exactly the requested number of entries. They are distinct and in ascending order, so the
kept rows keep their order. An incomplete candidate is selected only if there are too few complete ones.
"""

from collections.abc import Sequence


def select_dual_end(
    lengths: Sequence[int], complete: Sequence[bool], num_shortest: int, num_longest: int
) -> list[int]:
    """
    Dual-end length sampling of one prompt's candidate pool ([DARTS](https://huggingface.co/papers/2605.30859),
    Section 4.1.2 and Algorithm 2, lines 7 to 9).

    The shortest complete candidates are selected first, then the longest of the other complete ones. Equal lengths go
    to the lower index. If there are too few complete candidates, incomplete ones are added, shortest first.

    Args:
        lengths (`Sequence[int]` of shape `(B,)`):
            Response lengths in tokens.
        complete (`Sequence[bool]` of shape `(B,)`):
            Whether each candidate ended by itself: neither aborted nor at the length limit.
        num_shortest (`int`):
            Number of shortest candidates to select, K.
        num_longest (`int`):
            Number of longest candidates to select, L.

    Returns:
        `list[int]`: `num_shortest + num_longest` distinct indices into `lengths`, ascending.

    Raises:
        [`ValueError`]: If there are too few candidates, a number is negative, or `complete` has another length.
    """
    if num_shortest < 0 or num_longest < 0:
        raise ValueError(f"`num_shortest` ({num_shortest}) and `num_longest` ({num_longest}) must not be negative.")
    num = num_shortest + num_longest
    if len(complete) != len(lengths):
        raise ValueError(
            f"`complete` has {len(complete)} entries and `lengths` has {len(lengths)}. Give one per candidate."
        )
    if num > len(lengths):
        raise ValueError(f"`lengths` ({len(lengths)} candidates) must have at least {num}. Generate more.")
    length_of = lengths.__getitem__
    # Sorting is stable, also with `reverse`, so equal lengths stay in index order.
    ranked = sorted([i for i, done in enumerate(complete) if done], key=length_of)
    selected = ranked[:num_shortest]
    if num_longest and len(ranked) > num_shortest:
        selected += sorted(ranked[num_shortest:], key=length_of, reverse=True)[:num_longest]
    if missing := num - len(selected):
        selected += sorted([i for i, done in enumerate(complete) if not done], key=length_of)[:missing]
    selected.sort()
    return selected


def select_shortest(lengths: Sequence[int], complete: Sequence[bool], num: int) -> list[int]:
    """
    Select the shortest candidates of one prompt's pool: tail pruning
    ([DARTS](https://huggingface.co/papers/2605.30859), Section 4.3.1 and Algorithm 2, line 12).

    Complete candidates come before incomplete ones, each shortest first. Equal lengths go to the lower index. The
    arguments and errors are those of [`select_dual_end`].
    """
    return select_dual_end(lengths, complete, num, 0)
