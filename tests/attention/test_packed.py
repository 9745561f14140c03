"""Packed batches: keys that samples share, the functions of flash-attn, FlashMHA, how a batch is packed and undone."""

import dataclasses
import functools
import inspect
import itertools
import math

import pytest
import torch
from torch.testing import assert_close

import minimal_attn
from minimal_attn import (FlashMHA, flash_attention, flash_attn_func, flash_attn_varlen_func, pad_input,
                          unpad_input)
from test_lengths import (BATCHES, DEVICE, DTYPES, IMPLS, KERNELS, TOLERANCE, Batch, close, each_kernel, ints, make,
                          run)

SHARED_KEYS = next(x for x in BATCHES if x.name == "shared_keys")


@each_kernel
def test_max_seqlen_of_shared_keys(impl):
    """Gradients do not depend on max_seqlen_k, nor on the run, and a wrong one is an error where it can be seen.
    Without gradients the keys are read where samples share them."""
    device, dtype = IMPLS[impl][1], DTYPES[impl]
    q, k, v, dout, _ = make(SHARED_KEYS, dtype, device)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    want = None
    for max_seqlen in (None, 60, torch.tensor(60, device=device)):
        out, _ = run(impl, SHARED_KEYS, *inputs, deterministic=True, max_seqlen_k=max_seqlen)
        gradients = torch.autograd.grad(out, inputs, dout)
        assert want is None or all(map(torch.equal, gradients, want))
        want = gradients
    if device == "cpu":
        with pytest.raises(ValueError, match="max_seqlen_k must be at least the largest of seqused_k, 60, got 59"):
            run(impl, SHARED_KEYS, *inputs, max_seqlen_k=59)
    with torch.no_grad():  # which copies no keys, and needs none
        got = run(impl, SHARED_KEYS, *inputs, max_seqlen_k=59)[0]
    close(got, out.detach().double(), TOLERANCE[dtype])


@each_kernel
def test_shared_keys_of_heads_that_overlap(impl):
    """Strides of a signal: the copies of keys have a contiguous last dimension."""
    device, dtype = IMPLS[impl][1], DTYPES[impl]
    q = torch.randn(1, 2, 9, 8, device=device, dtype=dtype)
    signal = torch.randn(64, device=device, dtype=dtype)
    k = signal.as_strided((1, 2, 50, 8), (64, 1, 1, 1)).detach().requires_grad_()
    lengths = {name: ints(*x, device=device) for name, x in
               dict(cu_seqlens_q=(0, 4, 9), cu_seqlens_k=(0, 0, 50), seqused_k=(30, 50)).items()}
    out, want = (flash_attention(q, k, k, **lengths, backend=backend) for backend in (IMPLS[impl][0], "reference"))
    close(out.detach(), want.detach().double(), TOLERANCE[dtype])
    got, want = (torch.autograd.grad(x.square().sum(), k)[0] for x in (out, want))
    assert want.any()
    close(got, want.double(), 3 * TOLERANCE[dtype])


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


def test_opcheck_of_the_copies():
    x, parts, rows = torch.randn(9, 2, 4), torch.randn(5, 2, 4), torch.tensor([3, 3, 0, 8, 3])
    torch.library.opcheck(minimal_attn.reference.packed._take_rows, (x.requires_grad_(), rows))
    torch.library.opcheck(minimal_attn.reference.packed._add_rows, (parts.requires_grad_(), rows, 9))


# On a GPU.

@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["cuda:sm90"])
@pytest.mark.parametrize("D", [64, 96, 128, 192, 256])  # of each tile
@pytest.mark.parametrize("causal", [False, True])
def test_bits_of_samples_of_a_large_batch(impl, D, causal):
    """More tiles than the GPU has SMs, of samples that are empty, of one row, or end beside a tile."""
    sizes = (0, 1, 63, 64, 65, 127, 129, 191, 193, 300) * 4
    batch = Batch("large", sizes, sizes[13:] + sizes[:13], causal=causal, H=16, Hk=4, D=D)
    q, k, v, _, _ = make(batch, DTYPES[impl], "cuda")
    out, lse = run(impl, batch, q, k, v)
    want, want_lse = run("reference", batch, *(x.double() for x in (q, k, v)))
    close(out, want, TOLERANCE[out.dtype])
    close(lse, want_lse, 1e-5)
    for b, (_, rows, keys) in list(enumerate(batch.samples()))[::7]:
        alone = dataclasses.replace(batch, rows=batch.rows[b:b + 1], keys=batch.keys[b:b + 1])
        got, got_lse = run(impl, alone, *(x[:, :, part].clone() for x, part in ((q, rows), (k, keys), (v, keys))))
        assert got.equal(out[:, :, rows]) and got_lse.equal(lse[:, :, rows])


# The functions of flash-attn.

TAIL = ("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic",
        "return_attn_probs")
