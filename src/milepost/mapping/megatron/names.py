"""From Megatron's names and shapes to Hugging Face's, and back: the rules of `megatron.families`, applied to an index.

Reading goes in this order: stacks are taken apart, spellings brought to one, parts of tensor-parallel ranks joined,
and each tensor taken apart by its rule. Every name must be known to a rule; the check that all tensors are there is
made afterwards, against Hugging Face's names. Optimizer moments go the way of their weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from milepost.errors import CheckpointError, IncompleteError, MismatchError
from milepost.index import Shape, TensorEntry, TensorIndex
from milepost.layouts.megatron.parts import split_part
from milepost.mapping.architectures import Config, expected
from milepost.mapping.dialects import MEGATRON, speaks_megatron
from milepost.mapping.families import FAMILIES
from milepost.mapping.masters import MASTER
from milepost.mapping.megatron.arguments import check_arguments
from milepost.mapping.megatron.families import OUTPUT, RULES, VALUE_HEAD
from milepost.mapping.megatron.parts import join
from milepost.mapping.megatron.rules import Padded, Rule
from milepost.mapping.megatron.spelling import canonical
from milepost.mapping.megatron.stacks import unstacked
from milepost.mapping.moments import joined, split
from milepost.mapping.rules import Settings

_LAYER = re.compile(r"((?:decoder|model)\.layers\.)(\d+)(?=\.)")
_EXPERT = re.compile(r"(\.(?:local_experts|experts)\.)(\d+)(?=\.)")
_NAMED = 8


@dataclass(frozen=True, slots=True)
class Model:
    """What the rules ask of a config.

    kind:      its `model_type`
    settings:  its config with defaults filled in
    rules:     pattern of a Megatron name -> rule
    theirs:    pattern of a Hugging Face name -> rule
    shapes:    name in Hugging Face's files -> shape
    experts:   how many a layer has; 0 where it has none
    """

    kind: str
    settings: Settings
    rules: Mapping[str, Rule]
    theirs: Mapping[str, Rule]
    shapes: Mapping[str, Shape]
    experts: int

    @property
    def layers(self) -> int:
        """How many there are."""
        return int(self.settings["num_hidden_layers"])

    def extent(self, rule: Rule, layer: int | None, expert: int | None) -> int | None:
        """What the whole tensor of a rule has along the dimension that is cut; None where no shape tells it."""
        if rule.cut.dim is None:
            return None
        # layers after the last one predict further tokens, and are like it
        layer = None if layer is None else min(layer, self.layers - 1)
        shapes = [self.shapes.get(name.format(layer=layer, expert=expert)) for name in rule.huggingface]
        known = [shape[rule.cut.dim] for shape in shapes if shape is not None]
        if len(known) < len(shapes):
            return None
        return sum(known) if rule.cut.dim == 0 else known[0]


def model_of(config: Config) -> Model:
    """The rules for a config. MismatchError where the family has none."""
    kind = str(config.get("model_type", "(none)"))
    rules = RULES.get(kind)
    if rules is None:
        raise MismatchError(
            f"the tensors have Megatron's names, which milepost knows for {', '.join(RULES)}; config.json says {kind}. "
            "Give the trained model's directory with --hf_model_path"
        )
    family = FAMILIES[kind]
    settings = family.settings(config)
    architecture = expected({key: value for key, value in config.items() if key != "architectures"})
    assert architecture is not None
    return Model(
        kind=kind,
        settings=settings,
        rules={rule.name: rule for rule in rules},
        theirs={name: rule for rule in (*rules, *VALUE_HEAD.values()) for name in rule.huggingface},
        shapes=architecture.tensors,
        experts=int(settings[family.experts]) if family.experts else 0,
    )


def remarks(index: TensorIndex) -> tuple[str, ...]:
    """What a user should hear of an index as a layout opened it: what was left out, which of two copies is taken."""
    if index.layout != MEGATRON:
        return ()
    lines = [f"left out: {line}" for line in (*index.skipped, *index.unread)]
    masters = {entry.dtype for name, entry in index.items() if split(name)[1] == MASTER}
    own = {entry.dtype for entry in index.weights().values()}
    if masters and own and masters != own:
        lines.append(
            f"took the model's own weights ({', '.join(sorted(own))}); the optimizer's copies of them "
            f"({', '.join(sorted(masters))}) stay where they are"
        )
    return tuple(lines)


def from_megatron(index: TensorIndex, config: Config, *, is_value_model: bool = False) -> tuple[TensorIndex, list[str]]:
    """The index under Hugging Face's names, and what a user should hear of; an index of other names as it is.

    Raises MismatchError for a name that no rule knows, for sizes that the config does not give, and for copies that
    differ; IncompleteError where the checkpoint holds no weights, or parts of a tensor are missing.
    """
    if not speaks_megatron(index):
        return index, []
    groups: dict[str | None, dict[str, TensorEntry]] = {}
    for name, entry in index.items():
        weight, moment = split(name)
        groups.setdefault(moment, {})[weight] = entry
    if None not in groups:
        raise IncompleteError(
            "the checkpoint holds no weights, optimizer state at most. Trainers that save so keep the weights as a "
            "Hugging Face model in huggingface/ beside it: that directory needs no merge"
        )
    model = model_of(config)
    heads = VALUE_HEAD if _has_value_head(groups[None], model, is_value_model) else {}
    notes = [f"took Megatron's names of {model.kind} as Hugging Face's"]
    notes += check_arguments(index, model.kind, model.settings)
    entries: dict[str, TensorEntry] = {}
    for moment, group in groups.items():
        whole = _whole(group, model, heads)
        for name, (rule, entry) in whole.items():
            _, layer, expert = pattern_of(name)
            with _naming(joined(name, moment)):
                # the count of an optimizer's steps is one number for all that a tensor holds
                parts = rule.form.apart(entry, model.settings) if entry.shape else (entry,) * len(rule.huggingface)
            for theirs, part in zip(rule.huggingface, parts, strict=True):
                entries[joined(theirs.format(layer=layer, expert=expert), moment)] = part
            if moment is None and parts[0].shape != entry.shape and isinstance(rule.form, Padded):
                notes.append(f"cut the padding of {name}: {entry.shape[0]} rows to {parts[0].shape[0]}")
    return index.with_entries(entries), notes


def to_megatron(index: TensorIndex, config: Config) -> TensorIndex:
    """The inverse: an index of Hugging Face's names under Megatron's, whole tensors in the spelling of local layers.

    Raises MismatchError for a name that no rule knows, IncompleteError where parts of a tensor are missing.
    """
    model = model_of(config)
    held: dict[tuple[str, str | None], dict[str, TensorEntry]] = {}
    rules: dict[str, Rule] = {}
    unknown = []
    for name, entry in index.items():
        weight, moment = split(name)
        pattern, layer, expert = pattern_of(weight)
        rule = model.theirs.get(pattern)
        if rule is None:
            unknown.append(name)
            continue
        ours = rule.name.format(layer=layer, expert=expert)
        rules[ours] = rule
        held.setdefault((ours, moment), {})[weight] = entry
    _refuse(unknown, model, "Megatron's tensors")
    entries: dict[str, TensorEntry] = {}
    for (name, moment), parts in held.items():
        _, layer, expert = pattern_of(name)
        theirs = [part.format(layer=layer, expert=expert) for part in rules[name].huggingface]
        missing = [part for part in theirs if part not in parts]
        if missing:
            raise IncompleteError(f"{joined(missing[0], moment)} is missing, which is a part of {name}")
        with _naming(joined(name, moment)):
            held_by = [parts[part] for part in theirs]
            whole = rules[name].form.together(held_by, model.settings) if held_by[0].shape else held_by[0]
        entries[joined(name, moment)] = whole
    return index.with_entries(entries)


def _whole(
    group: Mapping[str, TensorEntry], model: Model, heads: Mapping[str, Rule]
) -> dict[str, tuple[Rule, TensorEntry]]:
    """Canonical name -> its rule and the whole tensor, of weights or of one moment. `heads`: rules that go before the
    model's."""
    parts: dict[str, dict[int, TensorEntry]] = {}
    for name, entry in unstacked(group, model.layers, model.experts).items():
        bare, tp = split_part(name)
        held = parts.setdefault(canonical(bare, model.layers), {})
        if (tp or 0) in held and not _same_bytes(held[tp or 0], entry):
            raise MismatchError(f"{name} is there twice, under two of Megatron's spellings")
        held[tp or 0] = entry
    ranks = 1 + max((rank for held in parts.values() for rank in held), default=0)
    whole: dict[str, tuple[Rule, TensorEntry]] = {}
    unknown = []
    for name, held in parts.items():
        pattern, layer, expert = pattern_of(name)
        rule = heads.get(pattern) or model.rules.get(pattern)
        if rule is None:
            unknown.append(name)
        else:
            whole[name] = rule, join(name, rule, held, ranks, model.extent(rule, layer, expert))
    _refuse(unknown, model, "Hugging Face's")
    return whole


