"""Bad input of attention and packing: one error for each, which names the argument, in every function that takes it.

test_cache_errors.py has those of calls with caches.
"""

import math
import re

import numpy
import pytest
import torch

from conftest import HAS_GPU
from minimal_attn import (FlashMHA, blockwise_attention, flash_attention, flash_attn_func, flash_attn_kvpacked_func,
                          flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func, pad_input, reference_attention,
                          scaled_dot_product_attention, which_kernel)
from minimal_attn.score_function import read

DEVICE = "cuda" if HAS_GPU else "cpu"


def randn(*shape, device="cpu"):
    return torch.randn(shape, device=device)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


# Arguments that the functions take.

GIVEN = {
    "alike": {name: randn(2, 4, 20, 16) for name in "qkv"},
    "one_sample": {name: randn(1, 2, 10, 16) for name in "qkv"},
    # On a GPU the fast path sees these first.
    "grouped": {name: randn(*shape, device=DEVICE) for name, shape in zip("qkv", (
        (2, 4, 7, 8), (2, 2, 9, 8), (2, 2, 9, 5)))},
    "sdpa": dict(query=randn(2, 4, 5, 8), key=randn(2, 4, 7, 8), value=randn(2, 4, 7, 8)),
    "varlen": dict(q=randn(42, 4, 40), k=randn(45, 2, 40), v=randn(45, 2, 40), cu_seqlens_q=ints(0, 5, 22, 42),
                   cu_seqlens_k=ints(0, 9, 12, 45)),
    "kv": dict(q=randn(1, 7, 4, 16), kv=randn(1, 7, 2, 4, 16)),
    "qkv": dict(qkv=randn(7, 3, 4, 16), cu_seqlens=ints(0, 7)),
    "flat": {name: randn(2, 8, 16) for name in "qkv"},
    "module": dict(embed_dim=64, num_heads=4),
    "rows": dict(hidden_states=randn(4, 5), indices=torch.arange(4), batch=2, seqlen=3),
}

def plain_score(score, b, h, q_idx, kv_idx):
    return score


GIVEN["float64"] = {name: x.cpu().double() for name, x in GIVEN["grouped"].items()}
Q, K = GIVEN["alike"]["q"], GIVEN["alike"]["k"]
CU, SEED = ints(0, 4, 10), torch.tensor([5])
SLOPES, SINKS, BIAS = torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE), torch.zeros(7, 9, device=DEVICE)
MASK = torch.ones(5, 7, dtype=torch.bool)
LARGE = Q[:, :, :1].expand(-1, -1, 2**31 - 256, -1)

