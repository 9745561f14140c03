"""TFLOP/s, GB/s and loss curves in pictures. Every picture holds a digest of what it was drawn from.

results is everywhere {setting: {impl: row}}, and ceilings {dtype: TFLOP/s of a matmul}. Shapes that differ in their
length alone are drawn as lines over S, all others as bars: groups by shape, and for scores.py groups by implementation.
For decode.py there are points over the bytes instead of lines over S. Read next: styles.py, then page.py, which puts
the panels into a page.
"""

import hashlib
import io
import json
import math
import re
from pathlib import Path
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure

from . import styles
from .styles import MATMUL, STYLES
from .tables import RATES, number, rate_of, speedup

# Speed-ups are over the first of these.
BASELINES = "read", "manual", "cublas", "torch", "torch:varlen", "torch:cudnn", "torch:flash"
LINES = "-", ":", "-.", (0, (1, 3)), (0, (6, 2, 1, 2, 1, 2))  # for each dtype of a panel
STEPS = 4  # from a marker of a loss curve to one of the next curve
DIGEST = re.compile(rb"data-sha256 ([0-9a-f]{64})")


class Panel(NamedTuple):
    title: str
    shared: str  # the sizes that all its shapes share, in words
    is_sweep: bool  # lines over S, or points over bytes
    results: dict

    @property
    def impls(self):
        return measured_in(self.results)

    @property
    def rate(self):
        return rate_of(self.results)

    @property
    def has_scores(self):
        """Whether its shapes are those of scores.py."""
        return all(hasattr(setting.shape, "plain") for setting in self.results)

    @property
    def baseline(self):
        return next((impl for impl in BASELINES if impl in self.impls), None)


def measured_in(results):
    """The implementations that have a number in results, in the order of STYLES."""
    return [impl for impl in STYLES if any(rows[impl]["ms"] for rows in results.values() if impl in rows)]


def title_of(title, results, where):
    """The title of a picture or page, with the names of ours that it shows."""
    ours = [STYLES[impl].label.removesuffix(" (ours)") for impl in measured_in(results) if STYLES[impl].is_ours]
    return f"{title} ({', '.join(ours)}) {where}" if ours else f"{title} {where}"


def panels_of(results):
    """A Panel of lines for each sweep over S, dtype and mask, then one of bars for each other dtype and mask.

    A sweep has three lengths at least. Lines of a dtype that has only one are drawn into the panel of another dtype.
    """
    lengths, parts, merged = {}, {}, {}
    for setting in results:
        for sweep in setting.shape.sweeps:
            lengths.setdefault(sweep, set()).add(setting.shape.x)
    for setting, rows in results.items():
        sweep = next((sweep for sweep in setting.shape.sweeps if len(lengths[sweep]) > 2), None)
        parts.setdefault((sweep, setting.dtype, setting.causal), {})[setting] = rows
    for (sweep, dtype, causal), part in parts.items():
        alike = [key for key in parts if sweep and key[::2] == (sweep, causal)]
        key = (sweep, dtype, causal)
        if sweep and len(measured_in(part)) == 1:
            key = next((key for key in alike if len(measured_in(parts[key])) > 1), alike[0])
        merged.setdefault(key, {}).update(part)
    panels = []
    for (sweep, dtype, causal), part in merged.items():
        head_dim, shared = sweep or (None, words(common([setting.shape for setting in part])))
        title = ", ".join(filter(None, [head_dim, dtype, "causal" * causal]))
        panels.append(Panel(title, shared, sweep is not None, part))
    return sorted(panels, key=lambda panel: not panel.is_sweep)


def common(shapes):
    """{letter: size} of what several shapes have in common."""
    first, *others = (shape.parts.items() for shape in shapes)
    return dict(sorted(set(first).intersection(*others), key=list(first).index)) if others else {}


def words(parts):
    """{"B": 4, "H": "32/8"} -> "B 4, H 32/8" """
    return ", ".join(f"{letter} {size}" for letter, size in parts.items())


