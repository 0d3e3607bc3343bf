"""Copies of one box on several ranks are compared where everything is read anyhow: `verify --deep`, `merge --check`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pretend
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Replicate, Shard

from milepost.checkpoint.verify import verify
from milepost.cli.app import run
from milepost.layouts import open_directory
from milepost.layouts.fsdp import rank_file
from milepost.layouts.join import rank_part, state_dict
from milepost.layouts.replicas import differing
from milepost.layouts.torchfile import TorchFile

ROWS = torch.arange(24.0).reshape(8, 3)


def _found(directory: Path) -> list[str]:
    return [str(error) for error in differing(open_directory(directory))]


def _change(path: Path, change: Callable[[Any], None]) -> None:
    """Save a file of torch anew with a change, so that its checksums are right."""
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


def _add(tensor: Any) -> None:
    tensor._local_tensor.flatten()[-1:].add_(1)


@pytest.mark.parametrize("name", ["w1", "w3", "hsdp", "tp"])
def test_replicas_that_agree(fsdp_checkpoints: Path, name: str) -> None:
    assert _found(fsdp_checkpoints / name) == []
    assert verify(fsdp_checkpoints / name, deep=True).problems == ()


@pytest.mark.parametrize(("rank", "twin"), [(2, 0), (3, 1)])
@pytest.mark.parametrize("kind", ["model", "optim"])
def test_a_replica_that_disagrees_is_named(
    fsdp_checkpoints: Path, tmp_path: Path, kind: str, rank: int, twin: int, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = Path(shutil.copytree(fsdp_checkpoints / "hsdp", tmp_path / "actor"))
    file = rank_file(kind, 4, rank)
    key = "layers.0.up.weight" if kind == "model" else "state.1.exp_avg"
    _change(directory / file, lambda state: _add(state[key] if kind == "model" else state["state"][1]["exp_avg"]))
    open_directory(directory)  # opening takes the first copy
    (found,) = _found(directory)
    assert found.startswith(
        f"{key}: {directory / rank_file(kind, 4, twin)} and {directory / file} hold other bytes of "
    )
    assert verify(directory, deep=True).problems == (found,)
    assert verify(directory).ok
    assert run(["verify", str(directory), "--deep"]) == 1
    assert found in capfd.readouterr().out


def test_merge_checks_them_where_it_is_told_to(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def state(rank: int, values: torch.Tensor) -> dict[str, Any]:
        of = pretend.mesh((2, 2))
        return {"w": pretend.dtensor(values.chunk(2)[rank % 2].clone(), of, (Replicate(), Shard(0)), ROWS)}

    role = tmp_path / "actor"
    role.mkdir()
    (role / "config.json").write_text('{"model_type": "custom"}')
    pretend.save_ranks(role, 4, lambda rank: state(rank, ROWS))
    assert run(["merge", str(role), str(tmp_path / "out"), "--check"]) == 0
    pretend.save_ranks(role, 4, lambda rank: state(rank, ROWS + (rank == 3)))
    assert run(["merge", str(role), str(tmp_path / "two"), "--check"]) == 1
    assert "w: " in (err := capfd.readouterr().err) and "rank_3.pt hold other bytes of the same part [4:8, 0:3]" in err
    assert not (tmp_path / "two").exists()
    assert run(["merge", str(role), str(tmp_path / "three")]) == 0


@pytest.mark.parametrize("checksums", [True, False])
def test_what_is_part_of_a_storage_is_read(tmp_path: Path, checksums: bool) -> None:
    """Shards that are views of padded storages: the padding may differ, the values may not."""

    def save(change: float, padding: float) -> None:
        def state(rank: int) -> dict[str, Any]:
            storage = torch.full((5, 3), float(padding * rank))
            storage[:4] = ROWS[:4] if rank % 2 == 0 else ROWS[4:]
            if rank == 2:
                storage[3, 2] += change
            of = pretend.mesh((2, 2))
            return {"w": pretend.dtensor(storage[:4], of, (Replicate(), Shard(0)), ROWS)}

        pretend.save_ranks(tmp_path, 4, state)

    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(checksums)
    try:
        save(0, 1)
        file = TorchFile(tmp_path / rank_file("model", 4, 0))
        assert file.has_checksums == checksums
        part = rank_part(state_dict(file)["w"])
        assert part is not None
        noted = file.checksum(part.pieces[0][0])
        assert noted is not None and noted[1] == 5 * 3 * 4  # the padding is a part of the record
        assert _found(tmp_path) == []
        verdict = verify(tmp_path, deep=True)
        assert verdict.ok and bool(verdict.notes) != checksums
        save(1, 0)
        assert len(_found(tmp_path)) == 1
    finally:
        torch.serialization.set_crc32_options(before)


def _save_dcp(root: Path) -> None:
    """Two ranks that hold the same tensors and save without talking: each keeps its own copy."""
    dcp.save({"model": {"w": ROWS, "b": torch.arange(3)}}, checkpoint_id=root / "same", use_collectives=False)
    mine = ROWS + torch.distributed.get_rank()
    dcp.save({"model": {"w": mine, "b": torch.arange(3)}}, checkpoint_id=root / "other", use_collectives=False)


def test_copies_in_dcp_folders(tmp_path: Path) -> None:
    run_ranks(_save_dcp, 2, tmp_path)
    for name in ("same", "other"):
        index = open_directory(tmp_path / name)
        assert torch.equal(index["w"].read(), ROWS) and len(index["w"].chunks) == 1
    assert _found(tmp_path / "same") == []
    assert verify(tmp_path / "same", deep=True).ok
    (found,) = _found(tmp_path / "other")
    assert found.startswith("model.w: ") and "__0_0.distcp" in found and "__1_0.distcp" in found
    assert verify(tmp_path / "other", deep=True).problems == (found,)
    # An altered byte of the copy that is not taken is found too.
    data = (tmp_path / "same" / "__1_0.distcp").read_bytes()
    place = data.index(ROWS.numpy().tobytes())
    (tmp_path / "same" / "__1_0.distcp").write_bytes(data[:place] + b"\7" + data[place + 1 :])
    assert "of its records were altered" in verify(tmp_path / "same", deep=True).problems[0]


def test_copies_in_safetensors_shards(tmp_path: Path) -> None:
    for rank in (1, 2):
        sharding = '{"w": {"saved_offsets": [0, 0]}}'
        metadata = {"format": "pt", "DCP_SHARDING_INFO": sharding}
        save_file({"w": ROWS}, tmp_path / f"shard-0000{rank}-model-00001-of-00001.safetensors", metadata)
    assert _found(tmp_path) == []
    path = tmp_path / "shard-00002-model-00001-of-00001.safetensors"
    save_file({"w": load_file(path)["w"] + 1}, path, metadata)
    (found,) = _found(tmp_path)
    assert "shard-00001" in found and "shard-00002" in found
