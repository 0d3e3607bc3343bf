"""Three ways for the weights of a live model into safetensors files: stream, gather, direct. All ranks take part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from milepost.cast import cast_bits
from milepost.checkpoint.comm import Communicator, on_rank_0, together
from milepost.errors import MismatchError, WriteError
from milepost.fileio import strided, write_exactly
from milepost.index import Chunk, TensorIndex, bits_dtype, itemsize
from milepost.integrations import gather
from milepost.integrations.live import LiveModel, dtype_name, global_shape, is_deepspeed_engine
from milepost.jobs.prepare import under_cast
from milepost.layouts.safetensors import SafetensorsWriter
from milepost.transfer import plan

STREAM, GATHER, DIRECT = METHODS = ("stream", "gather", "direct")
PATIENCE = 30.0
"""Seconds that a rank waits for the others to make the same call."""

_WINDOW_BYTES = 8 << 20


@dataclass(frozen=True)
class PolicyOptions:
    """What to write and how; see `milepost.save_policy`. Sizes in bytes."""

    prefix: str = "policy."
    method: str = STREAM
    dtype: str = "keep"
    memory_limit: int = 256 << 20
    max_shard_size: int = 5 * 10**9
    processing_class: Any = None
    patience: float = PATIENCE


def write_weights(
    engine: Any, model: LiveModel, options: PolicyOptions, building: Path, comm: Communicator
) -> TensorIndex:
    """Put the weights into `building`, where rank 0 writes; returns what the files hold."""
    written = under_cast(model.index, options.dtype)
    if options.method == DIRECT:
        together(comm, lambda: _save_directly(model, options, building, comm.rank))
        return written
    with ExitStack() as stack:
        files: list[_Files] = []
        on_rank_0(comm, lambda: files.append(_Files(stack, model, written, building, options.max_shard_size)))
        put = files[0].put if files else None
        if options.method == GATHER:
            together(comm, lambda: _take_from(_consolidated(engine, model), model, put))
        else:
            for group in gather.batches(model.tensors, model.sources(), options.memory_limit):
                # Together: a disk that is full stops all ranks after this group, not only the one that writes.
                together(comm, partial(_stream, model, group, options.dtype == "fp32", put))
        on_rank_0(comm, stack.pop_all().close)
    return written


_Put = Callable[[str, torch.Tensor], None]
"""Takes a whole tensor by its name in memory; there on rank 0."""


class _Files:
    """The files that are being written, and which parts of them come from which tensor in memory."""

    def __init__(
        self, stack: ExitStack, model: LiveModel, written: TensorIndex, building: Path, max_shard_size: int
    ) -> None:
        self._writer = stack.enter_context(SafetensorsWriter(building, written.entries, max_shard_size))
        self._index = model.index
        self._parts: dict[str, list[tuple[str, Chunk]]] = {}
        for name, entry in model.index.entries.items():
            for chunk in entry.chunks:
                self._parts.setdefault(chunk.source.file, []).append((name, chunk))

    def put(self, source: str, tensor: torch.Tensor) -> None:
        """Write everything that comes from this tensor to its place."""
        dtype = dtype_name(tensor)
        flat = tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().view(bits_dtype(dtype))
        for name, chunk in self._parts[source]:
            for window in plan(self._index, [(name, chunk.box)], _WINDOW_BYTES):
                for piece in window.pieces:
                    start = piece.source.start() // itemsize(self._index[name].dtype)
                    bits = strided(flat[start:], piece.box.sizes, piece.source.strides)
                    fd, offset = self._writer.file_range(name, piece.box)
                    bits = np.ascontiguousarray(cast_bits(bits, dtype, self._writer.dtype(name)))
                    write_exactly(fd, bits.reshape(-1).data.cast("B"), offset)


def _stream(model: LiveModel, group: list[str], masters: bool, put: _Put | None) -> None:
    with gather.whole({name: model.tensors[name] for name in group}, masters=masters) as found:
        if put is not None:
            for name in group:
                put(name, found[name])


def _consolidated(engine: Any, model: LiveModel) -> Mapping[str, torch.Tensor]:
    """The engine's state dict with all parameters whole, on rank 0; the model's alone where DeepSpeed cuts none."""
    if is_deepspeed_engine(engine) and engine.zero_optimization_stage() == 3:
        state: Mapping[str, torch.Tensor] | None = engine._zero3_consolidated_16bit_state_dict()
        return state or {}
    with gather.whole(model.tensors) as found:
        return {f"{model.prefix}{name}": tensor for name, tensor in found.items()}


def _take_from(state: Mapping[str, torch.Tensor], model: LiveModel, put: _Put | None) -> None:
    if put is None:
        return
    for name in model.sources():
        key, wanted = f"{model.prefix}{name}", global_shape(model.tensors[name])
        if key not in state or tuple(state[key].shape) != wanted:
            has = "does not hold it" if key not in state else f"has {list(state[key].shape)}, a placeholder"
            raise MismatchError(f"{key} has shape {list(wanted)}, and the engine's consolidated state dict {has}")
        put(name, state[key])


def _save_directly(model: LiveModel, options: PolicyOptions, building: Path, rank: int) -> None:
    with gather.whole(model.tensors) as found:
        if rank == 0:
            module: Any = model.module
            state = {name.removeprefix(model.inner): tensor for name, tensor in found.items()}
            try:
                module.save_pretrained(building, state_dict=state, max_shard_size=options.max_shard_size)
            except SafetensorError as error:  # how it says that the disk is full
                raise WriteError(str(error)) from error
