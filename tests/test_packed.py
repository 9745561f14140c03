"""Packed batches: what the lengths of their samples may be, and how a batch becomes one and is undone."""

import pytest
import torch

import minimal_attn
from minimal_attn import flash_attention
from test_lengths import BATCHES, DTYPES, IMPLS, KERNELS, ints, make, run

SHARED_KEYS = next(x for x in BATCHES if x.name == "shared_keys")


@pytest.mark.parametrize("impl", KERNELS)
def test_max_seqlen_k_that_is_too_small_gives_nan_where_lengths_are_not_read(impl):
    """In the sample that is longer, in its gradients too, and in none of the others."""
    device = IMPLS[impl][1]
    q, k, v, dout, _ = make(SHARED_KEYS, DTYPES[impl], device)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def attend(*inputs):
        return run(impl, SHARED_KEYS, *inputs, max_seqlen_k=45)[0]

    if device == "cpu":
        with pytest.raises(ValueError, match="max_seqlen_k must be at least the largest of seqused_k, 60, got 45"):
            attend(*inputs)
    torch._dynamo.reset()
    for call in [torch.compile(attend, fullgraph=True, backend="aot_eager"), *[attend] * (device == "cuda")]:
        out = call(*inputs)
        dq, dk, dv = torch.autograd.grad(out, inputs, dout)
        for (_, rows, keys), seqlen in zip(SHARED_KEYS.samples(), SHARED_KEYS.seqused_k):
            assert (out[:, :, rows].isnan().all() and dq[:, :, rows].isnan().all()) == (seqlen > 45)
            assert out[:, :, rows].isnan().any() == dq[:, :, rows].isnan().any() == (seqlen > 45)
        assert dk[:, :, :45].isnan().all() and dv[:, :, :45].isnan().all()  # of the keys that it still has


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_max_seqlen_is_no_negative_number_and_no_bool(name):
    q, cu_seqlens = torch.randn(1, 2, 10, 16), ints(0, 4, 10)
    for error, match, value in [(ValueError, "must not be negative, got -1", -1),
                                (TypeError, "must be None, an int or a tensor of one element, got True", True)]:
        with pytest.raises(error, match=f"{name} {match}"):
            flash_attention(q, q, q, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, **{name: value})


@pytest.mark.parametrize("impl", KERNELS)
def test_second_derivative_of_shared_keys_is_refused_by_name(impl):
    q, k, v, dout, _ = make(SHARED_KEYS, DTYPES[impl], IMPLS[impl][1])
    inputs = [x.nan_to_num().requires_grad_() for x in (q, k, v)]
    out, _ = run(impl, SHARED_KEYS, *inputs)
    dk, = torch.autograd.grad(out.square().sum(), inputs[1], create_graph=True)
    with pytest.raises(NotImplementedError, match="has no second derivative"):
        torch.autograd.grad(dk.sum(), inputs)


def test_opcheck_of_the_copies():
    x, parts, rows = torch.randn(1, 2, 9, 4), torch.randn(5, 2, 4), torch.tensor([3, 3, 0, 8, 3])
    torch.library.opcheck(minimal_attn.packed._take_rows, (x.requires_grad_(), rows))
    torch.library.opcheck(minimal_attn.packed._add_rows, (parts.requires_grad_(), rows, 9))
