"""One screen for a newcomer: what is this machine, is every implementation right on it, and is ours fast?

On a CPU nothing is timed: there the kernels run to be read and debugged.
"""

from pathlib import Path

import torch

from .. import __version__, load
from ..attention import BACKENDS
from . import Run
from .impls import IMPLS
from .measure import Setting, environment
from .options import parse_args
from .tables import console, print_results

# On a GPU large enough to keep all of it busy, on a CPU small enough for Triton's interpreter.
SHAPES = {"cuda": "4,16,2048,128", "cpu": "2,4,96,64"}
DTYPES = "bfloat16", "float32"
LEFT_OUT = "cuda", "flex", "torch:varlen"  # cuda repeats a kernel; torch compiles and tunes Flex for most of a minute
ON_A_CPU = "Nothing is timed on a CPU: there the kernels run to be debugged (docs/developing.md), and torch serves calls."


def run(with_profile=False):
    """Build, check and, on a GPU, time; the exit code: 1 if a result is wrong or one of ours does not serve."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU, as torch sees no GPU"
    console.print(f"minimal_attn {__version__} with torch {torch.__version__} on {where}", soft_wrap=True)
    names = [name for name in IMPLS if {device, "dense"} <= {*IMPLS[name].devices, *IMPLS[name].kinds}
             and name not in LEFT_OUT]
    for backend in ("cuda", "triton"):
        if (why_not := BACKENDS[backend].why_not(torch.device(device))) is not None:
            console.print(f"{backend} is left out: {why_not}", soft_wrap=True)
            names = [name for name in names if IMPLS[name].backend != backend]
    if kernels := [name for name in names if IMPLS[name].backend == "cuda"]:
        megabytes = Path(load().__file__).stat().st_size / 1e6
        console.print(f"csrc is built ({megabytes:.1f} MB). Its kernels here: {', '.join(kernels)}", soft_wrap=True)
    options = ["--shape", SHAPES[device], "--seqlens", "", "--dtype", ",".join(DTYPES), "--impls", ",".join(names)]
    args = parse_args("minimal-attn demo", options, device, "")
    demo = Run(args, device, environment(device, "minimal-attn demo", options))
    checked = [demo.check(Setting(demo.checked, dtype)) for dtype in DTYPES]
    if device == "cuda":
        demo.time_all()
        print_results(demo.results, args, demo.on_device)
    if with_profile:
        demo.print_profiles(*checked[0])
    verdicts = [verdict(rows, setting.dtype) for setting, rows in demo.results.items()] or [ON_A_CPU]
    console.print(f"{'Not all' if demo.failed else 'All'} results agree with attention in fp64.", *verdicts,
                  "Next: minimal-attn bench --help. README.md has the reading order.", sep="\n", soft_wrap=True)
    return int(demo.failed)


def verdict(rows, dtype):
    """The fastest of ours beside the fastest of the others."""
    ours, peer = (min((row for name, row in rows.items() if row["ms"] and bool(IMPLS[name].backend) == is_ours),
                      key=lambda row: row["ms"], default=None) for is_ours in (True, False))
    if ours is None or peer is None:
        return f"{dtype}: {'none of ours' if ours is None else 'no peer'} was timed."
    return f"{dtype}: {ours['impl']} is {peer['ms'] / ours['ms']:.2f} times as fast as {peer['impl']}, the fastest peer."
