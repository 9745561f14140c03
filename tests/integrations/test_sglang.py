"""The calls that SGLang's FlashAttention backend makes, with its arguments by their names. SGLang itself is not run.

Its backend has one packed batch a step. It stores new keys itself, and then calls flash_attn_with_kvcache on its pages.
"""

import math

import pytest
import torch

from cached_calls import BACKENDS, DEVICE, TOLERANCE, close, ints
from minimal_attn import attention_with_kvcache, flash_attn_combine, flash_attn_varlen_func, flash_attn_with_kvcache
from test_cache_names import serving

ROWS, KEYS = (1, 5, 3), (9, 5, 33)  # of the samples of serving()
HEADS, D = 4, 32
BACKEND = "cuda" if DEVICE == "cuda" else "torch"  # of a call that differs from others in its arguments alone


def pages_of_one_key(table):
    """The table of the same cache in pages of one key, which SGLang has by default."""
    places = torch.arange(16, device=table.device, dtype=torch.int32)
    return (table[:, :, None].clamp(0) * 16 + places).flatten(1)


def starts(lengths):
    return ints(0, *torch.tensor(lengths).cumsum(0).tolist())


def call(x, backend=BACKEND, **changed):
    """flash_attn_with_kvcache as SGLang calls it for x of serving(), but for the changed arguments."""
    given = dict(
        q=x.q, k_cache=x.caches[0], v_cache=x.caches[1], page_table=x.given["page_table"],
        cache_seqlens=x.given["seqused_k"], cu_seqlens_q=x.given["cu_seqlens_q"], cu_seqlens_k_new=starts(KEYS),
        max_seqlen_q=5, softmax_scale=D**-0.5, causal=True, window_size=(-1, -1), softcap=0.0, return_softmax_lse=False,
        num_splits=0, out=torch.full_like(x.q, math.nan), ver=3, sinks=x.given["sinks"], backend=backend)
    return flash_attn_with_kvcache(**given | changed)


def want(x, **options):
    """The reference's out (T, H, D) in fp64 for x."""
    q, k, v = (y.double() for y in (x.q.transpose(0, 1)[None], *(y.transpose(1, 2) for y in x.caches)))
    given = {name: y for name, y in x.given.items() if name != "sinks"}
    return attention_with_kvcache(q, k, v, **given | options, backend="reference")[0].transpose(0, 1)


def check(out, expected):
    close(out, expected, TOLERANCE[out.dtype])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("has_new", [False, True])
def test_extend_in_pages_of_one_key(backend, has_new):
    """Chunks of prompts beside single tokens; with has_new the call itself stores the new keys."""
    x = serving(backend, has_new=has_new)
    k_cache, v_cache = (y.view(-1, 1, *y.shape[2:]) for y in x.caches)
    out, lse, *rest = call(x, backend, k_cache=k_cache, v_cache=v_cache, k=x.k, v=x.v, return_softmax_lse=True,
                           page_table=pages_of_one_key(x.given["page_table"]), k_descale=None, v_descale=None,
                           cu_seqlens_k_new=x.given.get("cu_seqlens_k_new", starts(KEYS)))
    assert rest == []
    x.check(out, lse)


@pytest.mark.parametrize("name, changed, options", [
    ("extend", {}, {}), ("window", dict(window_size=(6, 0)), dict(window_size=(6, 0))),
    ("softcap", dict(softcap=2.0), dict(softcap=2.0)), ("deterministic", dict(num_splits=1), {}),
    ("encoder's window", dict(causal=False, window_size=(6, 6)), dict(causal=False, window_size=(6, 6))),
    ("cross-attention", dict(causal=False), dict(causal=False))])
def test_extend(name, changed, options):
    x = serving(BACKEND)
    check(call(x, **changed), want(x, **dict(causal=True, sinks=x.given["sinks"].double()) | options))


@pytest.mark.parametrize("rows", [1, 4])
def test_decode_and_verify(rows):
    """One token of each request, or a draft without branches."""
    x = serving(BACKEND, (rows,) * 3)
    out = torch.empty_like(x.q)
    assert call(x, max_seqlen_q=rows, cu_seqlens_k_new=None, scheduler_metadata=None, out=out) is out
    x.check(out)


