"""DeepSpeed and Megatron write files of their own: a save that does not block records them as they were at the call."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from late_writers import late_writers
from ranks import run_ranks

from milepost.checkpoint.manager import CheckpointManager
from milepost.checkpoint.manifest import check_files, read_manifest

ENGINES = [
    pytest.param(name, marks=pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed"))
    for name, package in (
        ("zero3", "deepspeed"),
        ("zero1", "deepspeed"),
        ("classic", "megatron"),
        ("dist", "megatron"),
    )
]
UNLIKE = ("trainer_state.json", "dist_ckpt/.metadata")
"""Files that no two saves have in common: DCP gives each save a number."""


def snapshot(engine: Any) -> dict[str, list[torch.Tensor]]:
    return {name: [view.clone() for _, view in live.boxes] for name, live in engine.tensors().items()}


def equal(one: dict[str, list[torch.Tensor]], other: dict[str, list[torch.Tensor]]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(a, b) for name in one for a, b in zip(one[name], other[name], strict=True)
    )


class Names:
    """Files that only counts what this rank writes."""

    directory = Path()

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[io.BytesIO]:
        buffer = io.BytesIO()
        yield buffer
        self.sizes[name] = len(buffer.getvalue())

    def save(self, name: str, state: Any) -> None:
        with self.create(name) as file:
            torch.save(state, file)


def record(root: Path, engine: Any, train: Any, load: Any, *, measure: bool = False) -> dict[str, Any]:
    manager = CheckpointManager(root, {"actor": engine})
    manager.resume()
    train(1)
    before = snapshot(engine)
    with late_writers():
        folder = manager.save(1, blocking=False)
        [part] = root.glob(".global_step_1.*.tmp")
        begun = {path.name: path.stat().st_size for path in part.rglob("*") if path.is_file()}
        train(2)
    moved = not equal(snapshot(engine), before)
    manager.save(2, blocking=False)
    manager.wait()
    manager.save(3)
    manager.close()
    load(engine, folder / "actor")
    written = Names()
    if measure:
        engine.save(written)
    sizes = [sum(view.nbytes for view in views) for views in snapshot(engine).values()]
    return {
        "moved": moved,
        "same": equal(snapshot(engine), before),
        "begun": begun,
        "written": written.sizes,
        "sizes": sizes,
    }


def deepspeed(base: Path, model: Path) -> dict[str, Any]:
    import zero_engines as made

    from milepost.engines.deepspeed.setup import ZeroSettings

    said = {}
    for stage in (3, 1):
        engine = made.make(model, ZeroSettings(stage, torch.float32))

        def train(seed: int, engine: Any = engine) -> None:
            made.train(engine, 1, made.tokens(4, seed))

        said[f"zero{stage}"] = record(base / f"zero{stage}", engine, train, made.load)
    return said


def megatron(base: Path, model: Path) -> dict[str, Any]:
    import megatron_cpu
    import megatron_engines as made

    from milepost.engines.megatron.parallel import Parallel

    megatron_cpu.install()
    said: dict[str, Any] = {}
    for form in ("classic", "dist"):
        engine = made.make(model, Parallel(), form=form)

        def train(seed: int, engine: Any = engine) -> None:
            made.train(engine, 1, *made.sequences(4, seed))

        said[form] = record(base / form, engine, train, made.load, measure=form == "classic")
    return said


@pytest.fixture(scope="module")
def base(module_path: Path) -> Path:
    return module_path


@pytest.fixture(scope="module")
def told(base: Path) -> dict[str, list[dict[str, Any]]]:
    from megatron_engines import save_model
    from tiny import tiny_qwen2

    said: dict[str, list[dict[str, Any]]] = {}
    for function, package, model in (
        (deepspeed, "deepspeed", tiny_qwen2(base / "tiny")),
        (megatron, "megatron", save_model(base / "model", "qwen2")),
    ):
        if find_spec(package) is not None:
            for of_one in run_ranks(function, 2, base, model):
                for name, outcome in of_one.items():
                    said.setdefault(name, []).append(outcome)
    return said


@pytest.mark.parametrize("engine", ENGINES)
def test_the_state_at_the_call_is_on_disk(told: dict[str, list[dict[str, Any]]], base: Path, engine: str) -> None:
    for outcome in told[engine]:
        assert outcome["moved"]
        assert outcome["same"]
    for step in (1, 2):
        folder = base / engine / f"global_step_{step}"
        assert check_files(folder, read_manifest(folder), deep=True) == ()


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_written_while_training_waits(told: dict[str, list[dict[str, Any]]], engine: str) -> None:
    for outcome in told[engine]:
        assert len(outcome["begun"]) > 3
        assert set(outcome["begun"].values()) == {0}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_files_are_those_of_a_save_that_blocks(
    told: dict[str, list[dict[str, Any]]], base: Path, engine: str
) -> None:
    assert told
    behind, blocking = (
        {file.path: file.xxh3_128 for file in read_manifest(base / engine / f"global_step_{step}").files}
        for step in (2, 3)
    )
    assert behind.keys() == blocking.keys()
    differ = {path for path in behind if behind[path] != blocking[path]}
    assert all(path.endswith(UNLIKE) for path in differ)


@pytest.mark.parametrize("engine", ENGINES[3:])
def test_each_of_two_replicas_writes_half_of_the_bytes_once(
    told: dict[str, list[dict[str, Any]]], base: Path, engine: str
) -> None:
    sizes, folder = told[engine][0]["sizes"], base / engine / "global_step_2/actor/dist_ckpt"
    written = [(folder / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1)]
    around = 1500 * len(sizes)  # bytes of the archives that the tensors lie in
    assert sum(sizes) <= sum(written) < sum(sizes) + around
    assert abs(written[0] - written[1]) < max(sizes) + around / 2


@pytest.mark.parametrize("engine", ENGINES[2:3])
def test_two_replicas_share_what_they_both_hold(told: dict[str, list[dict[str, Any]]], engine: str) -> None:
    """The moments are twice the bytes of the weights."""
    shared = [{name.partition("/")[0] for name in outcome["written"]} - {"rng_states"} for outcome in told[engine]]
    assert shared == [{"optim", "huggingface"}, {"model"}]
