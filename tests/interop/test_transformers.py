"""transformers loads what milepost merged, and it is the model that was trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from interop import sides
from interop.ours import OurRun
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

import milepost


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the ranks computed: the order of a sum is that of the threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("role", "auto_class"), [("actor", AutoModelForCausalLM), ("critic", AutoModelForTokenClassification)]
)
def test_a_merged_model_loads_whole_and_says_what_the_live_one_said(
    role: str, auto_class: type, our_run: OurRun, tmp_path: Path
) -> None:  # the critic's head is kept and its config names its class
    milepost.merge(our_run.root, tmp_path / role, role=role)
    model, info = auto_class.from_pretrained(tmp_path / role, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    assert model.dtype == torch.float32
    sides.assert_same_tensors(dict(model.named_parameters()), sides.weights_of(our_run.saved[role]))
    with torch.no_grad():
        logits = model.eval()(input_ids=sides.tokens(0)).logits
    assert logits.shape == (3, 7, 33 if role == "actor" else 1)
    assert torch.equal(logits, our_run.logits[role])