def digest_of(*drawn, code=()):
    """A digest of what a picture shows, as JSON, and of the code that draws it: this file, styles.py and the files
    code."""
    digest = hashlib.sha256(json.dumps(drawn).encode())
    for file in (__file__, styles.__file__, *code):
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def digest_in(file):
    """The digest that a picture or a page holds; None if there is no such file, or none in it."""
    found = Path(file).exists() and DIGEST.search(Path(file).read_bytes())
    return found[1].decode() if found else None


def save(figure, file, description=None, **options):
    """PNG or SVG. The same figure makes the same file."""
    with rc_context({"svg.hashsalt": "minimal_attn"}):
        figure.savefig(file, metadata={"Description": description, "Date": None}, bbox_inches="tight", pad_inches=0.15,
                       **options)


def digest_of_plot(results, title, ceilings):
    """The digest that plot() puts into a picture of the same."""
    panels = [(panel.title, panel.shared, [(words(setting.shape.parts), rows) for setting, rows in
                                           panel.results.items()]) for panel in panels_of(results)]
    return digest_of(title, ceilings, panels)


def plot(file, results, title, ceilings):
    """Every panel in one picture, PNG or SVG by the suffix of file."""
    panels = panels_of(results)
    lines, bars = ([panel for panel in panels if panel.is_sweep == kind] for kind in (True, False))
    rows = math.ceil(len(lines) / 3)
    columns = math.ceil(len(lines) / max(1, rows))  # four are two by two
    heights = [4.2 if len(lines) == 1 else 2.7 * rows] * bool(lines)
    heights += [max(map(height_of_bars, bars), default=0)] * bool(bars)
    figure = Figure(figsize=(max(9, 3.4 * columns, 3.2 * len(bars)), sum(heights) + 1), dpi=150, layout="constrained")
    parts = iter(figure.subfigures(len(heights), height_ratios=heights, squeeze=False).flat)
    if lines:
        axes = next(parts).subplots(rows, columns, sharey=True, squeeze=False)
        draw_all(list(axes.flat), lines, ceilings)
    if bars:
        same_shapes = len({tuple(setting.shape for setting in panel.results) for panel in bars}) == 1
        same_shapes &= not any(panel.has_scores for panel in bars)  # which leave out what is not served
        axes = next(parts).subplots(1, len(bars), sharex=True, sharey=same_shapes, squeeze=False)
        draw_all(list(axes.flat), bars, ceilings)
    legend(figure)
    figure.suptitle(title)
    save(figure, file, f"data-sha256 {digest_of_plot(results, title, ceilings)}")


def svg(panel, ceilings):
    """One panel as the text of an SVG, made to be read on a phone too."""
    height = 3.8 if panel.is_sweep else height_of_bars(panel)
    figure = Figure(figsize=(6, height + 1), layout="constrained")
    draw_all([figure.subplots()], [panel], ceilings)
    legend(figure)
    text = io.StringIO()
    save(figure, text, format="svg")
    return text.getvalue()


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


def draw_all(axes, panels, ceilings):
    """Panels of one kind on one scale. Axes beyond their number are removed."""
    for ax in axes[len(panels):]:
        ax.remove()
    for ax, panel in zip(axes, panels):
        draw_sweep = draw_points if panel.rate == "gbps" else draw_lines
        draw = draw_sweep if panel.is_sweep else draw_scores if panel.has_scores else draw_bars
        draw(ax, panel, ceilings)
        ax.set_title(f"{panel.title}\n{panel.shared}".rstrip(), fontsize="medium")
        ax.set_axisbelow(True)
    values = [rows[impl][panel.rate] for panel in panels for rows in panel.results.values() for impl in panel.impls
              if rows[impl][panel.rate]]
    is_log = values and max(values) > 300 * min(values)  # Triton's interpreter beside compiled code
    ceiling = max(ceiling_of(panel, ceilings) or 0 for panel in panels)
    for ax, panel in zip(axes, panels):
        name = "y" if panel.is_sweep else "x"
        ax.grid(axis=name, alpha=0.3)
        if is_log:
            ax.set(**{f"{name}scale": "log"})
        elif values and panel.is_sweep:
            ax.set_ylim(0, 1.08 * max(*values, ceiling))
        elif values:  # with room for the numbers beside the bars
            ax.set_xlim(0, max(1.3 * max(values), 1.05 * ceiling))


