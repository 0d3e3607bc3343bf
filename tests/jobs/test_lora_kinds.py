"""Every kind of LoRA adapter that PEFT merges, against its own merge in float32; the others are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from wrapped import LINEARS, TINY

import milepost
from milepost.errors import MismatchError
from milepost.jobs.prepare import ModelOptions

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")

MERGE = ModelOptions(lora="merge")
IDS = torch.arange(24).reshape(2, 12)
MOE = {**TINY, "moe_intermediate_size": 12, "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 4}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def qwen2(**changes: Any) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**TINY, **changes))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**TINY))


def qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE))


def gpt_oss() -> Any:
    """Experts kept as [experts, in, out], and as wide as the model."""
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = {**TINY, "intermediate_size": 16, "num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 4}
    return GptOssForCausalLM(GptOssConfig(**sizes, layer_types=["full_attention"] * 2))


def gpt2(head: str = "LMHeadModel") -> Any:
    """Its layers keep their weights as [in, out]; that of attention's output is square."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=33, n_positions=64, n_embd=16, n_layer=2, n_head=4, pad_token_id=0, num_labels=3
    )
    return getattr(transformers, f"GPT2{head}")(config)


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any], int]] = {
    "dora": (llama, {"use_dora": True, "target_modules": [*LINEARS, "embed_tokens"]}, 15),
    "dora, rank-stabilised": (qwen2, {"use_dora": True, "use_rslora": True, "target_modules": ["k_proj"]}, 2),
    "dora of turned weights": (gpt2, {"use_dora": True, "target_modules": ["c_attn", "c_proj"]}, 6),
    "turned weights": (gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"]}, 8),
    "turned squares alone": (gpt2, {"target_modules": ["attn.c_proj"], "fan_in_fan_out": True}, 2),
    "turned and plain weights": (
        lambda: gpt2("ForSequenceClassification"),
        {"target_modules": ["attn.c_proj", "c_fc", "score"], "task_type": "SEQ_CLS", "modules_to_save": []},
        5,
    ),
    "bias of the adapter": (qwen2, {"lora_bias": True, "target_modules": ["q_proj", "k_proj"]}, 8),
    "biases of all modules": (qwen2, {"bias": "all", "target_modules": ["q_proj"]}, 2),
    "biases of adapted modules": (qwen2, {"bias": "lora_only", "target_modules": ["q_proj"]}, 2),
    "experts": (qwen3_moe, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}, 2 + 2 * 3 * 3),
    "one stack of experts": (qwen3_moe, {"target_modules": [], "target_parameters": EXPERTS[1:]}, 2 * 3),
    "experts by patterns": (
        qwen3_moe,
        {
            "target_modules": [],
            "target_parameters": [*EXPERTS, "mlp.gate.weight"],
            "rank_pattern": {"experts.down_proj": 2},
            "alpha_pattern": {"layers.1.mlp.experts.gate_up_proj": 5, "gate.weight": 3.5},
        },
        2 * (3 * 3 + 1),
    ),
    "experts kept turned": (
        gpt_oss,
        {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        4,
    ),
    "pissa": (llama, {"init_lora_weights": "pissa", "target_modules": ["q_proj"]}, 2),
    "olora": (llama, {"init_lora_weights": "olora", "target_modules": ["q_proj"]}, 2),
    "mica": (llama, {"init_lora_weights": "mica", "target_modules": ["q_proj"]}, 2),
}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path, int]:
    """PEFT's model, its checkpoint of one rank, and how many tensors the adapter changes."""
    make, settings, changed = KINDS[request.param]
    torch.manual_seed(7)
    return *checkpoint(make(), settings, tmp_path / "run" / "actor"), changed


