"""torch DCP folders, saved by three ranks as accelerate, HF Trainer, torchtitan and NeMo-RL do; and every way to spoil
one."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from milepost.errors import CallError, DamagedError, IncompleteError, MilepostError, RefusedError
from milepost.index import TensorIndex
from milepost.layouts import find_layout, open_directory
from milepost.layouts.dcp.reader import DcpLayout

ROLES = {
    "trainer/checkpoint-7": "fsdp2",
    "titan/checkpoint/step-7": "fsdp2",
    "nemo/step_7/policy": "fsdp2",
    "app": "fsdp2",
    "numbered": "fsdp2",
    "accelerate_fsdp1": "fsdp1",
    "tensors": "tensors",
}
WEIGHTS_ONLY = ("alone", "shards", "trainer/checkpoint-7/pytorch_model_fsdp_0", "nemo/step_7/policy/weights")


def _same(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, expected)]
    return (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape) and torch.equal(*flat)


def _assert_holds(index: TensorIndex, expected: dict[str, torch.Tensor]) -> None:
    assert sorted(index) == sorted(expected)
    different = [name for name, tensor in expected.items() if not _same(index[name].read(), tensor)]
    assert not different


def _expected(root: Path, name: str) -> dict[str, torch.Tensor]:
    expected: dict[str, torch.Tensor] = torch.load(root / f"{name}.expected.pt")
    return expected


@pytest.mark.parametrize(("role", "name"), ROLES.items())
def test_every_folder_holds_what_torch_gathers(dcp_checkpoints: Path, role: str, name: str) -> None:
    index = open_directory(dcp_checkpoints / role)
    assert (index.layout, index.world_size) == ("dcp", 3)
    index.check_tiling()
    expected = _expected(dcp_checkpoints, name)
    _assert_holds(index, expected)
    if name != "tensors":
        moments = {key.rpartition("/")[2] for key in expected if key.startswith("optim/")}
        assert moments == {"exp_avg", "exp_avg_sq", "step"}
        assert index["model.embed_tokens.weight"].dtype == ("bfloat16" if name == "fsdp2" else "float32")


@pytest.mark.parametrize("folder", WEIGHTS_ONLY)
def test_weights_alone(dcp_checkpoints: Path, folder: str) -> None:
    index = open_directory(dcp_checkpoints / folder, "dcp")
    expected = _expected(dcp_checkpoints, "fsdp2")
    _assert_holds(index, {name: tensor for name, tensor in expected.items() if not name.startswith("optim/")})


def test_tensors_come_in_the_order_of_the_state_dict(dcp_checkpoints: Path) -> None:
    assert list(open_directory(dcp_checkpoints / "tensors")) == list(_expected(dcp_checkpoints, "tensors"))


def test_uneven_shards_lie_in_parts_and_replicas_count_once(dcp_checkpoints: Path) -> None:
    index = open_directory(dcp_checkpoints / "tensors")
    rows = {name: [chunk.box.sizes[0] for chunk in entry.chunks] for name, entry in index.items() if entry.shape}
    assert sorted(rows["rows"]) == [1, 3, 3]  # torch.chunk of 7 rows on 3 ranks
    assert sorted(rows["few"]) == [1, 1]  # the third rank's part is empty
    assert rows["copies"] == [7]
    assert rows["empty"] == []


@pytest.mark.parametrize("folder", ["trainer/checkpoint-7/pytorch_model_fsdp_0", "app", "tensors"])
def test_torchs_own_conversion_reads_the_same(dcp_checkpoints: Path, folder: str, tmp_path: Path) -> None:
    dcp_to_torch_save(dcp_checkpoints / folder, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt")
    theirs: dict[str, Any] = whole.get("app", whole)["model"]
    if folder == "tensors":
        theirs["nested.deep.x"] = theirs.pop("nested")["deep"]["x"]
    _assert_holds(open_directory(dcp_checkpoints / folder).weights(), theirs)


@pytest.mark.parametrize("folder", ["trainer/checkpoint-7", "accelerate_fsdp1"])
def test_accelerates_merger_reads_the_same(dcp_checkpoints: Path, folder: str, tmp_path: Path) -> None:
    from accelerate.utils import merge_fsdp_weights
    from safetensors.torch import load_file

    merge_fsdp_weights(str(dcp_checkpoints / folder / "pytorch_model_fsdp_0"), str(tmp_path / "merged"))
    theirs = load_file(tmp_path / "merged" / "model.safetensors")
    _assert_holds(open_directory(dcp_checkpoints / folder).weights(), theirs)


def test_other_state_is_kept_and_read_when_asked_for(dcp_checkpoints: Path) -> None:
    titan = open_directory(dcp_checkpoints / "titan/checkpoint/step-7").objects
    assert titan["train_state.step"] == 7
    assert titan["train_state.losses"] == [0.5, 0.25]
    assert titan["optimizer.param_groups.model.norm.weight.lr"] == 0.01
    nemo = open_directory(dcp_checkpoints / "nemo/step_7/policy").objects
    assert nemo["optim.sched.last_epoch"] == 7
    assert nemo["optim.optim.param_groups.0.lr"] == 0.01
    assert "nothing" not in nemo
    with pytest.raises(KeyError):
        nemo["nothing"]


def test_opening_reads_no_part(dcp_checkpoints: Path, tmp_path: Path) -> None:
    folder = _copy(dcp_checkpoints / "app", tmp_path)
    for path in folder.glob("*.distcp"):
        size = path.stat().st_size
        path.write_bytes(bytes(size))
    index = open_directory(folder)
    assert len(index["lm_head.weight"].chunks) == 3
    with pytest.raises(DamagedError, match=r"distcp, bytes \d+ to \d+: not a whole torch.save archive"):
        index["lm_head.weight"].bits()


def test_no_torch_is_imported(dcp_checkpoints: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from milepost.layouts import open_directory\n"
        f"index = open_directory(Path({str(dcp_checkpoints / 'app')!r}))\n"
        "print(sum(e.bits().size for e in index.values()) > 1000, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("True False\n", "")


NESTED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "one container of any name": ({"policy": {"a.w": 1}}, ["a.w"]),
    "several containers keep theirs": ({"policy": {"a": 1}, "value": {"a": 1}}, ["policy.a", "value.a"]),
    "two models": ({"x": {"model": {"a": 1}}, "y": {"model": {"a": 1}}}, ["x.model.a", "y.model.a"]),
    "no container": ({"a": 1, "model.b": 1}, ["a", "model.b"]),
    "a model named as Hugging Face does": ({"model": {"model.a": 1, "lm_head": 1}}, ["lm_head", "model.a"]),
    "counters beside the model": ({"model": {"a": 1}, "step": 1, "rng": {"cpu": 1}}, ["a"]),
    "numbers that fit": (
        {"model": {"b": 1, "a": 2}, "optimizer": {"state": {0: {"exp_avg": 1}, 1: {"exp_avg": 2}}}},
        ["a", "b", "optim/a/exp_avg", "optim/b/exp_avg"],
    ),
    "numbers of another order": (
        {"model": {"a": 2, "b": 1}, "optimizer": {"state": {0: {"exp_avg": 1}, 1: {"exp_avg": 2}}}},
        ["a", "b"],
    ),
    "fewer numbers than weights": ({"model": {"a": 1, "b": 1}, "optimizer": {"state": {0: {"step": 1}}}}, ["a", "b"]),
    "numbers of several groups": (
        {
            "model": {"a": 1, "b": 1},
            "optimizer": {
                "state": {0: {"step": 1}, 1: {"step": 1}},
                "param_groups": [{"params": [0]}, {"params": [1]}],
            },
        },
        ["a", "b"],
    ),
    "flat, with dots in names": ({"a": 1, "optimizer": {"state.a.b.exp_avg": 1}}, ["a", "optim/a.b/exp_avg"]),
    "flat alone": ({"state.a.b.step": 1, "a.b": 1}, ["a.b", "optim/a.b/step"]),
    "a module called state": ({"model": {"state.w": 1, "state.a.w": 1}}, ["state.a.w", "state.w"]),
    "a tensor among the hyperparameters": (
        {"model": {"a": 1}, "optim": {"state": {"a": {"step": 1}}, "param_groups": [{"lr": 1, "params": ["a"]}]}},
        ["a", "optim/a/step"],
    ),
}


def _tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tensors(v) if key != "params" else v for key, v in value.items()}
    return [_tensors(v) for v in value] if isinstance(value, list) else torch.ones(value)


@pytest.mark.parametrize("case", NESTED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_names(case: str, tmp_path: Path) -> None:
    state, names = NESTED[case]
    dcp.save(_tensors(state), checkpoint_id=tmp_path / "c", no_dist=True)
    index = open_directory(tmp_path / "c")
    assert sorted(index) == names
    assert all(entry.read().eq(1).all() for entry in index.values())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_optimizers_for_one_name_are_refused(tmp_path: Path) -> None:
    state = {kind: {"state": {"w": {"step": torch.ones(1)}}} for kind in ("optim_a", "optim_b")}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(DamagedError, match=r"are both optim/w/step; the folder holds more than one model"):
        open_directory(tmp_path / "c")


def _copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def _edit(folder: Path, change: Callable[[Metadata], None]) -> Path:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    return folder


def _first(metadata: Metadata) -> tuple[MetadataIndex, _StorageInfo]:
    return next((i, info) for i, info in metadata.storage_data.items() if i.fqn == "app.model.lm_head.weight")


def _move(**fields: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        _, info = _first(metadata)
        for name, value in fields.items():
            setattr(info, name, value)

    return change


@pytest.mark.parametrize("place", ["../app/__0_0.distcp", "/etc/passwd", "x/../../y", "", "a\0b", 5, None])
def test_a_path_out_of_the_folder_is_refused(dcp_checkpoints: Path, tmp_path: Path, place: Any) -> None:
    folder = _edit(_copy(dcp_checkpoints / "app", tmp_path), _move(relative_path=place))
    with pytest.raises(MilepostError, match=r"which is no file of this folder|_StorageInfo without relative_path"):
        open_directory(folder)


def _drop_storage(metadata: Metadata) -> None:
    del metadata.storage_data[_first(metadata)[0]]


def _drop_chunk(metadata: Metadata) -> None:
    metadata.state_dict_metadata["app.model.lm_head.weight"].chunks.pop()


def _widen(metadata: Metadata) -> None:
    metadata.state_dict_metadata["app.model.lm_head.weight"].size = torch.Size((34, 16))


def _overlap(metadata: Metadata) -> None:
    chunks = metadata.state_dict_metadata["app.model.lm_head.weight"].chunks
    chunks[0].sizes = torch.Size((chunks[0].sizes[0] + 1, 16))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_move(offset=1 << 40), DamagedError, r"bytes short; the file was truncated"),
        (_move(offset=-1), DamagedError, "a part at no place in a file"),
        (_move(length="9"), DamagedError, "a part at no place in a file"),
        (_move(offset=1), DamagedError, "two parts share the bytes"),
        (_move(transform_descriptors=["zstd"]), RefusedError, "stream extension"),
        (_move(relative_path="__9_0.distcp"), IncompleteError, r"__9_0\.distcp missing, of 4 files"),
        (_drop_storage, IncompleteError, r"no file is named for its part \[0:11, 0:16\]"),
        (_drop_chunk, IncompleteError, r"its parts hold 352 of 528 elements"),
        (_widen, IncompleteError, r"its parts hold 528 of 544 elements"),
        (_overlap, DamagedError, r"cover the same elements|no file is named|outside shape"),
        (lambda m: setattr(m, "storage_data", None), DamagedError, "a table that is none"),
        (lambda m: setattr(m, "state_dict_metadata", {"x": 5}), DamagedError, "neither a tensor nor an object"),
        (lambda m: m.planner_data.update({"app.model.lm_head.weight": "x"}), DamagedError, "a key without a path"),
    ],
)  # fmt: skip
def test_a_table_that_lies(
    dcp_checkpoints: Path, tmp_path: Path, change: Callable[[Metadata], None], error: type[Exception], message: str
) -> None:
    folder = _edit(_copy(dcp_checkpoints / "app", tmp_path), change)
    with pytest.raises(error, match=message):
        open_directory(folder)


def test_parts_that_are_not_what_the_table_says(dcp_checkpoints: Path, tmp_path: Path) -> None:
    def swap(metadata: Metadata) -> None:
        stored = {index.fqn: info for index, info in metadata.storage_data.items()}
        a, b = (stored[f"app.model.model.layers.0.mlp.{part}_proj.weight"] for part in ("down", "up"))
        a.relative_path, b.relative_path = b.relative_path, a.relative_path
        a.offset, b.offset, a.length, b.length = b.offset, a.offset, b.length, a.length

    index = open_directory(_edit(_copy(dcp_checkpoints / "app", tmp_path), swap))
    with pytest.raises(DamagedError, match=r"holds bfloat16\[4, 24\] where \.metadata says bfloat16\[8, 16\]"):
        index["model.layers.0.mlp.up_proj.weight"].bits()


class _Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch hacked",)


def test_a_pickle_that_runs_code_is_refused(dcp_checkpoints: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    folder = _edit(_copy(dcp_checkpoints / "app", tmp_path), lambda m: setattr(m, "planner_data", _Runs()))
    with pytest.raises(RefusedError, match=r"\.metadata: its pickle asks for posix\.system, which no checkpoint needs"):
        open_directory(folder)
    assert not (tmp_path / "hacked").exists()


def test_no_other_file_may_name_what_metadata_may(tmp_path: Path) -> None:
    torch.save({"x": Metadata({})}, tmp_path / "model_world_size_1_rank_0.pt")
    with pytest.raises(RefusedError, match=r"torch\.distributed\.checkpoint\.metadata\.Metadata"):
        open_directory(tmp_path)


def test_a_copy_of_another_ranks_file(dcp_checkpoints: Path, tmp_path: Path) -> None:
    folder = _copy(dcp_checkpoints / "trainer/checkpoint-7/pytorch_model_fsdp_0", tmp_path)
    shutil.copyfile(folder / "__0_0.distcp", folder / "__1_0.distcp")
    with pytest.raises(DamagedError, match=r"__[01]_0\.distcp: holds the same bytes as __[01]_0\.distcp"):
        open_directory(folder)


def test_equal_files_of_equal_values_are_no_copies(dcp_checkpoints: Path) -> None:
    folder = dcp_checkpoints / "ones"
    assert (folder / "__0_0.distcp").read_bytes() == (folder / "__1_0.distcp").read_bytes()
    assert open_directory(folder)["norm"].read().equal(torch.ones(6))


def test_missing_and_truncated_files(dcp_checkpoints: Path, tmp_path: Path) -> None:
    folder = _copy(dcp_checkpoints / "app", tmp_path)
    data = (folder / "__1_0.distcp").read_bytes()
    (folder / "__1_0.distcp").write_bytes(data[: len(data) // 2])
    with pytest.raises(DamagedError, match=rf"__1_0\.distcp: ends at byte {len(data) // 2}, .*truncated"):
        open_directory(folder)
    (folder / "__1_0.distcp").unlink()
    (folder / "__2_0.distcp").unlink()
    with pytest.raises(IncompleteError, match=r"__1_0\.distcp, __2_0\.distcp missing, of 3 files \(likely on another"):
        open_directory(folder)
    (folder / "__2_0.distcp").mkdir()
    with pytest.raises(IncompleteError, match=r"__1_0\.distcp, __2_0\.distcp missing"):
        open_directory(folder)
    (folder / ".metadata").unlink()
    with pytest.raises(IncompleteError, match=r"its \.metadata is missing; the save did not come to its end"):
        open_directory(folder)


def test_a_rank_that_saved_alone_and_is_missing(dcp_checkpoints: Path, tmp_path: Path) -> None:
    folder = _copy(dcp_checkpoints / "alone", tmp_path)
    (folder / "__1.metadata").unlink()
    with pytest.raises(IncompleteError, match=r"its parts hold \d+ of \d+ elements"):
        open_directory(folder)


def test_any_flipped_byte_of_metadata_is_an_error_or_changes_nothing(dcp_checkpoints: Path, tmp_path: Path) -> None:
    folder = _copy(dcp_checkpoints / "trainer/checkpoint-7/pytorch_model_fsdp_0", tmp_path)
    whole = (folder / ".metadata").read_bytes()
    expected = _expected(dcp_checkpoints, "fsdp2")
    wrong = []
    for position in range(0, len(whole), 37):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        (folder / ".metadata").write_bytes(flipped)
        try:
            index = open_directory(folder)
            values = {name: entry.read() for name, entry in index.items() if name in expected}
        except (MilepostError, CallError):
            continue
        wrong += [name for name, value in values.items() if not _same(value, expected[name])]
    assert not wrong


def test_shards_in_safetensors_form(dcp_checkpoints: Path, tmp_path: Path) -> None:
    folder = _copy(dcp_checkpoints / "shards", tmp_path)
    (folder / "shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(IncompleteError, match="a rank's shard is missing"):
        open_directory(folder)
    last = folder / "shard-00003-model-00001-of-00001.safetensors"
    last.write_bytes(last.read_bytes().replace(b"DCP_SHARDING_INFO", b"DCP_SHARDING_XXXX"))
    with pytest.raises(DamagedError, match="does not say where its parts belong"):
        open_directory(folder)


def test_what_is_recognised(dcp_checkpoints: Path, tmp_path: Path) -> None:
    layout = DcpLayout()
    said = {
        "trainer/checkpoint-7": "a folder of accelerate or HF Trainer: weights in pytorch_model_fsdp_0, "
        "moments in optimizer_0",
        "nemo/step_7/policy": "a folder of NeMo-RL: weights in weights, moments in optimizer",
        "titan/checkpoint/step-7": "a step of torchtitan: model, optimizer, train_state",
        "app": "a torch DCP folder of app",
        "shards": "sharded safetensors of torch DCP",
    }
    for folder, words in said.items():
        assert layout.recognises(dcp_checkpoints / folder)
        assert layout.describe(dcp_checkpoints / folder) == words
    assert find_layout(tmp_path, "dcp") is None
    assert not layout.recognises(dcp_checkpoints / "trainer")
    shutil.copytree(dcp_checkpoints / "nemo/step_7/policy/weights", tmp_path / "weights")
    assert layout.describe(tmp_path) == "a folder of NeMo-RL: weights in weights, no moments"
