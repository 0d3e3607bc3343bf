"""An object as torch.save pickles it, and the memory that its tensors lie in, which torch.save writes behind it."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

_PROTOCOL = 2  # torch.save's
_STORAGES = frozenset((torch.storage.TypedStorage, torch.UntypedStorage))


def pickled(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """The pickle of an object, and its storages as bytes (uint8, one dimension, on their device), in the order in which
    the pickle numbers them. Tensors that share a storage refer to the same one."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    return buffer.getvalue(), pickler.storages


class _Pickler(pickle.Pickler):
    """What torch.serialization does with the storages that it meets: it leaves a tuple in their place.

    ("storage", class of the storage, its number, its device, its number of elements)
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.storages: list[torch.Tensor] = []
        self._numbers: dict[int, str] = {}

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if type(value) not in _STORAGES:  # asked of every object there is
            return None
        if isinstance(value, torch.storage.TypedStorage):
            storage, numel = value._untyped_storage, value._size()  # type: ignore[no-untyped-call]
            kind = getattr(torch, value._pickle_storage_type())  # type: ignore[no-untyped-call]
        else:
            storage, numel, kind = value, value.nbytes(), torch.UntypedStorage
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._numbers[storage._cdata] = str(len(self._numbers))
            self.storages.append(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
        return "storage", kind, number, torch.serialization.location_tag(storage), numel