# (error, what it says, what changes)
OF_TENSORS = [
    (ValueError, "Expected 3D or 4D tensors, all alike", dict(k=K[0])),
    (ValueError, "same shape", dict(k=K[:, :, 1:])),
    (ValueError, "same shape, but for the head_dim of v", dict(v=K[:, 1:])),
    (ValueError, "same head_dim", dict(q=Q[..., 1:])),
    (ValueError, "same batch size", dict(q=Q[1:])),
    (ValueError, "Unsupported head_dim 0", dict.fromkeys("qkv", Q[..., :0])),
    (ValueError, "Unsupported head_dim 272", dict.fromkeys("qkv", Q.repeat(1, 1, 1, 17))),
    (ValueError, "Unsupported head_dim 257: 1 to 256 is supported", dict(v=randn(2, 4, 20, 257))),
    (ValueError, "multiple of the number of key/value heads", dict.fromkeys("kv", K[:, :3])),
    (ValueError, "same device", dict(k=K.to("meta"))),
    (ValueError, "heads go up to 2147483391, and so do rows and keys together", dict.fromkeys("kv", LARGE)),
    (TypeError, "q must be a dense tensor, got torch.sparse_coo", dict(q=Q.to_sparse())),
    (TypeError, "Unsupported dtype: q is torch.int64", dict.fromkeys("qkv", Q.long())),
    (TypeError, "dtypes must match", dict(k=K.half())),
    (ValueError, r"seq_lens must be in 1\.\.20, got values from 0 to 3", dict(seq_lens=[0, 3])),
    (ValueError, "got values from -4294967293 to 3", dict(seq_lens=torch.tensor([3, 3 - 2**32]))),
    (ValueError, r"seq_lens must be .* of shape .*\(2,\).* got .*\(2, 1\)", dict(seq_lens=torch.tensor([[3], [3]]))),
    (TypeError, "seq_lens must be integers.*got 3", dict(seq_lens=3)),
    (TypeError, "seq_lens must be integers", dict(seq_lens=[3.0, 3])),
    (TypeError, "seq_lens must be int32 or int64 .* got a torch.float32", dict(seq_lens=torch.tensor([3.0, 3.0]))),
    (ValueError, "seq_lens needs equal lengths", dict(q=Q[:, :, 1:], seq_lens=[3, 3])),
    (ValueError, "seq_lens must be .* on meta", dict(seq_lens=torch.ones(2, dtype=torch.int32, device="meta"))),
    *((ValueError, "^(sm|softmax)_scale must be in", dict(sm_scale=x)) for x in (math.nan, math.inf)),
    *((TypeError, "^(sm|softmax)_scale must be None or one real number", dict(sm_scale=x))
      for x in (torch.ones(3), torch.ones(0), torch.tensor(1j), 1j, [0.3], True, "0.3")),
    *((TypeError, "^causal must be a bool", dict(causal=x)) for x in (None, "yes", 1)),
    (TypeError, "^causal must be a bool, .* masks are called attn_bias", dict(causal=torch.ones(20, 20).bool())),
    *((ValueError, r"dropout_p must be in 0\.\.1", dict(dropout_p=p)) for p in (-0.1, 1.5, math.nan)),
    *((TypeError, "dropout_p must be a number", dict(dropout_p=p))
      for p in (True, False, "0.5", None, torch.tensor(0.5))),
    *((error, says, dict(dropout_p=0.5, dropout_seed=seed)) for error, says, seed in (
        (TypeError, "dropout_seed", SEED.to_sparse()), (TypeError, "dropout_seed", SEED.int()),
        (TypeError, "dropout_seed must be a torch.Tensor", 5),
        *((ValueError, "dropout_seed must be int64 of shape", x) for x in (
            torch.tensor([1, 2]), SEED[:0], SEED.to("meta"))),
        (ValueError, r"dropout_seed must be .* \(1 or 1 \+ 4 B,\) = \(9,\)", SEED.repeat(5)),
        *((ValueError, "the first row and the first key, multiples of 16", torch.tensor([5, 16, 32, 0, 0, *origin]))
          for origin in ([8, 16, 0, 0], [16, 8, 0, 0], [16, 16, -1, 0], [16, 16, 0, -1])))),
]
OF_LENGTHS = [
    (ValueError, "must both be given", dict(cu_seqlens_q=CU)),
    (TypeError, "cu_seqlens_q must be int32", dict(cu_seqlens_q=CU.long(), cu_seqlens_k=CU)),
    (ValueError, "cu_seqlens_k must be .* on meta", dict(cu_seqlens_q=CU, cu_seqlens_k=CU.to("meta"))),
    (ValueError, "cu_seqlens_k must be .* contiguous", dict(cu_seqlens_q=CU, cu_seqlens_k=ints(0, 1, 4, 5, 10)[::2])),
    (ValueError, r"cu_seqlens_q must be .* shape \(B \+ 1,\)", dict(cu_seqlens_q=CU[None], cu_seqlens_k=CU[None])),
    (ValueError, "B at least 1", dict(cu_seqlens_q=CU[:1], cu_seqlens_k=CU[:1])),
    (ValueError, "cu_seqlens_q must start at 0", dict(cu_seqlens_q=ints(1, 4, 10), cu_seqlens_k=CU)),
    (ValueError, "cu_seqlens_q.* within", dict(cu_seqlens_q=ints(0, 4, 11), cu_seqlens_k=CU)),
    (ValueError, "cu_seqlens_k.* within", dict(cu_seqlens_q=CU, cu_seqlens_k=ints(0, -1, 10))),
    (ValueError, "cu_seqlens_k must start at 0, ascend", dict(cu_seqlens_q=CU, cu_seqlens_k=ints(0, 8, 4))),
    (ValueError, "seqused_q must be in .* sample 0", dict(cu_seqlens_q=CU, cu_seqlens_k=CU, seqused_q=ints(5, 1))),
    (ValueError, "seqused_k must be in .* sample 1", dict(cu_seqlens_q=CU, cu_seqlens_k=CU, seqused_k=ints(10, 7))),
    (ValueError, "seqused_k must be .* of shape", dict(seqused_k=ints(1, 2))),
    (ValueError, "seqused_q must be in .* got -1", dict(seqused_q=ints(-1))),
    (ValueError, "seq_lens cannot", dict(seq_lens=[3], cu_seqlens_q=CU, cu_seqlens_k=CU)),
    *((TypeError, "window_size must be a pair of ints", dict(window_size=window)) for window in
      (3, (3,), (3.0, 0), (True, 0), "30", None, torch.tensor([3.0, 0.0]), torch.tensor([3, 0, 0]),
       (torch.tensor(True), 0), numpy.array([3.0, 0.0]))),
    (ValueError, "window_size must be at least -1", dict(window_size=(3, -2))),
    (ValueError, "max_seqlen_q must be at least 0", dict(max_seqlen_q=-1, cu_seqlens_q=CU, cu_seqlens_k=CU)),
    (TypeError, "max_seqlen_q must be", dict(max_seqlen_q=3.0, cu_seqlens_q=CU, cu_seqlens_k=CU)),
    (ValueError, "^attn_bias cannot be given with cu_seqlens",
     dict(cu_seqlens_q=CU, cu_seqlens_k=CU, attn_bias=torch.ones(10, 10).bool())),
    (ValueError, r"alibi_slopes must be .* of shape .*\(2,\) or .*\(2, 2\)",
     dict(cu_seqlens_q=CU, cu_seqlens_k=CU, alibi_slopes=SLOPES[None].cpu())),
]
OF_SCORES = [
    *((TypeError, "softcap must be a number", dict(softcap=x)) for x in (False, None, "2", SLOPES)),
    *((ValueError, "softcap must be in", dict(softcap=x)) for x in (-1.0, math.nan, math.inf)),
    (ValueError, "softcap must be 0 or at least 1e-30", dict(softcap=1e-40)),
    *((TypeError, "attention_chunk must be an int", dict(attention_chunk=x)) for x in (True, 2.5, None, ints(1, 2))),
    (ValueError, "attention_chunk must be at least 0, got -1", dict(attention_chunk=-1)),
    (TypeError, "alibi_slopes must be .* got a torch.float64", dict(alibi_slopes=SLOPES.double())),
    *((ValueError, r"alibi_slopes must be .* of shape .*\(4,\) or .*\(2, 4\)", dict(alibi_slopes=x))
      for x in (SLOPES[:2], SLOPES[None], SLOPES[0])),
    (ValueError, "alibi_slopes must be .* on meta", dict(alibi_slopes=SLOPES.to("meta"))),
    (ValueError, r"alibi_slopes has no gradient, but requires grad: pass alibi_slopes.detach\(\)",
     dict(alibi_slopes=SLOPES.clone().requires_grad_())),
    (TypeError, "attn_bias must be .* got a torch.int64", dict(attn_bias=BIAS.long())),
    (ValueError, "attn_bias must be .* on meta", dict(attn_bias=BIAS.to("meta"))),
    *((ValueError, r"attn_bias must .* broadcast to \(2, 4, 7, 9\)", dict(attn_bias=randn(*shape, device=DEVICE)))
      for shape in [(8,), (9, 7), (2, 7, 9), (3, 1, 7, 9), (), (1, 1, 1, 7, 9), (0, 9)]),
    (TypeError, "sinks must be .* got a torch.int64", dict(sinks=SINKS.long())),
    *((ValueError, r"sinks must be .* of shape .*\(4,\)", dict(sinks=x)) for x in (SINKS[:2], SINKS[None], SINKS[0])),
    (ValueError, "sinks must be .* on meta", dict(sinks=SINKS.to("meta"))),
]
OF_FLOAT64 = [
    (TypeError, "attn_bias must be .* got a torch.float32", dict(attn_bias=BIAS.cpu())),
    (TypeError, "sinks must be .* got a torch.float32", dict(sinks=SINKS.cpu())),
]
OF_SDPA = [
    (ValueError, "^attn_mask cannot be given with is_causal$", dict(attn_mask=MASK, is_causal=True)),
    (ValueError, r"^attn_mask must broadcast to \(2, 4, 5, 7\): .*\(7, 5\)", dict(attn_mask=MASK.mT)),
    (ValueError, r"^attn_mask must broadcast to \(2, 4, 5, 7\): .*\(1, 1, 1, 5, 7\)",
     dict(attn_mask=MASK[None, None, None])),
    (TypeError, "^key must be a torch.Tensor, got list", dict(key=[1.0])),
    (TypeError, "^is_causal must be a bool, got 1$", dict(is_causal=1)),
    (TypeError, "^scale must be None or one real number, got '1'", dict(scale="1")),
    (ValueError, "^dropout_p must be in", dict(dropout_p=1.5)),
    (ValueError, r"^query, key and value must have at least 2 dimensions: query is \(8,\)", dict(query=randn(8))),
    (ValueError, "^the leading dimensions must broadcast; heads need not with enable_gqa=True: query is",
     dict.fromkeys(("key", "value"), randn(2, 2, 7, 8))),
    (ValueError, "^the leading dimensions must broadcast", dict(query=randn(3, 4, 5, 8))),
    (ValueError, "^with enable_gqa=True, the number of query heads must be a multiple",
     dict(key=randn(2, 3, 7, 8), value=randn(2, 3, 7, 8), enable_gqa=True)),
    (ValueError, "^with enable_gqa=True", dict(query=randn(5, 8), key=randn(7, 8), value=randn(7, 8), enable_gqa=True)),
    (ValueError, "q and k must have the same head_dim", dict.fromkeys(("key", "value"), randn(2, 4, 7, 9))),
]
OF_VARLEN = [
    (ValueError, "^out must", dict(out=randn(45, 2, 40))),
    (ValueError, "^out cannot be given where gradients",
     dict(q=randn(42, 4, 40).requires_grad_(), out=randn(42, 4, 40))),
    (ValueError, "cu_seqlens_q must be given", dict(cu_seqlens_q=None)),
    (ValueError, r"^flash_attn_varlen_func: q must be \(T, H, D\)", dict(q=randn(1, 42, 4, 40))),
    (ValueError, "needs a page table", dict(cu_seqlens_k=None, seqused_k=ints(1, 2, 3))),
]
OF_ROWS_FIRST = [(TypeError, "k must be a torch.Tensor, got list", dict(k=[1.0])),
                 (ValueError, r"v must be \(B, S, H, D\), got", dict(v=Q[0]))]
