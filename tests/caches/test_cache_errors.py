"""Bad input of calls with caches: one error for each, which names the argument, and nothing is written before."""

import math

import pytest
import torch

import minimal_attn
from cached_calls import BACKENDS, backend, ints, on_device  # noqa: F401
from minimal_attn import (append_to_kvcache, attention_with_kvcache, flash_attn_combine, flash_attn_varlen_func,
                          flash_attn_with_kvcache, reshape_and_cache)
from minimal_attn.options import Append

cpu = pytest.mark.cpu


def one(*values):
    return ints(*values, device="cpu")


def randn(*shape, **options):
    return torch.randn(shape, **options)


def zeros(*shape, dtype=torch.int32, **options):
    return torch.zeros(shape, dtype=dtype, **options)


def check_error(call, error, match, given, change={}):
    """The call raises this error, and writes nothing into the caches that are given."""
    before = {name: x.clone() for name, x in given.items() if "cache" in name and isinstance(x, torch.Tensor)}
    with pytest.raises(error, match=match):
        call(**{**given, **change})
    for name, x in before.items():
        assert x.equal(given[name])


# Arguments that each function takes.

TABLE = torch.randn(12, 8)
PARTIAL, PARTIAL_LSE = torch.randn(3, 2, 5, 4, 16), torch.randn(3, 2, 5, 4)
TREE = torch.ones(5, 5).tril().bool()
PAGES = dict(q=randn(2, 4, 3, 16), k_cache=randn(5, 2, 4, 16), v_cache=randn(5, 2, 4, 16), seqused_k=one(9, 5),
             page_table=one(0, 1, 2, 3, 4, 0).view(2, 3))
APPEND = dict(k=randn(2, 2, 3, 32), v=randn(2, 2, 3, 32), k_cache=randn(5, 2, 4, 32), v_cache=randn(5, 2, 4, 32),
              seqused_k=one(9, 5), page_table=one(0, 1, 2, 3, 4, 0).view(2, 3), rotary_cos=TABLE, rotary_sin=TABLE)
GIVEN = {
    "pages": PAGES,
    "dense": dict(PAGES, k_cache=randn(2, 2, 12, 16), v_cache=randn(2, 2, 12, 16), page_table=None),
    "packed": dict(PAGES, q=randn(1, 4, 6, 16), cu_seqlens_q=one(0, 2, 6)),
    "new_of_pages": APPEND,
    "new_of_dense": dict(APPEND, k_cache=randn(2, 2, 12, 32), v_cache=randn(2, 2, 12, 32), page_table=None),
    "new_of_packed": dict(APPEND, k=randn(1, 2, 6, 32), v=randn(1, 2, 6, 32), cu_seqlens_k_new=one(0, 2, 6)),
    "tables": dict(q=randn(9, 4, 32), k=randn(10, 16, 2, 32), v=randn(10, 16, 2, 32), cu_seqlens_q=one(0, 1, 6, 9),
                   seqused_k=one(9, 5, 33), block_table=one(*range(9)).view(3, 3)),
    "by_flash_attn": dict(q=randn(3, 2, 4, 16), k_cache=randn(3, 20, 2, 16), v_cache=randn(3, 20, 2, 16),
                          cache_seqlens=9),
    "slots": dict(key=randn(5, 2, 16), value=randn(5, 2, 8), key_cache=randn(3, 4, 2, 16),
                  value_cache=randn(3, 4, 2, 8), slot_mapping=torch.tensor([0, 3, -1, 11, 5])),
    "partial": dict(out_partial=PARTIAL, lse_partial=PARTIAL_LSE),
    "tree": dict(q=randn(2, 4, 5, 16), k_cache=randn(2, 2, 20, 16), v_cache=randn(2, 2, 20, 16), seqused_k=one(20, 9),
                 tree_mask=TREE),
    "tree_alone": dict(tree_mask=TREE),
    "metadata": dict(batch_size=1, max_seqlen_q=1, max_seqlen_k=9, num_heads_q=4, num_heads_kv=2, headdim=16,
                     cache_seqlens=one(9)),
}
GIVEN |= {f"{name}_in_attention": dict(GIVEN[name], q=randn(2, 4, 3, 32), causal=True)
          for name in ("new_of_pages", "new_of_dense", "new_of_packed")}
