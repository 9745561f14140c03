"""Bad input of calls with caches: one error for each, which names the argument, and nothing is written before."""

import math

import pytest
import torch

import minimal_attn
from cached_calls import BACKENDS, ints, on_device
from minimal_attn import (append_to_kvcache, attention_with_kvcache, flash_attn_combine, flash_attn_varlen_func,
                          flash_attn_with_kvcache, reshape_and_cache)
from minimal_attn.options import Append

cpu = pytest.mark.cpu


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def one(*values):
    return ints(*values, device="cpu")


def randn(*shape, **options):
    return torch.randn(shape, **options)


def zeros(*shape, dtype=torch.int32, **options):
    return torch.zeros(shape, dtype=dtype, **options)


def check_error(call, error, match, given):
    """The call raises this error, and writes nothing."""
    before = {name: x.clone() for name, x in given.items() if "cache" in name and isinstance(x, torch.Tensor)}
    with pytest.raises(error, match=match):
        call(**given)
    for name, x in before.items():
        assert x.equal(given[name])


# attention_with_kvcache.

def pages():
    return dict(q=randn(2, 4, 3, 16), k_cache=randn(5, 2, 4, 16), v_cache=randn(5, 2, 4, 16), seqused_k=one(9, 5),
                page_table=one(0, 1, 2, 3, 4, 0).view(2, 3))


def dense():
    return dict(pages(), k_cache=randn(2, 2, 12, 16), v_cache=randn(2, 2, 12, 16), page_table=None)


def packed():
    return dict(pages(), q=randn(1, 4, 6, 16), cu_seqlens_q=one(0, 2, 6))


