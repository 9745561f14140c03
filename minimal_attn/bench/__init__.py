"""Everything that computes attention on this machine side by side: checked against the reference, then timed.

Without arguments it runs on the GPU if there is one, else on the CPU; --op backward does the same for the derivative,
--op forward_backward for both passes in one call, --op varlen, varlen_backward, window and scores for packed batches,
windows and sinks, and what changes the scores, --op decode, append and mixed for caches of keys and values, --op matmul
for the product of matrices. main() is the whole run.
Read next: attention.py, what is compared; measure.py, how one of it is measured; tables.py, pictures.py and page.py,
what becomes of the numbers; demo.py, a short run with a verdict.
"""

import functools
import json
import sys
import time
from pathlib import Path

import torch

from ..command.progress import watched
from .measure import (SECONDS_PER_TIMING, Setting, WrongResult, environment, in_words, judge, load_csrc, matmul_ceiling,
                      measured, must_serve, profiled)
from .options import OPS, parse_args
from .tables import console, place, print_table, print_tables


def main(argv=None, program="minimal-attn bench"):
    """Run with the options argv; the exit code: 1 if a result is wrong or one of ours fails where it has to serve, 130
    if Ctrl-C ended the run. That, or an exception, which is raised, leaves what was measured in tables and files."""
    argv = sys.argv[1:] if argv is None else argv
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args = parse_args(program, argv, device, __doc__.splitlines()[0])
    torch.backends.cuda.matmul.allow_tf32 = False  # float32 means float32 for the peers too
    run = Run(args, device, environment(device, program, argv))
    try:
        run.measure()
    except KeyboardInterrupt:
        return 130
    finally:
        run.report()
    return int(run.failed or WrongResult in (kind for _, kind in run.told))


