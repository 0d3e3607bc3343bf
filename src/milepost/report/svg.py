"""Markup, scales and ticks: what every drawing in the report is made of.

All text goes through `markup`, which escapes it; no other function writes a character of a file into the page.
"""

from __future__ import annotations

import math
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

# What neither XML nor UTF-8 can hold, control characters and lone surrogates, and what would turn the text around it:
# the marks that override its direction.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """Text that is markup already and must not be escaped again."""

    __slots__ = ()


def markup(tag: str, /, *children: str | None, **attributes: object) -> Markup:
    """One element. Children that are not `Markup` are escaped; a child or attribute of None is left out.

    Attribute names are Python's: a trailing underscore is dropped, other underscores are dashes (`class_`,
    `text_anchor`). Floats are written with at most two decimals.
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    inner = joined(child for child in children if child is not None)
    return Markup(f"<{tag}{written}>{inner}</{tag}>")


def joined(parts: Iterable[str]) -> Markup:
    """Parts one after the other; those that are not `Markup` are escaped."""
    return Markup("".join(part if isinstance(part, Markup) else clean(part) for part in parts))


def clean(text: str) -> Markup:
    """Any text, safe to stand in HTML and XML, inside an element or an attribute."""
    return Markup(escape(_UNPRINTABLE.sub("\ufffd", text), quote=True))


def _attribute(value: object) -> str:
    return coordinate(value) if isinstance(value, float) else clean(str(value))


def coordinate(value: float) -> str:
    """A length in user units, as short as two decimals allow."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def drawing(name: str, title: str, description: str, width: float, height: float, *children: str) -> Markup:
    """An SVG with its title and description for those who do not see it. `name` must be unique in the page."""
    return markup(
        "svg",
        markup("title", title, id=f"{name}-title"),
        markup("desc", description, id=f"{name}-desc"),
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {coordinate(width)} {coordinate(height)}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
    )


def text_width(text: str, size: float = 11) -> float:
    """About how wide a text is set, in user units: enough to know whether two labels collide.

    A Latin letter or digit takes 0.56 of the size, an ideograph or emoji all of it, a combining mark nothing.
    """
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    marks = sum(unicodedata.category(char) in ("Mn", "Me", "Cf") for char in text)
    return size * (wide + (len(text) - wide - marks) * 0.56)


@dataclass(frozen=True)
class Scale:
    """Maps values `low..high` to coordinates `start..end`, linearly or by logarithm; `low` must be below `high`."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        # Halved, so that the span of the whole float range stays finite.
        return self.start + (value / 2 - low / 2) / (high / 2 - low / 2) * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[tuple[float, str]]:
        """About `count` round values inside the scale, each with its label."""
        if self.logarithmic:
            return _decades(self.low, self.high)
        step = nice_step(self.high / count - self.low / count)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [(index * step, tick_label(index * step, step)) for index in range(first, last + 1)]


def nice_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(max(least, 1e-300)))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= least * (1 - 1e-9))


def tick_label(value: float, step: float) -> str:
    """`value`, a multiple of `step`, with the digits that `step` needs: 0.05, 1,500, 2e-06."""
    if abs(value) < step / 2:
        return "0"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if decimals > 4 or abs(value) >= 1e7:
        digits = max(0, math.floor(math.log10(abs(value)) + 1e-9) - math.floor(math.log10(step) + 1e-9))
        return f"{value:.{digits}e}"
    return f"{value:,.{decimals}f}"


def _decades(low: float, high: float) -> list[tuple[float, str]]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    stride = max(1, math.ceil((last - first + 1) / 5))
    return [(10.0**power, f"{10.0**power:g}") for power in range(first, last + 1, stride)]


@dataclass(frozen=True)
class TimeScale:
    """Maps unix seconds to coordinates, with long idle stretches folded to a fixed width.

    `spans` are (first second, last second, first x, last x), ascending; between two spans lies a fold.
    """

    spans: tuple[tuple[float, float, float, float], ...]

    def __call__(self, time: float) -> float:
        index = max(0, bisect_right([span[0] for span in self.spans], time) - 1)
        first, last, start, end = self.spans[index]
        if time > last and index + 1 < len(self.spans):
            following = self.spans[index + 1]
            first, last, start, end = last, following[0], end, following[2]
        return start + min(1.0, max(0.0, (time - first) / (last - first))) * (end - start)

    @property
    def folds(self) -> list[tuple[float, float, float]]:
        """Each fold: its first x, its last x, and how many seconds it hides."""
        pairs = zip(self.spans, self.spans[1:], strict=False)
        return [(before[3], after[2], after[0] - before[1]) for before, after in pairs]

    def ticks(self, count: int = 8) -> list[tuple[float, str]]:
        """About `count` round times as (x, label), in UTC; the first of each day carries the date."""
        shown = sum(span[1] - span[0] for span in self.spans)
        step = next((step for step in _TIME_STEPS if step >= shown / count), nice_step(shown / count / 86400) * 86400)
        found: list[tuple[float, str]] = []
        day, free = "", -math.inf
        for first, last, *_ in self.spans:
            for index in range(math.ceil(first / step), math.floor(last / step) + 1):
                moment = datetime.fromtimestamp(index * step, UTC)
                date = f"{moment:%b} {moment.day}"
                label = f"{moment:%H:%M}" if step % 60 == 0 else f"{moment:%H:%M:%S}"
                label = date if step >= 86400 else (f"{date}, {label}" if date != day else label)
                x = self(index * step)
                if x - text_width(label) / 2 >= free:
                    found.append((x, label))
                    day, free = date, x + text_width(label) / 2 + 8
        return found


_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


def time_scale(busy: Sequence[tuple[float, float]], start: float, end: float, fold: float = 44) -> TimeScale:
    """A scale over the `busy` stretches (first second, last second), ascending by their first.

    A stretch between them that is longer than a tenth of all busy time is folded to `fold` user units.
    """
    merged: list[tuple[float, float]] = []
    total = sum(last - first for first, last in busy)
    for first, last in busy:
        if merged and first - merged[-1][1] <= max(total / 10, 1.0):
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    # A run of one event still has a place; at most a third of the width goes to folds.
    merged = [(first, max(last, first + 1.0)) for first, last in merged]
    fold = min(fold, (end - start) / 3 / max(1, len(merged) - 1))
    unit = (end - start - fold * (len(merged) - 1)) / sum(last - first for first, last in merged)
    spans, x = [], start
    for first, last in merged:
        spans.append((first, last, x, x + (last - first) * unit))
        x += (last - first) * unit + fold
    return TimeScale(tuple(spans))
