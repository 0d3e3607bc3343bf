"""The FSDP layout on real checkpoints of torch's FSDP2: every value, and every fault of the files."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from archives import tensor_pickle, write_archive
from torch import nn

from milepost.errors import DamagedError, IncompleteError, MilepostError, NotFoundError, RefusedError
from milepost.index import Box, TensorIndex
from milepost.layouts.fsdp import CONFIG_FILE, FsdpLayout, config_text, rank_file
from milepost.layouts.torchfile import TorchFile

CHECKPOINTS = ("w1", "w1_plain", "w2", "w3", "w4", "w2_unnamed", "hsdp", "tp")
SHARDED = tuple(name for name in CHECKPOINTS if name != "w1_plain")
BUFFERS = {"scale": (), "one": (1,), "counts": (5,), "slopes": (3,)}


def _open(directory: Path) -> TensorIndex:
    return FsdpLayout().open(directory)


@pytest.fixture
def copy(tmp_path: Path, fsdp_checkpoints: Path) -> Any:
    """A function that copies a checkpoint, to be spoilt."""
    return lambda name: Path(shutil.copytree(fsdp_checkpoints / name, tmp_path / name))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_weights_buffers_and_moments_are_those_of_the_model(name: str, fsdp_checkpoints: Path) -> None:
    # The weights as they were before torch sharded them; the moments as torch gathers them.
    expected: dict[str, torch.Tensor] = torch.load(fsdp_checkpoints / f"{name}.expected.pt")
    index = _open(fsdp_checkpoints / name)
    assert set(index) == set(expected)
    assert len(expected) == 12 + 4 + 3 * 11
    index.check_tiling()
    for tensor, value in expected.items():
        read = index[tensor].read()
        assert (read.dtype, read.shape) == (value.dtype, value.shape), tensor
        assert torch.equal(read, value), tensor
    # Moments of zeros would agree in any order.
    assert all(value.any() for name, value in expected.items())


@pytest.mark.parametrize("name", SHARDED)
def test_moments_are_those_of_a_run_without_any_sharding(name: str, fsdp_checkpoints: Path) -> None:
    # Sums over ranks round otherwise, so nearly the same, element by element.
    sharded, plain = _open(fsdp_checkpoints / name), _open(fsdp_checkpoints / "w1_plain")
    for moment in (n for n in plain if n.endswith("exp_avg")):
        assert torch.allclose(sharded[moment].read(), plain[moment].read(), rtol=1e-3, atol=1e-7), moment


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_what_the_index_says_of_the_checkpoint(name: str, fsdp_checkpoints: Path) -> None:
    directory = fsdp_checkpoints / name
    index = _open(directory)
    size = int(json.loads((directory / CONFIG_FILE).read_text())["world_size"])
    assert index.layout == "fsdp"
    assert index.world_size == size
    assert set(index.files) == set(directory.glob("*.pt"))
    assert len(index.files) == 3 * size
    assert list(index.weights()) == [n for n in index if not n.startswith("optim/")]
    # A tied weight is one tensor under two names, moments included.
    assert index["head.weight"].alias_of == "embed.weight"
    assert [n for n, e in index.items() if e.alias_of] == ["head.weight"]
    assert "optim/head.weight/exp_avg" not in index


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_replicated_buffers_keep_their_shapes(name: str, fsdp_checkpoints: Path) -> None:
    index = _open(fsdp_checkpoints / name)
    assert {buffer: index[buffer].shape for buffer in BUFFERS} == BUFFERS
    assert all(len(index[buffer].chunks) == 1 for buffer in BUFFERS)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_norm_of_ones_is_joined_and_not_taken_for_replicated(name: str, fsdp_checkpoints: Path) -> None:
    entry = _open(fsdp_checkpoints / name)["layers.0.norm.weight"]
    assert entry.shape == (16,)
    assert torch.equal(entry.read(), torch.ones(16))


def test_shards_of_a_replica_count_once(fsdp_checkpoints: Path) -> None:
    index = _open(fsdp_checkpoints / "hsdp")
    boxes = {chunk.box: Path(chunk.source.file).name for chunk in index["embed.weight"].chunks}
    assert boxes == {
        Box((0, 0), (17, 16)): "model_world_size_4_rank_0.pt",
        Box((17, 0), (16, 16)): "model_world_size_4_rank_1.pt",
    }


def test_tensor_parallel_shards_lie_where_they_belong(fsdp_checkpoints: Path) -> None:
    index = _open(fsdp_checkpoints / "tp")

    def rows(name: str) -> dict[int, tuple[int, int]]:
        return {
            int(chunk.source.file[-len("0.pt") :][0]): (chunk.box.offsets[0], chunk.box.sizes[0])
            for chunk in index[name].chunks
        }

    # Ranks are dp * 2 + tp: 30 rows are cut into 15 a tp rank, and those into 8 and 7.
    assert rows("layers.0.up.weight") == {0: (0, 8), 2: (8, 7), 1: (15, 8), 3: (23, 7)}
    assert rows("optim/layers.0.up.bias/exp_avg") == {0: (0, 8), 2: (8, 7), 1: (15, 8), 3: (23, 7)}
    # A weight of the dp mesh alone is the same on both tp ranks.
    assert rows("layers.0.norm.weight") == {0: (0, 8), 2: (8, 8)}
    assert [chunk.box for chunk in index["layers.0.down.weight"].chunks] == [
        Box((0, 0), (8, 15)),
        Box((0, 15), (8, 15)),
        Box((8, 0), (8, 15)),
        Box((8, 15), (8, 15)),
    ]


def test_ranks_with_nothing_of_a_weight_are_no_gap(fsdp_checkpoints: Path) -> None:
    entry = _open(fsdp_checkpoints / "w4")["gain"]
    assert [chunk.box for chunk in entry.chunks] == [Box((0,), (1,)), Box((1,), (1,))]


def test_moments_are_named_alike_with_and_without_names_in_the_file(fsdp_checkpoints: Path) -> None:
    named, unnamed = (_open(fsdp_checkpoints / name) for name in ("w2", "w2_unnamed"))
    assert list(named) == list(unnamed)
    root = TorchFile(fsdp_checkpoints / "w2_unnamed" / rank_file("optim", 2, 0)).root
    assert "param_names" not in root["param_groups"][0]


def test_objects_are_what_torch_loads(fsdp_checkpoints: Path) -> None:
    objects = _open(fsdp_checkpoints / "w2").objects
    assert set(objects) == {"param_groups", "scheduler", "rng"}
    assert objects["scheduler"] == {"last_epoch": 1, "_last_lr": [0.1], "base_lrs": (0.5,)}
    (group,) = objects["param_groups"]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.0, (0.9, 0.999), 0.0)
    assert not {"params", "param_names"} & set(group)
    assert sorted(objects["rng"]) == [0, 1]
    for rank, state in objects["rng"].items():
        assert state["random"] == random.Random(rank).getstate()
        assert np.array_equal(state["cpu"], torch.Generator().manual_seed(rank).get_state().numpy())
        expected = np.random.RandomState(rank).get_state()
        assert state["numpy"][0] == expected[0]
        assert np.array_equal(state["numpy"][1], expected[1])
        assert state["numpy"][2:] == expected[2:]
    with pytest.raises(KeyError):
        objects["none of these"]


def test_a_checkpoint_of_weights_alone(copy: Any) -> None:
    directory = copy("w2")
    for path in [*directory.glob("optim_*"), *directory.glob("extra_*")]:
        path.unlink()
    index = _open(directory)
    assert not [name for name in index if name.startswith("optim/")]
    assert index.objects["scheduler"] is None
    assert index.objects["rng"] == {}
    assert index.objects["param_groups"] is None


def test_the_config_is_not_needed(copy: Any) -> None:
    directory = copy("w3")
    (directory / CONFIG_FILE).unlink()
    assert _open(directory).world_size == 3


def test_file_names_and_config_are_verls() -> None:
    assert rank_file("extra_state", 16, 3) == "extra_state_world_size_16_rank_3.pt"
    assert json.loads(config_text(4)) == {"FSDP_version": 2, "world_size": 4}


# Files of older torch: written by tests/layouts/data/write.py with the version that names the folder

DATA = Path(__file__).parent / "data"


def _writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_with_older_torch", DATA / "write.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OLDER = sorted(DATA.glob("torch-*/*"))


@pytest.mark.parametrize("directory", OLDER, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_files_of_older_torch(directory: Path) -> None:
    writer = _writer()
    index = _open(directory)
    assert len(index) == 1 + 4 + 4 * 3
    assert index["scale"].read().item() == 3.5
    for name in index:
        if name != "scale":
            assert torch.equal(index[name].read(), writer.expected(name)), name


def test_there_are_files_of_older_torch() -> None:
    assert {path.parent.name for path in OLDER} == {"torch-2.6.0", "torch-2.11.0"}


# Files that are missing


def test_missing_ranks_are_listed_with_the_likely_cause(copy: Any) -> None:
    directory = copy("w4")
    for kind in ("model", "optim", "extra_state"):
        for rank in range(4):
            path = directory / rank_file(kind, 4, rank)
            for copied in (8 + rank, 12 + rank):
                shutil.copy(path, directory / rank_file(kind, 16, copied))
            path.unlink()
    (directory / CONFIG_FILE).write_text(config_text(16))
    before = sorted(directory.iterdir())
    with pytest.raises(IncompleteError) as caught:
        _open(directory)
    message = str(caught.value)
    assert message.startswith(f"{directory}: ")
    assert "ranks 0-7 of 16 are missing" in message
    assert "another node's local disk" in message
    assert len(message.splitlines()) == 1
    assert sorted(directory.iterdir()) == before


@pytest.mark.parametrize("kind", ["model", "optim", "extra_state"])
def test_one_missing_file_of_any_kind_is_named(kind: str, copy: Any) -> None:
    directory = copy("w3")
    (directory / rank_file(kind, 3, 1)).unlink()
    with pytest.raises(IncompleteError, match=f"{kind} files of rank 1 of 3 are missing"):
        _open(directory)


def test_ranks_that_are_missing_here_and_there(copy: Any) -> None:
    directory = copy("w4")
    for rank in (0, 2, 3):
        (directory / rank_file("model", 4, rank)).unlink()
    with pytest.raises(IncompleteError, match=r"model files of ranks 0, 2-3 of 4"):
        _open(directory)


def test_a_folder_with_an_optimizer_and_no_weights(copy: Any) -> None:
    directory = copy("w2")
    for rank in range(2):
        (directory / rank_file("model", 2, rank)).unlink()
    with pytest.raises(IncompleteError, match="no weights were saved here"):
        _open(directory)


def test_a_folder_with_nothing_but_a_config(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text(config_text(2))
    assert FsdpLayout().recognises(tmp_path)
    with pytest.raises(NotFoundError, match="no model_world_size"):
        _open(tmp_path)


@pytest.mark.parametrize("name", ["model_world_size_0_rank_0.pt", f"model_world_size_{10**12}_rank_0.pt"])
def test_names_that_no_run_gives_its_files(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(NotFoundError):
        _open(tmp_path)


# Files that do not belong together


def test_mixed_world_sizes_need_the_config_to_say_which_counts(copy: Any, fsdp_checkpoints: Path) -> None:
    directory = copy("w2")
    for path in (fsdp_checkpoints / "w3").glob("*.pt"):
        shutil.copy(path, directory)
    assert _open(directory).world_size == 2
    (directory / CONFIG_FILE).write_text(config_text(3))
    assert _open(directory).world_size == 3
    (directory / CONFIG_FILE).unlink()
    with pytest.raises(DamagedError, match=r"world sizes \[2, 3\] lie together"):
        _open(directory)
    (directory / CONFIG_FILE).write_text(config_text(4))
    with pytest.raises(DamagedError, match=r"says world size 4, .* say \[2, 3\]"):
        _open(directory)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"world_size": "two"}', '{"world_size": null}', "[" * 100_000])
def test_a_config_that_is_none(text: str, copy: Any) -> None:
    directory = copy("w2")
    (directory / CONFIG_FILE).write_text(text)
    with pytest.raises(DamagedError, match=CONFIG_FILE):
        _open(directory)


@pytest.mark.parametrize("kind", ["model", "optim"])
@pytest.mark.parametrize("name", ["w2", "hsdp", "tp"])
def test_a_file_that_is_a_copy_of_another_ranks_is_named(kind: str, name: str, copy: Any) -> None:
    directory = copy(name)
    size = 2 if name == "w2" else 4
    target = directory / rank_file(kind, size, 1)
    shutil.copy(directory / rank_file(kind, size, 0), target)
    with pytest.raises(DamagedError, match=rf"{target.name}: was written by rank 0; it is a copy"):
        _open(directory)


@pytest.mark.parametrize("directory", OLDER, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_copy_is_named_in_files_of_older_torch_too(directory: Path, tmp_path: Path) -> None:
    size = 2 if directory.name == "fsdp" else 4
    shutil.copytree(directory, tmp_path / "c")
    shutil.copy(directory / rank_file("model", size, size - 1), tmp_path / "c" / rank_file("model", size, 0))
    with pytest.raises(DamagedError, match=rf"rank_0\.pt: was written by rank {size - 1}"):
        _open(tmp_path / "c")


def _spoil(directory: Path, file: str, name: str) -> None:
    """Change the last byte of a plain tensor of a rank's file."""
    path = directory / file
    opened = TorchFile(path)
    entry = opened.entry(opened.root[name])
    place = entry.chunks[0].source.start() + entry.nbytes - 1
    data = bytearray(path.read_bytes())
    data[place] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize("buffer", BUFFERS)