LENGTHS = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
POSITIONS = {
    "flash_attn_func": ("q", "k", "v", *TAIL), "flash_attn_qkvpacked_func": ("qkv", *TAIL),
    "flash_attn_kvpacked_func": ("q", "kv", *TAIL), "flash_attn_varlen_func": ("q", "k", "v", *LENGTHS, *TAIL,
                                                                               "block_table"),
    "flash_attn_varlen_qkvpacked_func": ("qkv", "cu_seqlens", "max_seqlen", *TAIL),
    "flash_attn_varlen_kvpacked_func": ("q", "kv", *LENGTHS, *TAIL),
}
KEYWORDS = {"out", "s_aux", "learnable_sink", "sinks", "return_softmax_lse", "num_splits", "pack_gqa", "sm_margin",
            "fa_version", "dropout_seed", "return_lse", "backend", "score_mod", "mask_mod", "aux_tensors"}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_are_those_of_flash_attn_2(name):
    parameters = inspect.signature(getattr(minimal_attn, name)).parameters.values()
    assert tuple(x.name for x in parameters if x.kind == x.POSITIONAL_OR_KEYWORD) == POSITIONS[name]
    named = {x.name for x in parameters if x.kind == x.KEYWORD_ONLY}
    assert named >= KEYWORDS
    if "varlen" in name:
        assert named >= {"seqused_q", "seqused_k", "scheduler_metadata", "page_table", "dynamic_causal", "min_seqlen_k",
                         "gather_kv_indices", "ver"}
    assert not any(x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD) for x in parameters)


@pytest.mark.parametrize("name", ["leftpad_k", "cache_leftpad", "cache_seqlens", "cache_batch_idx", "page_table"])
def test_names_of_flash_attn_with_kvcache_are_explained(name):
    q = torch.randn(1, 2, 10, 16)
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'; .*attention_with_kvcache"):
        flash_attention(q, q, q, **{name: ints(3)})


REFUSED = "q_descale", "k_descale", "v_descale", "qv", "score_mod", "mask_mod", "aux_tensors"


@pytest.mark.parametrize("name", [*REFUSED, "dynamic_causal", "min_seqlen_k", "gather_kv_indices"])
def test_what_is_not_there_is_refused_by_name(name):
    q, bounds = torch.randn(10, 4, 16), ints(0, 4, 10)
    calls = {"flash_attn_varlen_func": functools.partial(flash_attn_varlen_func, q, q, q, bounds, bounds)}
    if name in REFUSED:
        calls["flash_attn_func"] = functools.partial(flash_attn_func, *[q[None]] * 3)
    for function, call in calls.items():
        assert call(**{name: None}).equal(call())
        with pytest.raises(NotImplementedError, match=f"^{function}: {name} is not supported yet"):
            call(**{name: torch.ones(4)})


@pytest.mark.parametrize("name", ["qkvpacked", "kvpacked", "varlen_qkvpacked", "varlen_kvpacked"])
def test_keywords_of_functions_of_packed_tensors(name):
    """They reach the function of q, k and v, and errors speak of the one that was called, and of its arguments."""
    name = f"flash_attn_{name}_func"
    call, is_varlen = getattr(minimal_attn, name), "varlen" in name
    whole = flash_attn_varlen_func if is_varlen else flash_attn_func
    q, k, v = torch.randn(3, 10, 4, 16) if is_varlen else torch.randn(3, 2, 10, 4, 16)
    lengths = [ints(0, 4, 10)] * 2 if is_varlen else []
    given = (torch.stack([q, k, v], -3), *lengths[:1]) if "qkv" in name else (q, torch.stack([k, v], -3), *lengths)
    sinks, place = torch.randn(4), torch.empty_like(q)
    options = dict(causal=True, window_size=(3, 0), softmax_scale=0.3)
    want = whole(q, k, v, *lengths, sinks=sinks, return_lse=True, **options)
    got = call(*given, **options, s_aux=sinks, out=place, return_softmax_lse=True, num_splits=2, pack_gqa=True,
               sm_margin=1, fa_version=3)
    assert got[0] is place and got[0].equal(want[0]) and got[1].equal(want[1])
    if is_varlen:
        used = dict(seqused_q=ints(2, 6), seqused_k=ints(4, 3))
        assert call(*given, **used, scheduler_metadata=ints(0)).equal(whole(q, k, v, *lengths, **used))
    for error, said, bad in [(NotImplementedError, ": mask_mod", dict(mask_mod=len)),
                             (TypeError, ": s_aux and sinks", dict(s_aux=sinks, sinks=sinks))]:
        with pytest.raises(error, match=f"^{name}{said}"):
            call(*given, **bad)
    if is_varlen and "qkv" in name:
        for error, said, *bad in [(TypeError, "^cu_seqlens must be", lengths[0].long()),
                                  (ValueError, "^cu_seqlens must start at 0, ascend", ints(0, 8, 4)),
                                  (ValueError, f"^{name}: cu_seqlens must be given", None),
                                  (TypeError, "^max_seqlen must be", lengths[0], 3.0)]:
            with pytest.raises(error, match=said):
                call(given[0], *bad)


# FlashMHA, and what it packs with.

