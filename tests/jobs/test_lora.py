"""LoRA runs, against PEFT: its own files, its own merge, and the logits of what it loads."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from wrapped import FRACTION, LARGE, PATTERNS

import milepost
from milepost.errors import CallError, DamagedError, MismatchError, NotFoundError
from milepost.jobs.prepare import ModelOptions

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")

MERGE = ModelOptions(lora="merge")
FLOAT32 = 2.0**-24  # largest relative error of one rounding


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def adapter(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    config = json.loads((directory / "adapter_config.json").read_text())
    return load_file(directory / "adapter_model.safetensors"), config


def peft_model(case: Path) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(case / "base"), case / "peft")


@pytest.fixture
def copied(wrapped: Path, tmp_path: Path) -> Path:
    """A copy of the run whose settings only verl's file tells, to be altered."""
    shutil.copytree(wrapped / "large", tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("case", ["fraction", "patterns", "critic", "dora", "bf16"])
def test_kept_adapter_is_what_peft_saves(wrapped: Path, tmp_path: Path, case: str) -> None:
    milepost.merge(wrapped / case / "actor", tmp_path / "out")
    base, clean = weights(wrapped / case / "base"), weights(tmp_path / "out")
    assert clean.keys() == base.keys()
    assert all(torch.equal(clean[name], value) for name, value in base.items())
    ours, config = adapter(tmp_path / "out" / "lora_adapter")
    theirs, their_config = adapter(wrapped / case / "peft")
    # PEFT adds the base's embeddings to an adapter of them; here they lie in the base beside it.
    theirs = {name: value for name, value in theirs.items() if "base_layer" not in name}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    for key in ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "task_type", "peft_type"):
        assert config[key] == their_config[key], key
    for key in ("target_modules", "modules_to_save"):
        assert sorted(config[key] or ()) == sorted(their_config[key] or ()), key
    assert config["base_model_name_or_path"] == str(tmp_path / "out")
    assert not (tmp_path / "out" / "adapter_config.json").exists()


@pytest.mark.parametrize("case", ["fraction", "patterns", "dora"])
def test_peft_loads_the_kept_adapter_with_equal_logits(wrapped: Path, tmp_path: Path, case: str) -> None:
    from peft import AutoPeftModelForCausalLM

    milepost.merge(wrapped / case / "actor", tmp_path / "out")
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        theirs = peft_model(wrapped / case)(ids).logits
        ours = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out" / "lora_adapter")(ids).logits
    assert torch.equal(ours, theirs)


def test_h76_settings_survive(wrapped: Path, tmp_path: Path) -> None:
    milepost.merge(wrapped / "fraction" / "actor", tmp_path / "fraction")
    _, config = adapter(tmp_path / "fraction" / "lora_adapter")
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 0.5, True)
    milepost.merge(wrapped / "bf16" / "actor", tmp_path / "large")
    _, config = adapter(tmp_path / "large" / "lora_adapter")
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (8, 32, True)


@pytest.mark.parametrize("case", ["fraction", "patterns"])
def test_h77_merged_is_pefts_merge_up_to_the_order_of_its_sums(wrapped: Path, tmp_path: Path, case: str) -> None:
    """Both compute in float32 and round r products, their sum, the scale and the last sum; only the order in which a
    library adds r products differs. Each result is within (r + 2) roundings of |W| + scale * |B| @ |A|."""
    report = milepost.merge(wrapped / case / "actor", tmp_path / "out", model=MERGE)
    merged = weights(tmp_path / "out")
    base = weights(wrapped / case / "base")
    theirs = peft_model(wrapped / case).merge_and_unload().state_dict()
    theirs = {name: theirs[name] for name in base}
    assert merged.keys() == base.keys() and report.tensors == len(base)
    settings = {"fraction": FRACTION, "patterns": PATTERNS}[case]
    bounds = _magnitudes(wrapped / case, settings)
    changed = 0
    for name, value in merged.items():
        bound = 2 * (settings["r"] + 2) * FLOAT32 * bounds.get(name, torch.zeros(()))
        assert ((value - theirs[name]).abs() <= bound).all(), name
        changed += not torch.equal(value, base[name])
    assert changed == len(bounds) == {"fraction": 4, "patterns": 16}[case]
    assert not any(part in name for name in merged for part in ("base_model", "base_layer", "lora_", "modules_to_save"))
    # the adapter is gone: what it says is in the weights once
    assert not (tmp_path / "out" / "lora_adapter").exists()