def test_ranks_that_disagree_on_a_buffer(buffer: str, copy: Any) -> None:
    directory = copy("w3")
    _spoil(directory, rank_file("model", 3, 2), buffer)
    with pytest.raises(
        DamagedError, match=rf"^{buffer}: every rank should hold the same .* rank 2 differs from rank 0"
    ):
        _open(directory)


@pytest.mark.parametrize("kind", ["model", "optim", "extra_state"])
def test_a_truncated_file_is_named(kind: str, copy: Any) -> None:
    directory = copy("w2")
    path = directory / rank_file(kind, 2, 1)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DamagedError, match=rf"{path.name}: .*truncated"):
        dict(_open(directory).objects)


def _plain_ranks(directory: Path, *states: Any) -> Path:
    for rank, state in enumerate(states):
        torch.save(state, directory / rank_file("model", len(states), rank))
    return directory


@pytest.mark.parametrize(
    "other",
    [torch.ones(3), torch.ones(1, 2), torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.bfloat16)],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_ranks_that_disagree_on_shape_or_type(other: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match=r"^w: .* rank 1 differs"):
        _open(_plain_ranks(tmp_path, {"w": torch.ones(2)}, {"w": other}))


def test_a_tensor_that_one_rank_lacks(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match=r"^b: not in model_world_size_2_rank_1\.pt"):
        _open(_plain_ranks(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.ones(2)}))