OF_PARTS = [(ValueError, "kv must be", {name: randn(1, 7, 4, 16)}) for name in ("kv", "qkv")]
OF_MODULE = [
    (ValueError, "embed_dim must be a multiple of num_heads 5, got 64", dict(num_heads=5)),
    (ValueError, "num_heads must be a multiple of num_heads_k 3, got 4", dict(num_heads_k=3)),
    (ValueError, "Unsupported head_dim 272 .*: 1 to 256", dict(embed_dim=4 * 272)),
    *((ValueError, f"{name} must be at least 1, got {n}", {name: n}) for name, n in (
        ("embed_dim", 0), ("num_heads", -4), ("num_heads_k", 0))),
    *((ValueError, r"dropout must be in 0\.\.1", dict(dropout=x)) for x in (-0.1, math.nan)),
    (ValueError, "unknown backend", dict(backend=["cuda"])),
    (TypeError, "causal must be a bool, got None", dict(causal=None)),
    (ValueError, "window_size must be", dict(window_size=(3, -2))),
    *((TypeError, "window_size must be", dict(window_size=x)) for x in ((1,), 3)),
]
OF_ROWS = [
    (TypeError, "hidden_states must be", dict(hidden_states=3)),
    (TypeError, "batch must be", dict(batch=True)),
    (TypeError, "seqlen must be", dict(seqlen=4.0)),
    (ValueError, "batch must be at least 0", dict(batch=-1, seqlen=-4)),
    (TypeError, "indices must be int64", dict(indices=ints(0, 1, 2, 3))),
    (ValueError, "indices must be", dict(indices=torch.arange(3))),
    (ValueError, r"3 rows: hidden_states is \(4, 5\)", dict(batch=1)),
]
OF_BLOCKS = [
    (ValueError, "block_size must be at least 1", dict(block_size=0)),
    (ValueError, "dropout_p must be in", dict(dropout_p=1.5)),
    (ValueError, r"shape \(B, N, D\)", dict.fromkeys("qkv", Q)),
]
OF_BACKENDS = [(ValueError, "unknown backend .*: one of 'auto', 'cuda', 'triton'", dict(backend=x))
               for x in ("cudnn", ["cuda"], None)]
