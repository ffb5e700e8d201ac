"""
Which candidates of a prompt are trained on.

Invariants: a selection has exactly the number of entries that was asked for; they are distinct, in ascending index
order, so that the kept rows keep their order; an incomplete candidate is taken only where the complete ones don't
suffice.
"""

from collections.abc import Sequence


def select_dual_end(
    lengths: Sequence[int], complete: Sequence[bool], num_shortest: int, num_longest: int
) -> list[int]:
    """
    Dual-end length sampling of one prompt's candidate pool ([DARTS](https://huggingface.co/papers/2605.30859),
    Section 4.1.2 and Algorithm 2, lines 7 to 9).

    The shortest are taken from the complete candidates, then the longest from the complete ones that are left. Equal
    lengths go to the lower index. Where there are too few complete candidates, incomplete ones fill up, shortest
    first.

    Args:
        lengths (`Sequence[int]` of shape `(B,)`):
            Response lengths in tokens.
        complete (`Sequence[bool]` of shape `(B,)`):
            Whether the candidate ended by itself: neither aborted nor at the length limit.
        num_shortest (`int`):
            Number of shortest candidates to take, K.
        num_longest (`int`):
            Number of longest candidates to take, L.

    Returns:
        `list[int]`: `num_shortest + num_longest` distinct indices into `lengths`, ascending.

    Raises:
        [`ValueError`]: If there are fewer candidates than that, a number is negative, or `complete` has another
        length.
    """
    if num_shortest < 0 or num_longest < 0:
        raise ValueError(f"`num_shortest` ({num_shortest}) and `num_longest` ({num_longest}) must not be negative.")
    num = num_shortest + num_longest
    if len(complete) != len(lengths):
        raise ValueError(
            f"`complete` has {len(complete)} entries and `lengths` has {len(lengths)}. Give one per candidate."
        )
    if num > len(lengths):
        raise ValueError(f"{num} candidates are to be selected out of {len(lengths)}. Generate at least {num}.")
    length_of = lengths.__getitem__
    # Sorting is stable, also in reverse: equal lengths stay in index order.
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
    The shortest candidates of one prompt's pool: tail pruning ([DARTS](https://huggingface.co/papers/2605.30859),
    Section 4.3.1 and Algorithm 2, line 12).

    Complete candidates come first, then incomplete ones, each shortest first; equal lengths go to the lower index. The
    arguments and errors are those of [`select_dual_end`].
    """
    return select_dual_end(lengths, complete, num, 0)
