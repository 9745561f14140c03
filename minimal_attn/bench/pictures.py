"""Pictures of rates and times. draw() puts into each a digest of what it was drawn from.

rates() shows the rows of a run, as its JSON has them. Shapes that differ in their length alone are Lines, all others
Bars. figure() draws these. Ours have thick lines, filled markers and solid bars, the others thin lines, hollow markers
and light bars. masks() shows block masks. The colors are those of Okabe and Ito (jfly.uni-koeln.de/color), completed by
the "muted" ones of Paul Tol (personal.sron.nl/~pault): readers with any color vision can tell them apart.
"""

import hashlib
import inspect
import json
import math
import re
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib import rc_context
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..block_mask import EMPTY, FULL, UNIT
from .measure import MEASURED
from .options import OPS
from .tables import number, place


class Style(NamedTuple):
    label: str
    color: str
    marker: str
    is_ours: bool = False

    def line(self):
        """The options of a line."""
        return {"color": self.color, "marker": self.marker, "markerfacecolor": self.color if self.is_ours else "white",
                "label": self.label, "linewidth": 2.5 if self.is_ours else 1.2, "zorder": 2 + self.is_ours}


VERMILLION, BLUE, ORANGE, PURPLE, GREEN, SKY, BLACK = (  # Okabe and Ito
    "#D55E00", "#0072B2", "#E69F00", "#CC79A7", "#009E73", "#56B4E9", "#000000")
WINE, OLIVE, INDIGO, TEAL, MAGENTA = "#882255", "#999933", "#332288", "#44AA99", "#AA4499"  # Tol
GRAY, DARK_GRAY = "#999999", "#555555"

# In the order of legends and bars. Names with one color are never in one picture.
STYLES = {name: Style(f"{label} (ours)", color, marker, True) for name, label, color, marker in (
    ("cuda:sm90", "sm90", VERMILLION, "o"), ("cuda:sm80", "sm80", ORANGE, "^"), ("cuda:dmma", "dmma", PURPLE, "D"),
    ("cuda:simt", "simt", WINE, "v"), ("cuda:host", "host", VERMILLION, "h"), ("cuda", "cuda", VERMILLION, "p"),
    ("cuda:rotary", "cuda with rotary", ORANGE, "p"), ("cuda:attend", "cuda without append", PURPLE, "p"),
    ("cuda:from_torch", "cuda by torch's BlockMask", PURPLE, "p"),
    ("cuda:native", "cuda without block mask", OLIVE, "p"),
    ("cuda:apart", "cuda in two calls", ORANGE, "h"), ("cuda:dense", "cuda and flash_attention", PURPLE, "h"),
    ("triton", "triton", BLUE, "s"), ("triton:fp8", "triton in fp8", INDIGO, "s"),
    ("triton:rotary", "triton with rotary", SKY, "s"), ("triton:attend", "triton without append", INDIGO, "s"),
    ("triton:apart", "triton in two calls", SKY, "o"), ("triton:dense", "triton and flash_attention", INDIGO, "o"),
    ("minimal_attn", "minimal_attn", VERMILLION, "*"), ("activated", "sdpa after activate()", ORANGE, "*"),
    ("all_gather", "all-gather", VERMILLION, "X"), ("plain_all_gather", "all-gather by NCCL", ORANGE, "X"),
    ("ring", "ring", PURPLE, "X"), ("ulysses", "Ulysses", BLUE, "X"))}
