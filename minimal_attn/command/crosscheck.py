"""Every backend of this machine against the reference: a short check that an installation computes what it should.

The tests of the source tree hold far more cases by the same rule.
"""

import math
import warnings
from typing import NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import flash_attention, load, reference_attention
from ..attention import BACKENDS
from ..toolkit.validation import allowed_error
from .progress import watched

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Check(NamedTuple):
    name: str
    q_shape: tuple  # (B, H, Sq, D)
    k_shape: tuple  # (B, Hk, Sk, D)
    options: dict = {}


# Eight heads or more: the largest error of a handful of numbers is a matter of luck.
CHECKS = [
    Check("head_dim 64", (4, 4, 96, 64), (4, 4, 96, 64)),
    Check("causal", (4, 2, 96, 64), (4, 2, 96, 64), {"causal": True}),
    Check("grouped heads, Sq < Sk", (2, 4, 65, 128), (2, 2, 130, 128), {"causal": True}),
    Check("head_dim 33", (4, 4, 50, 33), (4, 4, 70, 33)),
    Check("head_dim 256, scale", (4, 4, 40, 256), (4, 4, 40, 256), {"sm_scale": 0.1}),
    Check("seq_lens", (2, 4, 80, 64), (2, 4, 80, 64), {"causal": True, "seq_lens": [17, 80]}),
    Check("window", (2, 4, 80, 64), (2, 4, 100, 64), {"window_size": (20, 5)}),
    Check("packed", (1, 8, 100, 64), (1, 4, 130, 64),
          {"causal": True, "cu_seqlens_q": [0, 33, 33, 100], "cu_seqlens_k": [0, 40, 60, 130]}),
    Check("rows without a key", (4, 2, 70, 64), (4, 2, 30, 64), {"causal": True}),
]


def run() -> int:
    """Check and print a table of the largest errors. The exit code: 0 if all is right, else 1."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = Console(highlight=False)
    why_not = {name: backend.why_not(device) for name, backend in BACKENDS.items() if name != "reference"}
    backends = [name for name, reason in why_not.items() if reason is None]
    for name, reason in why_not.items():
        if reason is not None:
            console.print(f"{name} is left out: {reason}", markup=False, soft_wrap=True)
    title = f"Largest error against fp64, on {torch.cuda.get_device_name() if device.type == 'cuda' else 'the CPU'}"
    table = Table("check", "dtype", "allowed", *backends, title=title, box=SIMPLE_HEAD)
    failures = []
    jobs = [(check, dtype) for check in CHECKS for dtype in DTYPES]
    unusable = {}  # {backend: why}
    if "cuda" in backends:
        try:
            load()  # here, for its own moving line; if it fails, the other backends are judged all the same
        except Exception as error:
            unusable["cuda"] = in_one_line(error)
    for check, dtype in watched(jobs, "checking", console):
        inputs, cells = Inputs(check, dtype, device), []
        for backend in backends:
            error, failure = (math.nan, unusable[backend]) if backend in unusable else inputs.judge(backend)
            cells.append("[red]FAILED[/]" if failure else f"[green]{error:.1e}[/]")
            if failure:
                where = backend if backend in unusable else f"{backend}, {check.name}, {inputs.dtype}"
                failures.append(f"{where}: {failure}")
        table.add_row(check.name, inputs.dtype, f"{inputs.allowed:.1e}", *cells)
    console.print(table)
    console.print("The column allowed is for our backends. torch may have twice that error: its fast kernels round "
                  "more often.", soft_wrap=True)
    for failure in dict.fromkeys(failures):  # what is unusable is told once
        console.print(failure, markup=False, soft_wrap=True)
    count = len(jobs) * len(backends)
    console.print(f"{count - len(failures)} of {count} are right", style="green" if not failures else "red")
    return int(bool(failures))


def in_one_line(error):
    return f"{type(error).__name__}: {error}".splitlines()[0]


class Inputs:
    """Normal q, k and v for a check, their result in fp64, and the error that it allows."""

    def __init__(self, check, dtype, device):
        torch.manual_seed(0)
        self.dtype = str(dtype).removeprefix("torch.")
        self.options = {name: torch.tensor(x, dtype=torch.int32, device=device) if name.startswith("cu_seqlens") else x
                        for name, x in check.options.items()}
        shapes = check.q_shape, check.k_shape, check.k_shape
        self.qkv = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
        self.out, self.lse = reference_attention(*(x.double() for x in self.qkv), **self.options, return_lse=True)
        with sdpa_kernel(SDPBackend.MATH):
            base = flash_attention(*self.qkv, **self.options, backend="torch")
        self.allowed = allowed_error(base, self.out)

    def judge(self, backend):
        """(the largest error of out, None), or (NaN, what is wrong)."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what is slow, which is not the matter here
                out, lse = flash_attention(*self.qkv, **self.options, return_lse=True, backend=backend)
        except Exception as error:
            return math.nan, in_one_line(error)
        error = (out.double() - self.out).abs().max().item()
        # The rule is for our own kernels: torch's fast ones can be a little worse than its MATH backend allows.
        allowed = self.allowed * (2 if backend == "torch" else 1)
        if not error <= allowed:  # NaN is wrong
            return math.nan, f"max error {error:.2e}, allowed {allowed:.2e}"
        # A few roundings of fp32, at the size of the largest: a small lse may be the sum of large products.
        atol = 3e-6 + 5e-7 * self.lse[self.lse > -math.inf].abs().max().item()
        if not torch.allclose(lse.double(), self.lse, 2e-6, atol):  # -inf is close to -inf alone
            return math.nan, "lse is wrong"
        return error, None
