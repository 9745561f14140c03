"""A run as one HTML file: what ran where, pictures, tables. It loads nothing, and a phone shows it as well.

Read next: pictures.py, whose panels are its sections.
"""

import base64
from html import escape

from .measure import MEASURED
from .pictures import panels_of, svg
from .tables import HEADINGS, number, speedup

# A table that is wider than the screen scrolls by itself, with the names of its rows in sight.
STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 20%, transparent); }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.2; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
dl { display: grid; grid-template-columns: auto 1fr; gap: .2rem 1rem; } dt { opacity: .7; }
dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
code { font: .9em ui-monospace, monospace; overflow-wrap: anywhere; }
img { display: block; width: 100%; max-width: 40rem; margin: 1rem auto; background: white; border-radius: .5rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child { text-align: left; position: sticky; left: 0; background: Canvas; }
td.best { font-weight: bold; } summary { cursor: pointer; }
"""


def html(results, args, title, meta, ceilings):
    """The page, of results {setting: {impl: row}}, as environment() describes the run; ceilings: {dtype: TFLOP/s}."""
    facts = {key: meta[key] for key in ("device", "driver", "cuda", "torch", "triton", "date") if meta[key]}
    facts |= {"sources": meta["source_digest"][:16]}
    facts |= {f"matmul, {dtype}": f"{number(tflops)} TFLOP/s" for dtype, tflops in ceilings.items()}
    facts |= {f"host, {name}": f"{us} µs a call" for name, us in meta.get("host_us", {}).items()}
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    sections = "\n".join(section(name, panel, args.op, ceilings) for name, panel in panels_of(results).items())
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p>Medians of one run. {'The dashed line is a matrix multiplication of the same dtype.' * bool(ceilings)}</p>
<dl>{"".join(rows)}</dl>
<details><summary>The command</summary><p><code>{escape(meta["command"])}</code></p></details>
{sections}
</body>
</html>
"""


def section(name, panel, op, ceilings):
    """One panel: its picture, TFLOP/s by shape, and behind a click every number."""
    picture = base64.b64encode(svg(panel, op, ceilings).encode()).decode()
    impls = list(next(iter(panel.values())))
    measured = [impl for impl in impls if any(rows[impl]["ms"] for rows in panel.values())]
    tflops = {str(setting.shape): [rows[impl]["tflops"] for impl in measured] for setting, rows in panel.items()}
    everything = {f"{setting.shape} {impl}": [*(rows[impl][key] for key in MEASURED), speedup(rows, impl, op.BASELINE)]
                  for setting, rows in panel.items() for impl in measured}
    return f"""<h2>{escape(name)}</h2>
<img alt="TFLOP/s, {escape(name)}" src="data:image/svg+xml;base64,{picture}">
{table("TFLOP/s", measured, tflops, best=True)}
<details><summary>All numbers</summary>
{table(op.SHAPES.split(" or ")[0], [*HEADINGS, f"× {op.BASELINE}"], everything)}
</details>"""


def table(corner, headings, rows, best=False):
    """rows: {name: numbers}; best: the largest number of a row is in bold."""
    def cell(x, numbers):
        is_best = best and x is not None and x == max(y for y in numbers if y is not None)
        return f"<td{' class=best' * is_best}>{number(x)}</td>"

    head = "".join(f"<th>{escape(x)}</th>" for x in (corner, *headings))
    body = "\n".join(f"<tr><th>{escape(name)}</th>{''.join(cell(x, numbers) for x in numbers)}</tr>"
                     for name, numbers in rows.items())
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'
