"""Subclasses of torch.Tensor: which are served, in values, and which are refused by name at every public function."""

import functools
import inspect

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor

import minimal_attn
from conftest import HAS_GPU
from minimal_attn import flash_attention
from minimal_attn.flash_attn import bert_padding

DEVICE = "cuda" if HAS_GPU else "cpu"
each_backend = pytest.mark.parametrize("backend", minimal_attn.available_backends())


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def qkv(rows, keys, *, heads_k=4):
    return randn(2, 4, rows, 16), randn(2, heads_k, keys, 16, seed=1), randn(2, heads_k, keys, 16, seed=2)


# CausalBias, whose memory holds nothing. All shapes in torch, and in turn in the other backends.

SHAPES = [(make, *size) for size in ((5, 9), (7, 7), (9, 5)) for make in (causal_upper_left, causal_lower_right)]
each_causal_bias = pytest.mark.parametrize("backend, make, rows, keys", [
    (backend, *shape) for backend in minimal_attn.available_backends() for i, shape in enumerate(SHAPES)
    if backend == "torch" or i in (0, 5)])


@each_causal_bias
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_causal_bias(backend, make, rows, keys):
    """Results and gradients beside torch's with the mask that the object means; rows that see no key are 0."""
    leaves, dout = [x.requires_grad_() for x in qkv(rows, keys)], randn(2, 4, rows, 16, seed=3)
    bias = make(rows, keys)
    want = scaled_dot_product_attention(*leaves, bias._materialize(torch.device(DEVICE)))
    if rows <= keys or not HAS_GPU:  # for more rows than keys, torch 2.11 misplaces the diagonal on a GPU
        assert_close(want, scaled_dot_product_attention(*leaves, bias))
    of_want = torch.autograd.grad(want, leaves, dout)
    for got in (minimal_attn.scaled_dot_product_attention(*leaves, bias, backend=backend),
                flash_attention(*leaves, attn_bias=bias, backend=backend)):
        assert_close(got, want, rtol=1e-4, atol=1e-5)
        for x, y in zip(torch.autograd.grad(got, leaves, dout), of_want):
            assert_close(x, y, rtol=1e-4, atol=1e-5)


@each_causal_bias
@pytest.mark.parametrize("options", [dict(window_size=(3, 2), alibi_slopes=randn(4).abs()), dict(seqused_k=ints(4, 5))],
                         ids=list)
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_causal_bias_hides_what_its_mask_hides(backend, make, rows, keys, options):
    call = functools.partial(flash_attention, *qkv(rows, keys, heads_k=2), return_lse=True, backend=backend, **options)
    bias = make(rows, keys)
    for got, want in zip(call(attn_bias=bias), call(attn_bias=bias._materialize(torch.device(DEVICE)))):
        assert_close(got, want, rtol=1e-4, atol=1e-5)


@each_backend
def test_causal_bias_of_layers_and_grouped_heads(backend):
    q, k, v = qkv(7, 7, heads_k=2)
    got = minimal_attn.scaled_dot_product_attention(q, k, v, causal_lower_right(7, 7), enable_gqa=True, backend=backend)
    assert_close(got, flash_attention(q, k, v, True, backend=backend))
    layer = minimal_attn.FlashMHA(32, 4, backend=backend).to(DEVICE)
    x, mask = randn(2, 7, 32), ints(7, 4)[:, None] > torch.arange(7, device=DEVICE)
    for options in (dict(), dict(key_padding_mask=mask)):
        want = layer(x, attn_mask=torch.ones(7, 7, dtype=torch.bool, device=DEVICE).tril(), **options)
        assert_close(layer(x, attn_mask=causal_upper_left(7, 7), **options), want)


def test_causal_bias_of_other_sizes_is_refused():
    q, k, v = qkv(5, 9)
    for bias in (causal_upper_left(9, 5), causal_lower_right(5, 8)):
        with pytest.raises(ValueError, match="^attn_mask must be for 5 rows and 9 keys"):
            minimal_attn.scaled_dot_product_attention(q, k, v, bias)
        with pytest.raises(ValueError, match="^attn_bias must be for 5 rows and 9 keys"):
            flash_attention(q, k, v, attn_bias=bias)
    with pytest.raises(ValueError, match="^attn_bias cannot be given with cu_seqlens"):
        flash_attention(*(x[:1] for x in qkv(5, 5)), cu_seqlens_q=ints(0, 5), cu_seqlens_k=ints(0, 5),
                        attn_bias=causal_lower_right(5, 5))
    with pytest.raises(TypeError, match="^k must be a plain tensor, got CausalBias"):
        flash_attention(q, causal_lower_right(5, 9), v)