STYLES |= {name: Style(*style) for name, *style in (
    ("torch_ours", "context_parallel (torch) with our kernels", GREEN, "P"),
    ("torch_cudnn", "context_parallel (torch) with cuDNN", BLACK, "P"), ("torch:cudnn", "cuDNN (torch)", BLACK, "o"),
    ("flash_attn_interface", "FlashAttention-3", MAGENTA, "P"),
    ("flash_attn", "FlashAttention-2 (flash_attn)", TEAL, "<"), ("torch:flash", "FlashAttention-2 (torch)", GREEN, "^"),
    ("torch:varlen", "varlen_attn (torch)", INDIGO, "X"), ("flex", "FlexAttention (torch)", SKY, "D"),
    ("torch:efficient", "memory-efficient (torch)", OLIVE, "v"), ("torch:math", "math (torch)", INDIGO, ">"),
    ("manual", "plain PyTorch (manual)", GRAY, "s"), ("read", "plain read", GRAY, ""),
    ("cublas", "cuBLAS (torch)", BLACK, "s"), ("torch", "torch", BLACK, "d"),
    ("sdpa", "sdpa as it comes", BLACK, "*"), ("reference", "reference", GRAY, "d"))}
MATMUL = Style("large matmul (torch)", DARK_GRAY, "")  # the ceiling: a dashed line
# Speed-ups are over the first of these.
BASELINES = "read", "manual", "cublas", "torch", "torch:varlen", "torch:cudnn", "torch:flash"


# Files.

def digest_of(make, args):
    """A digest of what a picture shows and of the code that draws it."""
    code = inspect.getsource(make) + Path(__file__).read_text()
    return hashlib.sha256((json.dumps(args) + code).encode()).hexdigest()


def digest_in(file):
    """The digest that a picture holds; None if there is no such file, or none in it."""
    found = Path(file).exists() and re.search(rb"data-sha256 ([0-9a-f]{64})", Path(file).read_bytes())
    return found[1].decode() if found else None


def draw(file, make, *args):
    """The figure make(*args) as PNG or SVG, by the suffix of file. The same figure makes the same file."""
    with rc_context({"svg.hashsalt": "minimal_attn"}):
        make(*args).savefig(file, bbox_inches="tight", pad_inches=0.15, metadata={
            "Description": f"data-sha256 {digest_of(make, args)}", "Date": None})


# The rows of a run.

def parts(row):
    """{letter: size} of a row. H and S are of the queries and, behind a slash, of the keys where they differ."""
    if "m" in row:
        return {x.upper(): str(row[x]) for x in "mnk"}
    heads, lengths = (str(row[x]) if row[x] == row[y] else f"{row[x]}/{row[y]}"
                      for x, y in (("nheads", "nheads_k"), ("seqlen_q", "seqlen_k")))
    if row["op"].startswith("varlen"):
        return {"lengths": row["lengths"], "H": heads, "D": str(row["head_dim"])}
    more = {"mask": row.get("mask"), "window": row.get("window_size", "")[:1], "score": row.get("score"),
            "prefill": row.get("prefill"), "page": row.get("page_size"),
            "lengths": "drawn" * (row.get("lengths") == "drawn"),
            "with": "sinks" if row["op"] == "sinks" else variant(row)}
    return {"B": str(row["batch_size"]), "H": heads, "S": lengths, "D": str(row["head_dim"])} | {
        name: str(value[0] if isinstance(value, list) else value) for name, value in more.items() if value}


def variant(row):
    return "deterministic" if row.get("deterministic") else \
        f"dropout {row['dropout_p']:g}" if row.get("dropout_p") else ""


def words(sizes):
    """{"B": 4, "H": "32/8"} -> "B 4, H 32/8" """
    return ", ".join(f"{letter} {size}" for letter, size in sizes.items())


def x_of(row):
    """Where a row is on the axis of a sweep: S, or the MB of the keys and values of a cache."""
    if "page_size" in row:
        return 4e-6 * row["batch_size"] * row["nheads_k"] * row["head_dim"] * row["seqlen_k"]
    return row["seqlen_q"]