def _same_bytes(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether two entries are two names of the same bytes, as a converted checkpoint has them for norms."""
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and list(one.chunks) == list(other.chunks)


def _has_value_head(weights: Mapping[str, TensorEntry], model: Model, is_value_model: bool) -> bool:
    """Whether the output layer is a value model's: it has fewer rows than there are words, one or as many as labels."""
    rows = [entry.shape[0] for name, entry in weights.items() if split_part(name)[0] == OUTPUT.name and entry.shape]
    few = 0 < sum(rows) < model.settings["vocab_size"]
    return few and (is_value_model or set(rows) <= {1, model.settings["num_labels"]})


def pattern_of(name: str) -> tuple[str, int | None, int | None]:
    """A name with `{layer}` and `{expert}` in the places of the numbers, and these."""
    layer, expert = _LAYER.search(name), _EXPERT.search(name)
    pattern = _EXPERT.sub(r"\1{expert}", _LAYER.sub(r"\1{layer}", name))
    return pattern, None if layer is None else int(layer[2]), None if expert is None else int(expert[2])


def _refuse(unknown: list[str], model: Model, into: str) -> None:
    if unknown:
        shown = ", ".join(unknown[:_NAMED]) + (f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else "")
        raise MismatchError(
            f"no rule says what becomes of {shown} in {into} {model.kind}. The config is another model's, or the "
            "model has parts that milepost does not know"
        )


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Errors of an edit name the tensor."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"{name}: {error}") from None
