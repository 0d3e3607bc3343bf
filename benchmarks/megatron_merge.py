"""merge of Megatron's checkpoints against merge of FSDP2 files of as many bytes, and against what others have for it.

    python benchmarks/megatron_merge.py [--rounds 5] [--ranks 2] [--no-peers] [--work DIR] [--json FILE]

Qwen2-0.5B's shape in float32: as dist checkpoint (a part a layer and tensor-parallel rank, as Megatron writes them), as
classic files of tensor-parallel ranks, and as FSDP2 files. The peers read the dist checkpoint: verl's merger, which
needs Megatron and builds the model to load into (`verl_megatron.py`; it writes bfloat16 alone), and torch's
`dcp_to_torch_save` with a loop over the names (`dcp_rename.py`). Each contender is a fresh process, imports included,
and they take turns; before that all must write the same bits.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from making import HALF_B, TINY, Shape, make
from measuring import Contender, Sample, alternate, run, table, write_json
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

HERE = Path(__file__).parent
FSDP = "FSDP"
"""The merge that the others are compared with."""


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


EXTRA = ("self_attention.core_attention", "self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1",
         "mlp.linear_fc2")  # fmt: skip
"""Modules that put an `_extra_state` into a dist checkpoint: what a model asks for, or Megatron's loader stops."""


def make_dist(directory: Path, shape: Shape, ranks: int) -> None:
    """A torch_dist folder of two files, layers stacked, with the parts that Megatron's saver would make."""
    _companions(directory, shape)
    heads: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    files = [(directory / f"__0_{n}.distcp").open("wb") for n in range(2)]

    def put(value: object) -> _StorageInfo:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        number = len(places) % 2
        at = files[number].tell()
        files[number].write(buffer.getbuffer())
        return _StorageInfo(f"__0_{number}.distcp", at, buffer.getbuffer().nbytes)

    try:
        for tensor in tensors(shape):
            key = f"decoder.layers.{tensor.name}" if tensor.layered else tensor.name
            parts = []
            for offsets, sizes in _boxes(tensor, shape.layers, ranks):
                parts.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                places[MetadataIndex(key, torch.Size(offsets))] = put(torch.randn(sizes))
            whole = (shape.layers, *tensor.shape) if tensor.layered else tensor.shape
            heads[key] = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(whole), parts)
        for module in EXTRA:
            for layer in range(shape.layers):
                key = f"decoder.layers.{module}._extra_state/shard_{layer}_{shape.layers}"
                heads[key] = BytesStorageMetadata()
                places[MetadataIndex(key)] = put([None])
    finally:
        for file in files:
            file.close()
    (directory / ".metadata").write_bytes(pickle.dumps(Metadata(heads, storage_data=places)))
    (directory / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
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
    """Make the checkpoints, compare what the contenders write, measure, print a table a case and element type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2, help="tensor-parallel ranks, and FSDP ranks")
    parser.add_argument("--tiny", action="store_true", help="a tiny model alone: does it run?")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--work", type=Path, help="where the checkpoints go (11 GB); default: a temporary directory")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, dict[str, list[Sample]]] = {}
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        for case, shape in (("tiny", TINY),) if options.tiny else (("tiny", TINY), ("0.5 B", HALF_B)):
            root = Path(work) / case
            make_dist(root / "verl" / "model" / "dist_ckpt", shape, options.ranks)
            shutil.copytree(
                root / "verl" / "model" / "dist_ckpt" / "huggingface", root / "verl" / "model" / "huggingface"
            )
            make_classic(root / "classic", shape, options.ranks)
            nbytes = make(root / "fsdp", shape, options.ranks)
            print(f"{case}, {options.ranks} ranks: {nbytes / 1e6:.0f} MB in float32", file=sys.stderr)
            for dtype in ("bf16", "keep"):
                name = f"{case}, {options.ranks} ranks, {dtype}"
                contenders = _contenders(root, dtype, peers=options.peers)
                if options.peers:
                    _check_alike(contenders)
                results[name] = alternate(contenders, options.rounds)
                print(f"\n{name}")
                print("\n".join(table(results[name], FSDP)), flush=True)
            shutil.rmtree(root)
    if options.json:
        write_json(options.json, **results)


def _contenders(root: Path, dtype: str, *, peers: bool) -> list[Contender]:
    out, dist = root / "out", root / "verl" / "model" / "dist_ckpt"

    def clear() -> None:
        shutil.rmtree(out, ignore_errors=True)

    merge = [sys.executable, "-m", "milepost", "merge", "-q"]
    found = [
        Contender(name, [*merge, str(source), str(out), "--dtype", dtype], clear)
        for name, source in ((FSDP, root / "fsdp"), ("Megatron dist", dist), ("Megatron classic", root / "classic"))
    ]
    if peers:
        by_hand = [sys.executable, str(HERE / "dcp_rename.py"), str(dist), str(out)]
        wide = {"bf16": "bfloat16", "keep": "float32"}[dtype]
        found.append(Contender("dcp_to_torch_save + rename", [*by_hand, wide], clear, out))
    if peers and dtype == "bf16":
        verl = [sys.executable, str(HERE / "verl_megatron.py"), "merge", "--backend", "megatron"]
        verl += ["--use_cpu_initialization", "--tie-word-embedding"]
        found.append(
            Contender("verl", [*verl, "--local_dir", str(root / "verl"), "--target_dir", str(out)], clear, out)
        )
    return found


def _check_alike(contenders: Sequence[Contender]) -> None:
    """Raise where those that read the dist checkpoint do not write the same bits."""
    ours, *peers = [contender for contender in contenders if contender.output or contender.name == "Megatron dist"]
    out = Path(ours.command[-3])
    ours.before()
    run(ours.command)
    kept = out.with_name("kept")
    out.rename(kept)
    for peer in peers:
        peer.before()
        run(peer.command)
        subprocess.run([sys.executable, "-m", "milepost", "test", "-q", str(kept), str(out)], check=True)
        print(f"  {peer.name} writes the same bits", file=sys.stderr)
    shutil.rmtree(kept)


if __name__ == "__main__":
    main()
