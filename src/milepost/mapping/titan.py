"""torchtitan's own names of weights, and the edits that make them Hugging Face's.

A step of torchtitan holds its native modules, not transformers': `layers.N.attention.wq`, `feed_forward.w1`, and the
experts of a layer as one tensor. Its Llama turns neighbouring elements of a head together (RoPE on pairs), Hugging
Face's the first half against the second. So row 2 j + i of a head there is row i * (head_dim / 2) + j here, for i in
0, 1: an edit with a step, and no byte changes. Qwen3 turns halves in both, and DeepSeek-V3 pairs in both.

Source: torchtitan's `state_dict_adapter.py` of each model, and how its names changed from 2024 to August 2026 (commits
ad7a865, 786e26f, 70dd945): `output` became `lm_head`; q, k and v moved into `qkv_linear`; they were one tensor `wqkv`
for a time, and their optimizer moments still are where a model fuses them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType

from milepost.edits import concat, every, narrow, select
from milepost.errors import MismatchError
from milepost.index import TensorEntry, TensorIndex
from milepost.mapping.architectures import Config
from milepost.mapping.dialects import TITAN_FIRST, speaks_titan
from milepost.mapping.families import FAMILIES
from milepost.mapping.moments import joined, split
from milepost.mapping.rules import Settings


@dataclass(frozen=True)
class Native:
    """How torchtitan names one family.

    top:      module outside the layers -> its Hugging Face name
    layer:    module of a layer, counted from `layers.N.` -> its name counted from `model.layers.N.`
    tensors:  the same for tensors that are no `.weight` or `.bias` of a module
    experts:  tensor [experts, rows, columns] of a layer -> name of one expert's matrix, with `{expert}`
    pairs:    module whose rows are turned in pairs of neighbours -> config key with its number of heads
    """

    layer: Mapping[str, str]
    top: Mapping[str, str] = field(
        default_factory=lambda: {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"}
    )
    tensors: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, str] = field(default_factory=dict)
    pairs: Mapping[str, str] = field(default_factory=dict)


_BLOCK = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_QKV = {f"attention.w{letter}": f"self_attn.{letter}_proj" for letter in "qkv"}
_HEAD_NORMS = {f"attention.{letter}_norm": f"self_attn.{letter}_norm" for letter in "qk"}
_ROUTER = {"moe.router.gate": "mlp.gate"}
_EXPERTS = {
    "moe.experts.w1": "mlp.experts.{expert}.gate_proj.weight",
    "moe.experts.w2": "mlp.experts.{expert}.down_proj.weight",
    "moe.experts.w3": "mlp.experts.{expert}.up_proj.weight",
}
_LATENT = {
    "attention.wq": "self_attn.q_proj",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "moe.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "moe.shared_experts.w2": "mlp.shared_experts.down_proj",
    "moe.shared_experts.w3": "mlp.shared_experts.up_proj",
}

NATIVE: Mapping[str, Native] = MappingProxyType(
    {
        "llama": Native(
            _BLOCK | _QKV, pairs={"attention.wq": "num_attention_heads", "attention.wk": "num_key_value_heads"}
        ),
        "qwen3": Native(_BLOCK | _QKV | _HEAD_NORMS),
        "qwen3_moe": Native(_BLOCK | _QKV | _HEAD_NORMS | _ROUTER, experts=_EXPERTS),
        "deepseek_v3": Native(
            _BLOCK | _LATENT | _ROUTER,
            tensors={"moe.expert_bias": "mlp.gate.e_score_correction_bias"},
            experts=_EXPERTS,
        ),
    }
)
"""`model_type` of config.json -> its names in torchtitan."""

_FUSED = "attention.wqkv"
_SPELLINGS = (
    (re.compile(r"\.qkv_linear\."), "."),
    (re.compile(r"\.routed_experts\.inner_experts\."), ".experts."),
    (re.compile(r"(\.w[123]|bias|expert)_(?:EFD|EDF|E)\Z"), r"\1"),
    (re.compile(r"\Aoutput\."), "lm_head."),
)
# What is no weight: rotary tables, counts of tokens, and multi-token prediction, which transformers does not build.
_IGNORED = ("freqs_cis", "*.freqs_cis", "*rope*.cache", "*.tokens_per_expert", "mtp_layers.*")
_NAME = re.compile(r"(?:layers\.(\d+)\.)?(.+?)(\.weight|\.bias)?", re.DOTALL)


def from_native(index: TensorIndex, config: Config) -> tuple[TensorIndex, tuple[str, ...]]:
    """The index under Hugging Face's names, and what a user should hear of; an index of other names as it is.

    A name that no rule knows stays, for the check against the architecture to name it.

    Raises MismatchError where torchtitan's names of the family in config.json are not known, or a tensor does not have
    the heads or experts that config.json gives it.
    """
    if not speaks_titan(index):
        return index, ()
    kind = config.get("model_type", "(none)")
    native = NATIVE.get(kind)
    if native is None:
        raise MismatchError(
            f"the tensors have torchtitan's own names ({TITAN_FIRST}, ...), which milepost knows for "
            f"{', '.join(NATIVE)}; "
            f"config.json says {kind}. Give the trained model's directory with --hf_model_path, or export the step "
            "with torchtitan's convert_to_hf.py"
        )
    family = FAMILIES[kind]
    settings = family.settings(config)
    experts = settings[family.experts] if family.experts else 0
    entries: dict[str, TensorEntry] = {}
    for name, entry in index.items():
        weight, moment = split(name)
        for new, part in _converted(weight, entry, native, settings, experts).items():
            if joined(new, moment) in entries:
                raise MismatchError(f"{name} and another tensor would both become {new}")
            entries[joined(new, moment)] = part
    return index.with_entries(entries), (f"took torchtitan's own names of {kind} as Hugging Face's",)


def parts_of(weight: str) -> tuple[str, ...]:
    """The names under which the parts of a fused tensor may be saved: torchtitan notes the moments of `wqkv` beside
    the weights `wq`, `wk` and `wv`. Empty for any other name."""
    if f"{_FUSED}." not in _spelled(weight):
        return ()
    return tuple(weight.replace("wqkv", f"w{letter}") for letter in "qkv")


def _spelled(weight: str) -> str:
    for pattern, spelling in _SPELLINGS:
        weight = pattern.sub(spelling, weight)
    return weight


def _converted(
    weight: str, entry: TensorEntry, native: Native, settings: Settings, experts: int
) -> dict[str, TensorEntry]:
    """Hugging Face's tensors that one of torchtitan's holds; moments that are one number go to each."""
    name = _spelled(weight)
    if any(fnmatchcase(name, pattern) for pattern in _IGNORED):
        return {}
    match = _NAME.fullmatch(name)
    if match is None:
        return {weight: entry}
    layer, module, kind = match[1], match[2], match[3] or ""
    if layer is None:
        return {native.top[module] + kind if module in native.top else weight: entry}
    prefix = f"model.layers.{layer}."
    if module == _FUSED:
        parts = _unfused(weight, entry, settings)
    elif not kind and module in native.experts:
        return _unstacked(weight, entry, prefix + native.experts[module], experts)
    else:
        parts = {module: entry}
    converted: dict[str, TensorEntry] = {}
    for part, value in parts.items():
        if kind and part in native.layer:
            heads = native.pairs.get(part)
            turned = value if heads is None else _halves(weight, value, settings[heads])
            converted[prefix + native.layer[part] + kind] = turned
        elif not kind and part in native.tensors:
            converted[prefix + native.tensors[part]] = value
        else:
            converted[weight] = entry
    return converted


def _halves(weight: str, entry: TensorEntry, heads: int) -> TensorEntry:
    """Rows that are turned in pairs of neighbours, in the order of halves: of each head the even rows, then the odd."""
    if not entry.shape:
        return entry
    size = _per(weight, entry, 2 * heads, f"{heads} heads of pairs") * 2
    rows = (narrow(entry, 0, head * size, size) for head in range(heads))
    return concat([every(row, 0, start, 2) for row in rows for start in (0, 1)], 0)


def _unfused(weight: str, entry: TensorEntry, settings: Settings) -> dict[str, TensorEntry]:
    """q, k and v of `wqkv`: for each group of heads its queries, its key and its value."""
    names = [f"attention.w{letter}" for letter in "qkv"]
    if not entry.shape:
        return dict.fromkeys(names, entry)
    groups = settings["num_key_value_heads"]
    queries = settings["num_attention_heads"] // groups
    size = _per(weight, entry, groups * (queries + 2), f"{groups} groups of {queries} queries, a key and a value")
    starts = range(0, entry.shape[0], (queries + 2) * size)
    places = ((0, queries), (queries, 1), (queries + 1, 1))
    return {
        name: concat([narrow(entry, 0, start + first * size, count * size) for start in starts], 0)
        for name, (first, count) in zip(names, places, strict=True)
    }


def _unstacked(weight: str, entry: TensorEntry, name: str, experts: int) -> dict[str, TensorEntry]:
    if entry.shape and entry.shape[0] != experts:
        raise MismatchError(f"{weight} has shape {list(entry.shape)}; config.json asks for {experts} experts")
    return {name.format(expert=expert): select(entry, 0, expert) if entry.shape else entry for expert in range(experts)}


def _per(weight: str, entry: TensorEntry, parts: int, what: str) -> int:
    size, rest = divmod(entry.shape[0], parts)
    if rest or not size:
        raise MismatchError(f"{weight} has shape {list(entry.shape)}, which is not {what} as config.json describes")
    return size