def ceiling_of(panel, ceilings):
    """The matmul in the dtype that its title names, or None."""
    return ceilings.get(next(iter(panel.results)).dtype)


def draw_lines(ax, panel, ceilings):
    """TFLOP/s over S. The title names the first dtype, the legend the others, which have another kind of line."""
    dtypes = dict.fromkeys(setting.dtype for setting in panel.results)
    for dtype, line in zip(dtypes, LINES):
        results = sorted((setting.shape.x, rows) for setting, rows in panel.results.items() if setting.dtype == dtype)
        for impl in panel.impls:
            style = STYLES[impl]
            y = [rows[impl]["tflops"] or math.nan for _, rows in results]
            if not all(map(math.isnan, y)):
                ax.plot([math.log2(x) for x, _ in results], y, linestyle=line, color=style.color, marker=style.marker,
                        markerfacecolor=style.color if style.is_ours else "white", zorder=3 if style.is_ours else 2,
                        linewidth=2.5 if style.is_ours else 1.2,
                        label=style.label + f", {dtype}" * (line != LINES[0]))
    if ceiling := ceiling_of(panel, ceilings):
        ax.axhline(ceiling, color=MATMUL.color, linestyle="--",
                   label=MATMUL.label + f", {next(iter(dtypes))}" * (len(dtypes) > 1))
    lengths = sorted({setting.shape.x for setting in panel.results})
    ax.set_xticks([math.log2(x) for x in lengths], [f"{x // 1024}k" if x % 1024 == 0 else x for x in lengths])
    ax.set_xlabel("sequence length S")
    if ax.get_subplotspec().is_first_col():
        ax.set_ylabel("TFLOP/s")


def draw_points(ax, panel, ceilings):
    """GB/s over the bytes of keys and values: the plain read as a line, all others as points."""
    for impl in panel.impls:
        style = STYLES[impl]
        points = sorted((math.log2(setting.shape.x), rows[impl]["gbps"]) for setting, rows in panel.results.items()
                        if rows[impl]["gbps"])
        ax.plot(*zip(*points), linestyle="-" if impl == "read" else "", color=style.color, marker=style.marker,
                markerfacecolor=style.color if style.is_ours else "white", zorder=3 if style.is_ours else 2,
                label=style.label)
    sizes = sorted({setting.shape.x for setting in panel.results})
    ax.set_xticks([math.log2(x) for x in sizes], [f"{x / 1e6:.3g}" if x < 1e9 else f"{x / 1e6:.0f}" for x in sizes])
    ax.set_xlabel("MB of keys and values")
    if ax.get_subplotspec().is_first_col():
        ax.set_ylabel("GB/s")


def height_of_bars(panel):
    """Height of a panel of bars, in inches."""
    return 1.2 + len(panel.results) * (0.16 * len(panel.impls) + 0.12)


def draw_bars(ax, panel, ceilings):
    """Shapes from top to bottom, and for each a bar of each implementation, with the speed-up over the baseline."""
    impls, shapes = panel.impls, [setting.shape for setting in panel.results]
    height = 0.8 / max(1, len(impls))
    for i, impl in enumerate(impls):
        rates = [rows[impl][panel.rate] or math.nan for rows in panel.results.values()]
        factors = [impl != panel.baseline and speedup(rows, impl, panel.baseline) for rows in panel.results.values()]
        bars_of(ax, impl, [y + (i + 0.5) * height - 0.4 for y in range(len(shapes))], rates, factors, height)
    ax.set_yticks(range(len(shapes)), different_words(shapes))
    ax.set_ylim(len(shapes) - 0.5, -0.5)
    baseline = f" (× {STYLES[panel.baseline].label.partition(' (')[0]})" if panel.baseline else ""
    finish_bars(ax, panel, ceilings, f"{RATES[panel.rate]}{baseline}")


