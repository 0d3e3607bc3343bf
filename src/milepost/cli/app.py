"""The application: how a command is called, and how errors become one line and an exit status.

Exit status: 0 good; 1 the checkpoint is not good, or diff found differences; 2 the call is not; 3 an internal error;
75 train was asked to stop, and wants to be started again; 130 Ctrl-C.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from milepost.cli import quick
from milepost.cli.commands import COMMANDS, function_of
from milepost.errors import CallError, MilepostError


def main() -> NoReturn:
    """Entry point of the `milepost` command."""
    # Thousands of objects are born while a process starts and a checkpoint is opened, and next to none in a cycle.
    gc.set_threshold(100_000, 50, 100)
    if sys.argv[1:2] != ["train"]:
        # OpenBLAS, which numpy brings, starts a thread a core, and each spins for a while whether a product comes or
        # not. The reading commands share out their own work.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _mend_streams()
    status = run(sys.argv[1:])
    # What is left ends with the process: a collector that looks through all of it on the way out costs as much as the
    # imports of a small merge.
    gc.freeze()
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit status."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
            signal.signal(number, _terminate)
    try:
        result = _call(list(arguments))
        sys.stdout.flush()
    except MilepostError as error:
        return _fail(error.exit_status, str(error))
    except KeyboardInterrupt:
        return _fail(130, "stopped; nothing half-written was left")
    except BrokenPipeError:
        return _reader_gone()
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # click ends with status 1, which is a verdict here
            return _reader_gone()
        if isinstance(leaving.code, int):
            return leaving.code
        raise
    except OSError as error:
        from milepost.wording import disk_error  # noqa: PLC0415  on the way to an error, start-up time counts no more

        # What writes says itself what was refused: this is something that was to be read, or stdout.
        why = "cannot be read: permission denied" if isinstance(error, PermissionError) else disk_error(error)
        place = f"{error.filename}: " if error.filename else ""
        return _fail(CallError.exit_status, f"{place}{why}")
    except Exception as error:  # noqa: BLE001  the one handler of last resort
        return _fail(3, f"internal error: {type(error).__name__}: {error} (MILEPOST_DEBUG=1 shows where)")
    return result if isinstance(result, int) else 0


def _call(arguments: list[str]) -> Any:
    if arguments and arguments[0] in COMMANDS:
        command = function_of(arguments[0])
        values = quick.read(command, arguments[1:])
        if values is not None:
            return command(**values)
    from milepost.cli import full  # noqa: PLC0415  only where it is needed; see milepost.cli.declared

    return full.call(arguments)


def _reader_gone() -> int:
    """`| head` has enough: no error. What is still buffered must not raise again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _fail(status: int, message: str) -> int:
    if os.environ.get("MILEPOST_DEBUG") == "1":
        import traceback  # noqa: PLC0415  as above

        traceback.print_exc()
    print(f"milepost: {message}", file=sys.stderr)
    return status


def _terminate(number: int, _frame: object) -> NoReturn:
    """SIGTERM, and a terminal that is closed, unwind as Ctrl-C does, so that temporary directories go."""
    raise SystemExit(128 + number)


def _mend_streams() -> None:
    """Have streams though the caller closed theirs: a file of a checkpoint would get their numbers, and with them what
    C code and child processes print. Paths may hold bytes that are no text; they leave as they came."""
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(free, True)
    os.close(free)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", errors="backslashreplace"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")
