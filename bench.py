"""Every attention on this machine side by side: checked against the reference, profiled, timed.

python bench.py needs no arguments: it runs on the GPU if there is one, else on the CPU. IMPLS is the table of what is
compared, a Case the inputs of one setting and the truth to judge by, measure() makes a row of the JSON from the two,
and main(), at the end, is the whole run. Read next: minimal_attn/interface.py, the facade that is measured here.
"""

import argparse
import functools
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
import warnings
from datetime import datetime
from pathlib import Path
from typing import Callable, NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch reads it when the profiler loads: no log lines in the tables

import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile, record_function

from minimal_attn import flash_attention, flash_attn_func, reference_attention
from minimal_attn._build import source_digest
from minimal_attn.checks import MAX_HEAD_DIM
from minimal_attn.interface import BACKENDS, KERNEL_DTYPES
from minimal_attn.reference import visible_keys
from minimal_attn.validation import allowed_error

try:
    import triton
    from triton.testing import do_bench
except ImportError:
    triton = None

# The keys of a row; what could not be measured is null.
MEASURED = ("ms", "ms_p20", "ms_p80", "tflops", "gbps", "peak_mb", "max_err")
ROW = ("op", "impl", "dtype", "head_dim", "causal", "batch_size", "nheads", "nheads_k", "seqlen_q", "seqlen_k",
       *MEASURED)

DTYPES = tuple(str(dtype).removeprefix("torch.") for dtype in KERNEL_DTYPES)

CAUSALS = {"no": (False,), "yes": (True,), "both": (False, True)}

console = Console(highlight=False, markup=False)


class Shape(NamedTuple):
    batch_size: int
    nheads: int
    seqlen_q: int
    head_dim: int
    nheads_k: int
    seqlen_k: int

    def __str__(self):
        return ",".join(map(str, self[:4] if self[4:] == (self.nheads, self.seqlen_q) else self))


class Setting(NamedTuple):
    shape: Shape
    dtype: str
    causal: bool

    def __str__(self):
        return f"({self.shape}) {self.dtype}{' causal' * self.causal}"


DEFAULT_SHAPE = Shape(16, 12, 64, 64, 12, 64)
MANY = 4  # settings, beyond which a table has a line for each
DEFAULT_SEQLENS = {"cuda": "64,128,256,512,1024,2048,4096", "cpu": "32,64,128"}  # Triton's interpreter is slow


@functools.lru_cache(maxsize=1)  # not part of what is timed
def causal_mask(seqlen_q, seqlen_k, device):
    return visible_keys(seqlen_q, seqlen_k, True, None, device)


def manual_attn(q, k, v, causal):
    """What flash attention is to beat: all scores go to memory and come back, several times."""
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    att = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]))
    if causal:
        att = att.masked_fill(~causal_mask(q.shape[2], k.shape[2], q.device), -math.inf)
    return att.softmax(-1) @ v


def sdpa(q, k, v, causal):
    is_square = q.shape[2] == k.shape[2]  # only then is SDPA's is_causal, aligned top-left, the same as ours
    mask = causal_mask(q.shape[2], k.shape[2], q.device) if causal and not is_square else None
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and is_square,
                                        enable_gqa=q.shape[1] != k.shape[1])