def checkpoint(base: Any, settings: dict[str, Any], role: Path, **options: Any) -> tuple[Any, Path]:
    """A model with an adapter, everything that it trains random, and its checkpoint of one rank."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(**{"r": 4, "lora_alpha": 6.5, "task_type": "CAUSAL_LM", **settings})
    model: Any = get_peft_model(base, config, **options).eval()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            value = 0.3 * torch.randn(parameter.shape)
            parameter.data.copy_(value.abs() + 0.1 if "magnitude" in name else value)
    (role / "huggingface").mkdir(parents=True)
    model.base_model.model.config.save_pretrained(role / "huggingface")
    model.peft_config["default"].save_pretrained(role / "huggingface")
    torch.save(model.state_dict(), role / "model_world_size_1_rank_0.pt")
    return model, role


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def test_merged_is_pefts_merge(kind: tuple[Any, Path, int], tmp_path: Path) -> None:
    model, role, changed = kind
    milepost.merge(role, tmp_path / "base")
    milepost.merge(role, tmp_path / "out", model=MERGE)
    merged, base = weights(tmp_path / "out"), weights(tmp_path / "base")
    assert merged.keys() == base.keys()
    assert sum(not torch.equal(merged[name], value) for name, value in base.items()) == changed
    with torch.no_grad():
        before = model(IDS).logits
        whole = model.merge_and_unload()
        whole.save_pretrained(tmp_path / "theirs")
        theirs = weights(tmp_path / "theirs")
        assert merged.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(
                merged[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n} {text}"
            )
        ours = type(whole).from_pretrained(tmp_path / "out").eval()(IDS).logits
        torch.testing.assert_close(ours, before, rtol=1e-3, atol=1e-4)
    assert milepost.test(role, tmp_path / "out", model=MERGE).ok


def test_kept_is_pefts_adapter(kind: tuple[Any, Path, int], tmp_path: Path) -> None:
    from peft import PeftModel

    model, role, _ = kind
    # a task head of an adapter is PEFT's business; an embedding's base lies in the base beside it
    model.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    theirs = {name: value for name, value in theirs.items() if not name.endswith("base_layer.weight")}
    milepost.merge(role, tmp_path / "out")
    ours = load_file(tmp_path / "out" / "lora_adapter" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    loaded = type(model.base_model.model).from_pretrained(tmp_path / "out")
    with torch.no_grad():
        answer = PeftModel.from_pretrained(loaded, tmp_path / "out" / "lora_adapter").eval()(IDS).logits
        torch.testing.assert_close(answer, model(IDS).logits, rtol=1e-4, atol=1e-5)


def test_the_result_of_dora_does_not_depend_on_window_or_workers(tmp_path: Path) -> None:
    torch.manual_seed(7)
    _, role = checkpoint(llama(), {"use_dora": True, "target_modules": ["up_proj", "embed_tokens"]}, tmp_path / "actor")
    milepost.merge(role, tmp_path / "wide", model=MERGE)
    milepost.merge(role, tmp_path / "narrow", model=MERGE, memory_limit="1kB")
    wide, narrow = weights(tmp_path / "wide"), weights(tmp_path / "narrow")
    assert all(torch.equal(narrow[name], value) for name, value in wide.items())


def test_dora_of_a_bfloat16_base_is_rounded_once(tmp_path: Path) -> None:
    """PEFT rounds the sum, the norm and the quotient, each to bfloat16; here float32 is rounded once, at the end."""
    torch.manual_seed(7)
    settings = {"use_dora": True, "target_modules": ["q_proj"]}
    model, role = checkpoint(llama().bfloat16(), settings, tmp_path / "actor")
    milepost.merge(role, tmp_path / "out", model=MERGE)
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    whole = layer.base_layer.weight.double() + 6.5 / 4 * (b @ a)
    whole *= (layer.lora_magnitude_vector["default"].weight.double() / whole.norm(dim=1))[:, None]
    merged = weights(tmp_path / "out")["model.layers.1.self_attn.q_proj.weight"]
    assert merged.dtype == torch.bfloat16
    half_step = torch.exp2(whole.abs().log2().floor() - 8)
    assert ((merged.double() - whole).abs() <= half_step * 1.001).all()


def test_the_tensors_alone_say_which_parameters_have_an_adapter(tmp_path: Path) -> None:
    torch.manual_seed(7)
    settings = {"r": 2, "target_modules": ["q_proj"], "target_parameters": EXPERTS}
    model, role = checkpoint(qwen3_moe(), settings, tmp_path / "actor")
    (role / "huggingface" / "adapter_config.json").write_text('{"lora_alpha": 6.5}')
    milepost.merge(role, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "lora_adapter" / "adapter_config.json").read_text())
    every = [f"model.layers.{layer}.{name}" for layer in range(2) for name in EXPERTS]
    assert config["r"] == 2 and config["rank_pattern"] == {}
    assert config["target_parameters"] == sorted(every) and config["target_modules"] == ["q_proj"]
    from peft import AutoPeftModelForCausalLM

    with torch.no_grad():
        loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out" / "lora_adapter").eval()
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "settings", "says"),
    [
        (gpt_oss, {"target_modules": [], "target_parameters": ["experts.down_proj"]}, "stack of squares"),
        (lambda: qwen2(tie_word_embeddings=True), {"target_modules": ["embed_tokens"]}, "are one tensor"),
        (llama, {"target_modules": ["q_proj"], "alora_invocation_tokens": [1]}, "invocation tokens"),
        (llama, {"target_modules": ["q_proj"], "trainable_token_indices": [1]}, "single tokens"),
        (llama, {"target_modules": ["q_proj"], "kasa": True}, "lora_diag is of another kind"),
        (llama, {"target_modules": ["q_proj"], "lora_bias": True}, r"has no bias model\.layers\.0"),
    ],
    ids=["squares", "tied", "alora", "tokens", "kasa", "no bias"],
)
def test_what_cannot_be_merged_is_refused_by_name(
    make: Callable[[], Any], settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    if settings.pop("kasa", False):
        from peft import KasaConfig

        settings["kasa_config"] = KasaConfig()
    _, role = checkpoint(make(), settings, tmp_path / "actor")
    with pytest.raises(MismatchError, match=says):
        milepost.merge(role, tmp_path / "out", model=MERGE)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["use_qalora", "use_bdlora", "monteclora_config", "arrow_config"])
def test_kinds_that_are_more_than_a_product_are_refused_by_name(key: str, tmp_path: Path) -> None:
    _, role = checkpoint(llama(), {"target_modules": ["q_proj"]}, tmp_path / "actor")
    path = role / "huggingface" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: {"a": 1}}))
    with pytest.raises(MismatchError, match=rf"{key}.*--lora keep"):
        milepost.merge(role, tmp_path / "out", model=MERGE)
