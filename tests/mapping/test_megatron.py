"""Megatron's tensors and Hugging Face's: cases 67 and 70 to 72 in torch alone, and round trips of the rules over
families and parallel layouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mapping.tiny import tiny
from safetensors.torch import save_file

from milepost.errors import IncompleteError, MismatchError, RefusedError
from milepost.index import TensorEntry, TensorIndex
from milepost.layouts.huggingface import read_safetensors
from milepost.layouts.megatron.parts import part_name
from milepost.mapping import expected, names
from milepost.mapping.families import FAMILIES
from milepost.mapping.megatron import from_megatron, model_of, to_megatron
from milepost.mapping.megatron.families import RULES
from milepost.mapping.megatron.names import pattern_of
from milepost.mapping.megatron.parts import cut
from milepost.mapping.megatron.spelling import DIST, LOCAL, TRANSFORMER_ENGINE, canonical, spelled
from milepost.mapping.megatron.stacks import stacked

WRITERS = (LOCAL, TRANSFORMER_ENGINE, DIST)
CHANGES: dict[str, list[dict[str, Any]]] = {
    "llama": [{}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1, "tie_word_embeddings": True}, {"head_dim": 6}],
    "mistral": [{}],
    "qwen2": [{}, {"tie_word_embeddings": True}],
    "qwen3": [{}, {"attention_bias": True}],
    "gemma": [{}],
    "gemma2": [{}],
    "gemma3_text": [{}],
    "mixtral": [{"num_local_experts": 4}],
    "qwen2_moe": [{"num_experts": 4}, {"num_experts": 4, "decoder_sparse_step": 2}],
    "qwen3_moe": [{"num_experts": 4}, {"num_experts": 4, "mlp_only_layers": [1]}],
    "deepseek_v3": [
        {"q_lora_rank": 6},
        {"q_lora_rank": None},
        {"n_shared_experts": 2, "attention_bias": True, "q_lora_rank": 6},
    ],
}
CONFIGS = [{"model_type": f, **tiny(f, **{"vocab_size": 32, **c})} for f, changes in CHANGES.items() for c in changes]


def index_of(tensors: Mapping[str, torch.Tensor], file: Path) -> TensorIndex:
    save_file(dict(tensors), file)
    return TensorIndex(read_safetensors(file), "megatron")


class Models(list[TensorIndex]):
    """A list that hypothesis does not spell out."""

    def __repr__(self) -> str:
        return "models"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """For each of `CONFIGS` a model of random values, and moments of some of its weights."""
    root = tmp_path_factory.mktemp("models")
    made = Models()
    for number, config in enumerate(CONFIGS):
        torch.manual_seed(number)
        architecture = expected(config)
        assert architecture is not None
        tensors = {name: torch.randn(shape) for name, shape in architecture.tensors.items()}
        tensors |= {f"optim/{name}/exp_avg": torch.randn(value.shape) for name, value in tensors.items()}
        save_file(tensors, root / f"{number}.safetensors")
        made.append(TensorIndex(read_safetensors(root / f"{number}.safetensors"), "huggingface"))
    return made


def assert_same(found: Mapping[str, TensorEntry], wanted: Mapping[str, TensorEntry]) -> None:
    assert set(found) == set(wanted)
    for name, entry in wanted.items():
        found[name].check_tiling(name)
        assert (found[name].dtype, found[name].shape) == (entry.dtype, entry.shape), name
        assert (found[name].bits() == entry.bits()).all(), name


def as_parts(
    index: TensorIndex, config: Mapping[str, Any], tp: int, etp: int, duplicate: bool
) -> dict[str, TensorEntry]:
    """Whole Megatron tensors as the pieces of `tp` ranks; experts as those of `etp`, which goes into `tp`."""
    model = model_of(config)
    parts: dict[str, TensorEntry] = {}
    for name, entry in index.items():
        pattern, _, expert = pattern_of(name)
        rule = model.rules[pattern]
        whole = duplicate and rule.cut.or_whole and expert is None
        ranks = 1 if whole else etp if expert is not None else tp
        for rank in range(tp):
            parts[part_name(name, rank)] = cut(name, rule, entry, rank % ranks, ranks)
        if expert is not None and not duplicate:  # ranks in turn hold an expert
            for rank in range(tp):
                if rank // etp != expert % (tp // etp):
                    del parts[part_name(name, rank)]
    return parts


def respelled(
    entries: Iterable[tuple[str, TensorEntry]], config: Mapping[str, Any], writer: str
) -> dict[str, TensorEntry]:
    family = FAMILIES[config["model_type"]]
    known = family.settings(config)

    def new(name: str) -> str:
        bare, at, mark = name.partition("@")
        return spelled(
            bare, writer, known["num_hidden_layers"],
            is_moe=lambda layer: family.is_moe(known, layer), latent=config["model_type"] == "deepseek_v3",
        ) + at + mark  # fmt: skip

    return {new(name): entry for name, entry in entries}


@settings(max_examples=30, deadline=None)
@given(
    number=st.sampled_from(range(len(CONFIGS))),
    tp=st.sampled_from((1, 2, 4)),
    expert_tp=st.sampled_from((1, 2, 4)),
    duplicate=st.booleans(),
    writer=st.sampled_from((LOCAL, TRANSFORMER_ENGINE)),
)
def test_round_trip_through_pieces_of_ranks(
    models: Models, number: int, tp: int, expert_tp: int, duplicate: bool, writer: str
) -> None:
    config, weights = CONFIGS[number], models[number].weights()
    if config["model_type"] == "deepseek_v3" and tp == 4:
        tp = 2  # the projections down have 6 and 10 rows here
    whole = to_megatron(weights, config)
    parts = as_parts(whole, config, tp, min(tp, expert_tp), duplicate)
    entries = respelled(parts.items(), config, writer)
    back, _ = from_megatron(TensorIndex(entries, "megatron"), config)
    assert_same(back.entries, weights.entries)


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_round_trip_through_stacks_moments_included(models: Models, number: int) -> None:
    config = CONFIGS[number]
    whole = to_megatron(models[number], config)
    entries: dict[str, TensorEntry] = {}
    for moment in (None, "exp_avg"):
        group = whole.weights() if moment is None else {
            n.removeprefix("optim/").removesuffix("/exp_avg"): e for n, e in whole.items() if n.startswith("optim/")
        }  # fmt: skip
        held = stacked(respelled(group.items(), config, DIST))
        entries |= {n if moment is None else f"optim/{n}/exp_avg": e for n, e in held.items()}
    moe = FAMILIES[config["model_type"]].experts
    assert any("experts.experts.linear_fc1.weight" in n for n in entries) == bool(moe)
    back, _ = from_megatron(TensorIndex(entries, "megatron"), config)
    assert_same(back.entries, models[number].entries)


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_every_tensor_of_a_family_has_one_rule(models: Models, number: int) -> None:
    model = model_of(CONFIGS[number])
    assert all(pattern_of(name)[0] in model.theirs for name in models[number].weights())
    assert set(RULES) <= set(FAMILIES)


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_spellings_lead_back_to_one_name(models: Models, number: int) -> None:
    config = CONFIGS[number]
    ours = to_megatron(models[number].weights(), config)
    for writer in WRITERS:
        theirs = respelled(ours.items(), config, writer)
        assert len(theirs) == len(ours)
        assert [canonical(name, config["num_hidden_layers"]) for name in theirs] == list(ours)


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (4, 4), (4, 1)])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_queries_keys_and_values(tmp_path: Path, heads: int, groups: int, tp: int, bias: bool) -> None:
    """Case 67, in torch: for each group its queries, its key, its value; ranks hold groups, or with fewer groups than
    ranks any rows."""
    size, width = 3, 5
    shape = (lambda rows: (rows,)) if bias else (lambda rows: (rows, width))
    q, k, v = (torch.randn(shape(n * size)) for n in (heads, groups, groups))
    fused = torch.cat([torch.cat(rows) for rows in zip(q.chunk(groups), k.chunk(groups), v.chunk(groups), strict=True)])
    kind = "bias" if bias else "weight"
    name = f"decoder.layers.0.self_attention.linear_qkv.{kind}"
    rows = fused.chunk(tp)
    tensors = {name: fused} if tp == 1 else {f"{name}@tp{rank}": rows[rank].clone() for rank in range(tp)}
    config = {
        "model_type": "qwen2", "hidden_size": width, "intermediate_size": 4, "num_hidden_layers": 1, "vocab_size": 8,
        "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": size,
    }  # fmt: skip
    found, _ = from_megatron(index_of(tensors, tmp_path / "a.safetensors"), config)
    for letter, value in zip("qkv", (q, k, v), strict=True):
        assert torch.equal(found[f"model.layers.0.self_attn.{letter}_proj.{kind}"].read(), value)


def test_gate_and_up_of_ranks_are_parted_and_joined(tmp_path: Path) -> None:
    """Each rank holds [its gate; its up]; the whole is [all gate; all up]."""
    gate, up = torch.randn(24, 16), torch.randn(24, 16)
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    tensors = {f"{name}@tp{r}": torch.cat([gate.chunk(4)[r], up.chunk(4)[r]]) for r in range(4)}
    found, _ = from_megatron(index_of(tensors, tmp_path / "a.safetensors"), CONFIGS[0])
    assert torch.equal(found["model.layers.1.mlp.gate_proj.weight"].read(), gate)
    assert torch.equal(found["model.layers.1.mlp.up_proj.weight"].read(), up)


def whole_llama(models: Models) -> dict[str, TensorEntry]:
    return dict(to_megatron(models[0].weights(), CONFIGS[0]).entries)


def test_the_routers_bias_stays_float32_beside_bfloat16(tmp_path: Path) -> None:
    """Case 71, both ways and in stacks."""
    number = next(n for n, config in enumerate(CONFIGS) if config["model_type"] == "deepseek_v3")
    bias = torch.randn(4, dtype=torch.float32)
    tensors = {
        "decoder.layers.1.mlp.router.expert_bias": bias,
        "decoder.layers.1.mlp.router.weight": torch.randn(4, 16, dtype=torch.bfloat16),
    }
    found, _ = from_megatron(index_of(tensors, tmp_path / "a.safetensors"), CONFIGS[number])
    theirs = found["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert theirs.dtype == "float32" and torch.equal(theirs.read(), bias)
    assert found["model.layers.1.mlp.gate.weight"].dtype == "bfloat16"
    back = to_megatron(found, CONFIGS[number])
    assert torch.equal(back["decoder.layers.1.mlp.router.expert_bias"].read(), bias)


def test_norms_of_gemma_lie_where_megatron_bridge_puts_them(models: Models) -> None:
    """The names in its `gemma2_bridge.py`, `gemma3_bridge.py`, and `gemma_bridge.py`, which has two norms less."""
    before = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
    around = {
        before[0]: "input_layernorm",
        "self_attention.linear_proj.post_layernorm.weight": "post_attention_layernorm",
        before[1]: "pre_feedforward_layernorm",
        "mlp.linear_fc2.post_layernorm.weight": "post_feedforward_layernorm",
    }
    heads = {f"self_attention.{x}_layernorm.weight": f"self_attn.{x}_norm" for x in "qk"}
    of_family = {
        "gemma": {before[0]: "input_layernorm", before[1]: "post_attention_layernorm"},
        "gemma2": around,
        "gemma3_text": around | heads,
    }
    for family, wanted in of_family.items():
        number = next(n for n, config in enumerate(CONFIGS) if config["model_type"] == family)
        config, weights = CONFIGS[number], models[number].weights()
        theirs = respelled(to_megatron(weights, config).items(), config, TRANSFORMER_ENGINE)
        norms = {name.removeprefix("decoder.layers.1."): entry for name, entry in theirs.items()
                 if name.startswith("decoder.layers.1.") and "norm" in name}  # fmt: skip
        assert set(norms) == set(wanted)
        for name, entry in norms.items():
            assert (entry.bits() == weights[f"model.layers.1.{wanted[name]}.weight"].bits()).all()


@pytest.mark.parametrize("where", ["args", "common"])
@pytest.mark.parametrize(
    ("number", "arguments", "message"),
    [
        (0, {"apply_layernorm_1p": True}, r"multiply by 1 \+ weight .* is on\), those of a llama by weight"),
        ("gemma", {"apply_layernorm_1p": False}, r"multiply by weight .* is off\), those of a gemma by 1 \+ weight"),
        (0, {"num_attention_heads": 8, "kv_channels": 2}, "speak of 8 attention heads, config.json of 4"),
        (0, {"num_query_groups": 4}, "speak of 4 key/value heads, config.json of 2"),
        (0, {"num_query_groups": 1, "group_query_attention": False, "num_attention_heads": 4}, "4 key/value heads"),
        (0, {"kv_channels": 8}, "speak of 8 rows a head, config.json of 4"),
        (0, {"rotary_interleaved": True}, "pair by pair"),
        (0, {"num_layers": None, "kv_channels": 4, "apply_layernorm_1p": False}, None),
        ("gemma", {"apply_layernorm_1p": True, "group_query_attention": True, "num_query_groups": 2}, None),
        ("deepseek_v3", {"kv_channels": 128, "num_query_groups": 1, "num_attention_heads": 4}, None),
    ],
)
def test_arguments_of_another_model_are_refused(
    models: Models, number: int | str, arguments: dict[str, Any], message: str | None, where: str
) -> None:
    """What leaves no mark on a shape and changes what a weight means."""
    if isinstance(number, str):
        number = next(n for n, config in enumerate(CONFIGS) if config["model_type"] == number)
    objects = {"args": arguments} if where == "args" else {"common": {"iteration": 7, "args": arguments}}
    index = replace(to_megatron(models[number].weights(), CONFIGS[number]), layout="megatron", objects=objects)
    if message is None:
        from_megatron(index, CONFIGS[number])
        return
    with pytest.raises(MismatchError, match=message):
        from_megatron(index, CONFIGS[number])


def test_arguments_that_cannot_be_read_are_said_to_be_so(models: Models) -> None:
    class Refusing(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            raise RefusedError(f"{key} holds a thing that is no data")

    index = replace(to_megatron(models[0].weights(), CONFIGS[0]), layout="megatron", objects=Refusing(common=None))
    _, notes = from_megatron(index, CONFIGS[0])
    assert any("not compared with config.json: common holds a thing" in note for note in notes)


@pytest.mark.parametrize(
    "unknown",
    [
        "decoder.layers.0.self_attention.adapter.weight",
        "decoder.layers.0.mlp.linear_fc1.weight_scale",
        "vision_model.decoder.layers.0.mlp.linear_fc2.weight",
        "mtp.layers.0.enorm.weight",
    ],
)
def test_a_name_that_no_rule_knows_is_fatal(models: Models, unknown: str) -> None:
    """Case 72: nothing is dropped in silence."""
    entries = whole_llama(models)
    entries[unknown] = entries["decoder.final_layernorm.weight"]
    known = canonical(unknown, 2)
    with pytest.raises(MismatchError, match=f"no rule says what becomes of {known}"):
        from_megatron(TensorIndex(entries, "megatron"), CONFIGS[0])
    weights = {**models[0].weights().entries, "model.layers.0.extra.weight": models[0]["model.norm.weight"]}
    with pytest.raises(MismatchError, match=r"no rule says what becomes of model\.layers\.0\.extra"):
        to_megatron(TensorIndex(weights, "huggingface"), CONFIGS[0])


def test_a_family_without_rules_is_refused(models: Models) -> None:
    with pytest.raises(MismatchError, match=r"milepost knows for llama, .*config\.json says olmo2"):
        from_megatron(TensorIndex(whole_llama(models), "megatron"), {**CONFIGS[0], "model_type": "olmo2"})


def test_names_of_others_are_left_as_they_are(models: Models) -> None:
    found, notes = from_megatron(models[0], CONFIGS[0])
    assert found is models[0] and notes == []


def test_padding_is_cut_and_a_head_of_one_row_is_no_vocabulary(models: Models, tmp_path: Path) -> None:
    config = CONFIGS[0]
    table = torch.randn(40, 16)
    head = torch.randn(1, 16)
    both = {
        "embedding.word_embeddings.weight@tp0": table[:20].clone(),
        "embedding.word_embeddings.weight@tp1": table[20:].clone(),
        "output_layer.weight@tp0": head, "output_layer.weight@tp1": head.clone(),
    }  # fmt: skip
    found, notes = from_megatron(index_of(both, tmp_path / "a.safetensors"), config)
    assert torch.equal(found["model.embed_tokens.weight"].read(), table[:32])
    assert any("40 rows to 32" in note for note in notes)
    assert torch.equal(found["score.weight"].read(), head) and "lm_head.weight" not in found
    few = {**both, "output_layer.weight@tp0": torch.randn(3, 16), "output_layer.weight@tp1": torch.randn(3, 16)}
    with pytest.raises(MismatchError, match=r"output_layer\.weight: cannot take 0:32"):
        from_megatron(index_of(few, tmp_path / "b.safetensors"), config)
    three = torch.randn(3, 16)
    few |= {"output_layer.weight@tp0": three, "output_layer.weight@tp1": three.clone()}
    found, _ = from_megatron(index_of(few, tmp_path / "c.safetensors"), config, is_value_model=True)
    assert found["score.weight"].shape == (3, 16)


def test_copies_of_what_is_declared_replicated_must_agree(models: Models, tmp_path: Path) -> None:
    name = "decoder.layers.0.input_layernorm.weight"
    ones = torch.ones(16)
    agree, _ = from_megatron(index_of({f"{name}@tp0": ones, f"{name}@tp1": ones.clone()}, tmp_path / "a"), CONFIGS[0])
    assert agree["model.layers.0.input_layernorm.weight"].shape == (16,)
    other = ones.clone()
    other[3] += 1e-6
    with pytest.raises(MismatchError, match=r"input_layernorm\.weight of rank 1 .*differ"):
        from_megatron(index_of({f"{name}@tp0": ones, f"{name}@tp1": other}, tmp_path / "b"), CONFIGS[0])


def test_a_part_that_is_missing_is_named(models: Models, tmp_path: Path) -> None:
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    norm = "decoder.final_layernorm.weight"
    tensors = {f"{name}@tp0": torch.randn(16, 8), f"{name}@tp2": torch.randn(16, 8)}
    with pytest.raises(IncompleteError, match=r"linear_fc2\.weight: its parts of tensor-parallel rank 1 are missing"):
        from_megatron(index_of(tensors, tmp_path / "a"), CONFIGS[0])
    with pytest.raises(IncompleteError, match=r"final_layernorm\.weight: its parts of tensor-parallel ranks? 1"):
        from_megatron(
            index_of({f"{norm}@tp0": torch.ones(16), f"{norm}@tp2": torch.ones(16)}, tmp_path / "b"), CONFIGS[0]
        )
    halved = {"decoder.layers.0.mlp.linear_fc1.weight_w": torch.randn(24, 16)}
    with pytest.raises(IncompleteError, match="weight_v is not"):
        from_megatron(index_of(halved, tmp_path / "c"), CONFIGS[0])
    weights = dict(models[0].weights().entries)
    del weights["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(IncompleteError, match=r"layers\.1\.self_attn\.k_proj\.weight is missing"):
        to_megatron(TensorIndex(weights, "huggingface"), CONFIGS[0])


def test_experts_on_half_of_the_ranks_but_cut_are_incomplete(tmp_path: Path) -> None:
    """Experts that every rank should hold a part of: half of one is not taken for a whole."""
    number = next(n for n, config in enumerate(CONFIGS) if config["model_type"] == "mixtral")
    name = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight"
    norm = "decoder.final_layernorm.weight"
    tensors = {f"{name}@tp0": torch.randn(16, 12), f"{norm}@tp0": torch.ones(16), f"{norm}@tp1": torch.ones(16)}
    with pytest.raises(IncompleteError, match="tensor-parallel rank 1 are missing"):
        from_megatron(index_of(tensors, tmp_path / "a"), CONFIGS[number])


def test_stacks_of_another_size_are_refused(tmp_path: Path) -> None:
    tensors = {"decoder.layers.self_attention.linear_proj.weight": torch.randn(3, 16, 16)}
    with pytest.raises(MismatchError, match=r"shape \[3, 16, 16\].*2 layers"):
        from_megatron(index_of(tensors, tmp_path / "a"), CONFIGS[0])


def test_two_spellings_of_one_tensor_are_refused(tmp_path: Path) -> None:
    tensors = {
        "decoder.layers.0.input_layernorm.weight": torch.ones(16),
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": torch.ones(16),
    }
    with pytest.raises(MismatchError, match="twice"):
        from_megatron(index_of(tensors, tmp_path / "a"), CONFIGS[0])


def test_layers_that_predict_further_tokens_follow_the_last_one(tmp_path: Path) -> None:
    """DeepSeek-V3's: Hugging Face's files count them on, transformers builds none, and the check leaves them out."""
    number = next(n for n, config in enumerate(CONFIGS) if config["model_type"] == "deepseek_v3")
    values = {
        "mtp.layers.0.enorm.weight": ("model.layers.2.enorm.weight", torch.randn(16)),
        "mtp.layers.0.eh_proj.weight": ("model.layers.2.eh_proj.weight", torch.randn(16, 32)),
        "mtp.layers.0.final_layernorm.weight": ("model.layers.2.shared_head.norm.weight", torch.randn(16)),
        "mtp.layers.0.transformer_layer.mlp.router.weight": ("model.layers.2.mlp.gate.weight", torch.randn(4, 16)),
        "mtp.layers.0.transformer_layer.pre_mlp_layernorm.weight": (
            "model.layers.2.post_attention_layernorm.weight", torch.randn(16),
        ),
    }  # fmt: skip
    index = index_of({name: value for name, (_, value) in values.items()}, tmp_path / "a")
    found, _ = from_megatron(index, CONFIGS[number])
    assert {name: True for name, _ in values.values()} == {
        name: torch.equal(found[name].read(), value) for name, value in values.values()
    }
    assert {
        spelled(n, LOCAL, 2, is_moe=lambda _: True, latent=True) for n in to_megatron(found, CONFIGS[number])
    } == set(values)
    mapped = names.to_huggingface(index, CONFIGS[number], complete=False)
    assert len(mapped.index) == 0
    assert (
        "left out, as the model does not need them: model.layers.2.* (5 tensors) (model.layers.2.* is multi-token "
        "prediction (MTP), which transformers does not build)"
    ) in mapped.notes
