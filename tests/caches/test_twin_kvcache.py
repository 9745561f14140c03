"""Attention to a cache of keys and values in Triton: how keys are split, bits, and what the facade hides from its op.

test_kvcache.py has its results.
"""

import math

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from cached_calls import DEVICE, Call, check_call, close, ints, make, on_device  # noqa: E402
from cases import make_tensor  # noqa: E402
from conftest import captured, needs_gib  # noqa: E402

from minimal_attn import attention_with_kvcache  # noqa: E402
from minimal_attn.backends.reference import BACKEND as REFERENCE  # noqa: E402
from minimal_attn.options import Cache, Lengths, Options  # noqa: E402
from minimal_attn.reference.pages import over_gathered  # noqa: E402
from minimal_attn.reference.tree_mask import pack_tree_mask  # noqa: E402
from triton_ref import decode, ops  # noqa: E402

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
reference = over_gathered(REFERENCE.forward)


def on_triton(call, dtype=torch.float32):
    """The tensors of a call, and the arguments that attention_with_kvcache takes beside them."""
    *qkv, given = make(call, dtype)
    given = {name: on_device(x) for name, x in given.items()}
    return [on_device(x) for x in qkv], dict(given, **call.options(), return_lse=True, backend="triton")


def test_head_dims_and_strides_that_tensor_cores_cannot_load():
    """Rows of 17 elements, at any address."""
    call = Call("odd", (2,) * 2, (150, 67), 155, D=17, head_dim_v=70, causal=True)
    check_call("triton", call, torch.float32)
    (q, k, v), options = on_triton(call)
    odd = [make_tensor(x.shape, x.dtype, DEVICE, "odd").copy_(x) for x in (q, k, v)]
    for got, want in zip(attention_with_kvcache(*odd, **options), attention_with_kvcache(q, k, v, **options)):
        assert got.equal(want)


@pytest.mark.parametrize("num_splits, splits", [(0, [3, 1, 2]), (2, [2, 1, 2]), (1, None)])
def test_keys_are_split_by_their_number(num_splits, splits, monkeypatch):
    """Partial results that _decode does not store stay NaN."""
    stored = []

    class Launch(decode.Launch):
        def __call__(self, *arguments):
            super().__call__(*arguments)
            stored.append(arguments[5][2] if self.function is decode._decode else None)

    monkeypatch.setattr(decode, "Launch", Launch)
    monkeypatch.setattr(decode, "_plans", {})
    qkv, options = on_triton(Call("any", (1,) * 3, (190, 64, 65), 195, num_splits=num_splits))
    attention_with_kvcache(*qkv, **options)
    if splits is None:
        assert stored == [None]  # one kernel, without partial results
    else:
        assert len(stored) == 2
        is_stored = ~stored[0].isnan()  # (B, Hk, max_splits, rows)
        assert is_stored.sum(2).eq(ints(*(n if n > 1 else 0 for n in splits))[:, None, None]).all()


@pytest.mark.parametrize("call", [
    Call("decode", (1,) * 4, (190, 30, 300, 65), 16, is_paged=True, has_sinks=True),
    Call("packed", (1, 6, 0, 3), (190, 30, 100, 65), 16, is_paged=True, is_packed=True, causal=True),
    Call("windows", (2,) * 4, (190, 30, 100, 65), 3, is_paged=True, window=(90, 0))], ids=str)