def _magnitudes(case: Path, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """|W| + scale * |B| @ |A| of every module with an adapter."""
    base = weights(case / "base")
    factors, _ = adapter(case / "peft")
    found = {}
    for name, a in factors.items():
        if ".lora_A." in name or name.endswith("lora_embedding_A"):
            module = name.removeprefix("base_model.model.").partition(".lora_")[0]
            b = factors[name.replace("lora_A", "lora_B").replace("lora_embedding_A", "lora_embedding_B")]
            product = b.abs() @ a.abs()
            alpha = settings.get("alpha_pattern", {}).get(module.rpartition(".")[2], settings["lora_alpha"])
            scale = alpha / (a.shape[0] ** 0.5 if settings.get("use_rslora") else a.shape[0])
            found[f"{module}.weight"] = base[f"{module}.weight"].abs() + scale * (
                product.T if "embedding" in name else product
            )
    return found


def test_bfloat16_is_rounded_once(wrapped: Path, tmp_path: Path) -> None:
    milepost.merge(wrapped / "bf16" / "actor", tmp_path / "out", model=MERGE)
    merged, base = weights(tmp_path / "out"), weights(wrapped / "bf16" / "base")
    factors, _ = adapter(wrapped / "bf16" / "peft")
    for module in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        a, b = (factors[f"base_model.model.{module}.lora_{kind}.weight"].double() for kind in "AB")
        exact = base[f"{module}.weight"].double() + 32 / 8**0.5 * (b @ a)
        half_step = torch.exp2(exact.abs().log2().floor() - 8)  # 8 significant bits
        error = (merged[f"{module}.weight"].double() - exact).abs()
        assert merged[f"{module}.weight"].dtype == torch.bfloat16
        assert (error <= half_step * 1.001 + 1e-5).all()


def test_the_result_does_not_depend_on_window_or_workers(wrapped: Path, tmp_path: Path) -> None:
    milepost.merge(wrapped / "patterns" / "actor", tmp_path / "wide", model=MERGE)
    milepost.merge(wrapped / "patterns" / "actor", tmp_path / "narrow", model=MERGE, memory_limit="1kB")
    wide, narrow = weights(tmp_path / "wide"), weights(tmp_path / "narrow")
    assert all(torch.equal(narrow[name], value) for name, value in wide.items())


def test_cast_comes_after_the_merge(wrapped: Path, tmp_path: Path) -> None:
    milepost.merge(wrapped / "fraction" / "actor", tmp_path / "keep", model=MERGE)
    milepost.merge(wrapped / "fraction" / "actor", tmp_path / "bf16", model=MERGE, dtype="bf16")
    kept, cast = weights(tmp_path / "keep"), weights(tmp_path / "bf16")
    assert all(torch.equal(cast[name], value.bfloat16()) for name, value in kept.items())


def test_modules_trained_whole_replace_the_originals(wrapped: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForTokenClassification

    milepost.merge(wrapped / "critic" / "actor", tmp_path / "out", model=MERGE)
    factors, _ = adapter(wrapped / "critic" / "peft")
    assert torch.equal(weights(tmp_path / "out")["score.weight"], factors["base_model.model.score.weight"])
    _, info = AutoModelForTokenClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info


def test_compare_knows_both_forms(wrapped: Path, tmp_path: Path) -> None:
    actor = wrapped / "fraction" / "actor"
    milepost.merge(actor, tmp_path / "merged", model=MERGE)
    milepost.merge(actor, tmp_path / "kept")
    assert milepost.test(actor, tmp_path / "merged", model=MERGE).ok
    report = milepost.test(actor, tmp_path / "kept")
    assert report.ok and report.tensors == len(weights(tmp_path / "kept")) + 8
    kinds = [d.kind for d in milepost.test(actor, tmp_path / "kept", model=MERGE).differences]
    assert sorted(kinds) == ["missing"] * 8 + ["value"] * 4
    names = {d.name for d in milepost.test(actor, tmp_path / "merged").differences if d.kind == "value"}
    assert len(names) == 4
    factors, _ = adapter(tmp_path / "kept" / "lora_adapter")
    file = tmp_path / "kept" / "lora_adapter" / "adapter_model.safetensors"
    from safetensors.torch import save_file

    first = next(iter(factors))
    save_file({**factors, first: factors[first] + 1}, file)
    assert [d.name for d in milepost.test(actor, tmp_path / "kept").differences] == [f"lora_adapter/{first}"]


# what files say of the training


def test_verls_file_gives_alpha_and_the_tensors_the_rank(wrapped: Path, tmp_path: Path) -> None:
    milepost.merge(wrapped / "large" / "actor", tmp_path / "out")
    _, config = adapter(tmp_path / "out" / "lora_adapter")
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (16, 32, "CAUSAL_LM")
    assert sorted(config["target_modules"]) == sorted(LARGE["target_modules"])
    theirs, _ = adapter(wrapped / "large" / "peft")
    ours, _ = adapter(tmp_path / "out" / "lora_adapter")
    assert all(torch.equal(ours[name], value) for name, value in theirs.items()) and ours.keys() == theirs.keys()


def test_a_file_without_a_useful_alpha_asks_for_it(copied: Path, tmp_path: Path) -> None:
    meta = copied / "actor" / "lora_train_meta.json"
    meta.write_text('{"r": 16, "lora_alpha": 0, "task_type": "CAUSAL_LM"}')  # what verl writes for 0.5
    with pytest.raises(CallError, match="--lora-alpha"):
        milepost.merge(copied / "actor", tmp_path / "out")
    meta.unlink()
    with pytest.raises(CallError, match="--lora-alpha"):
        milepost.merge(copied / "actor", tmp_path / "out", model=MERGE)
    milepost.merge(copied / "actor", tmp_path / "out", model=ModelOptions(lora_alpha=0.5))
    _, config = adapter(tmp_path / "out" / "lora_adapter")
    assert (config["r"], config["lora_alpha"]) == (16, 0.5)


def test_another_runs_file_is_refused(copied: Path, tmp_path: Path) -> None:
    (copied / "actor" / "lora_train_meta.json").write_text('{"r": 8, "lora_alpha": 32}')
    for options in (ModelOptions(), MERGE):
        with pytest.raises(MismatchError, match=r"rank 16.*say 8"):
            milepost.merge(copied / "actor", tmp_path / "out", model=options)
    for text in ('{"lora_alpha": "many"}', '{"r": 0}', '{"alpha_pattern": {"(": 1}}', '{"rank_pattern": 3}', "[]", "{"):
        (copied / "actor" / "lora_train_meta.json").write_text(text)
        with pytest.raises(DamagedError, match="lora_train_meta"):
            milepost.merge(copied / "actor", tmp_path / "out")
    (copied / "actor" / "adapter_config.json").write_text('{"peft_type": "LOHA"}')
    with pytest.raises(MismatchError, match="LOHA"):
        milepost.merge(copied / "actor", tmp_path / "out")


def test_dora_of_shards_is_pefts_merge(wrapped: Path, tmp_path: Path) -> None:
    milepost.merge(wrapped / "dora" / "actor", tmp_path / "out", model=MERGE)
    theirs = peft_model(wrapped / "dora").merge_and_unload().state_dict()
    merged, base = weights(tmp_path / "out"), weights(wrapped / "dora" / "base")
    for name, value in merged.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6)
    assert sum(not torch.equal(merged[name], value) for name, value in base.items()) == 2
    # the tensors say that it is DoRA, where no file does
    shutil.copytree(wrapped / "dora" / "actor", tmp_path / "actor")
    (tmp_path / "actor" / "huggingface" / "adapter_config.json").unlink()
    milepost.merge(tmp_path / "actor", tmp_path / "told", model=ModelOptions(lora="merge", lora_alpha=8))
    assert (tmp_path / "told" / "model.safetensors").read_bytes() == (
        tmp_path / "out" / "model.safetensors"
    ).read_bytes()


def test_one_use_of_a_tied_weight_is_not_merged_into_both(wrapped: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    base, model = weights(wrapped / "fraction" / "base"), tmp_path / "model"
    shutil.copytree(wrapped / "fraction" / "actor" / "huggingface", model)
    embedding = "base_model.model.model.embed_tokens"
    state = {f"base_model.model.{name}": value for name, value in base.items()}
    state[f"{embedding}.base_layer.weight"] = state.pop(f"{embedding}.weight")
    state |= {f"{embedding}.lora_embedding_A.default": torch.ones(4, 33)}
    state |= {f"{embedding}.lora_embedding_B.default": torch.ones(16, 4)}
    save_file(state, model / "model.safetensors")
    with pytest.raises(MismatchError, match="are one tensor"):
        milepost.merge(model, tmp_path / "out", model=MERGE)
    milepost.merge(model, tmp_path / "out")
    assert weights(tmp_path / "out").keys() == base.keys()


def test_an_adapter_alone_gets_its_base_from_the_models_directory(copied: Path, tmp_path: Path) -> None:
    for file in (copied / "actor").glob("*.pt"):
        state = torch.load(file, weights_only=False)
        torch.save({name: value for name, value in state.items() if "lora_" in name}, file)
    with pytest.raises(NotFoundError, match="--hf_model_path"):
        milepost.merge(copied / "actor", tmp_path / "out")
    milepost.merge(copied / "actor", tmp_path / "out", model=ModelOptions(hf_model_path=copied / "base", lora="merge"))
    milepost.merge(copied / "actor", tmp_path / "kept", model=ModelOptions(hf_model_path=copied / "base"))
    base, merged, kept = (weights(path) for path in (copied / "base", tmp_path / "out", tmp_path / "kept"))
    assert merged.keys() == base.keys() and all(torch.equal(kept[name], value) for name, value in base.items())
    assert sum(not torch.equal(merged[name], value) for name, value in base.items()) == 14


def test_modules_are_named_whole_where_their_last_part_says_too_much(copied: Path, tmp_path: Path) -> None:
    """An adapter on layer 0 alone, of which no file names the modules."""
    for file in (copied / "actor").glob("*.pt"):
        state = torch.load(file, weights_only=False)
        kept = {n: v for n, v in state.items() if not ("lora_" in n and ".layers.1." in n)}
        torch.save({n.replace(".base_layer", "") if ".layers.1." in n else n: v for n, v in kept.items()}, file)
    milepost.merge(copied / "actor", tmp_path / "out")
    factors, config = adapter(tmp_path / "out" / "lora_adapter")
    assert len(factors) == 14 and len(config["target_modules"]) == 7
    assert all(module.startswith("model.layers.0.") for module in config["target_modules"])
    from peft import AutoPeftModelForCausalLM

    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out" / "lora_adapter")
    assert sum("lora_" in name for name, _ in loaded.named_parameters()) == 14


def test_checksums_cover_the_adapter(wrapped: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from milepost.cli.app import run

    actor, out = str(wrapped / "fraction" / "actor"), str(tmp_path / "out")
    assert run(["merge", actor, out, "--checksum", "--lora", "keep"]) == 0
    assert run(["verify", out, "--deep"]) == 0
    assert run(["test", actor, out]) == 0
    with (tmp_path / "out" / "lora_adapter" / "adapter_model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xaa")
    assert run(["verify", out, "--deep"]) == 1
    assert run(["test", actor, out]) == 1
    assert run(["merge", actor, str(tmp_path / "merged"), "--lora", "mix"]) == 2
    capfd.readouterr()


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """128 MiB of bfloat16 and an adapter of rank 8 through windows within 32 MiB, without torch."""
    import subprocess
    import sys

    from safetensors.torch import save_file

    model = tmp_path / "model"
    model.mkdir()
    generator = torch.Generator().manual_seed(0)
    weight = torch.full((32768, 2048), 0.5, dtype=torch.bfloat16)
    a, b = torch.randn(8, 2048, generator=generator), torch.randn(32768, 8, generator=generator)
    name = "base_model.model.up"
    tensors = {
        f"{name}.base_layer.weight": weight,
        f"{name}.lora_A.default.weight": a,
        f"{name}.lora_B.default.weight": b,
    }
    save_file(tensors, model / "model.safetensors")
    (model / "config.json").write_text('{"model_type": "custom"}')
    program = (
        "import resource, sys, milepost\n"
        "from milepost.jobs.prepare import ModelOptions\n"
        "import milepost.jobs.lora\n"
        "start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "options = ModelOptions(lora='merge', lora_alpha=16)\n"
        "milepost.merge(sys.argv[1], sys.argv[2], memory_limit='32MiB', model=options)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start, 'torch' in sys.modules)"
    )
    call = [sys.executable, "-c", program, str(model), str(tmp_path / "out")]
    done = subprocess.run(call, check=True, capture_output=True, text=True, timeout=120)
    growth, torch_loaded = done.stdout.split()
    assert int(growth) * 1024 < 64 * 2**20
    assert torch_loaded == "False"
    merged = weights(tmp_path / "out")["up.weight"]
    assert torch.allclose(merged[::997].float(), 0.5 + 2 * (b[::997] @ a), rtol=2**-8, atol=1e-3)