def sweeps(row):
    """The sweeps that a row can be part of, as (head_dim, what else is fixed): B·S, or else B; the pages of a cache."""
    if row["op"] in ("decode", "append") and row["seqlen_q"] == 1 and row["lengths"] == "full":
        fixed = [f"pages of {row['page_size']}, one token" if row["page_size"] else "dense caches, one token"]
    elif row["op"] in ("forward", "backward", "forward_backward") and row["seqlen_q"] == row["seqlen_k"]:
        more = f", {variant(row)}" if variant(row) else ""
        fixed = [f"H {parts(row)['H']}, {x}{more}" for x in (f"B·S {row['batch_size'] * row['seqlen_q']}",
                                                             f"B {row['batch_size']}")]
    else:
        fixed = []
    return [(f"head_dim {row['head_dim']}", x) for x in fixed]


class Lines(NamedTuple):
    """A chart of lines over S, or over the bytes of a cache: there only the plain read is a line, and others points."""

    title: str
    lines: dict  # {implementation: [(x, y), ...]}
    labels: tuple  # of x and y
    ceiling: float | None = None  # TFLOP/s of a matmul

    def draw(self, ax):
        """Draws it, and returns the values that the scale has to show."""
        for impl, points in self.lines.items():
            is_line = impl == "read" or "read" not in self.lines
            ax.plot(*zip(*sorted(points)), linestyle="-" if is_line else "", **STYLES[impl].line())
        ticks = sorted({x for points in self.lines.values() for x, _ in points})
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [f"{x >> 10}k" if x % 1024 == 0 else f"{x:.{3 if x < 1000 else 4}g}" for x in ticks])
        ax.set_xlabel(self.labels[0])
        if ax.get_subplotspec().is_first_col():
            ax.set_ylabel(self.labels[1])
        return [y for points in self.lines.values() for _, y in points]