OURS = flash_attention, reference_attention, which_kernel


OF_SCORE_MOD = [
    (TypeError, "score_mod must be a function of score, b, h, q_idx and kv_idx, or None, got 3", dict(score_mod=3)),
    *((ValueError, f"score_mod cannot be given with {name}", {name: x, "score_mod": plain_score})
      for name, x in dict(softcap=2.0, alibi_slopes=SLOPES, attn_bias=BIAS).items()),
]


def by_flash_attn(q, k, v, causal=False, sm_scale=None, dropout_p=0, dropout_seed=None, **scores):
    """flash_attn_func, with our names and layout."""
    return flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), dropout_p, sm_scale, causal,
                           dropout_seed=dropout_seed, **scores)


CASES = [(function, given, *row) for functions, given, rows in [
    (OURS, "alike", OF_TENSORS), (OURS, "one_sample", OF_LENGTHS), (OURS, "grouped", OF_SCORES),
    (OURS[:2], "grouped", OF_SCORE_MOD), (OURS[:2], "float64", OF_FLOAT64),
    ((scaled_dot_product_attention,), "sdpa", OF_SDPA),
    ((flash_attn_func,), "alike", OF_ROWS_FIRST), ((flash_attn_varlen_func,), "varlen", OF_VARLEN),
    ((flash_attn_kvpacked_func,), "kv", OF_PARTS[:1]),
    ((flash_attn_varlen_qkvpacked_func,), "qkv", OF_PARTS[1:]), ((FlashMHA,), "module", OF_MODULE),
    ((pad_input,), "rows", OF_ROWS), ((blockwise_attention,), "flat", OF_BLOCKS), (OURS[:1], "alike", OF_BACKENDS),
    ((by_flash_attn,), "alike", [row for row in OF_TENSORS if not {*"qkv", "seq_lens"} & {*row[2]}]),
    ((by_flash_attn,), "grouped", [row for row in OF_SCORES if "attn_bias" not in row[2]])]
    for row in rows for function in functions
    if function is not which_kernel or "dropout_seed" not in row[2]]


