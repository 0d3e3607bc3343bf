"""The FSDP layout on real checkpoints of torch's FSDP1, and files that are copies of other ranks' files."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsdp1
import pretend
import pytest
import torch
from checkpoints import Model, whole_weights
from ranks import run_ranks
from safetensors.torch import load_file
from torch.distributed.tensor import Replicate, Shard

import milepost
from milepost.cli.app import run
from milepost.errors import DamagedError, MilepostError
from milepost.index import Box, TensorIndex
from milepost.layouts.fsdp import FsdpLayout, rank_file
from milepost.layouts.pickles import GLOBALS, SHARDED_TENSOR, StorageRef, TensorRef
from milepost.layouts.sharded_tensor import sharded_tensor_ref
from milepost.layouts.torchfile import TorchFile

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")

ORIGINAL = tuple(name for name in fsdp1.WORLD_SIZES if name.startswith("orig"))
NAMED = tuple(name for name in fsdp1.WORLD_SIZES if name.startswith("named"))
PLAIN = tuple(name for name in fsdp1.WORLD_SIZES if name not in NAMED)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of every checkpoint of `fsdp1`. Read only; copy what a test changes."""
    root = tmp_path_factory.mktemp("fsdp1")
    run_ranks(fsdp1.write_all, 4, str(root))
    return root


@pytest.fixture
def copy(tmp_path: Path, checkpoints: Path) -> Any:
    """A function that copies a checkpoint, to be spoilt."""
    return lambda name: Path(shutil.copytree(checkpoints / name, tmp_path / name))


def _open(directory: Path) -> TensorIndex:
    return FsdpLayout().open(directory)


@pytest.mark.parametrize("name", [name for name in fsdp1.WORLD_SIZES if name != "frozen"])
def test_weights_buffers_and_named_moments_are_those_of_the_model(name: str, checkpoints: Path) -> None:
    # The weights as they were before FSDP flattened and cut them; the moments as FSDP gathers them.
    expected: dict[str, torch.Tensor] = torch.load(checkpoints / f"{name}.expected.pt")
    index = _open(checkpoints / name)
    assert set(index) == set(expected)
    assert len(expected) == (16 + 3 * 11 if name in NAMED or name in ORIGINAL else 16)
    assert index.world_size == fsdp1.WORLD_SIZES[name]
    index.check_tiling()
    for tensor, value in expected.items():
        read = index[tensor].read()
        assert (read.dtype, read.shape) == (value.dtype, value.shape), tensor
        assert torch.equal(read, value), tensor
        assert value.any()


@pytest.mark.parametrize("name", ["w2", "w4", "mesh", "hsdp", "hsdp_groups", "no_shard", "bf16"])
def test_flat_moments_without_names_leave_the_weights_and_a_reason(name: str, checkpoints: Path) -> None:
    index = _open(checkpoints / name)
    assert list(index) == list(index.weights())
    (reason,) = index.unread
    assert "optim_world_size" in reason
    assert "parameters without names" in reason
    assert index.objects["param_groups"] is None


def test_flat_moments_are_no_replicas_even_where_the_counts_agree(tmp_path: Path) -> None:
    # As many FlatParameters as weights: only the shapes tell. 15 is what rank 0 holds of 5 x 6, by FSDP1's flat cut.
    for rank in range(2):
        torch.save({"w": torch.ones(5, 6)}, tmp_path / rank_file("model", 2, rank))
        moment = torch.rand(15, generator=torch.Generator().manual_seed(rank))
        state = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": moment}}, "param_groups": [{"params": [0]}]}
        torch.save(state, tmp_path / rank_file("optim", 2, rank))
    index = _open(tmp_path)
    assert list(index) == ["w"]
    assert "optim/w/exp_avg: shape [15] for a weight of shape [5, 6]; FSDP1 flattens" in index.unread[0]