def test_a_sample_has_the_same_bits_in_every_batch(call):
    """Also where the cache has more room."""
    (q, k, v), options = on_triton(call)
    out, lse = attention_with_kvcache(q, k, v, **options)
    for b, (rows, keys) in enumerate(zip(call.rows, call.keys)):
        begin, num_pages = sum(call.rows[:b]), -(-keys // call.size)
        own = (slice(1), slice(None), slice(begin, begin + rows)) if call.is_packed else slice(b, b + 1)
        alone = dict(options, seqused_k=ints(keys), page_table=options["page_table"][b:b + 1, :num_pages])
        if call.is_packed:
            alone |= dict(cu_seqlens_q=ints(0, rows), max_seqlen_q=max(call.rows))
        for got, want in zip(attention_with_kvcache(q[own], k, v, **alone), (out[own], lse[own])):
            assert torch.equal(got, want), b


@pytest.mark.parametrize("sizes", [(0, 16, 3), (4, 0, 3), (4, 16, 0), (0, 16, None), (4, 0, None)], ids=str)
def test_the_op_takes_caches_without_keys(sizes):
    """num_sequences, page_size, max_pages: none of them, or one of sequences."""
    num_sequences, size, max_pages = sizes
    q, k, v = torch.randn(2, 4, 1, 16, device=DEVICE), *torch.randn(2, num_sequences, 2, size, 16, device=DEVICE)
    cache = Cache(None if max_pages is None else ints(*[1] * 2 * max_pages).view(2, max_pages))
    out, lse = ops.forward_cached(q, k, v, Options.of(0.3), cache)
    assert (out == 0).all() and (lse == -math.inf).all()


def test_the_op_takes_calls_without_rows():
    q, k, v = (torch.randn(n, 2, 8, 16, device=DEVICE) for n in (2, 2, 2))
    for x in (q[:0], q[:, :, :0]):
        out, lse = ops.forward_cached(x, k, v, Options.of(0.3), Cache())
        assert out.shape == x.shape and lse.shape == x.shape[:3]


def test_a_wrong_cu_seqlens_reads_nothing_outside():
    call = Call("any", (2, 1, 2), (21,) * 3, 7, is_paged=True, is_packed=True)
    (q, k, v), options = on_triton(call)
    lengths = Lengths(ints(1, 2, 900, 4))
    inputs = (*(x.nan_to_num(0.5) for x in (q, k, v)), Options.of(0.3, lengths=lengths),
              Cache(options["page_table"], max_seqlen_q=2))
    for got, want in zip(ops.forward_cached(*inputs), reference(*inputs)):
        close(got, want.double().cpu(), 2e-5)


@pytest.mark.parametrize("call", [
    Call("dense", (3, 3), (70, 3), 75, has_batch_idx=True),
    Call("pages", (2, 2), (69, 3), 16, is_paged=True, leftpad=(1, 0), head_dim_v=24, has_sinks=True),
    Call("packed", (2, 1), (70, 3), 16, is_paged=True, is_packed=True, slopes="heads")], ids=str)
def test_opcheck(call):
    (q, k, v), given = on_triton(call)
    tree = None if call.is_paged else pack_tree_mask(torch.eye(3, dtype=torch.bool)).repeat(2, 1).to(DEVICE)
    torch.library.opcheck(torch.ops.minimal_attn.triton_decode.default, (
        *(x.nan_to_num(0.5) for x in (q, k, v)), given.get("cu_seqlens_q"), None, given["seqused_k"],
        given.get("page_table"), given.get("cache_batch_idx"), given.get("leftpad_k"), tree, given.get("sinks"),
        given.get("alibi_slopes"), 0.25, 0.0, -1, -1, 0, given.get("max_seqlen_q", 0)))


@pytest.mark.gpu
def test_graph_serves_other_lengths_and_tables():
    call = Call("any", (1,) * 3, (900, 3, 900), 16, is_paged=True)
    (q, k, v), options = on_triton(call, torch.float16)
    graph, (out, _) = captured(lambda: attention_with_kvcache(q, k, v, **options))
    options["seqused_k"].copy_(ints(64, 0, 900))
    options["page_table"].copy_(options["page_table"].flip(0))  # the first and the last sample change places
    graph.replay()
    want = attention_with_kvcache(*(x.double() for x in (q, k, v)), **dict(options, backend="reference"))[0]
    close(out, want.cpu(), 3e-3)


@pytest.mark.gpu
@needs_gib(24)
@pytest.mark.parametrize("is_paged", [False, True])
def test_cache_beyond_int32(is_paged, much_memory):
    """The last sequence, or page, begins beyond 2^31 elements."""
    k = torch.empty(2**12 + 8, 8, 1024, 64, dtype=torch.float16, device=DEVICE)
    k[-1] = torch.randn(k.shape[1:], device=DEVICE)
    last = k.shape[0] - 1
    q = torch.randn(1, 8, 1, 64, dtype=torch.float16, device=DEVICE)
    cache = Cache(ints(last).view(1, 1)) if is_paged else Cache(None, ints(last))
    want = reference(q.double(), k[-1:].double(), k[-1:].double(), Options.of(0.3), Cache())[0]
    close(ops.forward_cached(q, k, k, Options.of(0.3), cache)[0], want.cpu(), 3e-3)
