"""merge of Megatron's checkpoints against merge of FSDP2 files of as many bytes, and against torch's own converter.

    python benchmarks/megatron.py [--rounds 5] [--ranks 2] [--work DIR] [--json FILE]

Qwen2-0.5B's shape in float32: as dist checkpoint (a part a layer and tensor-parallel rank, as Megatron writes them), as
classic files of tensor-parallel ranks, and as FSDP2 files. The floor is torch's `dcp_to_torch_save`, which writes the
dist checkpoint as one file under Megatron's names and does nothing of the mapping. Each contender is a fresh process,
imports included, and they take turns.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from making import HALF_B, TINY, Shape, make
from measuring import Contender, Sample, alternate, table, write_json
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

CONVERTER = (
    "import sys\n"
    "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save\n"
    "dcp_to_torch_save(sys.argv[1], sys.argv[2])"
)


@dataclass(frozen=True)
class Tensor:
    """A tensor of a layer or of the model: its name, shape, the dimension that ranks cut, and whether it is gated."""

    name: str
    shape: tuple[int, ...]
    cut: int | None
    layered: bool = True
    gated: bool = False


def tensors(shape: Shape) -> list[Tensor]:
    """Qwen2's tensors in the spelling of dist checkpoints."""
    size = shape.hidden // shape.heads
    fused = (shape.heads + 2 * shape.kv_heads) * size
    return [
        Tensor("embedding.word_embeddings.weight", (shape.vocabulary, shape.hidden), 0, layered=False),
        Tensor("self_attention.linear_qkv.layer_norm_weight", (shape.hidden,), None),
        Tensor("self_attention.linear_qkv.weight", (fused, shape.hidden), 0),
        Tensor("self_attention.linear_qkv.bias", (fused,), 0),
        Tensor("self_attention.linear_proj.weight", (shape.hidden, shape.hidden), 1),
        Tensor("mlp.linear_fc1.layer_norm_weight", (shape.hidden,), None),
        Tensor("mlp.linear_fc1.weight", (2 * shape.intermediate, shape.hidden), 0, gated=True),
        Tensor("mlp.linear_fc2.weight", (shape.hidden, shape.intermediate), 1),
        Tensor("decoder.final_layernorm.weight", (shape.hidden,), None, layered=False),
    ]


def make_classic(directory: Path, shape: Shape, ranks: int) -> None:
    """`mp_rank_00/model_optim_rng.pt` and so on."""
    _companions(directory, shape)
    for rank in range(ranks):
        state = {}
        for tensor in tensors(shape):
            sizes = _piece(tensor, ranks)
            for layer in range(shape.layers if tensor.layered else 1):
                name = f"decoder.layers.{layer}.{tensor.name}" if tensor.layered else tensor.name
                # what every rank holds whole must be the same on each
                state[name] = torch.ones(sizes) if tensor.cut is None else torch.randn(sizes)
        (directory / f"mp_rank_{rank:02d}").mkdir()
        torch.save({"model": state}, directory / f"mp_rank_{rank:02d}" / "model_optim_rng.pt")


def make_dist(directory: Path, shape: Shape, ranks: int) -> None:
    """A torch_dist folder of two files, layers stacked, with the parts that Megatron's saver would make."""
    _companions(directory, shape)
    heads: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    files = [(directory / f"__0_{n}.distcp").open("wb") for n in range(2)]
    try:
        count = 0
        for tensor in tensors(shape):
            key = f"decoder.layers.{tensor.name}" if tensor.layered else tensor.name
            parts = []
            for offsets, sizes in _boxes(tensor, shape.layers, ranks):
                buffer = io.BytesIO()
                torch.save(torch.randn(sizes), buffer)
                file = files[count % 2]
                info = _StorageInfo(f"__0_{count % 2}.distcp", file.tell(), buffer.getbuffer().nbytes)
                file.write(buffer.getbuffer())
                parts.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                places[MetadataIndex(key, torch.Size(offsets))] = info
                count += 1
            whole = (shape.layers, *tensor.shape) if tensor.layered else tensor.shape
            heads[key] = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(whole), parts)
    finally:
        for file in files:
            file.close()
    (directory / ".metadata").write_bytes(pickle.dumps(Metadata(heads, storage_data=places)))
    (directory / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    torch.save({}, directory / "common.pt")


def _companions(directory: Path, shape: Shape) -> None:
    directory.mkdir(parents=True)
    shape.config().save_pretrained(directory / "huggingface")


def _piece(tensor: Tensor, ranks: int) -> tuple[int, ...]:
    return tuple(n // ranks if dim == tensor.cut else n for dim, n in enumerate(tensor.shape))


def _boxes(tensor: Tensor, layers: int, ranks: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of every part: one a layer and rank, two where the layer is gated."""
    cuts = 1 if tensor.cut is None else ranks * (2 if tensor.gated else 1)
    sizes = tuple(n // cuts if dim == tensor.cut else n for dim, n in enumerate(tensor.shape))
    for layer in range(layers if tensor.layered else 1):
        for number in range(cuts):
            offsets = tuple(number * n if dim == tensor.cut else 0 for dim, n in enumerate(sizes))
            yield ((layer, *offsets), (1, *sizes)) if tensor.layered else (offsets, sizes)


def main() -> None:
    """Make the checkpoints, measure, print a table a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2, help="tensor-parallel ranks, and FSDP ranks")
    parser.add_argument("--tiny", action="store_true", help="a tiny model alone: does it run?")
    parser.add_argument("--work", type=Path, help="where the checkpoints go (8 GB); default: a temporary directory")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, dict[str, list[Sample]]] = {}
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        for case, shape in (("tiny", TINY),) if options.tiny else (("tiny", TINY), ("0.5 B", HALF_B)):
            root = Path(work) / case
            make_dist(root / "dist", shape, options.ranks)
            make_classic(root / "classic", shape, options.ranks)
            nbytes = make(root / "fsdp", shape, options.ranks)
            print(f"{case}, {options.ranks} ranks: {nbytes / 1e6:.0f} MB in float32", file=sys.stderr)
            name = f"{case}, {options.ranks} ranks"
            results[name] = alternate(_contenders(root), options.rounds)
            print(f"\n{name}")
            print("\n".join(table(results[name], "FSDP, bf16")), flush=True)
            shutil.rmtree(root)
    if options.json:
        write_json(options.json, **results)


def _contenders(root: Path) -> list[Contender]:
    out = root / "out"

    def clear() -> None:
        shutil.rmtree(out, ignore_errors=True)

    def make_room() -> None:
        clear()
        out.mkdir()

    merge = [sys.executable, "-m", "milepost", "merge", "-q"]
    return [
        *(
            Contender(f"{name}, {dtype}", [*merge, str(root / form), str(out), "--dtype", dtype], clear)
            for dtype in ("bf16", "keep")
            for name, form in (("Megatron dist", "dist"), ("Megatron classic", "classic"), ("FSDP", "fsdp"))
        ),
        Contender(
            "dcp_to_torch_save",
            [sys.executable, "-c", CONVERTER, str(root / "dist"), str(out / "model.pt")],
            make_room,
        ),
    ]


if __name__ == "__main__":
    main()
