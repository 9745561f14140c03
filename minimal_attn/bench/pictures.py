"""Pictures of rates and times. draw() puts into each a digest of what it was drawn from.

rates() shows the rows of a run, as its JSON has them. Shapes that differ in their length alone are lines over S, or
points over the bytes of a cache. All others are bars. Ours have thick lines, filled markers and solid bars, the others
thin lines, hollow markers and light bars. The colors are those of Okabe and Ito (jfly.uni-koeln.de/color), completed by
the "muted" ones of Paul Tol (personal.sron.nl/~pault): readers with any color vision can tell them apart.
"""

import hashlib
import inspect
import json
import math
import re
from pathlib import Path
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure

from .measure import MEASURED
from .options import OPS
from .tables import RATES, number, place


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
    ("cuda:apart", "cuda in two calls", ORANGE, "h"), ("cuda:dense", "cuda and flash_attention", PURPLE, "h"),
    ("triton", "triton", BLUE, "s"), ("triton:fp8", "triton in fp8", INDIGO, "s"),
    ("triton:rotary", "triton with rotary", SKY, "s"), ("triton:attend", "triton without append", INDIGO, "s"),
    ("triton:apart", "triton in two calls", SKY, "o"), ("triton:dense", "triton and flash_attention", INDIGO, "o"),
    ("minimal_attn", "minimal_attn", VERMILLION, "*"), ("activated", "sdpa after activate()", ORANGE, "*"),
    ("all_gather", "all-gather", VERMILLION, "X"), ("plain_all_gather", "all-gather by NCCL", ORANGE, "X"),
    ("ring", "ring", PURPLE, "X"), ("ulysses", "Ulysses", BLUE, "X"))}
