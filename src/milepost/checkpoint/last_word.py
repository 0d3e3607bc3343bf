"""Who has the last word about a step: the thread that commits it, or who waits for that thread and gives it up."""

from __future__ import annotations

from threading import Lock


class LastWord:
    """Whether a step gets its name. The thread that commits may be slow or hang, and who waits for it may have to leave
    or give up: only one of the two has its way.

    elsewhere: set where another rank commits, and this one has brought what that takes: what becomes of the step is
        not known here until all have heard of it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._naming = False
        self._refused = False
        self._taken_back = False
        self._kept = False
        self.elsewhere = False

    # Of who commits

    def name(self) -> bool:
        """Asked right before the step gets its name; from then on its files are not to be touched."""
        with self._lock:
            self._naming = not self._refused
            return self._naming

    def no_name(self) -> bool:
        """The step did not get its name, or lost it again. Whether it was given up before this: then its files are to
        be removed here, also what was written after who waited removed them."""
        with self._lock:
            self._naming = False
            return self._refused or self._taken_back

    def keep(self) -> bool:
        """Asked once the step has its name: whether it keeps it. From then on it is committed."""
        with self._lock:
            self._kept = not self._taken_back
            return self._kept

    # Of who waits

    @property
    def kept(self) -> bool:
        """Whether the step is committed, and nobody can give it up any more."""
        with self._lock:
            return self._kept

    def refuse(self) -> bool:
        """Give the step up. False: it is just getting its name, and stays."""
        with self._lock:
            self._refused = not self._naming
            return self._refused

    def take_back(self) -> bool:
        """Give the step up, though it may be getting its name: then that will be taken from it again. False in that
        case, and where it is committed."""
        with self._lock:
            self._refused = not self._naming
            self._taken_back = self._naming and not self._kept
            return self._refused
