"""Benchmark of matrix multiplication: the Triton kernel and torch's own, and a Case.

Read next: ../../triton_ref/matmul.py, the kernel; measure.py, which measures it.
"""

from typing import NamedTuple

import torch

from .. import triton_matmul
from ..toolkit.validation import allowed_error
from .measure import DTYPE_NAMES, MEASURED, Impl, normal, timed, truth_fits

TITLE = "Matrix multiplication"
DTYPES = DTYPE_NAMES
ROW = ("op", "impl", "dtype", "m", "n", "k", *MEASURED)
SHAPES = "M,N,K"


class Shape(NamedTuple):
    m: int
    n: int
    k: int

    def __str__(self):
        return ",".join(map(str, self))

    @classmethod
    def of(cls, sizes):
        """From the integers of SHAPES. Raises ValueError."""
        if len(sizes) != 3:
            raise ValueError(f"not {SHAPES}")
        return cls(*sizes)

    @property
    def parts(self):
        return {"M": str(self.m), "N": str(self.n), "K": str(self.k)}

    sweeps = ()

    @property
    def elements(self):
        return self.m * self.k + self.k * self.n + self.m * self.n


DEFAULT_SHAPES = {
    "cuda": [*(Shape(n, n, n) for n in (512, 1024, 2048, 4096, 8192)), Shape(4096, 11008, 4096), Shape(16, 4096, 4096)],
    "cpu": [Shape(64, 64, 64), Shape(128, 128, 128), Shape(16, 128, 96)],
}


IMPLS = {
    "triton": Impl(triton_matmul, backend="triton"),
    "cublas": Impl(torch.matmul, ("cuda",)),
    "torch": Impl(torch.matmul, ("cpu",)),
}
PROFILES = {"triton": ("triton matmul", triton_matmul), "cublas": ("torch.matmul", torch.matmul),
            "torch": ("torch.matmul", torch.matmul)}
BASELINE = "cublas" if torch.cuda.is_available() else "torch"


class Case:
    """Normal a (m, k) and b (k, n), their product in fp64, and the error it allows."""

    impls = IMPLS
    op = "matmul"
    columns = ROW

    def __init__(self, setting, device):
        self.shape, self.dtype, _ = self.setting = setting
        self.device = device
        m, n, k = self.shape
        torch.manual_seed(0)
        a, b = self.args = normal((m, k), device, self.dtype), normal((k, n), device, self.dtype)
        self.flops = 2 * m * n * k
        self.out_bytes = m * n * a.element_size()
        self.bytes = a.nbytes + b.nbytes + self.out_bytes
        self.truth = self.tolerance = None
        if self.has_truth(self.shape, device):
            self.truth = a.double() @ b.double()
            self.tolerance = allowed_error(a @ b, self.truth)

    @staticmethod
    def has_truth(shape, device):
        return truth_fits(shape.elements, device)

    def judged(self, x):
        return x

    def timed(self, forward):
        return timed(self.device, forward, *self.args)

    def row(self, impl, measured):
        known = dict(op=self.op, impl=impl, dtype=self.dtype, **self.shape._asdict(), **measured)
        return {key: known.get(key) for key in self.columns}


CASES = {Shape: Case}