@pytest.mark.parametrize("value", [3, None, "text", [torch.ones(2)]], ids=str)
def test_a_value_that_is_no_tensor_is_not_passed_over(value: Any, tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match=rf"rank_0\.pt: _extra is a {type(value).__name__}"):
        _open(_plain_ranks(tmp_path, {"w": torch.ones(2), "_extra": value}))


@pytest.mark.parametrize(
    "state", [[torch.ones(2)], torch.ones(2), {1: torch.ones(2)}], ids=["list", "tensor", "numbers"]
)
def test_a_file_that_is_no_state_dict(state: Any, tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="holds no state dict"):
        _open(_plain_ranks(tmp_path, state))


def test_views_of_one_storage_are_no_tied_weights(tmp_path: Path) -> None:
    square = torch.arange(9.0).reshape(3, 3)
    index = _open(_plain_ranks(tmp_path, {"w": square, "turned": square.t(), "row": square[0], "same": square}))
    assert {name: entry.alias_of for name, entry in index.items()} == {
        "w": None,
        "turned": None,
        "row": None,
        "same": "w",
    }


@pytest.mark.parametrize("kind", ["model", "optim", "extra_state"])
def test_a_hostile_file_is_refused_by_name(kind: str, copy: Any) -> None:
    directory = copy("w2")
    trap = directory / "trap"
    pickle = (
        b"\x80\x02cposix\nsystem\nX" + len(f"touch {trap}").to_bytes(4, "little") + f"touch {trap}".encode() + b"\x85R."
    )
    write_archive(directory / rank_file(kind, 2, 1), pickle)
    with pytest.raises(RefusedError, match=rf"{rank_file(kind, 2, 1)}: its pickle asks for posix\.system"):
        dict(_open(directory).objects)
    assert not trap.exists()