NEW = dict(k=randn(3, 2, 2, 16), v=randn(3, 2, 2, 16))
NEW_PACKED = dict(k=randn(6, 2, 16), v=randn(6, 2, 16), cu_seqlens_k_new=one(0, 1, 4, 6))
TWO_PAGES = one(*range(3), *range(3)).view(3, 2)
NO_NEW = dict(k=None, v=None)
NO_ROTATION = dict(rotary_cos=None, rotary_sin=None)

# (error, what changes, what the error says: the name of the first argument that changes, if nothing else stands here).
OF_PAGES = [
    (TypeError, dict(q=[1.0]), "q must be a torch.Tensor, got list"),
    (TypeError, dict(v_cache=randn(5, 4).to_sparse()), "v_cache must be a dense tensor"),
    (TypeError, dict(q=torch.ones(2, 4, 3, 16).to(torch.float8_e4m3fn)), "q is torch.float8_e4m3fn"),
    (TypeError, dict(k_cache=randn(5, 2, 4, 16).half()), "q is torch.float32, k_cache is torch.float16"),
    (ValueError, dict(k_cache=randn(5, 2, 4, 16, device="meta"))),
    (ValueError, dict(q=randn(2, 4, 16)), "4D tensors: q is"),
    (ValueError, dict(q=randn(2, 4, 3, 300)), "q and k_cache must have the same head_dim"),
    (ValueError, dict(v_cache=randn(5, 2, 4, 300)), "head_dim 300"),
    (ValueError, dict(q=randn(2, 4, 3, 8)), "q and k_cache must have the same head_dim"),
    (ValueError, dict(v_cache=randn(5, 2, 3, 16))),
    (ValueError, dict(q=randn(2, 3, 3, 16)), "the number of query heads"),
    (ValueError, dict(k_cache=randn(5, 2, 16, 4).mT)),
    (TypeError, dict(page_table=zeros(2, 3).long()), "page_table must be int32"),
    (ValueError, dict(page_table=one(0, 1))),
    (ValueError, dict(page_table=zeros(3, 2).mT)),
    (ValueError, dict(page_table=zeros(3, 3))),
    (ValueError, dict(page_table=one(0, 1, 2, 3, 5, 0).view(2, 3)), "page_table .* sample 1, got 5"),
    (ValueError, dict(page_table=one(0, 1, -1, 3, 4, 0).view(2, 3)), "page_table .* sample 0, got -1"),
    (ValueError, dict(page_table=one(0, 1, 2, 3, 5, 0).view(2, 3), cache_batch_idx=one(1, 0)),
     "page_table .* sample 0, got 5"),
    (ValueError, dict(page_table=zeros(0, 3), cache_batch_idx=one(0, 1)),
     "page_table must have rows for cache_batch_idx"),
    (ValueError, dict(k_cache=randn(0, 2, 4, 16), v_cache=randn(0, 2, 4, 16)),
     "seqused_k must be in 0..0 for sample 0"),
    (ValueError, dict(cache_batch_idx=one(0, 2)), "cache_batch_idx must be in 0..1 for sample 1"),
    (ValueError, dict(cache_batch_idx=one(-1, 0)), "cache_batch_idx must be in 0..1 for sample 0"),
    (ValueError, {name: randn(5, 2, 1, 16).expand(-1, -1, 2**30, -1) for name in ("k_cache", "v_cache")},
     "rows and keys together: q is"),
    (TypeError, dict(seqused_k=9), "seqused_k must be a torch.Tensor, got int"),
    (TypeError, dict(seqused_k=torch.tensor([9, 5])), "seqused_k must be int32"),
    (ValueError, dict(seqused_k=one(9, 5, 1))),
    (ValueError, dict(seqused_k=one(13, 5)), "seqused_k must be in 0..12 for sample 0"),
    (TypeError, dict(leftpad_k=torch.zeros(2)), "leftpad_k must be int32"),
    (ValueError, dict(leftpad_k=one(0))),
    (ValueError, dict(leftpad_k=one(0, 6))),
    (ValueError, dict(seqused_q=one(4, 0)), "seqused_q must be in 0..3 for sample 0"),
    (TypeError, dict(num_splits=True)),
    (ValueError, dict(num_splits=257), "num_splits must be in 0..256"),
    (ValueError, dict(num_splits=-1), "num_splits must be in 0..256"),
    (TypeError, dict(causal=1)),
    (ValueError, dict(sm_scale=math.inf)),
    (TypeError, dict(window_size=3)),
    (ValueError, dict(softcap=-1.0)),
    (ValueError, dict(sinks=torch.ones(2))),
    (ValueError, dict(alibi_slopes=torch.ones(3))),
    (ValueError, dict(backend="other"), "unknown backend 'other'"),
]
OF_DENSE = [
    (ValueError, dict(cache_batch_idx=one(0, 1, 1))),
    (ValueError, dict(cache_batch_idx=one(0, 2)), "cache_batch_idx must be in 0..1 for sample 1"),
    (ValueError, dict(k_cache=randn(3, 2, 12, 16), v_cache=randn(3, 2, 12, 16)),
     "as many sequences as there are samples, 2"),
    (ValueError, dict(seqused_k=one(3, -1)), "seqused_k must be in 0..12 for sample 1"),
    (ValueError, dict(seqused_k=None, leftpad_k=one(-1, 0)), "leftpad_k must be in 0..12"),
]
OF_PACKED = [
    (ValueError, dict(q=randn(2, 4, 3, 16)), "with cu_seqlens_q, q must be packed"),
    (ValueError, dict(cu_seqlens_q=one(0))),
    (ValueError, dict(cu_seqlens_q=one(0, 5, 4))),
    (ValueError, dict(cu_seqlens_q=one(0, 2, 7))),
    (TypeError, dict(max_seqlen_q=2.5)),
]
NEW_OF_PAGES = [
    (TypeError, dict(v=randn(5, 4).to_sparse()), "v must be a dense tensor"),
    (TypeError, dict(k=randn(2, 2, 3, 32).half()), "dtypes must match: k is torch.float16"),
    (ValueError, dict(v=randn(2, 2, 3, 32, device="meta"))),
    (ValueError, dict(k=randn(2, 3, 32)), "4D tensors: k is"),
    (ValueError, dict(k=randn(2, 2, 2, 32))),
    (ValueError, {name: randn(2, 4, 3, 32) for name in ("k", "v")}, "the heads"),
    (ValueError, dict(v=randn(2, 2, 3, 16)), "head_dims of the caches"),
    (ValueError, dict(k=randn(2, 2, 3, 16)), "k and k_cache must have the same head_dim"),
    (ValueError, dict(v_cache=randn(5, 2, 1, 32).expand(-1, -1, 4, -1))),
    (ValueError, dict(seqused_k=None), "seqused_k must be given with new keys"),
    (ValueError, dict(seqused_k=one(10, 5)), "no room .* sample 0: seqused_k is 10, 3 are new"),
    (ValueError, dict(page_table=one(0, 1, 2, 3, 5, 0).view(2, 3), seqused_k=one(9, 4)),
     "page_table .*sample 1, got 5"),
    (ValueError, dict(page_table=one(0, 1, -1, 3, 4, 0).view(2, 3)), "page_table .*sample 0, got -1"),
    (ValueError, dict(page_table=one(0, 1, 2, 3, 4, 5).view(2, 3), cache_batch_idx=one(1, 0)),
     "page_table .*sample 0, got 5"),
    (ValueError, dict(cache_batch_idx=one(2, 0)), "cache_batch_idx .*sample 0, got 2"),
    (ValueError, dict(cu_seqlens_k_new=one(0, 1, 3)), "with cu_seqlens_k_new, k must be packed"),
    (ValueError, dict(rotary_sin=None), "rotary_cos and rotary_sin must both be given"),
    (ValueError, dict(rotary_cos=None, rotary_sin=None, rotary_seqlens=one(0, 0))),
    (TypeError, dict(rotary_cos=1.0)),
    (TypeError, dict(rotary_cos=TABLE.double())),
    (ValueError, dict(rotary_sin=TABLE.to("meta"))),
    (ValueError, dict(rotary_cos=TABLE[None])),
    (ValueError, dict(rotary_sin=TABLE.mT)),
    (ValueError, dict(rotary_cos=TABLE[:0], rotary_sin=TABLE[:0])),
    (ValueError, dict(rotary_sin=TABLE[:11])),
    (ValueError, {name: randn(12, 4) for name in ("rotary_cos", "rotary_sin")}),
    (ValueError, {name: randn(12, 24) for name in ("rotary_cos", "rotary_sin")}),
    (ValueError, dict(rotary_cos=TABLE[:11], rotary_sin=TABLE[:11]),
     "rotary_cos has 11 positions, and sample 0 .* seqused_k 9"),
    (ValueError, dict(rotary_seqlens=one(0, 10)), "sample 1 needs those from rotary_seqlens 10 on"),
    (ValueError, dict(rotary_seqlens=one(-1, 0)), "sample 0 needs those from rotary_seqlens -1 on"),
    (TypeError, dict(rotary_seqlens=torch.tensor([0, 0])), "rotary_seqlens must be int32"),
    (ValueError, dict(rotary_seqlens=one(0))),
    (TypeError, dict(rotary_interleaved=1)),
    (ValueError, dict(backend="other"), "unknown backend 'other'"),
]
NEW_OF_DENSE = [
    (ValueError, dict(seqused_k=one(9, 12)), "no room .* sample 1: seqused_k is 12, 3 are new"),
    (ValueError, dict(cache_batch_idx=one(0, 2)), "cache_batch_idx .*sample 1, got 2"),
]
NEW_OF_PACKED = [
    (ValueError, dict(seqused_k=one(9, 9)), "no room .* sample 1: seqused_k is 9, 4 are new"),
    (TypeError, dict(cu_seqlens_k_new=torch.tensor([0, 2, 6])), "cu_seqlens_k_new must be int32"),
    (ValueError, dict(cu_seqlens_k_new=one(0, 5, 4))),
]
WITH_NEW = [
    (ValueError, dict(v=None), "k and v must both be given"),
    (ValueError, NO_NEW, "rotary_cos needs new keys"),
    (ValueError, dict(NO_NEW, rotary_cos=None), "rotary_sin needs new keys"),
    (ValueError, dict(NO_NEW, **NO_ROTATION, rotary_seqlens=one(0, 0)), "rotary_seqlens needs new keys"),
    (ValueError, dict(NO_NEW, **NO_ROTATION, cu_seqlens_k_new=one(0, 3, 6)), "cu_seqlens_k_new needs new keys"),
    (ValueError, {name: randn(3, 2, 3, 32) for name in ("k", "v")}, "k must have as many samples as q, got 3"),
    (ValueError, dict(leftpad_k=one(10, 0))),
    (ValueError, dict(q=randn(2, 4, 4, 32)), "rotary_cos has 12 positions, .* as its 4 rows"),
]
VARLEN = [
    (ValueError, dict(q=randn(1, 9, 4, 32)), r"flash_attn_varlen_func: q must be \(T, H, D\)"),
    (ValueError, dict(k=randn(9, 2, 32)), r"flash_attn_varlen_func: k must be \(num_pages, page_size, Hk, D\)"),
    (ValueError, dict(cu_seqlens_q=None)),
    (ValueError, dict(cu_seqlens_k=one(0, 9, 14, 47)), "cu_seqlens_k cannot be given with seqused_k, beside"),
    (TypeError, dict(seqused_k=None, cu_seqlens_k=torch.tensor([0, 9, 14, 47])), "cu_seqlens_k must be int32"),
    (ValueError, dict(seqused_k=None, cu_seqlens_k=one(0, 9, 14)), "entries of cu_seqlens_k must be int32"),
    (ValueError, dict(seqused_k=None, cu_seqlens_k=one(0, 9, 8, 12)),
     "entries of cu_seqlens_k must be in 0..48 for sample 1"),
    (ValueError, dict(block_table=None), "seqused_k needs a page table: give block_table"),
    (NotImplementedError, dict(dropout_p=0.1), "flash_attn_varlen_func: dropout_p is not supported"),
    (TypeError, dict(dropout_p=False)),
    (ValueError, dict(block_table=zeros(2, 3))),
    (ValueError, dict(softmax_scale=math.nan)),
    (TypeError, dict(q=randn(9, 4, 32).double()), "q is torch.float64, k is torch.float32, v is torch.float32"),
    (ValueError, dict(out=torch.empty(9, 4, 32).double()), r"out must be torch.float32 of shape \(9, 4, 32\)"),
    (NotImplementedError, dict(k=randn(10, 16, 2, 32, requires_grad=True)),
     "flash_attn_varlen_func has no backward pass yet, but k requires grad"),
]
WITH_KVCACHE = [
    (ValueError, dict(cache_seqlens=21), "cache_seqlens must be in 0..20, got 21"),
    (ValueError, dict(cache_seqlens=one(3, 3, 21)), "cache_seqlens must be in 0..20 for sample 2"),
    (ValueError, dict(cache_seqlens=41, page_table=TWO_PAGES), "cache_seqlens must be in 0..40, got 41"),
    (TypeError, dict(cache_seqlens=3.0), "cache_seqlens must be a torch.Tensor, got float"),
    (ValueError, dict(cache_leftpad=one(10, 0, 0))),
    (ValueError, dict(k_cache=randn(20, 2, 16)), r"flash_attn_with_kvcache: k_cache must be \(B, S, Hk, D\)"),
    (ValueError, dict(cu_seqlens_q=one(0, 2, 4, 6)), r"flash_attn_with_kvcache: q must be \(T, H, D\)"),
    (ValueError, dict(softmax_scale=math.nan)),
    (NotImplementedError, dict(k_cache=randn(3, 20, 2, 16, requires_grad=True)),
     "flash_attn_with_kvcache has no backward pass yet, but k_cache requires grad"),
    (ValueError, dict(q=randn(3, 2, 4, 16, requires_grad=True), out=torch.empty(3, 2, 4, 16)),
     "out cannot be given where gradients are wanted"),
    (ValueError, dict(NEW, cache_seqlens=19), "no room for the new keys: cache_seqlens is 19, 2 are new"),
    (ValueError, dict(NEW_PACKED, cache_seqlens=18), "no room .* sample 1: cache_seqlens is 18, 3 are new"),
    (ValueError, dict(NEW, cache_seqlens=None), "cache_seqlens must be given with new keys"),
    (ValueError, dict(NEW, k=randn(6, 2, 16)), r"flash_attn_with_kvcache: k must be \(B, Sn, Hk, D\)"),
    (ValueError, dict(NEW_PACKED, v=NEW["v"]), r"flash_attn_with_kvcache: v must be \(T, Hk, D\)"),
]
SLOTS = [
    (TypeError, dict(key=torch.ones(5, 2, 16).int()), "key is torch.int32"),
    (TypeError, dict(value=randn(5, 2, 8).half()), "key is torch.float32, value is torch.float16"),
    (ValueError, dict(value=randn(5, 2, 8, device="meta"))),
    (ValueError, dict(key=randn(5, 1, 2, 16))),
    (ValueError, dict(key=randn(5, 2, 8)), "the heads and head_dims of the caches"),
    (ValueError, dict(value_cache=randn(3, 5, 2, 8)), "the heads and head_dims of the caches"),
    (ValueError, dict(value=randn(5, 2, 300), value_cache=randn(3, 4, 2, 300)), "head_dim 300 of value"),
    (ValueError, dict(value_cache=randn(3, 4, 8, 2).mT)),
    (ValueError, dict(key_cache=randn(1, 4, 2, 16).expand(3, -1, -1, -1))),
    (TypeError, dict(slot_mapping=one(0, 1, 2, 3, 4)), "slot_mapping must be int64"),
    (ValueError, dict(slot_mapping=torch.arange(6))),
    (ValueError, dict(slot_mapping=torch.arange(10)[::2])),
    (ValueError, dict(slot_mapping=torch.tensor([0, 12])), "slot_mapping must be below 12"),
    (NotImplementedError, dict(kv_cache_dtype="fp8"), "kv_cache_dtype 'fp8' is not supported"),
    (NotImplementedError, dict(value=randn(5, 2, 8, requires_grad=True)),
     "reshape_and_cache has no backward pass yet, but value requires"),
    (ValueError, dict(backend="other"), "unknown backend 'other'"),
]
COMBINE = [
    (TypeError, dict(lse_partial=None)),
    (TypeError, dict(out_partial=PARTIAL.int()), "out_partial is torch.int32"),
    (TypeError, dict(lse_partial=PARTIAL_LSE.half())),
    (TypeError, dict(out_dtype=torch.int8)),
    (ValueError, dict(out_partial=PARTIAL[0, 0])),
    (ValueError, dict(out_partial=PARTIAL[:0]), "with 1 to 256 splits"),
    (ValueError, dict(out_partial=PARTIAL[:1].expand(257, -1, -1, -1, -1)), "with 1 to 256 splits"),
    (ValueError, dict(lse_partial=PARTIAL_LSE.transpose(2, 3))),
    (ValueError, dict(out=PARTIAL), "out must be torch.float32 of shape"),
    (ValueError, dict(out=PARTIAL[0].clone(), out_dtype=torch.float16), "out must be torch.float16 of shape"),
    (NotImplementedError, dict(out_partial=PARTIAL.clone().requires_grad_()),
     "flash_attn_combine has no backward pass yet"),
]
for _rows, _function in ((VARLEN, "flash_attn_varlen_func"), (WITH_KVCACHE, "flash_attn_with_kvcache")):
    _rows += [(NotImplementedError, {name: torch.ones(3, 2)}, f"^{_function}: {name} is not supported yet")
              for name in ("qv", "q_descale", "k_descale", "v_descale")]
