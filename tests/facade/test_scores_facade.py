"""Softcap, ALiBi, biases and masks in every function that takes them: which kernel serves, flash-attn's functions
and FlashMHA.

test_scores.py compares the kernels with a loop. test_torch_sdpa.py compares scaled_dot_product_attention with torch's.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from conftest import HAS_GPU
from minimal_attn import (FlashMHA, flash_attention, flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func,
                          flash_attn_varlen_kvpacked_func)
from minimal_attn.backends import cuda
from test_lengths import DEVICE
from test_scores import B, H, HEAD_DIM_V, SCALE, each_backend, inputs, ints, mask, randn, slopes


# Which backend serves them.

GIVEN = {"softcap": 2.0, "attention_chunk": 3, "alibi_slopes": slopes(H), "attn_bias": mask(7, 9)}


def test_fast_path_knows_of_them(monkeypatch):
    """attention/test_kernels.py: it then leaves the call to Python."""
    monkeypatch.setattr(cuda, "_fast_forward", lambda q, k, v, given, *others: given)
    q, k, v = inputs(dtype=torch.float32)
    by_rows = [x.transpose(1, 2) for x in (q, k, v)]
    flat = [x[0] for x in by_rows]
    for name, value in GIVEN.items():
        assert getattr(flash_attention(q, k, v, **{name: value}), name) is value
        if name != "attn_bias":
            assert getattr(flash_attn_func(*by_rows, **{name: value}), name) is value
            assert getattr(flash_attn_varlen_func(*flat, ints(0, 7), ints(0, 9), **{name: value}), name) is value


# The functions of flash-attn.

SINKS = randn(H)


@each_backend
@pytest.mark.parametrize("scores", [
    {}, dict(softcap=0.7, s_aux=SINKS), dict(alibi_slopes=slopes(H), learnable_sink=SINKS),
    dict(softcap=3, alibi_slopes=slopes(B, H), sinks=SINKS)], ids=lambda x: "_".join(x))
def test_functions_of_flash_attn(scores, backend):
    """In their layouts, with v of another head_dim, and with all names of the sinks."""
    q, k, v = inputs()
    sinks = SINKS if scores else None
    ours = {name: x for name, x in scores.items() if x is not SINKS}
    want, want_lse = flash_attention(q, k, v, True, SCALE, sinks=sinks, return_lse=True, backend=backend, **ours)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, probs = flash_attn_func(q, k, v, 0.0, SCALE, True, return_attn_probs=True, backend=backend, **scores)
    assert_close(out, want.transpose(1, 2))
    assert_close(lse, want_lse)
    options = dict(softmax_scale=SCALE, causal=True, return_lse=True, backend=backend, **scores)
    place = torch.empty_like(out)
    assert flash_attn_func(q, k, v, out=place, **options)[0] is place and place.equal(out) and probs is None
    bounds = [ints(0, n, 2 * n) for n in (7, 9)]
    out, lse = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), *bounds, 7, 9, **options)
    assert_close(out.view(B, 7, H, HEAD_DIM_V), want.transpose(1, 2))
    assert_close(lse.view(H, B, 7).transpose(0, 1), want_lse)
    packed_k = torch.stack([k, k], 2).flatten(0, 1)
    out, _ = flash_attn_varlen_kvpacked_func(q.flatten(0, 1), packed_k, *bounds, 7, 9, **options)
    assert_close(out, flash_attn_func(q, k, k, **options)[0].flatten(0, 1))
    out, _ = flash_attn_qkvpacked_func(torch.stack([q] * 3, 2), **options)
    assert_close(out, flash_attn_func(q, q, q, **options)[0])


# FlashMHA.

def mha_and_input(**options):
    torch.manual_seed(0)
    return FlashMHA(32, H, backend="torch", device=DEVICE, dtype=torch.float64, **options), randn(B, 6, 32)


MHA_MASKS = {"bool": mask(B, H, 6, 6), "of_rows": mask(6, 6), "float": randn(6, 6, seed=4),
             "of_heads": randn(H, 6, 6, seed=4)}


@pytest.mark.parametrize("name", MHA_MASKS)
@pytest.mark.parametrize("causal", [False, True])
def test_mha_takes_the_mask_of_sdpa(name, causal):
    mha, x = mha_and_input(causal=causal)
    given = MHA_MASKS[name]
    q, k, v = mha.Wqkv(x).unflatten(-1, (3, H, 8)).permute(2, 0, 3, 1, 4)
    bias = torch.zeros_like(given, dtype=torch.float64).masked_fill(~given, -math.inf) if name in ("bool", "of_rows") \
        else given
    bias = bias + torch.full((6, 6), -math.inf, device=DEVICE).triu(1) if causal else bias
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).nan_to_num(0)
    want = mha.out_proj(out.transpose(1, 2).flatten(2))
    assert_close(mha(x, attn_mask=given), want)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MHA_MASKS)
def test_mha_takes_both_masks(name, causal):
    """Keys that either mask hides are hidden, wherever padding lies, and NaN in padding changes nothing."""
    mha, x = mha_and_input(causal=causal)
    valid = torch.tensor([[True] * 6, [False, True, True, False, True, False]], device=DEVICE)
    given = MHA_MASKS[name].clone()
    if given.dtype == torch.bool:
        both = given.expand(B, H, 6, 6) & valid[:, None, None]
    else:
        both = given.expand(B, H, 6, 6).masked_fill(~valid[:, None, None], -math.inf)
        given.requires_grad_()
    want = mha(x, attn_mask=both).masked_fill(~valid[..., None], 0)
    out = mha(x.masked_fill(~valid[..., None], math.nan), key_padding_mask=valid, attn_mask=given)
    assert_close(out, want)
    leaves = [mha.Wqkv.weight, *[given] * given.requires_grad]
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), leaves))
    assert_close(mha(x, key_padding_mask=valid, attn_mask=torch.ones_like(given, dtype=torch.bool)),
                 mha(x, key_padding_mask=valid))


def test_mha_takes_a_mask_with_lengths_and_windows():
    mha, x = mha_and_input(window_size=(2, 1))
    places = torch.arange(6, device=DEVICE)
    distances = places[:, None] - places
    hides = (distances <= 2) & (distances >= -1) & (places < torch.tensor([6, 4], device=DEVICE)[:, None, None, None])
    given = MHA_MASKS["of_rows"]
    wide, _ = mha_and_input()
    got = mha(x, seq_lens=[6, 4], attn_mask=given)
    want = wide(x, attn_mask=given & hides)
    assert_close(got[0], want[0])
    assert_close(got[1, :4], want[1, :4])


def test_mha_bad_masks():
    mha, x = mha_and_input()
    local, _ = mha_and_input(window_size=(2, 2))
    valid, given = torch.ones(B, 6, dtype=torch.bool, device=DEVICE), mask(6, 6)
    for error, match, call in [
            (ValueError, r"^attn_mask must be of 1 to 4 dimensions that broadcast to \(2, 4, 6, 6\)",
             lambda: mha(x, attn_mask=mask(6, 5))),
            (TypeError, "^attn_mask must be .* got a torch.int64", lambda: mha(x, attn_mask=given.long())),
            (ValueError, "^cu_seqlens cannot be given with attn_mask$",
             lambda: mha(x[0], cu_seqlens=ints(0, 6), attn_mask=given)),
            (ValueError, "windows and chunks count what key_padding_mask leaves",
             lambda: local(x, key_padding_mask=valid, attn_mask=given)),
            (ValueError, "seq_lens cannot be", lambda: mha(x, [6, 6], key_padding_mask=valid, attn_mask=given))]:
        with pytest.raises(error, match=match):
            call()


def test_tangents_of_slopes_are_not_lost():
    slope = slopes(H)
    for backend in {"reference", *["cuda"] * (not HAS_GPU)}:
        attend = lambda x, backend=backend: flash_attention(*inputs(), alibi_slopes=x, backend=backend)  # noqa: E731
        if backend == "reference":
            assert torch.func.jvp(attend, (slope,), (torch.ones_like(slope),))[1].abs().max() > 0
        else:
            with pytest.raises(NotImplementedError, match="no forward-mode derivative, but alibi_slopes has a tangent"):
                torch.func.jvp(attend, (slope,), (torch.ones_like(slope),))


def test_slopes_that_require_grad_are_taken_without_gradients():
    """Parameters of a module are such slopes."""
    parameter = slopes(H).requires_grad_()
    with torch.no_grad():
        got = flash_attention(*inputs(), alibi_slopes=parameter, backend="torch")
    assert got.equal(flash_attention(*inputs(), alibi_slopes=parameter.detach(), backend="torch"))
