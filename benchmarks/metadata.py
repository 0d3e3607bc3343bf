"""The index of very large runs: time and memory of opening, mapping and planning, with no weights behind it.

    python benchmarks/metadata.py [--tensors 1000,10000,45395,100000] [--ranks 1024] [--work DIR] [--json FILE]

Three things are measured, each in a fresh process:

files    `open` of real rank files: every one has a data.pkl that torch wrote (that of another rank with the rank's
         number put in its place) and tensors of 64 bytes. First without a kept index, then with it.
first    what follows the reading of headers, for DeepSeek-V3's tensors (671 B), in ever larger numbers of experts. The
         headers are simulated: they are made as `layouts.headers` would return them, FSDP2 with rows shared out. Time
         of joining them, of drawing the index, and of keeping it.
again    the same checkpoint opened from the kept index (the rank files are empty files of the right size), mapped to
         Hugging Face, and planned: the boxes of one rank of another world size, all of them; and a merge, of which a
         part is planned and the rest reckoned.

Times are CPU seconds of the process and its children, so that a busy machine does not show; `wall` is beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import pickletools
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from milepost.index import Box, Shape, TensorEntry, TensorIndex, contiguous_strides
from milepost.layouts.cache import IndexCache
from milepost.layouts.fsdp import FsdpLayout, rank_file
from milepost.layouts.headers import Cut, Header
from milepost.layouts.join import Join
from milepost.mapping.architectures import expected
from milepost.mapping.names import to_huggingface
from milepost.transfer.plan import plan

OTHER_WORLD = 1000
MERGED = 500  # tensors of the merge that are planned
WINDOW = 8 << 20


def main() -> None:
    """Run each part in a process of its own and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", default="1000,10000,45395,100000", help="numbers of tensors, separated by commas")
    parser.add_argument("--real", type=int, default=1000, help="tensors of the real files; 0 leaves them out")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--work", type=Path, help="where files go; default: a temporary directory")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        part, directory, tensors = options.part
        print(json.dumps(PARTS[part](Path(directory), int(tensors), options.ranks)))
        return
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        if options.real:
            directory = Path(work) / "files"
            print(f"{options.ranks} real files of {options.real:,} tensors", flush=True)
            _make_files(directory, options.real, options.ranks)
            for when in ("first", "again"):
                results[f"files {when}"] = _run("files", directory, options.real, options.ranks)
                print(f"  {when:8}{_line(results[f'files {when}'])}", flush=True)
            shutil.rmtree(directory)
        for tensors in (int(text) for text in options.tensors.split(",")):
            simulated = Path(work) / f"{tensors}"
            simulated.mkdir()
            print(f"{options.ranks} simulated headers of {tensors:,} tensors", flush=True)
            for part in ("first", "again"):
                results[f"{tensors} {part}"] = _run(part, simulated, tensors, options.ranks)
                print(f"  {part:8}{_line(results[f'{tensors} {part}'])}", flush=True)
            shutil.rmtree(simulated)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def _run(part: str, directory: Path, tensors: int, ranks: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--ranks", str(ranks), "--part", part, str(directory), str(tensors)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(directory / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _line(found: Mapping[str, Any]) -> str:
    return "  ".join(f"{name} {value:,.6g}" for name, value in found.items())


class _Clock:
    """CPU and wall seconds of each step."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def step(self, name: str, work: Callable[[], Any]) -> Any:
        """Do a piece of work and note what it took."""
        wall, cpu = time.perf_counter(), _cpu()
        result = work()
        self.found[f"{name} s"] = round(_cpu() - cpu, 2)
        self.found[f"{name} wall s"] = round(time.perf_counter() - wall, 2)
        return result

    def end(self) -> dict[str, Any]:
        """What was found, and the largest resident memory of this process so far."""
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        self.found["peak MiB"] = round(int(lines["VmHWM"].split()[0]) / 1024)
        return self.found


def _cpu() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


# --- real files


def _make_files(directory: Path, tensors: int, ranks: int) -> None:
    """Files of all ranks, from what torch writes for two of them."""
    import torch  # noqa: PLC0415  the measured processes do not need it
    from making import as_rank  # noqa: PLC0415
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.tensor import DTensor, Shard  # noqa: PLC0415

    directory.mkdir()
    shape = torch.Size((2 * ranks, 8))
    # Numbers below 256 take one byte in a pickle, others two.
    for model, alike in ((1, range(min(256, ranks))), (ranks - 1, range(256, ranks))):
        if not alike:
            continue
        path = directory / "template"
        with as_rank(model, ranks):
            mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
            state = {
                f"model.layers.{n // 100}.mlp.experts.{n % 100}.up_proj.weight": DTensor.from_local(
                    torch.zeros(2, 8), mesh, [Shard(0)], run_check=False, shape=shape, stride=(8, 1)
                )
                for n in range(tensors)
            }
            torch.save(state, path)
        data, numbers, checksum = _places(path, model)
        for rank in alike:
            for at, width in numbers:
                data[at : at + width] = rank.to_bytes(width, "little")
            # No two ranks' files may have the same checksums: that is how one that was copied over another is found.
            data[checksum : checksum + 4] = rank.to_bytes(4, "little")
            (directory / rank_file("model", ranks, rank)).write_bytes(data)
        path.unlink()


def _places(path: Path, rank: int) -> tuple[bytearray, list[tuple[int, int]], int]:
    """A file, where in it the rank's number stands (byte, width), and where the CRC-32 of the first tensor does."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read(f"{path.name}/data.pkl")
    start = data.index(pickled)
    widths = {"BININT1": 1, "BININT2": 2}
    found, key = [], None
    for opcode, value, position in pickletools.genops(pickled):
        if opcode.name == "BINUNICODE":
            key = value
        elif opcode.name in widths and value == rank and key in ("_rank", "_coordinate_on_dim"):
            found.append((start + position + 1, widths[opcode.name]))
    assert len(found) == 2
    entry = data.rindex(f"{path.name}/data/0".encode()) - 46  # in the archive's directory, where it stands last
    return data, found, entry + 16


def files(directory: Path, tensors: int, ranks: int) -> dict[str, Any]:
    """Open real files."""
    clock = _Clock()
    index = clock.step("open", lambda: FsdpLayout().open(directory))
    assert len(index) == tensors and index.world_size == ranks
    return clock.end()


# --- simulated headers


def _config(tensors: int) -> dict[str, Any]:
    """DeepSeek-V3's, with as many experts as make up that number of tensors."""
    dense, layers = 3, 61
    return {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": layers,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": max(1, round((tensors - 851) / (3 * (layers - dense)))),
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": dense,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "tie_word_embeddings": False,
    }


def _rows(shape: Shape, rank: int, ranks: int) -> Box:
    part = -(-shape[0] // ranks)
    start = min(part * rank, shape[0])
    return Box((start,) + (0,) * (len(shape) - 1), (min(part, shape[0] - start), *shape[1:]))


def _headers(directory: Path, shapes: Mapping[str, Shape], ranks: int) -> Iterator[tuple[Header, int]]:
    """A header a rank, and the size of its file."""
    distinct = list(dict.fromkeys(shapes.values()))
    cut = np.array([distinct.index(shape) for shape in shapes.values()], np.int64)
    names = tuple(shapes)
    for rank in range(ranks):
        boxes = [_rows(shape, rank, ranks) for shape in distinct]
        cuts = tuple(
            Cut("float32", shape, (box,) if box.volume else (), (contiguous_strides(box.sizes),) if box.volume else ())
            for shape, box in zip(distinct, boxes, strict=True)
        )
        # Each record begins at a multiple of 64, after a header of its own.
        sizes = np.array([-(-4 * box.volume // 64) * 64 + 64 for box in boxes], np.int64)[cut]
        ends = 64 * (6 * len(names) + rank % 7) + np.cumsum(sizes)
        path = directory / rank_file("model", ranks, rank)
        yield Header(path, names, cuts, cut, ends - sizes, {}, {}, {}, (), b"%d" % rank), int(ends[-1])


def first(directory: Path, tensors: int, ranks: int) -> dict[str, Any]:
    """Join headers, draw the index, keep it."""
    clock = _Clock()
    architecture = expected(_config(tensors))
    assert architecture is not None
    paths = [directory / rank_file("model", ranks, rank) for rank in range(ranks)]
    join, cpu = Join(ranks), 0.0
    for header, size in _headers(directory, architecture.tensors, ranks):
        with header.path.open("wb") as file:
            file.truncate(size)
        begun = time.process_time()
        join.add(header)
        cpu += time.process_time() - begun
    clock.found = {"tensors": len(architecture.tensors), "parts": 0, "join s": round(cpu, 2)}
    time.sleep(2.5)  # files that were changed a moment ago are not trusted
    entries = clock.step("index", join.entries)
    clock.found["parts"] = sum(len(entry.chunks) for entry in entries.values())
    cache = IndexCache(paths)
    clock.step("keep", lambda: cache.write(entries, {}))
    kept = next((directory / "cache" / "milepost" / "index").iterdir())
    clock.found["kept MiB"] = round(kept.stat().st_size / 2**20)
    return clock.end()


def again(directory: Path, tensors: int, ranks: int) -> dict[str, Any]:
    """Open the kept index, map, plan."""
    clock = _Clock()
    config = _config(tensors)
    cache = IndexCache([directory / rank_file("model", ranks, rank) for rank in range(ranks)])
    kept = clock.step("open", cache.read)
    index = TensorIndex(kept.entries, "fsdp", world_size=ranks)
    mapped = clock.step("map", lambda: to_huggingface(index, config)).index
    clock.step("plan of a rank", lambda: sum(1 for _ in plan(mapped, _owned(mapped), WINDOW)))
    found = clock.end()  # memory of what the target names; windows of a merge come and go
    parts = clock.step("plan of a part of a merge", lambda: sum(1 for _ in plan(mapped, _some(mapped), WINDOW)))
    every = sum(len(entry.chunks) for entry in mapped.values())
    found["plan of a merge, reckoned s"] = round(found.pop("plan of a part of a merge s") * every / parts, 1)
    found.pop("plan of a part of a merge wall s")
    return found


def _owned(index: TensorIndex) -> Iterator[tuple[str, Box]]:
    """What a rank in the middle of another world size holds."""
    for name, entry in index.items():
        box = _rows(entry.shape, OTHER_WORLD // 2, OTHER_WORLD)
        if box.volume:
            yield name, box


def _some(index: TensorIndex) -> Iterator[tuple[str, Box]]:
    names = list(index)
    for name in names[:: max(1, len(names) // MERGED)]:
        entry: TensorEntry = index[name]
        yield name, Box.whole(entry.shape)


PARTS: Mapping[str, Callable[[Path, int, int], dict[str, Any]]] = {"files": files, "first": first, "again": again}

if __name__ == "__main__":
    main()