BAD = [
    (TypeError, "q must be a torch.Tensor, got list", pages, dict(q=[1.0])),
    (TypeError, "k_cache must be a torch.Tensor, got NoneType", pages, dict(k_cache=None)),
    (TypeError, "v_cache must be a dense tensor", pages, dict(v_cache=randn(5, 4).to_sparse())),
    (TypeError, "k_cache is torch.int32", pages, dict(k_cache=torch.ones(5, 2, 4, 16).int())),
    (TypeError, "q is torch.float8_e4m3fn", pages, dict(q=torch.ones(2, 4, 3, 16).to(torch.float8_e4m3fn))),
    (TypeError, "q is torch.float32, k_cache is torch.float16", pages, dict(k_cache=randn(5, 2, 4, 16).half())),
    (ValueError, "same device: q is on cpu, k_cache on meta", pages, dict(k_cache=randn(5, 2, 4, 16, device="meta"))),
    (ValueError, "4D tensors: q is", pages, dict(q=randn(2, 4, 16))),
    (ValueError, "head_dim 300", pages, dict(q=randn(2, 4, 3, 300))),
    (ValueError, "head_dim 300", pages, dict(v_cache=randn(5, 2, 4, 300))),
    (ValueError, "q and k_cache must have the same head_dim", pages, dict(q=randn(2, 4, 3, 8))),
    (ValueError, "k_cache and v_cache must have the same shape", pages, dict(v_cache=randn(5, 2, 3, 16))),
    (ValueError, "the number of query heads", pages, dict(q=randn(2, 3, 3, 16))),
    (ValueError, "k_cache must be contiguous in its last", pages, dict(k_cache=randn(5, 2, 16, 4).mT)),
    (ValueError, "v_cache must be contiguous in its last", pages, dict(v_cache=randn(5, 2, 4, 32)[..., ::2])),
    (TypeError, "page_table must be a torch.Tensor", pages, dict(page_table=[[0, 1], [2, 3]])),
    (TypeError, "page_table must be int32", pages, dict(page_table=zeros(2, 3).long())),
    (ValueError, "page_table must be on the same device", pages, dict(page_table=zeros(2, 3, device="meta"))),
    (ValueError, "page_table must have two dimensions", pages, dict(page_table=one(0, 1))),
    (ValueError, "page_table must have .* contiguous", pages, dict(page_table=zeros(3, 2).mT)),
    (ValueError, "page_table must have 2 rows", pages, dict(page_table=zeros(3, 3))),
    (ValueError, "page_table .* sample 1, got 5", pages, dict(page_table=one(0, 1, 2, 3, 5, 0).view(2, 3))),
    (ValueError, "page_table .* sample 0, got -1", pages, dict(page_table=one(0, 1, -1, 3, 4, 0).view(2, 3))),
    (ValueError, "page_table .* sample 0, got 5", pages,
     dict(page_table=one(0, 1, 2, 3, 5, 0).view(2, 3), cache_batch_idx=one(1, 0))),
    (ValueError, "page_table must have rows for cache_batch_idx", pages,
     dict(page_table=zeros(0, 3), cache_batch_idx=one(0, 1))),
    (ValueError, "seqused_k must be in 0..0 for sample 0", pages,
     dict(k_cache=randn(0, 2, 4, 16), v_cache=randn(0, 2, 4, 16))),
    (TypeError, "cache_batch_idx must be int32", pages, dict(cache_batch_idx=zeros(2).long())),
    (ValueError, "cache_batch_idx must have shape", dense, dict(cache_batch_idx=one(0, 1, 1))),
    (ValueError, "cache_batch_idx must be in 0..1 for sample 1", dense, dict(cache_batch_idx=one(0, 2))),
    (ValueError, "cache_batch_idx must be in 0..1 for sample 1", pages, dict(cache_batch_idx=one(0, 2))),
    (ValueError, "cache_batch_idx must be in 0..1 for sample 0", pages, dict(cache_batch_idx=one(-1, 0))),
    (ValueError, "as many sequences as there are samples, 2", dense,
     dict(k_cache=randn(3, 2, 12, 16), v_cache=randn(3, 2, 12, 16))),
    (ValueError, "rows and keys together: q is", pages,
     {name: randn(5, 2, 1, 16).expand(-1, -1, 2**30, -1) for name in ("k_cache", "v_cache")}),
    (TypeError, "seqused_k must be a torch.Tensor, got int", pages, dict(seqused_k=9)),
    (TypeError, "seqused_k must be int32", pages, dict(seqused_k=torch.tensor([9, 5]))),
    (ValueError, "seqused_k must have shape", pages, dict(seqused_k=one(9, 5, 1))),
    (ValueError, "seqused_k must be contiguous", pages, dict(seqused_k=one(9, 0, 5, 0)[::2])),
    (ValueError, "seqused_k must be in 0..12 for sample 0", pages, dict(seqused_k=one(13, 5))),
    (ValueError, "seqused_k must be in 0..12 for sample 1", dense, dict(seqused_k=one(3, -1))),
    (TypeError, "leftpad_k must be int32", pages, dict(leftpad_k=torch.zeros(2))),
    (ValueError, "leftpad_k must have shape", pages, dict(leftpad_k=one(0))),
    (ValueError, "leftpad_k must be in 0..5, the length of sample 1", pages, dict(leftpad_k=one(0, 6))),
    (ValueError, "leftpad_k must be in 0..12", dense, dict(seqused_k=None, leftpad_k=one(-1, 0))),
    (ValueError, "seqused_q must be in 0..3 for sample 0", pages, dict(seqused_q=one(4, 0))),
    (ValueError, "with cu_seqlens_q, q must be packed", packed, dict(q=randn(2, 4, 3, 16))),
    (ValueError, "cu_seqlens_q must have one shape", packed, dict(cu_seqlens_q=one(0))),
    (ValueError, "cu_seqlens_q must ascend", packed, dict(cu_seqlens_q=one(0, 5, 4))),
    (ValueError, "cu_seqlens_q must start at 0 and stay within 0..6", packed, dict(cu_seqlens_q=one(0, 2, 7))),
    (TypeError, "max_seqlen_q must be None, an int or a tensor", packed, dict(max_seqlen_q=2.5)),
    (TypeError, "num_splits must be an int", pages, dict(num_splits=None)),
    (TypeError, "num_splits must be an int", pages, dict(num_splits=True)),
    (ValueError, "num_splits must be in 0..256", pages, dict(num_splits=257)),
    (ValueError, "num_splits must be in 0..256", pages, dict(num_splits=-1)),
    (TypeError, "causal must be a bool", pages, dict(causal=1)),
    (ValueError, "sm_scale must be finite", pages, dict(sm_scale=math.inf)),
    (TypeError, "window_size must be a pair of ints", pages, dict(window_size=3)),
    (ValueError, "window_size must be at least -1", pages, dict(window_size=(-2, 0))),
    (ValueError, "softcap must be at least 0", pages, dict(softcap=-1.0)),
    (ValueError, "sinks must have shape", pages, dict(sinks=torch.ones(2))),
    (ValueError, "alibi_slopes must have shape", pages, dict(alibi_slopes=torch.ones(3))),
    (ValueError, "unknown backend 'other'", pages, dict(backend="other")),
]


@cpu
@pytest.mark.parametrize("error, match, arguments, change", BAD)
def test_bad_input(error, match, arguments, change):
    attention_with_kvcache(**arguments())
    with pytest.raises(error, match=match):
        attention_with_kvcache(**{**arguments(), **change})


