"""The page in a real browser, headless: every figure is drawn and labelled, nothing overlaps, nothing is fetched."""

from __future__ import annotations

import pytest
from browser import Browser, find_chromium
from made_up_runs import HOSTILE, read, run

from cannikin.report.numbers import Target
from cannikin.report.page import make_page, plotly_source
from cannikin.report.write import comparison, run_section

pytest.importorskip("plotly", reason="needs plotly: pip install 'cannikin[report]'")
CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
    pytest.mark.timeout(180),
]

# What is in the way of what: texts of a drawing that leave it or cover one another, and what is wider than the page.
LAYOUT = """
(() => {
  const box = (part) => part.getBoundingClientRect();
  const seen = (b) => b.width > 0 && b.height > 0;
  const across = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
  const wrong = [];
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) wrong.push("the page scrolls sideways");
  for (const part of document.querySelectorAll("h1,h2,h3,h4,p,li,dt,dd,figcaption,button,label,input,.plot,.scroll")) {
    const b = box(part);
    if (seen(b) && (b.left < -1 || b.right > width + 1)) wrong.push(`${part.tagName} leaves: ${part.textContent}`);
    if (part.scrollWidth > part.clientWidth + 1 && part.clientWidth && !part.matches(".scroll,.plot,input"))
      wrong.push(`${part.tagName} is cut: ${part.textContent}`);
  }
  for (const figure of document.querySelectorAll("figure")) {
    const parts = [...figure.children].filter((part) => seen(box(part)));
    parts.forEach((a, i) => parts.slice(i + 1).forEach((b) => {
      if (across(box(a), box(b))) wrong.push(`${a.className || a.tagName} covers ${b.className || b.tagName}`);
    }));
    const plot = figure.querySelector(".plot"), frame = box(plot);
    const texts = [...plot.querySelectorAll("svg text")].filter((t) => t.textContent && seen(box(t)));
    for (const text of texts) {
      const b = box(text);
      if (b.left < frame.left - 1 || b.right > frame.right + 1 || b.top < frame.top - 1 || b.bottom > frame.bottom + 1)
        wrong.push(`${plot.id}: "${text.textContent}" leaves its drawing`);
    }
    texts.forEach((a, i) => texts.slice(i + 1).forEach((b) => {
      if (across(box(a), box(b))) wrong.push(`${plot.id}: "${a.textContent}" covers "${b.textContent}"`);
    }));
  }
  return wrong;
})()
"""
FIGURES = """
[...document.querySelectorAll("figure")].filter((f) => f.getBoundingClientRect().height > 0).map((figure) => {
  const plot = figure.querySelector(".plot");
  const said = (axis) => plot.querySelector(`.${axis}title`)?.textContent || "";
  return {
    name: plot.id, title: figure.querySelector("h4").textContent, x: said("x"), y: said("y"),
    caption: figure.querySelector("figcaption").textContent,
    points: (plot.data || []).reduce((sum, trace) => sum + trace.x.filter((v) => v !== null).length, 0),
    marks: plot.querySelectorAll(".scatterlayer path, .barlayer path, .heatmaplayer image").length,
  };
})
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages written once for all tests, by name."""
    plotly_js, written = plotly_source(), {}
    for num_ranks in (1, 3, 64):
        found = read(run(num_ranks=num_ranks), f"{num_ranks} ranks")
        written[str(num_ranks)] = make_page("made up", [run_section(found, found.name)], plotly_js)
    for name, text in (("several", ""), ("hostile", HOSTILE)):
        runs = [read(run(num_ranks=n, text=text), f"{text} {n}") for n in (3, 16)]
        target = Target(metric=text or "accuracy", value=0.8)
        sections = [comparison(runs, target, "made up"), *(run_section(each, each.name, folded=True) for each in runs)]
        written[name] = make_page(text or name, sections, plotly_js)
    folder = tmp_path_factory.mktemp("pages")
    for name, page in written.items():
        (folder / f"{name}.html").write_text(page)
    return {name: folder / f"{name}.html" for name in written}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(CHROMIUM, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def unfold(browser):
    """Open whatever is folded, and wait until what it holds has been drawn."""
    browser.value("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    browser.value("new Promise((done) => setTimeout(done, 50))")
    ready = "[...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('.xtitle'))"
    wait = f"new Promise((done) => {{ const look = () => {ready} ? done() : setTimeout(look, 20); look(); }})"
    browser.value(wait)


@pytest.fixture(
    scope="module",
    params=[(name, width) for name in ("1", "3", "64", "several", "hostile") for width in (1280, 390)],
    ids=lambda case: f"{case[0]}-{case[1]}",
)
def shown(request, browser, pages):
    """A page that is open at some width, all of it unfolded; its name."""
    name, width = request.param
    browser.open(pages[name], width=width)
    unfold(browser)
    return name


def test_nothing_overlaps_is_cut_or_leaves_the_page(browser, shown):
    assert browser.value(LAYOUT) == []


def test_every_figure_is_drawn_with_title_caption_and_units(browser, shown):
    figures = browser.value(FIGURES)
    assert len(figures) >= 10
    for figure in figures:
        assert figure["title"], figure
        assert figure["caption"].endswith("."), figure
        assert figure["x"].endswith(")"), figure
        assert figure["y"].endswith(")"), figure
        assert figure["points"], figure
        assert figure["marks"], figure


def test_no_request_leaves_the_page_and_nothing_complains(browser, pages, shown):
    outside = [url for url in browser.requests if not url.startswith(("data:", "blob:"))]
    assert outside == [pages[shown].resolve().as_uri()]
    assert browser.complaints == []


def test_names_from_logs_are_shown_as_they_are_and_run_nothing(browser, pages):
    browser.open(pages["hostile"], width=1280)
    unfold(browser)
    assert browser.value("window.hacked") is None
    assert HOSTILE in browser.value("document.querySelector('td').textContent + document.body.textContent")
    assert browser.value("document.querySelectorAll('main img, main script').length") == 0


def test_dark_and_light_differ_and_a_change_repaints(browser, pages):
    ground = "document.querySelector('.plot .main-svg').style.background"
    line = "document.querySelector('.plot .js-line').style.stroke"
    browser.open(pages["3"], width=1280)
    light = browser.value(ground), browser.value(line)
    browser.prefer(dark=True)
    browser.value("new Promise((done) => setTimeout(done, 200))")
    repainted = browser.value(ground), browser.value(line)
    browser.open(pages["3"], width=1280, dark=True)
    assert (browser.value(ground), browser.value(line)) == repainted
    assert all(a != b for a, b in zip(light, repainted, strict=True))


def test_a_view_that_is_chosen_is_drawn(browser, pages):
    browser.open(pages["3"], width=1280)
    bars = "JSON.stringify(document.getElementById('s0-timeline').data.map((trace) => trace.x))"
    late = browser.value(bars)
    browser.value("document.querySelector('[data-for=s0-timeline] button').click()")
    assert browser.value(bars) != late
    marked = "document.getElementById('s0-goodput').data[0].y[0]"
    last = browser.value(marked)
    slide = "const slider = document.querySelector('[data-for=s0-goodput] input'); slider.value = 0;"
    browser.value(f"(() => {{ {slide} slider.dispatchEvent(new Event('input')); }})()")
    assert browser.value(marked) < last
    assert "Plan of step 10:" in browser.value("document.querySelector('[data-for=s0-goodput] output').textContent")
