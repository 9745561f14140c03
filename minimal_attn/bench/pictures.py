"""Pictures of rates and times. draw() puts into each a digest of what it was drawn from.

rates() shows the rows of a run, as its JSON has them. Shapes that differ in their length alone are lines over S, or
points over the bytes of a cache. All others are bars.

Each implementation looks the same in every picture of the project. The colors are those of Okabe and Ito
(jfly.uni-koeln.de/color), completed by the "muted" ones of Paul Tol (personal.sron.nl/~pault): readers with any color
vision can tell them apart. Ours have thick lines, filled markers and solid bars, the others thin lines, hollow markers
and light bars.
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
from .tables import RATES, number, place, speedup


class Style(NamedTuple):
    label: str  # without a comma: a legend may add a dtype after one
    color: str
    marker: str
    is_ours: bool = False

    def line(self, ours=2.5, others=1.2):
        """The options of a line, whose widths are given."""
        return {"color": self.color, "marker": self.marker, "markerfacecolor": self.color if self.is_ours else "white",
                "label": self.label, "linewidth": ours if self.is_ours else others, "zorder": 2 + self.is_ours}


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
    ("triton", "triton", BLUE, "s"), ("triton:rotary", "triton with rotary", SKY, "s"),
    ("triton:attend", "triton without append", INDIGO, "s"), ("triton:apart", "triton in two calls", SKY, "o"),
    ("triton:dense", "triton and flash_attention", INDIGO, "o"), ("minimal_attn", "minimal_attn", VERMILLION, "*"),
    ("activated", "sdpa after activate()", ORANGE, "*"), ("all_gather", "all-gather", VERMILLION, "X"),
    ("plain_all_gather", "all-gather by NCCL", ORANGE, "X"), ("ring", "ring", PURPLE, "X"),
    ("ulysses", "Ulysses", BLUE, "X"))}
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
# Speed-ups are over the first of these.
BASELINES = "read", "manual", "cublas", "torch", "torch:varlen", "torch:cudnn", "torch:flash"
LINES = "-", ":", "-.", (0, (1, 3)), (0, (6, 2, 1, 2, 1, 2))  # for each dtype of a panel


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
    shared: str  # the sizes that all its shapes share, in words
    is_sweep: bool  # lines over S, or points over bytes
    results: list  # {impl: row} of each setting

    @property
    def impls(self):
        return measured_in(self.results)

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


def measured_in(results):
    """The implementations that have a number in results, in the order of STYLES."""
    return [impl for impl in STYLES if any(rows[impl]["ms"] for rows in results if impl in rows)]


def by_setting(rows):
    """[{impl: row}] of the settings of rows."""
    found = {}
    for row in rows:
        setting = [(key, value) for key, value in row.items() if key not in ("impl", "us", "read_gbps", *MEASURED)]
        found.setdefault(json.dumps(setting), {})[row["impl"]] = row
    return list(found.values())


def of_run(rows, meta):
    """The arguments of draw() for the rows of a run: what makes the figure, the rows, a title with the names of ours,
    and {dtype: TFLOP/s of a matmul}."""
    shown = [STYLES[impl] for impl in measured_in(by_setting(rows))]
    ours = ", ".join(style.label.removesuffix(" (ours)") for style in shown if style.is_ours)
    op = {"forward": "attention", "sinks": "window"}.get(rows[0]["op"], rows[0]["op"])
    title = f"{OPS[op].title}{f' ({ours})' * bool(ours)} {place(meta, {row['dtype'] for row in rows})}"
    return rates, rows, title, meta.get("matmul_tflops", {})


def panels_of(results):
    """A Panel of lines for each sweep over S, dtype and mask, then one of bars for each other dtype and mask.

    A sweep has three lengths at least. Lines of a dtype that has only one are drawn into the panel of another dtype.
    """
    lengths, found, merged, panels = {}, {}, {}, []
    rows_of = [(next(iter(rows.values())), rows) for rows in results]
    for row, _ in rows_of:
        for sweep in sweeps(row):
            lengths.setdefault(sweep, set()).add(x_of(row))
    for row, rows in rows_of:
        sweep = next((sweep for sweep in sweeps(row) if len(lengths[sweep]) > 2), None)
        found.setdefault((sweep, row["dtype"], row.get("causal", False)), []).append(rows)
    for key, part in found.items():
        if key[0] and len(measured_in(part)) == 1:
            alike = [x for x in found if x[::2] == key[::2]]
            key = next((x for x in alike if len(measured_in(found[x])) > 1), alike[0])
        merged.setdefault(key, []).extend(part)
    for (sweep, dtype, causal), part in merged.items():
        head_dim, shared = sweep or (None, words(common([parts(next(iter(rows.values()))) for rows in part])))
        title = ", ".join(filter(None, [head_dim, dtype, "causal" * causal]))
        panels.append(Panel(title, shared, sweep is not None, part))
    return sorted(panels, key=lambda panel: not panel.is_sweep)


def common(shapes):
    """{letter: size} of what several shapes have in common."""
    one, *others = (shape.items() for shape in shapes)
    return dict(sorted(set(one).intersection(*others), key=list(one).index)) if others else {}


def rates(rows, title, ceilings):
    """Every panel of a run. ceilings: {dtype: TFLOP/s of a matmul}."""
    panels = panels_of(by_setting(rows))
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
    legend(figure)
    figure.suptitle(title)
    return figure


def draw_all(axes, panels, ceilings):
    """Panels of one kind on one scale. Axes beyond their number are removed."""
    axes, name = list(axes.flat), "y" if panels[0].is_sweep else "x"
    for ax in axes[len(panels):]:
        ax.remove()
    for ax, panel in zip(axes, panels):
        ceiling = ceilings.get(panel.rows[0]["dtype"])  # in the dtype that the title names
        (draw_sweep if panel.is_sweep else draw_bars)(ax, panel)
        if ceiling and panel.is_sweep:
            dtype = f", {panel.rows[0]['dtype']}" * (len({row["dtype"] for row in panel.rows}) > 1)
            ax.axhline(ceiling, color=MATMUL.color, linestyle="--", label=MATMUL.label + dtype)
        elif ceiling:
            ax.axvline(ceiling, color=MATMUL.color, linestyle="--", label=MATMUL.label, zorder=0)
        dress(ax, f"{panel.title}\n{panel.shared}".rstrip(), name)
    values = [rows[impl][panel.rate] for panel in panels for rows in panel.results for impl in panel.impls
              if rows[impl][panel.rate]]
    ceiling = max(ceilings.get(panel.rows[0]["dtype"], 0) for panel in panels)
    for ax in axes[:len(panels)]:
        if values and max(values) > 300 * min(values):  # Triton's interpreter beside compiled code
            ax.set(**{f"{name}scale": "log"})
        elif values and panels[0].is_sweep:
            ax.set_ylim(0, 1.08 * max(*values, ceiling))
        elif values:  # with room for the numbers beside the bars
            ax.set_xlim(0, max(1.3 * max(values), 1.05 * ceiling))


def dress(ax, title, axis):
    ax.set_title(title, fontsize="medium")
    ax.set_axisbelow(True)
    ax.grid(axis=axis, alpha=0.3)


def legend(figure):
    """One for all panels, in the order of STYLES, with as many columns as fit."""
    order = [style.label for style in (*STYLES.values(), MATMUL)]
    handles = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    labels = sorted(handles, key=lambda label: (order.index(label.partition(",")[0]), label))
    inches = 0.6 + 0.075 * max(map(len, labels), default=0)
    figure.legend([handles[label] for label in labels], labels, loc="outside lower center", frameon=False,
                  ncols=max(1, int(figure.get_figwidth() / inches)))


def draw_sweep(ax, panel):
    """TFLOP/s over S. The title names the first dtype, the legend the others, which have another kind of line. For
    caches, GB/s over the bytes of keys and values: the plain read as a line, all others as points."""
    of_cache = panel.rate == "gbps"
    for dtype, line in zip(dict.fromkeys(row["dtype"] for row in panel.rows), LINES):
        for impl in panel.impls:
            style = STYLES[impl].line(*(1.5, 1.5) if of_cache else ())
            style["linestyle"] = "" if of_cache and impl != "read" else line
            style["label"] += f", {dtype}" * (line != LINES[0])
            points = sorted((math.log2(x_of(rows[impl])), rows[impl][panel.rate] or math.nan) for rows in panel.results
                            if rows[impl]["dtype"] == dtype)
            if not all(math.isnan(y) for _, y in points):
                ax.plot(*zip(*points), **style)
    sizes = sorted({x_of(row) for row in panel.rows})
    names = [f"{x / 1e6:.3g}" if x < 1e9 else f"{x / 1e6:.0f}" for x in sizes] if of_cache else \
        [f"{x // 1024}k" if x % 1024 == 0 else x for x in sizes]
    ax.set_xticks([math.log2(x) for x in sizes], names)
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
        style, values = STYLES[impl], [rows[impl][panel.rate] or math.nan for rows in panel.results]
        factors = [rows is not plain.get(x) and value / (plain.get(x, rows)[impl][panel.rate] or math.nan) if plain else
                   impl != baseline and speedup(rows, impl, baseline)
                   for x, value, rows in zip(sizes, values, panel.results)]
        bars = ax.barh([y + (i + 0.5) * height - 0.4 for y in range(count)], values, height, label=style.label,
                       edgecolor=style.color, facecolor=style.color if style.is_ours else (style.color, 0.2))
        ax.bar_label(bars, ["" if math.isnan(x) else number(x) + (f" ({factor:.2f}×)" if factor else "")
                            for x, factor in zip(values, factors)], padding=3, fontsize=8,
                     bbox=dict(facecolor="white", edgecolor="none", pad=0.5))
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
        ax.bar_label(rest, texts, padding=3, bbox=dict(facecolor="white", edgecolor="none", pad=0.5))
        if ceiling:
            ax.axvline(ceiling, color=MATMUL.color, linestyle="--", label=MATMUL.label, zorder=0)
        longest = 1.1 * max(ceiling, *lengths) if ceiling else 1.5 * max(lengths)
        ax.set(ylim=(len(values) - 0.5, -0.5), xlim=(0, longest))
        dress(ax, heading, "x")
    for ax in axes[-1]:
        ax.set_xlabel(label)
    figure.suptitle(title)
    legend(figure)
    return figure


def curves(panels, title, labels):
    """Lines over powers of two, in panels: {title of a panel: {implementation: {x: y}}}. labels: those of x and y."""
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.5 * columns + 1, 3.2 * rows + 0.7), dpi=150, layout="constrained")
    axes = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
    for ax, (heading, lines) in zip(axes, panels.items()):
        for impl, points in lines.items():
            ax.plot(list(points), list(points.values()), **STYLES[impl].line(2, 1))
        ax.set_xscale("log", base=2)
        ticks = sorted({x for points in lines.values() for x in points})
        ax.set_xticks(ticks, [f"{x >> 10}K" if x >= 1024 else str(x) for x in ticks])
        ax.set_xlabel(labels[0])
        dress(ax, heading, "both")
    largest = max(y for lines in panels.values() for points in lines.values() for y in points.values())
    axes[0].set_ylim(0, 1.05 * largest)  # and that of all others
    figure.supylabel(labels[1], fontsize="medium")
    figure.suptitle(title)
    legend(figure)
    return figure
