"""LoRA runs: which tensors of a state dict are the base model's, and which the adapter's.

PEFT's names, below `base_model.model.` (absent where transformers itself added the adapter):

    X.base_layer.weight                   the frozen weight of a module with an adapter
    X.lora_A.default.weight [r, in]       its two factors, `default` being the adapter's name
    X.lora_B.default.weight [out, r]
    X.lora_embedding_A.default [r, rows]  of an embedding: weight + scale * (B @ A)^T
    X.lora_embedding_B.default [width, r]
    X.modules_to_save.default.weight      a module that was trained whole ...
    X.original_module.weight              ... and what it was before

Source: the layers of peft 0.21.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from milepost.edits import permute
from milepost.errors import MismatchError
from milepost.index import TensorEntry, TensorIndex
from milepost.mapping.wrappers import regroup
from milepost.transfer.lowrank import LowRank

PREFIX = "base_model.model."
DEFAULT = "default"
_FACTORS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
_MAGNITUDE = "lora_magnitude_vector"
_PAIRS = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))


@dataclass(frozen=True)
class Factors:
    """The two factors of one module: a [r, in] and b [out, r]; `embedding`: of the transposed weight."""

    a: TensorEntry
    b: TensorEntry
    embedding: bool = False

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[0]

    def update(self, scale: float, transposed: bool) -> LowRank:
        """What they add to the module's weight; `transposed` where that is [in, out]."""
        if transposed or self.embedding:
            return LowRank(permute(self.a, (1, 0)), permute(self.b, (1, 0)), scale)
        return LowRank(self.b, self.a, scale)


@dataclass(frozen=True)
class Adapter:
    """One adapter.

    modules:  module -> its factors, in the state dict's order
    tensors:  all its tensors, under the names of PEFT's `adapter_model.safetensors`
    whole:    modules that were trained whole
    dora:     whether it has magnitudes beside its factors (DoRA)
    biases:   modules whose lora_B has a bias
    """

    modules: Mapping[str, Factors]
    tensors: Mapping[str, TensorEntry]
    whole: tuple[str, ...]
    dora: bool
    biases: tuple[str, ...]

    def ranks(self) -> Counter[int]:
        """How many modules have which r."""
        return Counter(factors.rank for factors in self.modules.values())


@dataclass(frozen=True)
class LoraRun:
    """A state dict with an adapter, taken apart.

    base:     the model as it was before, under its own names
    trained:  the tensors of modules that were trained whole, under the names that they replace
    adapter:  the adapter
    notes:    what was left out, one line each
    """

    base: TensorIndex
    trained: Mapping[str, TensorEntry]
    adapter: Adapter
    notes: tuple[str, ...]


def has_adapter(index: TensorIndex) -> bool:
    """Whether a state dict holds an adapter of PEFT's."""
    return any(".lora_" in name or ".modules_to_save." in name for name in index)


def take_apart(index: TensorIndex) -> LoraRun:
    """Base and adapter of a state dict that `has_adapter`; weights only, wrappers stripped.

    Raises MismatchError for adapters of other kinds (AdaLoRA, trained tokens), for several adapters with none called
    `default`, and for a factor without its other.
    """
    index = index.with_entries(regroup(index, lambda name: name.removeprefix(PREFIX)))
    places = {name: _Place.of(name) for name in index}
    adapters = Counter(place.adapter for place in places.values() if place.adapter)
    if DEFAULT not in adapters and len(adapters) != 1:
        raise MismatchError(f"holds the adapters {', '.join(sorted(adapters))}, and none of them is called {DEFAULT}")
    chosen = DEFAULT if DEFAULT in adapters else next(iter(adapters))
    others = sorted(name for name in adapters if name != chosen)
    notes = [f"left out: the adapter {name}, {adapters[name]} tensors" for name in others]
    base = regroup(index, lambda name: places[name].base)
    trained = regroup(index, lambda name: places[name].trained if places[name].adapter == chosen else None)
    own = {place.key: index[name] for name, place in places.items() if place.adapter == chosen}
    return LoraRun(index.with_entries(base), trained, _adapter(places, chosen, index, own), tuple(notes))


@dataclass(frozen=True)
class _Place:
    """What one tensor of the state dict is: of the base (`base`: its name there), or of an adapter (`key`: its name in
    the adapter's file; `module` and `kind` for LoRA's own; `trained`: the base's tensor that it replaces)."""

    base: str | None = None
    adapter: str = ""
    key: str = ""
    module: str = ""
    kind: str = ""
    trained: str | None = None

    @staticmethod
    def of(name: str) -> _Place:
        parts = name.split(".")
        if "token_adapter" in parts or any(part.startswith("trainable_tokens") for part in parts):
            raise MismatchError(f"{name}: an adapter of single tokens, which milepost does not read")
        if "modules_to_save" in parts:
            at = parts.index("modules_to_save")
            plain = ".".join((*parts[:at], *parts[at + 2 :]))
            return _Place(adapter=parts[at + 1], key=PREFIX + plain, module=".".join(parts[:at]), trained=plain)
        at = next((i for i, part in enumerate(parts) if part.startswith("lora_")), -1)
        if at < 0:
            return _Place(base=".".join(part for part in parts if part not in ("base_layer", "original_module")))
        kind, rest = parts[at], parts[at + 1 :]
        if kind not in (*_FACTORS, _MAGNITUDE):
            raise MismatchError(f"{name}: {kind} is of another kind of adapter than LoRA, which milepost does not read")
        adapter = rest.pop(0) if rest and rest[0] not in ("weight", "bias") else DEFAULT
        if kind == _MAGNITUDE:
            rest = []
        module = ".".join(parts[:at])
        return _Place(adapter=adapter, key=".".join((f"{PREFIX}{module}.{kind}", *rest)), module=module, kind=kind)


def _adapter(
    places: Mapping[str, _Place], chosen: str, index: TensorIndex, tensors: Mapping[str, TensorEntry]
) -> Adapter:
    found: dict[str, dict[str, TensorEntry]] = {}
    biases: list[str] = []
    whole: dict[str, None] = {}
    for name, place in places.items():
        if place.adapter != chosen:
            continue
        if place.trained is not None:
            whole[place.module] = None
        elif place.key.endswith(".bias"):
            biases.append(place.module)
        else:
            found.setdefault(place.module, {})[place.kind] = index[name]
    modules = {module: _factors(module, kinds) for module, kinds in found.items()}
    dora = any(_MAGNITUDE in kinds for kinds in found.values())
    return Adapter(modules, tensors, tuple(whole), dora, tuple(biases))


def _factors(module: str, kinds: Mapping[str, TensorEntry]) -> Factors:
    for name_a, name_b in _PAIRS:
        if name_a in kinds and name_b in kinds:
            a, b = kinds[name_a], kinds[name_b]
            if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
                raise MismatchError(
                    f"{module}: factors of shape {list(a.shape)} and {list(b.shape)} make no LoRA update of a matrix"
                )
            return Factors(a, b, embedding=name_a != "lora_A")
    raise MismatchError(f"{module}: holds {', '.join(sorted(kinds))} and lacks the other factor")
