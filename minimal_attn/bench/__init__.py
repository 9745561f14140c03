"""Everything that computes attention on this machine side by side: checked against the reference, then timed.

It runs on the GPU if there is one, else on the CPU. Its files: options.py, the table of operations; impls.py, what is
compared; masks.py, its block masks; measure.py, how one of it is measured; tables.py and pictures.py, what becomes of
the numbers; demo.py, a short run.
"""

import functools
import sys

import torch

from .._build import load
from ..command.progress import watched
from .impls import host_cost
from .measure import (FP8_DTYPE_NAMES, Setting, WrongResult, environment, in_words, judge, matmul_ceiling, must_serve,
                      profiled, write_json)
from .options import OPS, parse_args
from .tables import console, place, print_results, print_table


def main(argv=None, program="minimal-attn bench"):
    """Run with the options argv. Exit codes: 1 if a result is wrong or one of ours does not serve, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args = parse_args(program, argv, device, __doc__.splitlines()[0])
    if args.plots:
        from . import pictures  # noqa: F401  # where matplotlib is missing, say so before anything is measured
    run = Run(args, device, environment(device, program, argv))
    try:
        run.measure()
    except KeyboardInterrupt:
        return 130
    finally:
        run.report()
    return int(run.failed)


class Run:
    """The options args, and what has been found so far."""

    def __init__(self, args, device, meta):
        torch.backends.cuda.matmul.allow_tf32 = False  # float32 means float32 for the peers too
        self.args, self.op, self.device, self.meta = args, args.op, device, meta
        self.on_device = place(meta, args.dtypes)
        self.case_of = functools.lru_cache(maxsize=1)(lambda setting: self.op.case(self.op, setting, device))
        self.checked = next(x for x in (*args.shapes, *map(self.op.shape_of, self.op.shapes[device]))
                            if self.op.case.has_truth(self.op, x, device))
        self.jobs, self.done = [], 0  # (setting, impl) of each timing, and how many of them are done
        self.results = {}  # {setting: {impl: row}}
        self.told = set()  # (name, kind of exception)
        self.failed, self.ended = False, False  # ended: measure() came to its end

    def measure(self):
        args = self.args
        if args.host_cost:
            self.meta["host_us"] = host_cost(self.op.gradients)
            numbers = {name: [us] for name, us in self.meta["host_us"].items()}
            print_table("µs of host time for (1,4,64,64) bfloat16", ["µs"], numbers)
        used = [self.op.impls[name] for name in args.impls]
        if any(impl.backend == "cuda" and must_serve(impl, "float32", self.device) for impl in used):
            load()  # now, so that no first call of a kernel holds the build
        for dtype in args.dtypes:
            for causal in args.causals:
                case, able = self.check(Setting(self.checked, dtype, causal))
        if args.profile:
            self.print_profiles(case, able)
        if args.trace:
            profiled(case, able).export_chrome_trace(args.trace)
        self.time_all()
        if self.op.rate == "tflops" and self.op is not OPS["matmul"]:
            self.meta["matmul_tflops"] = {
                dtype: tflops for dtype in args.dtypes if dtype not in FP8_DTYPE_NAMES
                and (tflops := self.attempt(f"matmul, {dtype}", matmul_ceiling, dtype, self.device))}
        self.ended = True

    def attempt(self, name, function, *arguments):
        """function(*arguments), or None if it raises (no kernel, no memory): the run goes on, and why is told once."""
        try:
            return function(*arguments)
        except Exception as error:
            self.failed |= isinstance(error, WrongResult)
            if (name, type(error)) not in self.told:
                self.told.add((name, type(error)))
                console.print(f"{name}: {type(error).__name__}: {error}".splitlines()[0], soft_wrap=True)

    def check(self, setting):
        """(the case of setting, the implementations that are right)"""
        case, able = self.case_of(setting), []
        console.print(f"=== checking {setting} {self.on_device} ===", soft_wrap=True)
        names = [name for name in self.args.impls if self.op.impls[name].serves(setting)]
        for impl in watched(names, "checking", console):
            if (max_err := self.attempt(impl, judge, case, impl)) is not None:
                console.print(f"{impl}: max error {in_words(max_err)} against fp64, allowed "
                              f"{in_words(case.tolerance)}", soft_wrap=True)
                able.append(impl)
            else:
                self.failed |= must_serve(self.op.impls[impl], setting.dtype, self.device)
        return case, able

    def print_profiles(self, case, names):
        for name in names:
            console.print(f"=== profiling {name} ===")
            if prof := self.attempt(name, profiled, case, [name]):
                sort_by = "device_time_total" if case.device == "cuda" else "cpu_time_total"
                print(prof.key_averages().table(sort_by=sort_by, row_limit=10, max_name_column_width=40))

    def time_all(self):
        """Fills self.results, and the JSON with each row."""
        args, impls = self.args, self.args.impls
        self.results = {Setting(shape, dtype, causal): dict.fromkeys(impls)
                        for dtype in args.dtypes for causal in args.causals for shape in args.shapes}
        # By turns another is the first of a setting, as whichever comes first finds a GPU that has cooled a little.
        # Every other round goes back, as what ran before a setting has warmed the GPU.
        turns = list(enumerate(self.results))
        self.jobs = [(setting, impls[(first + turn + i) % len(impls)])
                     for first in range(args.rounds) for turn, setting in (turns[::-1] if first % 2 else turns)
                     for i in range(len(impls))]
        taken = {}  # {(setting, impl): what was measured, round by round}
        for setting, impl in watched(self.jobs, "timing", console):
            case, is_served = self.case_of(setting), self.op.impls[impl].serves(setting)
            numbers = self.attempt(impl, case.measured, impl) if is_served else None
            taken.setdefault((setting, impl), []).append(numbers)
            self.results[setting][impl] = case.row(impl, middle(taken[setting, impl]))
            self.done += 1
            if args.json:  # a run that is killed keeps what it has
                write_json(args.json, self.meta, self.rows)

    @property
    def rows(self):
        return [row for rows in self.results.values() for row in rows.values() if row]

    def report(self):
        """Tables, pictures and files of the settings with a row of every implementation; the JSON has every row."""
        args = self.args
        complete = {setting: rows for setting, rows in self.results.items() if all(rows.values())}
        print_results(complete, args, self.on_device)
        if not self.ended:
            timings = self.meta["interrupted"] = f"{self.done} of {len(self.jobs)} timings"
            console.print(f"interrupted after {timings}; tables and pictures show complete settings", soft_wrap=True)
        files = [args.trace] if args.trace and self.jobs else []
        if args.json and self.rows:
            write_json(args.json, self.meta, self.rows)
            files.append(args.json)
        if args.plots and complete:
            from .pictures import draw, of_run

            for file in args.plots:
                draw(file, *of_run([row for rows in complete.values() for row in rows.values()], self.meta))
            files += args.plots
        if files:
            console.print(f"wrote {', '.join(files)}", soft_wrap=True)


def middle(rounds):
    """The numbers of the round that took the median time, the faster of two; {} if none served."""
    served = sorted((numbers for numbers in rounds if numbers), key=lambda numbers: numbers["ms"])
    return served[(len(served) - 1) // 2] if served else {}
