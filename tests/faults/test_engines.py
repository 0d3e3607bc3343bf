"""Real engines on two ranks: what each writes is whole or absent too, and a damaged step of each is passed over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from megatron_engines import save_model
from tiny import tiny_qwen2

from faults.jobs import Job, Outcome
from faults.savers import Savers
from faults.shim import Rule
from milepost.checkpoint.verify import verify

# The optimizer's file of rank 1, by engine.
FILES = {
    "fsdp": "actor/optim_world_size_2_rank_1.pt",
    "deepspeed": "actor/*/*zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "megatron": "actor/optim/*.pt",
}


@pytest.fixture(scope="module")
def real_savers(compiler: None) -> Iterator[Savers]:
    pytest.importorskip("deepspeed")
    pytest.importorskip("megatron.core")
    with Savers(*FILES) as program:
        yield program


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path | None]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "fsdp": None,
        "deepspeed": tiny_qwen2(folder / "qwen2"),
        "megatron": save_model(folder / "llama", "llama"),
    }


def resumed_at(outcome: Outcome) -> int:
    """Where both ranks went on from, bit for bit."""
    found = outcome.of("resumed")
    assert [said["holds"] for said in found] == [True, True], outcome
    assert found[0]["step"] == found[1]["step"]
    return int(found[0]["step"])


@pytest.mark.parametrize("kind", FILES)
def test_kills_and_a_flipped_bit_leave_the_newest_good_step(
    real_savers: Savers, base: Path, models: dict[str, Path | None], kind: str
) -> None:
    root = base / "run"
    job = Job(root, base / "first", ranks=2, steps=2, kind=kind, model=models[kind], options={"keep_last": None})
    first = real_savers.run(job)
    assert first.saved == 2, first
    calls = (Rule("kill", 2, ops=("write", "fsync", "create")), Rule("group", 1, ops=("rename",)))
    for turn, (rule, at_rank) in enumerate(zip(calls, (1, 0), strict=True)):
        killed = real_savers.run(replace(job, scratch=base / f"kill{turn}", rules=(rule,), at_rank=at_rank, steps=1))
        assert resumed_at(killed) == 2
        assert killed.saved == 0, killed
        assert {path.name for path in root.glob("global_step_*")} == {"global_step_1", "global_step_2"}
    newest = root / "global_step_2"
    assert verify(newest, deep=True).ok
    [damaged, *_] = sorted(newest.glob(FILES[kind]))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 4
    damaged.write_bytes(content)
    assert any(damaged.name in problem for problem in verify(newest, deep=True).problems)
    last = real_savers.run(replace(job, scratch=base / "last", steps=1))
    assert resumed_at(last) == 1
    assert last.saved == 2
    assert verify(root / "global_step_2", deep=True).ok
