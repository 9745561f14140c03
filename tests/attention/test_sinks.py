"""Attention sinks: of any dtype and memory, and far from all scores.

test_lengths.py compares their results and gradients with a loop in fp64, together with lengths, windows and dropout.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from conftest import OF_16_BITS
from minimal_attn import flash_attention, reference_attention
from minimal_attn.backends import auto as choice
from test_lengths import DEVICE, IMPLS, Batch, by_loop, close, each_impl, make, make_sinks, run


def dtype_of(impl):
    return torch.bfloat16 if impl in OF_16_BITS else torch.float32


@each_impl
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradient_of_sinks_has_their_dtype(impl, dtype):
    """Also of an expanded one, whose gradient is a sum."""
    batch = Batch("sinks", (20,) * 2, (33,) * 2, causal=True, is_packed=False, D=16, head_dim_v=24)
    q, k, v, _, _ = make(batch, dtype_of(impl), IMPLS[impl][1])
    for sinks in (torch.tensor([0.3, -1, 2, 0]), torch.tensor([0.3])):
        sinks, exact = (sinks.to(dtype).to(q.device, x).requires_grad_() for x in (dtype, torch.float64))
        out, lse = flash_attention(q, k, v, True, sinks=sinks.expand(4), return_lse=True, backend=IMPLS[impl][0])
        got, = torch.autograd.grad(out.float().square().sum() + lse.sum(), sinks)
        out, lse = reference_attention(*(x.double() for x in (q, k, v)), True, sinks=exact.expand(4), return_lse=True)
        want, = torch.autograd.grad(out.square().sum() + lse.sum(), exact)
        assert got.dtype == dtype
        close(got, want, 1e-4 if dtype == q.dtype == torch.float32 else 3e-2)


@each_impl
def test_sinks_far_from_all_scores(impl):
    """Sinks far below change nothing but rows without keys; sinks far above take all."""
    batch = Batch("far", (30,) * 2, (12,) * 2, is_packed=False, D=16)
    q, k, v = given = [x.requires_grad_() for x in make(batch, dtype_of(impl), IMPLS[impl][1])[:3]]
    options = dict(causal=True, return_lse=True, backend=IMPLS[impl][0])
    want, want_lse = flash_attention(*given, **options)
    for value in (-100.0, -3e4, -math.inf):
        sinks = torch.full((4,), value, dtype=torch.float32, device=q.device, requires_grad=True)
        out, lse = flash_attention(*given, sinks=sinks, **options)
        close(out, want.double(), 2e-2 if q.dtype.itemsize == 2 else 1e-5)
        assert_close(lse[:, :, 18:], want_lse[:, :, 18:], rtol=1e-5, atol=1e-5)
        total = out.float().sum() + lse[:, :, 18:].sum()
        assert all(x.isfinite().all() for x in torch.autograd.grad(total, [*given, sinks]))
    sinks = torch.full((4,), 3e4, dtype=torch.float32, device=q.device, requires_grad=True)
    out, lse = flash_attention(*given, sinks=sinks, **options)
    assert (out == 0).all()
    assert_close(lse, torch.full_like(lse, 3e4))
    gradients = torch.autograd.grad(out.float().sum() + lse.sum(), [*given, sinks])
    assert all((x == 0).all() for x in gradients[:3])
    assert_close(gradients[3], torch.full_like(sinks, 2 * 30), rtol=1e-2, atol=0)  # an ulp of 3e4 is 2e-3


@pytest.mark.parametrize("is_counted, backend", [(True, "torch"), (False, "cuda")])
def test_auto_counts_all_that_wants_gradients(is_counted, backend, monkeypatch):
    """Under a transform of torch.func, where it takes torch for gradients."""
    monkeypatch.setattr(choice, "_first_available", lambda: "cuda")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    q, chosen = torch.empty(1, 2, 40, 64), []

    def of(x):
        chosen.append(choice.auto_backend(q, q, q, *([x] if is_counted else [])))
        return x.sum()

    torch.func.grad(of)(torch.zeros(2))
    assert chosen == [backend]


# Triton.

def test_scores_as_large_as_their_sink():
    """Sums of the keys and of the sink are alike, and exp of each alone is 0 or infinite in fp32."""
    batch = Batch("large", (3,), (5,), H=2, Hk=1, D=16, is_packed=False)
    for sign in (1, -1):
        q, k = (torch.full(shape, value, device=DEVICE) for shape, value in zip(batch.shapes(), (512.0, sign * 1.0)))
        sinks = torch.tensor([sign * 2048.0, sign * 2048.0 + 1], device=DEVICE)  # scores are ± 2048
        v = torch.randn(1, 1, 5, 16, device=DEVICE)
        (out, lse), (want, want_lse, _) = run("triton", batch, q, k, v, sinks), by_loop(batch, q, k, v, sinks)
        assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
        assert_close(lse.double(), want_lse, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("sinks", [[3e38, math.inf], [2.4e38, -3e38]], ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)], ids=str)
def test_sinks_as_far_as_can_be(sinks, window, dtype):
    """A sink that leaves the keys nothing is lse, and the gradient of lse is its own. One of -3e38 is so only for a row
    without keys. In powers of two, 2.4e38 and more are infinite."""
    batch = Batch("far", (8,), (5,), window=window, H=2, Hk=1, D=16, is_packed=False, has_sinks=True)
    q, k, v, dout, dlse = make(batch, dtype, DEVICE)
    given = [x.requires_grad_() for x in (q, k, v, torch.tensor(sinks, device=DEVICE))]
    exact = [x.detach().double().clamp(max=1e300).requires_grad_() for x in given]
    want, want_lse, _ = by_loop(batch, *exact)
    out, lse = run("triton", batch, *given)
    atol = 1e-2 if dtype == torch.float16 else 1e-4
    assert_close(lse, want_lse.float(), rtol=atol, atol=atol)
    wants = want, *torch.autograd.grad([want, want_lse], exact, [dout.double(), dlse.double()])
    for x, y in zip((out, *torch.autograd.grad([out, lse], given, [dout, dlse])), wants):
        assert_close(x.double(), y, rtol=atol, atol=atol)


def test_nan_in_dlse_of_rows_without_keys():
    """Their lse is their sink, whose gradient it is then NaN, and nothing else."""
    batch = Batch("empty_rows", (8,), (4,), causal=True, H=2, Hk=1, D=16, is_packed=False, has_sinks=True)
    q, k, v, dout, dlse = make(batch, torch.float32, DEVICE)
    given = [x.requires_grad_() for x in (q, k, v, *make_sinks(batch, torch.float32, DEVICE))]
    outputs = run("triton", batch, *given, deterministic=True)
    *want, _ = torch.autograd.grad(outputs, given, [dout, dlse], retain_graph=True)
    dlse[:, :, :4] = math.nan
    *got, dsinks = torch.autograd.grad(outputs, given, [dout, dlse])
    assert all(map(torch.equal, got, want)) and dsinks.isnan().all()