def test_runs_of_original_parameters_are_boxes_of_their_weights(checkpoints: Path) -> None:
    index = _open(checkpoints / "orig")
    # What rank 0 to 3 hold of 33 rows of 16: 144, 148, 148 and 88 elements, so rows and parts of rows.
    boxes = [(str(chunk.box), chunk.source.file[-4]) for chunk in index["optim/embed.weight/exp_avg"].chunks]
    assert boxes == [
        ("[0:9, 0:16]", "0"),
        ("[9:18, 0:16]", "1"), ("[18:19, 0:4]", "1"),
        ("[18:19, 4:16]", "2"), ("[19:27, 0:16]", "2"), ("[27:28, 0:8]", "2"),
        ("[27:28, 8:16]", "3"), ("[28:33, 0:16]", "3"),
    ]  # fmt: skip
    assert not [name for name in index if name.startswith("optim/head")]  # tied: the embedding's moments are its own
    assert index.objects["param_groups"][0]["lr"] == 0.0


def test_moments_of_a_model_with_a_frozen_weight(checkpoints: Path) -> None:
    """The judge is the same model without FSDP: every rank had the same data."""
    model = Model()
    model.load_state_dict(whole_weights(), strict=False)
    model.embed.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model(torch.arange(24).reshape(2, 12)).backward()
    optimizer.step()
    index = _open(checkpoints / "frozen")
    assert not index.unread
    for name, weight in model.named_parameters():
        for moment, value in optimizer.state[weight].items():
            read = index[f"optim/{name}/{moment}"].read()
            assert torch.allclose(read, value, rtol=1e-4) and value.any(), (name, moment)
    assert len([n for n in index if n.startswith("optim/")]) == 3 * 10


def _state(directory: Path, name: str, rank: int, change: Callable[[Any], None]) -> Path:
    """An optimizer's file saved anew with a change."""
    path = directory / rank_file("optim", fsdp1.WORLD_SIZES[name], rank)
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)
    return path


def test_runs_that_another_order_would_explain_are_not_read(copy: Any) -> None:
    def one_less(state: Any) -> None:
        state["state"][1] = {k: v[:-1] if v.dim() else v for k, v in state["state"][1].items()}

    def grouped(state: Any) -> None:
        first, *rest = state["param_groups"][0]["params"]
        state["param_groups"] = [{"params": [first]}, {"params": rest}]

    def without_the_last(state: Any) -> None:
        state["param_groups"][0]["params"].pop()
        state["state"].pop(10, None)

    for change in (one_less, grouped):
        directory = copy("orig")
        for rank in range(4) if change is grouped else (2,):
            _state(directory, "orig", rank, change)
        index = _open(directory)
        assert list(index) == list(index.weights())
        assert "which are whose" in index.unread[0] or "cannot be told" in index.unread[0]
        shutil.rmtree(directory)
    directory = copy("frozen")
    for rank in range(2):
        _state(directory, "frozen", rank, without_the_last)
    assert "10 parameters without names for 12 weights; which weight each number means" in _open(directory).unread[0]


def test_a_state_of_no_group(copy: Any) -> None:
    directory = copy("orig")
    path = _state(directory, "orig", 0, lambda state: state["state"].update({99: state["state"][0]}))
    with pytest.raises(DamagedError, match=rf"{path.name}: a state of parameter 99, which no group holds"):
        _open(directory)
    for rank, what in ((1, {"state": 5}), (2, {"state": {0: 5}}), (3, {})):
        torch.save(what, directory / rank_file("optim", 4, rank))
        _state(directory, "orig", 0, lambda state: state["state"].pop(99, None))
        with pytest.raises(DamagedError, match=rf"rank_{rank}\.pt: .*no optimizer's state"):
            _open(directory)
        shutil.rmtree(directory)
        directory = copy("orig")