# Optimizers whose parameters cannot be told


def _role(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """A checkpoint of one rank after a step."""
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    torch.save(model.state_dict(), directory / rank_file("model", 1, 0))
    torch.save(optimizer.state_dict(), directory / rank_file("optim", 1, 0))
    return directory


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))


def test_names_in_the_file_place_moments_whatever_their_order(tmp_path: Path) -> None:
    model = _model()
    named = dict(model.named_parameters())
    groups = [
        {"params": [(n, named[n]) for n in ("2.weight", "0.weight", "1.weight")], "weight_decay": 0.1},
        {"params": [(n, named[n]) for n in ("1.bias", "0.bias")], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    index = _open(_role(tmp_path, model, optimizer))
    for name, parameter in named.items():
        for moment, value in optimizer.state[parameter].items():
            assert torch.equal(index[f"optim/{name}/{moment}"].read(), value), name
    assert [group["weight_decay"] for group in index.objects["param_groups"]] == [0.1, 0.0]


def _only_weights(directory: Path, reason: str) -> None:
    """The weights are read, and the index says why the moments are not."""
    index = _open(directory)
    assert len(index) > 4
    assert list(index) == list(index.weights())
    assert index.objects["param_groups"] is None
    (line,) = index.unread
    assert re.search(reason, line)


def test_several_groups_without_names_are_not_guessed(tmp_path: Path) -> None:
    # Decayed and undecayed weights in two groups: as many parameters as weights, but in another order.
    model = _model()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2]},
        {"params": [p for p in model.parameters() if p.dim() == 1]},
    ]
    _only_weights(_role(tmp_path, model, torch.optim.AdamW(groups)), "5 parameters without names in 2 groups")


