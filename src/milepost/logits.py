"""test --logits: do two models answer alike? Both are built with transformers, one after the other, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from milepost.errors import CallError, MismatchError
from milepost.jobs.compare import CompareOptions, LogitsReport
from milepost.jobs.merge import MergeOptions, merge
from milepost.jobs.prepare import HuggingFaceModel
from milepost.layouts.huggingface import CONFIG, read_config

if TYPE_CHECKING:
    import torch

_PROMPT_LENGTH = 16


def compare_logits(model: HuggingFaceModel, reference: Path, options: CompareOptions) -> LogitsReport:
    """Build the checkpoint, through a merge into a temporary directory, and the reference; compare their logits.

    Both compute in float32, whatever they are stored in, over the same 16 token ids: equal weights give equal bits.
    Raises CallError where transformers is missing or does not know the architecture.
    """
    try:
        import torch  # noqa: PLC0415
        import transformers  # noqa: F401, PLC0415
    except ImportError:
        raise CallError("--logits needs torch and transformers: pip install torch transformers") from None

    with TemporaryDirectory(prefix="milepost-") as temporary:
        merged = Path(temporary) / "model"
        merge(model, merged, MergeOptions(options.dtype))
        ours = _logits(merged)
    theirs = _logits(reference)
    if ours.shape != theirs.shape:
        raise MismatchError(
            f"logits of shape {list(ours.shape)} from the checkpoint, {list(theirs.shape)} from {reference}"
        )
    gap = (ours - theirs).abs().double()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    differs = ~(same | (gap <= options.atol + options.rtol * theirs.abs().double()))
    gap = torch.where(same, 0.0, gap.nan_to_num(nan=float("inf")))
    relative = torch.where(same, 0.0, gap / theirs.abs().double())
    return LogitsReport(int(differs.sum()), ours.numel(), float(gap.max()), float(relative.max()))


def _logits(directory: Path) -> torch.Tensor:
    import torch  # noqa: PLC0415

    model = _load(directory)
    with torch.no_grad():
        # Mapped weights lie where their file has them, and alignment can decide how sums are ordered: copies lie alike.
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        vocabulary = model.config.get_text_config().vocab_size
        ids = torch.tensor([[(7 * n + 3) % vocabulary for n in range(_PROMPT_LENGTH)]])
        out = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    logits = getattr(out, "logits", None)
    if logits is None:
        raise CallError(f"{directory}: {type(model).__name__} has no logits to compare; call without --logits")
    found: torch.Tensor = logits.float()
    return found


def _load(directory: Path) -> Any:
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    named = read_config(directory).get("architectures") or [""]
    architecture = getattr(transformers, str(named[0]), None)
    if architecture is None:
        raise CallError(
            f"{directory / CONFIG}: transformers has no class {json.dumps(named[0])}; call without --logits"
        )
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model, info = architecture.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise CallError(f"{directory}: transformers cannot load it: {lines[0]}") from None
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise MismatchError(
            f"{directory}: {missing[0]} is missing ({len(missing)} tensors are), so there are no logits"
        )
    return model.eval()
