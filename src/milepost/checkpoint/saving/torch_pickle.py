"""An object as torch.save pickles it, and the memory that its tensors lie in, which torch.save writes behind it."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

_PROTOCOL = 2  # torch.save's
_STORAGES = frozenset((torch.storage.TypedStorage, torch.UntypedStorage))
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))


def pickled(value: Any, *, alone: bool = False) -> tuple[bytes, list[torch.Tensor]]:
    """The pickle of an object, and its storages as bytes (uint8, one dimension, on their device), in the order in which
    the pickle numbers them. Tensors that share a storage refer to the same one.

    alone: as if every tensor lay on the CPU, without gradients and in memory of its own, though nothing is copied: what
        else is in its storage does not go along
    """
    buffer = io.BytesIO()
    pickler = _Alone(buffer) if alone else _Pickler(buffer)
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
            self.storages.append(self._bytes_of(storage))
        return "storage", kind, number, torch.serialization.location_tag(storage), numel

    def _bytes_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Alone(_Pickler):
    """Pickles, in the place of a tensor, an empty one that was never touched, and has the other's bytes written."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._meant: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def reducer_override(self, value: Any) -> Any:
        if type(value) not in _TENSORS or value.layout is not torch.strided:
            return NotImplemented
        meant = value.detach().contiguous()
        empty = torch.empty(meant.shape, dtype=meant.dtype, device="cpu")
        # Kept until the end: its storage is known by its address.
        self._meant[empty.untyped_storage()._cdata] = empty, meant.reshape(-1).view(torch.uint8)
        return empty.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]

    def _bytes_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        found = self._meant.get(storage._cdata)
        return super()._bytes_of(storage) if found is None else found[1]