# append_to_kvcache, whose caches are checked by the same functions, and new keys of attention_with_kvcache.

def new_of_pages():
    return dict(k=randn(2, 2, 3, 32), v=randn(2, 2, 3, 32), k_cache=randn(5, 2, 4, 32), v_cache=randn(5, 2, 4, 32),
                seqused_k=one(9, 5), page_table=one(0, 1, 2, 3, 4, 0).view(2, 3), rotary_cos=randn(12, 8),
                rotary_sin=randn(12, 8))


def new_of_dense():
    return dict(new_of_pages(), k_cache=randn(2, 2, 12, 32), v_cache=randn(2, 2, 12, 32), page_table=None)


def new_of_packed():
    return dict(new_of_pages(), k=randn(1, 2, 6, 32), v=randn(1, 2, 6, 32), cu_seqlens_k_new=one(0, 2, 6))


TABLE = torch.randn(12, 8)
BAD_NEW = [
    (TypeError, "k must be a torch.Tensor, got list", new_of_pages, dict(k=[1.0])),
    (TypeError, "k_cache must be a torch.Tensor", new_of_pages, dict(k_cache=None)),
    (TypeError, "v must be a dense tensor", new_of_pages, dict(v=randn(5, 4).to_sparse())),
    (TypeError, "k is torch.int32", new_of_pages, dict(k=torch.ones(2, 2, 3, 32).int())),
    (TypeError, "dtypes must match: k is torch.float16", new_of_pages, dict(k=randn(2, 2, 3, 32).half())),
    (ValueError, "k is on cpu, v on meta", new_of_pages, dict(v=randn(2, 2, 3, 32, device="meta"))),
    (ValueError, "4D tensors: k is", new_of_pages, dict(k=randn(2, 3, 32))),
    (ValueError, "k and v must have the same shape", new_of_pages, dict(k=randn(2, 2, 2, 32))),
    (ValueError, "the heads", new_of_pages, {name: randn(2, 4, 3, 32) for name in ("k", "v")}),
    (ValueError, "head_dims of the caches", new_of_pages, dict(v=randn(2, 2, 3, 16))),
    (ValueError, "k and k_cache must have the same head_dim", new_of_pages, dict(k=randn(2, 2, 3, 16))),
    (ValueError, "k_cache must be contiguous in its last", new_of_pages, dict(k_cache=randn(5, 2, 32, 4).mT)),
    (ValueError, "v_cache cannot be written", new_of_pages, dict(v_cache=randn(5, 2, 1, 32).expand(-1, -1, 4, -1))),
    (ValueError, "seqused_k must be given with new keys", new_of_pages, dict(seqused_k=None)),
    (ValueError, "seqused_k must be in 0..12 for sample 1", new_of_pages, dict(seqused_k=one(9, -1))),
    (ValueError, "no room .* sample 0: seqused_k is 10, 3 are new", new_of_pages, dict(seqused_k=one(10, 5))),
    (ValueError, "no room .* sample 1: seqused_k is 12, 3 are new", new_of_dense, dict(seqused_k=one(9, 12))),
    (ValueError, "no room .* sample 1: seqused_k is 9, 4 are new", new_of_packed, dict(seqused_k=one(9, 9))),
    (ValueError, "page_table .*sample 1, got 5", new_of_pages,
     dict(page_table=one(0, 1, 2, 3, 5, 0).view(2, 3), seqused_k=one(9, 4))),
    (ValueError, "page_table .*sample 0, got -1", new_of_pages,
     dict(page_table=one(0, 1, -1, 3, 4, 0).view(2, 3))),
    (ValueError, "page_table .*sample 0, got 5", new_of_pages,
     dict(page_table=one(0, 1, 2, 3, 4, 5).view(2, 3), cache_batch_idx=one(1, 0))),
    (ValueError, "cache_batch_idx .*sample 0, got 2", new_of_pages, dict(cache_batch_idx=one(2, 0))),
    (ValueError, "cache_batch_idx .*sample 1, got 2", new_of_dense, dict(cache_batch_idx=one(0, 2))),
    (TypeError, "cu_seqlens_k_new must be int32", new_of_packed, dict(cu_seqlens_k_new=torch.tensor([0, 2, 6]))),
    (ValueError, "with cu_seqlens_k_new, k must be packed", new_of_pages, dict(cu_seqlens_k_new=one(0, 1, 3))),
    (ValueError, "cu_seqlens_k_new must ascend", new_of_packed, dict(cu_seqlens_k_new=one(0, 5, 4))),
    (ValueError, "rotary_cos and rotary_sin must both be given", new_of_pages, dict(rotary_sin=None)),
    (ValueError, "rotary_seqlens needs rotary_cos", new_of_pages,
     dict(rotary_cos=None, rotary_sin=None, rotary_seqlens=one(0, 0))),
    (TypeError, "rotary_cos must be a torch.Tensor", new_of_pages, dict(rotary_cos=1.0)),
    (TypeError, "rotary_cos must have the dtype of k", new_of_pages, dict(rotary_cos=TABLE.double())),
    (ValueError, "rotary_sin must be on the same device", new_of_pages, dict(rotary_sin=TABLE.to("meta"))),
    (ValueError, r"rotary_cos must be \(S_ro", new_of_pages, dict(rotary_cos=TABLE[None])),
    (ValueError, r"rotary_sin must be \(S_ro", new_of_pages, dict(rotary_sin=TABLE.mT)),
    (ValueError, "contiguous and not empty", new_of_pages, dict(rotary_cos=TABLE[:0], rotary_sin=TABLE[:0])),
    (ValueError, r"got \(12, 8\) and \(11, 8\)", new_of_pages, dict(rotary_sin=TABLE[:11])),
    (ValueError, "rotary_dim must be a multiple of 16", new_of_pages,
     {name: randn(12, 4) for name in ("rotary_cos", "rotary_sin")}),
    (ValueError, "rotary_dim must .* at most the head_dim 32", new_of_pages,
     {name: randn(12, 24) for name in ("rotary_cos", "rotary_sin")}),
    (ValueError, "rotary_cos has 11 positions, and sample 0 .* seqused_k 9", new_of_pages,
     dict(rotary_cos=TABLE[:11], rotary_sin=TABLE[:11])),
    (ValueError, "sample 1 needs those from rotary_seqlens 10 on", new_of_pages, dict(rotary_seqlens=one(0, 10))),
    (ValueError, "sample 0 needs those from rotary_seqlens -1 on", new_of_pages, dict(rotary_seqlens=one(-1, 0))),
    (TypeError, "rotary_seqlens must be int32", new_of_pages, dict(rotary_seqlens=torch.tensor([0, 0]))),
    (ValueError, "rotary_seqlens must have shape", new_of_pages, dict(rotary_seqlens=one(0))),
    (TypeError, "rotary_interleaved must be a bool", new_of_pages, dict(rotary_interleaved=1)),
    (ValueError, "unknown backend 'other'", new_of_pages, dict(backend="other")),
]


