"""A policy and a value model in one state dict, and how to take one of them out.

policy.* value_model.*        PPO wrappers that hold two models; some list the value model's backbone once more, as
                              `critic_backbone.*`, because they keep a second reference to it
pretrained_model.* v_head.*   a causal language model with a value head beside it; written with and without the
                              first prefix
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from milepost.errors import CallError, MismatchError
from milepost.index import TensorEntry, TensorIndex
from milepost.mapping.equality import require_equal

POLICY = "policy"
VALUE = "value"
PARTS = (POLICY, VALUE)
"""What `--role` may pick from one state dict."""

VALUE_MODEL = "value_model"
BACKBONE = "critic_backbone"
PRETRAINED = "pretrained_model"
HEAD = "v_head"
_ONE_BACKBONE = "they should be two names of one backbone"


@dataclass(frozen=True)
class Part:
    """One model of a state dict, under its own names.

    index:   its tensors, without the wrapper's prefix
    beside:  tensors that belong to it but to no architecture of transformers: the value head `v_head.*`
    notes:   what was left out, one line each
    """

    index: TensorIndex
    beside: Mapping[str, TensorEntry] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def has_adapter(index: TensorIndex) -> bool:
    """Whether a state dict holds an adapter of PEFT's (`milepost.mapping.lora`)."""
    return any(".lora_" in name or ".modules_to_save." in name for name in index)


def take_part(index: TensorIndex, part: str | None, base: str = "model") -> Part:
    """The policy or the value model of a state dict that holds both; the whole of one that holds one model.

    index:  weights, with the wrappers of `names.strip_wrappers` stripped
    part:   "policy" or "value"; None where the user chose none
    base:   what the value model calls its backbone

    Raises CallError where both are there and none was chosen, or where the chosen one is not there.
    """
    first = _first_names(index)
    if _is_pair(first):
        forms, take = f"{POLICY}.* and {VALUE_MODEL}.*", _of_two_models
    elif _has_head(first):
        forms, take = f"a model and {HEAD}.*", _of_value_head
    elif part is None:
        return Part(index)
    else:
        raise CallError(f"--role {part}: the checkpoint holds one model, not policy and value in one; leave it out")
    if part is None:
        raise CallError(
            f"the checkpoint holds a policy and a value model in one state dict ({forms}); "
            "choose with --role policy or --role value"
        )
    if part not in PARTS:
        raise CallError(f"--role {part}: choose from {', '.join(PARTS)}")
    return take(index, part, base)


def holds_parts(index: TensorIndex) -> bool:
    """Whether `take_part` must be told which of two models is meant."""
    first = _first_names(index)
    return _is_pair(first) or _has_head(first)


def _first_names(index: TensorIndex) -> set[str]:
    return {name.partition(".")[0] for name in index}


def _is_pair(first: set[str]) -> bool:
    return POLICY in first and first <= {POLICY, VALUE_MODEL, BACKBONE}


def _has_head(first: set[str]) -> bool:
    return HEAD in first or first == {PRETRAINED}


def regroup(index: TensorIndex, new_name: Callable[[str], str | None]) -> dict[str, TensorEntry]:
    """The entries to which `new_name` gives a name, under it. An alias of a tensor that is not among them becomes an
    alias of the first that shares its bytes, or a tensor of its own."""
    entries: dict[str, TensorEntry] = {}
    heirs: dict[str, str] = {}
    names = {name: new for name in index if (new := new_name(name)) is not None}
    for name, new in names.items():
        if new in entries:
            clash = next(other for other, taken in names.items() if taken == new)
            raise MismatchError(f"{clash} and {name} would both become {new}")
        entry = index[name]
        original = entry.alias_of
        if original is None:
            entries[new] = entry
        elif original in names:
            entries[new] = replace(entry, alias_of=names[original])
        else:
            heir = heirs.setdefault(original, new)
            entries[new] = replace(entry, alias_of=None if heir == new else heir)
    return entries


def _of_two_models(index: TensorIndex, part: str, base: str) -> Part:
    prefix = f"{POLICY if part == POLICY else VALUE_MODEL}."
    twice = {f"{VALUE_MODEL}.{base}.{name.removeprefix(f'{BACKBONE}.')}": name for name in index if _in(name, BACKBONE)}
    copies = {name for value_name, name in twice.items() if value_name in index}
    # Writers that keep one of two names for shared bytes may keep the second reference's: then it is the only one.
    only_there = {name: value_name for value_name, name in twice.items() if name not in copies}

    def own_name(name: str) -> str | None:
        name = only_there.get(name, name)
        return name.removeprefix(prefix) if name.startswith(prefix) else None

    own = regroup(index, own_name)
    if not own:
        raise CallError(f"--role {part}: the checkpoint holds no {prefix}*")
    if part == VALUE:
        for value_name, name in twice.items():
            if name in copies:
                require_equal(name, index[name], value_name, index[value_name], _ONE_BACKBONE)
    notes = [f"took {prefix}* of a state dict that holds policy and value model: {len(own)} of {len(index)} tensors"]
    if copies and part == VALUE:
        notes.append(f"left out, as they name the value model's backbone once more: {len(copies)} {BACKBONE}.* tensors")
    return Part(index.with_entries(own), notes=tuple(notes))


def _of_value_head(index: TensorIndex, part: str, base: str) -> Part:
    del base
    own = regroup(index, lambda name: None if _in(name, HEAD) else name.removeprefix(f"{PRETRAINED}."))
    head = {name: replace(entry, alias_of=None) for name, entry in index.items() if _in(name, HEAD)}
    model = index.with_entries(own)
    if part == POLICY:
        return Part(model, notes=(f"left out, as the policy needs no value head: {len(head)} {HEAD}.* tensors",))
    if not head:
        raise CallError(f"--role {part}: the checkpoint holds no {HEAD}.*")
    note = (
        f"the value head stays beside the model as {HEAD}.*, which TRL's AutoModelForCausalLMWithValueHead loads; it "
        "takes a local directory only where all weights are one file (--max_shard_size)"
    )
    return Part(model, head, (note,))


def _in(name: str, first: str) -> bool:
    return name.startswith(f"{first}.")
