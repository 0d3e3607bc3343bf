"""torchtitan's own names become Hugging Face's, by edits alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import titan
import torch
from mapping.tiny import build, save, tiny

from milepost.errors import MismatchError
from milepost.index import TensorIndex, moment_name
from milepost.layouts import open_directory
from milepost.mapping import to_huggingface
from milepost.mapping.dialects import speaks_titan
from milepost.mapping.titan import from_native, parts_of

BLOCK = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_a_layernorm": "attention.q_norm",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.gate": "moe.router.gate",
    "mlp.shared_experts.gate_proj": "moe.shared_experts.w1",
    "mlp.shared_experts.up_proj": "moe.shared_experts.w3",
    "mlp.shared_experts.down_proj": "moe.shared_experts.w2",
}
"""Hugging Face's modules of a layer -> torchtitan's, from the adapters' tables."""
QKV = ("attention.wq", "attention.wk", "attention.wv")
EXPERT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
NEW_EXPERT = {"w1": "w1_EFD", "w2": "w2_EDF", "w3": "w3_EFD"}


def native(state: dict[str, torch.Tensor], config: dict[str, Any], *, newest: bool = False) -> dict[str, torch.Tensor]:
    """A Hugging Face state dict as torchtitan has it, with the names of 2025, or of August 2026."""
    out: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    heads = {"self_attn.q_proj": config["num_attention_heads"], "self_attn.k_proj": config["num_key_value_heads"]}
    output = "lm_head" if newest else "output"
    for name, value in state.items():
        parts = name.split(".")
        if parts[1] != "layers":
            top = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": output}
            out[name.replace(".".join(parts[:-1]), top[".".join(parts[:-1])])] = value
            continue
        layer, module, kind = f"layers.{parts[2]}.", ".".join(parts[3:-1]), parts[-1]
        if "experts" in parts:
            which = EXPERT[parts[6]]
            folder = "moe.routed_experts.inner_experts." if newest else "moe.experts."
            key = layer + folder + (NEW_EXPERT[which] if newest else which)
            experts.setdefault(key, {})[int(parts[5])] = value
        elif kind == "e_score_correction_bias":
            out[layer + ("moe.expert_bias_E" if newest else "moe.expert_bias")] = value
        else:
            own = BLOCK[module]
            if newest and own in QKV and config["model_type"] != "deepseek_v3":
                own = own.replace("attention.", "attention.qkv_linear.")
            turned = config["model_type"] == "llama" and module in heads
            out[f"{layer}{own}.{kind}"] = titan.in_pairs(value, heads[module]) if turned else value
    return out | {key: torch.stack([of[e] for e in sorted(of)]) for key, of in experts.items()}


def _index(directory: Path, state: dict[str, torch.Tensor]) -> TensorIndex:
    directory.mkdir(exist_ok=True)
    torch.save({name: value.clone() for name, value in state.items()}, directory / "pytorch_model.bin")
    return open_directory(directory, "huggingface")


