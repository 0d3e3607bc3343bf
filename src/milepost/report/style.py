"""The look of the report: one style sheet, inline, for light, dark and paper."""

from __future__ import annotations

_LIGHT = """
--page: #f7f7f5; --card: #ffffff; --ink: #1b1f24; --soft: #5c6570; --rule: #e3e4e0; --grid: #eeeeea;
--bar: #cfdcf2; --bar-edge: #8fabd8; --main: #2a62b8; --second: #b4610b; --kill: #c0282d; --resume: #187a45;
--save: #6b7480; --check: #7a4fb5; --good: #187a45; --warn: #8f5a00;
"""
_DARK = """
--page: #14171a; --card: #1c2024; --ink: #e4e7ea; --soft: #9aa4af; --rule: #30363c; --grid: #292e33;
--bar: #2b405f; --bar-edge: #4e76ad; --main: #7db0f5; --second: #eda04f; --kill: #ff7b76; --resume: #5ecb8d;
--save: #a3adb8; --check: #bb98ee; --good: #5ecb8d; --warn: #e3b341;
"""

STYLE = f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--page); color: var(--ink); line-height: 1.45;
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }}
main {{ max-width: 1120px; margin: 0 auto; padding: 28px 20px 48px; }}
h1 {{ overflow-wrap: anywhere; font-size: 26px; font-weight: 650; letter-spacing: -0.01em; margin: 0; }}
h2 {{ font-size: 17px; font-weight: 650; margin: 36px 0 10px; }}
h3 {{ min-width: 0; overflow-wrap: anywhere; font-size: 13px; font-weight: 600; margin: 0; }}
p {{ margin: 4px 0; }}
.soft, figcaption {{ color: var(--soft); font-size: 13px; }}
.path {{ overflow-wrap: anywhere; }}
.facts {{ display: flex; flex-wrap: wrap; gap: 1px; margin: 20px 0 0;
  background: var(--rule); border: 1px solid var(--rule); border-radius: 8px; overflow: hidden; }}
.facts div {{ flex: 1 1 max(190px, 30%); background: var(--card); padding: 12px 16px; }}
.facts dt {{ color: var(--soft); font-size: 12px; }}
.facts dd {{ margin: 2px 0 0; }}
.facts b {{ font-size: 20px; font-weight: 620; letter-spacing: -0.01em; font-variant-numeric: tabular-nums; }}
.facts span {{ display: block; color: var(--soft); font-size: 12px; }}
figure {{ background: var(--card); border: 1px solid var(--rule); border-radius: 8px; margin: 0; padding: 14px 16px;
  break-inside: avoid; }}
figure header {{ display: flex; justify-content: space-between; align-items: baseline; gap: 0 12px;
  flex-wrap: wrap; margin-bottom: 4px; }}
