"""Reading a report as a browser would, for tests."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"
_VOID = {"meta"}


class Page(HTMLParser):
    """A page's tags, attributes and text. Raises AssertionError where an element is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.source = text
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1] == tag, f"</{tag}> closes {self._open[-1:]}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self.words.append((self._open[-1] if self._open else "", data))

    def text(self, *tags: str) -> str:
        """All text, or that directly inside the given tags; the style sheet aside."""
        return " ".join(data for tag, data in self.words if tag != "style" and (not tags or tag in tags))

    def drawings(self) -> list[ElementTree.Element]:
        """Every SVG, parsed as XML, which is stricter than HTML."""
        return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", self.source, re.DOTALL)]

    def drawing(self, title: str) -> ElementTree.Element:
        """The one SVG of that title."""
        found = [svg for svg in self.drawings() if svg.findtext(f"{SVG}title") == title]
        assert len(found) == 1, [svg.findtext(f"{SVG}title") for svg in self.drawings()]
        return found[0]


def of_class(drawing: ElementTree.Element, *classes: str) -> list[ElementTree.Element]:
    """The elements of a drawing that have all of the classes."""
    return [element for element in drawing.iter() if set(classes) <= set((element.get("class") or "").split())]


def numbers_of(path: str) -> list[float]:
    """Every number in a path's data, in order."""
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", path)]