def _case(family: str, tmp_path: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config, files = save(build(family, "causal-lm", tiny(family, **changes)), tmp_path / "reference")
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    return config, {name: entry.read() for name, entry in files.items()}


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_every_family_is_bitwise_what_transformers_saved(family: str, newest: bool, tmp_path: Path) -> None:
    config, state = _case(family, tmp_path, tie_word_embeddings=False)
    own = native(state, config, newest=newest)
    assert not set(own) & set(state) - {"lm_head.weight"}
    if newest:
        own |= {"layers.1.moe.tokens_per_expert_E": torch.zeros(3), "mtp_layers.0.enorm.weight": torch.zeros(3)}
    else:
        own |= {"freqs_cis": torch.zeros(4, 2, dtype=torch.complex64), "layers.1.moe.tokens_per_expert": torch.ones(3)}
    mapped = to_huggingface(_index(tmp_path, own), config)
    assert sorted(mapped.index) == sorted(state)
    assert [n for n, v in state.items() if not torch.equal(mapped.index[n].read(), v)] == []
    assert mapped.notes == (f"took torchtitan's own names of {family} as Hugging Face's",)


def test_rows_of_a_head_by_hand(tmp_path: Path) -> None:
    # One head of 6 rows: pairs (0 1)(2 3)(4 5) become halves 0 2 4 | 1 3 5; the second head follows.
    rows = torch.arange(12.0)[:, None] * torch.ones(1, 12)
    config = {"model_type": "llama", "num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 12}
    state = {"tok_embeddings.weight": rows, "layers.0.attention.wq.weight": rows}
    index, _ = from_native(_index(tmp_path, state), config)
    halves = [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert index["model.layers.0.self_attn.q_proj.weight"].read()[:, 0].tolist() == halves


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fused_weights_and_moments_come_apart(family: str, tmp_path: Path) -> None:
    config, state = _case(family, tmp_path, tie_word_embeddings=False)
    own = native(state, config, newest=True)
    moments = {f"state.{n}.exp_avg": v + 1 for n, v in own.items()}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}.attention.qkv_linear."
        q, k, v = (own[f"{prefix}w{letter}.weight"] for letter in "qkv")
        whole = titan.fused(q, k, v, config["num_key_value_heads"])
        for letter in "qkv":
            del moments[f"state.{prefix}w{letter}.weight.exp_avg"]
        moments[f"state.{prefix}wqkv.weight.exp_avg"] = whole + 1
        moments[f"state.{prefix}wqkv.weight.step"] = torch.tensor(7.0)
        if layer:  # as it was saved in spring 2026: the weight too
            own[f"{prefix}wqkv.weight"] = whole
            for letter in "qkv":
                del own[f"{prefix}w{letter}.weight"]
    entries = {moment_name(n[6:].rpartition(".")[0], n.rpartition(".")[2]): v for n, v in moments.items()}
    index = _index(tmp_path, own)
    index = index.with_entries({**index, **_index(tmp_path / "moments", entries)})
    mapped = to_huggingface(index, config).index
    assert [n for n, v in state.items() if not torch.equal(mapped[n].read(), v)] == []
    averages = {n: mapped[moment_name(n, "exp_avg")].read() for n in state}
    assert [n for n, v in state.items() if not torch.equal(averages[n], v + 1)] == []
    for letter in "qkv":
        assert mapped[f"optim/model.layers.0.self_attn.{letter}_proj.weight/step"].read() == 7


def test_a_tied_model_has_one_embedding(tmp_path: Path) -> None:
    config, state = _case("qwen3", tmp_path, tie_word_embeddings=True)
    own = native(state, config)
    twice = own | {"output.weight": own["tok_embeddings.weight"].clone()}
    assert sorted(to_huggingface(_index(tmp_path, twice), config).index) == sorted(state)
    with pytest.raises(MismatchError, match=r"lm_head\.weight and model\.embed_tokens\.weight differ"):
        to_huggingface(_index(tmp_path, own | {"output.weight": own["tok_embeddings.weight"] + 1}), config)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    config, state = _case("qwen3_moe", tmp_path)
    own = native(state, config)
    for family in ("qwen2", "of tomorrow"):
        with pytest.raises(MismatchError, match=rf"torchtitan's own names .*qwen3_moe.* says {family}\. Give"):
            to_huggingface(_index(tmp_path, own), {**config, "model_type": family})
    with pytest.raises(MismatchError, match=r"layers\.0\.moe\.experts\.w. has shape \[3, \d+, \d+\]; .* 4 experts"):
        to_huggingface(_index(tmp_path, own), {**config, "num_experts": 4})
    with pytest.raises(MismatchError, match=r"not of this model: layers\.0\.attention\.sinks"):
        to_huggingface(_index(tmp_path, own | {"layers.0.attention.sinks": torch.ones(2)}), config)
    llama, weights = _case("llama", tmp_path)
    with pytest.raises(
        MismatchError, match=r"layers\.0\.attention\.wq\.weight has shape \[16, 16\].* 3 heads of pairs"
    ):
        to_huggingface(_index(tmp_path, native(weights, llama)), {**llama, "num_attention_heads": 3})


def test_other_names_are_left_alone(tmp_path: Path) -> None:
    config, state = _case("llama", tmp_path)
    index = _index(tmp_path, state)
    assert not speaks_titan(index)
    assert from_native(index, config) == (index, ())
    # One name that torchtitan has too is no sign of it.
    assert not speaks_titan(
        _index(tmp_path, {"tok_embeddings.weight": torch.ones(2), "layers.0.attn.q.weight": torch.ones(2)})
    )


def test_parts_of_a_fused_tensor() -> None:
    name = "layers.3.attention.qkv_linear.wqkv.weight"
    assert parts_of(name) == tuple(name.replace("wqkv", part) for part in ("wq", "wk", "wv"))
    assert parts_of("layers.3.attention.wq.weight") == ()
