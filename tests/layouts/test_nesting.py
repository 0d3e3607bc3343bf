"""Nested without end, wherever a file may nest: an error of ours, no crash of the interpreter and no wait."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from milepost.checkpoint.diary.events import read_events
from milepost.checkpoint.manifest import MANIFEST, read_manifest
from milepost.checkpoint.restore import STATE_FILE, read_state
from milepost.errors import DamagedError, MilepostError
from milepost.jobs.checksums import read_checksums
from milepost.jobs.lora_training import find_training
from milepost.layouts.dcp.metadata import _storage
from milepost.layouts.dtensor import sharded_ref
from milepost.layouts.huggingface import ADAPTER_CONFIG, CHECKSUMS, CONFIG, read_config
from milepost.layouts.inert import PlainDict, StorageRef, TensorRef
from milepost.layouts.pickles import GLOBALS, SHARDED_TENSOR, record_type
from milepost.layouts.sharded_tensor import sharded_tensor_ref


def _deep() -> Any:
    value: Any = ()
    for _ in range(200_000):
        value = (value,)
    return value


def _wide() -> Any:
    value: Any = ()
    for _ in range(60):
        value = (value, value)
    return value


NESTED = pytest.mark.parametrize("make", [_deep, _wide])


@pytest.fixture(autouse=True)
def _at_once() -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < 200


def record(kind: str, *args: Any, **fields: Any) -> Any:
    built = GLOBALS[kind](*args) if kind in GLOBALS else record_type(kind)(*args)
    built.__setstate__(fields)
    return built


@NESTED
def test_a_path_in_a_table_of_contents(make: Callable[[], Any], tmp_path: Path) -> None:
    index = record("torch.distributed.checkpoint.metadata.MetadataIndex", fqn="w", offset=None)
    for place in ("relative_path", "offset", "length"):
        info = {"relative_path": "__0_0.distcp", "offset": 0, "length": 1, place: make()}
        stored = record("torch.distributed.checkpoint.filesystem._StorageInfo", **info)
        with pytest.raises(MilepostError) as caught:
            _storage(PlainDict([(index, stored)]), tmp_path)
        assert len(str(caught.value)) < 1000


@NESTED
@pytest.mark.parametrize("place", ["order", "dim", "shape", "placements", "mesh", "coordinate"])
def test_a_dtensor(make: Callable[[], Any], place: str) -> None:
    dtensor = "torch.distributed.tensor"
    given = {"order": 0, "dim": 0, "shape": (4,), "coordinate": (0,), "mesh": (2,), place: make()}
    axes = record("torch.distributed._mesh_layout._MeshLayout", shape=given["mesh"])
    mesh = record("torch.distributed.device_mesh.DeviceMesh", _layout=axes, _coordinate_on_dim=given["coordinate"])
    shard = record(f"{dtensor}.placement_types.Shard", dim=given["dim"])
    spec = record(
        f"{dtensor}._dtensor_spec.DTensorSpec",
        mesh=mesh,
        placements=given.get("placements", (shard,)),
        tensor_meta=record(f"{dtensor}._dtensor_spec.TensorMeta", given["shape"]),
        shard_order=(record(f"{dtensor}._dtensor_spec.ShardOrderEntry", given["order"], (0,)),),
    )
    local = TensorRef("float32", (2,), (1,), StorageRef("float32", "0", 2), 0)
    with pytest.raises(DamagedError) as caught:
        sharded_ref(record(f"{dtensor}.DTensor", _local_tensor=local, _spec=spec))
    assert len(str(caught.value)) < 1000


@NESTED
@pytest.mark.parametrize("place", ["dtype", "size", "offsets", "rank"])
def test_a_sharded_tensor(make: Callable[[], Any], place: str) -> None:
    metadata = "torch.distributed._shard.sharded_tensor.metadata"
    given = {"dtype": "float32", "size": (4,), "offsets": (0,), "rank": 0, place: make()}
    properties = record(f"{metadata}.TensorProperties")
    properties.__setstate__((given["dtype"], None, False, None, False))
    shard = record("torch.distributed._shard.metadata.ShardMetadata", shard_offsets=given["offsets"], shard_sizes=(4,))
    value = record(SHARDED_TENSOR)
    table = record(
        f"{metadata}.ShardedTensorMetadata", size=given["size"], tensor_properties=properties, shards_metadata=[shard]
    )
    group = record(f"{SHARDED_TENSOR}.ProcessGroupState", global_rank=given["rank"], local_rank=0, local_world_size=1)
    value.__setstate__(([], table, group, None, True))
    with pytest.raises(DamagedError) as caught:
        sharded_tensor_ref(value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, '{"format": 1, "files": ' + "[" * 200_000])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        (CONFIG, read_config),
        (ADAPTER_CONFIG, lambda directory: find_training((directory,), None)),
        (CHECKSUMS, read_checksums),
        (MANIFEST, read_manifest),
        (STATE_FILE, read_state),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_json(text: str, name: str, read: Callable[[Path], Any], tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DamagedError, match=name) as caught:
        read(tmp_path)
    assert len(str(caught.value)) < 1000


def test_a_line_of_the_diary(tmp_path: Path) -> None:
    good = {"event": "step", "step": 1}
    (tmp_path / "events.jsonl").write_text(f"{'[' * 200_000}\n{json.dumps(good)}\n")
    assert read_events(tmp_path / "events.jsonl") == [good]