class Bars(NamedTuple):
    """A chart of groups of bars from top to bottom. Part of a bar is solid, and a text stands beside it."""

    title: str
    names: list  # of the groups
    groups: list  # [[(implementation, value, share of it that is solid, text), ...], ...]
    label: str
    ceiling: float | None = None
    has_legend: bool = True  # names may say already what computes

    def draw(self, ax):
        """Draws it, and returns the values that the scale has to show."""
        for y, group in enumerate(self.groups):
            height = 0.8 / len(group)
            for i, (impl, value, solid, text) in enumerate(group):
                style, place = STYLES[impl], y + (i + 0.5) * height - 0.4
                bar = ax.barh(place, value, height, edgecolor=style.color, label=style.label if self.has_legend else "",
                              facecolor=style.color if solid == 1 else (style.color, 0.2))
                ax.barh(place, solid * value, height, color=style.color)
                ax.bar_label(bar, [text], fontsize=8, padding=3,
                             bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        ax.set_yticks(range(len(self.groups)), self.names)
        ax.set_ylim(len(self.groups) - 0.5, -0.5)
        ax.set_xlabel(self.label)
        return [value for group in self.groups for _, value, *_ in group]


def of_run(rows, meta):
    """The arguments of draw() for the rows of a run: rates, the rows, a title and {dtype: TFLOP/s of a matmul}."""
    op = {"forward": "attention", "sinks": "window"}.get(rows[0]["op"], rows[0]["op"])
    title = f"{OPS[op].title} {place(meta, {row['dtype'] for row in rows})}"
    return rates, rows, title, meta.get("matmul_tflops", {})


def rates(rows, title, ceilings):
    """The figure of a run: Lines for each sweep over S, dtype and mask, and Bars for each other dtype and mask. A sweep
    has three lengths at least. ceilings: {dtype: TFLOP/s of a matmul}."""
    lengths, found, lines, bars = {}, {}, [], []
    for row in rows:
        for sweep in sweeps(row):
            lengths.setdefault(sweep, set()).add(x_of(row))
    for row in rows:
        sweep = next((sweep for sweep in sweeps(row) if len(lengths[sweep]) > 2), None)
        setting = [value for key, value in row.items() if key not in ("impl", "us", "read_gbps", *MEASURED)]
        panel = found.setdefault((sweep, row["dtype"], row.get("causal", False)), {})
        panel.setdefault(str(setting), {})[row["impl"]] = row
    for (sweep, dtype, causal), settings in found.items():
        results = list(settings.values())
        head_dim, shared = sweep or (None, words(common([parts(next(iter(rows.values()))) for rows in results])))
        heading = ", ".join(filter(None, [head_dim, dtype, "causal" * causal])) + f"\n{shared}".rstrip()
        (lines if sweep else bars).append(chart_of(results, heading, ceilings.get(dtype), sweep is not None))
    return figure(lines, bars, title)


def chart_of(results, title, ceiling, is_sweep):
    """Lines or Bars of results, {impl: row} of each setting. Beside a bar stand its rate and its speed over that of the
    baseline, or of the same implementation without a score."""
    rows = [next(iter(of.values())) for of in results]
    impls = [impl for impl in STYLES if any(of[impl]["ms"] for of in results if impl in of)]
    rate = "gbps" if "page_size" in rows[0] else "tflops"
    if is_sweep:
        lines = {impl: [(x_of(row), of[impl][rate] or math.nan) for row, of in zip(rows, results)] for impl in impls}
        x_label = "MB of keys and values" if rate == "gbps" else "sequence length S"
        return Lines(title, lines, (x_label, MEASURED[rate]), ceiling)
    baseline = next((impl for impl in BASELINES if impl in impls), None)
    sizes = [words(parts(row) | {"score": ""}) for row in rows]
    plain = {x: of for x, row, of in zip(sizes, rows, results) if row.get("score") == "none"}
    shapes, groups = [parts(row) for row in rows], []
    names = [words({x: text for x, text in shape.items() if x not in common(shapes)}) for shape in shapes]
    for size, of in zip(sizes, results):
        group = []
        for impl in impls:
            value = of[impl][rate] or math.nan
            other = (plain.get(size, of)[impl] if plain else of.get(baseline, {})).get(rate) or value
            factor = f" ({value / other:.2f}×)" if other != value else ""
            group.append((impl, value, int(STYLES[impl].is_ours), "" if math.isnan(value) else number(value) + factor))
        groups.append(group)
    over = "score none" if plain else baseline and STYLES[baseline].label.partition(" (")[0]
    return Bars(title, names, groups, MEASURED[rate] + (f" (× {over})" if over else ""), ceiling)


def common(shapes):
    """{letter: size} of what several shapes have in common."""
    is_alone = len(shapes) == 1
    return {x: size for x, size in shapes[0].items() if not is_alone and all(y.get(x) == size for y in shapes)}


# Masks.

SHADES = {"empty unit": "white", "partial unit: hidden": "#E3EFF7", "partial unit: seen": SKY, "full unit": BLUE}


def of_gallery(page):
    """The arguments of draw() for the gallery of a page: masks, and a panel for each snippet, of what it calls `mask`:
    the heading above it, and a text for each row, in which each key has the index of its shade."""
    panels, gallery = [], page.partition("\n## Gallery\n")[2]
    for heading, snippet in re.findall(r"^### (.*?)\n.*?```python\n(.*?)```", gallery, re.DOTALL | re.MULTILINE):
        exec(snippet, made := {})
        seen, units = made["mask"].to_dense()[0, 0], made["mask"].units[0, 0]
        states = units.repeat_interleave(UNIT, 0).repeat_interleave(UNIT, 1)[:seen.shape[0], :seen.shape[1]]
        shades = torch.where(states == EMPTY, 0, torch.where(states == FULL, 3, 1 + seen.long()))
        panels.append([heading, ["".join(map(str, row)) for row in shades.tolist()]])
    return masks, panels


def masks(panels):
    """A figure of panels, as of_gallery() makes them."""
    made = Figure(figsize=(11, 6.2), dpi=150, layout="constrained")
    for ax, (heading, rows) in zip(made.subplots(2, len(panels) // 2).flat, panels):
        ax.imshow([list(map(int, row)) for row in rows], ListedColormap(SHADES.values()), vmin=0, vmax=3,
                  interpolation="none")
        ax.set_title(heading, fontsize="medium")
        ax.set_xticks([x - 0.5 for x in range(0, len(rows[0]), UNIT)], [])
        ax.set_yticks([y - 0.5 for y in range(0, len(rows), UNIT)], [])
        ax.tick_params(length=0)
        ax.grid(color=GRAY, linewidth=0.4)
    made.suptitle("Rows from top to bottom, keys from left to right", fontsize="medium")
    made.legend([Patch(facecolor=color, edgecolor=GRAY) for color in SHADES.values()], SHADES, frameon=False,
                loc="outside lower center", ncols=len(SHADES))
    return made


# Any charts.

def figure(lines, bars, title, columns=None):
    """Lines on one scale, and below them Bars, on one scale if they are in one row. There is one legend for all."""
    rows = math.ceil(len(lines) / 3)
    across = math.ceil(len(lines) / max(1, rows))  # four are two by two
    columns = columns or max(1, len(bars))
    bar_rows = [bars[i:i + columns] for i in range(0, len(bars), columns)]
    bar_heights = [1.2 + max(sum(0.16 * len(group) + 0.12 for group in x.groups) for x in row) for row in bar_rows]
    heights = [4.2 if len(lines) == 1 else 2.7 * rows] * bool(lines) + [sum(bar_heights)] * bool(bars)
    made = Figure(figsize=(max(9, 3.4 * across, 3.2 * columns), sum(heights) + 1), dpi=150, layout="constrained")
    places = iter(made.subfigures(len(heights), height_ratios=heights, squeeze=False).flat)
    if lines:
        draw_all(next(places).subplots(rows, across, sharey=True, squeeze=False).flat, lines, "y", 1.08)
    if bars:
        same_names = all(x.names == row[0].names for row in bar_rows for x in row)
        axes = next(places).subplots(len(bar_rows), columns, sharex=len(bar_rows) == 1, squeeze=False,
                                     sharey="row" if same_names else False, height_ratios=bar_heights).flat
        for some, panels in [(axes, bars)] if len(bar_rows) == 1 else [([ax], [x]) for ax, x in zip(axes, bars)]:
            draw_all(some, panels, "x", 1.3)
    handles = {label: handle for ax in reversed(made.axes) for handle, label in zip(*ax.get_legend_handles_labels())}
    labels = [style.label for style in (*STYLES.values(), MATMUL) if style.label in handles]
    inches = 0.6 + 0.075 * max(map(len, labels), default=0)
    made.legend([handles[label] for label in labels], labels, loc="outside lower center", frameon=False,
                ncols=max(1, int(made.get_figwidth() / inches)))
    made.suptitle(title)
    return made


def draw_all(axes, panels, axis, room):
    """Lines or Bars on one scale of the axis "x" or "y", with room for the numbers beside bars. Other axes go."""
    axes = list(axes)
    for ax in axes[len(panels):]:
        ax.remove()
    values, highest = [], 0
    for ax, panel in zip(axes, panels):
        values += [x for x in panel.draw(ax) if x > 0]
        ax.set_title(panel.title, fontsize="medium")
        ax.set_axisbelow(True)
        ax.grid(axis=axis, alpha=0.3)
        if panel.ceiling:
            highest = max(highest, panel.ceiling)
            (ax.axhline if axis == "y" else ax.axvline)(panel.ceiling, color=MATMUL.color, linestyle="--",
                                                        label=MATMUL.label, zorder=0)
    if values and max(values) > 300 * min(values):  # Triton's interpreter beside compiled code
        axes[0].set(**{f"{axis}scale": "log"})
    elif values:
        axes[0].set(**{f"{axis}lim": (0, max(room * max(values), 1.08 * highest))})
