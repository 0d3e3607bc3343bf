"""A model with TRL's value head, merged, by TRL's own loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import milepost

ppo = pytest.importorskip("trl.experimental.ppo")
TOKENS = torch.arange(1, 13)[None]


def _load(directory: Path) -> Any:
    return ppo.AutoModelForCausalLMWithValueHead.from_pretrained(str(directory)).eval()


@pytest.mark.parametrize("case", ["head", "head_prefixed"])
def test_trl_loads_model_and_value_head(wrapped: Path, tmp_path: Path, case: str) -> None:
    milepost.merge(wrapped / case / "actor", tmp_path / "out", role="value")
    loaded = _load(tmp_path / "out").state_dict()
    head = torch.load(wrapped / case / "v_head.pt")
    policy = torch.load(wrapped / "head" / "policy.pt")
    assert loaded.keys() == {**policy, **head}.keys()
    assert [name for name, value in {**policy, **head}.items() if not torch.equal(loaded[name], value)] == []


def test_values_after_trls_own_save_and_ours_are_the_same(wrapped: Path, tmp_path: Path) -> None:
    """TRL's model, as TRL saves it, and as a training engine saves its modules and milepost merges them."""
    theirs = ppo.AutoModelForCausalLMWithValueHead.from_pretrained(str(wrapped / "head" / "policy")).eval()
    theirs.save_pretrained(tmp_path / "trl")
    role = tmp_path / "actor"
    role.mkdir()
    # The modules as an engine names them; TRL's own state_dict leaves `pretrained_model.` out.
    state = {name: value.clone() for name, value in torch.nn.Module.state_dict(theirs).items()}
    torch.save(state, role / "model_world_size_1_rank_0.pt")
    (role / "config.json").write_bytes((tmp_path / "trl" / "config.json").read_bytes())
    milepost.merge(role, tmp_path / "out", role="value")
    with torch.no_grad():
        expected = theirs(input_ids=TOKENS)
        for directory in (tmp_path / "trl", tmp_path / "out"):
            logits, _, values = _load(directory)(input_ids=TOKENS)
            assert torch.equal(logits, expected[0]) and torch.equal(values, expected[2])
    assert expected[2].std() > 0
