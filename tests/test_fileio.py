"""What is read of a file, and what it means that it is not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from milepost.errors import CallError, DamagedError
from milepost.fileio import blocks_of
from milepost.layouts import open_directory


def test_a_file_comes_whole_in_blocks(tmp_path: Path) -> None:
    data = os.urandom((1 << 20) + 17)
    (tmp_path / "f").write_bytes(data)
    blocks = list(blocks_of(tmp_path / "f"))
    assert len(blocks) == 2 and b"".join(blocks) == data


def test_an_error_of_who_takes_the_blocks_stays_that(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    with pytest.raises(OSError, match="No space left"), Path("/dev/full").open("wb", buffering=0) as full:
        full.writelines(blocks_of(tmp_path / "f"))


def test_a_file_that_the_disk_does_not_give_is_damaged() -> None:
    for path, why in (("/proc/self/mem", "Input/output error"), ("/nowhere/f", "No such file or directory")):
        with pytest.raises(DamagedError, match=f"^{path}: cannot be read: {why}$"):
            list(blocks_of(Path(path)))


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("name", ["model_world_size_1_rank_0.pt", "model.safetensors"])
def test_no_file_more_to_be_opened_is_no_damage(
    name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(b"any")
    real = os.open

    def full(path: object, *flags: int, **where: int) -> int:
        if str(path).endswith(name):
            raise OSError(code, os.strerror(code), path)
        return real(path, *flags, **where)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(CallError, match=f"{name}: cannot be opened: more files than .*; (raise|end) "):
        open_directory(tmp_path)
