"""A hostile pickle is refused by name and runs nothing; a damaged one is an error; neither leaves a trace."""

from __future__ import annotations

import builtins
import contextlib
import copyreg
import os
import pickle
import pickletools
import resource
import subprocess
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from archives import number, numbers, tensor_pickle, text

from milepost.errors import DamagedError, MilepostError, RefusedError
from milepost.layouts import pickles
from milepost.layouts.opcodes import harmless
from milepost.layouts.pickles import StorageRef, TensorRef


class Call:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *args: object) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A path that no test may bring into being."""
    return tmp_path / "trap"


@pytest.fixture(autouse=True)
def _nothing_is_run_or_altered(trap: Path) -> Any:
    reference = tensor_pickle()
    known = pickles.load(reference, "known")
    yield
    assert not trap.exists()
    assert pickles.load(reference, "known") == known
    assert known == {"w": TensorRef("float32", (4,), (1,), StorageRef("float32", "0", 4), 0)}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("function", "args", "name"),
    [
        (os.system, ("touch {}",), "posix.system"),
        (subprocess.Popen, (["touch", "{}"],), r"\.Popen"),
        (builtins.eval, ("open('{}', 'w')",), "builtins.eval"),
        (builtins.exec, ("open('{}', 'w')",), "builtins.exec"),
        (builtins.open, ("{}", "w"), "open"),
        (builtins.__import__, ("antigravity",), "builtins.__import__"),
        (builtins.getattr, (os, "system"), "builtins.getattr"),
        (builtins.setattr, (pickles, "GLOBALS", None), "builtins.setattr"),
        (torch.load, ("{}",), "torch.serialization.load"),
        (pickle.loads, (b"N.",), r"pickle\.loads"),
        (copyreg._reconstructor, (object, object, None), "copyreg._reconstructor"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_call_is_refused_by_name_in_every_protocol(
    protocol: int, function: Callable[..., Any], args: tuple[Any, ...], name: str, trap: Path
) -> None:
    filled = [str(a).format(trap) if isinstance(a, str) else a for a in args]
    filled = [[str(part).format(trap) for part in a] if isinstance(a, list) else a for a in filled]
    if any(a is os or a is pickles for a in filled):
        filled = ["os", *filled[1:]]  # a module has no pickle; the name is refused before its arguments count
    data = pickle.dumps({"weights": Call(function, *filled)}, protocol)
    with pytest.raises(RefusedError, match=name) as caught:
        pickles.load(data, "hostile.pt")
    assert str(caught.value).startswith("hostile.pt: its pickle asks for ")
    assert "nothing was run" in str(caught.value)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("__builtin__", "eval"),
        ("builtins", "eval"),
        ("builtins", "getattr.__self__"),
        ("builtins", "set.__class__"),
        ("os", "system"),
        ("torch", "_utils.os.system"),
        ("torch", "Size.__new__"),
        ("torch._utils", "_rebuild_tensor_v2.__globals__"),
        ("collections", "OrderedDict.__init__.__globals__"),
        ("collections.OrderedDict", "__reduce_ex__"),
        ("torch.storage", "_load_from_bytes"),
        ("torch.jit", "load"),
        ("numpy", "load"),
        ("numpy.core.multiarray", "_reconstruct.__self__"),
        ("milepost.layouts.pickles", "load"),
        (" ", " "),
    ],
)
def test_no_name_reaches_past_the_table(module: str, name: str) -> None:
    by_line = f"\x80\x02c{module}\n{name}\n.".encode("latin1")
    from_stack = b"\x80\x04" + text(module) + text(name) + b"\x93."
    for data in (by_line, from_stack):
        with pytest.raises(RefusedError):
            pickles.load(data, "f")


SHARDED = b"ctorch.distributed._shard.sharded_tensor.api\nShardedTensor\n"


@pytest.mark.parametrize("module", [b"__builtin__", b"builtins"])
def test_one_attribute_of_one_class_can_be_asked_for(module: bytes) -> None:
    # How protocol 2 writes a nested class; protocol 4 writes its dotted name.
    called = b"\x80\x02c" + module + b"\ngetattr\n" + SHARDED + text("ProcessGroupState") + b"\x86R."
    dotted = SHARDED.removesuffix(b"\n") + b".ProcessGroupState\n"
    found = pickles.load(called, "f")
    assert found is pickles.load(b"\x80\x02" + dotted + b".", "f")
    assert found.kind == "torch.distributed._shard.sharded_tensor.api.ShardedTensor.ProcessGroupState"


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (SHARDED, text("__class__")),
        (SHARDED, text("__init__")),
        (SHARDED, text("kind")),
        (SHARDED, number(1)),
        (SHARDED + b")R", text("ProcessGroupState")),
        (b"ctorch.distributed.tensor\nDTensor\n", text("ProcessGroupState")),
        (b"ctorch._utils\n_rebuild_tensor_v2\n", text("_function")),
        (b"cbuiltins\ngetattr\n", text("_function")),
        (text("torch.distributed._shard.sharded_tensor.api.ShardedTensor"), text("ProcessGroupState")),
        (b"}", text("ProcessGroupState")),
    ],
)
def test_no_other_attribute_can_be_asked_for(owner: bytes, name: bytes) -> None:
    with pytest.raises(RefusedError, match=r"builtins\.getattr"):
        pickles.load(b"\x80\x02c__builtin__\ngetattr\n" + owner + name + b"\x86R.", "f")


def test_a_name_cut_elsewhere_is_the_same_name() -> None:
    assert (
        pickles.load(b"\x80\x04" + text("torch") + text("_utils._rebuild_tensor_v2") + b"\x93.", "f")
        is (pickles.GLOBALS["torch._utils._rebuild_tensor_v2"])
    )


def test_a_name_of_control_characters_does_not_reach_the_terminal() -> None:
    with pytest.raises(RefusedError) as caught:
        pickles.load(b"\x80\x04" + text("\x1b[2J\nos") + text("x" * 10_000) + b"\x93.", "f")
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 300


FUNCTION = b"ctorch._utils\n_rebuild_tensor_v2\n"
STORAGE = b"ctorch\nFloatStorage\n"
RECORD = b"ctorch.distributed.tensor\nDTensor\n"
GETATTR = b"cbuiltins\ngetattr\n"
TENSOR = tensor_pickle()[3 + len(text("w")) : -2]
STATES = {
    "dictionary": b"}" + text("dtype") + text("int64") + b"s",
    "slots": b"N}" + text("dtype") + text("int64") + b"s\x86",
    "list of fields": b"](" + text("int64") + numbers((9,)) + numbers((1,)) + b"N" + number(-8) + b"e",
    "one field": b"](" + text("int64") + b"e",
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
@pytest.mark.parametrize(
    "target",
    [
        FUNCTION,
        STORAGE,
        RECORD,
        SHARDED,
        TENSOR,
        b"ctorch\nfloat32\n",
        b"ccollections\nOrderedDict\n",
        b"cbuiltins\nset\n",
        GETATTR,
        GETATTR + SHARDED + text("ProcessGroupState") + b"\x86R",
    ],
    ids=[
        "function",
        "storage type",
        "record class",
        "sharded tensor",
        "tensor",
        "dtype",
        "dict",
        "set",
        "getattr",
        "nested class",
    ],
)
def test_build_alters_nothing_that_the_table_holds_or_makes(target: bytes, state: bytes) -> None:
    before = dict(pickles.GLOBALS)
    with pytest.raises((RefusedError, DamagedError)):
        pickles.load(b"\x80\x02" + target + state + b"b.", "f")
    assert dict(pickles.GLOBALS) == before
    assert pickles.GLOBALS["torch.FloatStorage"].dtype == "float32"


@pytest.mark.parametrize(
    "called",
    [TENSOR, STORAGE, b"ctorch\nfloat32\n", RECORD + b")R", b"N", b"}", number(3), text("os.system")],
    ids=["tensor", "storage type", "dtype", "record", "none", "dict", "int", "text"],
)
def test_what_was_returned_cannot_be_called(called: bytes) -> None:
    with pytest.raises(DamagedError, match="cannot be read"):
        pickles.load(b"\x80\x02" + called + b")R.", "f")


def test_extension_codes_of_this_process_are_not_looked_up() -> None:
    copyreg.add_extension("posix", "system", 0xF0)
    try:
        data = pickle.dumps(Call(os.system, "true"), 2)
        assert b"\x82\xf0" in data
        pickle.loads(b"\x80\x02\x82\xf0.")  # from now on a cache of the interpreter's answers, without asking for names
        with pytest.raises(DamagedError):
            pickles.load(data, "f")
    finally:
        copyreg.remove_extension("posix", "system", 0xF0)
        copyreg._extension_cache.clear()  # type: ignore[attr-defined]


def test_a_class_of_a_test_is_refused_whatever_it_does() -> None:
    with pytest.raises(RefusedError, match=r"test_pickles\.Harmless"):
        pickles.load(pickle.dumps(Harmless()), "f")


class Harmless:
    """A class that no checkpoint needs."""


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02]r\xff\xff\xff\xff.",  # 4 thousand million memo slots: 64 GiB
        b"\x80\x02]r\x00\x00\x00\x08.",
        b"\x80\x02]p4294967295\n.",
        b"\x80\x02]p1_000_000_000\n.",
        b"\x80\x02X\x00\x00\x00\x00]r\xff\xff\xff\xff.",
        b"\x80\x04]\x94}r\xff\xff\xff\xff.",
        b"\x80\x02\x8a\xff" + bytes(255) + b"]r\xff\xff\xff\xff.",
    ],
)
def test_a_memo_index_beyond_reason_claims_no_memory(data: bytes) -> None:
    before = _peak_mib()
    with pytest.raises(RefusedError, match="more memory"):
        pickles.load(data, "f")
    assert _peak_mib() - before < 50


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"abc.",  # BINBYTES8
        b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b"abc.",  # BINUNICODE8
        b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"abc.",  # BYTEARRAY8
        b"\x80\x02T\xff\xff\xff\x7fabc.",  # BINSTRING
        b"\x80\x02\x8b\xff\xff\xff\x7fabc.",  # LONG4
        b"\x80\x02B\xff\xff\xff\xffabc.",  # BINBYTES
    ],
)
def test_a_length_beyond_the_pickle_claims_no_memory(data: bytes) -> None:
    before = _peak_mib()
    with pytest.raises(DamagedError, match="ends before"):
        pickles.load(data, "f")
    assert _peak_mib() - before < 50


def test_the_look_ahead_reads_instructions_as_pickletools_does() -> None:
    # Every way in which Python writes a value, and every protocol: what pickletools accepts is let through, and a
    # stray byte in the place of any instruction is found where pickletools finds it.
    values = [
        None, True, 1, -300, 1 << 40, 1 << 3000, 1.5, "x" * 300, b"y" * 300, bytearray(b"z"), (), (1,), (1, 2, 3, 4),
        {"a": 1}, {1, 2}, os.getcwd, OrderedDict(a=1), "\n", [1], list(range(300)), 40, 100, 125,
        {str(i): i for i in range(300)},
    ]  # fmt: skip
    for protocol in range(6):
        data = pickle.dumps(values, protocol)
        harmless(data)
        for _, _, position in list(pickletools.genops(data))[:-1:3]:
            broken = data[:position] + b"\xff" + data[position + 1 :]
            with pytest.raises(DamagedError, match=f"byte {position} "):
                harmless(broken)
        for end in range(0, len(data), 7):
            with pytest.raises(DamagedError):
                harmless(data[:end])


def test_a_large_honest_memo_is_let_through() -> None:
    values = [float(i) for i in range(70_000)]
    data = pickle.dumps([(value,) for value in values], 2)
    assert b"r\x00\x00\x01\x00" in data  # memo slot 65536
    assert pickles.load(data, "f") == [(value,) for value in values]


@pytest.mark.parametrize(
    "pid", ["x", ("storage",), ("other", 1, "0", "cpu", 4), ("storage", "FloatStorage", "0", "c", 4)]
)
def test_a_persistent_id_of_another_form_is_damage(pid: Any) -> None:
    data = pickle.dumps(pid, 2)[:-1] + b"Q."
    with pytest.raises(DamagedError):
        pickles.load(data, "f")


@pytest.mark.parametrize(
    "arguments",
    [
        {"offset": -1},
        {"shape": (2, 2)},
        {"strides": (-1,)},
        {"shape": (-4,)},
        {"storage": "float32"},
    ],
)
def test_a_tensor_that_cannot_be_is_damage(arguments: dict[str, Any]) -> None:
    with pytest.raises(DamagedError):
        pickles.load(tensor_pickle(**arguments), "f")


@pytest.mark.parametrize("view", ["conj", "neg"])
def test_a_view_that_changes_values_is_refused(view: str, tmp_path: Path) -> None:
    # Its bytes are those of the tensor it is a view of, so reading them would give other values.
    tensor = torch.complex(torch.ones(2), torch.ones(2)).conj() if view == "conj" else torch._neg_view(torch.ones(2))
    torch.save({"w": tensor}, tmp_path / "f.pt")
    data = torch._C.PyTorchFileReader(str(tmp_path / "f.pt")).get_record("data.pkl")
    with pytest.raises(RefusedError, match="conjugate or negative view"):
        pickles.load(data, "f")


def _plain(value: Any) -> Any:
    return pickles.plain(pickles.load(pickle.dumps(value, 2), "f"), lambda ref: ref)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="<i4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(3, dtype=">u2"),
        np.array([True, False]),
        np.array(2.5, np.float16),
        np.zeros((0, 3), np.complex64),
        np.random.RandomState(1).get_state()[1],
    ],
    ids=lambda array: f"{array.dtype.str}{list(array.shape)}",
)
def test_numpy_arrays_come_back(array: Any) -> None:
    got = _plain({"a": array})["a"]
    assert got.dtype == array.dtype
    assert np.array_equal(got, array)


@pytest.mark.parametrize("scalar", [np.float64(1.5), np.int64(-3), np.bool_(True), np.float32(0.1)])
def test_numpy_scalars_come_back_as_numbers(scalar: Any) -> None:
    got = _plain([scalar])[0]
    assert type(got) in (float, int, bool)
    assert got == scalar.item()


@pytest.mark.parametrize(
    "array",
    [
        np.array([{"x": 1}], object),
        np.array(["text"]),
        np.array([b"bytes"]),
        np.zeros(2, [("a", "f4"), ("b", "O")]),
        np.array(["2020-01-01"], "datetime64[D]"),
    ],
    ids=lambda array: str(array.dtype),
)
def test_numpy_arrays_of_other_things_are_refused(array: Any) -> None:
    with pytest.raises((RefusedError, DamagedError), match="numpy"):
        _plain(array)


class _ArrayOf:
    """A numpy array whose pickle says what it likes about shape and type."""

    def __init__(self, shape: Any, letters: Any, data: Any) -> None:
        self.state = (shape, letters, data)

    def __reduce__(self) -> Any:
        shape, letters, data = self.state
        return np.ndarray((0,)).__reduce__()[0], (np.ndarray, (0,), b"b"), (1, shape, _TypeOf(letters), False, data)


class _TypeOf:
    def __init__(self, letters: Any) -> None:
        self.letters = letters

    def __reduce__(self) -> Any:
        return np.dtype, (self.letters, False, True), (3, "<", None, None, None, -1, -1, 0)


@pytest.mark.parametrize(
    ("shape", "letters", "data"),
    [
        ((1 << 40,), "f4", b"1234"),
        ((1 << 62, 1 << 62), "f4", b""),
        ((2,), "f4", b"1234"),
        ((-5,), "f4", b"1234"),
        ("4", "f4", b"1234"),
        ((1,), "f4", [1.0]),
        ((1,), "f4,,", b"1234"),  # numpy evaluates such a text as a piece of Python
        ((1,), "(1f4,", b"1234"),
        ((1,), "i4" * 10_000, b"1234"),
        ((1,), "V1000000000", b"1234"),
        ((1,), 7, b"1234"),
        ((1,), "f3", b"123"),
    ],
)
def test_a_forged_numpy_array_is_an_error(shape: Any, letters: Any, data: Any) -> None:
    with pytest.raises((RefusedError, DamagedError)):
        _plain(_ArrayOf(shape, letters, data))


def _nested(levels: int) -> bytes:
    """A tuple of twice the same tuple of twice the same tuple ...: few bytes, 2**levels leaves."""
    return b"\x80\x02}" + text("a") + b")" + b"2\x86" * levels + b"s."


def test_shared_tuples_that_unfold_without_end_are_bounded() -> None:
    started = time.monotonic()
    graph = pickles.load(_nested(60), "f")
    with pytest.raises(DamagedError, match="million nodes"):
        pickles.plain(graph, lambda ref: ref)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    "data",
    [
        # where the value would be put into a message, or be made a text
        b"\x80\x02)" + b"2\x86" * 60 + b"Q.",
        b"\x80\x02(" + text("storage") + STORAGE + b")" + b"2\x86" * 60 + text("cpu") + number(4) + b"tQ.",
        b"\x80\x02c_codecs\nencode\n(" + text("a") + b")" + b"2\x86" * 60 + b"tR.",
        b"\x80\x02cnumpy\ndtype\n()" + b"2\x86" * 60 + b"\x89\x88tR.",
        b"\x80\x02" + FUNCTION + b"()" + b"2\x86" * 60 + b"NNNNNtR.",
    ],
)
def test_shared_tuples_are_not_unfolded_on_the_way_either(data: bytes) -> None:
    started = time.monotonic()
    try:
        pickles.plain(pickles.load(data, "f"), lambda ref: ref)
    except MilepostError as error:
        assert len(str(error)) < 300
    assert time.monotonic() - started < 5


DEEP = b")" + b"\x85" * 200_000
WIDE = b")" + b"2\x86" * 60
_HASHED = {
    "key": b"}%sNs.",
    "keys": b"}(%sNu.",
    "key of an OrderedDict": b"ccollections\nOrderedDict\n)R%sNs.",
    "item of an OrderedDict": b"ccollections\nOrderedDict\n]((%sNle\x85R.",
    "member": b"cbuiltins\nset\n](%se\x85R.",
    "member of a set in protocol 4": b"\x8f(%s\x90.",
    "key that a call returns": b"}ctorch._utils\n_rebuild_parameter\n%s\x89N\x87RNs.",
    "key in a memo": b"}%sq\x000h\x00Ns.",
}


@pytest.mark.parametrize("nested", [DEEP, WIDE], ids=["deep", "wide"])
@pytest.mark.parametrize("data", _HASHED.values(), ids=_HASHED)
def test_nested_tuples_are_never_hashed(data: bytes, nested: bytes) -> None:
    """The hash of a tuple calls itself: 200,000 levels end the process, 60 of two halves take for ever."""
    started = time.monotonic()
    with pytest.raises(RefusedError, match="nested deep, as a key"):
        pickles.load(b"\x80\x04" + data.replace(b"%s", nested), "f")
    assert time.monotonic() - started < 200


@pytest.mark.parametrize("data", [b"(%sNd.", b"(K(Nd.", b"(%s\x91.", b"(\x91."])
def test_a_dictionary_or_frozen_set_made_at_once_is_refused(data: bytes) -> None:
    with pytest.raises(RefusedError, match=r"makes a (dictionary|frozen set) at once"):
        pickles.load(b"\x80\x04" + data.replace(b"%s", DEEP), "f")


@pytest.mark.parametrize(
    "data",
    [
        b"%s.",
        b"](%se.",
        b"](%sNe.",
        b"}NNs(%s%su.",
        b"%sQ.",
        b"(" + text("storage") + STORAGE + text("0") + text("cpu") + b"%stQ.",
        b"(" + text("storage") + STORAGE + b"%s" + text("cpu") + number(4) + b"tQ.",
        RECORD + b"%s\x81.",
        RECORD + b")R%sb.",
        b"ctorch\nSize\n%s\x85R.",
        FUNCTION + b"(%sNNNNNtR.",
        b"cnumpy\ndtype\n%s\x89\x88\x87R.",
        b"cnumpy._core.multiarray\nscalar\n%sN\x86R.",
        b"cnumpy._core.multiarray\n_reconstruct\n)R%sb.",
        b"c_codecs\nencode\n%s" + text("latin1") + b"\x86R.",
        b"ctorch._tensor\n_rebuild_from_type_v2\n(" + FUNCTION + RECORD + b"%s)tR.",
    ],
)
@pytest.mark.parametrize("nested", [DEEP, WIDE, b"]" * 100_000 + b"a" * 99_999], ids=["deep", "wide", "list"])
def test_a_graph_nested_deep_anywhere_is_read_or_an_error(data: bytes, nested: bytes) -> None:
    started = time.monotonic()
    with contextlib.suppress(DamagedError, RefusedError):
        pickles.plain(pickles.load(b"\x80\x02" + data.replace(b"%s", nested), "f"), lambda ref: ref)
    assert time.monotonic() - started < 200


def test_keys_that_share_one_hash_are_refused() -> None:
    same = (number(i * (2**61 - 1)) + b"N" for i in range(1, 3))
    with pytest.raises(RefusedError, match="a number of 61 bits as a key"):
        pickles.load(b"\x80\x02}(" + b"".join(same) + b"u.", "f")


@pytest.mark.parametrize("protocol", range(6))
def test_honest_keys_of_every_kind_come_back(protocol: int) -> None:
    value = {
        "a": 1, 2: "b", -(2**40): None, 2.5: (), None: {}, True: {3: {}}, b"c": [], ("x", 0, ("y", 1)): {"z": {}},
        "set": {1, ("p", 2)}, "ordered": OrderedDict([("k", OrderedDict())]),
    }  # fmt: skip
    got = pickles.plain(pickles.load(pickle.dumps(value, protocol), "f"), lambda ref: ref)
    assert got == value and type(got) is dict and type(got["set"]) is set


def test_bytes_that_look_like_instructions_are_arguments() -> None:
    """Of `}`, `(d` and the rest only instructions are replaced, never what stands in their arguments."""
    value = ["}" * 70_000, b"(d\x8f\x91}", 125, 40, 100, 143, (125, (40, 100)), 0x7D28648F, 0x648F287D00, 4.2]
    for protocol in range(2, 6):
        data = pickle.dumps(value, protocol)
        assert protocol > 3 or harmless(data) == data  # from 4 on there are frames, which are left out
        assert pickles.load(data, "f") == value
    many = [[i] for i in range(300)]  # memo indices of every byte
    assert pickles.load(pickle.dumps(many, 2), "f") == many


@pytest.mark.parametrize("protocol", range(6))
def test_dictionaries_beyond_one_frame_come_back(protocol: int) -> None:
    """Protocol 4 parts a pickle into frames of 64 KiB, whose lengths the replaced instructions would belie."""
    value = [{"number": i, "of": {"more": {}}} for i in range(10_000)]
    got = pickles.load(pickle.dumps(value, protocol), "f")
    assert got == value


def test_a_graph_nested_too_deep_is_an_error() -> None:
    graph = pickles.load(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".", "f")
    with pytest.raises(DamagedError, match="nested too deep"):
        pickles.plain(graph, lambda ref: ref)


def test_a_key_that_becomes_unhashable_is_an_error() -> None:
    graph = pickles.load(b"\x80\x02}" + RECORD + b")RNs.", "f")
    with pytest.raises(DamagedError, match="key that is no plain value"):
        pickles.plain(graph, lambda ref: ref)


def test_plain_values_come_back_as_they_were() -> None:
    value = {
        "none": None, "yes": True, "n": 1 << 70, "x": 0.1, "b": b"\x00\xff", "e": b"", "l": [1, [2]], "t": (1, ("a",)),
        "s": {1, 2}, "d": {1: {"k": ()}}, "o": OrderedDict(a=1),
    }  # fmt: skip
    got = _plain(value)
    assert got == value
    assert type(got["t"]) is tuple
    assert type(got["o"]) is dict
