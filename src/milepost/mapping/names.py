"""Edits that make the names of an index Hugging Face's, and the check that they are.

In this order: `strip_wrappers`, `titan.from_native`, `megatron.from_megatron`, `to_saved_form`, `drop_ignored`,
`untie`, `check`; `to_huggingface` does them all.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from milepost.edits import narrow, rename, select
from milepost.errors import IncompleteError, MismatchError
from milepost.index import TensorEntry, TensorIndex
from milepost.mapping.architectures import Architecture, Config, expected
from milepost.mapping.dialects import speaks_megatron, speaks_titan
from milepost.mapping.equality import require_equal
from milepost.mapping.heads import infer_head
from milepost.mapping.moments import joined, renamed, split
from milepost.mapping.nested import TEXT, layers_of, says_tied, tower_of, towers
from milepost.mapping.rules import TOKEN_CLASSIFICATION

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_ONE_TENSOR = "config.json says that they are one tensor (tie_word_embeddings)"
_UNTIED = "\nIf the model was trained untied, set tie_word_embeddings to false in config.json."
ALLOW_MISSING = "; --allow-missing takes what may be absent"
_NAMED = 10
_DIGITS = re.compile(r"(\d+)")
_NUMBER = re.compile(r"\.\d+(?=\.)")


@dataclass(frozen=True)
class Mapped:
    """A checkpoint under Hugging Face's names.

    index:         its weights (and moments, where it has any)
    config:        config.json made true to it
    architecture:  what it was checked against; None: the family is unknown and the check was weak
    tied:          name that stands for another tensor -> that tensor's name
    notes:         what was done that a user should hear of, one line each
    """

    index: TensorIndex
    config: Mapping[str, Any]
    architecture: Architecture | None
    tied: Mapping[str, str]
    notes: tuple[str, ...]


def to_huggingface(
    index: TensorIndex,
    config: Config,
    *,
    is_value_model: bool = False,
    value_head: str = TOKEN_CLASSIFICATION,
    allow_missing: Sequence[str] = (),
    complete: bool = True,
) -> Mapped:
    """All edits of this module, one after the other, and the check at the end.

    index:           as a layout opened it
    config:          the parsed config.json beside it
    is_value_model:  insist on a value head, whatever class config.json names
    value_head:      what a value model under its policy's config is: "token-classification", "sequence-classification"
    allow_missing:   patterns (fnmatch) of names that may be absent
    complete:        make the check; without it an incomplete checkpoint is mapped as far as it goes

    Raises MismatchError or IncompleteError where the checkpoint does not hold exactly what its config asks for.
    """
    index = strip_wrappers(index)
    notes: list[str] = []
    if speaks_titan(index):
        from milepost.mapping.titan import from_native  # noqa: PLC0415  its tables take long to build

        index, said = from_native(index, config)
        notes += said
    if speaks_megatron(index):
        from milepost.mapping.megatron import from_megatron  # noqa: PLC0415  the same

        index, heard = from_megatron(index, config, is_value_model=is_value_model)
        notes += heard
    true_config = infer_head(index, config, is_value_model, value_head)
    if true_config != config:
        notes.append(f"a value model: config.json now says {true_config['architectures'][0]}")
    architecture = expected(true_config)
    if architecture is not None:
        saved = to_saved_form(index, architecture)
        index, ignored = drop_ignored(saved, architecture)
        if ignored:
            notes.append(_left_out(ignored, saved, true_config))
    tied = ties(index, true_config, architecture)
    index = untie(index, tied)
    if architecture is None and complete:
        notes.append(check_layers(index, true_config))
    elif architecture is not None and complete:
        check(index, architecture, allow_missing)
    return Mapped(index, true_config, architecture, tied, tuple(notes))


def strip_wrappers(index: TensorIndex) -> TensorIndex:
    """Names without what wrappers put into them: `_orig_mod` (torch.compile), `_fsdp_wrapped_module` (FSDP1) and
    `_checkpoint_wrapped_module` (activation checkpointing) wherever they stand, `module` (DDP, DeepSpeed) in front."""

    def strip(weight: str) -> str:
        parts = [part for part in weight.split(".") if part not in _WRAPPERS]
        while len(parts) > 1 and parts[0] == "module":
            del parts[0]
        return ".".join(parts)

    return rename(index, lambda name: renamed(name, strip))


def to_saved_form(index: TensorIndex, architecture: Architecture) -> TensorIndex:
    """What transformers 5 holds otherwise in memory than in its files, in the form of the files: stacked experts cut
    apart, tensors renamed. What already has the form of the files stays as it is."""
    index = rename(index, lambda name: renamed(name, lambda weight: architecture.renamed.get(weight, weight)))
    entries: dict[str, TensorEntry] = {}
    for name, entry in index.items():
        weight, moment = split(name)
        experts = architecture.fused.get(weight)
        pieces = {name: entry} if experts is None else _unfuse(name, entry, experts, moment)
        clash = next((piece for piece in pieces if piece in entries), None)
        if clash is not None:
            raise MismatchError(f"{clash} is there twice: on its own and as a part of a stack of experts")
        entries.update(pieces)
    return index.with_entries(entries)


def _unfuse(
    name: str, entry: TensorEntry, experts: tuple[tuple[str, ...], ...], moment: str | None
) -> dict[str, TensorEntry]:
    names = [[joined(part, moment) for part in parts] for parts in experts]
    if not entry.shape:  # the step count of an optimizer: one for all experts
        return {part: entry for parts in names for part in parts}
    rows, rest = divmod(entry.shape[1], len(experts[0])) if len(entry.shape) == 3 else (0, 1)
    if rest or entry.shape[0] != len(experts):
        raise MismatchError(
            f"{name} has shape {list(entry.shape)}, but config.json asks for {len(experts)} experts "
            f"of {len(experts[0])} equal parts each"
        )
    return {
        part: narrow(select(entry, 0, expert), 0, place * rows, rows)
        for expert, parts in enumerate(names)
        for place, part in enumerate(parts)
    }


def drop_ignored(index: TensorIndex, architecture: Architecture) -> tuple[TensorIndex, list[str]]:
    """The index without the tensors that old files hold and the architecture does not need, and the names of these."""
    ignored = [name for name in index if _matches(name, architecture.ignored)]
    dropped = set(ignored)
    return index.with_entries({name: entry for name, entry in index.items() if name not in dropped}), ignored


def _left_out(ignored: Sequence[str], index: TensorIndex, config: Config) -> str:
    further = f"model.layers.{config.get('num_hidden_layers')}."
    reason = ""
    if any(split(name)[0].startswith(further) for name in ignored):
        reason = f" ({further}* is multi-token prediction (MTP), which transformers does not build)"
    return f"left out, as the model does not need them: {_listed(_collapsed(ignored, index))}{reason}"


def ties(index: TensorIndex, config: Config, architecture: Architecture | None) -> Mapping[str, str]:
    """Which names stand for another tensor: alias -> original.

    A known architecture says so itself. For others `tie_word_embeddings` decides where config.json has it, and the
    aliases that the files show where it has not.
    """
    if architecture is not None:
        return architecture.tied
    tied = says_tied(config)
    if tied is False:
        return {}
    aliases = {}
    for name, entry in index.weights().items():
        if entry.alias_of is not None:
            # models keep the embedding and derive the output layer, whichever of the two the files name first
            is_output = _is_output(entry.alias_of)
            aliases[entry.alias_of if is_output else name] = name if is_output else entry.alias_of
    outputs = [name for name in index.weights() if _is_output(name)]
    if tied and len(outputs) == 1 and outputs[0] not in aliases:
        # models of several parts may have other embeddings of tokens; the output layer's has its shape
        shape = index[outputs[0]].shape
        embeddings = [n for n, e in index.weights().items() if n.endswith("embed_tokens.weight") and e.shape == shape]
        if len(embeddings) == 1:
            aliases[outputs[0]] = embeddings[0]
    return aliases


def _is_output(name: str) -> bool:
    return name == "lm_head.weight" or name.endswith(".lm_head.weight")


def untie(index: TensorIndex, tied: Mapping[str, str]) -> TensorIndex:
    """One copy, under the original's name, of what `tied` (alias -> original) says is one tensor; every other name with
    bytes of its own. A tensor that only its alias names is renamed; moments go with their weights.

    Raises MismatchError where two tensors that should be one differ.
    """
    entries: dict[str, TensorEntry] = {}
    aliases = [name for name in index if split(name)[0] in tied]
    for name in [*(name for name in index if name not in set(aliases)), *aliases]:
        entry = index[name]
        original = renamed(name, lambda weight: tied.get(weight, weight))
        if original in entries:
            kept = index.get(original)
            if entry.alias_of != original and (kept is None or kept.alias_of != name):
                require_equal(name, entry, original, entries[original], _ONE_TENSOR, _UNTIED)
        else:
            entries[original] = replace(entry, alias_of=None)
    return index.with_entries(entries)


def check(index: TensorIndex, architecture: Architecture, allow_missing: Sequence[str] = ()) -> None:
    """Raise unless the weights of the index are exactly the architecture's tensors, in its shapes.

    Everything that is wrong is said at once. A layer or an expert of which nothing is there is named as one, by a
    pattern that `allow_missing` would take.
    """
    weights = index.weights()
    tensors = architecture.tensors
    missing = [name for name in tensors if name not in weights and not _matches(name, allow_missing)]
    unknown = [name for name in weights if name not in tensors]
    reshaped = [
        f"{name} is {list(weights[name].shape)}, not {list(shape)}"
        for name, shape in tensors.items()
        if name in weights and weights[name].shape != shape
    ]
    faults = [
        f"{label} {_listed(names)}"
        for label, names in (
            ("missing:", _collapsed(missing, tensors)),
            ("not of this model:", _collapsed(unknown, weights)),
            ("of another shape:", reshaped),
        )
        if names
    ]
    if faults:
        error = IncompleteError if not (unknown or reshaped) else MismatchError
        raise error(
            f"not the tensors of {architecture.class_name} as config.json describes it; {'; '.join(faults)}.\n"
            f"The checkpoint is incomplete or config.json is another model's{ALLOW_MISSING}."
        )


def check_layers(index: TensorIndex, config: Config) -> str:
    """The weaker check of a family that we do not know: if names are numbered by layer, are all layers there?

    Returns the note that says how weak it was.
    """
    kind = f"model type {config.get('model_type', '(none)')} with {(config.get('architectures') or ['no class'])[0]}"
    checked = []
    for key, part in ((None, {**(config.get(TEXT) or {}), **config}), *towers(config).items()):
        count = layers_of(part)
        numbers: dict[str, set[int]] = {}
        for name in index.weights():
            match = re.match(r"(.+?)\.(\d+)\.", name)
            if match and tower_of(name, config) == key:
                numbers.setdefault(match[1], set()).add(int(match[2]))
        if not count or not numbers:
            continue
        lacking = {prefix: sorted(set(range(count)) - found) for prefix, found in numbers.items()}
        prefix = min(lacking, key=lambda prefix: len(lacking[prefix]))
        if lacking[prefix]:
            raise IncompleteError(
                f"config.json asks for {count} layers{f' in {key}' if key else ''}; missing: "
                f"{_listed([f'{prefix}.{number}.*' for number in lacking[prefix]])}.\n"
                "The checkpoint is incomplete or config.json is another model's."
            )
        checked.append(f"{count} layers" + (f" of {key.removesuffix('_config')}" if key else ""))
    if not checked:
        return f"{kind} is unknown to milepost: whether all tensors are there was not checked"
    return f"{kind} is unknown to milepost: only the presence of its {' and '.join(checked)} was checked"


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _prefixes(name: str) -> list[str]:
    """`model.layers.3` and `model.layers.3.mlp.experts.5` of a tensor of an expert: the shortest first."""
    return [name[: match.end()] for match in _NUMBER.finditer(name)]


def _collapsed(names: Sequence[str], all_names: Iterable[str]) -> list[str]:
    """Names in order, where a layer or an expert as a whole is among them as one: `model.layers.3.* (9 tensors)`."""
    names = sorted(names, key=lambda name: [int(part) if part.isdigit() else part for part in _DIGITS.split(name)])
    among = Counter(prefix for name in names for prefix in _prefixes(name))
    whole = Counter(prefix for name in all_names for prefix in _prefixes(name))
    seen: dict[str, None] = {}
    for name in names:
        prefix = next((p for p in _prefixes(name) if among[p] == whole[p] and among[p] > 1), None)
        seen[name if prefix is None else f"{prefix}.* ({among[prefix]} tensors)"] = None
    return list(seen)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
