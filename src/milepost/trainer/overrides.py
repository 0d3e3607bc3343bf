"""Reading `key=value`, `+key=value`, `++key=value` and `~key` as Hydra users type them.

The grammar is Hydra's for one value (https://hydra.cc/docs/advanced/override_grammar/basic/): quoted strings, lists
`[a,b]`, dicts `{a:1}`, null, booleans, numbers, interpolations, and plain text for all else. Sweeps (`a,b` outside
brackets) and functions have no meaning for a single run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from milepost.errors import ConfigError

_INTEGER = re.compile(r"[+-]?(0|[1-9](_?\d)*)")
_NUMBER = re.compile(
    r"[+-]?((\d(_?\d)*\.(\d(_?\d)*)?|\.\d(_?\d)*)([eE][+-]?\d(_?\d)*)?|\d(_?\d)*[eE][+-]?\d(_?\d)*|inf|nan)",
    re.IGNORECASE,
)
_ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")


@dataclass(frozen=True)
class Override:
    """One override: `value` is its text as typed, None for `~key`; `delete` tells `~key` and `~key=value` apart."""

    key: str
    value: str | None
    delete: bool
    text: str


def parse_override(text: str) -> Override:
    """Split one command-line override. Raises ConfigError where it is none."""
    head, equals, value = text.partition("=")
    delete = head.startswith("~")
    key = head.lstrip("~") if delete else head.removeprefix("++").removeprefix("+")
    if not re.fullmatch(r"[A-Za-z_][\w\-/@.]*", key) or not (equals or delete):
        raise ConfigError(f"override {text!r}: expected key=value, +key=value, ++key=value or ~key")
    return Override(key=key, value=value if equals else None, delete=delete, text=text)


def parse_scalar(text: str) -> object:
    """What an unquoted word means: None, a bool, an int, a float or else the word itself."""
    lowered = text.lower()
    if lowered == "null":
        return None
    if lowered in ("true", "false"):
        return lowered == "true"
    if _INTEGER.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        return float(text)
    return _ESCAPED.sub(r"\1", text)


def parse_value(text: str, *, words_are_text: bool = False) -> object:
    """The value of an override.

    Args:
        text: what stands behind the first `=`.
        words_are_text: leave unquoted words other than null as they are typed, so that a run may be called `1e3`.

    Raises:
        ValueError: brackets or quotes do not match, or the text is a sweep; the caller says for which key.
    """
    reader = _Reader(text, words_are_text)
    value = reader.read(stop="")
    reader.skip_spaces()
    if reader.at < len(text):
        rest = text[reader.at :]
        reason = "a comma makes a sweep in Hydra: write a list as [a,b]" if rest[0] == "," else f"left over: {rest!r}"
        raise ValueError(f"{reason}, or quote the whole value")
    return value


class _Reader:
    """Recursive descent over one value; `at` is the next character to read."""

    def __init__(self, text: str, words_are_text: bool) -> None:
        self.text = text
        self.at = 0
        self.words_are_text = words_are_text

    def skip_spaces(self) -> None:
        while self.peek() in (" ", "\t"):
            self.at += 1

    def peek(self) -> str:
        """The next character, or the empty string at the end."""
        return self.text[self.at : self.at + 1]

    def expect(self, wanted: str) -> str:
        self.skip_spaces()
        found = self.peek()
        if not found or found not in wanted:
            raise ValueError(f"expected {' or '.join(wanted)} at character {self.at + 1}")
        self.at += 1
        return found

    def read(self, stop: str) -> object:
        """Read one value, up to a character of `stop`, a comma or the end."""
        self.skip_spaces()
        match self.peek():
            case "[":
                return self.read_list()
            case "{":
                return self.read_dict()
            case "'" | '"':
                return self.read_quoted()
        return self.read_word(stop)

    def read_list(self) -> list[object]:
        self.at += 1
        items: list[object] = []
        self.skip_spaces()
        if self.peek() == "]":
            self.at += 1
            return items
        while True:
            items.append(self.read(stop="]"))
            if self.expect(",]") == "]":
                return items

    def read_dict(self) -> dict[str, object]:
        self.at += 1
        items: dict[str, object] = {}
        self.skip_spaces()
        if self.peek() == "}":
            self.at += 1
            return items
        while True:
            self.skip_spaces()
            name = self.read_quoted() if self.peek() in ("'", '"') else str(self.read_word(stop=":}"))
            self.expect(":")
            items[name] = self.read(stop="}")
            if self.expect(",}") == "}":
                return items

    def read_quoted(self) -> str:
        """A quoted string. Backslashes count only in front of a quote: there, each pair is one backslash."""
        quote, start = self.peek(), self.at
        self.at += 1
        parts: list[str] = []
        while self.at < len(self.text):
            slashes = len(self.text) - self.at - len(self.text[self.at :].lstrip("\\"))
            self.at += slashes
            if self.peek() != quote:
                parts.append("\\" * slashes + self.peek())
            elif slashes % 2:
                parts.append("\\" * (slashes // 2) + quote)
            else:
                self.at += 1
                return "".join(parts) + "\\" * (slashes // 2)
            self.at += 1
        raise ValueError(f"the quote at character {start + 1} is not closed")

    def read_word(self, stop: str) -> object:
        """Unquoted text; an interpolation `${...}` in it is taken whole, whatever it holds."""
        start, depth = self.at, 0
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\" and self.at + 1 < len(self.text):
                self.at += 2
                continue
            if self.text.startswith("${", self.at):
                depth += 1
                self.at += 2
                continue
            if char == "}" and depth:
                depth -= 1
            elif depth == 0 and (char == "," or char in stop):
                break
            self.at += 1
        text = self.text[start : self.at].strip()
        if "${" in text:
            return text
        if self.words_are_text and text.lower() != "null":
            return _ESCAPED.sub(r"\1", text)
        return parse_scalar(text)
