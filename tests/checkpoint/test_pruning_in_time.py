"""What retention deletes while a run saves holds up neither the run nor its uploads."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from uuid import uuid4

import pytest
from tiny_engine import trained

from milepost.checkpoint import litter
from milepost.checkpoint.steps import judge, scan


def steps(root: Path) -> list[int]:
    return [step.step for step in scan(root)]


def test_a_deletion_that_hangs_holds_up_no_save_and_no_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("fsspec")
    answers, hanging, remove = threading.Event(), threading.Event(), litter.remove

    def hang(path: Path) -> None:
        if path.name.startswith(".global_step_1."):
            hanging.set()
            answers.wait(60)
        remove(path)

    monkeypatch.setattr(litter, "remove", hang)
    caplog.set_level(logging.WARNING)
    run = trained(tmp_path, 1, remote=f"memory://{uuid4().hex}/run", keep_last=1, save_timeout=0.5)
    try:
        run.train(2, 3, 4)
        assert hanging.is_set()
        # Step 1 has lost its name; of the others nothing goes as long as that one hangs.
        assert steps(tmp_path) == [2, 3, 4]
        said = [record.message for record in caplog.records if "older steps were being deleted" in record.message]
        assert [str(tmp_path) in line for line in said] == [True] * 3
        assert "did not answer within 0.50 s" in said[0]
        assert "still does not answer" in said[1]
    finally:
        answers.set()
    assert run.manager._pruning._deleting is not None
    assert run.manager._pruning._deleting.wait(60)
    run.train(5)
    run.manager.close()
    assert steps(tmp_path) == [5]
    assert judge(tmp_path / "global_step_5").good
    assert litter.litter(tmp_path) == []