# Subclasses that are served.

class Plain(torch.Tensor):
    """Its memory is its value, as in those of torchvision."""


class PlainParameter(torch.nn.Parameter):
    """A subclass of Parameter, as in layers of vLLM."""


def negated(x):
    """A view with these values, whose memory holds their negatives."""
    y = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert y.is_neg()
    return y


SERVED = {
    "Parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "Buffer": lambda x: torch.nn.Buffer(x),
    "Plain": lambda x: x.as_subclass(Plain),
    "PlainParameter": lambda x: torch.Tensor._make_subclass(PlainParameter, x, False),
    "negated": negated,
    "AsyncCollectiveTensor": AsyncCollectiveTensor,
}
OPTIONS = {
    "scores": dict(sinks=randn(4), alibi_slopes=randn(4).abs(), attn_bias=randn(5, 9)),
    "lengths": dict(seqused_q=ints(3, 5), seqused_k=ints(9, 4), dropout_p=0.3,
                    dropout_seed=ints(5, dtype=torch.int64)),
}


@each_backend
@pytest.mark.parametrize("of", OPTIONS)
@pytest.mark.parametrize("name", SERVED)
def test_served(backend, of, name):
    """A subclass is served as q, k and v, and as every other tensor."""
    inputs, others = dict(zip("qkv", qkv(5, 9))), OPTIONS[of]
    want = flash_attention(**inputs, **others, backend="reference")

    def given(arguments):
        return {key: SERVED[name](x) if isinstance(x, torch.Tensor) and (x.is_floating_point() or name != "negated")
                else x for key, x in arguments.items()}

    for got in (flash_attention(**given(inputs), **others, backend=backend),
                flash_attention(**inputs, **given(others), backend=backend)):
        assert_close(got.as_subclass(torch.Tensor), want, rtol=1e-4, atol=1e-5)


# Subclasses that are refused.

def by_flash_attn(*shape):
    return {name: randn(*shape, seed=seed) for seed, name in enumerate("qkv")}


CU, TOKEN_CU = ints(0, 3, 5), ints(0, 1, 2)
QKV, DENSE, PACKED = dict(zip("qkv", qkv(5, 5))), by_flash_attn(2, 5, 4, 16), by_flash_attn(5, 4, 16)
SCORES = dict(alibi_slopes=randn(4).abs(), sinks=randn(4))
DROPOUT = dict(dropout_p=0.5, dropout_seed=ints(5, dtype=torch.int64))
BOUNDS, MOST = dict(cu_seqlens_q=CU, cu_seqlens_k=CU), dict(max_seqlen_q=3, max_seqlen_k=3)
USED = dict(seqused_q=ints(2, 1), seqused_k=ints(3, 1))
ROTARY = dict(rotary_cos=randn(8, 8), rotary_sin=randn(8, 8), rotary_seqlens=ints(3, 2))
CACHES = dict(k_cache=randn(2, 4, 8, 16), v_cache=randn(2, 4, 8, 16))
CACHES_OF_FLASH_ATTN = {name: x.transpose(1, 2).contiguous() for name, x in CACHES.items()}
NEW = dict(k=randn(2, 4, 1, 16), v=randn(2, 4, 1, 16))
NEW_OF_FLASH_ATTN = {name: x.transpose(1, 2).contiguous() for name, x in NEW.items()}
NEW_PACKED = dict(k=randn(1, 4, 2, 16), v=randn(1, 4, 2, 16), cu_seqlens_k_new=TOKEN_CU)
FLOAT8 = dict(((name, x.to(torch.float8_e5m2)) for name, x in QKV.items()), backend="reference",
              **{f"{name}_descale": torch.ones(2, 4, device=DEVICE) for name in "qkv"})