def test_two_weights_that_could_be_either_are_not_guessed(tmp_path: Path) -> None:
    """Three weights of one size and values, two parameters: which of them is the tied name?"""

    def model(rank: int) -> dict[str, Any]:
        return {name: pretend.sharded_tensor(ROWS) for name in ("a", "b", "c")}

    moments = {"exp_avg": torch.ones(12), "step": torch.tensor(1.0)}
    groups = [{"params": [0, 1]}]
    pretend.save_ranks(tmp_path, 2, model)
    pretend.save_ranks(tmp_path, 2, lambda rank: {"state": {0: moments, 1: moments}, "param_groups": groups}, "optim")
    assert "2 parameters without names for 3 weights" in _open(tmp_path).unread[0]


def test_replicas_of_runs_must_agree(copy: Any) -> None:
    directory = copy("orig_hsdp")

    def other(state: Any) -> None:
        state["state"][1]["exp_avg"][0] += 1

    path = _state(directory, "orig_hsdp", 2, other)
    with pytest.raises(
        DamagedError, match=rf"rank_0\.pt and .*{path.name} hold other values of exp_avg of parameter 1"
    ):
        _open(directory)


def test_steps_of_runs_must_agree(copy: Any) -> None:
    directory = copy("orig")
    path = _state(directory, "orig", 1, lambda state: state["state"][1]["step"].add_(1))
    with pytest.raises(DamagedError, match=rf"{path.name}: step of parameter 1 differs from that of another rank"):
        _open(directory)


def test_runs_of_another_rank_are_refused(tmp_path: Path) -> None:
    def moments(rank: int) -> dict[str, Any]:
        return {"state": {0: {"exp_avg": torch.arange(12.0)}}, "param_groups": [{"params": [0]}]}

    pretend.save_ranks(tmp_path, 2, lambda rank: {"w": pretend.sharded_tensor(ROWS)})
    pretend.save_ranks(tmp_path, 2, moments, "optim")
    with pytest.raises(DamagedError, match=r"optim_.*rank_1\.pt: holds the same values as optim_.*rank_0\.pt"):
        _open(tmp_path)
    pretend.save_ranks(tmp_path, 2, lambda rank: {**moments(rank), "state": {0: {"exp_avg": torch.zeros(12)}}}, "optim")
    assert _open(tmp_path)["optim/w/exp_avg"].read().eq(0).all()


def test_moments_flattened_by_name(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(2, 3)}, tmp_path / rank_file("model", 1, 0))
    values = {"exp_avg": torch.rand(2, 3), "exp_avg_sq": torch.rand(2, 3), "step": torch.tensor(4.0)}
    flattened: dict[str, Any] = {f"state.a.weight.{moment}": value for moment, value in values.items()}
    torch.save(flattened | {"param_groups.a.weight.lr": 0.1}, tmp_path / rank_file("optim", 1, 0))
    index = _open(tmp_path)
    assert not index.unread
    assert [n for n in index if n.startswith("optim/")] == [f"optim/a.weight/{moment}" for moment in values]
    for moment, value in values.items():
        assert torch.equal(index[f"optim/a.weight/{moment}"].read(), value)
    torch.save({"state.b.weight.exp_avg": values["exp_avg"]}, tmp_path / rank_file("optim", 1, 0))
    with pytest.raises(DamagedError, match=r"moments of b\.weight, which the model files lack"):
        _open(tmp_path)


def test_rows_are_cut_by_the_rule_of_chunk_and_replicas_count_once(checkpoints: Path) -> None:
    def rows(name: str, tensor: str) -> list[tuple[int, int, str]]:
        return [
            (chunk.box.offsets[0], chunk.box.sizes[0], Path(chunk.source.file).stem[-1])
            for chunk in _open(checkpoints / name)[tensor].chunks
        ]

    # 33 rows on 4 ranks: ceil(33 / 4) = 9 a rank, 6 for the last. 2 rows: ranks 2 and 3 have none.
    for name in ("w4", "mesh"):
        assert rows(name, "embed.weight") == [(0, 9, "0"), (9, 9, "1"), (18, 9, "2"), (27, 6, "3")]
        assert rows(name, "gain") == [(0, 1, "0"), (1, 1, "1")]
    for name in ("hsdp", "hsdp_groups"):
        assert rows(name, "embed.weight") == [(0, 17, "0"), (17, 16, "1")]