def test_parameters_in_another_order_are_found_by_their_shapes(tmp_path: Path) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(list(model.parameters())[::-1])
    reason = r"optim/0\.weight/exp_avg: shape \[4, 4\] for a weight of shape \[4, 3\]"
    _only_weights(_role(tmp_path, model, optimizer), reason)


def test_fewer_parameters_than_weights_without_names_are_not_guessed(tmp_path: Path) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(list(model.parameters())[2:])
    _only_weights(_role(tmp_path, model, optimizer), "3 parameters without names in 1 groups for 5 weights")


def test_a_buffer_that_looks_like_a_weight_makes_the_order_unknown(fsdp_checkpoints: Path) -> None:
    # On one rank without FSDP2, weights and buffers are plain tensors alike.
    _only_weights(fsdp_checkpoints / "w1_unnamed", "11 parameters without names in 1 groups for 15 weights")


def test_other_optimizers_moments_come_by_their_own_names(tmp_path: Path) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    index = _open(_role(tmp_path, model, optimizer))
    assert [n for n in index if n.startswith("optim/")] == [
        f"optim/{n}/momentum_buffer" for n, _ in model.named_parameters()
    ]


def _optimizer_state(**changed: Any) -> dict[str, Any]:
    state: dict[str, Any] = {
        "state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2)}},
        "param_groups": [{"lr": 0.1, "params": [0]}],
    }
    return {key: value for key, value in (state | changed).items() if value != "absent"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"state": "absent"}, "no state in it, so it is no optimizer"),
        ({"param_groups": "absent"}, "no param_groups in it"),
        ({"param_groups": [3]}, "groups without parameters"),
        ({"param_groups": [{"params": 0}]}, "groups without parameters"),
        ({"param_groups": [{"params": [0], "param_names": ["v"]}]}, "moments of v, which the model files lack"),
        ({"param_groups": [{"params": [0, 0], "param_names": ["w", "w"]}]}, "not numbered one by one"),
        ({"param_groups": [{"params": ["w", 0]}]}, "not numbered one by one"),
        ({"param_groups": [{"params": ["v"]}]}, "moments of v, which the model files lack"),
        ({"param_groups": [{"params": ["w"]}]}, "parameter 0, which no group holds"),
        ({"state": {1: {"step": torch.tensor(1.0)}}}, "parameter 1, which no group holds"),
        ({"state": {0: 3}}, "parameter 0, which no group holds"),
        ({"state": {0: {"step": 7}}}, "optim/w/step is a int"),
    ],
)
def test_an_optimizer_file_that_is_none(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    _plain_ranks(tmp_path, {"w": torch.ones(2)})
    torch.save(_optimizer_state(**changed), tmp_path / rank_file("optim", 1, 0))
    with pytest.raises(DamagedError, match=rf"optim_world_size_1_rank_0\.pt: .*{message}"):
        _open(tmp_path)


def test_the_same_optimizer_file_unchanged_is_read(tmp_path: Path) -> None:
    _plain_ranks(tmp_path, {"w": torch.ones(2)})
    torch.save(_optimizer_state(), tmp_path / rank_file("optim", 1, 0))
    assert list(_open(tmp_path)) == ["w", "optim/w/step", "optim/w/exp_avg"]


# Bytes changed at random


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_spoilt_pickles_give_an_error_of_ours_or_a_valid_index(kind: str, copy: Any) -> None:
    dice = random.Random(kind)
    directory = copy("tp")
    path = directory / rank_file(kind, 4, 3)
    record = next(r for r in TorchFile(path).records() if r.name == "data.pkl")
    data = path.read_bytes()
    errors = 0
    for _ in range(60):
        spoilt = bytearray(data)
        for _ in range(dice.choice((1, 1, 2, 4))):
            place = record.start + dice.randrange(record.size)
            spoilt[place] = dice.choice((spoilt[place] ^ 1 << dice.randrange(8), dice.randrange(256)))
        path.write_bytes(spoilt)
        try:
            index = _open(directory)
        except MilepostError:
            errors += 1
        else:
            index.check_tiling()
            assert len(index) > 40
    assert errors > 20


def test_a_storage_shorter_than_its_tensor(tmp_path: Path) -> None:
    write_archive(tmp_path / rank_file("model", 1, 0), tensor_pickle(), {"0": bytes(15)})
    with pytest.raises(DamagedError, match=r"rank_0\.pt: a tensor of shape \[4\] reaches outside"):
        _open(tmp_path)
