"""The small files that make a role's directory a Hugging Face model once its weights are merged."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from milepost.engines.base import RoleFiles
from milepost.fileio import blocks_of
from milepost.layouts.huggingface import ADAPTER_CONFIG, CONFIG, SUBDIRECTORY, companion_files


def save_companions(files: RoleFiles, model: Any, source: Path | None, config_text: str | None) -> None:
    """Write config, generation config, tokenizer and code into `huggingface/`. One rank calls it.

    model:        its `peft_config`, where it has one, is written in PEFT's own form
    source:       Hugging Face model directory whose small files travel byte for byte; None: none
    config_text:  contents for `config.json` where the model's own differs from that of `source`
    """
    own = {} if config_text is None else {CONFIG: config_text.encode()}
    adapters = getattr(model, "peft_config", None) or {}
    for settings in adapters.values():
        # PEFT's own form: rank and alpha are nowhere else, and a merge needs them.
        with tempfile.TemporaryDirectory() as directory:
            settings.save_pretrained(directory)
            own[ADAPTER_CONFIG] = (Path(directory) / ADAPTER_CONFIG).read_bytes()
    for path in [] if source is None else companion_files(source):
        if path.name not in own:
            with files.create(f"{SUBDIRECTORY}/{path.name}") as file:
                for block in blocks_of(path):
                    file.write(block)
    for name, data in own.items():
        with files.create(f"{SUBDIRECTORY}/{name}") as file:
            file.write(data)