UNPADDED = ints(1, 1, 1, 1, 0)[None]
WITH_SCORES = QKV | SCORES | dict(attn_bias=randn(5, 5))
WITH_LENGTHS = [QKV | USED, QKV | dict(seq_lens=ints(3, 5)), {name: x[:1] for name, x in QKV.items()} | BOUNDS]
# Calls which are served, and which together have all arguments that are tensors and are read, sinks by all names.
CALLS = {
    "flash_attention": [WITH_SCORES | DROPOUT, *WITH_LENGTHS, FLOAT8],
    "forward": [QKV],
    "which_kernel": [WITH_SCORES, *WITH_LENGTHS],
    "reference_attention": [WITH_SCORES | DROPOUT, *WITH_LENGTHS],
    "blockwise_attention": [{name: x[0] for name, x in QKV.items()}],
    "scaled_dot_product_attention": [dict(zip(("query", "key", "value"), QKV.values()), attn_mask=randn(5, 5))],
    "flash_attn_func": [DENSE | SCORES | DROPOUT | dict(out=randn(2, 5, 4, 16))],
    "flash_attn_kvpacked_func": [
        dict(q=DENSE["q"], kv=randn(2, 5, 2, 4, 16), out=randn(2, 5, 4, 16), **SCORES, **DROPOUT)],
    "flash_attn_qkvpacked_func": [dict(qkv=randn(2, 5, 3, 4, 16), out=randn(2, 5, 4, 16), **SCORES, **DROPOUT)],
    "flash_attn_varlen_func": [
        dict(**PACKED, **BOUNDS, **MOST, **SCORES, **USED, **DROPOUT, out=randn(5, 4, 16)),
        *(dict(q=PACKED["q"], k=CACHES_OF_FLASH_ATTN["k_cache"], v=CACHES_OF_FLASH_ATTN["v_cache"], cu_seqlens_q=CU,
               max_seqlen_q=3, max_seqlen_k=8, seqused_k=ints(3, 5), **{name: ints(0, 1)[:, None]})
          for name in ("block_table", "page_table"))],
    "flash_attn_varlen_kvpacked_func": [
        dict(q=PACKED["q"], kv=randn(5, 2, 4, 16), **BOUNDS, **MOST, **SCORES, **USED, **DROPOUT, out=randn(5, 4, 16))],
    "flash_attn_varlen_qkvpacked_func": [
        dict(qkv=randn(5, 3, 4, 16), cu_seqlens=CU, max_seqlen=3, **SCORES, **USED, **DROPOUT, out=randn(5, 4, 16))],
    "flash_attn_with_kvcache": [
        dict(q=randn(2, 1, 4, 16), **CACHES_OF_FLASH_ATTN, **NEW_OF_FLASH_ATTN, **ROTARY, cache_seqlens=ints(3, 2),
             cache_batch_idx=ints(1, 0), cache_leftpad=ints(0, 1), **SCORES, out=randn(2, 1, 4, 16)),
        *(dict(q=randn(2, 1, 4, 16), **CACHES_OF_FLASH_ATTN, cache_seqlens=ints(3, 2), **{name: ints(1, 0)[:, None]})
          for name in ("block_table", "page_table")),
        dict(q=randn(2, 4, 16), cu_seqlens_q=TOKEN_CU, **CACHES_OF_FLASH_ATTN, cache_seqlens=ints(3, 2),
             k=randn(2, 4, 16), v=randn(2, 4, 16), cu_seqlens_k_new=TOKEN_CU)],
    "flash_attn_combine": [dict(out_partial=randn(2, 2, 5, 4, 16), lse_partial=randn(2, 2, 5, 4),
                                out=randn(2, 5, 4, 16))],
    "get_scheduler_metadata": [dict(batch_size=2, max_seqlen_q=1, max_seqlen_k=8, num_heads_q=4, num_heads_kv=4,
                                    headdim=16, cache_seqlens=ints(3, 2))],
    "attention_with_kvcache": [
        dict(q=randn(2, 4, 1, 16), **CACHES, **NEW, **ROTARY, **SCORES, seqused_k=ints(3, 2), seqused_q=ints(1, 1),
             cache_batch_idx=ints(1, 0), leftpad_k=ints(0, 1)),
        dict(q=randn(1, 4, 2, 16), cu_seqlens_q=TOKEN_CU, **CACHES, **NEW_PACKED, seqused_k=ints(3, 2)),
        dict(q=randn(2, 4, 2, 16), **CACHES, seqused_k=ints(3, 2), page_table=ints(1, 0)[:, None],
             tree_mask=torch.ones(2, 2, dtype=torch.bool, device=DEVICE).tril())],
    "append_to_kvcache": [
        dict(**NEW, **CACHES, **ROTARY, seqused_k=ints(3, 2), cache_batch_idx=ints(1, 0)),
        dict(**NEW_PACKED, **CACHES, seqused_k=ints(3, 2), page_table=ints(1, 0)[:, None])],
    "reshape_and_cache": [dict(key=randn(2, 4, 16), value=randn(2, 4, 16), key_cache=randn(2, 8, 4, 16),
                               value_cache=randn(2, 8, 4, 16), slot_mapping=ints(3, 9, dtype=torch.int64))],
    "pack_tree_mask": [dict(tree_mask=torch.ones(2, 2, dtype=torch.bool, device=DEVICE).tril())],
    "pad_input": [dict(hidden_states=randn(4, 8), indices=ints(0, 1, 2, 3, dtype=torch.int64), batch=1, seqlen=5)],
    "unpad_input": [dict(hidden_states=randn(1, 5, 8), attention_mask=UNPADDED)],
    "triton_matmul": [dict(a=randn(16, 16), b=randn(16, 16))],
}
# Not read, or of a feature that is not served.
UNREAD = {"max_seqlen_q", "max_seqlen_k", "max_seqlen", "qv", "q_descale", "k_descale", "v_descale", "k_scale",
          "v_scale", "scheduler_metadata", "gather_kv_indices"}
