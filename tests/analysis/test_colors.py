"""A method has one colour in all pictures, and no two runs of a picture have the same."""

from hypothesis import given
from hypothesis import strategies as st

from trl_darts.analysis.colors import BLUE, GREY, PALETTE, VERMILION, color_of, colors_of


def test_a_method_has_one_colour_in_all_pictures():
    assert colors_of(["GRPO", "DARTS, as in the paper", "DARTS"]) == [GREY, VERMILION, BLUE]  # the quickstart
    assert colors_of(["DARTS", "GRPO"]) == [BLUE, GREY]  # a report in another order
    assert colors_of(["TRL", "outputs/darts"]) == [GREY, BLUE]
    assert color_of("grpo, endless_share=0") == GREY  # a simulation
    assert color_of("darts, long_end_every=4") == BLUE
    assert color_of("darts, long_end_patience=None") == VERMILION


@given(st.lists(st.sampled_from(["grpo", "darts", "paper", "a", "b", "sorted"]), max_size=len(PALETTE)))
def test_each_of_a_picture_has_its_own(names):
    colors = colors_of(names)
    assert len({*colors}) == len(colors) == len(names)
    for name, color in zip(names, colors, strict=True):
        if names.count(name) == 1 and (own := color_of(name)) is not None:
            assert color == own
