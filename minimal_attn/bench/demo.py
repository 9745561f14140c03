"""One screen for a newcomer: what is this machine, is every implementation right on it, and is ours fast?

On a CPU nothing is timed: there the kernels run to be read and debugged.
"""

from pathlib import Path

import torch

from .. import __version__, load
from ..attention import BACKENDS
from . import Run, print_profiles
from .impls import IMPLS
from .measure import Setting, WrongResult, environment, is_judged
from .options import parse_args
from .tables import console, print_tables

# On a GPU large enough to keep all of it busy, on a CPU small enough for Triton's interpreter.
SHAPES = {"cuda": "4,16,2048,128", "cpu": "2,4,96,64"}
DTYPES = "bfloat16", "float32"
LEFT_OUT = "cuda", "flex", "torch:varlen"  # cuda repeats a kernel; torch compiles and tunes Flex for most of a minute

ON_A_CPU = """
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


def run(with_profile=False):
    """Build, check and, on a GPU, time; the exit code: 1 if a result is wrong or one of ours does not serve."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False  # float32 means float32 for the peers too
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
    able = {dtype: demo.check(Setting(demo.checked, dtype))[1] for dtype in DTYPES}
    if device == "cuda":
        demo.time_all()
        print_tables(demo.results, demo.args, [], demo.on_device)
    if with_profile:
        print_profiles(demo.case_of(Setting(demo.checked, DTYPES[0])), able[DTYPES[0]], demo.told)
    wrong = sum(kind is WrongResult for _, kind in demo.told)
    right = sum(is_judged(name, dtype) for dtype in DTYPES for name in able[dtype])
    console.print(f"{right} of {right + wrong} results agree with attention in fp64.")
    verdicts = [verdict(rows, setting.dtype) for setting, rows in demo.results.items()] or [ON_A_CPU]
    console.print(*verdicts, f"Next: {NEXT[device]}", "      csrc/flash.cu is the kernel to read first; README.md has "
                  "the reading order", sep="\n", soft_wrap=True)
    return int(demo.failed or wrong > 0)


def verdict(rows, dtype):
    timed = [row for row in rows.values() if row["ms"]]
    ours, peer = (min((row for row in timed if bool(IMPLS[row["impl"]].backend) == is_ours),
                      key=lambda row: row["ms"], default=None) for is_ours in (True, False))
    if ours is None or peer is None:
        return f"{dtype}: {'none of ours' if ours is None else 'no peer'} was timed."
    ratio, peer = peer["ms"] / ours["ms"], f"{peer['impl']}, the fastest peer."
    if ratio >= 1:
        return f"{dtype}: {ours['impl']} is {ratio:.2f} times as fast as {peer}"
    return f"{dtype}: ours is slower, {ours['impl']} reaches {ratio:.2f} of the speed of {peer}"