@cpu
@pytest.mark.parametrize("error, match, arguments, change", BAD_NEW)
def test_bad_input_of_append(error, match, arguments, change):
    append_to_kvcache(**arguments())
    check_error(append_to_kvcache, error, match, {**arguments(), **change})
    if "k_cache must be a torch" not in match and "unknown" not in match:  # the same from a call of attention
        given = dict(q=randn(2, 4, 3, 32), **arguments(), causal=True)
        attention_with_kvcache(**given)
        check_error(attention_with_kvcache, error, match, {**given, **change})


NO_NEW = dict(k=None, v=None)
NO_ROTATION = dict(rotary_cos=None, rotary_sin=None)


@cpu
@pytest.mark.parametrize("error, match, change", [
    (ValueError, "k and v must both be given", dict(v=None)),
    (ValueError, "k and v must both be given", dict(k=None)),
    (ValueError, "rotary_cos needs new keys", NO_NEW),
    (ValueError, "rotary_sin needs new keys", dict(NO_NEW, rotary_cos=None)),
    (ValueError, "rotary_seqlens needs new keys", dict(NO_NEW, **NO_ROTATION, rotary_seqlens=one(0, 0))),
    (ValueError, "cu_seqlens_k_new needs new keys", dict(NO_NEW, **NO_ROTATION, cu_seqlens_k_new=one(0, 3, 6))),
    (ValueError, "k must have as many samples as q, got 3", {name: randn(3, 2, 3, 32) for name in ("k", "v")}),
    (ValueError, "leftpad_k must be in 0..9, the length of sample 0", dict(leftpad_k=one(10, 0))),
    (ValueError, "rotary_cos has 12 positions, .* as its 4 rows", dict(q=randn(2, 4, 4, 32))),
    (TypeError, "causal must be a bool", dict(causal=1)),
    (ValueError, "sm_scale must be finite", dict(sm_scale=math.inf)),
    (ValueError, "softcap must be at least 0", dict(softcap=-1.0)),
    (ValueError, "sinks must have shape", dict(sinks=torch.ones(2))),
    (ValueError, "alibi_slopes must have shape", dict(alibi_slopes=torch.ones(3))),
])
def test_bad_input_with_new_keys(error, match, change):
    given = dict(q=randn(2, 4, 3, 32), **new_of_pages(), causal=True)
    attention_with_kvcache(**given)
    check_error(attention_with_kvcache, error, match, {**given, **change})


