"""One merge by several ranks: the same files as by one, and after an error nothing."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

import milepost
from milepost.errors import CallError, CheckpointError, DamagedError, MilepostError, WriteError
from milepost.jobs.ranks import Launch, Team, launch_of, share_out

ARGUMENTS = ("--max_shard_size", "3kB", "--dtype", "bf16")


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def start(rank: int, size: int, *arguments: str | Path, run: str = "7") -> subprocess.Popen[str]:
    environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(size), "TORCHELASTIC_RUN_ID": run}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    call = [sys.executable, "-m", "milepost", "merge", *map(str, arguments)]
    return subprocess.Popen(call, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    said = [process.communicate(timeout=120) for process in processes]
    return [(process.returncode, out, err) for process, (out, err) in zip(processes, said, strict=True)]


def test_what_torchrun_says() -> None:
    said = {"RANK": "2", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "a", "MASTER_PORT": "1"}
    launch = launch_of(said)
    assert launch is not None and (launch.rank, launch.size) == (2, 4)
    same = launch_of(said | {"RANK": "0", "LOCAL_RANK": "0"})
    assert same is not None and same.key == launch.key
    for other in ({"TORCHELASTIC_RUN_ID": "b"}, {"MASTER_PORT": "2"}, {"TORCHELASTIC_RESTART_COUNT": "1"}):
        found = launch_of(said | other)
        assert found is not None and found.key != launch.key
    for alone in ({}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "0"}, {"RANK": "x", "WORLD_SIZE": "2"}):
        assert launch_of(alone) is None


@pytest.mark.parametrize(
    ("sizes", "ranks", "loads"),
    [
        ([5, 5, 5, 5], 2, [10, 10]),
        ([9, 1, 1, 1, 1, 1], 2, [9, 5]),
        ([7, 6, 5, 4], 2, [11, 11]),
        ([3], 3, [3, 0, 0]),
        ([], 2, [0, 0]),
    ],
)
def test_shares_are_even_in_bytes_and_each_file_is_in_one(sizes: list[int], ranks: int, loads: list[int]) -> None:
    files = {f"f{n}": size for n, size in enumerate(sizes)}
    shares = share_out(files, ranks)
    assert [sum(files[name] for name in share) for share in shares] == loads
    assert sorted(name for share in shares for name in share) == sorted(files)


def test_torchrun_writes_the_files_that_one_process_writes(zoo: Path, tmp_path: Path) -> None:
    role = zoo / "untied" / "actor"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    call = [*torchrun, "-m", "milepost", "merge", role, tmp_path / "shared", *ARGUMENTS, "--checksum"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'shared'}\n" and done.stderr.count("found fsdp checkpoint") == 1
    alone = subprocess.run(
        [sys.executable, "-m", "milepost", "merge", role, tmp_path / "alone", *ARGUMENTS, "--checksum"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    assert contents(tmp_path / "shared") == contents(tmp_path / "alone")
    assert len(list((tmp_path / "alone").glob("*.safetensors"))) > 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "shared"]


def test_more_ranks_than_files_and_what_an_older_launch_of_the_same_name_left(zoo: Path, tmp_path: Path) -> None:
    launch = launch_of({"WORLD_SIZE": "2", "RANK": "0", "TORCHELASTIC_RUN_ID": "7", "MASTER_ADDR": "localhost",
                        "MASTER_PORT": "29500"})  # fmt: skip
    assert launch is not None
    old = tmp_path / f".out.{launch.key}.ranks"
    old.mkdir()
    files = {"rank-0": '"x"', "rank-1": '"y"', "roll": '{"0": "x", "1": "y"}', "building": '".gone"'}
    files |= {"committed": "true", "failed-1": '{"rank": 1, "status": 1, "why": "of old"}'}
    for name, text in files.items():
        (old / name).write_text(text)
    follower = start(1, 2, zoo / "tied" / "actor", tmp_path / "out")
    time.sleep(0.7)  # it finds the old meeting
    results = ends([start(0, 2, zoo / "tied" / "actor", tmp_path / "out"), follower])
    assert [status for status, *_ in results] == [0, 0], results
    assert results[0][1] == f"{tmp_path / 'out'}\n" and results[1][1:] == ("", "")
    milepost.merge(zoo / "tied" / "actor", tmp_path / "alone")
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "out"]


@pytest.mark.parametrize("lame", [0, 1, 2])
def test_what_stops_one_rank_stops_all_and_nothing_is_left(zoo: Path, tmp_path: Path, lame: int) -> None:
    """As on a cluster where one node does not see the checkpoint."""
    role = zoo / "untied" / "actor"
    broken = tmp_path / "broken"
    shutil.copytree(role, broken)
    (broken / "model_world_size_2_rank_1.pt").unlink()
    place = tmp_path / "place"
    place.mkdir()
    sources = [broken if rank == lame else role for rank in range(3)]
    results = ends([start(rank, 3, sources[rank], place / "out", *ARGUMENTS) for rank in range(3)])
    assert [status for status, *_ in results] == [1, 1, 1], results
    assert all("model files of rank 1 of 2 are missing" in stderr for _, _, stderr in results)
    others = [stderr for rank, (_, _, stderr) in enumerate(results) if rank != lame]
    assert all(f"milepost: rank {lame} of 3: " in stderr for stderr in others)
    assert list(place.iterdir()) == []


def test_ranks_that_see_different_models_are_refused(zoo: Path, tmp_path: Path) -> None:
    sources = [zoo / "untied" / "actor", zoo / "tied" / "actor"]
    results = ends([start(rank, 2, sources[rank], tmp_path / "out", "--max_shard_size", "3kB") for rank in range(2)])
    assert [status for status, *_ in results] == [1, 1], results
    assert all("rank 1 found another model than rank 0" in stderr for *_, stderr in results)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_stops_all(zoo: Path, tmp_path: Path, stopped: int) -> None:
    big = (zoo / "custom" / "big", tmp_path / "out", "--dtype", "fp16", "--memory_limit", "1MiB", "--workers", "1")
    processes = [start(rank, 2, *big) for rank in range(2)]
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.*.tmp/*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.001)
    processes[stopped].send_signal(signal.SIGTERM)
    results = ends(processes)
    assert results[stopped][0] == 143
    assert results[1 - stopped][0] == 3 and f"rank {stopped} of 2: was stopped" in results[1 - stopped][2]
    assert list(tmp_path.iterdir()) == []


def test_a_full_target_is_refused_by_all(zoo: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    results = ends([start(rank, 2, zoo / "tied" / "actor", tmp_path / "out") for rank in range(2)])
    assert [status for status, *_ in results] == [2, 2]
    assert all("is not empty" in stderr for *_, stderr in results)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "config.json"]


def test_a_dry_run_is_for_rank_0(zoo: Path, tmp_path: Path) -> None:
    results = ends([start(rank, 2, zoo / "tied" / "actor", "--dry-run") for rank in range(2)])
    assert [status for status, *_ in results] == [0, 0]
    assert "would write" in results[0][2] and results[1][1:] == ("", "")


def together(target: Path, *work: Callable[[Team], None], patience: float = 20.0) -> list[BaseException | None]:
    """What each rank's context ended with, each rank in a thread."""
    found: list[BaseException | None] = [None] * len(work)

    def one(rank: int) -> None:
        try:
            with Team(Launch(rank, len(work), "key"), target, patience=patience) as team:
                work[rank](team)
        except MilepostError as error:
            found[rank] = error

    threads = [Thread(target=one, args=(rank,)) for rank in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_a_rank_stopped_before_it_saw_the_roll_is_noticed_at_once(tmp_path: Path) -> None:
    meeting = tmp_path / ".out.key.ranks"

    def comes_and_goes() -> None:
        while not (meeting / "rank-0").exists():
            time.sleep(0.01)
        (meeting / "rank-1").write_text('"nonce"')
        while not (meeting / "roll").exists():
            time.sleep(0.01)
        (meeting / "rank-1").unlink()

    thread = Thread(target=comes_and_goes)
    thread.start()
    begun = time.monotonic()
    with (
        pytest.raises(MilepostError, match="rank 1 of 2: was stopped"),
        Team(Launch(0, 2, "key"), tmp_path / "out") as team,
        team.directory(overwrite=False, sources=()) as building,
    ):
        team.gather(building, "", {}, ())
    thread.join()
    assert time.monotonic() - begun < 9 and list(tmp_path.iterdir()) == []


def test_a_rank_that_does_not_come_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    for rank, missing in ((0, "1, 2"), (1, "0")):
        with (
            pytest.raises(CallError, match=rf"waited 1 s for rank {missing} at .*unset RANK and WORLD_SIZE"),
            Team(Launch(rank, 3, "key"), tmp_path / "out", patience=1),
        ):
            pass
        assert list(tmp_path.iterdir()) == []


def test_a_rank_that_vanishes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed, or its node gone: it says nothing, and its sign of life no longer changes."""

    def waits(team: Team) -> None:
        with team.directory(overwrite=False, sources=()) as building:
            team.gather(building, "", {}, ())
        team.wait_for_commit()

    def vanishes(team: Team) -> None:
        team._ended.set()
        time.sleep(4)

    monkeypatch.setattr("milepost.jobs.ranks._LETTING_GO", 1.0)
    for work, silent in (((waits, vanishes), 1), ((vanishes, waits), 0)):
        found = together(tmp_path / f"out{silent}", *work, patience=2.0)
        error = found[1 - silent]
        assert isinstance(error, CallError) and f"for rank {silent} at" in str(error)
        assert not (tmp_path / f"out{silent}").exists()


def test_a_file_that_rank_0_does_not_see_whole_stops_the_merge(tmp_path: Path) -> None:
    def leads(team: Team) -> None:
        with team.directory(overwrite=False, sources=()) as building:
            team.gather(building, "", {}, ())

    def follows(team: Team) -> None:
        with team.directory(overwrite=False, sources=()) as building:
            (building / "f").write_bytes(b"abc")
            team.gather(building, "", {"f": 4}, ())
        team.wait_for_commit()

    found = together(tmp_path / "out", leads, follows)
    assert isinstance(found[0], DamagedError) and "f: rank 1 wrote 4 bytes" in str(found[0])
    assert isinstance(found[1], CheckpointError) and list(tmp_path.iterdir()) == []


def test_a_meeting_that_cannot_be_cleared_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("milepost.jobs.ranks._LETTING_GO", 0.3)
    meeting = tmp_path / ".out.key.ranks"
    meeting.touch()  # no directory
    with pytest.raises(WriteError, match=f"{meeting}: cannot be written"), Team(Launch(0, 2, "key"), tmp_path / "out"):
        raise AssertionError("the work has begun")
    meeting.unlink()

    def leads(team: Team) -> None:
        with team.directory(overwrite=False, sources=()) as building:
            team.gather(building, "", {}, ())
        monkeypatch.setattr("shutil.rmtree", refused)

    def follows(team: Team) -> None:
        with team.directory(overwrite=False, sources=()) as building:
            team.gather(building, "", {}, ())
        team.wait_for_commit()

    def refused(place: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))

    assert together(tmp_path / "out", leads, follows) == [None, None]  # what was asked for is done
    assert (tmp_path / "out").is_dir() and meeting.is_dir()
    assert f"{meeting}: could not be removed: Permission denied" in caplog.text


def test_a_place_that_cannot_be_written() -> None:
    with pytest.raises(WriteError, match="cannot be written"), Team(Launch(0, 2, "key"), Path("/proc/nowhere/out")):
        pass
