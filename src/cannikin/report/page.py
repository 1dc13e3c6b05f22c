"""The page: one HTML text that needs nothing beside it.

Plotly's JavaScript, the style and the numbers are in it, and its policy for content forbids every request, so that it
opens the same without a network. Whatever comes from a log is escaped.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

import msgspec

from cannikin._version import __version__
from cannikin.errors import CannikinError
from cannikin.report.figure import Figure, Key, Missing

__all__ = ["Item", "Section", "Table", "make_page", "plotly_source"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with a title, all cells text; `note` says what is left out. `folded` tables open on a click."""

    title: str
    titles: list[str]
    rows: list[list[str]]
    note: str = ""
    folded: bool = False


Item = Figure | Missing | Table


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page: sentences, single facts, then headings with figures and tables; folded, a click opens it."""

    title: str
    sentences: list[str]
    facts: list[tuple[str, str]]
    parts: dict[str, list[Item]]
    folded: bool = False


def make_page(title: str, sections: list[Section], plotly_js: str) -> str:
    """The whole page."""
    figures: dict[str, Any] = {}
    body = "".join(_section(section, f"s{place}", figures, first=place == 0) for place, section in enumerate(sections))
    style, program = (_asset(name) for name in ("page.css", "page.js"))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}"
        f"<footer>Written by cannikin {html.escape(__version__)}.</footer>\n</main>\n"
        f'<script type="application/json" id="figures">{_embedded(figures)}</script>\n'
        f"<script>{plotly_js}</script>\n<script>\n{program}</script>\n</body>\n</html>\n"
    )


def plotly_source() -> str:
    """Plotly's JavaScript, from the plotly package.

    Raises:
        CannikinError: the package is not installed.
    """
    try:
        return (resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise CannikinError("the report needs plotly: pip install 'cannikin[report]'") from error


def _asset(name: str) -> str:
    return (resources.files("cannikin.report") / "assets" / name).read_text(encoding="utf-8")


def _embedded(value: Any) -> str:
    """JSON that no character of can end the element it stands in."""
    plain = msgspec.json.encode(value).decode()
    for character in "<>&\u2028\u2029":
        plain = plain.replace(character, f"\\u{ord(character):04x}")
    return plain


def _section(section: Section, name: str, figures: dict[str, Any], *, first: bool) -> str:
    level = 1 if first else 2
    told = "".join(f"<p>{_sentence(sentence)}</p>\n" for sentence in section.sentences)
    facts = "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>\n" for k, v in section.facts)
    inside = f'<div class="headline">\n{told}</div>\n' + (f'<dl class="facts">\n{facts}</dl>\n' if facts else "")
    for heading, items in section.parts.items():
        drawn = "".join(_item(item, name, figures, wide=wide) for item, wide in _arranged(items))
        inside += f'<h{level + 1}>{html.escape(heading)}</h{level + 1}>\n<div class="grid">\n{drawn}</div>\n'
    title = html.escape(section.title)
    if section.folded:
        return f'<details class="run" id="{name}"><summary><h2>{title}</h2></summary>\n{inside}</details>\n'
    return f'<section id="{name}">\n<h{level}>{title}</h{level}>\n{inside}</section>\n'


def _sentence(sentence: str) -> str:
    """A sentence in which no line ends between a number and its unit."""
    return html.escape(
        re.sub(r"(\d) (ms|s|min|h|x)(?= |\W|$)", "\\1\u00a0\\2", sentence).replace("\u00a0x ", "\u00a0x\u00a0")
    )


def _arranged(items: list[Item]) -> list[tuple[Item, bool]]:
    """Items in an order, and whether each is wide, such that two columns have no holes: no figure stands alone."""
    ordered = sorted(items, key=lambda item: isinstance(item, Missing))
    widths: list[bool] = []
    alone = False  # whether a figure of one column still has none beside it
    for item in ordered:
        narrow = isinstance(item, Figure) and not item.wide
        if not narrow and alone:
            widths[-1] = True
        alone = narrow and not alone
        widths.append(not narrow)
    if alone:
        widths[-1] = True
    return list(zip(ordered, widths, strict=True))


def _item(item: Item, section: str, figures: dict[str, Any], *, wide: bool) -> str:
    if isinstance(item, Table):
        return _table(item)
    title = html.escape(item.title)
    if isinstance(item, Missing):
        return f'<div class="missing wide"><h4>{title}</h4><p>{html.escape(item.reason)}</p></div>\n'
    name = f"{section}-{item.name}"
    figures[name] = {
        "layout": {**item.layout, "height": item.height},
        "views": [{"label": view.label, "traces": view.traces} for view in item.views],
        "chosen": item.chosen % len(item.views),
    }
    width = "figure wide" if wide else "figure"
    return (
        f'<figure class="{width}" aria-labelledby="{name}-title">\n<h4 id="{name}-title">{title}</h4>\n'
        f"{_legend(item)}{_controls(item, name)}"
        f'<div class="plot" id="{name}" style="height:{item.height}px"></div>\n'
        f"<figcaption>{html.escape(item.caption)}</figcaption>\n</figure>\n"
    )


def _legend(figure: Figure) -> str:
    keys = "".join(_key(key) for key in figure.legend)
    if figure.scale is not None:
        low, high = (html.escape(end) for end in figure.scale)
        keys += f'<li class="scale"><span>{low}</span><i></i><span>{high}</span></li>'
    return f'<ul class="legend">{keys}</ul>\n' if keys else ""


def _key(key: Key) -> str:
    return f'<li><i class="{key.style}" style="--colour:var(--{key.colour})"></i>{html.escape(key.label)}</li>'


def _controls(figure: Figure, name: str) -> str:
    """Buttons for a few views, a slider for many; nothing for one."""
    if len(figure.views) == 1:
        label = figure.views[0].label
        return f'<p class="view">{html.escape(label)}</p>\n' if label else ""
    chosen = figure.chosen % len(figure.views)
    if len(figure.views) <= 3:
        buttons = "".join(
            f'<button type="button" data-view="{place}" aria-pressed="{str(place == chosen).lower()}">'
            f"{html.escape(view.label)}</button>"
            for place, view in enumerate(figure.views)
        )
        return f'<div class="views" data-for="{name}">{buttons}</div>\n'
    return (
        f'<label class="views" data-for="{name}"><output>{html.escape(figure.views[chosen].label)}</output>'
        f'<input type="range" min="0" max="{len(figure.views) - 1}" value="{chosen}" '
        f'aria-label="{html.escape(figure.title)}: which plan"></label>\n'
    )


def _cell(cell: str, element: str = "td") -> str:
    """A cell, with room for what it holds: on narrow screens a table scrolls rather than break every word."""
    room = ' class="longer"' if len(cell) > 40 else ' class="long"' if len(cell) > 24 else ""
    return f"<{element}{room}>{html.escape(cell)}</{element}>"


def _table(table: Table) -> str:
    head = "".join(_cell(title, "th") for title in table.titles)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in table.rows)
    note = f"<p>{html.escape(table.note)}</p>\n" if table.note else ""
    cells = f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody></table>"
    inside = note + (f'<div class="scroll">{cells}</div>\n' if table.rows else "")
    title = html.escape(table.title)
    if table.folded:
        return f'<details class="table wide"><summary><h4>{title}</h4></summary>\n{inside}</details>\n'
    return f'<div class="table wide"><h4>{title}</h4>\n{inside}</div>\n'