OF_TREE = [
    (TypeError, dict(tree_mask=[1]), "tree_mask must be a torch.Tensor, got list"),
    (TypeError, dict(tree_mask=TREE.int()), "tree_mask must be bool or int64 .* got a torch.int32"),
    (ValueError, dict(tree_mask=TREE.expand(3, 5, 5))),
    (ValueError, dict(tree_mask=torch.ones(5, 20).bool())),
    (ValueError, dict(tree_mask=TREE.long()), r"tree_mask must be .* got a torch.int64 tensor of shape \(5, 5\)"),
    (ValueError, dict(q=randn(2, 4, 65, 16), tree_mask=torch.ones(65, 65).bool()),
     "tree_mask serves up to 64 rows, got 65"),
    (ValueError, dict(causal=True), "tree_mask cannot be given with causal, whose place it takes"),
    (NotImplementedError, dict(window_size=(4, 0)), "window_size is not supported together with tree_mask"),
    (NotImplementedError, dict(alibi_slopes=torch.ones(4)), "alibi_slopes is not supported together with tree_mask"),
    (NotImplementedError, dict(q=randn(1, 4, 10, 16), cu_seqlens_q=one(0, 5, 10)),
     "cu_seqlens_q is not supported together with tree_mask"),
    (NotImplementedError, dict(k=randn(2, 2, 5, 16), v=randn(2, 2, 5, 16), seqused_k=one(15, 9),
                               rotary_cos=torch.ones(20, 8), rotary_sin=torch.ones(20, 8)),
     "rotary_cos is not supported together with tree_mask: rotate q and k by the depths"),
]
OF_TREE_ALONE = [
    (TypeError, dict(tree_mask=torch.ones(2, 2)), "tree_mask must be bool .* got a torch.float32"),
    (ValueError, dict(tree_mask=TREE[1:]), r"tree_mask must be .*\(Sq, Sq\).* got .*\(4, 5\)"),
    (ValueError, dict(tree_mask=torch.ones(65, 65).bool()), "tree_mask serves up to 64 rows, got 65"),
]
CASES = [(call, given, *row) for call, given, rows in [
    (attention_with_kvcache, "pages", OF_PAGES), (attention_with_kvcache, "dense", OF_DENSE),
    (attention_with_kvcache, "packed", OF_PACKED), (attention_with_kvcache, "tree", OF_TREE),
    (minimal_attn.pack_tree_mask, "tree_alone", OF_TREE_ALONE),
    (attention_with_kvcache, "new_of_pages_in_attention", WITH_NEW),
    (append_to_kvcache, "new_of_pages", NEW_OF_PAGES), (append_to_kvcache, "new_of_dense", NEW_OF_DENSE),
    (append_to_kvcache, "new_of_packed", NEW_OF_PACKED), (flash_attn_varlen_func, "tables", VARLEN),
    (flash_attn_with_kvcache, "by_flash_attn", WITH_KVCACHE), (reshape_and_cache, "slots", SLOTS),
    (flash_attn_combine, "partial", COMBINE), (minimal_attn.get_scheduler_metadata, "metadata", [
        (TypeError, dict(cache_seqlens=9), "cache_seqlens must be a torch.Tensor, got int")]),
] for row in rows]
# New keys of attention_with_kvcache are checked as those of append_to_kvcache.
CASES += [(attention_with_kvcache, f"{given}_in_attention", *row) for call, given, *row in CASES
          if call is append_to_kvcache and row[1].get("k_cache", row) is not None]


