"""test --logits: the checkpoint and the reference are built with transformers and asked the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from milepost.cli.app import run


def call(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    status = run([str(argument) for argument in arguments])
    out, err = capfd.readouterr()
    return status, out, err


@pytest.fixture
def altered(zoo: Path, tmp_path: Path) -> Path:
    """The untied reference with one weight of its head moved by 0.5."""
    place = tmp_path / "reference"
    place.mkdir()
    for path in (zoo / "untied" / "reference").iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    weights = load_file(place / "model.safetensors")
    weights["lm_head.weight"][5, 3] += 0.5
    save_file(weights, place / "model.safetensors", {"format": "pt"})
    return place


@pytest.mark.parametrize("case", ["untied", "critic", "moe"])
def test_equal_weights_give_equal_logits(zoo: Path, capfd: pytest.CaptureFixture[str], case: str) -> None:
    status, out, err = call(capfd, "test", zoo / case / "actor", zoo / case / "reference", "--logits")
    assert status == 0, out + err
    assert out.endswith("\nlogits equal\n")
    status, out, _ = call(capfd, "test", zoo / case / "actor", zoo / case / "reference", "--logits", "--json")
    logits = json.loads(out)["logits"]
    # 16 tokens, each with a value for every word of the vocabulary, or with one value
    assert logits == {"elements": 0, "numel": 16 * (1 if case == "critic" else 33), "max_abs": 0.0, "max_rel": 0.0}


def test_different_logits_are_counted(zoo: Path, altered: Path, capfd: pytest.CaptureFixture[str]) -> None:
    role = zoo / "untied" / "actor"
    status, out, _ = call(capfd, "test", role, altered, "--logits", "--json")
    facts = json.loads(out)
    assert status == 1 and facts["ok"] is False
    # only word 5 has another logit, for each of the 16 tokens: by half of the hidden state's element 3
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(zoo / "untied" / "reference")
    ids = torch.tensor([[(7 * n + 3) % 33 for n in range(16)]])
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state[0, :, 3]
    assert facts["logits"]["elements"] == 16
    assert facts["logits"]["max_abs"] == pytest.approx(float(hidden.abs().max()) / 2, rel=1e-4)
    status, out, _ = call(capfd, "test", role, altered, "--logits")
    assert status == 1 and "logits 16 of 528 differ; largest difference" in out
    assert call(capfd, "test", role, altered, "--logits", "--atol", "100")[0] == 0
    # the weights agree within the tolerance, the logits do not
    assert float(hidden.abs().max()) / 2 > 0.55
    assert call(capfd, "test", role, altered, "--atol", "0.55")[0] == 0
    assert call(capfd, "test", role, altered, "--logits", "--atol", "0.55")[0] == 1


def test_other_tensors_are_not_asked(zoo: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capfd, "test", zoo / "untied" / "actor", zoo / "tied" / "reference", "--logits")
    assert status == 1 and "logits not compared" in err and "logits" not in out


def test_without_transformers_and_with_an_unknown_class(
    zoo: Path, altered: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = altered / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "NoSuchForCausalLM"))
    status, _, err = call(capfd, "test", zoo / "untied" / "actor", altered, "-q", "--logits")
    assert status == 2 and err.count("\n") == 1 and 'transformers has no class "NoSuchForCausalLM"' in err
    monkeypatch.setitem(sys.modules, "transformers", None)
    status, _, err = call(capfd, "test", zoo / "untied" / "actor", altered, "-q", "--logits")
    assert status == 2 and err == "milepost: --logits needs torch and transformers: pip install torch transformers\n"