STYLES |= {
    "torch_ours": Style("context_parallel (torch) with our kernels", GREEN, "P"),
    "torch_cudnn": Style("context_parallel (torch) with cuDNN", BLACK, "P"),
    "torch:cudnn": Style("cuDNN (torch)", BLACK, "o"),
    "flash_attn_interface": Style("FlashAttention-3", MAGENTA, "P"),
    "flash_attn": Style("FlashAttention-2 (flash_attn)", TEAL, "<"),
    "torch:flash": Style("FlashAttention-2 (torch)", GREEN, "^"),
    "torch:varlen": Style("varlen_attn (torch)", INDIGO, "X"),
    "flex": Style("FlexAttention (torch)", SKY, "D"),
    "torch:efficient": Style("memory-efficient (torch)", OLIVE, "v"),
    "torch:math": Style("math (torch)", INDIGO, ">"),
    "manual": Style("plain PyTorch (manual)", GRAY, "s"),
    "read": Style("plain read", GRAY, ""),  # the ceiling of caches: a line
    "cublas": Style("cuBLAS (torch)", BLACK, "s"),
    "torch": Style("torch", BLACK, "d"),
    "sdpa": Style("sdpa as it comes", BLACK, "*"),  # of transformers
    "reference": Style("reference", GRAY, "d"),
}
MATMUL = Style("large matmul (torch)", DARK_GRAY, "")  # the ceiling: a dashed line
BESIDE = {"padding": 3, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5}}  # texts beside bars
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
    more = {"window": row.get("window_size", "")[:1], "score": row.get("score"), "prefill": row.get("prefill"),
            "page": row.get("page_size"), "lengths": "drawn" * (row.get("lengths") == "drawn"),
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
    """Where a row is on the axis of a sweep: S, or the bytes of the keys and values of a cache."""
    if "page_size" in row:
        return 4 * row["batch_size"] * row["nheads_k"] * row["head_dim"] * row["seqlen_k"]
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


class Panel(NamedTuple):
    title: str
    is_sweep: bool  # lines over S, or points over bytes
    results: list  # {impl: row} of each setting

    @property
    def impls(self):
        """Those that have a number, in the order of STYLES."""
        return [impl for impl in STYLES if any(rows[impl]["ms"] for rows in self.results if impl in rows)]

    @property
    def rows(self):
        """A row of each setting."""
        return [next(iter(rows.values())) for rows in self.results]

    @property
    def rate(self):
        return "gbps" if "page_size" in self.rows[0] else "tflops"

    @property
    def shapes(self):
        """Each in words, without what all share."""
        shapes = [parts(row) for row in self.rows]
        return [words({x: size for x, size in shape.items() if x not in common(shapes)}) for shape in shapes]

    def values(self, impl):
        """The rate in each setting, NaN where there is none."""
        return [rows[impl][self.rate] or math.nan for rows in self.results]


def of_run(rows, meta):
    """The arguments of draw() for the rows of a run: what makes the figure, the rows, a title and {dtype: TFLOP/s of a
    matmul}."""
    op = {"forward": "attention", "sinks": "window"}.get(rows[0]["op"], rows[0]["op"])
    title = f"{OPS[op].title} {place(meta, {row['dtype'] for row in rows})}"
    return rates, rows, title, meta.get("matmul_tflops", {})


def panels_of(rows):
    """A Panel of lines for each sweep over S, dtype and mask, then one of bars for each other dtype and mask. A sweep
    has three lengths at least."""
    lengths, found, panels = {}, {}, []
    for row in rows:
        for sweep in sweeps(row):
            lengths.setdefault(sweep, set()).add(x_of(row))
    for row in rows:
        sweep = next((sweep for sweep in sweeps(row) if len(lengths[sweep]) > 2), None)
        setting = [value for key, value in row.items() if key not in ("impl", "us", "read_gbps", *MEASURED)]
        panel = found.setdefault((sweep, row["dtype"], row.get("causal", False)), {})
        panel.setdefault(str(setting), {})[row["impl"]] = row
    for (sweep, dtype, causal), settings in found.items():
        part = list(settings.values())
        head_dim, shared = sweep or (None, words(common([parts(next(iter(rows.values()))) for rows in part])))
        title = ", ".join(filter(None, [head_dim, dtype, "causal" * causal]))
        panels.append(Panel(f"{title}\n{shared}".rstrip(), sweep is not None, part))
    return sorted(panels, key=lambda panel: not panel.is_sweep)


def common(shapes):
    """{letter: size} of what several shapes have in common."""
    is_alone = len(shapes) == 1
    return {x: size for x, size in shapes[0].items() if not is_alone and all(y.get(x) == size for y in shapes)}


def rates(rows, title, ceilings):
    """Every panel of a run. ceilings: {dtype: TFLOP/s of a matmul}."""
    panels = panels_of(rows)
    lines, bars = ([panel for panel in panels if panel.is_sweep == kind] for kind in (True, False))
    rows = math.ceil(len(lines) / 3)
    columns = math.ceil(len(lines) / max(1, rows))  # four are two by two
    heights = [4.2 if len(lines) == 1 else 2.7 * rows] * bool(lines)
    heights += [max(1.2 + len(x.results) * (0.16 * len(x.impls) + 0.12) for x in bars)] if bars else []
    figure = Figure(figsize=(max(9, 3.4 * columns, 3.2 * len(bars)), sum(heights) + 1), dpi=150, layout="constrained")
    places = iter(figure.subfigures(len(heights), height_ratios=heights, squeeze=False).flat)
    if lines:
        draw_all(next(places).subplots(rows, columns, sharey=True, squeeze=False), lines, ceilings)
    if bars:
        same_shapes = all(x.shapes == bars[0].shapes for x in bars)
        draw_all(next(places).subplots(1, len(bars), sharex=True, sharey=same_shapes, squeeze=False), bars, ceilings)
    return finished(figure, title)


def draw_all(axes, panels, ceilings):
    """Panels of one kind on one scale. Axes beyond their number are removed."""
    axes, is_sweep = list(axes.flat), panels[0].is_sweep
    name, draw_panel = ("y", draw_sweep) if is_sweep else ("x", draw_bars)
    for ax in axes[len(panels):]:
        ax.remove()
    values, highest = [], 0
    for ax, panel in zip(axes, panels):
        ceiling = ceilings.get(panel.rows[0]["dtype"], 0)
        draw_panel(ax, panel)
        dress(ax, panel.title, name, ceiling)
        values += [x for impl in panel.impls for x in panel.values(impl) if x > 0]
        highest = max(highest, ceiling)
    if values and max(values) > 300 * min(values):  # Triton's interpreter beside compiled code
        axes[0].set(**{f"{name}scale": "log"})
    elif values:  # with room for the numbers beside the bars
        axes[0].set(**{f"{name}lim": (0, max((1.08 if is_sweep else 1.3) * max(values), 1.08 * highest))})


def dress(ax, title, axis, ceiling=None):
    ax.set_title(title, fontsize="medium")
    ax.set_axisbelow(True)
    ax.grid(axis=axis, alpha=0.3)
    if ceiling:
        (ax.axhline if axis == "y" else ax.axvline)(ceiling, color=MATMUL.color, linestyle="--", label=MATMUL.label,
                                                    zorder=0)


def finished(figure, title):
    """The figure with a title and one legend for all panels, in the order of STYLES, with as many columns as fit."""
    handles = {label: handle for ax in reversed(figure.axes) for handle, label in zip(*ax.get_legend_handles_labels())}
    labels = [style.label for style in (*STYLES.values(), MATMUL) if style.label in handles]
    inches = 0.6 + 0.075 * max(map(len, labels), default=0)
    figure.legend([handles[label] for label in labels], labels, loc="outside lower center", frameon=False,
                  ncols=max(1, int(figure.get_figwidth() / inches)))
    figure.suptitle(title)
    return figure


def draw_lines(ax, lines, name_of, is_line=lambda impl: True):
    """lines: {implementation: [(x, y), ...]}, over powers of two that name_of(x) names."""
    for impl, points in lines.items():
        ax.plot(*zip(*sorted(points)), linestyle="-" if is_line(impl) else "", **STYLES[impl].line())
    ticks = sorted({x for points in lines.values() for x, _ in points})
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, map(name_of, ticks))