def test_verify_a_tree():
    """Two calls, one of the text and one of the tokens that a token of the draft sees, each on pages of one key. Their
    results are merged by their logsumexp (T, H)."""
    x = serving(BACKEND, (4, 4, 4))
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool, device=DEVICE)
    text = x.given["seqused_k"] - 4
    # The reference has the samples in a dimension of their own, as a tree mask wants them.
    q = x.q.double().unflatten(0, (3, 4)).transpose(1, 2)
    k, v = (y.double().transpose(1, 2) for y in x.caches)
    expected = attention_with_kvcache(q, k, v, x.given["seqused_k"], page_table=x.given["page_table"], tree_mask=tree,
                                      backend="reference").transpose(1, 2).flatten(0, 1)
    places = text[:, None] + torch.arange(4, device=DEVICE)
    slots = pages_of_one_key(x.given["page_table"]).gather(1, places).repeat_interleave(4, 0)
    order = tree.int().argsort(dim=1, descending=True, stable=True).repeat(3, 1)  # what a token sees comes first
    common = dict(causal=False, sinks=None, return_softmax_lse=True, out=None)
    parts = [call(x, cache_seqlens=text, max_seqlen_q=4, **common),
             call(x, k_cache=x.caches[0].view(-1, 1, 2, D), v_cache=x.caches[1].view(-1, 1, 2, D),
                  page_table=slots.gather(1, order).int(), cache_seqlens=tree.sum(1, dtype=torch.int32).repeat(3),
                  cu_seqlens_q=starts([1] * 12), cu_seqlens_k_new=starts([4] * 12), max_seqlen_q=1, **common)]
    out, _ = flash_attn_combine(torch.stack([o for o, _ in parts]), torch.stack([lse.T for _, lse in parts]))
    check(out, expected)


def test_local_attention():
    """Llama 4's chunks, here of 16 tokens, as samples of their own: SGLang cuts the rows and the table."""
    x = serving(BACKEND, (1, 5, 20))
    table = x.given["page_table"]
    rows, keys, pages = zip((1, 9, table[0, :1]), (5, 5, table[1, :1]), (3, 16, table[2, :1]), (16, 16, table[2, 1:2]),
                            (1, 1, table[2, 2:3]))
    out = call(x, page_table=torch.stack(pages), cache_seqlens=ints(*keys), cu_seqlens_q=starts(rows),
               cu_seqlens_k_new=None, max_seqlen_q=16, sinks=None)
    check(out, want(x, causal=True, attention_chunk=16))


@pytest.mark.parametrize("head_dim_v, is_context", [(D, False), (16, False), (16, True)])
def test_without_a_cache(head_dim_v, is_context):
    """Embeddings, and the prompts of multi-head latent attention with keys and values of other head_dims: first of the
    new tokens, and then of an earlier part of the text, to be merged."""
    dtype, lengths = BACKENDS[BACKEND], KEYS if is_context else ROWS
    generator = torch.Generator(DEVICE).manual_seed(0)
    q, k, v = (torch.randn(n, HEADS, d, generator=generator, device=DEVICE, dtype=dtype)
               for n, d in ((sum(ROWS), D), (sum(lengths), D), (sum(lengths), head_dim_v)))
    given = dict(cu_seqlens_q=starts(ROWS), cu_seqlens_k=starts(lengths), max_seqlen_q=5, max_seqlen_k=max(lengths),
                 softmax_scale=D**-0.5, causal=not is_context, return_softmax_lse=True)
    out, lse = flash_attn_varlen_func(q=q, k=k, v=v, **given, out=None, ver=3, backend=BACKEND)
    expected, expected_lse = flash_attn_varlen_func(q.double(), k.double(), v.double(), **given, backend="reference")
    check(out, expected)
    check(lse.to(dtype), expected_lse)


@pytest.mark.cpu
@pytest.mark.parametrize("name, value", [("qv", torch.zeros(9, HEADS, D)), ("k_descale", torch.ones(3, 2)),
                                         ("v_descale", torch.ones(3, 2))])
def test_refused(name, value):
    """Decoding of multi-head latent attention, and caches in fp8."""
    with pytest.raises(NotImplementedError, match=f"flash_attn_with_kvcache: {name} is not supported yet"):
        call(serving(), "auto", **{name: value})
    for of_flash_attn_4 in ("score_mod", "rel_bias", "max_seqlen_k"):
        with pytest.raises(TypeError, match=of_flash_attn_4):
            call(serving(), "auto", **{of_flash_attn_4: None})