def mask_of(kind):
    """bool (3, 12), True where a position is valid."""
    lengths = torch.tensor([12, 0, 5], device=DEVICE)[:, None]
    position = torch.arange(12, device=DEVICE)
    if kind == "right":
        return position < lengths
    if kind == "left":
        return position >= 12 - lengths
    return torch.rand(3, 12, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.6


@pytest.mark.parametrize("kind", ["right", "left", "holes"])
def test_unpad_input_and_pad_input(kind):
    mask, x = mask_of(kind), torch.randn(3, 12, 2, 5, device=DEVICE)
    packed, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, mask)
    assert packed.equal(x[mask]) and indices.equal(mask.flatten().nonzero()[:, 0])
    assert seqused.tolist() == mask.sum(1).tolist() and max_seqlen == max(seqused.tolist())
    assert cu_seqlens.tolist() == [0, *itertools.accumulate(seqused.tolist())]
    assert cu_seqlens.dtype == seqused.dtype == torch.int32
    assert pad_input(packed, indices, 3, 12).equal(x.masked_fill(~mask[..., None, None], 0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_masks_of_integers(dtype):
    mask, x = torch.tensor([[0, 1, 1], [1, 0, 0]], dtype=dtype, device=DEVICE), torch.randn(2, 3, 32, device=DEVICE)
    for got, want in zip(unpad_input(hidden_states=x, attention_mask=mask), unpad_input(x, mask.bool())):
        assert got == want if isinstance(got, int) else got.equal(want)
    module = FlashMHA(32, 4, backend="torch", device=DEVICE)
    assert module(x, key_padding_mask=mask).equal(module(x, key_padding_mask=mask.bool()))
    with pytest.raises(TypeError, match="attention_mask must be bool, int64, int32 or uint8 .* got a torch.float32"):
        unpad_input(x, mask.float())


@pytest.mark.parametrize("kind, backend", [
    *(("holes", backend) for backend in minimal_attn.attention.BACKENDS), ("right", "torch"), ("left", "torch")])
def test_flash_mha_with_a_mask(kind, backend):
    """Each sample as it is alone, without what is not valid, which changes nothing."""
    module = FlashMHA(32, 4, 2, causal=True, window_size=(3, -1), device=DEVICE, backend=backend)
    mask, x = mask_of(kind), torch.randn(3, 12, 32, device=DEVICE)
    x[~mask] = math.nan
    out = module(x, key_padding_mask=mask)
    assert out.shape == x.shape and (out[~mask] == 0).all()
    for b in range(3):
        if mask[b].any():
            assert_close(out[b, mask[b]], module(x[b, mask[b]][None])[0], rtol=1e-4, atol=1e-5)
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("backend", minimal_attn.attention.BACKENDS)
def test_flash_mha_of_a_packed_batch(backend):
    """Each sample as it is alone; and, compiled, one graph for all values of cu_seqlens."""
    module, x = FlashMHA(32, 4, causal=True, device=DEVICE, backend=backend), torch.randn(20, 32, device=DEVICE)
    want = torch.cat([module(x[None, :13])[0], module(x[None, 13:])[0]])
    for max_seqlen in (None, 13, torch.tensor(13)):
        got = module(x, cu_seqlens=ints(0, 13, 20, device=DEVICE), max_seqlen=max_seqlen)
        assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    graphs = []
    compiled = torch.compile(lambda x, cu_seqlens: module(x, cu_seqlens=cu_seqlens, max_seqlen=20), fullgraph=True,
                             backend=lambda graph, inputs: graphs.append(graph) or graph)
    for values in ((0, 13, 20), (0, 0, 20)):
        cu_seqlens = ints(*values, device=DEVICE)
        assert_close(compiled(x, cu_seqlens), module(x, cu_seqlens=cu_seqlens))
    assert len(graphs) == 1


def test_flash_mha_bad_input():
    """Errors speak of the module's own arguments."""
    module, x, mask = FlashMHA(32, 4, device=DEVICE), torch.randn(3, 12, 32, device=DEVICE), mask_of("left")
    cu_seqlens = ints(0, 12, device=DEVICE)
    for error, match, given, arguments in [
            (ValueError, "seq_lens cannot be given with", x, dict(seq_lens=[3, 3, 3], key_padding_mask=mask)),
            (TypeError, "^key_padding_mask must be bool", x, dict(key_padding_mask=mask.float())),
            (ValueError, "^key_padding_mask must be .* of shape", x, dict(key_padding_mask=mask[1:])),
            (ValueError, "^max_seqlen needs a packed batch", x, dict(max_seqlen=12)),
            (ValueError, "^x must be", x, dict(cu_seqlens=cu_seqlens)),
            (TypeError, "^cu_seqlens must be", x[0], dict(cu_seqlens=cu_seqlens.long())),
            (TypeError, "^cu_seqlens must be", x[0], dict(cu_seqlens=[0, 12])),
            (ValueError, "^cu_seqlens must be of shape", x[0], dict(cu_seqlens=cu_seqlens[:1])),
            (TypeError, "^max_seqlen must be", x[0], dict(cu_seqlens=cu_seqlens, max_seqlen=3.0))]:
        with pytest.raises(error, match=match):
            module(given, **arguments)
