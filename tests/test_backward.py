"""dq, dk and dv of every differentiable implementation against fp64, over the cases of the forward pass."""

import pytest
import torch

from cases import CASES, DTYPES, Case, base, check_error, exact, make_inputs, make_tensor, options
from conftest import HAS_GPU, IMPLEMENTATIONS
from minimal_attn import flash_attention
from minimal_attn.reference import visible_keys

CASES_HERE = [case for case in CASES if HAS_GPU or not (case.gpu_only or max(case.Sq, case.Sk) > 200)]
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


def by_hand(case, q, k, v, dout):
    """Dao 2023, Algorithm 2, in plain fp32 operations, with out, P and dS rounded as kernels hand them on: what the
    rounding of out and lse alone does to gradients that nearly cancel."""
    out, lse = exact(case, q, k, v)
    dtype, (q, k, v, dout) = q.dtype, (x.detach().float() for x in (q, k, v, dout))
    groups, scale = case.H // case.Hk, case.D**-0.5 if case.sm_scale is None else case.sm_scale
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    seq_lens = None if case.seq_lens is None else torch.tensor(case.seq_lens, device=q.device)
    mask = visible_keys(case.Sq, case.Sk, case.causal, seq_lens, q.device)
    P = (q @ k.mT * scale - lse.float()[..., None]).exp()
    if mask is not None:
        P = P.masked_fill(~mask, 0)
    delta = (dout * out.to(dtype).float()).sum(-1, keepdim=True)
    dS = (P * (dout @ v.mT - delta)).to(dtype).float()
    dq, dk, dv = dS @ k * scale, dS.mT @ q * scale, P.to(dtype).float().mT @ dout
    return [x.to(dtype) for x in (dq, *(x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv)))]


def check(case, got, q, k, v, dout):
    """The error rule of the forward, 3 times on the maximum and 2 on the mean, of all three gradients; the yardstick is
    the worse of torch's MATH backend, which keeps P, and of the algorithm that keeps out and lse."""
    based = gradients(lambda *qkv: base(case, *qkv), q, k, v, dout)
    for x, ref, *bases in zip(got, by_fp64(case, q, k, v, dout), based, by_hand(case, q, k, v, dout)):
        check_error(x, ref, *bases, factor=3, mean_factor=2)


@each_case
@each_dtype
@each_impl
def test_against_fp64(impl, dtype, case, poisoned_outputs):
    q, k, v, dout = make_all(case, dtype, IMPLEMENTATIONS[impl][1])
    check(case, gradients(by(impl, case), q, k, v, dout), q, k, v, dout)
