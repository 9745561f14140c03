"""Kernels as torch sees them: operators with a schema, fake kernels and traces, and one graph under torch.compile."""

import math

import pytest
import torch
from torch.testing import assert_close

from cases import compiler_for, slow_unless
from conftest import HAS_GPU, OF_16_BITS
from minimal_attn import flash_attention, load
from minimal_attn.checks import sum_dtype
from minimal_attn.options import DECODE_FIELDS, OF_OP, Append, Lengths, Options
from test_lengths import DTYPES, IMPLS, KERNELS, TOLERANCE, close, make, make_sinks, op_of, window_of
from test_scores import Scored, as_taken

each_kernel = pytest.mark.parametrize("impl", KERNELS)
PADDED = dict(rows=(20, 20), keys=(24, 24), is_packed=False)
BATCHES = {
    "plain": Scored("plain", **PADDED, causal=True, layout="bshd"),
    "padded": Scored("padded", **PADDED, seqused_q=(9, 20), seqused_k=(24, 5), window=(7, -1), head_dim_v=24,
                     dropout_p=0.3, has_sinks=True),
    "packed": Scored("packed", (9, 11), (7, 20), (9, 5), window=(7, 2)),
    "scores": Scored("scores", **PADDED, softcap=2.0, slopes="heads", bias=(0, 1, 0, 1), causal=True),
}
# Whether dq, dk and dv, dsinks and dbias are needed.
NEEDED = {"plain": (True, True, False, False), "padded": (False, True, True, False),
          "packed": (True, False, False, False), "scores": (True, True, False, True)}


@pytest.mark.cpu
def test_options_are_in_the_order_of_csrc():
    load()
    for op, fields in (("flash_forward", Options._fields[:OF_OP + 1]), ("flash_backward", Options._fields[:OF_OP + 1]),
                       ("flash_decode", DECODE_FIELDS), ("append_kvcache", Append._fields)):
        names = [x.name for x in getattr(torch.ops.minimal_attn, op).default._schema.arguments]
        first = {"flash_backward": 7, "append_kvcache": 4}.get(op, 3)
        assert [x.removeprefix("cache_") for x in names[first:first + len(fields)]] == list(fields)


@pytest.mark.parametrize("impl, kind", [
    pytest.param(impl, kind, marks=slow_unless(HAS_GPU or impl != "triton" or kind in ("padded", "scores")))
    for impl in KERNELS for kind in BATCHES])
def test_opcheck(impl, kind):
    """By torch's own checks, forward and backward, with the strides and the sizes of what they return."""
    batch, dtype, device = BATCHES[kind], DTYPES[impl], IMPLS[impl][1]
    q, k, v, dout, dlse = (x.nan_to_num() for x in make(batch, dtype, device))
    sinks = [x.to(sum_dtype(dtype)) for x in make_sinks(batch, dtype, device)]
    scores = batch.tensors(dtype, device, seed=1)
    if scores:
        scores = {"softcap": batch.softcap, "alibi_slopes": scores["alibi_slopes"].expand(2, -1).contiguous(),
                  "attn_bias": as_taken(scores["attn_bias"], impl, k.shape[2])}
    seed = torch.tensor([5], device=device) if batch.dropout_p else None
    options = Options.of(0.2, window_of(batch), Lengths(**batch.lengths(device)), sinks=sinks[0] if sinks else None,
                         dropout_p=batch.dropout_p, dropout_seed=seed, **scores).of_op()
    forward, backward = op_of(impl)
    torch.library.opcheck(forward.default, (q, k, v, *options))
    out, lse, _ = forward(q, k, v, *options)
    assert lse.is_contiguous() and (kind == "padded" or out.stride() == torch.empty_like(q).stride())
    arguments = dout, dlse if kind != "plain" else None, q, k, v, out, lse, *options, impl != "triton"
    torch.library.opcheck(backward.default, (*arguments, *NEEDED[kind]))
    for needed in (NEEDED[kind], (False, True, False, False)):
        found = backward(*arguments, *needed)
        assert [x.numel() > 0 for x in found] == [needed[0], needed[1], needed[1], *needed[2:]]
        assert not sinks or found[3].dtype == sinks[0].dtype
        assert not needed[3] or (found[4].dtype, found[4].shape) == (dtype, scores["attn_bias"].shape)


@each_kernel
@pytest.mark.parametrize("kind", ["padded", "packed", "scores"])
def test_compile_fullgraph(impl, kind):
    """Forward and backward, with operations before and after for Inductor to fuse, and gradients of sinks or a bias."""
    batch, dtype, (backend, device) = BATCHES[kind], DTYPES[impl], IMPLS[impl]
    q, k, v, dout, dlse = (x.nan_to_num() for x in make(batch, dtype, device))
    tensors = batch.tensors(dtype, device, seed=1)
    others = [*make_sinks(batch, dtype, device), *([tensors["attn_bias"]] if tensors else [])]
    inputs = [x.requires_grad_() for x in (q, k, v, *others)]
    options = batch.options(device) | tensors

    def attend(q, k, v, other=None):
        given = {"attn_bias": as_taken(other, impl, 24), "softcap": 2.0} if tensors else {"sinks": other}
        out, lse = flash_attention(2 * q, k, v, **options | given, return_lse=True, backend=backend)
        return out + 1, lse.masked_fill(lse == -math.inf, 0).square()

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=compiler_for(impl))
    got, want = (call(*inputs) for call in (compiled, attend))
    assert [x.stride() for x in got] == [x.stride() for x in want]
    gradients = (torch.autograd.grad(results, inputs, (dout, dlse)) for results in (got, want))
    for x, y in zip((*got, *next(gradients)), (*want, *next(gradients))):
        close(x.detach(), y.detach().double(), 3 * TOLERANCE[dtype])


each_impl = pytest.mark.parametrize("impl", [x for x in IMPLS if x != "reference"])


@each_impl
def test_seq_lens_are_clamped_under_torch_compile(impl):
    backend, device = IMPLS[impl]
    q = torch.randn(3, 2, 20, 16, device=device, dtype=torch.bfloat16 if impl in OF_16_BITS else torch.float32)
    attend = torch.compile(lambda q, lengths: flash_attention(q, q, q, seq_lens=lengths, backend=backend),
                           fullgraph=True, backend="aot_eager")
    out = attend(q, torch.tensor([-3, 2**31 - 1, 2**32 + 5], device=device))
    assert (out[0] == 0).all()
    assert_close(out[1:], flash_attention(q, q, q, backend=backend)[1:])
