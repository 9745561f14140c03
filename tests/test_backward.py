"""dq, dk and dv of every differentiable implementation against fp64, over the cases of the forward pass."""

import dataclasses
import math

import pytest
import torch

from cases import CASES, DTYPES, Case, base, check_error, exact, make_inputs, make_tensor, options
from conftest import HAS_GPU, IMPLEMENTATIONS
from minimal_attn import flash_attention, reference_attention

CASES_HERE = [case for case in CASES if HAS_GPU or not (case.gpu_only or max(case.Sq, case.Sk) > 1000)]
BACKWARD = [impl for impl in IMPLEMENTATIONS if not impl.startswith("cuda")]
each_case = pytest.mark.parametrize("case", CASES_HERE, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
each_impl = pytest.mark.parametrize("impl", BACKWARD)


def make_all(case, dtype, device):
    """q, k, v that require grad, and dout in a layout of its own, NaN around it."""
    q, k, v = (x.detach().requires_grad_() for x in make_inputs(case, dtype, device))
    generator = torch.Generator().manual_seed(1)
    dout = make_tensor(q.shape, dtype, device, case.v_layout or case.layout, generator=generator)
    return q, k, v, dout


def gradients(function, q, k, v, dout):
    """Of sum(function(q, k, v) · dout), in the dtype of the inputs."""
    return torch.autograd.grad(function(q, k, v), (q, k, v), dout)


def by_fp64(case, q, k, v, dout):
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    return gradients(lambda *qkv: exact(case, *qkv)[0], q, k, v, dout.double())


def by(impl, case):
    return lambda q, k, v: flash_attention(q, k, v, **options(case), backend=IMPLEMENTATIONS[impl][0])


def check(case, got, q, k, v, dout):
    """The error rule of the forward, 3 times on the maximum and 2 on the mean, of all three gradients."""
    based = gradients(lambda *qkv: base(case, *qkv), q, k, v, dout)
    for x, ref, of_base in zip(got, by_fp64(case, q, k, v, dout), based):
        check_error(x, ref, of_base, factor=3, mean_factor=2)


@each_case
@each_dtype
@each_impl
def test_against_fp64(impl, dtype, case, poisoned_outputs):
    q, k, v, dout = make_all(case, dtype, IMPLEMENTATIONS[impl][1])
    check(case, gradients(by(impl, case), q, k, v, dout), q, k, v, dout)