UNREAD_BY = {"get_scheduler_metadata": {"cu_seqlens_q", "cu_seqlens_k_new", "cache_leftpad"},
             "flash_attn_varlen_kvpacked_func": {"page_table"}, "flash_attn_varlen_qkvpacked_func": {"page_table"}}


def refused(call, options):
    """Names of those tensors in the options of which a wrapper makes the call raise; others must not be."""
    call(**{name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in options.items()})
    names = {name for name, x in options.items() if isinstance(x, torch.Tensor)}
    for name in names:
        said = "sinks" if name in ("s_aux", "learnable_sink") else name
        with pytest.raises(TypeError, match=rf"\b{said}\b.* must be a plain tensor, got TwoTensor"):
            call(**options | {name: TwoTensor(options[name].clone(), options[name].clone())})
    return names


@pytest.mark.parametrize("name", CALLS)
def test_wrapper_is_refused(name):
    """A wrapper is given as each argument in turn."""
    function, checked = getattr(minimal_attn, name), set()
    parameters = inspect.signature(function).parameters
    for options in CALLS[name]:
        checked |= refused(function, options)
        for alias in {"s_aux", "learnable_sink"} & parameters.keys() if "sinks" in options else ():
            checked |= refused(function, {alias if key == "sinks" else key: x for key, x in options.items()})
    named = {x.name for x in parameters.values() if "Tensor" in str(x.annotation)}
    assert named - checked <= UNREAD | UNREAD_BY.get(name, set())


def test_wrapper_is_refused_by_layers():
    layer = minimal_attn.FlashMHA(32, 4).to(DEVICE)
    mask = ints(5, 4)[:, None] > torch.arange(5, device=DEVICE)
    for options in (dict(x=randn(2, 5, 32), key_padding_mask=mask, attn_mask=randn(5, 5)),
                    dict(x=randn(2, 5, 32), seq_lens=ints(3, 5)), dict(x=randn(5, 32), cu_seqlens=CU)):
        refused(layer, options)


def test_wrapper_is_refused_by_bert_padding():
    refused(bert_padding.unpad_input, CALLS["unpad_input"][0] | dict(unused_mask=UNPADDED))


def test_wrapper_is_refused_in_a_group():
    from minimal_attn import distributed

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        one = {name: x[:1, :, :4] for name, x in QKV.items()}
        refused(distributed.context_parallel_attention, one | SCORES | dict(
            cu_seqlens=ints(0, 3, 4), **DROPOUT))
        refused(distributed.shard, dict(x=randn(1, 4, 4, 16)))
        refused(distributed.unshard, dict(x=randn(1, 4, 4, 16)))
        refused(distributed.shard_labels, dict(tokens=ints(1, 2, 3, 4, dtype=torch.int64)[None]))
    finally:
        torch.distributed.destroy_process_group()
