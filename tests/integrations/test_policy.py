"""The policy out of a wrapper under real engines on two ranks, loaded where there is no engine."""

from __future__ import annotations

import json
import locale
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations import saved_policies
from integrations.saved_policies import FAMILIES, IDS, METHODS
from ranks import run_ranks

import milepost
from milepost.errors import CallError, MismatchError
from milepost.layouts import open_directory
from milepost.layouts.huggingface import read_safetensors

pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("policies")


@pytest.fixture(scope="module")
def ranks(base: Path) -> list[dict[str, Any]]:
    return run_ranks(saved_policies.scenarios, 2, base)


@pytest.fixture(scope="module")
def said(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return ranks[0]


def load(directory: Path, auto: str = "AutoModelForCausalLM") -> Any:
    """The model there, with nothing missing and nothing left over."""
    import transformers

    model, info = getattr(transformers, auto).from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: entry.read() for name, entry in open_directory(directory, "huggingface").items()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        value.dtype == theirs[name].dtype and torch.equal(value, theirs[name]) for name, value in ours.items()
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_policy_loads_and_says_what_the_live_one_said(family: str, base: Path, said: dict[str, Any]) -> None:
    directory = base / family / "later"
    held = said[family]["policy"]
    wanted = {name: value for name, value in held.items() if not (FAMILIES[family] and name == "lm_head.weight")}
    assert same(tensors(directory), wanted)
    model = load(directory)
    assert model.dtype == torch.bfloat16
    assert model.config.architectures == [type(model).__name__] == [f"{family.capitalize()}ForCausalLM"]
    check_logits(model, said[family], bias=family == "qwen2")


def check_logits(model: Any, live: dict[str, Any], *, bias: bool) -> None:
    """Bit for bit what a model of the live weights says, and what the live engine itself said.

    ZeRO-3 replaces torch's linear layer by one that rounds once more before it adds a bias: there within that rounding.
    """
    twin = type(model)(model.config).to(model.dtype).eval()
    twin.load_state_dict(live["policy"])
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
        assert torch.equal(logits, twin(input_ids=IDS).logits)
    if bias:
        torch.testing.assert_close(logits, live["logits"], rtol=2**-7, atol=2**-5)
    else:
        assert torch.equal(logits, live["logits"])


@pytest.mark.parametrize("family", FAMILIES)
def test_three_ways_give_one_file(family: str, base: Path, said: dict[str, Any]) -> None:
    for suffix, count in (
        ("", len(said[family]["policy"]) - FAMILIES[family]),
        ("_value", 21 + 6 * (family == "qwen2")),
    ):
        stream, gather, direct = (tensors(base / family / f"{method}{suffix}") for method in METHODS)
        assert len(stream) == count
        assert same(stream, gather)
        assert same(stream, direct)
    before = tensors(base / family / "stream")
    assert not same(before, tensors(base / family / "later"))  # a step lies between


@pytest.mark.parametrize("family", FAMILIES)
def test_the_value_model_is_one_of_its_own(family: str, base: Path, said: dict[str, Any]) -> None:
    directory = base / family / "stream_value"
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == [f"{family.capitalize()}ForSequenceClassification"]
    model = load(directory, "AutoModelForSequenceClassification")
    assert model.config.num_labels == 1
    assert model.score.weight.shape == (1, 16)
    assert set(tensors(directory)) == set(said[family]["value_model"])


def test_files_are_cut_where_asked_and_the_tokenizer_lies_beside(base: Path, said: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    files = sorted((base / "shards").glob("model-*.safetensors"))
    assert len(files) > 2
    assert all(path.stat().st_size < 2500 + 2000 for path in files)
    load(base / "shards")
    assert same(tensors(base / "shards"), tensors(base / "inside") | said["mistral"]["policy"])
    assert AutoTokenizer.from_pretrained(base / "shards").vocab_size == 33


def test_a_dtype_other_than_the_model_has(base: Path, said: dict[str, Any]) -> None:
    masters = said["masters"]
    assert {value.dtype for value in masters.values()} == {torch.float32}
    assert same(tensors(base / "masters"), masters)
    # more than the 16-bit weights tell: some bits below theirs are set
    assert any(not torch.equal(value, value.bfloat16().float()) for value in masters.values())
    assert load(base / "masters").dtype == torch.float32
    half = tensors(base / "half")
    assert same(half, {name: value.half() for name, value in said["mistral"]["policy"].items()})


@pytest.mark.parametrize("name", ["zero2", "zero1", "zero3_fp32"])
def test_the_same_line_under_other_stages(name: str, base: Path, said: dict[str, Any]) -> None:
    wanted = {key: value for key, value in said[name]["policy"].items() if key != "lm_head.weight"}
    for method in METHODS:
        assert same(tensors(base / name / method), wanted)
    masters = said[f"{name}_masters"] if name == "zero2" else {key: value.float() for key, value in wanted.items()}
    assert same(tensors(base / name / "fp32"), masters)
    check_logits(load(base / name / "stream"), said[name], bias=True)


def test_the_same_line_without_deepspeed(base: Path, said: dict[str, Any]) -> None:
    assert same(tensors(base / "ddp"), said["ddp"])
    for method in METHODS:
        assert same(tensors(base / "fsdp2" / method), said["fsdp2"])
    load(base / "fsdp2" / "stream")


def test_experts_and_buffers_have_the_form_of_the_files(base: Path) -> None:
    stream, gather, direct = (tensors(base / "moe" / method) for method in METHODS)
    assert same(stream, direct)  # what transformers itself writes
    assert same(stream, gather)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert stream[name].abs().max() > 0
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in stream
    load(base / "moe" / "stream")


def test_a_value_head_is_saved_beside_its_model(base: Path, said: dict[str, Any]) -> None:
    """At step 0 and after training, and the two differ."""
    for when in ("before", "after"):
        held = {name.removeprefix("pretrained_model."): value for name, value in said[f"head_{when}"].items()}
        assert same(tensors(base / f"head_{when}"), held)
    before, after = tensors(base / "head_before"), tensors(base / "head_after")
    head = [name for name in before if name.startswith("v_head.")]
    assert len(head) == 2
    assert all(torch.equal(after[name], before[name] + 0.5) for name in head)
    assert same(tensors(base / "head_direct"), before)
    assert same(tensors(base / "head_policy"), {name: value for name, value in before.items() if name not in head})
    load(base / "head_policy")


def test_an_adapter_is_saved_as_peft_saves_it(base: Path, said: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")

    ours, theirs = (
        {name: entry.read() for name, entry in read_safetensors(base / place / "adapter_model.safetensors").items()}
        for place in ("adapter", "adapter_by_peft")
    )
    assert len(ours) == 8  # A and B of two matrices in each of two layers
    assert same(ours, theirs)
    assert not (base / "adapter" / "model.safetensors").exists()
    model = peft.PeftModel.from_pretrained(saved_policies.models("llama")[0], base / "adapter")
    assert same({name: value for name, value in model.state_dict().items() if "lora_" in name}, said["adapted"])


def test_a_call_on_one_rank_fails_within_seconds_and_names_the_others(ranks: list[dict[str, Any]], base: Path) -> None:
    kind, text, seconds = ranks[0]["alone"]
    assert kind == "CallError"
    assert text == (
        "save_policy: rank 1 of 2 did not come within 1 second; every rank must make this call, so do not put it under "
        "`if rank == 0`"
    )
    assert seconds < 10
    assert not (base / "alone").exists()


@pytest.mark.parametrize("method", METHODS)
def test_a_full_disk_on_rank_0_raises_on_all(method: str, ranks: list[dict[str, Any]], base: Path) -> None:
    for said in ranks:
        kind, text, seconds = said[f"full_{method}"]
        assert kind == "WriteError"
        assert text.startswith(f"{base / 'full'}: was not saved: rank 0: ")
        assert "File too large" in text
        assert seconds < 10
    assert not (base / "full").exists()
    assert not list(base.glob(".*"))  # nothing is left beside it either


def test_what_cannot_be_served_is_said_on_all_ranks(ranks: list[dict[str, Any]], base: Path) -> None:
    for said in ranks:
        assert said["places"][:2] == (
            "CallError",
            f"the ranks were given different folders: rank 0 {base}/place0, rank 1 {base}/place1; all must save to the "
            "same one",
        )
        assert "has no part 'actor.'; it has policy., value_model., critic_backbone.; give one" in said["prefix"][1]
        assert said["occupied"][0] == "WriteError"
        assert "is not empty" in said["occupied"][1]
        assert "needs DeepSpeed's engine, and this is the Wrapper inside it" in said["inside"][1]
        assert "the 16-bit weights only" in said["fp32"][1]
    assert not (base / "no").exists()


def test_in_one_process_a_placeholder_is_refused_by_name(tmp_path: Path) -> None:
    module = saved_policies.Wrapper(*saved_policies.models("llama"))
    with pytest.raises(CallError, match=r"choose from stream, gather, direct"):
        milepost.save_policy(module, tmp_path / "a", method="copy")
    module.policy.lm_head.weight = torch.nn.Parameter(torch.empty(0))
    with pytest.raises(CallError, match=r"policy\.lm_head\.weight has no values here \(shape \[0\]\)"):
        milepost.save_policy(module, tmp_path / "b")
    assert not list(tmp_path.iterdir())


def test_tensors_that_are_not_the_configs_are_refused(tmp_path: Path) -> None:
    module = saved_policies.Wrapper(*saved_policies.models("llama"))
    module.policy.config.num_hidden_layers = 3
    with pytest.raises(milepost.CheckpointError, match=r"missing: model\.layers\.2\.\*"):
        milepost.save_policy(module, tmp_path / "a")
    module = saved_policies.Wrapper(*saved_policies.models("qwen2"))
    module.policy.lm_head.weight = torch.nn.Parameter(module.policy.lm_head.weight.detach().clone())
    with pytest.raises(
        MismatchError, match=r"are two tensors in memory, but the model's config says that they are one"
    ):
        milepost.save_policy(module, tmp_path / "b")


def test_a_locale_that_is_not_utf_8(tmp_path: Path) -> None:
    module = saved_policies.Wrapper(*saved_policies.models("qwen2"))
    module.policy.config.id2label = {0: "好"}
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    try:
        milepost.save_policy(module, tmp_path / "out")
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    assert json.loads((tmp_path / "out" / "config.json").read_bytes())["id2label"] == {"0": "好"}


def test_in_one_process_an_export_is_replaced_only_when_asked(tmp_path: Path) -> None:
    module = saved_policies.Wrapper(*saved_policies.models("qwen2"))
    report = milepost.save_policy(module, tmp_path / "out", max_shard_size=3000)
    assert report.tensors == 26
    assert report.nbytes == sum(value.nbytes for value in tensors(tmp_path / "out").values())
    report = milepost.save_policy(module, tmp_path / "out", overwrite=True)
    assert report.files == ("config.json", "generation_config.json", "model.safetensors")