def all_requiring():
    return dict(q=randn(2, 4, 3, 32), sinks=torch.ones(4), **new_of_pages())


@pytest.mark.parametrize("name", ["q", "sinks", "k", "v", "k_cache", "v_cache", "rotary_cos", "rotary_sin"])
def test_gradients_are_refused(name, backend):
    given = {key: on_device(x.to(BACKENDS[backend]) if x.is_floating_point() else x)
             for key, x in all_requiring().items()}
    of_append = {key: x for key, x in given.items() if key not in ("q", "sinks")}
    calls = [("attention_with_kvcache", attention_with_kvcache, given)]
    if name in of_append:
        calls.append(("append_to_kvcache", append_to_kvcache, of_append))
    for function, call, arguments in calls:
        arguments = dict(arguments, backend=backend)
        x = arguments[name]
        arguments[name] = x.detach().requires_grad_()
        check_error(call, NotImplementedError, f"{function} has no backward pass yet, but {name} requires", arguments)
        with torch.no_grad():
            assert not call(**arguments).requires_grad
        with torch.autograd.forward_ad.dual_level():
            arguments[name] = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            with pytest.raises(NotImplementedError, match=f"no forward-mode derivative, but {name} has a tangent"):
                call(**arguments)


@cpu
def test_errors_while_tracing():
    """Dynamo fails in its own words, but with ours among them."""
    given = new_of_pages()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="ValueError.*page_table must have 2 rows"):
        torch.compile(append_to_kvcache, fullgraph=True, backend="eager")(
            **{**given, "page_table": given["page_table"][:1]})


# By flash-attn's names.

def tables():
    return {"q": randn(9, 4, 32), "k": randn(10, 16, 2, 32), "v": randn(10, 16, 2, 32),
            "cu_seqlens_q": one(0, 1, 6, 9), "seqused_k": one(9, 5, 33), "block_table": torch.arange(
                9, dtype=torch.int32).view(3, 3)}


@cpu
@pytest.mark.parametrize("error, match, change", [
    (ValueError, r"flash_attn_varlen_func: q must be \(T, H, D\)", dict(q=randn(1, 9, 4, 32))),
    (ValueError, r"flash_attn_varlen_func: k must be \(num_pages, page_size, Hk, D\)", dict(k=randn(9, 2, 32))),
    (ValueError, "cu_seqlens_q must be given", dict(cu_seqlens_q=None)),
    (ValueError, "cu_seqlens_k and seqused_k cannot both be given", dict(cu_seqlens_k=one(0, 9, 14, 47))),
    (TypeError, "cu_seqlens_k must be int32", dict(seqused_k=None, cu_seqlens_k=torch.tensor([0, 9, 14, 47]))),
    (ValueError, r"entries of cu_seqlens_k must have shape \(3,\)", dict(seqused_k=None, cu_seqlens_k=one(0, 9, 14))),
    (ValueError, "entries of cu_seqlens_k must be in 0..48 for sample 1",
     dict(seqused_k=None, cu_seqlens_k=one(0, 9, 8, 12))),
    (ValueError, "seqused_k without cu_seqlens_k needs a page table: give block_table", dict(block_table=None)),
    (NotImplementedError, "flash_attn_varlen_func: dropout_p is not supported", dict(dropout_p=0.1)),
    (TypeError, "dropout_p must be a number", dict(dropout_p=False)),
    (ValueError, "block_table must have 3 rows", dict(block_table=zeros(2, 3))),
    (ValueError, "softmax_scale must be finite", dict(softmax_scale=math.nan)),
    (TypeError, "q is torch.float64, k is torch.float32, v is torch.float32", dict(q=randn(9, 4, 32).double())),
    (ValueError, r"out must be torch.float32 of shape \(9, 4, 32\)", dict(out=torch.empty(9, 4, 32).double())),
    (NotImplementedError, "flash_attn_varlen_func has no backward pass yet, but k requires grad",
     dict(k=randn(10, 16, 2, 32, requires_grad=True))),
])
def test_varlen_func_bad_input(error, match, change):
    flash_attn_varlen_func(**tables())
    check_error(flash_attn_varlen_func, error, match, {**tables(), **change})


NEW = dict(k=randn(3, 2, 2, 16), v=randn(3, 2, 2, 16))
NEW_PACKED = dict(k=randn(6, 2, 16), v=randn(6, 2, 16), cu_seqlens_k_new=one(0, 1, 4, 6))
TWO_PAGES = one(*range(3), *range(3)).view(3, 2)


