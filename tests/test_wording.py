"""How milepost words what a disk refuses: one sentence wherever something is written."""

from __future__ import annotations

import errno
import os

import pytest

from milepost.wording import disk_error


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "the disk is full; make room and try again"),
        (errno.EDQUOT, "your disk quota is used up; make room and try again"),
        (errno.EFBIG, "File too large for the file system or for `ulimit -f`; choose another place"),
        (errno.ENFILE, "more files than this machine lets all processes open; end some that have many open"),
        (errno.EROFS, "the file system is read-only; choose another place"),
        (errno.EACCES, "no permission to write there; choose another place"),
        (errno.EEXIST, "a file of that name is there already; choose another place"),
        (errno.ENOTDIR, "a part of the path is a file; choose another place"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_what_a_disk_refuses(number: int, says: str) -> None:
    assert disk_error(OSError(number, os.strerror(number))) == says


def test_advice_of_the_one_who_writes() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert disk_error(full, room="keep fewer steps") == "the disk is full; keep fewer steps"
    assert disk_error(OSError("no number")) == "no number"
