from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from milepost.checkpoint.files import StepFiles
from milepost.checkpoint.manifest import (
    MANIFEST,
    FileProblem,
    FileRecord,
    Manifest,
    check_files,
    digest_file,
    read_manifest,
)
from milepost.errors import CallError, CheckpointError, DamagedError, IncompleteError


def a_step(path: Path) -> Manifest:
    files = StepFiles(path / "actor", path)
    with files.create("model.pt") as file:
        file.write(b"abc")
        file.write(memoryview(b"defgh"))
    with files.create("huggingface/config.json") as file:
        file.write(b"{}")
    manifest = Manifest(7, 2, {"actor": "fsdp"}, ("model",), tuple(files.records), 12.5, "0.1.0", "run")
    (path / MANIFEST).write_text(manifest.to_json())
    return manifest


def test_bytes_are_counted_and_hashed_as_they_pass(tmp_path: Path) -> None:
    manifest = a_step(tmp_path)
    assert manifest.files == (
        FileRecord("actor/model.pt", 8, xxhash.xxh3_128(b"abcdefgh").hexdigest()),
        FileRecord("actor/huggingface/config.json", 2, xxhash.xxh3_128(b"{}").hexdigest()),
    )
    assert manifest.nbytes == 10
    assert (tmp_path / "actor/model.pt").read_bytes() == b"abcdefgh"
    assert digest_file(tmp_path / "actor/model.pt") == manifest.files[0].xxh3_128


def test_a_manifest_reads_back(tmp_path: Path) -> None:
    manifest = a_step(tmp_path)
    assert read_manifest(tmp_path) == manifest
    assert json.loads((tmp_path / MANIFEST).read_text())["format"] == 2


def test_whole_files_have_no_problems(tmp_path: Path) -> None:
    manifest = a_step(tmp_path)
    read: list[int] = []
    assert check_files(tmp_path, manifest, deep=True, progress=read.append) == ()
    assert sum(read) == 10


def test_each_kind_of_problem_is_told(tmp_path: Path) -> None:
    manifest = a_step(tmp_path)
    model = tmp_path / "actor/model.pt"
    model.write_bytes(b"abcdefgX")
    assert check_files(tmp_path, manifest) == ()
    assert [problem.kind for problem in check_files(tmp_path, manifest, deep=True)] == ["checksum"]
    model.write_bytes(b"abcd")
    assert check_files(tmp_path, manifest) == (FileProblem("actor/model.pt", "size", "has 4 bytes instead of 8"),)
    model.unlink()
    assert [str(problem) for problem in check_files(tmp_path, manifest)] == ["actor/model.pt is missing"]


def test_no_manifest_is_incomplete(tmp_path: Path) -> None:
    with pytest.raises(IncompleteError, match=r"manifest\.json is missing"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("cut", [0, 1, 40, -3])
def test_a_cut_manifest_is_damaged(tmp_path: Path, cut: int) -> None:
    a_step(tmp_path)
    path = tmp_path / MANIFEST
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DamagedError, match=r"manifest\.json is no manifest"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("content", ["[]", "null", '{"format": 1}', '{"format": 1, "step": 1, "roles": []}'])
def test_json_of_another_kind_is_damaged(tmp_path: Path, content: str) -> None:
    (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(DamagedError):
        read_manifest(tmp_path)


def test_format_1_had_no_checksum_of_its_own(tmp_path: Path) -> None:
    manifest = a_step(tmp_path)
    content = json.loads(manifest.to_json())
    del content["xxh3_128"]
    (tmp_path / MANIFEST).write_text(json.dumps({**content, "format": 1}))
    assert read_manifest(tmp_path) == manifest


def test_no_bit_of_a_manifest_may_change(tmp_path: Path) -> None:
    manifest = a_step(tmp_path)
    path = tmp_path / MANIFEST
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            assert read_manifest(tmp_path) == manifest  # such as one blank for another
        except CheckpointError:
            continue


def test_a_format_of_the_future_is_named(tmp_path: Path) -> None:
    manifest = json.loads(a_step(tmp_path).to_json())
    (tmp_path / MANIFEST).write_text(json.dumps({**manifest, "format": 3}))
    with pytest.raises(DamagedError, match="has format 3; this version of milepost reads formats 1 to 2"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "actor/../../secret"])
def test_a_manifest_may_not_point_outside_its_step(tmp_path: Path, path: str) -> None:
    manifest = replace(a_step(tmp_path), files=(FileRecord(path, 1, ""),))
    (tmp_path / MANIFEST).write_text(manifest.to_json())
    with pytest.raises(DamagedError, match="outside the step"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../x", "/x", ""])
def test_a_role_may_not_write_outside_its_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(CallError, match="no name of a file"), StepFiles(tmp_path / "actor", tmp_path).create(name):
        pass