# Functions that kernels cannot have, behind the text of their error.
TABLE, COMPLEX = randn(4, 9), randn(4).to(torch.complex64)


def with_if(score, b, h, q_idx, kv_idx):
    if q_idx > kv_idx:
        score = -score
    return score


def in_place(score, b, h, q_idx, kv_idx):
    score += h
    return score


def without_result(score, b, h, q_idx, kv_idx):
    score = score + h


UNTRANSLATED = [
    ("If is not allowed, write torch.where", with_if),
    (r"AugAssign is not allowed, which changes tensors in place, write x = x \+ y", in_place),
    ("without_result.*: it returns nothing", without_result),
    ("IfExp is not allowed, write torch.where", lambda s, b, h, q, k: s if q > k else -s),
    (r"BoolOp is not allowed, write & or \|", lambda s, b, h, q, k: torch.where(q > k and h > 1, s, -s)),
    ("UnaryOp is not allowed, write ~", lambda s, b, h, q, k: torch.where(not q, s, -s)),
    ("write two comparisons with & between them", lambda s, b, h, q, k: torch.where(b < q < k, s, -s)),
    ("erf.* is no function that kernels have", lambda s, b, h, q, k: torch.erf(s)),
    ("plain_score.* is no function that kernels have", lambda s, b, h, q, k: plain_score(s, b, h, q, k)),
    ("there is no method sum", lambda s, b, h, q, k: s.sum()),
    ("assign what it is to a name outside of the function", lambda s, b, h, q, k: s / TABLE.shape[0]),
    (r"TABLE, a torch.float32 tensor of shape \(4, 9\), needs 2 indices and has 1", lambda s, b, h, q, k: s + TABLE[q]),
    ("Slice is not allowed, index each dimension", lambda s, b, h, q, k: s + TABLE[:, q]),
    ("a float stands where only whole numbers may", lambda s, b, h, q, k: s + TABLE[s, q]),
    ("a whole number stands where only a bool may", lambda s, b, h, q, k: torch.where(q & k, s, -s)),
    ("it is for numbers alone: write torch.maximum", lambda s, b, h, q, k: max(s, q)),
    ("it is for numbers alone: write torch.exp", lambda s, b, h, q, k: math.exp(s)),
    ("the exponent of a power must be", lambda s, b, h, q, k: s ** q),
    ("only captured tensors have indices", lambda s, b, h, q, k: s[q]),
    ("it takes 3 arguments", lambda s, b, h, q, k: torch.where(q > k)),
    ("it takes input, min, max", lambda s, b, h, q, k: s.clamp(0, 1, 2)),
    ("missing is not defined", lambda s, b, h, q, k: s + missing),  # noqa: F821
]