def in_thousands(x):
    return f"{x >> 10}k" if x % 1024 == 0 else str(x)


def draw_sweep(ax, panel):
    """TFLOP/s over S. For caches, GB/s over the bytes of keys and values: the plain read as a line, all others as
    points."""
    of_cache = panel.rate == "gbps"
    lines = {impl: list(zip(map(x_of, panel.rows), panel.values(impl))) for impl in panel.impls}
    if of_cache:
        draw_lines(ax, lines, lambda x: f"{x / 1e6:.3g}" if x < 1e9 else f"{x / 1e6:.0f}", lambda impl: impl == "read")
    else:
        draw_lines(ax, lines, in_thousands)
    ax.set_xlabel("MB of keys and values" if of_cache else "sequence length S")
    if ax.get_subplotspec().is_first_col():
        ax.set_ylabel(RATES[panel.rate])


def draw_bars(ax, panel):
    """Shapes from top to bottom, and for each a bar of each implementation. Beside a bar stand its rate and its speed
    over that of the baseline, or of the same implementation without a score."""
    impls, count = panel.impls, len(panel.results)
    baseline = next((impl for impl in BASELINES if impl in impls), None)
    sizes = [words(parts(row) | {"score": ""}) for row in panel.rows]
    plain = {x: rows for x, row, rows in zip(sizes, panel.rows, panel.results) if row.get("score") == "none"}
    height = 0.8 / max(1, len(impls))
    for i, impl in enumerate(impls):
        style, values = STYLES[impl], panel.values(impl)
        texts = []
        for x, value, rows in zip(sizes, values, panel.results):
            other = (plain.get(x, rows)[impl] if plain else rows.get(baseline, {})).get(panel.rate) or value
            factor = f" ({value / other:.2f}×)" if other != value else ""
            texts.append("" if math.isnan(value) else number(value) + factor)
        bars = ax.barh([y + (i + 0.5) * height - 0.4 for y in range(count)], values, height, label=style.label,
                       edgecolor=style.color, facecolor=style.color if style.is_ours else (style.color, 0.2))
        ax.bar_label(bars, texts, fontsize=8, **BESIDE)
    ax.set_yticks(range(count), panel.shapes)
    ax.set_ylim(count - 0.5, -0.5)
    over = "score none" if plain else baseline and STYLES[baseline].label.partition(" (")[0]
    ax.set_xlabel(RATES[panel.rate] + (f" (× {over})" if over else ""))


# Other pictures.

def bars(panels, title, label, columns):
    """Bars in panels that have a scale each: {title of a panel: (bars as (name, implementation, value, the part of it
    that is solid, text), TFLOP/s of a matmul or None)}."""
    rows = math.ceil(len(panels) / columns)
    counts = [len(values) for values, _ in panels.values()][::columns]
    size = 9 if columns == 1 else 5 * columns, 0.36 * sum(counts) + 0.8 * rows + 0.7
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    axes = figure.subplots(rows, columns, sharey="row", height_ratios=[count + 1 for count in counts], squeeze=False)
    for ax, (heading, (values, ceiling)) in zip(axes.flat, panels.items()):
        names, impls, lengths, solid, texts = zip(*values)
        colors = [STYLES[impl].color for impl in impls]
        ax.barh(names, solid, 0.7, color=colors)
        rest = ax.barh(names, [x - part for x, part in zip(lengths, solid)], 0.7, left=solid, edgecolor=colors,
                       color=[(color, 0.2) for color in colors])
        ax.bar_label(rest, texts, **BESIDE)
        longest = 1.1 * max(ceiling, *lengths) if ceiling else 1.5 * max(lengths)
        ax.set(ylim=(len(values) - 0.5, -0.5), xlim=(0, longest))
        dress(ax, heading, "x", ceiling)
    for ax in axes[-1]:
        ax.set_xlabel(label)
    return finished(figure, title)


def curves(panels, title, labels):
    """Lines in panels: {title of a panel: {implementation: [(x, y), ...]}}. labels: those of x and y."""
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.5 * columns + 1, 3.2 * rows + 0.7), dpi=150, layout="constrained")
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False).flat
    for ax, (heading, lines) in zip(axes, panels.items()):
        draw_lines(ax, lines, in_thousands)
        ax.set_xlabel(labels[0])
        ax.set_ylim(bottom=0)  # and that of all others
        dress(ax, heading, "both")
    figure.supylabel(labels[1], fontsize="medium")
    return finished(figure, title)
