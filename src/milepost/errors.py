"""What can go wrong, typed by what the caller can do about it.

Each class carries the exit status of the command line: 1 is a verdict on a checkpoint, 2 a call that cannot be
served as it stands, 3 a fault of our own. The message is one or two plain lines: what is wrong, which file, tensor
or rank, and what to do.
"""

from __future__ import annotations


class MilepostError(Exception):
    """Any error raised on purpose by milepost."""

    exit_status = 3


class CheckpointError(MilepostError):
    """The checkpoint itself is not good."""

    exit_status = 1


class IncompleteError(CheckpointError):
    """Files, tensors or parts of tensors that must be there are missing."""


class DamagedError(CheckpointError):
    """A file is truncated, altered, or contradicts itself or another file."""


class RefusedError(CheckpointError):
    """A file asks for something that a reader of data must not do, such as calling code named in a pickle."""


class MismatchError(CheckpointError):
    """Two things that must agree do not: a checkpoint and its reference, a checkpoint and a config."""


class CallError(MilepostError):
    """The call cannot be served as it stands: a wrong option, path or place."""

    exit_status = 2


class ConfigError(CallError):
    """A config key is unknown or its value has the wrong type."""


class NotFoundError(CallError):
    """A path does not exist, or nothing readable lies there."""


class WriteError(CallError):
    """A place cannot be written: no permission, no space, read-only, or occupied."""


class UploadError(WriteError):
    """A step is durable in the run's folder, but could not be brought to a second place."""


class EarlierStepError(WriteError):
    """The step of an earlier call never came to the disk. What this call was asked for is done."""


class OutageError(CallError):
    """A server or the network to it does not answer: the same call may be served later."""


class LostRankError(MilepostError):
    """Another rank of this run has ended, or does not answer: nothing that takes all ranks can be done any more."""