def name_of(x):
    return getattr(x, "__name__", None) or "-".join(x) if isinstance(x, dict) or callable(x) else None


@cpu
@pytest.mark.parametrize("call, arguments, error, change, says", [(*x, None)[:5] for x in CASES], ids=name_of)
def test_bad_input(call, arguments, error, change, says):
    call(**GIVEN[arguments])
    check_error(call, error, says or rf"\b{next(iter(change))}\b", GIVEN[arguments], change)


@pytest.mark.parametrize("name", ["q", "sinks", "k", "v", "k_cache", "v_cache", "rotary_cos", "rotary_sin"])
def test_gradients_are_refused(name, backend):
    given = {key: on_device(x.to(BACKENDS[backend]) if x.is_floating_point() else x)
             for key, x in dict(APPEND, q=randn(2, 4, 3, 32), sinks=torch.ones(4)).items()}
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
    dict(softmax_scale=math.nan), dict(softcap=-1.0), dict(window_left=-2), dict(attention_chunk=-1),
    dict(num_splits=257), dict(max_seqlen_q=-1),
], ids=lambda change: "-".join(f"{name}_{tuple(getattr(x, 'shape', ())) or x}" for name, x in change.items()))
def test_op_refuses_what_would_read_out_of_bounds(change):
    """Without a GPU the compiled op checks its arguments alike, and then says that it needs one."""
    minimal_attn.load()
    k, table = randn(6, 2, 8, 16), torch.arange(6, dtype=torch.int32).view(2, 3)
    given = dict(q=randn(2, 4, 5, 16), k=k, v=k, cu_seqlens_q=None, seqused_q=None, seqused_k=None,
                 page_table=table, cache_batch_idx=None, leftpad_k=None, tree_mask=None, sinks=None, alibi_slopes=None,
                 softmax_scale=0.25, softcap=0.0, window_left=-1, window_right=-1, attention_chunk=0, num_splits=0,
                 max_seqlen_q=0)
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
