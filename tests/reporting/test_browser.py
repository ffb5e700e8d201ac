"""
The page as a reader sees it: in a real browser, light and dark, wide and narrow, on screen and on paper.

Invariants: nothing is asked for from outside and nothing is complained about; all text stands out from what is behind
it; the page is never wider than its window.
"""

import numpy as np
import pytest

from trl_darts.reporting.drawing import INK

from . import conftest


pytestmark = pytest.mark.browser

# Where the text is, in pixels of the whole page: one box for each of the first elements of each kind.
TEXTS = """
(() => {
  const kinds = ["h1", "h2", "h3", "p", "li", "nav a", "dt", "dd", "caption", "th", "td", "td small", "code",
                 ".caution p", ".note p", "figcaption", ".charts svg text", "footer"];
  const boxes = [];
  for (const kind of kinds)
    for (const element of [...document.querySelectorAll(kind)].slice(0, 40)) {
      const box = element.getBoundingClientRect();
      const seen = box.left >= 0 && box.right <= innerWidth && box.width > 4 && element.textContent.trim();
      if (seen) boxes.push([kind, box.left, box.top + scrollY, box.right, box.bottom + scrollY, element.textContent]);
    }
  return {boxes: boxes, width: document.documentElement.scrollWidth, height: document.documentElement.scrollHeight,
          background: getComputedStyle(document.body).backgroundColor};
})()
"""


def luminance(colors):
    """Relative luminance (WCAG 2) of colours of shape `(N, 3)`."""
    channels = np.asarray(colors, dtype=float) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return linear @ (0.2126, 0.7152, 0.0722)


def contrast(crop):
    """Between the commonest colour of a crop and the one that stands out most from it."""
    colors, counts = np.unique(crop.reshape(-1, 3), axis=0, return_counts=True)
    behind, others = luminance(colors[counts.argmax()]), luminance(colors)
    brighter, darker = np.maximum(others, behind), np.minimum(others, behind)
    return float(((brighter + 0.05) / (darker + 0.05)).max())


def rgb(color):
    return tuple(int(color[i : i + 2], 16) for i in (1, 3, 5))


def crops(shot):
    for kind, left, top, right, bottom, text in shot.facts["boxes"]:
        crop = shot.pixels[int(top) : int(np.ceil(bottom)), int(left) : int(np.ceil(right))]
        if crop.size:
            yield kind, text, crop


@pytest.mark.parametrize(("promised", "outcome"), [("0", pytest.skip.Exception), ("1", pytest.fail.Exception)])
def test_a_promised_browser_must_be_there(monkeypatch, request, promised, outcome):
    monkeypatch.setattr(conftest, "find_chromium", lambda: None)
    monkeypatch.setenv(conftest.REQUIRE_BROWSER, promised)
    with pytest.raises(outcome, match="Chromium is not there"):
        conftest.pytest_runtest_setup(request.node)


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_is_readable(browser, real_page, dark, width):
    shot = browser.show(real_page, dark=dark, width=width, script=TEXTS)
    assert shot.messages == []
    assert shot.requests == []
    assert shot.facts["width"] <= width
    assert shot.pixels.shape == (shot.facts["height"], width, 3)
    surface = rgb(INK["dark" if dark else "light"]["surface"])
    assert shot.facts["background"] == f"rgb{surface}"  # the branch of the style sheet that was meant
    same = (shot.pixels == surface).all(axis=-1)
    assert 0.3 < same.mean() < 0.97  # neither blank nor another colour
    found = list(crops(shot))
    assert len({kind for kind, _, _ in found}) >= 13
    faint = {(kind, text[:40]): contrast(crop) for kind, text, crop in found}
    assert {key: value for key, value in faint.items() if value < 4.5} == {}


def test_charts_are_drawn_and_their_text_is_large_enough(browser, real_page):
    script = """[...document.querySelectorAll(".charts svg")].map(svg => {
        const box = svg.getBoundingClientRect();
        const texts = [...svg.querySelectorAll("text")].map(text => text.getBoundingClientRect());
        const out = texts.filter(t => t.left < box.left - 1 || t.right > box.right + 1).length;
        return [box.left, box.top + scrollY, box.right, box.bottom + scrollY,
                Math.min(...texts.map(t => t.height)), out];
    })"""
    shot = browser.show(real_page, width=400, script=script)
    assert len(shot.facts) >= 15
    for left, top, right, bottom, text_height, num_outside in shot.facts:
        crop = shot.pixels[int(top) : int(bottom), int(left) : int(right)]
        assert len(np.unique(crop.reshape(-1, 3), axis=0)) > 8
        assert text_height >= 11
        assert num_outside == 0


def test_paper_is_white(browser, real_page):
    shot = browser.show(real_page, dark=True, media="print", script=TEXTS)
    assert shot.facts["background"] == f"rgb{rgb(INK['light']['surface'])}"
    assert min(contrast(crop) for _, _, crop in crops(shot)) >= 4.5


def test_what_a_page_complains_about_and_asks_for_is_seen(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<p>x</p><img src="http://example.invalid/a.png"><script>console.error("oh"); nothing()</script>')
    shot = browser.show(page)
    assert shot.requests == ["http://example.invalid/a.png"]
    assert any("oh" in message for message in shot.messages)
    assert any("nothing is not defined" in message for message in shot.messages)


def test_faint_text_is_seen(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<body style="background: #fff; color: #bbb"><p>This is hard to read.</p>')
    shot = browser.show(page, script=TEXTS)
    ((kind, _, crop),) = crops(shot)
    assert kind == "p"
    assert 1.2 < contrast(crop) < 3
