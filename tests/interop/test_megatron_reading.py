"""What megatron-core itself wrote, read without it: every form and parallel layout, against the Hugging Face weights
that the models were filled with."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core")

import megatron_checkpoints as writer
import megatron_cpu
import torch
from ranks import run_ranks
from safetensors.torch import load_file

import milepost
from milepost.cli.app import run as run_command
from milepost.errors import CheckpointError, IncompleteError, MismatchError
from milepost.index import TensorIndex
from milepost.jobs.prepare import ModelOptions, prepare
from milepost.layouts import find_layout, open_directory
from milepost.layouts.huggingface import read_safetensors
from milepost.mapping import names

Written = tuple[Path, list[dict[str, float]]]
FORMS = [
    pytest.param(name, form, id=f"{name}-{form}")
    for name, case in writer.CASES.items()
    for form in ("model", "dist_ckpt")
    if not case.moments and (form == "model" or case.dist is not None)
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The folder of all cases, and the differences of logits that each rank found. Read only."""
    root = tmp_path_factory.mktemp("megatron")
    writer.make_models(root)
    return root, run_ranks(writer.write_all, 4, str(root))


@pytest.fixture
def root(written: Written) -> Path:
    return written[0]


def bits_of(index: TensorIndex) -> dict[str, tuple[str, bytes]]:
    return {name: (entry.dtype, entry.bits().tobytes()) for name, entry in index.items()}


def reference(root: Path, model: str) -> dict[str, tuple[str, bytes]]:
    return bits_of(TensorIndex(read_safetensors(root / "models" / model / "model.safetensors"), "huggingface"))


def role_of_one_form(root: Path, case: str, form: str, tmp_path: Path) -> Path:
    """A role directory with one form alone, as a trainer leaves it."""
    role = tmp_path / "global_step_7" / "actor"
    role.mkdir(parents=True)
    for part in (form, "huggingface"):
        (role / part).symlink_to(root / case / part)
    return role


def test_the_models_compute_what_transformers_computes(written: Written) -> None:
    """The oracle of the oracle: Megatron's logits with these weights are transformers', on every rank."""
    for differences in written[1]:
        assert set(differences) == set(writer.LOGITS)
        assert max(differences.values()) < 1e-5


@pytest.mark.parametrize(("case", "form"), FORMS)
def test_merged_is_bitwise_what_the_model_was_filled_with(root: Path, case: str, form: str, tmp_path: Path) -> None:
    role = role_of_one_form(root, case, form, tmp_path)
    model = writer.CASES[case].model
    report = milepost.merge(
        tmp_path / "global_step_7", tmp_path / "out", backend="auto" if form == "model" else "megatron"
    )
    merged = TensorIndex(read_safetensors(tmp_path / "out" / "model.safetensors"), "huggingface")
    assert bits_of(merged) == reference(root, model)
    assert report.tensors == len(merged)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    wanted = "LlamaForTokenClassification" if model == "critic" else None
    assert wanted is None or config["architectures"] == [wanted]
    assert find_layout(role) is not None


