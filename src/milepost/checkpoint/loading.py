"""The loading half of a run's record: a step is opened, compared with the live model as a whole, and then loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from milepost.checkpoint import restore
from milepost.checkpoint.comm import Communicator, on_all, together
from milepost.checkpoint.resume import Part
from milepost.engines.base import Engine
from milepost.errors import MismatchError
from milepost.index import TensorIndex


class Stateful(Protocol):
    """A part of the training state that is small and the same on all ranks: KL controller, data position."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state, as JSON knows it."""

    def load_state_dict(self, state: Any, /) -> str | Sequence[str] | None:
        """Take over a state. Returns sentences where it was not restored as it was saved, and why; else nothing."""


@dataclass(frozen=True)
class Opened:
    """A step that is about to be loaded: the index of each role, and trainer_state.json."""

    indexes: Mapping[str, TensorIndex]
    state: Mapping[str, Any]


class Loader:
    """Loads a step into the engines and parts of a run. All ranks make the same calls.

    roles:        role -> its engine
    parts:        name -> other state
    fingerprint:  config key -> value, of now
    """

    def __init__(
        self,
        comm: Communicator,
        roles: Mapping[str, Engine],
        parts: Mapping[str, Stateful],
        fingerprint: Mapping[str, str],
    ) -> None:
        self._comm = comm
        self._roles = roles
        self._parts = parts
        self._fingerprint = fingerprint

    def open(self, folder: Path) -> Opened:
        """Open a step: headers and small state of all roles are read, and nothing is loaded. Raises on all ranks."""
        return on_all(self._comm, lambda: _open(folder, self._roles))

    def restore(self, opened: Opened) -> tuple[list[Part], list[str]]:
        """Compare everything, then load everything."""
        state, indexes = opened.state, opened.indexes
        fits = on_all(
            self._comm,
            lambda: {role: restore.fit(role, indexes[role], engine.tensors()) for role, engine in self._roles.items()},
        )
        remarks = together(
            self._comm, lambda: {role: restore.fill(fits[role], engine) for role, engine in self._roles.items()}
        )
        # Apart, since ranks meet in it: none may be there while another could not read its part.
        together(self._comm, self._finish_load)
        parts: list[Part] = []
        notes: list[str] = []
        for role, engine in self._roles.items():
            parts += restore.role_parts(fits[role], engine, _of_all_ranks([said[role] for said in remarks]))
        saved = state.get("parts") or {}
        together(self._comm, lambda: parts.extend(self._restore_parts(saved)))
        if "fingerprint" in state:
            changed = restore.changes(state["fingerprint"], self._fingerprint)
            notes += [f"the config has changed: {changed}"] if changed else []
        return parts, notes

    def _finish_load(self) -> None:
        for engine in self._roles.values():
            engine.finish_load()

    def _restore_parts(self, saved: Mapping[str, Any]) -> list[Part]:
        parts = []
        for name, part in self._parts.items():
            if name not in saved:
                parts.append(Part(name, "fresh", restore.NOT_SAVED))
                continue
            try:
                said = part.load_state_dict(saved[name])
            except Exception as error:
                raise MismatchError(f"{name}: its saved state cannot be taken over ({error})") from error
            why = said if isinstance(said, str) else "; ".join(said or ())
            parts.append(Part(name, "fresh" if why else "restored", why))
        return parts + [Part(name, "skipped", restore.NO_PLACE) for name in saved if name not in self._parts]

    def all_fresh(self) -> list[Part]:
        """What a start without a step has."""
        parts = [part for role, engine in self._roles.items() for part in restore.fresh_parts(role, engine)]
        return parts + [Part(name, "fresh") for name in self._parts]


def _open(folder: Path, roles: Mapping[str, Engine]) -> Opened:
    indexes = {role: restore.open_for(folder / role, engine.tensors()) for role, engine in roles.items()}
    for index in indexes.values():
        dict(index.objects)  # read when first asked for: a damaged file must show now
    return Opened(indexes, restore.read_state(folder))


def _of_all_ranks(remarks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The remarks of all ranks on each part, each once; one that not all made, with the ranks that did."""
    speakers: dict[tuple[str, str], list[int]] = {}
    for rank, said in enumerate(remarks):
        for part, why in said.items():
            speakers.setdefault((part, why), []).append(rank)
    joined: dict[str, list[str]] = {}
    for (part, why), ranks in speakers.items():
        some = "" if len(ranks) == len(remarks) else f" (rank {', '.join(map(str, ranks))})"
        joined.setdefault(part, []).append(why + some)
    return {part: "; ".join(reasons) for part, reasons in joined.items()}
