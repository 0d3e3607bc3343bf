from __future__ import annotations

import pytest

from milepost.errors import ConfigError
from milepost.trainer.overrides import parse_override, parse_value

# Hydra's documentation of the grammar gives these meanings; `test_like_hydra` asks Hydra's own parser
VALUES = {
    "1": 1,
    "-3": -3,
    "1_000": 1000,
    "001": "001",
    "1e-3": 0.001,
    ".5": 0.5,
    "5.": 5.0,
    "inf": float("inf"),
    "null": None,
    "NULL": None,
    "True": True,
    "false": False,
    "": "",
    "abc": "abc",
    "a b": "a b",
    "~/x": "~/x",
    "checkpoints/x-1.2": "checkpoints/x-1.2",
    "module:function": "module:function",
    "http://host:80/y": "http://host:80/y",
    "'a,b'": "a,b",
    '"q"': "q",
    "'1'": "1",
    r"'it\'s'": "it's",
    r"'back\\'": "back\\",
    r"'C:\dir'": r"C:\dir",
    r"a\,b": "a,b",
    "[]": [],
    "[1,2.5,x]": [1, 2.5, "x"],
    "[a, b ,'c d',null,[1,true]]": ["a", "b", "c d", None, [1, True]],
    "{}": {},
    "{a:1,b:{c:[x]}}": {"a": 1, "b": {"c": ["x"]}},
    "{a: 'x y', b: null}": {"a": "x y", "b": None},
    "${trainer.seed}": "${trainer.seed}",
    "a/${oc.env:HOME,x}/z": "a/${oc.env:HOME,x}/z",
    "[${x},${y}]": ["${x}", "${y}"],
    r"${oc.env:NONE,a\,b}": r"${oc.env:NONE,a\,b}",
}


@pytest.mark.parametrize("text", VALUES)
def test_value(text: str) -> None:
    assert repr(parse_value(text)) == repr(VALUES[text])


@pytest.mark.parametrize("text", [text for text in VALUES if text != "~/x"])  # Hydra wants that one quoted
def test_like_hydra(text: str) -> None:
    parser = pytest.importorskip("hydra.core.override_parser.overrides_parser").OverridesParser.create()
    theirs = parser.parse_override(f"key={text}").value()
    ours = parse_value(text)
    assert theirs == ours and str(theirs) == str(ours)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("a,b", r"write a list as \[a,b\]"),
        ("[a", "expected , or ] at character 3"),
        ("{a:1", "expected , or } at character 5"),
        ("{a}", "expected : at character 3"),
        ("'a", "quote at character 1 is not closed"),
        ("[1]x", "left over: 'x'"),
    ],
)
def test_value_that_is_none(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_value(text)


def test_words_can_be_left_as_typed() -> None:
    assert parse_value("1e3", words_are_text=True) == "1e3"
    assert parse_value("[1,true,null]", words_are_text=True) == ["1", "true", None]


@pytest.mark.parametrize(
    "text, key, value, delete",
    [
        ("a.b=1", "a.b", "1", False),
        ("+a.b=1=2", "a.b", "1=2", False),
        ("++a.b=", "a.b", "", False),
        ("~a.b", "a.b", None, True),
        ("~a.b=3", "a.b", "3", True),
    ],
)
def test_override(text: str, key: str, value: str | None, delete: bool) -> None:
    override = parse_override(text)
    assert (override.key, override.value, override.delete) == (key, value, delete)


@pytest.mark.parametrize("text", ["trainer.seed", "+a", "=1", "--seed=1", "a b=1", "~", ""])
def test_no_override(text: str) -> None:
    with pytest.raises(ConfigError, match="expected key=value"):
        parse_override(text)