def test_merged_is_bitwise_what_transformers_saved(checkpoints: Path, tmp_path: Path) -> None:
    milepost.merge(checkpoints / "qwen2" / "actor", tmp_path / "out")
    merged, reference = (
        load_file(d / "model.safetensors") for d in (tmp_path / "out", checkpoints / "qwen2" / "reference")
    )
    assert merged.keys() == reference.keys()
    for name, value in reference.items():
        assert torch.equal(merged[name].view(torch.int32), value.view(torch.int32)), name
    assert milepost.test(checkpoints / "qwen2" / "actor", checkpoints / "qwen2" / "reference").ok


def test_a_merge_does_not_need_the_moments(copy: Any, checkpoints: Path, tmp_path: Path) -> None:
    directory = copy("qwen2")
    for rank in range(2):
        shutil.copy(checkpoints / "w2" / rank_file("optim", 2, rank), directory / "actor")
    assert _open(directory / "actor").unread
    milepost.merge(directory / "actor", tmp_path / "out")
    assert milepost.test(tmp_path / "out", directory / "reference").ok


def test_inspect_says_why_there_are_no_moments(checkpoints: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(checkpoints / "w2")]) == 0
    assert "moments  none\n  not read  optimizer moments: " in capfd.readouterr().out
    assert run(["inspect", str(checkpoints / "named"), "--name", "optim/gain/*"]) == 0
    out = capfd.readouterr().out
    assert "not read" not in out
    assert "moment  optim/gain/exp_avg  float32 [2] in 2 parts" in out


# Files that are copies of another rank's


@pytest.mark.parametrize("kind", ["model", "optim"])
@pytest.mark.parametrize("name", NAMED)
def test_a_copied_file_is_named(name: str, kind: str, copy: Any) -> None:
    directory = copy(name)
    for source, target in ((0, 1), (3, 2), (1, 3)):
        path = directory / rank_file(kind, 4, target)
        kept = path.read_bytes()
        shutil.copy(directory / rank_file(kind, 4, source), path)
        with pytest.raises(DamagedError, match=rf"{path.name}: was written by rank {source}; it is a copy"):
            _open(directory)
        path.write_bytes(kept)
    _open(directory)


ROWS, EVEN = torch.arange(24.0).reshape(8, 3), torch.arange(4.0)


def _dtensors(directory: Path, sizes: tuple[int, ...], held: list[int], **whole: torch.Tensor) -> Path:
    """Files of DTensors cut along dimension 0 over the last mesh dimension; rank r says what it is, and holds the
    values of the part `held[r]`."""
    kinds = (Replicate(),) * (len(sizes) - 1) + (Shard(0),)

    def state(rank: int) -> dict[str, Any]:
        of = pretend.mesh(sizes)
        return {n: pretend.dtensor(w.chunk(sizes[-1])[held[rank]].clone(), of, kinds, w) for n, w in whole.items()}

    directory.mkdir(exist_ok=True)
    pretend.save_ranks(directory, len(held), state)
    return directory


def test_a_file_of_another_ranks_values_is_refused_whatever_it_says(tmp_path: Path) -> None:
    assert len(_open(_dtensors(tmp_path, (4,), [0, 1, 2, 3], a=ROWS, b=EVEN))) == 2
    # The pickle of rank 2 names rank 2 and its boxes; its storages hold what rank 1 holds.
    with pytest.raises(DamagedError, match=r"rank_2\.pt: holds the same values as model_world_size_4_rank_1\.pt"):
        _open(_dtensors(tmp_path, (4,), [0, 1, 1, 3], a=ROWS, b=EVEN))