def sdpa_with(backend):
    def forward(q, k, v, causal):
        with sdpa_kernel(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a backend that cannot serve warns of every reason, then raises
            return sdpa(q, k, v, causal)

    return forward


def flash_kernel(name):
    """flash_attention by one kernel of csrc."""
    def forward(q, k, v, causal):
        before = os.environ.get("MINIMAL_ATTN_KERNEL", "")  # empty is as good as none
        os.environ["MINIMAL_ATTN_KERNEL"] = name
        try:
            return flash_attention(q, k, v, causal, backend="cuda")
        finally:
            os.environ["MINIMAL_ATTN_KERNEL"] = before

    return forward


class Impl(NamedTuple):
    forward: Callable  # (q, k, v, causal) -> out, or an exception where it cannot serve them
    devices: tuple = ("cuda", "cpu")
    backend: str | None = None  # of minimal_attn, if it is ours: where that is available, it has to serve
    dtypes: tuple = DTYPES


CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
flash_cuda = functools.partial(flash_attention, backend="cuda")
flash_triton = functools.partial(flash_attention, backend="triton")
IMPLS = {
    "manual": Impl(manual_attn),
    "cuda:simt": Impl(flash_kernel("simt"), ("cuda",), "cuda"),
    "cuda:sm80": Impl(flash_kernel("sm80"), ("cuda",) * (CAPABILITY >= (8, 0)), "cuda", ("float16", "bfloat16")),
    "cuda:dmma": Impl(flash_kernel("dmma"), ("cuda",) * (CAPABILITY == (9, 0)), "cuda", ("float32",)),
    "cuda:host": Impl(flash_cuda, ("cpu",), "cuda"),
    "triton": Impl(flash_triton, backend="triton"),
    "torch:cudnn": Impl(sdpa_with(SDPBackend.CUDNN_ATTENTION), ("cuda",)),
    "torch:flash": Impl(sdpa_with(SDPBackend.FLASH_ATTENTION)),
    "torch:efficient": Impl(sdpa_with(SDPBackend.EFFICIENT_ATTENTION), ("cuda",)),
    "torch:math": Impl(sdpa_with(SDPBackend.MATH)),
}
# What is profiled, by the first part of a name in IMPLS.
PROFILES = {
    "manual": ("manual attention", manual_attn),
    "cuda": ("minimal flash attention", flash_cuda),
    "triton": ("triton flash attention", flash_triton),
    "torch": ("scaled_dot_product_attention", sdpa),
}


class Case:
    """Inputs of a setting, their result in fp64, and the error it allows: None where fp64 would not fit."""

    def __init__(self, setting, device):
        shape, dtype, causal = self.shape, self.dtype, self.causal = setting
        self.device = device
        b, h, seqlen_q, d, h_k, seqlen_k = shape
        torch.manual_seed(0)
        sizes = (b, h, seqlen_q, d), (b, h_k, seqlen_k, d), (b, h_k, seqlen_k, d)
        self.args = *(torch.randn(size, device=device, dtype=getattr(torch, dtype)) for size in sizes), causal
        q, k, v, _ = self.args
        self.flops = 4 * b * h * seqlen_q * seqlen_k * d / (2 if causal else 1)
        self.bytes = 2 * q.nbytes + k.nbytes + v.nbytes  # q, k and v read once, out written once
        self.reference = self.tolerance = None
        if reference_fits(shape, device):
            self.reference = reference_attention(q.double(), k.double(), v.double(), causal)
            self.tolerance = allowed_error(IMPLS["torch:math"].forward(*self.args), self.reference)

    def max_err(self, out):
        return (out.double() - self.reference).abs().max().item()

    def row(self, impl, measured):
        known = dict(op="forward", impl=impl, dtype=self.dtype, causal=self.causal, **self.shape._asdict(), **measured)
        return {key: known.get(key) for key in ROW}


def reference_fits(shape, device):
    """Four copies of the fp64 scores: 4 GiB of RAM, or half of a GPU, 32 GiB at most."""
    limit = min(8 << 30, torch.cuda.get_device_properties(0).total_memory // 8) if device == "cuda" else 1 << 30
    return 8 * shape.batch_size * shape.nheads * shape.seqlen_q * shape.seqlen_k <= limit


class WrongResult(Exception):
    pass


def judge(impl, case):
    """The maximum error of one call, None with nothing to judge by. Raises WrongResult by the error rule of tests/."""
    out = IMPLS[impl].forward(*case.args)
    if case.reference is None:
        return None
    max_err = case.max_err(out)
    is_judged = impl != "manual" or case.dtype == "float32"  # by hand, 16 bits round the scores too: no bug
    if is_judged and not max_err <= case.tolerance:  # NaN is wrong
        raise WrongResult(f"max error {max_err:.2e}, allowed {case.tolerance:.2e}")
    return max_err


def serving(impls, dtype):
    """Those that are for a dtype at all."""
    return [impl for impl in impls if dtype in IMPLS[impl].dtypes]


def must_serve(impl, device):
    """Whether it is one of ours and nothing that is missing on this machine excuses it."""
    backend = BACKENDS.get(IMPLS[impl].backend)
    return backend is not None and backend.why_not(torch.device(device)) is None


def profiled(forwards, case):
    """The profile of one call of each of forwards, {name: function}."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (case.device == "cuda")
    with profile(activities=activities) as prof:
        for name, forward in forwards.items():
            with record_function(name):
                forward(*case.args)
        synchronize(case.device)
    return prof


def measure(impl, case):
    """{key of MEASURED: number}.

    peak_mb is 10^6 bytes beyond inputs and output. What frees its scratch before it makes its output, as by hand, needs
    up to one output more than that.
    """
    max_err, peak_mb = judge(impl, case), None  # and the warm-up: builds, compiles, makes workspaces
    call = functools.partial(IMPLS[impl].forward, *case.args)
    if case.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = call()
        peak_mb = (torch.cuda.max_memory_allocated() - before - out.nbytes) / 1e6
        del out
    ms, ms_p20, ms_p80 = time_call(call, case.device)
    numbers = ms, ms_p20, ms_p80, case.flops / ms / 1e9, case.bytes / ms / 1e6, peak_mb, max_err
    return {key: float(f"{x:.6g}") for key, x in zip(MEASURED, numbers) if x is not None and math.isfinite(x)}


def time_call(call, device):
    """Median, 20th and 80th percentile, in ms."""
    quantiles = [0.5, 0.2, 0.8]
    if device == "cuda" and triton:
        # Every call starts with a cold L2, and clearing that gives the host the time to prepare the call.
        return do_bench(call, rep=300, quantiles=quantiles)
    times = []
    while sum(times) < 200:  # once, in Triton's interpreter
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    return torch.tensor(times).quantile(torch.tensor(quantiles)).tolist()


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def host_cost():
    """{name: µs} from a Python call to its return, without waiting for the GPU; median of 7 times 2000 calls."""
    q = torch.randn(1, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
    rows = q.transpose(1, 2).contiguous()  # (B, S, H, D)
    calls = {"flash_attention": lambda: flash_attention(q, q, q),
             "flash_attn_func": lambda: flash_attn_func(rows, rows, rows),
             "torch:flash": lambda: scaled_dot_product_attention(q, q, q),
             "torch:efficient": lambda: scaled_dot_product_attention(q, q, q),
             "empty_like": lambda: torch.empty_like(q)}
    backends = {"torch:flash": SDPBackend.FLASH_ATTENTION, "torch:efficient": SDPBackend.EFFICIENT_ATTENTION}
    cost = {}
    for name, call in calls.items():
        with torch.no_grad(), sdpa_kernel(backends.get(name, SDPBackend.MATH)):  # set once: not part of the call
            times = []
            for _ in range(8):
                start = time.perf_counter()
                for _ in range(2000):
                    call()
                times.append((time.perf_counter() - start) / 2000 * 1e6)
                torch.cuda.synchronize()
        cost[name] = round(float(torch.tensor(times[1:]).median()), 2)  # the first is the warm-up
    return cost


def attempt(told, name, function, *args):
    """function(*args), or None if it raises (no kernel, no memory): the run goes on, and why is told once a kind."""
    try:
        return function(*args)
    except Exception as error:
        if (name, type(error)) not in told:
            told.add((name, type(error)))
            console.print(f"{name}: {type(error).__name__}: {error}".splitlines()[0], soft_wrap=True)


def speedup(rows, impl):
    ms, manual_ms = (rows.get(name, {}).get("ms") for name in (impl, "manual"))
    return manual_ms / ms if ms and manual_ms else None


def print_table(title, headings, rows):
    """rows: {impl: numbers}"""
    table = Table("", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for heading in headings:
        table.add_column(str(heading), justify="right")
    for impl, numbers in rows.items():
        table.add_row(impl, *("–" if x is None else f"{x:,.0f}" if x >= 1000 else f"{x:.3g}" for x in numbers))
    console.print(title, table, "", sep="\n", soft_wrap=True)


def plot(file, results, title):
    """TFLOP/s of {setting: {impl: row}}: lines over S, a panel for each dtype, head_dim and causal, where all have a
    few lengths; else bars by shape with their speed-up over manual."""
    from matplotlib.figure import Figure

    panels = {}
    for setting, rows in results.items():
        panels.setdefault((setting.dtype, setting.shape.head_dim, setting.causal), {})[setting.shape] = rows
    is_sweep = all(len({shape.seqlen_q for shape in panel}) == len(panel) > 2 for panel in panels.values())
    if not is_sweep:
        panels = {None: {f"({setting.shape})": rows for setting, rows in results.items()}}
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(9, 5) if len(panels) == 1 else (4 * columns, 3.2 * rows), dpi=150, layout="constrained")
    for ax, (key, panel) in zip(figure.subplots(rows, columns, squeeze=False).flat, panels.items()):
        draw(ax, panel, is_sweep)
        ax.set(ylabel="TFLOP/s", axisbelow=True)
        if len(panels) > 1:
            ax.set_yscale("linear")
            ax.set_ylim(bottom=0)
            ax.set_title(f"{key[0]}, head_dim {key[1]}{', causal' * key[2]}", fontsize="medium")
    handles = {label: handle for ax in figure.axes for handle, label in zip(*ax.get_legend_handles_labels())}
    figure.legend(handles.values(), handles, loc="outside right upper")
    figure.suptitle(title)
    figure.savefig(file)


def draw(ax, panel, is_sweep):
    """TFLOP/s of {shape: {impl: row}}."""
    impls = next(iter(panel.values()))
    tflops = {impl: [rows[impl]["tflops"] or math.nan for rows in panel.values()] for impl in impls}
    tflops = {impl: y for impl, y in tflops.items() if not all(map(math.isnan, y))}
    x = [math.log2(shape.seqlen_q) if is_sweep else i for i, shape in enumerate(panel)]
    width = 0.8 / max(1, len(tflops))
    for i, (impl, y) in enumerate(tflops.items()):
        style = dict(label=impl, color=f"C{list(IMPLS).index(impl)}")  # the same color in every picture
        if is_sweep:
            ax.plot(x, y, "o-", **style)
        else:
            bars = ax.bar([middle + (i + 0.5) * width - 0.4 for middle in x], y, width, **style)
            factors = [impl != "manual" and speedup(rows, impl) for rows in panel.values()]
            ax.bar_label(bars, [f"{factor:.2g}×" if factor else "" for factor in factors], fontsize=8)
    values = [value for y in tflops.values() for value in y if value > 0]
    if values and max(values) > 30 * min(values):  # Triton's interpreter beside compiled code
        ax.set_yscale("log")
    ax.set_xticks(x, [shape.seqlen_q if is_sweep else shape for shape in panel])
    ax.set_xlabel("sequence length S" if is_sweep else "(B,H,S,D), and n×: speed-up over manual")
    ax.grid(axis="y", alpha=0.3)


def environment(device, argv):
    """The meta of the JSON."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = None
    interpreting = "TRITON_INTERPRET=1 " * (os.environ.get("TRITON_INTERPRET") == "1")
    words = [re.sub(r"(^|=)/.*/", r"\1", x) for x in argv]  # for any machine: without the directories of this one
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU",
        "driver": driver,
        "torch": torch.__version__,
        "triton": triton and triton.__version__,
        "cuda": torch.version.cuda,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "source_digest": source_digest(),
        "command": interpreting + shlex.join(["python", Path(__file__).name, *words]),
    }


def parse_args(argv, device):
    impls = [impl for impl in IMPLS if device in IMPLS[impl].devices]

    def fail(message):  # argparse puts the argument's name before it
        raise argparse.ArgumentTypeError(message)

    def ints(text):
        words = text.split(",") if text else []
        return [int(x) if x.isdecimal() and int(x) else fail(f"{x!r} is not a positive integer") for x in words]

    def shape(text):
        sizes = ints(text)
        if len(sizes) not in (4, 6):
            fail(f"{text!r} is neither B,H,S,D nor B,H,Sq,D,Hk,Sk")
        shape = Shape(*sizes) if len(sizes) == 6 else Shape(*sizes, sizes[1], sizes[2])
        if shape.nheads % shape.nheads_k or shape.head_dim > MAX_HEAD_DIM:
            fail(f"{text!r}: H must be a multiple of Hk, and D at most {MAX_HEAD_DIM}")
        return shape

    def dtypes(text):
        return [x if x in DTYPES else fail(f"{x!r} is none of {', '.join(DTYPES)}") for x in text.split(",")]

    def names(text):
        words = text.split(",")
        return [x if x in impls else fail(f"{x!r} is none of {', '.join(impls)}, which run on {device}") for x in words]

    def file(*suffixes):
        def path(text):
            is_fine = Path(text).suffix in suffixes and Path(text).parent.is_dir()
            return text if is_fine else fail(f"{text!r} is no {' or '.join(suffixes)} file in an existing directory")

        return path

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shape", type=shape, action="append", metavar="B,H,S,D", dest="shapes",
        help=f"or B,H,Sq,D,Hk,Sk; may be repeated (default: {DEFAULT_SHAPE})")
    add("--dtype", type=dtypes, default="float32", metavar="DTYPE,...", dest="dtypes", help=f"of {', '.join(DTYPES)}")
    add("--causal", nargs="?", const="yes", default="no", choices=CAUSALS, dest="causals",
        help="mask the future (bottom-right aligned); both: with and without")
    add("--seqlens", type=ints, metavar="S,S,...", default=DEFAULT_SEQLENS[device],
        help="sweep the first shape over these lengths, '' for none (default: %(default)s)")
    add("--impls", type=names, metavar="NAME,...", default=impls, help=f"default: {','.join(impls)}")
    add("--json", type=file(".json"), metavar="FILE", help="write all rows")
    add("--plot", type=file(".png", ".svg"), metavar="FILE", help="draw TFLOP/s of the sweep, else of the shapes")
    add("--trace", type=file(".json"), metavar="FILE", help="write a Chrome trace of one call of each")
    add("--host-cost", action="store_true", help="also measure the host's time for a small call")
    add("--no-profile", action="store_true", help="skip the profiler's tables")
    args = parser.parse_args(argv)
    args.shapes, args.causals = args.shapes or [DEFAULT_SHAPE], CAUSALS[args.causals]
    if args.host_cost and device == "cpu":
        parser.error("argument --host-cost: needs a GPU")
    if True in args.causals and any(shape.seqlen_q > shape.seqlen_k for shape in args.shapes):
        parser.error("argument --causal: needs Sq <= Sk, otherwise there are rows without a key")
    return args


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args = parse_args(argv, device)
    torch.backends.cuda.matmul.allow_tf32 = False  # float32 means float32 for the peers too
    meta = environment(device, argv)
    kinds = [(dtype, causal) for dtype in args.dtypes for causal in args.causals]
    on_device = f"on {meta['device']}" + " (TF32 off)" * (device == "cuda" and "float32" in args.dtypes)
    case_of = functools.lru_cache(maxsize=1)(lambda setting: Case(setting, device))
    told, failed = set(), False

    if args.host_cost:
        meta["host_us"] = host_cost()
        numbers = {name: [us] for name, us in meta["host_us"].items()}
        print_table("µs of host time for (1,4,64,64) bfloat16", ["µs"], numbers)

    shape = next(x for x in (*args.shapes, DEFAULT_SHAPE) if reference_fits(x, device))
    for dtype, causal in kinds:
        case = case_of(Setting(shape, dtype, causal))
        console.print(f"=== checking {Setting(shape, dtype, causal)} {on_device} ===", soft_wrap=True)
        able = {}
        for impl in serving(args.impls, dtype):
            if (max_err := attempt(told, impl, judge, impl, case)) is not None:
                console.print(f"{impl}: max error {max_err:.2e} against fp64, allowed {case.tolerance:.2e}")
                able[impl] = IMPLS[impl].forward
        failed |= any(impl not in able and must_serve(impl, device) for impl in serving(args.impls, dtype))

    families = dict.fromkeys(impl.split(":")[0] for impl in args.impls)
    for heading, forward in [] if args.no_profile else [PROFILES[x] for x in families]:
        console.print(f"=== profiling {heading} ===")
        if prof := attempt(told, heading, profiled, {heading: forward}, case):
            sort_by = "device_time_total" if device == "cuda" else "cpu_time_total"
            print(prof.key_averages().table(sort_by=sort_by, row_limit=10, max_name_column_width=40))
    if args.trace:
        profiled(able, case).export_chrome_trace(args.trace)

    sweep = [args.shapes[0]._replace(seqlen_q=x, seqlen_k=x) for x in args.seqlens]
    results = {Setting(x, *kind): {} for kind in kinds for x in dict.fromkeys((*args.shapes, *sweep))}
    jobs = [(setting, impl) for setting in results for impl in args.impls]
    for setting, impl in track(jobs, "timing", console=console, transient=True):
        case = case_of(setting)
        measured = attempt(told, impl, measure, impl, case) if serving([impl], setting.dtype) else None
        results[setting][impl] = case.row(impl, measured or {})

    of_shapes = {setting: rows for setting, rows in results.items() if setting.shape in args.shapes}
    for setting, rows in of_shapes.items() if len(of_shapes) <= MANY else ():
        numbers = {impl: [*(rows[impl][x] for x in MEASURED), speedup(rows, impl)] for impl in rows}
        headings = ["ms", "p20", "p80", "TFLOP/s", "GB/s", "peak MB", "max err", "× manual"]
        print_table(f"{setting} {on_device}", headings, numbers)
    if len(of_shapes) > MANY:
        numbers = {str(setting): [rows[x]["tflops"] for x in rows] for setting, rows in of_shapes.items()}
        print_table(f"TFLOP/s {on_device}", args.impls, numbers)
    for dtype, causal in kinds if sweep else ():
        numbers = {impl: [results[Setting(shape, dtype, causal)][impl]["ms"] for shape in sweep] for impl in args.impls}
        print_table(f"ms over S in {Setting(args.shapes[0], dtype, causal)}", args.seqlens, numbers)
    if args.json:
        rows = ",\n".join(json.dumps(row) for rows in results.values() for row in rows.values())
        Path(args.json).write_text(f'{{"meta": {json.dumps(meta, indent=1)},\n"rows": [\n{rows}\n]}}\n')
    if args.plot:
        drawn = {setting: results[setting] for setting in results if not sweep or setting.shape in sweep}
        plot(args.plot, drawn, f"Attention forward {on_device}")
    return int(failed or WrongResult in (kind for _, kind in told))


if __name__ == "__main__":
    sys.exit(main())
