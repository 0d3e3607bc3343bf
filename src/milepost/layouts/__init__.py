"""On-disk layouts: what the files of a checkpoint say, drawn as a TensorIndex.

torchfile, pickles            torch.save archives as byte ranges, read without torch and without running anything
dtensor, sharded_tensor       which box of a tensor a rank's part is
fsdp                          one set of files a rank: verl's layout, FSDP1 and FSDP2
dcp                           folders of torch.distributed.checkpoint: accelerate, HF Trainer, torchtitan, NeMo-RL
megatron                      Megatron-LM, verl, slime: classic files of ranks, and dist checkpoints (torch_dist)
zero                          DeepSpeed's files: ZeRO-3 (zero/stage3), ZeRO-1 and 2 (zero/stage12)
huggingface, safetensors      safetensors directories: reading and writing
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from milepost.errors import CallError, NotFoundError
from milepost.fileio import unreadable
from milepost.index import TensorIndex
from milepost.layouts.base import Layout


@dataclass(frozen=True)
class _OnDemand:
    """A layout whose module is imported once it is asked something: a checkpoint needs one, and a start that is quick.

    name:        what `--backend` calls it
    home, kind:  its module beside this one, and its class there
    """

    name: str
    home: str
    kind: str

    @property
    def itself(self) -> Any:
        return getattr(import_module(f"{__name__}.{self.home}"), self.kind)()

    def recognises(self, directory: Path) -> bool:
        return bool(self.itself.recognises(directory))

    def open(self, directory: Path) -> TensorIndex:
        try:
            index: TensorIndex = self.itself.open(directory)
        except PermissionError:
            raise
        except OSError as error:
            raise unreadable(error.filename or directory, error) from error
        return index

    def describe(self, directory: Path) -> str | None:
        """What was recognised, in words, where the layout has several forms."""
        layout = self.itself
        return layout.describe(directory) if hasattr(layout, "describe") else None


LAYOUTS: tuple[Layout, ...] = (
    _OnDemand("fsdp", "fsdp", "FsdpLayout"),
    _OnDemand("deepspeed", "zero.reader", "DeepSpeedLayout"),
    _OnDemand("megatron", "megatron.reader", "MegatronLayout"),
    _OnDemand("huggingface", "huggingface", "HuggingFaceLayout"),
    _OnDemand("dcp", "dcp.reader", "DcpLayout"),
)
"""Every layout that is read, in the order in which `auto` asks them: a trainer's files before a model beside them."""


def find_layout(directory: Path, backend: str = "auto") -> Layout | None:
    """The layout of a directory, or None where no layout knows it. CallError for a backend that does not exist."""
    if backend == "auto":
        return next((layout for layout in LAYOUTS if layout.recognises(directory)), None)
    for layout in LAYOUTS:
        if layout.name == backend:
            return layout if layout.recognises(directory) else None
    raise CallError(f"--backend {backend}: choose from auto, {', '.join(layout.name for layout in LAYOUTS)}")


def open_directory(directory: Path, backend: str = "auto") -> TensorIndex:
    """The index of one role's directory, or of a Hugging Face model directory."""
    if not directory.is_dir():
        raise NotFoundError(f"{directory}: no such directory")
    layout = find_layout(directory, backend)
    if layout is None:
        known = "of a layout that milepost reads" if backend == "auto" else f"of backend {backend}"
        raise NotFoundError(
            f"{directory}: holds no checkpoint {known}; give the directory of a run, a step, a role or a model"
        )
    return layout.open(directory)


def describe(directory: Path, layout: Layout) -> str | None:
    """What was recognised, in words, where a layout has several forms."""
    return layout.describe(directory) if isinstance(layout, _OnDemand) else None


def archives(index: TensorIndex) -> Iterator[tuple[Path, tuple[int, int] | None]]:
    """Where the torch.save archives of an opened checkpoint lie, as `TorchFile` takes them; records have a CRC-32."""
    yield from ((path, None) for path in index.files if path.suffix == ".pt")
    if index.layout in ("dcp", "megatron"):
        from milepost.layouts.dcp import reader as dcp  # noqa: PLC0415  see _OnDemand

        yield from ((span.file, (span.start, span.length)) for span in dcp.archives(index))


__all__ = ["LAYOUTS", "Layout", "archives", "describe", "find_layout", "open_directory"]
