"""Names and shapes of models: what Hugging Face's files of a family hold (from config.json alone), and the edits that
bring a checkpoint's names there."""

from milepost.mapping.architectures import Architecture, Config, expected
from milepost.mapping.families import FAMILIES
from milepost.mapping.heads import infer_head, value_head_config
from milepost.mapping.live import to_live_form
from milepost.mapping.names import (
    Mapped,
    check,
    check_layers,
    drop_ignored,
    strip_wrappers,
    ties,
    to_huggingface,
    to_saved_form,
    untie,
)
from milepost.mapping.rules import SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION

__all__ = [
    "FAMILIES",
    "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION",
    "Architecture",
    "Config",
    "Mapped",
    "check",
    "check_layers",
    "drop_ignored",
    "expected",
    "infer_head",
    "strip_wrappers",
    "ties",
    "to_huggingface",
    "to_live_form",
    "to_saved_form",
    "untie",
    "value_head_config",
]