def draw_scores(ax, panel, ceilings):
    """Implementations from top to bottom, and for each a bar of each shape that it serves, with its speed over that of
    the same shape without a score."""
    names, ticks = dict(zip(panel.results, different_words([setting.shape for setting in panel.results]))), {}
    y = 0
    for impl in panel.impls:
        served = {setting: rows[impl]["tflops"] for setting, rows in panel.results.items() if rows[impl]["tflops"]}
        plain = [x._replace(shape=x.shape.plain) for x in served]
        factors = [x != dense and dense in served and served[x] / served[dense] for x, dense in zip(served, plain)]
        places = range(y, y + len(served))
        bars_of(ax, impl, places, list(served.values()), factors, 0.8)
        ticks |= {place: names[setting] for place, setting in zip(places, served)}
        y += len(served) + 1  # a gap between the groups
    ax.set_yticks(list(ticks), list(ticks.values()))
    ax.set_ylim(y - 1.5, -0.5)
    finish_bars(ax, panel, ceilings, "TFLOP/s (× score none)")


def bars_of(ax, impl, places, rates, factors, height):
    """Draws the bars of one implementation. Beside each bar stand its rate and, if there is one, its factor."""
    style = STYLES[impl]
    bars = ax.barh(places, rates, height, label=style.label, edgecolor=style.color,
                   facecolor=style.color if style.is_ours else (style.color, 0.2))
    ax.bar_label(bars, ["" if math.isnan(x) else number(x) + (f" ({factor:.2f}×)" if factor else "")
                        for x, factor in zip(rates, factors)], padding=3, fontsize=8,
                 bbox=dict(facecolor="white", edgecolor="none", pad=0.5))


def different_words(shapes):
    """Each in words, without what all share."""
    shared = common(shapes)
    return [words({letter: size for letter, size in shape.parts.items() if letter not in shared}) for shape in shapes]


def finish_bars(ax, panel, ceilings, label):
    if ceiling := ceiling_of(panel, ceilings):
        ax.axvline(ceiling, color=MATMUL.color, linestyle="--", label=MATMUL.label, zorder=0)
    ax.set_xlabel(label)


def digest_of_losses(losses, tokens_per_s, title):
    """The digest that plot_losses() puts into a picture of the same."""
    return digest_of(losses, tokens_per_s, title)


def plot_losses(file, losses, tokens_per_s, title):
    """The curves of {backend: loss of each step}, and how far each is from the last backend. The curves have their
    markers by turns, so that one line with all markers means equal losses."""
    figure = Figure(figsize=(8, 5.5), dpi=150, layout="constrained")
    *others, baseline = losses
    above, *below = figure.subplots(1 + bool(others), sharex=True, height_ratios=(3, 1)[:1 + bool(others)],
                                    squeeze=False).flat
    for i, (backend, values) in enumerate(losses.items()):
        style = STYLES[backend]
        label = f"{style.label}: {float(f'{tokens_per_s[backend]:.3g}'):,.0f} tokens/s"
        above.plot(values, label=label, color=style.color, linewidth=1, marker=style.marker, markersize=5,
                   markerfacecolor=style.color if style.is_ours else "white",
                   markevery=(STEPS * i, STEPS * len(losses)))
        for ax in below:
            ax.plot([x - y for x, y in zip(values, losses[baseline])], color=style.color, linewidth=1)
    above.set(ylabel="loss, nats per byte", title=title)
    above.legend()
    for ax in below:
        ax.set_ylabel(f"loss − loss\nwith {baseline}")
    figure.axes[-1].set_xlabel("step")
    save(figure, file, f"data-sha256 {digest_of_losses(losses, tokens_per_s, title)}")


def digest_of_steps(panels, title):
    """The digest that plot_steps() puts into a picture of the same."""
    return digest_of(panels, title)


