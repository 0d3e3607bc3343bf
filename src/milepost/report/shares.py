"""Where the time of a run went, as one bar: what was training that counts, and what was not."""

from __future__ import annotations

from milepost.checkpoint.diary.goodput import Goodput
from milepost.report.svg import Markup, drawing, joined, markup
from milepost.wording import duration

_WIDTH, _HEIGHT = 1000.0, 26.0
_WORDS = {
    "training": "training that counts",
    "redone": "steps whose work was lost",
    "saving": "training waited for a save",
    "validating": "validation",
    "starting": "from a start to its first step",
    "down": "nothing ran",
    "stalled": "a phase hung",
    "rest": "all else",
}


def shares(spent: Goodput) -> Markup:
    """The bar and its legend; a part of which there is nothing is left out."""
    parts = {name: seconds for name, seconds in spent.parts.items() if seconds > 0}
    boxes, x = [], 0.0
    for name, seconds in parts.items():
        width = _WIDTH * seconds / spent.total
        title = markup("title", f"{_WORDS[name]}: {_amount(seconds, spent.total)}")
        box = markup("rect", x=x, y=0.0, width=width, height=_HEIGHT, class_=f"part {name}")
        boxes.append(markup("g", title, box))
        x += width
    bar = drawing("shares", "Where the time went", spent.words(), _WIDTH, _HEIGHT, *boxes)
    legend = [
        markup("li", markup("i", class_=f"part {name}"), f"{_WORDS[name]} {_amount(seconds, spent.total)}")
        for name, seconds in parts.items()
    ]
    return joined([bar, markup("ul", *legend, class_="legend")])


def _amount(seconds: float, total: float) -> str:
    return f"{duration(seconds)} ({seconds / total:.1%})"
