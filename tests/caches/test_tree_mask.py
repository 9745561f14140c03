"""Tree masks of speculative decoding: every backend against a loop over rows in fp64, the causal mask as a tree, drafts
that are drawn, packed words, and one error for every bad input."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from conftest import HAS_GPU, captured
from minimal_attn import attention as interface, attention_with_kvcache, pack_tree_mask
from cached_calls import BACKENDS, DEVICE, TOLERANCE, Call, close, ints, make, on_device

cpu = pytest.mark.cpu


@pytest.fixture(params=BACKENDS)
def backend(request):
    assert interface.BACKENDS[request.param].why_not(torch.device(DEVICE)) is None  # loads it
    return request.param


def draft(parents):
    """bool (Sq, Sq) of tokens with these parents, which are tokens before them or -1 for none."""
    is_seen = torch.eye(len(parents), dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            is_seen[token] |= is_seen[parent]
    return is_seen


CAUSAL = draft(range(-1, 4))  # five tokens in one branch
BRANCHES = draft([-1, 0, 0, 1, 2])


def by_loop(q, k, v, lengths, tree_mask, seqused_q=None, leftpad=None):
    """(out, lse) of dense caches in fp64, a row at a time."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    out, lse = q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_full(q.shape[:3], -math.inf)
    for b in range(q.shape[0]):
        rows = q.shape[2] if seqused_q is None else seqused_q[b]
        begin = 0 if leftpad is None else leftpad[b]
        is_seen = tree_mask if tree_mask.ndim == 2 else tree_mask[b]
        for i in range(rows):
            seen = [key for key in range(begin, lengths[b])
                    if key < lengths[b] - rows or is_seen[i, key - (lengths[b] - rows)]]
            for h in range(q.shape[1] if seen else 0):
                scores = k[b, h // group, seen] @ q[b, h, i] / math.sqrt(q.shape[-1])
                lse[b, h, i] = scores.logsumexp(0)
                out[b, h, i] = (scores - lse[b, h, i]).exp() @ v[b, h // group, seen]
    return out, lse


def tensors(dtype, rows, size, batch_size=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch_size, n, s, 16, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
            for n, s in ((4, rows), (2, size), (2, size))]


def check(backend, q, k, v, lengths, tree_mask, seqused_q=None, leftpad=None, **options):
    want, want_lse = by_loop(*(x.cpu() for x in (q, k, v)), lengths, tree_mask, seqused_q, leftpad)
    given = {name: ints(*x) for name, x in (("seqused_q", seqused_q), ("leftpad_k", leftpad)) if x is not None}
    out, lse = attention_with_kvcache(q, k, v, ints(*lengths), tree_mask=tree_mask.to(DEVICE), return_lse=True,
                                      backend=backend, **given, **options)
    close(out, want, TOLERANCE[q.dtype])
    close(lse, want_lse, 1e-10 if q.dtype == torch.float64 else 1e-5)


EACH = torch.stack([BRANCHES, CAUSAL, ~CAUSAL])


@pytest.mark.parametrize("tree_mask, more", [
    (BRANCHES, {}), (BRANCHES, dict(leftpad=(7, 0, 1))), (EACH, dict(seqused_q=(5, 0, 3))), (EACH, dict(num_splits=2))])
def test_against_a_loop(tree_mask, more, backend):
    """The second sample has fewer keys than rows, and the last of EACH hides all new keys of some rows."""
    check(backend, *tensors(BACKENDS[backend], 5, 90), (90, 3, 70), tree_mask, **more)


def test_drafts_of_64_tokens(backend):
    """Bit 63 of a word, more rows than a tile has, and keys that are split."""
    parents = torch.arange(64) - 1 - torch.randint(3, (64,), generator=torch.Generator().manual_seed(0))
    check(backend, *tensors(BACKENDS[backend], 64, 190, 2), (190, 66), draft(parents.clamp(min=-1).tolist()), (64, 33),
          (5, 20), num_splits=3)


def test_drawn_masks(backend):
    is_interpreted = backend == "triton" and not HAS_GPU

    @settings(max_examples=5 if is_interpreted else 40, database=None, deadline=None, derandomize=True,
              suppress_health_check=[HealthCheck.too_slow])
    @given(rows=st.integers(1, 20), seed=st.integers(0, 99), data=st.data())
    def check_drawn(rows, seed, data):
        used = st.integers(0, rows)
        lengths = data.draw(st.tuples(*[st.integers(0, 80)] * 2))
        seqused_q = data.draw(st.none() | st.tuples(used, used))
        leftpad = data.draw(st.none() | st.tuples(*(st.integers(0, n) for n in lengths)))
        density = torch.rand(2, rows, rows, generator=torch.Generator().manual_seed(seed))
        check(backend, *tensors(BACKENDS[backend], rows, 80, 2, seed), lengths, density < 0.4, seqused_q, leftpad)

    check_drawn()


def test_causal_as_a_tree_has_the_same_bits(backend):
    inputs = *tensors(BACKENDS[backend], 5, 90), ints(90, 3, 66)
    options = dict(return_lse=True, backend=backend)
    got = attention_with_kvcache(*inputs, tree_mask=CAUSAL.to(DEVICE), **options)
    assert all(map(torch.equal, got, attention_with_kvcache(*inputs, causal=True, **options)))


def test_new_keys_are_appended_to_pages(backend):
    """A draft in one call, beside one whose keys were there already."""
    call = Call("any", (5,) * 3, (9, 5, 33), 4, is_paged=True, has_sinks=True)
    q, k, v, given = make(call, BACKENDS[backend])
    q, k, v, given = on_device(q), on_device(k), on_device(v), {name: on_device(x) for name, x in given.items()}
    options = dict(tree_mask=BRANCHES.to(DEVICE), return_lse=True, backend=backend)
    want = attention_with_kvcache(q, k, v, **given, **options)
    ends, new = given.pop("seqused_k"), []
    for x in (k, v):
        rows = [[(given["page_table"][b, (end - 5 + t) // 4], (end - 5 + t) % 4) for t in range(5)]
                for b, end in enumerate(ends.tolist())]
        new.append(torch.stack([torch.stack([x[page, :, row] for page, row in places], 1) for places in rows]))
        for page, row in sum(rows, []):
            x[page, :, row] = math.nan
    got = attention_with_kvcache(q, k, v, ends - 5, k=new[0], v=new[1], **given, **options)
    assert all(map(torch.equal, got, want))


def test_words_are_served_as_masks(backend):
    masks = EACH.to(DEVICE)
    inputs = *tensors(BACKENDS[backend], 5, 40), ints(40, 9, 30)
    for mask in (masks, masks[0]):
        words = pack_tree_mask(mask)
        strided = torch.stack([words, words], -1)[..., 0]
        want = attention_with_kvcache(*inputs, tree_mask=mask, backend=backend)
        for given in (words, strided):
            assert attention_with_kvcache(*inputs, tree_mask=given, backend=backend).equal(want)


@cpu
def test_pack_tree_mask():
    assert pack_tree_mask(BRANCHES).tolist() == [0b00001, 0b00011, 0b00101, 0b01011, 0b10101]
    assert pack_tree_mask(torch.ones(64, 64).bool()).eq(-1).all()
    last = torch.zeros(2, 64, 64).bool()
    last[1, 3, 63] = True
    words = pack_tree_mask(last)
    assert (words.shape, words.dtype, words.is_contiguous()) == ((2, 64), torch.int64, True)
    assert words[1, 3] == -2**63 and words.count_nonzero() == 1
    assert pack_tree_mask(torch.ones(0, 0).bool()).shape == (0,)


@cpu
@pytest.mark.parametrize("error, match, mask", [
    (TypeError, "tree_mask must be a torch.Tensor, got list", [True]),
    (TypeError, "tree_mask must be bool .* got a torch.float32", torch.ones(2, 2)),
    (ValueError, r"tree_mask must be .*\(Sq, Sq\).* got .*\(3,\)", torch.ones(3).bool()),
    (ValueError, r"tree_mask must be .*\(Sq, Sq\).* got .*\(2, 3\)", torch.ones(2, 3).bool()),
    (ValueError, "tree_mask serves up to 64 rows, got 65", torch.ones(65, 65).bool()),
])
def test_pack_tree_mask_bad_input(error, match, mask):
    with pytest.raises(error, match=match):
        pack_tree_mask(mask)


def arguments(**change):
    q, k, v = (torch.randn(2, n, s, 16) for n, s in ((4, 5), (2, 20), (2, 20)))
    return dict(q=q, k_cache=k, v_cache=v, seqused_k=ints(20, 9, device="cpu"), tree_mask=BRANCHES) | change


@cpu
@pytest.mark.parametrize("error, match, change", [
    (TypeError, "tree_mask must be a torch.Tensor, got list", dict(tree_mask=[1])),
    (TypeError, "tree_mask must be bool or int64 .* got a torch.int32",
     dict(tree_mask=BRANCHES.int())),
    (ValueError, "tree_mask must be .* on meta", dict(tree_mask=BRANCHES.to("meta"))),
    (ValueError, r"tree_mask must be .* got a torch.bool tensor of shape \(3, 5, 5\)",
     dict(tree_mask=BRANCHES.expand(3, 5, 5))),
    (ValueError, r"tree_mask must be .* got a torch.bool tensor of shape \(5, 20\)",
     dict(tree_mask=torch.ones(5, 20).bool())),
    (ValueError, r"tree_mask must be .* got a torch.int64 tensor of shape \(5, 5\)",
     dict(tree_mask=BRANCHES.long())),
    (ValueError, "tree_mask serves up to 64 rows, got 65",
     dict(q=torch.randn(2, 4, 65, 16), tree_mask=torch.ones(65, 65).bool())),
    (ValueError, "causal=True cannot be given together with tree_mask, which takes its place", dict(causal=True)),
    (NotImplementedError, "window_size is not supported together with tree_mask", dict(window_size=(4, 0))),
    (NotImplementedError, "alibi_slopes is not supported together with tree_mask", dict(alibi_slopes=torch.ones(4))),
    (NotImplementedError, "cu_seqlens_q is not supported together with tree_mask",
     dict(q=torch.randn(1, 4, 10, 16), cu_seqlens_q=ints(0, 5, 10, device="cpu"))),
    (NotImplementedError, "rotary_cos is not supported together with tree_mask: rotate q and k by the depths",
     dict(k=torch.randn(2, 2, 5, 16), v=torch.randn(2, 2, 5, 16), seqused_k=ints(15, 9, device="cpu"),
          rotary_cos=torch.ones(20, 8), rotary_sin=torch.ones(20, 8))),
])
def test_bad_input(error, match, change):
    """Nothing is written before."""
    attention_with_kvcache(**arguments())
    given = arguments(**change)
    before = given["k_cache"].clone()
    with pytest.raises(error, match=match):
        attention_with_kvcache(**given)
    assert given["k_cache"].equal(before)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_compiles_fullgraph(backend):
    inputs = *tensors(BACKENDS[backend], 5, 40), ints(40, 9, 30)

    def attend(q, k, v, lengths, tree_mask):
        return attention_with_kvcache(q, k, v, lengths, tree_mask=tree_mask, return_lse=True, backend=backend)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(*inputs, BRANCHES.to(DEVICE)), attend(*inputs, BRANCHES.to(DEVICE))):
        assert_close(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_graph_serves_other_trees(backend):
    inputs, lengths = tensors(torch.float16, 5, 150), (150, 30, 70)
    words, seqused_k = pack_tree_mask(BRANCHES).repeat(3, 1).to(DEVICE), ints(*lengths)
    graph, (out, _) = captured(lambda: attention_with_kvcache(*inputs, seqused_k, tree_mask=words, return_lse=True,
                                                              backend=backend))
    words.copy_(pack_tree_mask(CAUSAL))
    graph.replay()
    close(out, by_loop(*(x.cpu() for x in inputs), lengths, CAUSAL)[0], TOLERANCE[torch.float16])