def plot_steps(file, panels, title):
    """Bars from the slowest to the fastest, in panels that have a scale each: {title of a panel: (bars as (name,
    implementation, TFLOP/s), TFLOP/s of a matmul)}."""
    counts = [len(bars) for bars, _ in panels.values()]
    figure = Figure(figsize=(9, 0.36 * sum(counts) + 0.8 * len(counts) + 0.7), dpi=150, layout="constrained")
    axes = figure.subplots(len(panels), height_ratios=[count + 1 for count in counts], squeeze=False).flat
    for ax, (heading, (bars, ceiling)) in zip(axes, panels.items()):
        names, impls, tflops = zip(*sorted(bars, key=lambda bar: bar[2]))
        shown = [STYLES[impl] for impl in impls]
        drawn = ax.barh(names, tflops, 0.7, edgecolor=[style.color for style in shown],
                        color=[(style.color, 1 if style.is_ours else 0.2) for style in shown])
        ax.bar_label(drawn, fmt="%.0f", padding=3, bbox=dict(facecolor="white", edgecolor="none", pad=0.5))
        ax.axvline(ceiling, color=MATMUL.color, linestyle="--", label=MATMUL.label, zorder=0)
        ax.set(ylim=(len(bars) - 0.5, -0.5), xlim=(0, 1.1 * max(ceiling, *tflops)))
        ax.set_title(heading, fontsize="medium")
        ax.set_axisbelow(True)
        ax.grid(axis="x", alpha=0.3)
    figure.axes[-1].set_xlabel("TFLOP/s")
    legend(figure)
    figure.suptitle(title)
    save(figure, file, f"data-sha256 {digest_of_steps(panels, title)}")


def digest_of_models(panels, title):
    """The digest that plot_models() puts into a picture of the same."""
    return digest_of(panels, title)


def plot_models(file, panels, title):
    """The times of whole models, and solid the part of attention, in panels that have a scale each:
    {title of a panel: {implementation: (ms, ms of the attention kernels)}}. The first one is what others are compared
    with."""
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    bars = max(map(len, panels.values()))
    figure = Figure(figsize=(5 * columns, rows * (0.36 * bars + 0.8) + 0.7), dpi=150, layout="constrained")
    axes = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
    for ax in axes[len(panels):]:
        ax.remove()
    for ax, (heading, times) in zip(axes, panels.items()):
        names = [STYLES[impl].label for impl in times]
        colors = [STYLES[impl].color for impl in times]
        ms, of_attention = zip(*times.values())
        ax.barh(names, of_attention, 0.7, color=colors)
        rest = ax.barh(names, [x - part for x, part in zip(ms, of_attention)], 0.7, left=of_attention,
                       edgecolor=colors, color=[(color, 0.2) for color in colors])
        ax.bar_label(rest, [f"{number(x)} ({ms[0] / x:.2f}×)" if i else number(x) for i, x in enumerate(ms)], padding=3)
        ax.set(ylim=(len(times) - 0.5, -0.5), xlim=(0, 1.5 * max(ms)))
        ax.set_title(heading, fontsize="medium")
        ax.set_axisbelow(True)
        ax.grid(axis="x", alpha=0.3)
    figure.supxlabel("ms (solid: attention kernels)", fontsize="medium")
    figure.suptitle(title)
    save(figure, file, f"data-sha256 {digest_of_models(panels, title)}")


def digest_of_curves(panels, title, labels):
    """The digest that plot_curves() puts into a picture of the same."""
    return digest_of(panels, title, labels)


def plot_curves(file, panels, title, labels):
    """Lines over powers of two, in panels: {title of a panel: {implementation: {x: y}}}. labels: those of x and y."""
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.5 * columns + 1, 3.2 * rows + 0.7), dpi=150, layout="constrained")
    axes = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
    for ax, (heading, curves) in zip(axes, panels.items()):
        for impl, points in curves.items():
            style = STYLES[impl]
            ax.plot(list(points), list(points.values()), label=style.label, color=style.color, marker=style.marker,
                    linewidth=2 if style.is_ours else 1, markerfacecolor=style.color if style.is_ours else "white")
        ax.set_xscale("log", base=2)
        ticks = sorted({x for points in curves.values() for x in points})
        ax.set_xticks(ticks, [f"{x >> 10}K" if x >= 1024 else str(x) for x in ticks])
        ax.set_xlabel(labels[0])
        ax.set_title(heading, fontsize="medium")
        ax.grid(alpha=0.3)
    largest = max(y for curves in panels.values() for points in curves.values() for y in points.values())
    axes[0].set_ylim(0, 1.05 * largest)  # and that of all others
    figure.supylabel(labels[1], fontsize="medium")
    figure.suptitle(title)
    legend(figure)
    save(figure, file, f"data-sha256 {digest_of_curves(panels, title, labels)}")
