from __future__ import annotations

import math
import os
import signal
import threading
import time
from queue import SimpleQueue

import pytest

from milepost.checkpoint.background import Background
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


def test_ctrl_c_while_a_call_is_waited_for_does_not_make_it_seem_ended() -> None:
    answered = threading.Event()
    call = Background(lambda: answered.wait(60), "hangs")
    waits = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT))
    waits.start()
    with pytest.raises(KeyboardInterrupt):
        call.wait(60)
    assert not call.ended
    answered.set()
    assert call.wait(60)
    assert call.result() is True


def test_what_is_done_too_late_is_undone() -> None:
    answers: SimpleQueue[str] = SimpleQueue()
    undone: SimpleQueue[str] = SimpleQueue()
    with pytest.raises(WriteError):
        Deadline(0.1).within("a folder", answers.get, late=undone.put)
    answers.put("made")
    assert undone.get(timeout=60) == "made"
    # Also where it was done in the moment in which nobody waited any more; what failed left nothing to undo.
    call = Background(lambda: "made", "quick")
    assert call.wait(60)
    call.leave(undone.put)
    assert undone.get_nowait() == "made"
    failed = Background(lambda: 1 / 0, "fails")
    assert failed.wait(60)
    failed.leave(undone.put)
    assert undone.empty()
    assert Deadline(60.0).within("a folder", lambda: 3, late=undone.put) == 3
    assert undone.empty()