@cpu
@pytest.mark.parametrize("error, match, change", [
    (ValueError, "cache_seqlens must be in 0..20, got 21", dict(cache_seqlens=21)),
    (ValueError, "cache_seqlens must be in 0..20, got -1", dict(cache_seqlens=-1)),
    (ValueError, "cache_seqlens must be in 0..20 for sample 2", dict(cache_seqlens=one(3, 3, 21))),
    (ValueError, "cache_seqlens must be in 0..40, got 41", dict(cache_seqlens=41, page_table=TWO_PAGES)),
    (TypeError, "cache_seqlens must be a torch.Tensor, got float", dict(cache_seqlens=3.0)),
    (TypeError, "cache_seqlens must be a torch.Tensor, got bool", dict(cache_seqlens=True)),
    (ValueError, "cache_leftpad must be in 0..9, the length of sample 0", dict(cache_leftpad=one(10, 0, 0))),
    (ValueError, r"flash_attn_with_kvcache: k_cache must be \(B, S, Hk, D\)", dict(k_cache=randn(20, 2, 16))),
    (ValueError, r"flash_attn_with_kvcache: q must be \(T, H, D\)", dict(cu_seqlens_q=one(0, 2, 4, 6))),
    (TypeError, "q must be a torch.Tensor, got NoneType", dict(q=None)),
    (TypeError, "block_table must be int32", dict(block_table=torch.zeros(3, 2))),
    (TypeError, "cu_seqlens_q must be a torch.Tensor", dict(q=randn(6, 4, 16), cu_seqlens_q=[0, 2, 4, 6])),
    (ValueError, "softmax_scale must be finite", dict(softmax_scale=math.nan)),
    (NotImplementedError, "flash_attn_with_kvcache has no backward pass yet, but k_cache requires grad",
     dict(k_cache=randn(3, 20, 2, 16, requires_grad=True))),
    (ValueError, "out cannot be given where gradients are wanted",
     dict(q=randn(3, 2, 4, 16, requires_grad=True), out=torch.empty(3, 2, 4, 16))),
    (ValueError, "no room for the new keys: cache_seqlens is 19, 2 are new", dict(NEW, cache_seqlens=19)),
    (ValueError, "no room .* cache_seqlens is 39, 2 are new", dict(NEW, cache_seqlens=39, page_table=TWO_PAGES)),
    (ValueError, "no room .* sample 2: cache_seqlens is 19", dict(NEW, cache_seqlens=one(3, 3, 19))),
    (ValueError, "no room .* sample 1: cache_seqlens is 18, 3 are new", dict(NEW_PACKED, cache_seqlens=18)),
    (ValueError, "cache_seqlens must be given with new keys", dict(NEW, cache_seqlens=None)),
    (ValueError, r"flash_attn_with_kvcache: k must be \(B, Sn, Hk, D\)", dict(NEW, k=randn(6, 2, 16))),
    (ValueError, r"flash_attn_with_kvcache: v must be \(T, Hk, D\)", dict(NEW_PACKED, v=NEW["v"])),
    (ValueError, "k and v must both be given", dict(NEW, v=None)),
    (ValueError, "rotary_cos needs new keys", dict(rotary_cos=TABLE, rotary_sin=TABLE)),
    (NotImplementedError, "flash_attn_with_kvcache has no backward pass yet, but k requires grad",
     dict(NEW, k=randn(3, 2, 2, 16, requires_grad=True))),
    (ValueError, "out must be torch.float32 of shape", dict(NEW, out=torch.empty(3, 2, 4, 15))),
])
def test_with_kvcache_bad_input(error, match, change):
    given = dict(q=randn(3, 2, 4, 16), k_cache=randn(3, 20, 2, 16), v_cache=randn(3, 20, 2, 16), cache_seqlens=9)
    flash_attn_with_kvcache(**given, **NEW)
    flash_attn_with_kvcache(**given)
    check_error(flash_attn_with_kvcache, error, match, {**given, **change})


@cpu
def test_get_scheduler_metadata_bad_input():
    with pytest.raises(TypeError, match="cache_seqlens must be a torch.Tensor, got int"):
        minimal_attn.get_scheduler_metadata(1, 1, 9, 4, 2, 16, 9)


def slots():
    return dict(key=randn(5, 2, 16), value=randn(5, 2, 8), key_cache=randn(3, 4, 2, 16), value_cache=randn(3, 4, 2, 8),
                slot_mapping=torch.tensor([0, 3, -1, 11, 5]))


