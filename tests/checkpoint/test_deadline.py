from __future__ import annotations

import math
import threading
import time

import pytest

from milepost.checkpoint.deadline import Deadline, in_time
from milepost.errors import WriteError


def test_what_comes_to_its_end_in_time_gives_its_result_or_its_error() -> None:
    for deadline in (Deadline(60.0), Deadline()):
        assert deadline.within("a file", lambda: 3) == 3
        with pytest.raises(ZeroDivisionError):
            deadline.within("a file", lambda: 1 / 0)
        deadline.check("a file")
        assert not deadline.missed


def test_what_does_not_is_an_error_that_names_the_file_and_is_left_to_itself() -> None:
    answered, done = threading.Event(), threading.Event()

    def hang() -> None:
        answered.wait()
        done.set()

    deadline = Deadline(0.2)
    with pytest.raises(
        WriteError, match=r"^here/a\.pt: the file system did not answer within 0\.20 s \(save_timeout\)"
    ):
        deadline.within(lambda: "here/a.pt", hang)
    assert deadline.missed
    # Who has given up must find nothing changed later.
    with pytest.raises(WriteError, match=r"^the step: "):
        deadline.check("the step")
    answered.set()
    assert done.wait(10)


def test_no_limit_is_no_thread() -> None:
    assert Deadline().within("", threading.current_thread) is threading.current_thread()
    assert Deadline(math.inf).left() is None


def test_in_time() -> None:
    assert in_time(10.0, lambda: None)
    assert not in_time(0.05, lambda: time.sleep(1))
