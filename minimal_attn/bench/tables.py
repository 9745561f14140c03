"""Tables that a run prints. In this file results is always {setting: {impl: row}}."""

from rich import box
from rich.console import Console
from rich.table import Table

from .measure import MEASURED, Setting

console = Console(highlight=False, markup=False)

MANY = 4  # settings, beyond which a table has a line for each


def speedup(rows, impl, baseline):
    ms, baseline_ms = (rows.get(name, {}).get("ms") for name in (impl, baseline))
    return baseline_ms / ms if ms and baseline_ms else None


def number(x):
    return "–" if x is None else f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


def place(meta, dtypes):
    """Where a run was, as its meta says, and whether TF32 was an issue there."""
    is_cpu = meta["device"].endswith(" CPU")
    return f"on {meta['device']}" + " (TF32 off)" * ("float32" in dtypes and not is_cpu)


def print_table(title, headings, rows):
    """rows: {impl: numbers}"""
    table = Table("", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for heading in headings:
        table.add_column(str(heading), justify="right")
    for impl, numbers in rows.items():
        table.add_row(impl, *map(number, numbers))
    console.print(title, table, "", sep="\n", soft_wrap=True)


def print_tables(results, args, sweep, on_device):
    """Prints one table for each of args.shapes, or a single table where there are more than MANY, with a second one of
    speeds relative to the plain read. Last comes, for each dtype and mask, the time over the lengths of sweep."""
    baseline, rate = args.op.baseline, args.op.rate
    of_shapes = {setting: rows for setting, rows in results.items() if setting.shape in args.shapes}
    if len(of_shapes) <= MANY:
        for setting, rows in of_shapes.items():
            numbers = {impl: [*map(rows[impl].get, MEASURED), speedup(rows, impl, baseline)] for impl in rows}
            print_table(f"{setting} {on_device}", [*MEASURED.values(), f"× {baseline}"], numbers)
    else:
        numbers = {str(setting): [rows[x][rate] for x in rows] for setting, rows in of_shapes.items()}
        print_table(f"{MEASURED[rate]} {on_device}", args.impls, numbers)
        if rate == "gbps" and baseline in args.impls:
            numbers = {str(setting): [speedup(rows, x, baseline) for x in rows] for setting, rows in of_shapes.items()}
            print_table(f"× {baseline} {on_device}", args.impls, numbers)
    for kind in dict.fromkeys(setting[1:] for setting in results) if sweep else ():
        settings = [x for x in (Setting(shape, *kind) for shape in sweep) if x in results]
        numbers = {impl: [results[x][impl]["ms"] for x in settings] for impl in args.impls}
        if settings:
            print_table(f"ms over S in {Setting(args.shapes[0], *kind)}", [x.shape.seqlen_q for x in settings], numbers)
