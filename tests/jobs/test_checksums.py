"""Checksums of an export: written on demand, checked by verify, passed by where they mean nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import xxhash

import milepost
from milepost.checkpoint.verify import verify
from milepost.errors import DamagedError
from milepost.jobs import merge as merging
from milepost.jobs.checksums import CHECKSUMS, FileRecord, read_checksums, record_files, write_checksums
from milepost.jobs.prepare import prepare
from milepost.layouts.huggingface import companion_files


@pytest.fixture
def export(zoo: Path, tmp_path: Path) -> Path:
    model = prepare(zoo / "untied" / "actor")
    moved: list[int] = []
    options = merging.MergeOptions(max_shard_size=3000, checksum=True)
    report = merging.merge(model, tmp_path / "out", options, progress=moved.append)
    assert CHECKSUMS in report.files
    # the bar reaches its end, and passes it by no more than headers and companions
    assert 0 <= sum(moved) - merging.bytes_to_move(model, options) < 20_000
    return tmp_path / "out"


def test_every_file_is_recorded_by_size_and_hash(export: Path) -> None:
    content = json.loads((export / CHECKSUMS).read_text())
    files = {path.name: path.read_bytes() for path in export.iterdir() if path.name != CHECKSUMS}
    assert content == {
        "format": 1,
        "files": [
            {"path": name, "size": len(data), "xxh3_128": xxhash.xxh3_128(data).hexdigest()}
            for name, data in sorted(files.items())
        ],
    }
    assert len(files) > 6


def test_verify_reads_sizes_always_and_bytes_when_asked(export: Path) -> None:
    weights = sorted(export.glob("*.safetensors"))[1]
    names = [path.name for path in export.iterdir() if path.name != CHECKSUMS]
    read: list[int] = []
    good = verify(export, deep=True, progress=read.append)
    assert good.ok and good.files == len(names) and good.nbytes == sum((export / name).stat().st_size for name in names)
    assert sum(read) == good.nbytes

    with weights.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    assert verify(export).ok
    assert verify(export, deep=True).problems == (
        f"{weights.name} has other bytes than were written: its checksum differs",
    )
    (export / "tokenizer.json").unlink()
    (export / "config.json").write_text("{}")
    problems = verify(export).problems
    assert "tokenizer.json is missing" in problems and any(p.startswith("config.json has 2 bytes") for p in problems)


def test_an_export_without_them_is_judged_as_before(zoo: Path, tmp_path: Path) -> None:
    milepost.merge(zoo / "untied" / "actor", tmp_path / "out")
    assert not (tmp_path / "out" / CHECKSUMS).exists() and read_checksums(tmp_path / "out") is None
    assert verify(tmp_path / "out", deep=True).ok


def test_transformers_and_later_merges_pass_them_by(export: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    _, info = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert CHECKSUMS not in [path.name for path in companion_files(export)]
    milepost.merge(export, tmp_path / "again", dtype="bf16")
    assert not (tmp_path / "again" / CHECKSUMS).exists()


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", '{"format": 1}', '{"format": 2, "files": []}', '{"format": 1, "files": [{"path": "f"}]}',
        '{"format": 1, "files": [{"path": "/etc/passwd", "size": 1, "xxh3_128": ""}]}',
        '{"format": 1, "files": [{"path": "a/../../f", "size": 1, "xxh3_128": ""}]}',
    ],
)  # fmt: skip
def test_checksums_that_cannot_be_read_are_a_problem(zoo: Path, tmp_path: Path, content: str) -> None:
    shutil.copytree(zoo / "untied" / "reference", tmp_path / "model")
    (tmp_path / "model" / CHECKSUMS).write_text(content)
    with pytest.raises(DamagedError, match=CHECKSUMS):
        read_checksums(tmp_path / "model")
    problems = verify(tmp_path / "model").problems
    assert len(problems) == 1 and CHECKSUMS in problems[0]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"abc")
    (tmp_path / "a").write_bytes(b"")
    records = record_files(tmp_path, ["b", "a"], 2)
    assert records[0] == FileRecord("b", 3, xxhash.xxh3_128(b"abc").hexdigest())
    write_checksums(tmp_path, records)
    assert read_checksums(tmp_path) == (records[1], records[0])
