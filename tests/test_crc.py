"""CRC-32 by whatever library is there: the numbers are zlib's, which are those of every zip archive."""

from __future__ import annotations

import importlib.util
import platform
import random
import sys
import zlib
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost import crc


def without_isal(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as it is where ISA-L has no wheel."""
    monkeypatch.setitem(sys.modules, "isal", None)
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    spec = importlib.util.find_spec("milepost.crc")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@given(st.binary(max_size=300), st.binary(max_size=3000))
def test_runs_go_on_from_each_other_and_are_combined(first: bytes, second: bytes) -> None:
    both = zlib.crc32(first + second)
    assert crc.crc32(second, crc.crc32(first)) == both
    assert crc.crc32_of_both(zlib.crc32(first), zlib.crc32(second), len(second)) == both


@pytest.mark.parametrize("length", [0, 1, 5119, 5121, 3_000_003])  # small ones take other ways through the libraries
@pytest.mark.parametrize("begin", [0, 1, 63])
def test_with_and_without_the_library(monkeypatch: pytest.MonkeyPatch, length: int, begin: int) -> None:
    data = memoryview(random.Random(length).randbytes(begin + length))[begin:]
    assert crc.crc32(data) == without_isal(monkeypatch).crc32(data) == zlib.crc32(data)


def test_each_is_taken_where_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert without_isal(monkeypatch).crc32 is zlib.crc32
    # Where there are wheels it comes with the package.
    if platform.machine() in ("x86_64", "aarch64"):
        assert crc.crc32 is not zlib.crc32
