"""What is written without torch, read by torch: pickles, archives, and DCP folders; and by ourselves."""

from __future__ import annotations

import io
import pickle
import random
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from milepost.errors import CheckpointError, MismatchError, RefusedError
from milepost.index import Box, TensorEntry, bits_dtype
from milepost.layouts import archives, open_directory
from milepost.layouts.archive_writer import STORAGES, object_archive, tensor_archive
from milepost.layouts.dcp.writer import Contents, DcpWriter, Place, Stored, lay_out
from milepost.layouts.pickling import Call, Global, Pairs, dumps
from milepost.layouts.torchfile import TorchFile
from milepost.transfer.plan import windows

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_pickles_are_pythons(value: Any) -> None:
    assert pickle.loads(dumps(value)) == value


def test_pickles_name_what_they_do_not_import() -> None:
    made = dumps([Call(Global("collections", "OrderedDict"), ()), Pairs((((1, 2), "x"), ("y", "x")))])
    assert pickle.loads(made) == [OrderedDict(), {(1, 2): "x", "y": "x"}]
    assert b"no_such_module\n" in dumps(Global("no_such_module", "thing"))
    with pytest.raises(TypeError, match="set"):
        dumps({1, 2})


@pytest.mark.parametrize("dtype", STORAGES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 4), (1, 1, 700, 3)])
def test_archives_are_torchs(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    plan = tensor_archive(dtype, shape)
    data = random.Random(0).randbytes(plan.nbytes) if dtype != "bool" else bytes(plan.nbytes)
    archive = plan.finished_head(zlib.crc32(data)) + data + plan.tail(zlib.crc32(data))
    assert len(archive) == plan.length and plan.start % 64 == 0
    assert zipfile.ZipFile(io.BytesIO(archive)).testzip() is None
    tensor = torch.load(io.BytesIO(archive), weights_only=True)
    assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{dtype}", shape)
    assert tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() == data
    (tmp_path / "x.pt").write_bytes(archive)
    ours = TorchFile(tmp_path / "x.pt")
    assert not list(ours.bad_records()) and ours.entry(ours.root).bits().tobytes() == data


def test_an_archive_of_a_small_value() -> None:
    value = {"iteration": 0, "version": 3.0, "names": ["a", None]}
    assert torch.load(io.BytesIO(object_archive(value)), weights_only=True) == value


def test_types_without_a_storage_class_are_refused() -> None:
    with pytest.raises(RefusedError, match=r"float8_e4m3fn.*--dtype"):
        tensor_archive("float8_e4m3fn", (2,))


LAYERS, EXPERTS = 3, 2


def stored() -> dict[str, Stored]:
    """A stack of layers, one of layers and experts, a tensor under two names, and one alone."""
    tensors = {f"{layer}.w": Stored("float32", (4, 6), (Place("w", (layer,), (LAYERS,)),)) for layer in range(LAYERS)}
    tensors |= {
        f"{layer}.{expert}.e": Stored("bfloat16", (5,), (Place("e", (layer, expert), (LAYERS, EXPERTS)),))
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
    }
    tensors["norm"] = Stored("float32", (7,), (Place("norm"), Place("other.norm")))
    return tensors | {"big": Stored("float32", (9, 8), (Place("big"),)), "one": Stored("float64", (), (Place("one"),))}


def values(tensors: dict[str, Stored]) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return {
        name: rng.integers(0, 1 << 15, tensor.shape, dtype=np.uint32).astype(bits_dtype(tensor.dtype))
        for name, tensor in tensors.items()
    }


def write(directory: Path, contents: Contents, bits: dict[str, np.ndarray[Any, Any]], window: int) -> None:
    directory.mkdir()
    with DcpWriter(directory, contents) as writer:
        parts = [
            (name, Box(tuple(a + b for a, b in zip(box.offsets, part.offsets, strict=True)), part.sizes))
            for name, box in contents.wanted(contents.sizes)
            for part in windows(TensorEntry(contents.tensors[name].dtype, box.sizes, ()), window)
        ]
        random.Random(1).shuffle(parts)
        for name, part in parts:
            writer.write(name, part, bits[name][part.slices()])
    contents.write_table(directory)


@pytest.mark.parametrize(("max_box", "window"), [(1 << 20, 1 << 20), (64, 1 << 20), (64, 8), (1 << 20, 20)])
def test_torch_reads_the_folder(tmp_path: Path, max_box: int, window: int) -> None:
    tensors = stored()
    bits = values(tensors)
    contents = lay_out(tensors, {"x/shard_0_1": [None], "y/shard_0_1": [None], "z": {"a": 1}}, 2000, max_box)
    write(tmp_path / "c", contents, bits, window)
    assert len(contents.sizes) > 1 and max(contents.sizes.values()) <= 2000
    wanted = {
        "w": np.stack([bits[f"{n}.w"] for n in range(LAYERS)]),
        "e": np.stack([np.stack([bits[f"{n}.{e}.e"] for e in range(EXPERTS)]) for n in range(LAYERS)]),
        **dict.fromkeys(("norm", "other.norm"), bits["norm"]),
        **{key: bits[key] for key in ("big", "one")},
    }
    metadata = dcp.FileSystemReader(tmp_path / "c").read_metadata()
    state = {
        key: torch.empty(head.size, dtype=head.properties.dtype)
        for key, head in metadata.state_dict_metadata.items()
        if isinstance(head, TensorStorageMetadata)
    }
    assert state.keys() == wanted.keys()
    dcp.load(state, checkpoint_id=tmp_path / "c", no_dist=True)
    for key, value in state.items():
        assert value.reshape(-1).view(torch.uint8).numpy().tobytes() == wanted[key].tobytes(), key
    dcp_to_torch_save(tmp_path / "c", tmp_path / "all.pt")  # it needs the paths of keys, which Megatron leaves out
    everything = torch.load(tmp_path / "all.pt", weights_only=False)
    assert torch.equal(everything["w"], state["w"])

    index = open_directory(tmp_path / "c", "dcp")
    for key, value in wanted.items():
        assert index[key].bits().tobytes() == value.tobytes()
    spans = list(archives(index))
    assert len(spans) == len(set(spans)) == len(contents.slots) + 2  # one archive for both of the equal objects
    assert not any(list(TorchFile(*span).bad_records()) for span in spans)


def test_a_box_that_did_not_come_is_an_error(tmp_path: Path) -> None:
    contents = lay_out({"a": Stored("float32", (2, 2), (Place("a"),))}, {}, 1 << 20)
    with pytest.raises(CheckpointError, match="a: a part of it has not come"), DcpWriter(tmp_path, contents) as writer:
        writer.write("a", Box((0, 0), (1, 2)), np.zeros((1, 2), np.uint32))


def test_tensors_of_one_key_are_alike() -> None:
    tensors = {
        "a": Stored("float32", (2,), (Place("k", (0,), (2,)),)),
        "b": Stored("bfloat16", (2,), (Place("k", (1,), (2,)),)),
    }
    with pytest.raises(MismatchError, match=r"b is bfloat16\[2\], a float32\[2\]"):
        lay_out(tensors, {}, 1 << 20)
