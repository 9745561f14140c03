"""Everything that computes attention on this machine side by side: checked against the reference, profiled, timed.

Without arguments it runs on the GPU if there is one, else on the CPU; --op backward does the same for the derivative,
--op forward_backward for both passes in one call, --op matmul for the product of matrices. main() is the whole run.
Read next: attention.py, what is compared; measure.py, how one of it is measured; tables.py, pictures.py and page.py,
what becomes of the numbers.
"""

import functools
import json
import sys
from pathlib import Path

import torch
from rich.progress import track

from .measure import Setting, WrongResult, environment, in_words, judge, matmul_ceiling, measured, must_serve, profiled
from .options import OPS, parse_args
from .tables import console, print_table, print_tables


def main(argv=None, program="minimal-attn bench"):
    """Run with the options argv; the exit code: 1 if a result is wrong or one of ours fails where it has to serve."""
    argv = sys.argv[1:] if argv is None else argv
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args = parse_args(program, argv, device, __doc__.splitlines()[0])
    op = args.op
    torch.backends.cuda.matmul.allow_tf32 = False  # float32 means float32 for the peers too
    meta = environment(device, program, argv)
    kinds = [(dtype, causal) for dtype in args.dtypes for causal in args.causals]
    on_device = f"on {meta['device']}" + " (TF32 off)" * (device == "cuda" and "float32" in args.dtypes)
    case_of = functools.lru_cache(maxsize=1)(lambda setting: op.Case(setting, device))
    told, failed = set(), False

    if args.host_cost:
        meta["host_us"] = op.host_cost(device)
        numbers = {name: [us] for name, us in meta["host_us"].items()}
        print_table("µs of host time for (1,4,64,64) bfloat16", ["µs"], numbers)

    shape = next(x for x in (*args.shapes, *op.DEFAULT_SHAPES[device]) if op.Case.has_truth(x, device))
    for dtype, causal in kinds:
        case = case_of(Setting(shape, dtype, causal))
        console.print(f"=== checking {Setting(shape, dtype, causal)} {on_device} ===", soft_wrap=True)
        able = {}
        for impl in serving(op, args.impls, dtype):
            if (max_err := attempt(told, impl, judge, case, impl)) is not None:
                console.print(f"{impl}: max error {in_words(max_err)} against fp64, allowed "
                              f"{in_words(case.tolerance)}", soft_wrap=True)
                able[impl] = op.IMPLS[impl].forward
            else:
                failed |= must_serve(op.IMPLS[impl], dtype, device)

    families = dict.fromkeys(impl.split(":")[0] for impl in serving(op, args.impls, case.dtype))
    for heading, forward in [] if args.no_profile else [op.PROFILES[x] for x in families]:
        console.print(f"=== profiling {heading} ===")
        if prof := attempt(told, heading, profiled, {heading: forward}, case):
            sort_by = "device_time_total" if device == "cuda" else "cpu_time_total"
            print(prof.key_averages().table(sort_by=sort_by, row_limit=10, max_name_column_width=40))
    if args.trace:
        profiled(able, case).export_chrome_trace(args.trace)

    sweep = [args.shapes[0]._replace(seqlen_q=x, seqlen_k=x) for x in args.seqlens]
    results = {Setting(x, *kind): dict.fromkeys(args.impls)
               for kind in kinds for x in dict.fromkeys((*args.shapes, *sweep))}
    # By turns another is the first of a setting, as whichever comes first finds a GPU that has cooled a little. Every
    # other round goes back, as what ran before a setting has warmed the GPU.
    turns = list(enumerate(results))
    jobs = [(setting, args.impls[(first + turn + i) % len(args.impls)])
            for first in range(args.rounds) for turn, setting in (turns[::-1] if first % 2 else turns)
            for i in range(len(args.impls))]
    taken = {}  # {(setting, impl): what was measured, round by round}
    for setting, impl in track(jobs, "timing", console=console, transient=True):
        case = case_of(setting)
        is_served = impl in serving(op, args.impls, setting.dtype)
        numbers = attempt(told, impl, measured, case, impl) if is_served else None
        taken.setdefault((setting, impl), []).append(numbers)
        results[setting][impl] = case.row(impl, middle(taken[setting, impl]))
        if args.json:  # a run that is cut short keeps what it has
            write_json(args.json, meta, results)
    ceilings = {} if op is OPS["matmul"] else {
        dtype: tflops for dtype in args.dtypes
        if (tflops := attempt(told, f"matmul, {dtype}", matmul_ceiling, dtype, device))}
    if ceilings:
        meta["matmul_tflops"] = ceilings

    print_tables(results, args, sweep, on_device)
    title = f"{op.TITLE} {on_device}"
    drawn = {setting: results[setting] for setting in results if not sweep or setting.shape in sweep}
    if args.json:
        write_json(args.json, meta, results)
    if args.plots or args.report:
        from .page import html
        from .pictures import plot
    for file in args.plots:
        plot(file, drawn, title, op, ceilings)
    if args.report:
        Path(args.report).write_text(html(results, args, title, meta, ceilings))
    return int(failed or WrongResult in (kind for _, kind in told))


def middle(rounds):
    """The numbers of the round that took the median time, the faster of two; {} if none served."""
    served = sorted((numbers for numbers in rounds if numbers), key=lambda numbers: numbers["ms"])
    return served[(len(served) - 1) // 2] if served else {}


def write_json(file, meta, results):
    """Replaces file at once, so that it is whole whenever the run ends."""
    rows = ",\n".join(json.dumps(row) for rows in results.values() for row in rows.values() if row)
    part = Path(f"{file}.part")
    part.write_text(f'{{"meta": {json.dumps(meta, indent=1)},\n"rows": [\n{rows}\n]}}\n')
    part.replace(file)


def serving(op, impls, dtype):
    """Those that are for a dtype at all."""
    return [impl for impl in impls if dtype in op.IMPLS[impl].dtypes]


def attempt(told, name, function, *args):
    """function(*args), or None if it raises (no kernel, no memory): the run goes on, and why is told once a kind."""
    try:
        return function(*args)
    except Exception as error:
        if (name, type(error)) not in told:
            told.add((name, type(error)))
            console.print(f"{name}: {type(error).__name__}: {error}".splitlines()[0], soft_wrap=True)
