"""Tables that a run prints. results is {setting: {impl: row}}."""

from rich import box
from rich.console import Console
from rich.table import Column, Table

from .measure import MEASURED

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
    """rows: {name: numbers}"""
    table = Table("", *(Column(x, justify="right") for x in headings), box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for name, numbers in rows.items():
        table.add_row(name, *map(number, numbers))
    console.print(title, table, "", sep="\n", soft_wrap=True)


def print_results(results, args, on_device):
    """Prints a table of all numbers for each setting outside of a sweep, up to MANY, and one of rates if there are
    others."""
    baseline, rate = args.op.baseline, args.op.rate
    alone = {setting: rows for setting, rows in results.items() if setting.shape not in args.swept}
    if len(alone) < len(results) or len(alone) > MANY:
        rates = {str(setting): [rows[impl][rate] for impl in rows] for setting, rows in results.items()}
        print_table(f"{MEASURED[rate]} {on_device}", args.impls, rates)
    for setting, rows in alone.items() if len(alone) <= MANY else ():
        numbers = {impl: [*map(rows[impl].get, MEASURED), speedup(rows, impl, baseline)] for impl in rows}
        print_table(f"{setting} {on_device}", [*MEASURED.values(), f"× {baseline}"], numbers)
