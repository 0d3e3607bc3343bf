"""A flipped bit or a cut file, anywhere in a step: found, and never loaded as if nothing were."""

from __future__ import annotations

import random
import shutil
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import Counter, Run, TinyEngine

from faults.damage import files_of, flip
from milepost.checkpoint.diary.status import run_status
from milepost.checkpoint.inventory import inventory
from milepost.checkpoint.locate import locate
from milepost.checkpoint.manifest import MANIFEST, read_manifest
from milepost.checkpoint.steps import scan
from milepost.checkpoint.verify import verify
from milepost.errors import CheckpointError, DamagedError, IncompleteError

SHAPES = {"layer.weight": (300, 300), "layer.bias": (5,)}
LARGE = "optim_world_size_1_rank_0.pt"  # beyond what a resume reads whole
STATE = "trainer_state.json"


class Bulky(Counter):
    """A part whose state fills a large file, in which most numbers could be others."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "order": list(range(100_000))}


def make_run(root: Path, keep_last: int | None = None) -> Run:
    """A new process's run whose weights fill files that are not read whole."""
    roles = {role: TinyEngine(role, shapes=SHAPES) for role in ("actor", "critic")}
    run = Run(root, roles=roles, parts={"counter": Bulky()}, keep_last=keep_last)
    run.actor, run.critic = roles["actor"], roles["critic"]
    return run


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with steps 1 and 2. Read only."""
    root = tmp_path_factory.mktemp("damage") / "run"
    run = make_run(root)
    run.manager.resume()
    run.train(1, 2)
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def payload(path: Path) -> Iterator[range]:
    """Where in an archive the bytes of tensors lie."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for info in archive.infolist():
            if "/data/" in info.filename:
                file.seek(info.header_offset + 26)
                name, extra = struct.unpack("<HH", file.read(4))
                start = info.header_offset + 30 + name + extra
                yield range(start, start + info.file_size)


def test_every_file_of_a_step_is_in_its_manifest(saved: Path) -> None:
    step = saved / "global_step_2"
    named = {step / record.path for record in read_manifest(step).files}
    assert {*named, step / MANIFEST} == set(files_of(step))


def test_verify_deep_finds_a_flipped_bit_in_any_file(root: Path) -> None:
    step, chance = root / "global_step_2", random.Random(1)
    assert verify(step, deep=True).ok
    for path in files_of(step):
        size = 8 * path.stat().st_size
        for bit in {0, size - 9, *(chance.randrange(size - 8) for _ in range(3))}:
            flip(path, bit)
            verdict = verify(step, deep=True)
            assert not verdict.ok, f"{path} bit {bit}"
            assert any(path.name in problem for problem in verdict.problems)
            flip(path, bit)
    assert verify(step, deep=True).ok


def test_a_cut_file_is_found_by_its_size_and_passed_over(root: Path) -> None:
    step = root / "global_step_2"
    for path in files_of(step):
        content = path.read_bytes()
        for length in (len(content) // 2, len(content) - 1):
            path.write_bytes(content[:length])
            if path.name == MANIFEST and length == len(content) - 1:
                continue  # the line's end says nothing
            assert not verify(step).ok
            run = make_run(root)
            assert run.manager.resume() == 1
            assert run.actor.is_at(1)
            [skipped] = run.manager.report.skipped
            assert skipped.folder == "global_step_2"
            assert path.name in skipped.why
        path.write_bytes(content)


def test_a_flipped_bit_in_a_small_file_is_found_before_anything_is_loaded(root: Path) -> None:
    """A number of trainer_state.json, a schedule, a config: nothing else would show that it is another one."""
    step, chance = root / "global_step_2", random.Random(2)
    assert (step / STATE).stat().st_size > 1 << 18
    for path in (path for path in files_of(step) if path.suffix == ".json" or path.stat().st_size < 1 << 18):
        bit = chance.randrange(8 * path.stat().st_size - 8)
        flip(path, bit)
        run = make_run(root)
        with pytest.raises(CheckpointError, match=rf"{step}.*({path.name})"):
            run.manager.resume("resume_path", step)
        assert run.actor.is_at(1) is run.actor.is_at(2) is False
        run = make_run(root)
        assert run.manager.resume() == 1
        [skipped] = run.manager.report.skipped
        assert (skipped.folder, path.name in skipped.why) == ("global_step_2", True)
        # Who asks is told the same before.
        assert [(facts.step, facts.state) for facts in inventory(root)] == [(1, "committed"), (2, "damaged")]
        status = run_status(root)
        assert status.on_disk.newest is not None
        assert (status.on_disk.newest.step, status.next_step) == (1, 2)
        assert any(path.name in line for line in status.lines() if line.startswith("damaged"))
        flip(path, bit)
    assert make_run(root).manager.resume() == 2


def test_a_flipped_bit_in_the_header_of_a_large_file_is_found_or_harmless(root: Path) -> None:
    step, chance = root / "global_step_2", random.Random(3)
    path = step / "actor" / LARGE
    inside = list(payload(path))
    places = [at for at in range(path.stat().st_size) if not any(at in part for part in inside)]
    whole, found = path.read_bytes(), 0
    for at in chance.sample(places, 30):
        flip(path, 8 * at + chance.randrange(8))
        run = make_run(root)
        if run.manager.resume() == 1:
            found += 1
            [skipped] = run.manager.report.skipped
            assert LARGE in skipped.why
            assert run.actor.is_at(1)
        else:  # a date, a flag, what pads
            assert run.actor.is_at(2)
        path.write_bytes(whole)
    assert found > 10


def test_a_named_step_is_resumed_from_or_nothing_is(root: Path) -> None:
    step = root / "global_step_2"
    (step / "critic" / "fsdp_config.json").unlink()
    run = make_run(root)
    with pytest.raises(IncompleteError, match=rf"{step} cannot be resumed from: .*critic/fsdp_config\.json is missing"):
        run.manager.resume("resume_path", step)
    (step / MANIFEST).write_text("{}")
    with pytest.raises(DamagedError, match=rf"{step} cannot be resumed from: .*manifest\.json is no manifest"):
        run.manager.resume("resume_path", step)
    assert not run.actor.is_at(1)
    assert not run.actor.is_at(2)


def test_where_no_step_is_whole_training_does_not_begin_anew(root: Path) -> None:
    for step in (1, 2):
        flip(root / f"global_step_{step}" / "trainer_state.json", 100)
    with pytest.raises(IncompleteError, match=r"no step here is whole \(global_step_2 is damaged: .*trainer_state"):
        make_run(root).manager.resume()


def test_an_altered_step_saves_no_older_one_from_being_needed(root: Path) -> None:
    run = make_run(root, keep_last=2)
    run.manager.resume()
    flip(root / "global_step_2" / STATE, 100)
    run.train(3)
    assert [step.step for step in scan(root)] == [1, 2, 3]
    run.train(4)
    assert [step.step for step in scan(root)] == [3, 4]


def test_a_merge_of_a_run_passes_over_an_altered_step(root: Path) -> None:
    config = root / "global_step_2" / "actor" / "fsdp_config.json"
    flip(config, 90)
    located = locate(root)
    assert located.step == 1
    assert any(note.startswith("passed over global_step_2: ") and config.name in note for note in located.notes)
