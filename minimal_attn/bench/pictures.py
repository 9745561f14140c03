"""TFLOP/s in pictures: a panel for each dtype, head_dim and mask. results is everywhere {setting: {impl: row}}.

Read next: page.py, which puts one panel a picture into a page.
"""

import io
import math

from matplotlib import rc_context
from matplotlib.figure import Figure

from .tables import speedup


def panels_of(results):
    """{title: the results that belong in one panel}"""
    panels = {}
    for setting, rows in results.items():
        title = f"{setting.shape.family}, {setting.dtype}{', causal' * setting.causal}"
        panels.setdefault(title, {})[setting] = rows
    return panels


def is_sweep(panel):
    """Whether it is a few lengths of one kind: lines over S rather than bars by shape."""
    return len({setting.shape.x for setting in panel}) == len(panel) > 2


def plot(file, results, title, op, ceilings):
    """Every panel in one picture, PNG or SVG by the suffix of file; ceilings: {dtype: TFLOP/s of a matmul}."""
    panels = panels_of(results)
    if not all(map(is_sweep, panels.values())) and len({setting[1:] for setting in results}) == 1:
        panels = {"": results}  # shapes alone differ: side by side
    rows = math.ceil(len(panels) / 3)
    columns = math.ceil(len(panels) / rows)  # four are two by two
    figure = Figure(figsize=(9, 5) if len(panels) == 1 else (4 * columns, 3.2 * rows), dpi=150, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for ax in axes[len(panels):]:
        ax.remove()
    for ax, (name, panel) in zip(axes, panels.items()):
        draw(ax, panel, op, ceilings)
        if len(panels) > 1:
            ax.set_title(name, fontsize="medium")
    legend(figure, loc="outside right upper")
    figure.suptitle(title)
    figure.savefig(file)


def svg(panel, op, ceilings):
    """One panel as the text of an SVG, made to be read on a phone too."""
    figure = Figure(figsize=(6, 4.8), layout="constrained")
    draw(figure.subplots(), panel, op, ceilings)
    legend(figure, loc="outside lower center", ncols=3)
    text = io.StringIO()
    with rc_context({"svg.hashsalt": "minimal_attn"}):  # the same picture is the same text
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def legend(figure, **where):
    handles = {label: handle for ax in figure.axes for handle, label in zip(*ax.get_legend_handles_labels())}
    figure.legend(handles.values(), handles, **where)


def draw(ax, panel, op, ceilings):
    """Lines over S, or bars by shape with their speed-up over the baseline."""
    lines = is_sweep(panel)
    impls = next(iter(panel.values()))
    tflops = {impl: [rows[impl]["tflops"] or math.nan for rows in panel.values()] for impl in impls}
    tflops = {impl: y for impl, y in tflops.items() if not all(map(math.isnan, y))}
    x = [math.log2(setting.shape.x) if lines else i for i, setting in enumerate(panel)]
    width = 0.8 / max(1, len(tflops))
    colors = list(op.IMPLS)
    for i, (impl, y) in enumerate(tflops.items()):
        color = colors.index(impl)  # the same in every picture; there are ten
        style = dict(label=impl, color=f"C{color}")
        if lines:
            ax.plot(*zip(*sorted(zip(x, y))), "o-" if color < 10 else "s-", **style)
        else:
            bars = ax.bar([middle + (i + 0.5) * width - 0.4 for middle in x], y, width, **style)
            factors = [impl != op.BASELINE and speedup(rows, impl, op.BASELINE) for rows in panel.values()]
            ax.bar_label(bars, [f"{factor:.2g}×" if factor else "" for factor in factors], fontsize=8)
    if ceiling := ceilings.get(next(iter(panel)).dtype):  # they are all of one
        ax.axhline(ceiling, color="gray", linestyle="--", label="matmul")
    values = [value for y in tflops.values() for value in y if value > 0]
    if values and max(values) > 300 * min(values):  # Triton's interpreter beside compiled code
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
    if lines:
        ax.set_xticks(x, [setting.shape.x for setting in panel])
        ax.set_xlabel("sequence length S")
    else:
        labels = [str(setting.shape) for setting in panel]
        if len(labels) > 4:
            ax.set_xticks(x, [label.replace(",", "\n") for label in labels], fontsize="small")
        else:
            ax.set_xticks(x, labels)
        ax.set_xlabel(f"{op.SHAPES.split(' or ')[0]}, and n×: speed-up over {op.BASELINE}")
    ax.set(ylabel="TFLOP/s", axisbelow=True)
    ax.grid(axis="y", alpha=0.3)
