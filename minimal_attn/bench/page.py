"""A run as one HTML file: what ran where, pictures, tables. It loads nothing, and a phone shows it as well.

Read next: pictures.py, whose panels are its sections.
"""

import base64
from html import escape

from . import tables
from .measure import MEASURED
from .pictures import digest_of, digest_of_plot, panels_of, svg, words
from .styles import STYLES
from .tables import HEADINGS, RATES, number, speedup

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

CEILING = "The dashed line is a large matrix multiplication in the dtype of the heading."


def digest_of_page(results, title, meta, ceilings):
    """The digest that html() puts into a page of the same."""
    return digest_of(digest_of_plot(results, title, ceilings), facts_of(meta, ceilings), meta["command"],
                     code=(__file__, tables.__file__))


def facts_of(meta, ceilings):
    """{name: value} of what the page says of the run, as environment() describes it."""
    facts = {key: meta[key] for key in ("device", "driver", "cuda", "torch", "triton", "date") if meta[key]}
    facts |= {"sources": meta["source_digest"][:16]}
    facts |= {f"matmul, {dtype}": f"{number(tflops)} TFLOP/s" for dtype, tflops in ceilings.items()}
    return facts | {f"host, {name}": f"{us} µs a call" for name, us in meta.get("host_us", {}).items()}


def html(results, title, meta, ceilings):
    """The page, of results {setting: {impl: row}}; ceilings: {dtype: TFLOP/s}."""
    panels = panels_of(results)
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>"
                    for name, value in facts_of(meta, ceilings).items())
    contents = "\n".join(f'<li><a href="#section-{i}">{escape(heading(panel))}</a></li>'
                         for i, panel in enumerate(panels, 1))
    sections = "\n".join(section(f"section-{i}", panel, ceilings) for i, panel in enumerate(panels, 1))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="digest" content="data-sha256 {digest_of_page(results, title, meta, ceilings)}">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p>Medians of one run. {CEILING * bool(ceilings)}</p>
<dl>{facts}</dl>
<details><summary>The command</summary><p><code>{escape(meta["command"])}</code></p></details>
<nav><h2>Contents</h2>
<ol>
{contents}
</ol></nav>
{sections}
</body>
</html>
"""


def heading(panel):
    return panel.title + f" ({panel.shared})" * bool(panel.shared)


def section(name, panel, ceilings):
    """One panel: its picture, the rates by shape, and behind a click every number."""
    picture = base64.b64encode(svg(panel, ceilings).encode()).decode()
    labels = {impl: STYLES[impl].label for impl in panel.impls}
    dtypes = {setting.dtype for setting in panel.results}
    rows_of = {words(setting.shape.parts) + f", {setting.dtype}" * (len(dtypes) > 1): rows
               for setting, rows in panel.results.items()}
    rates = {shape: [rows[impl][panel.rate] for impl in labels] for shape, rows in rows_of.items()}
    baseline = [panel.baseline] if panel.baseline else []
    everything = {f"{shape}: {label}": [*(rows[impl][key] for key in MEASURED),
                                        *(speedup(rows, impl, x) for x in baseline)]
                  for shape, rows in rows_of.items() for impl, label in labels.items() if rows[impl]["ms"]}
    return f"""<h2 id="{name}">{escape(heading(panel))}</h2>
<img alt="{RATES[panel.rate]}, {escape(heading(panel))}" src="data:image/svg+xml;base64,{picture}">
{table(RATES[panel.rate], labels.values(), rates, best=True)}
<details><summary>All numbers</summary>
{table("", [*HEADINGS, *(f"× {labels[x]}" for x in baseline)], everything)}
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