def test_no_megatron_no_torch_and_no_process_group_is_needed(root: Path, tmp_path: Path) -> None:
    """In a process that cannot import them."""
    program = (
        "import sys\n"
        "for name in ('megatron', 'torch', 'transformer_engine'): sys.modules[name] = None\n"
        "from milepost.cli import main\nmain()"
    )
    for form in ("model", "dist_ckpt"):
        role = role_of_one_form(root, "mixtral-tp2ep2", form, tmp_path / form)
        command = [
            sys.executable,
            "-c",
            program,
            "merge",
            "-q",
            "--backend",
            "megatron",
            str(role),
            str(tmp_path / f"out-{form}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_critic_under_its_policys_config_loads_as_a_value_model(root: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForTokenClassification

    options = ModelOptions(hf_model_path=root / "critic-tp2pp2" / "huggingface", is_value_model=True)
    milepost.merge(root / "critic-tp2pp2" / "model", tmp_path / "out", model=options)
    model, info = AutoModelForTokenClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    assert torch.equal(model.score.weight, load_file(root / "models" / "critic" / "model.safetensors")["score.weight"])


def test_a_policy_is_no_value_model(root: Path) -> None:
    options = ModelOptions(hf_model_path=root / "llama-tp4" / "huggingface", is_value_model=True)
    with pytest.raises(MismatchError, match="this is no value model"):
        prepare(root / "llama-tp4" / "model", options=options)


def test_moments_and_masters_go_the_way_of_their_weights(root: Path) -> None:
    """exp_avg was half of each weight and exp_avg_sq its square, masters the weight itself."""
    for case in (name for name, case in writer.CASES.items() if case.moments):
        model = writer.CASES[case].model
        directory = root / case / "dist_ckpt"
        config = json.loads((root / case / "huggingface" / "config.json").read_text())
        mapped = names.to_huggingface(open_directory(directory), config).index
        weights = load_file(root / "models" / model / "model.safetensors")
        assert set(mapped) == {
            n for w in weights for n in (w, *(f"optim/{w}/{m}" for m in ("param", "exp_avg", "exp_avg_sq")))
        }
        for name, weight in weights.items():
            assert torch.equal(mapped[name].read(), weight.bfloat16()), name
            for moment, value in (("param", weight), ("exp_avg", weight * 0.5), ("exp_avg_sq", weight.square())):
                assert torch.equal(mapped[f"optim/{name}/{moment}"].read(), value), (name, moment)


@pytest.mark.parametrize("case", [name for name, case in writer.CASES.items() if case.buckets])
def test_buckets_of_the_distributed_optimizer_are_given_back_to_their_weights(root: Path, case: str) -> None:
    """Values as above. Every layout has another order, so these are whole models of every kind on real ranks."""
    config = json.loads((root / case / "huggingface" / "config.json").read_text())
    index = open_directory(root / case / "buckets")
    assert index.unread == ()
    for name, entry in index.items():
        entry.check_tiling(name)
    mapped = names.to_huggingface(index, config).index
    weights = load_file(root / "models" / writer.CASES[case].model / "model.safetensors")
    trained = {name for name in weights if not name.endswith("e_score_correction_bias")}
    moments = ("param", "exp_avg", "exp_avg_sq", "step")
    assert set(mapped) == set(weights) | {f"optim/{name}/{moment}" for name in trained for moment in moments}
    for name in trained:
        weight = weights[name]
        assert torch.equal(mapped[name].read(), weight.bfloat16()), name
        for moment, value in (("param", weight), ("exp_avg", weight * 0.5), ("exp_avg_sq", weight.square())):
            assert torch.equal(mapped[f"optim/{name}/{moment}"].read(), value), (name, moment)
        assert mapped[f"optim/{name}/step"].numpy() == writer.STEP
    assert {group["lr"] for group in index.objects["param_groups"]} == {0.1}


def test_merge_says_which_copy_is_taken_and_what_is_left_out(root: Path) -> None:
    options = ModelOptions(hf_model_path=root / "llama-moments" / "huggingface")
    notes = prepare(root / "llama-moments" / "dist_ckpt", options=options).notes
    assert any("took the model's own weights (bfloat16)" in note and "(float32)" in note for note in notes)
    assert any(note.startswith("left out: 16 _extra_state entries") for note in notes)
    assert any("64 rows to 33" in note for note in notes)


def test_the_commands_on_a_run_of_megatron_lm(root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`iter_0000007/` beside its tracker, without a config of Hugging Face's."""

    def call(*arguments: str | Path) -> str:
        status = run_command([str(argument) for argument in arguments])
        shown = capfd.readouterr()
        assert status == 0, shown.err
        return shown.out

    run = tmp_path / "run"
    for step, form, case in ((6, "dist_ckpt", "llama-tp2pp2"), (7, "model", "llama-pp2vpp2")):
        shutil.copytree(root / case / form, run / f"iter_{step:07d}")
    (run / "latest_checkpointed_iteration.txt").write_text("7")
    model = root / "models" / "llama"
    merged = json.loads(call("merge", run, tmp_path / "out", "--hf_model_path", model, "--json"))
    assert (merged["step"], merged["layout"]) == (7, "megatron")
    for directory in (run, run / "iter_0000006"):
        assert call("test", directory, model, "--backend", "megatron").startswith("equal: 39 tensors")
    for options in ([], ["--deep"]):
        for directory in (run / "iter_0000006", run / "iter_0000007", run):
            call("verify", directory, *options)
    shown = call("inspect", run / "iter_0000006")
    assert "layout megatron" in shown and "16 _extra_state entries" in shown


def test_a_byte_that_was_altered_is_found_by_deep_verify(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for form, pattern in (("model", "mp_rank_01_000/*.pt"), ("dist_ckpt", "__1_0.distcp")):
        copy = tmp_path / form
        shutil.copytree(root / "llama-tp2pp2" / form, copy)
        (file,) = copy.glob(pattern)
        chunks = (c for entry in open_directory(copy).values() for c in entry.chunks if c.source.file == str(file))
        content = bytearray(file.read_bytes())
        content[next(chunks).source.start()] ^= 0xFF
        file.write_bytes(content)
        assert run_command(["verify", "--deep", str(copy)]) == 1
        assert "CRC-32" in capfd.readouterr().out


def test_a_config_beside_the_parts_takes_no_part_with_it(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "llama-tp2pp2" / "dist_ckpt", tmp_path / "iter_0000001")
    shutil.copy(root / "llama-tp2pp2" / "huggingface" / "config.json", tmp_path / "iter_0000001")
    milepost.merge(tmp_path / "iter_0000001", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}


def test_every_run_folder_of_verl_is_recognised(root: Path, tmp_path: Path) -> None:
    """verl 0.4 to 0.8, and 0.9, whose optimizer and config lie in folders of their own."""
    old, new = tmp_path / "old" / "global_step_3" / "actor", tmp_path / "new" / "global_step_3" / "actor"
    shutil.copytree(root / "llama-tp2pp2" / "dist_ckpt", old / "dist_ckpt")
    shutil.copytree(root / "llama-tp2pp2" / "huggingface", old / "huggingface")
    shutil.copytree(root / "llama-moments" / "apart", new)
    shutil.copytree(root / "llama-moments" / "huggingface", new / "model" / "huggingface")
    for role in (old, new):
        milepost.merge(role.parent, role.parent / "out")
    merged = TensorIndex(read_safetensors(old.parent / "out" / "model.safetensors"), "huggingface")
    assert bits_of(merged) == reference(root, "llama")
    weights = load_file(root / "models" / "llama" / "model.safetensors")
    for name, value in load_file(new.parent / "out" / "model.safetensors").items():
        assert torch.equal(value, weights[name].bfloat16())

    index = open_directory(new)
    config = json.loads((new / "model" / "huggingface" / "config.json").read_text())
    mapped = names.to_huggingface(index, config).index
    for name, weight in weights.items():
        assert torch.equal(mapped[f"optim/{name}/exp_avg"].read(), weight * 0.5), name
        assert torch.equal(mapped[f"optim/{name}/exp_avg_sq"].read(), weight.square()), name
        assert mapped[f"optim/{name}/step"].numpy() == writer.STEP
    assert [(group["lr"], group["step"]) for group in index.objects["param_groups"]] == [(0.1, writer.STEP)]


def test_optimizer_without_weights_says_so(root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Case 73: verl since 0.6 keeps the weights as a Hugging Face model and only the optimizer as dist checkpoint."""
    from torch.distributed import checkpoint as dcp

    role = tmp_path / "actor"
    keys = {"optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight": torch.ones(4, 16, 24)}
    dcp.save(keys, checkpoint_id=role / "dist_ckpt", no_dist=True)
    shutil.copytree(root / "models" / "llama", role / "huggingface")
    with pytest.raises(IncompleteError, match=r"holds no weights.*huggingface"):
        milepost.merge(role, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert run_command(["inspect", str(role), "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert (facts["tensors"], facts["moments"]) == (0, 1)


def test_another_models_config_is_refused_before_anything_is_written(root: Path, tmp_path: Path) -> None:
    """Case 74, and its neighbours: hidden size, heads, layers, vocabulary, experts, another family."""
    for case, change, message in (
        ("llama-tp2pp2", {"hidden_size": 32}, r"config\.json|shape"),
        ("llama-tp2pp2", {"num_key_value_heads": 4}, "4 groups of 1 queries"),
        ("llama-tp2pp2", {"num_hidden_layers": 5}, "speak of 4 layers, .* of 5|5 layers"),
        ("llama-tp2pp2", {"vocab_size": 65}, "cannot take 0:65"),
        ("mixtral-ep2", {"num_local_experts": 8}, "8 experts|missing"),
        ("llama-tp2pp2", {"model_type": "olmo2"}, "which milepost knows for"),
    ):
        config: dict[str, Any] = json.loads((root / case / "huggingface" / "config.json").read_text()) | change
        companions = tmp_path / f"{case}-{next(iter(change))}"
        companions.mkdir()
        (companions / "config.json").write_text(json.dumps(config))
        for form in ("model", "dist_ckpt"):
            with pytest.raises((MismatchError, IncompleteError), match=message):
                milepost.merge(root / case / form, tmp_path / "out", model=ModelOptions(hf_model_path=companions))
            assert not (tmp_path / "out").exists()


def test_a_missing_rank_is_said(root: Path, tmp_path: Path) -> None:
    for case, gone, message in (
        ("llama-tp2pp2", "mp_rank_01_000", "tensor-parallel rank 1 of pipeline rank 0"),
        ("mixtral-ep2", "mp_rank_00_000", "expert-parallel rank 0"),
        ("llama-pp2vpp2", "mp_rank_00_000", "pipeline rank 0"),
    ):
        copy = tmp_path / case
        shutil.copytree(root / case, copy, ignore=shutil.ignore_patterns("dist_ckpt"))
        shutil.rmtree(copy / "model" / gone)
        with pytest.raises(IncompleteError, match=message):
            milepost.merge(copy, tmp_path / "out")


def test_what_ranks_hold_alike_must_be_alike(root: Path, tmp_path: Path) -> None:
    """A norm that every tensor-parallel rank holds, and a dense weight that expert-parallel ranks repeat."""
    for case, rank, name in (
        ("llama-tp2pp2", "mp_rank_01_000", "decoder.layers.0.input_layernorm.weight"),
        ("mixtral-ep2", "mp_rank_00_001", "decoder.layers.1.self_attention.linear_proj.weight"),
    ):
        copy = tmp_path / case
        shutil.copytree(root / case, copy, ignore=shutil.ignore_patterns("dist_ckpt"))
        file = copy / "model" / rank / "model_optim_rng.pt"
        state = torch.load(file, weights_only=False)
        state["model"][name] = state["model"][name] + 1
        torch.save(state, file)
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.") + ".*differ"):
            milepost.merge(copy, tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not megatron_cpu.GROUPED, reason="this megatron-core has no GroupedMLP any more")
def test_grouped_experts_are_those_of_megatrons_own_class(root: Path) -> None:
    """GroupedMLP keeps the experts of a rank turned, in one tensor, in classic files, and writes them one by one and
    turned back into a dist checkpoint; both were merged above, so what the reader makes of the one is the other."""
    files = sorted((root / "qwen3_moe-grouped" / "model").glob("*/model_optim_rng.pt"))
    assert len(files) == 4
    state = torch.load(files[0], weights_only=False)
    shapes = {n: tuple(v.shape) for n, v in state["model"].items() if n.startswith("decoder.layers.1.mlp.experts")}
    width = 2 * 8 // 2  # two experts on a rank, a matrix over two
    assert shapes == {
        "decoder.layers.1.mlp.experts.weight1": (16, 2 * width),
        "decoder.layers.1.mlp.experts.weight2": (width, 16),
    }


def test_chunks_are_read_by_slices_and_not_gathered(root: Path) -> None:
    """Mapping moves no byte: every chunk of a merged tensor is a place in a file that Megatron wrote."""
    options = ModelOptions(hf_model_path=root / "llama-tp2pp2" / "huggingface")
    model = prepare(root / "llama-tp2pp2" / "dist_ckpt", options=options)
    files = {str(path) for path in (root / "llama-tp2pp2" / "dist_ckpt").iterdir()}
    assert {chunk.source.file for entry in model.index.values() for chunk in entry.chunks} <= files
    gate = model.index["model.layers.2.mlp.gate_proj.weight"]
    assert [chunk.box.sizes for chunk in gate.chunks] == [(12, 16), (12, 16)]
    assert np.isfinite(gate.numpy()).all()
