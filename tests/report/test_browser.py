"""The page in a real browser without a window: what it shows is what the diary says."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from diary import commit_step, survived_run, write_events

from milepost.report import write_report
from milepost.report.style import STYLE

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTH, HEIGHT = 1200, 1500

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium here (apt-get install chromium)")


def colour(name: str) -> tuple[int, int, int]:
    """A colour of the style sheet in daylight."""
    found = re.search(rf"--{name}: #([0-9a-f]{{6}})", STYLE)
    assert found is not None
    red, green, blue = bytes.fromhex(found[1])
    return red, green, blue


def test_the_page_as_it_is_painted(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    run = write_events(tmp_path / "run", survived_run())
    for number in (7, 10, 11):
        commit_step(run, number)
    page = write_report(run)
    picture = tmp_path / "page.png"
    words = [
        *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"),
        *("--enable-logging=stderr", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}", page.as_uri()),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert picture.exists(), done.stderr
    # Nothing that the browser minds: no broken markup, nothing that the page's own policy forbids.
    assert "CONSOLE" not in done.stderr
    with image.open(picture) as opened:
        painted = opened.convert("RGB")
        assert painted.size == (WIDTH, HEIGHT)
        rows = [Counter(painted.crop((0, y, WIDTH, y + 1)).getdata()) for y in range(HEIGHT)]
    # The bar of where the time went: 110 of 273 s trained, 50 hung, 43 down, 30 starting, 20 redone.
    bar = max(rows, key=lambda row: row[colour("good")])
    length = bar[colour("good")] / (110 / 273)
    for name, seconds in (("warn", 50), ("kill", 43), ("main", 30), ("second", 20)):
        assert bar[colour(name)] == pytest.approx(length * seconds / 273, abs=4), name
    # And on the timeline: the stall, 50 of 273 s long, somewhere above it.
    above = rows[: rows.index(bar)]
    assert any(row[colour("bar")] > 0 and row[colour("resume")] for row in above)
    drawn = length * 904 / 1000
    blended = tuple(round(0.8 * top + 0.2 * below) for top, below in zip(colour("warn"), colour("bar"), strict=True))
    near = [
        sum(count for pixel, count in row.items() if max(abs(a - b) for a, b in zip(pixel, blended, strict=True)) <= 2)
        for row in above
    ]
    assert max(near) == pytest.approx(drawn * 50 / 273, abs=8)