@pytest.mark.parametrize("says, f", UNTRANSLATED)
def test_score_mods_that_kernels_cannot_have(says, f):
    with pytest.raises(NotImplementedError, match=says) as caught:
        read(f)
    first = f.__code__.co_firstlineno
    assert re.search("test_errors.py, line (\\d+): `", str(caught.value))[1] in {str(first), str(first + 1)}
    assert "allowed are assignments" in str(caught.value)


@pytest.mark.parametrize("says, f", [
    ("must be a plain function of Python", math.exp), ("must be a plain function of Python", torch.nn.Tanh()),
    (r"must be a function of score, .* got one of \(s, b, h, q\)", lambda s, b, h, q: s),
    ("must be a function of score", lambda *args: args[0]),
    ("COMPLEX, which score_mod captures, must be .* got a torch.complex64", lambda s, b, h, q, k: s + COMPLEX[h]),
])
def test_score_mods_of_a_wrong_type(says, f):
    with pytest.raises(TypeError, match=says):
        read(f)


def test_score_mods_without_a_source():
    f, pair = eval("lambda s, b, h, q, k: s"), [lambda s, b, h, q, k: s, lambda s, b, h, q, k: -s]
    with pytest.raises(NotImplementedError, match="score_mod has no source that could be read"):
        read(f)
    with pytest.raises(NotImplementedError, match="several lambdas stand in line"):
        read(pair[0])


def name_of(x):
    return getattr(x, "__name__", None) or "-".join(x) if isinstance(x, dict) or callable(x) else None


@pytest.mark.parametrize("function, given, error, says, change", CASES, ids=name_of)
def test_bad_input(function, given, error, says, change):
    with pytest.raises(error, match=says):
        function(**GIVEN[given] | change)


@pytest.mark.parametrize("function, given", dict.fromkeys(case[:2] for case in CASES), ids=name_of)
def test_good_input(function, given):
    function(**GIVEN[given])