def test_shards_of_a_sharded_tensor_with_another_ranks_values_are_refused(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        return {"w": pretend.sharded_tensor(ROWS if rank else ROWS.roll(-4, 0))}

    pretend.save_ranks(tmp_path, 2, state)
    with pytest.raises(DamagedError, match=r"rank_1\.pt: holds the same values as model_world_size_2_rank_0\.pt"):
        _open(tmp_path)


def test_values_that_may_be_equal_are_no_copy(tmp_path: Path) -> None:
    # Zeros and ones of a fresh model, one tensor that differs, and replicas.
    constant = {"ones": torch.ones(8), "zeros": torch.zeros(4, 2)}
    assert len(_open(_dtensors(tmp_path / "a", (2,), [0, 1], **constant))) == 2
    assert len(_open(_dtensors(tmp_path / "b", (2,), [0, 1], same=torch.arange(3.0).repeat(2), other=EVEN))) == 2
    assert len(_open(_dtensors(tmp_path / "c", (2, 2), [0, 1, 0, 1], a=ROWS, b=EVEN))) == 2
    with pytest.raises(DamagedError, match=r"rank_3\.pt: holds the same values as model_world_size_4_rank_0\.pt"):
        _open(_dtensors(tmp_path / "d", (2, 2), [0, 1, 0, 0], a=ROWS, b=EVEN))


@pytest.mark.parametrize("whole", [ROWS, ROWS[:1].repeat(8, 1)], ids=["rows", "equal rows"])
def test_views_of_one_storage_are_no_copies(whole: torch.Tensor, tmp_path: Path) -> None:
    # Every rank saved the whole storage with its view of it: the records are equal, what they mean is not.
    def state(rank: int) -> dict[str, Any]:
        return {"w": pretend.dtensor(whole.chunk(2)[rank], pretend.mesh((2,)), (Shard(0),), whole)}

    pretend.save_ranks(tmp_path, 2, state)
    assert torch.equal(_open(tmp_path)["w"].read(), whole)


def test_a_replicated_tensor_beside_constant_shards_is_no_copy(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        of, zeros = pretend.mesh((2,)), torch.zeros(4, 3)
        return {
            "same": pretend.dtensor(ROWS, of, (Replicate(),), ROWS),
            "zeros": pretend.dtensor(zeros.chunk(2)[rank].clone(), of, (Shard(0),), zeros),
        }

    pretend.save_ranks(tmp_path, 2, state)
    assert len(_open(tmp_path)) == 2


def test_two_files_of_one_place_of_a_mesh_that_names_no_rank(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        of = pretend.mesh((2, 2))
        of._rank = None  # type: ignore[assignment]  # as torch 2.10 to 2.12 may leave it
        return {"w": pretend.dtensor(ROWS.chunk(2)[rank % 2].clone(), of, (Replicate(), Shard(0)), ROWS)}

    pretend.save_ranks(tmp_path, 4, state)
    assert torch.equal(_open(tmp_path)["w"].read(), ROWS)
    # Rank 0's file in the place of rank 2's: the values are right, and the run did not write it.
    shutil.copy(tmp_path / rank_file("model", 4, 0), tmp_path / rank_file("model", 4, 2))
    with pytest.raises(DamagedError, match=r"rank_2\.pt: stands at the same place .* as model_world_size_4_rank_0"):
        _open(tmp_path)


# Files that contradict themselves


def _sharded(**changed: Any) -> Any:
    """The record of a ShardedTensor of 4 x 3 as rank 1 of 2 has it: rows 2 and 3."""

    def record(kind: str, **fields: Any) -> Any:
        made = GLOBALS[f"torch.distributed._shard.{kind}"]()
        made.__setstate__(fields)
        return made

    def box(offset: int, rows: int) -> Any:
        return record("metadata.ShardMetadata", shard_offsets=[offset, 0], shard_sizes=[rows, 3], placement=None)

    v: dict[str, Any] = {
        "size": (4, 3),
        "boxes": [(0, 2), (2, 2)],
        "own": (2, 2),
        "shape": (2, 3),
        "dtype": "float32",
    } | changed
    properties = GLOBALS["torch.distributed._shard.sharded_tensor.metadata.TensorProperties"]()
    properties.__setstate__((v["dtype"], None, False, None, False))
    metadata = record(
        "sharded_tensor.metadata.ShardedTensorMetadata",
        shards_metadata=[box(*b) for b in v["boxes"]], size=v["size"], tensor_properties=properties,
    )  # fmt: skip
    tensor = TensorRef("float32", v["shape"], (3, 1), StorageRef("float32", "0", 6), 0)
    shard = record("sharded_tensor.shard.Shard", tensor=tensor, metadata=box(*v["own"]))
    group = record(
        "sharded_tensor.api.ShardedTensor.ProcessGroupState",
        local_rank=1, global_rank=5, local_world_size=2, global_world_size=8,
    )  # fmt: skip
    made = GLOBALS[SHARDED_TENSOR]()
    made.__setstate__(v.get("state", ([shard], metadata, group, None, False)))
    return made


def test_what_a_sharded_tensor_says() -> None:
    ref = sharded_tensor_ref(_sharded())
    assert ref is not None
    assert (ref.dtype, ref.shape, ref.rank, ref.group_rank, ref.group_size) == ("float32", (4, 3), 5, 1, 2)
    assert [box for _, box in ref.shards] == [Box((2, 0), (2, 3))]
    assert sharded_tensor_ref(None) is None
    assert sharded_tensor_ref(GLOBALS["torch.distributed.tensor.DTensor"]()) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"size": (5, 3)}, r"do not make up its shape \[5, 3\]"),
        ({"size": (3, 3)}, r"of shape \[3, 3\] with a shard \[2:4, 0:3\]"),
        ({"size": (4,)}, r"of shape \[4\] with a shard"),
        ({"own": (1, 2)}, "do not list"),
        ({"shape": (1, 3)}, r"a shard of float32\[1, 3\] where its metadata give float32\[2, 3\]"),
        ({"dtype": "bfloat16"}, r"a shard of float32\[2, 3\] where its metadata give bfloat16"),
        ({"boxes": [(-2, 2), (2, 2)]}, "negative"),
        ({"boxes": [("x", 2)]}, r"cannot be read \(ValueError\)"),
        ({"state": None}, r"cannot be read \(TypeError\)"),
        ({"state": ([], None, None)}, r"cannot be read \(ValueError\)"),
        ({"state": ([], None, None, None, False)}, r"cannot be read \(AttributeError\)"),
    ],
)
def test_a_sharded_tensor_that_contradicts_itself(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(DamagedError, match=message):
        sharded_tensor_ref(_sharded(**changed))


@pytest.mark.parametrize("older", ["torch.distributed._tensor.api.DTensor", "torch.distributed.tensor._api.DTensor"])
def test_older_paths_are_the_same_classes(older: str) -> None:
    assert GLOBALS[older] is GLOBALS["torch.distributed.tensor.DTensor"]
    old, new = "torch.distributed._tensor.placement_types", "torch.distributed.tensor"
    assert GLOBALS[f"{old}.DTensorSpec"] is GLOBALS[f"{new}._dtensor_spec.DTensorSpec"]
    assert GLOBALS[f"{old}.Shard"] is GLOBALS[f"{new}.placement_types.Shard"]
    assert GLOBALS[f"{old}._Partial"] is GLOBALS[f"{new}.placement_types.Partial"]


def test_spoilt_pickles_give_an_error_of_ours_or_a_valid_index(copy: Any) -> None:
    dice = random.Random(1)
    directory = copy("named")
    path = directory / rank_file("model", 4, 3)
    pickle = next(record for record in TorchFile(path).records() if record.name == "data.pkl")
    data = path.read_bytes()
    errors = 0
    for _ in range(60):
        spoilt = bytearray(data)
        for _ in range(dice.choice((1, 1, 2, 4))):
            place = pickle.start + dice.randrange(pickle.size)
            spoilt[place] = dice.choice((spoilt[place] ^ 1 << dice.randrange(8), dice.randrange(256)))
        path.write_bytes(spoilt)
        try:
            _open(directory).check_tiling()
        except MilepostError:
            errors += 1
    assert errors > 20
