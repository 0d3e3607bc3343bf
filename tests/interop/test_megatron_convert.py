"""A converted model in megatron-core's hands: its own loader, its logits; and Hugging Face weights in a Megatron model.

The models are those of the reading tests; the oracle of every weight is `megatron_models`, that of logits transformers.
One launch of four ranks for all of it.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import megatron_checkpoints as writer
import megatron_converted as reader
from ranks import run_ranks

import milepost

RANKS = range(4)
CASES = [pytest.param(n, case, id=f"{case.model}-{n}") for n, case in enumerate(reader.CASES)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    root = tmp_path_factory.mktemp("converted")
    writer.make_models(root)
    models, converted, wrong = root / "models", root / "converted", root / "wrong"
    change(models / "critic", token_classification_bias=False)
    for name, model, apart in {(case.converted, case.model, case.apart) for case in reader.CASES}:
        milepost.convert(models / model, converted / name, max_shard_size="20kB", separate_layers=apart)
    for number, (model, changes, _) in enumerate(reader.WRONG):
        shutil.copytree(models / model, wrong / str(number))
        change(wrong / str(number), **changes)
    return run_ranks(reader.load_all, len(RANKS), str(models), str(converted), str(wrong))


def change(model: Path, **values: Any) -> None:
    """Change a model's config.json."""
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(("number", "case"), [case for case in CASES if not case.values[1].source])
def test_megatrons_own_loader_reads_every_bit(found: list[dict[str, Any]], number: int, case: reader.Case) -> None:
    for rank in RANKS:
        mine = found[rank]["cases"][number]
        assert mine["megatron"] == [] and not mine["padded"], rank
    logits = [mine for rank in RANKS if (mine := found[rank]["cases"][number]["logits"]) is not None]
    assert bool(logits) == case.logits
    assert all(difference < 1e-5 for difference in logits)


@pytest.mark.parametrize("method", ["sharded", "broadcast"])
@pytest.mark.parametrize(("number", "case"), CASES)
def test_pretrained_weights_are_loaded_bitwise(
    found: list[dict[str, Any]], number: int, case: reader.Case, method: str
) -> None:
    """By both methods the same: what the oracle filled in. Under "broadcast" the other ranks had a path to nowhere. A
    new critic keeps the head that it was made with."""
    for rank in RANKS:
        differing, report = found[rank]["cases"][number][method]
        assert differing == [] and report.method == method
        assert report.fresh == (("score.weight",) if case.source else ())


@pytest.mark.parametrize(("number", "case"), CASES)
def test_a_rank_moves_what_it_holds_and_no_more(found: list[dict[str, Any]], number: int, case: reader.Case) -> None:
    """Sharded: its own parameters, the padding of the vocabulary aside, and nothing by the network. Broadcast: the
    files are read once, by rank 0."""
    hidden = writer.MODELS[case.model][1].get("hidden_size", writer.SIZES["hidden_size"])
    padding = 2 * hidden * (writer.PADDED - writer.SIZES["vocab_size"])  # elements, of embedding and output layer
    elements = 4 * len(RANKS) if case.model == "deepseek_v3" else 0  # routing biases, which are no parameters
    head = 16 if case.source else 0  # it was not loaded
    for rank in RANKS:
        mine = found[rank]["cases"][number]
        (_, sharded), (_, broadcast) = mine["sharded"], mine["broadcast"]
        held = mine["nbytes"] * (2 if case.half else 1)  # in the type of the files
        assert held - 4 * (padding + head) <= sharded.read <= held + 4 * elements
        assert sharded.received == 0
        assert (broadcast.read > 0) == (rank == 0)
        assert broadcast.received == (0 if rank == 0 else sharded.read // (2 if case.half else 1))
    unread = found[0]["sizes"]["llama"] - found[0]["cases"][number]["broadcast"][1].read if case.source else 0
    assert unread in (0, 33 * 16 * 4)  # the policy's output layer
    if not case.source:
        assert found[0]["cases"][number]["broadcast"][1].read == found[0]["sizes"][case.model]


@pytest.mark.parametrize("number", range(len(reader.WRONG)))
def test_a_config_of_another_model_is_refused_before_anything_is_read(found: list[dict[str, Any]], number: int) -> None:
    """Case 74: on every rank, by both methods; what has the same shapes but means something else too."""
    for rank in RANKS:
        sharded, untouched, broadcast, still = found[rank]["refused"][number]
        assert reader.WRONG[number][2] in sharded and reader.WRONG[number][2] in broadcast
        assert untouched == still == "nothing was read"


@pytest.mark.parametrize("number", range(len(reader.BROKEN)))
def test_when_one_rank_fails_in_a_broadcast_all_raise_its_error(found: list[dict[str, Any]], number: int) -> None:
    """Wherever in the stream: none waits for what does not come any more."""
    said = found[0]["broken"][number]
    assert all(found[rank]["broken"][number] == said for rank in RANKS)
    truncated, failed = said[: len(reader.BROKEN_AFTER)], said[len(reader.BROKEN_AFTER) :]
    for message in truncated:
        assert message.startswith("DamagedError: rank 0: ") and "model.safetensors: ends at byte" in message
    ranks = [rank for rank in reader.BROKEN_RANKS for _ in ("places", "make_room")]
    for rank, message in zip(ranks, failed, strict=True):
        assert message == f"MilepostError: rank {rank}: MemoryError: no room for this window"


def test_ranks_that_do_not_make_the_same_call_are_told(found: list[dict[str, Any]]) -> None:
    """A call under `if rank == 0`; a method that one rank misspells; another method on one rank."""
    alone, *absent = (found[rank]["apart"] for rank in RANKS)
    assert "CallError: load_pretrained: ranks 1-3 of 4 did not come within" in alone[0], alone
    assert "do not put it under `if rank == 0`" in alone[0]
    assert all(said[1:] == alone[1:] and said[0] == "was not there" for said in absent)
    assert alone[1] == "CallError: rank 2: method='brodcast': choose from 'sharded', 'broadcast'"
    assert alone[2] == "CallError: the ranks disagree about method: rank 0 'sharded', rank 2 'broadcast'"


def test_when_one_ranks_disk_is_full_all_ranks_of_a_dist_save_say_so(found: list[dict[str, Any]]) -> None:
    """Where Megatron's own saver lets the others wait: what rank 0 alone writes."""
    for name, failing, words in (
        ("weights", 3, r"weights/__3_0.distcp: File too large"),
        ("common", 0, r"common/common.pt: a file of that name is there already"),
        ("table", 0, r"\.metadata: No space left on device"),
    ):
        for rank in RANKS:
            other = "" if rank == failing else f"rank {failing} could not write its part: "
            assert re.fullmatch(rf"WriteError: {other}\S*{words}.*", found[rank]["full"][name]), found[rank]["full"]
    assert [found[rank]["full"]["good"] for rank in RANKS] == ["done"] * 4
