"""One screen for a newcomer: what is this machine, is every implementation right on it, and is ours fast?

On a CPU nothing is timed: there the kernels run to be read and debugged. Read next: __init__.py, the whole benchmark.
"""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from rich import box
from rich.table import Table
from rich.text import Text

from .. import __version__, load
from ..attention import BACKENDS
from ..command.progress import watched
from . import print_profiles, serving
from .cases import Case, Shape
from .impls import IMPLS
from .measure import Setting, WrongResult, is_judged, judge, must_serve
from .options import OPS
from .tables import console, number

# On a GPU large enough to keep all of it busy, on a CPU small enough for Triton's interpreter.
SHAPES = {"cuda": Shape(4, 16, 2048, 128, 16, 2048), "cpu": Shape(2, 4, 96, 64, 4, 96)}
DTYPES = "bfloat16", "float32"
LEFT_OUT = "flex"  # torch compiles and tunes it for most of a minute

ON_A_CPU = """\
Nothing is timed on a CPU. The host build of csrc/flash.cu and Triton's interpreter are for reading
and debugging; for CPU tensors flash_attention takes torch. To step through the kernel:

    g++ -std=c++20 -g -Og -pthread -Icsrc tests/emulator/drivers/driver.cpp
    gdb -ex 'break flash_fwd' -ex run a.out
"""
NEXT = {
    "cuda": "python -m minimal_attn bench --dtype bfloat16 --shape 2,32,4096,128\n"
            "      every peer of this machine, at a shape of yours and over lengths",
    "cpu": "python -m minimal_attn check\n      more cases: masks, grouped heads, other head dimensions",
}


class Result(NamedTuple):
    """The result of one implementation in one dtype."""

    dtype: str
    impl: str
    allowed: float | None  # error, None if it is not judged
    max_err: float | None = None  # None if it is wrong or does not serve
    numbers: dict = {}  # of its row, if it was timed
    failure: str | None = None  # of a wrong result, or of one of ours that does not serve
    excuse: str | None = None  # of a peer that does not serve


def run(with_profile=False):
    """Build, check and, on a GPU, time; the exit code: 1 if a result is wrong or one of ours does not serve."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False  # float32 means float32 for the peers too
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU, as torch sees no GPU"
    console.print(f"minimal_attn {__version__} with torch {torch.__version__} on {where}", soft_wrap=True)
    impls = [name for name in IMPLS if device in IMPLS[name].devices and name != LEFT_OUT]
    for backend in ("cuda", "triton"):
        if (why_not := BACKENDS[backend].why_not(torch.device(device))) is not None:
            console.print(f"{backend} is left out: {why_not}", soft_wrap=True)
            impls = [name for name in impls if IMPLS[name].backend != backend]
    if kernels := [name for name in impls if IMPLS[name].backend == "cuda"]:
        megabytes = Path(load().__file__).stat().st_size / 1e6
        console.print(f"csrc is built ({megabytes:.1f} MB). Its kernels here: {', '.join(kernels)}", soft_wrap=True)
    settings = {dtype: Setting(SHAPES[device], dtype) for dtype in DTYPES}
    jobs = [(dtype, impl) for dtype in DTYPES for impl in serving(IMPLS, impls, settings[dtype])]
    results, cases = [], {dtype: Case(OPS["attention"], setting, device) for dtype, setting in settings.items()}
    for dtype, impl in watched(jobs, lambda job: f"checking {job[1]} in {job[0]}", console):
        results.append(result_of(cases[dtype], impl))
    if with_profile:
        print_profiles(cases[DTYPES[0]], serving(IMPLS, impls, settings[DTYPES[0]]), set())
    show(results, device)
    return int(any(result.failure for result in results))


def result_of(case, impl):
    """The Result of checking and, on a GPU, timing an implementation."""
    result = Result(case.dtype, impl, case.tolerance if is_judged(impl, case.dtype) else None)
    try:
        if case.device == "cpu":
            return result._replace(max_err=judge(case, impl))
        numbers = case.measured(impl)
        return result._replace(max_err=numbers.get("max_err", math.nan), numbers=numbers)
    except Exception as error:
        has_to = isinstance(error, WrongResult) or must_serve(IMPLS[impl], case.dtype, case.device)
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        return result._replace(failure=said) if has_to else result._replace(excuse=said)


def show(results, device):
    """The screen: a table, a verdict, the next step."""
    failed = [x for x in results if x.failure]
    right = [x for x in results if x.max_err is not None]
    console.print("", table_of(right + failed, device), sep="\n")
    for excuse in dict.fromkeys(x.excuse for x in results if x.excuse):
        excused = ", ".join(f"{x.impl} in {x.dtype}" for x in results if x.excuse == excuse)
        console.print(f"does not serve: {excused}: {excuse}", soft_wrap=True)
    for x in failed:
        console.print(f"{x.impl} in {x.dtype}: {x.failure}", soft_wrap=True)
    judged = [x for x in right + failed if x.allowed]
    agree = sum(x.max_err is not None for x in judged)
    console.print(f"{agree} of {len(judged)} results agree with attention in fp64.\n")
    verdicts = "\n".join(verdict(results, dtype) for dtype in DTYPES) if device == "cuda" else ON_A_CPU
    console.print(verdicts, f"Next: {NEXT[device]}", "      csrc/flash.cu is the kernel to read first; README.md has "
                  "the reading order", sep="\n", soft_wrap=True)


def table_of(results, device):
    """Makes the table of the results, by dtype and the fastest first."""
    headings = ["ms", "TFLOP/s", "× fastest peer"] if device == "cuda" else []
    table = Table("", "dtype", box=box.SIMPLE_HEAD, show_edge=False, padding=0, title_justify="left", title_style="",
                  title=f"attention, (B,H,S,D) = ({SHAPES[device]})")
    for heading in ("max error", "allowed", *headings):
        table.add_column(heading, justify="right")
    for x in sorted(results, key=lambda x: (DTYPES.index(x.dtype), x.numbers.get("ms", math.inf))):
        max_err = Text("FAILED", "red") if x.failure else Text(f"{x.max_err:.1e}", "green" if x.allowed else "")
        peer, ms = fastest(results, x.dtype, ours=False), x.numbers.get("ms")
        speed = [ms, x.numbers.get("tflops"), peer and ms and peer.numbers["ms"] / ms][:len(headings)]
        table.add_row(x.impl, x.dtype, max_err, f"{x.allowed:.1e}" if x.allowed else "–", *map(number, speed))
    return table


def fastest(results, dtype, ours):
    """The fastest timed result of ours, or of the peers. None if none was timed."""
    timed = [x for x in results if x.dtype == dtype and x.numbers and bool(IMPLS[x.impl].backend) == ours]
    return min(timed, key=lambda x: x.numbers["ms"], default=None)


def verdict(results, dtype):
    ours, peer = (fastest(results, dtype, ours=x) for x in (True, False))
    if ours is None or peer is None:
        return f"{dtype}: {'none of ours' if ours is None else 'no peer'} was timed."
    ratio = peer.numbers["ms"] / ours.numbers["ms"]
    if ratio >= 1:
        return f"{dtype}: {ours.impl} is {ratio:.2f} times as fast as {peer.impl}, the fastest peer."
    return f"{dtype}: ours is slower, {ours.impl} reaches {ratio:.2f} of the speed of {peer.impl}, the fastest peer."
