"""Runs one implementation on one case: is it right, how fast is it, what does it need?

A case (cases.py) holds inputs, the truth in fp64 and the error that it allows.
"""

import json
import os
import platform
import re
import shlex
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch reads it when it first profiles: no log lines in the tables

import torch
from torch.profiler import profile, record_function

from .._build import source_digest
from ..attention import BACKENDS
from ..checks import KERNEL_DTYPES
from ..command.info import driver_version, triton_version
from ..toolkit.benchmark import benchmark_fn
from ..toolkit.gpu import supports_fp8

SECONDS_PER_TIMING = {"cuda": 0.3, "cpu": 0.2}  # A timing repeats its call for about so long.

# The numbers of a row, and how tables call them; what could not be measured is null.
MEASURED = {"ms": "ms", "ms_p20": "p20", "ms_p80": "p80", "tflops": "TFLOP/s", "gbps": "GB/s", "peak_mb": "peak MB",
            "max_err": "max err"}
DTYPE_NAMES = tuple(str(dtype).removeprefix("torch.") for dtype in KERNEL_DTYPES)
FP8_DTYPE_NAMES = ("float8_e4m3fn", "float8_e5m2")


class Impl(NamedTuple):
    forward: Callable  # (q, k, v, call) -> out, or an exception where it cannot serve them
    devices: tuple = ("cuda", "cpu")
    backend: str | None = None  # of minimal_attn, if it is ours: where that is available, it has to serve
    dtypes: tuple = DTYPE_NAMES
    kinds: tuple = ("dense",)  # of shapes that it serves
    kernel: str | None = None  # of csrc, which is forced in both passes

    def serves(self, setting):
        return setting.dtype in self.dtypes and setting.shape.kind in self.kinds


class Setting(NamedTuple):
    shape: NamedTuple
    dtype: str
    causal: bool = False

    def __str__(self):
        return f"({self.shape}) {self.dtype}{' causal' * self.causal}"


class WrongResult(Exception):
    pass


def normal(size, device, dtype):
    """A normal tensor of a dtype by its name; torch.randn makes none of fp8."""
    return torch.randn(size, device=device).to(getattr(torch, dtype))


def truth_fits(elements, device):
    """Whether four copies of so many fp64 elements fit: in 4 GiB of RAM, or in half of a GPU, 32 GiB at most."""
    limit = min(8 << 30, torch.cuda.get_device_properties(0).total_memory // 8) if device == "cuda" else 1 << 30
    return 8 * elements <= limit


def judge(case, name):
    """The errors of one call, as case.truth, or None without one; WrongResult if one is beyond case.tolerance."""
    case.prepare(name)
    out = case.results(name, case.function(name)(*case.args))
    if case.truth is None or not out:
        return None
    errors = tuple((case.judged(x).double() - truth).abs().max().item() for x, truth in zip(out, case.truth))
    is_right = all(error <= allowed for error, allowed in zip(errors, case.tolerance))  # NaN is wrong
    may_miss = name == "manual" and case.dtype != "float32"  # it also rounds the scores to 16 bits, which is no bug
    if not (is_right or may_miss):
        raise WrongResult(f"max error {in_words(errors)}, allowed {in_words(case.tolerance)}")
    return errors


def each(x):
    return x if isinstance(x, tuple) else (x,)


def in_words(errors):
    return " / ".join(f"{x:.2e}" for x in errors)


def must_serve(impl, dtype, device):
    """Whether impl has to serve: it is one of ours, and this machine has all that it needs."""
    backend = BACKENDS.get(impl.backend)
    has_dtype = dtype not in FP8_DTYPE_NAMES or device == "cpu" or supports_fp8()
    return backend is not None and has_dtype and backend.why_not(torch.device(device)) is None


def profiled(case, names):
    """The profile of one call of each of some implementations."""
    with profile(acc_events=True) as prof:  # as there is one cycle; otherwise torch warns
        for name in names:
            with record_function(name):
                case.function(name)(*case.args)
        if case.device == "cuda":
            torch.cuda.synchronize()
    return prof


def timed(device, function, *args):
    """benchmark_fn of as many calls as fill SECONDS_PER_TIMING, 20 at least; on a CPU one call may be enough."""
    least, guess = (20, 3) if device == "cuda" else (1, 1)
    start = time.perf_counter()
    first = benchmark_fn(function, *args, warmup=0, rep=guess)
    rep = max(least, int(SECONDS_PER_TIMING[device] * guess / (time.perf_counter() - start)))
    return first if rep <= guess else benchmark_fn(function, *args, warmup=rep // 10, rep=rep)


def matmul_ceiling(dtype, device):
    """TFLOP/s of torch's matmul of 8192³, of 512³ on a CPU: what products alone would take, without a softmax."""
    n = 8192 if device == "cuda" else 512
    a, b = (normal((n, n), device, dtype) for _ in range(2))
    return float(f"{2 * n**3 / timed(device, torch.matmul, a, b)[0] / 1e9:.6g}")


def write_json(file, meta, rows):
    """Replaces file at once, so that it is whole whenever the run ends."""
    part = Path(f"{file}.part")
    lines = ",\n".join(map(json.dumps, rows))
    part.write_text(f'{{"meta": {json.dumps(meta, indent=1)},\n"rows": [\n{lines}\n]}}\n')
    part.replace(file)


def environment(device, program, argv):
    """The meta of the JSON."""
    interpreting = "TRITON_INTERPRET=1 " * (os.environ.get("TRITON_INTERPRET") == "1")
    words = [re.sub(r"(^|=)/.*/", r"\1", x) for x in argv]  # for any machine: without the directories of this one
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU",
        "driver": driver_version(),
        "torch": torch.__version__,
        "triton": triton_version(),
        "cuda": torch.version.cuda,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "source_digest": source_digest(),
        "command": interpreting + shlex.join([*program.split(), *words]),
    }