@cpu
@pytest.mark.parametrize("error, match, change", [
    (TypeError, "key must be a torch.Tensor, got list", dict(key=[])),
    (TypeError, "key is torch.int32", dict(key=torch.ones(5, 2, 16).int())),
    (TypeError, "key is torch.float32, value is torch.float16", dict(value=randn(5, 2, 8).half())),
    (ValueError, "same device: key is on cpu", dict(value=randn(5, 2, 8, device="meta"))),
    (ValueError, r"key and value \(T, Hk, D\)", dict(key=randn(5, 1, 2, 16))),
    (ValueError, "the heads and head_dims of the caches", dict(key=randn(5, 2, 8))),
    (ValueError, "the heads and head_dims of the caches", dict(value=randn(4, 2, 8))),
    (ValueError, "the heads and head_dims of the caches", dict(value_cache=randn(3, 5, 2, 8))),
    (ValueError, "head_dim 300 of value", dict(value=randn(5, 2, 300), value_cache=randn(3, 4, 2, 300))),
    (ValueError, "value_cache must be contiguous in its last", dict(value_cache=randn(3, 4, 8, 2).mT)),
    (ValueError, "key_cache cannot be written", dict(key_cache=randn(1, 4, 2, 16).expand(3, -1, -1, -1))),
    (TypeError, "slot_mapping must be a torch.Tensor", dict(slot_mapping=[0, 1])),
    (TypeError, "slot_mapping must be int64", dict(slot_mapping=one(0, 1, 2, 3, 4))),
    (ValueError, "slot_mapping must be on the same device",
     dict(slot_mapping=zeros(5, dtype=torch.int64, device="meta"))),
    (ValueError, "slot_mapping must be contiguous, with one value a row", dict(slot_mapping=torch.arange(6))),
    (ValueError, "slot_mapping must be contiguous", dict(slot_mapping=torch.arange(10)[::2])),
    (ValueError, "slot_mapping must be below 12", dict(slot_mapping=torch.tensor([0, 12]))),
    (NotImplementedError, "kv_cache_dtype 'fp8' is not supported", dict(kv_cache_dtype="fp8")),
    (NotImplementedError, "reshape_and_cache has no backward pass yet, but value requires",
     dict(value=randn(5, 2, 8, requires_grad=True))),
    (ValueError, "unknown backend 'other'", dict(backend="other")),
])
def test_bad_slots(error, match, change):
    reshape_and_cache(**slots())
    check_error(reshape_and_cache, error, match, {**slots(), **change})


PARTIAL, PARTIAL_LSE = torch.randn(3, 2, 5, 4, 16), torch.randn(3, 2, 5, 4)


@cpu
@pytest.mark.parametrize("error, match, change", [
    (TypeError, "out_partial must be a torch.Tensor, got list", dict(out_partial=[])),
    (TypeError, "lse_partial must be a torch.Tensor", dict(lse_partial=None)),
    (TypeError, "out_partial is torch.int32", dict(out_partial=PARTIAL.int())),
    (TypeError, "lse_partial must be torch.float32", dict(lse_partial=PARTIAL_LSE.half())),
    (TypeError, "out_dtype must be None or one of", dict(out_dtype=torch.int8)),
    (ValueError, r"out_partial must be \(num_splits, B, S, H, D\)", dict(out_partial=PARTIAL[0, 0])),
    (ValueError, "with 1 to 256 splits", dict(out_partial=PARTIAL[:0])),
    (ValueError, "with 1 to 256 splits", dict(out_partial=PARTIAL[:1].expand(257, -1, -1, -1, -1))),
    (ValueError, r"lse_partial must have shape \(3, 2, 5, 4\)", dict(lse_partial=PARTIAL_LSE.transpose(2, 3))),
    (TypeError, "out must be a torch.Tensor", dict(out=3)),
    (ValueError, "out must be torch.float32 of shape", dict(out=PARTIAL)),
    (ValueError, "out must be torch.float16 of shape", dict(out=PARTIAL[0].clone(), out_dtype=torch.float16)),
    (NotImplementedError, "flash_attn_combine has no backward pass yet", dict(
        out_partial=PARTIAL.clone().requires_grad_())),
])
def test_combine_bad_input(error, match, change):
    with pytest.raises(error, match=match):
        flash_attn_combine(**{"out_partial": PARTIAL, "lse_partial": PARTIAL_LSE, **change})


# The compiled ops check what the facade has checked: they write or read out of bounds otherwise.

