"""A run as one offline HTML page, from its events and its steps on disk.

Rendering is an idea of its own beside the record of a run (`milepost.checkpoint`), which it only reads:
`svg` is the drawing kit, `timeline` and `curves` draw, `tables` tells, `style` is the look, `page` puts all together.
"""

from milepost.report.page import render_report, write_report

__all__ = ["render_report", "write_report"]