figure header span {{ color: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; white-space: nowrap; }}
h3 i {{ color: var(--soft); font-weight: 400; font-style: normal; }}
.grid-of-curves {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); gap: 14px; }}
.first-curve {{ margin-bottom: 14px; }}
.scroll {{ overflow-x: auto; }}
.scroll svg {{ min-width: 720px; }}
svg {{ display: block; width: 100%; height: auto; overflow: visible; }}
svg text {{ font-size: 11px; fill: var(--soft); }}
svg .note {{ font-size: 9.5px; }}
svg .bar {{ fill: var(--ink); font-weight: 550; }}
svg .said {{ font-weight: 600; paint-order: stroke; stroke: var(--card); stroke-width: 4px; }}
svg .lane {{ fill: var(--soft); }}
.grid {{ stroke: var(--grid); }}
.axis {{ stroke: var(--soft); fill: none; opacity: .6; }}
.fold {{ fill: var(--card); }}
.session {{ fill: var(--bar); stroke: var(--bar-edge); }}
.hatch {{ stroke: var(--kill); stroke-width: 1.4; opacity: .75; }}
.lost {{ fill: url(#lost-work); }}
.save rect {{ fill: var(--save); }}
.save rect.behind {{ opacity: .35; }}
.save.failed rect {{ fill: var(--kill); }}
.save.open rect {{ fill: none; stroke: var(--kill); }}
.validation {{ fill: var(--check); }}
.kill .mark, .resume .mark {{ stroke-width: 1.2; }}
.kill .mark {{ stroke: var(--kill); stroke-dasharray: 4 3; }}
.kill .symbol {{ stroke: var(--kill); stroke-width: 2.4; fill: none; stroke-linecap: round; }}
svg .kill.crowded .mark {{ stroke-dasharray: none; }}
svg .kill .said {{ fill: var(--kill); }}
.resume .mark {{ stroke: var(--resume); }}
.stop .mark {{ stroke: var(--warn); stroke-width: 1.2; stroke-dasharray: 2 3; }}
.stop .symbol {{ fill: var(--warn); }}
svg .stop .said {{ fill: var(--warn); }}
.fault .mark {{ stroke: var(--kill); stroke-width: 1.2; stroke-dasharray: 2 3; }}
.fault .symbol {{ fill: var(--kill); }}
svg .fault .said {{ fill: var(--kill); }}
.stall rect {{ fill: var(--warn); opacity: .8; }}
.part.training {{ fill: var(--good); background: var(--good); }}
.part.saving {{ fill: var(--save); background: var(--save); }}
.part.validating {{ fill: var(--check); background: var(--check); }}
.part.starting {{ fill: var(--main); background: var(--main); }}
.part.redone {{ fill: var(--second); background: var(--second); }}
.part.down {{ fill: var(--kill); background: var(--kill); }}
.part.stalled {{ fill: var(--warn); background: var(--warn); }}
.part.rest {{ fill: var(--rule); background: var(--rule); }}
.legend {{ display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 8px 0 0; padding: 0;
  list-style: none; font-size: 13px; }}
.legend i {{ display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }}
.resume .symbol {{ fill: var(--resume); }}
svg .resume .said {{ fill: var(--resume); }}
.kill.at {{ stroke: var(--kill); stroke-dasharray: 4 3; fill: none; opacity: .75; }}
.resume.at {{ stroke: var(--resume); fill: var(--resume); opacity: .75; }}
.curve {{ --tone: var(--main); }}
.curve.c1 {{ --tone: var(--second); }}
.line {{ stroke: var(--tone); stroke-width: 1.8; fill: none; stroke-linejoin: round; stroke-linecap: round; }}
.dot {{ fill: var(--tone); }}
.band {{ fill: var(--tone); opacity: .2; }}
.lost-line {{ stroke: var(--tone); stroke-width: 1.6; stroke-dasharray: 3 3; fill: none; opacity: .7; }}
.lost-dots {{ stroke: var(--tone); stroke-width: 2.4; stroke-linecap: round; fill: none; opacity: .35; }}
.nan {{ stroke: var(--kill); stroke-width: 1.6; fill: none; }}
.key {{ display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin: 0 5px 3px 10px;
  background: var(--main); }}
.key.c1 {{ background: var(--second); }}
table {{ border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }}
.table {{ background: var(--card); border: 1px solid var(--rule); border-radius: 8px; overflow-x: auto; }}
th, td {{ text-align: left; vertical-align: top; padding: 8px 14px; }}
th {{ color: var(--soft); font-weight: 550; white-space: nowrap; }}
td {{ border-top: 1px solid var(--rule); }}
td.n, th.n {{ text-align: right; white-space: nowrap; }}
td p {{ margin: 0 0 2px; max-width: 60ch; overflow-wrap: break-word; }}
.good {{ color: var(--good); }}
.warn {{ color: var(--warn); }}
.bad {{ color: var(--kill); }}
@media print {{
  :root {{ color-scheme: light; {_LIGHT} --page: #ffffff; }}
  body {{ font-size: 12px; -webkit-print-color-adjust: exact; print-color-adjust: exact; }}
  main {{ max-width: none; padding: 0; }}
  h2 {{ break-after: avoid; margin-top: 20px; }}
  tr, .facts div {{ break-inside: avoid; }}
  .grid-of-curves {{ grid-template-columns: repeat(2, 1fr); }}
  .scroll svg {{ min-width: 0; }}
}}
"""