@cpu
@pytest.mark.parametrize("change", [
    dict(q=randn(3, 4, 5, 16)), dict(q=randn(2, 3, 5, 16)), dict(q=randn(2, 4, 5, 8)),
    dict(v=randn(6, 2, 9, 16)), dict(v=randn(6, 2, 8, 257)), dict(k=randn(6, 2, 16, 8).mT),
    dict(page_table=None), dict(page_table=torch.zeros(1, 4, dtype=torch.int32)),
    dict(page_table=torch.zeros(2, 4, dtype=torch.int64)),
    dict(page_table=torch.zeros(2, 8, dtype=torch.int32)[:, ::2]),
    dict(seqused_k=torch.ones(3, dtype=torch.int32)), dict(leftpad_k=torch.ones(2, dtype=torch.int64)),
    dict(seqused_q=torch.ones(4, dtype=torch.int32)[::2]),
    dict(cu_seqlens_q=torch.tensor([0, 2, 5], dtype=torch.int32)),
    dict(sinks=torch.zeros(2)), dict(alibi_slopes=torch.zeros(2)), dict(tree_mask=torch.zeros(2, 4).long()),
    dict(softmax_scale=math.nan), dict(softcap=-1.0), dict(window_left=-2), dict(num_splits=257), dict(max_seqlen_q=-1),
], ids=lambda change: "-".join(f"{name}_{tuple(getattr(x, 'shape', ())) or x}" for name, x in change.items()))
def test_op_refuses_what_would_read_out_of_bounds(change):
    """Without a GPU the compiled op checks its arguments alike, and then says that it needs one."""
    minimal_attn.load()
    k, table = randn(6, 2, 8, 16), torch.arange(6, dtype=torch.int32).view(2, 3)
    given = dict(q=randn(2, 4, 5, 16), k=k, v=k, cu_seqlens_q=None, seqused_q=None, seqused_k=None,
                 page_table=table, cache_batch_idx=None, leftpad_k=None, tree_mask=None, sinks=None, alibi_slopes=None,
                 softmax_scale=0.25, softcap=0.0, window_left=-1, window_right=-1, num_splits=0, max_seqlen_q=0)
    with pytest.raises(NotImplementedError, match="flash_decode needs tensors on a GPU"):
        torch.ops.minimal_attn.flash_decode(*given.values())
    with pytest.raises(ValueError):
        torch.ops.minimal_attn.flash_decode(*{**given, **change}.values())


@cpu
@pytest.mark.parametrize("change", [
    dict(k=randn(2, 3, 5, 32)), dict(v=randn(2, 2, 4, 32)), dict(k=randn(2, 2, 32, 5).mT),
    dict(k_cache=randn(6, 1, 8, 32), v_cache=randn(6, 1, 8, 32)), dict(v_cache=randn(6, 2, 7, 32)),
    dict(v_cache=randn(6, 2, 8, 16)),
    dict(seqused_k=None), dict(seqused_k=torch.ones(3, dtype=torch.int32)), dict(seqused_k=torch.ones(2).long()),
    dict(page_table=None), dict(page_table=torch.zeros(1, 3, dtype=torch.int32)),
    dict(page_table=torch.zeros(2, 6, dtype=torch.int32)[:, ::2]), dict(batch_idx=torch.zeros(3, dtype=torch.int32)),
    dict(cu_seqlens_k_new=torch.tensor([0, 2, 5], dtype=torch.int32)), dict(slot_mapping=torch.arange(5)),
    dict(seqused_k=None, page_table=None, slot_mapping=torch.arange(4)), dict(q=randn(1, 4, 5, 32)),
    dict(q=randn(2, 4, 5, 16)), dict(rotary_cos=torch.ones(9, 8)),
    dict(rotary_cos=torch.ones(9, 4), rotary_sin=torch.ones(9, 4)),
    dict(rotary_cos=torch.ones(9, 24), rotary_sin=torch.ones(9, 24)),
    dict(rotary_cos=torch.ones(9, 8), rotary_sin=torch.ones(8, 8)),
    dict(rotary_seqlens=torch.ones(1, dtype=torch.int32)),
], ids=lambda change: "-".join(f"{name}_{tuple(getattr(x, 'shape', ()))}" for name, x in change.items()))
def test_op_refuses_what_would_write_out_of_bounds(change):
    minimal_attn.load()
    k, cache = randn(2, 2, 5, 32), randn(6, 2, 8, 32)
    given = dict(k=k, v=k, k_cache=cache, v_cache=cache.clone(), **Append(
        torch.ones(2, dtype=torch.int32), torch.arange(6, dtype=torch.int32).view(2, 3))._asdict())
    torch.ops.minimal_attn.append_kvcache(*given.values())
    before = cache.clone()
    with pytest.raises(ValueError):
        torch.ops.minimal_attn.append_kvcache(*{**given, **change}.values())
    assert cache.equal(before)