class Run:
    """The options args, and what has been found so far."""

    def __init__(self, args, device, meta):
        self.args, self.op, self.device, self.meta = args, args.op, device, meta
        self.on_device = place(meta, args.dtypes)
        self.case_of = functools.lru_cache(maxsize=1)(lambda setting: self.case_class(setting.shape)(setting, device))
        self.kinds = [(dtype, causal) for dtype in args.dtypes for causal in args.causals]
        self.sweep = [args.shapes[0]._replace(seqlen_q=x, seqlen_k=x) for x in args.seqlens]
        self.checked = next(x for x in (*args.shapes, *self.op.DEFAULT_SHAPES[device])
                            if self.case_class(x).has_truth(x, device))
        self.judge_seconds = {}  # {impl: seconds that judging it took, the last time}
        self.jobs = []  # (setting, impl) of each timing
        self.done = 0  # of the jobs
        self.results = {}  # {setting: {impl: row}}
        self.ceilings = {}  # {dtype: TFLOP/s}
        self.files = []  # that were written
        self.told = set()  # (name, kind of exception)
        self.failed = self.ended = False  # ended: measure() came to its end

    def case_class(self, shape):
        return self.op.CASES[type(shape)]

    def measure(self):
        if self.args.host_cost:
            self.meta["host_us"] = self.op.host_cost(self.device)
            numbers = {name: [us] for name, us in self.meta["host_us"].items()}
            print_table("µs of host time for (1,4,64,64) bfloat16", ["µs"], numbers)
        load_csrc([self.op.IMPLS[impl] for impl in self.args.impls], self.device)
        for kind in self.kinds:
            case, able = self.check(Setting(self.checked, *kind))
        if self.args.profile:
            print_profiles(self.op, serving(case.impls, self.args.impls, case.dtype), case, self.told)
        if self.args.trace:
            profiled(able, case).export_chrome_trace(self.args.trace)
            self.files.append(self.args.trace)
        self.time_all()
        if self.op not in (OPS[name] for name in ("matmul", "decode", "append", "mixed")):
            self.ceilings = {dtype: tflops for dtype in self.args.dtypes if (
                tflops := attempt(self.told, f"matmul, {dtype}", matmul_ceiling, dtype, self.device))}
        self.ended = True

    def check(self, setting):
        """(the case of setting, {impl: its function} of those that are right)"""
        case, able = self.case_of(setting), {}
        console.print(f"=== checking {setting} {self.on_device} ===", soft_wrap=True)
        impls = serving(case.impls, self.args.impls, setting.dtype)
        for impl in watched(impls, lambda impl: f"checking {impl} {setting}", console):
            start = time.perf_counter()
            if (max_err := attempt(self.told, impl, judge, case, impl)) is not None:
                console.print(f"{impl}: max error {in_words(max_err)} against fp64, allowed "
                              f"{in_words(case.tolerance)}", soft_wrap=True)
                able[impl] = case.impls[impl].forward
            else:
                self.failed |= must_serve(case.impls[impl], setting.dtype, self.device)
            self.judge_seconds[impl] = time.perf_counter() - start
        return case, able

    def time_all(self):
        """Fills self.results, and the JSON with each row."""
        args, impls, measure_one = self.args, self.args.impls, getattr(self.op, "measured", measured)
        self.results = {Setting(x, *kind): dict.fromkeys(impls)
                        for kind in self.kinds for x in dict.fromkeys((*args.shapes, *self.sweep))}
        # By turns another is the first of a setting, as whichever comes first finds a GPU that has cooled a little.
        # Every other round goes back, as what ran before a setting has warmed the GPU.
        turns = list(enumerate(self.results))
        self.jobs = [(setting, impls[(first + turn + i) % len(impls)])
                     for first in range(args.rounds) for turn, setting in (turns[::-1] if first % 2 else turns)
                     for i in range(len(impls))]
        if (seconds := self.expected_seconds()) > 60:
            how_sure = "about" if self.device == "cpu" else "at least"
            console.print(f"timing takes {how_sure} {seconds / 60:.0f} min, longer if kernels are compiled or tuned; "
                          "Ctrl-C ends it and keeps what was measured", soft_wrap=True)
        taken = {}  # {(setting, impl): what was measured, round by round}
        for setting, impl in watched(self.jobs, lambda job: f"timing {job[1]} {job[0]}", console):
            case = self.case_of(setting)
            is_served = impl in serving(case.impls, impls, setting.dtype)
            numbers = attempt(self.told, impl, measure_one, case, impl) if is_served else None
            taken.setdefault((setting, impl), []).append(numbers)
            self.results[setting][impl] = case.row(impl, middle(taken[setting, impl]))
            self.done += 1
            if args.json:  # a run that is killed keeps what it has
                write_json(args.json, self.meta, self.results)

    def expected_seconds(self):
        """How long the jobs take. For a GPU it counts the repeated calls alone, so it is too low. For a CPU, where one
        call may be slow (Triton's interpreter), it adds the two calls before them, each as slow as in check()."""
        calls = 2 if self.device == "cpu" else 0
        return sum(SECONDS_PER_TIMING[self.device]
                   + calls * self.judge_seconds.get(impl, 0) * setting.shape.elements / self.checked.elements
                   for setting, impl in self.jobs
                   if serving(self.case_class(setting.shape).impls, [impl], setting.dtype))

    def report(self):
        """Tables, pictures and files of the settings with a row of every implementation; the JSON has every row."""
        args = self.args
        complete = {setting: rows for setting, rows in self.results.items() if all(rows.values())}
        print_tables(complete, args, self.sweep, self.on_device)
        if not self.ended:
            timings = self.meta["interrupted"] = f"{self.done} of {len(self.jobs)} timings"
            console.print(f"interrupted after {timings}; tables and pictures show the {len(complete)} settings that "
                          "every implementation has a row for" if self.done else "interrupted: nothing was timed yet",
                          soft_wrap=True)
        if args.json and any(any(rows.values()) for rows in self.results.values()):
            if self.ceilings:
                self.meta["matmul_tflops"] = self.ceilings
            write_json(args.json, self.meta, self.results)
            self.files.append(args.json)
        pictured = [*args.plots, *filter(None, [args.report])]
        if pictured and not complete:
            console.print(f"not written, as no setting has a row of every implementation: {', '.join(pictured)}",
                          soft_wrap=True)
        elif pictured:
            from .page import html
            from .pictures import plot, title_of

            title = title_of(self.op.TITLE, complete, self.on_device)
            for file in args.plots:
                plot(file, complete, title, self.ceilings)
            if args.report:
                Path(args.report).write_text(html(complete, title, self.meta, self.ceilings))
            self.files += pictured
        if self.files:
            console.print(f"wrote {', '.join(self.files)}", soft_wrap=True)


def print_profiles(op, impls, case, told):
    """A table for each first part of a name in impls: ours by any kernel is one."""
    for heading, forward in (op.PROFILES[x] for x in dict.fromkeys(impl.split(":")[0] for impl in impls)):
        console.print(f"=== profiling {heading} ===")
        if prof := attempt(told, heading, profiled, {heading: forward}, case):
            sort_by = "device_time_total" if case.device == "cuda" else "cpu_time_total"
            print(prof.key_averages().table(sort_by=sort_by, row_limit=10, max_name_column_width=40))


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


def serving(table, impls, dtype):
    """Filters impls: keeps the names that are in table {name: Impl} and serve dtype."""
    return [impl for impl in impls if impl in table and dtype in table[impl].dtypes]


def attempt(told, name, function, *args):
    """function(*args), or None if it raises (no kernel, no memory): the run goes on, and why is told once a kind."""
    try:
        return function(*args)
    except Exception as error:
        if (name, type(error)) not in told:
            told.add((name, type(error)))
            console.print(f"{name}: {type(error).__name__}: {error}".splitlines()[0], soft_wrap=True)
