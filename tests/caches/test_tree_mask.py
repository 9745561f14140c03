"""Tree masks of speculative decoding: every backend against a loop over rows in fp64, the causal mask as a tree, drafts
that are drawn, and packed words."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

from cached_calls import BACKENDS, DEVICE, TOLERANCE, Call, by_loop, check_call, close, make, on_device
from cases import check_drawn
from conftest import HAS_GPU, captured
from minimal_attn import attention as interface, attention_with_kvcache, pack_tree_mask

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


EACH = torch.stack([BRANCHES, CAUSAL, ~CAUSAL])  # the last one hides all new keys of some rows
PARENTS = torch.arange(64) - 1 - torch.randint(3, (64,), generator=torch.Generator().manual_seed(0))
CALLS = [Call("branches", (5,) * 3, (90, 3, 70), 95, tree=BRANCHES),  # the second sample has fewer keys than rows
         Call("leftpad", (5,) * 3, (83, 3, 69), 95, leftpad=(7, 0, 1), tree=BRANCHES),
         Call("seqused_q", (5,) * 3, (90, 3, 70), 95, seqused_q=(5, 0, 3), tree=EACH),
         Call("splits", (5,) * 3, (90, 3, 70), 95, num_splits=2, tree=EACH),
         # Bit 63 of a word, more rows than a tile has, and keys that are split.
         Call("draft_of_64", (64,) * 2, (185, 46), 190, leftpad=(5, 20), seqused_q=(64, 33), num_splits=3,
              tree=draft(PARENTS.clamp(min=-1).tolist()))]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_against_a_loop(call, backend):
    check_call(backend, call, BACKENDS[backend])


@st.composite
def drawn_calls(draw):
    rows, keys = draw(st.integers(1, 20)), draw(st.tuples(*[st.integers(0, 60)] * 2))
    density = torch.rand(2, rows, rows, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return Call("drawn", (rows,) * 2, keys, 80, leftpad=draw(st.none() | st.tuples(*[st.integers(0, 20)] * 2)),
                seqused_q=draw(st.none() | st.tuples(*[st.integers(0, rows)] * 2)), tree=density < 0.4)


def test_drawn_masks(backend):
    is_interpreted = backend == "triton" and not HAS_GPU
    check_drawn(lambda call: check_call(backend, call, BACKENDS[backend]), 0, 5 if is_interpreted else 40,
                call=drawn_calls())


def inputs(call, dtype):
    """(q, k_cache, v_cache) and the other tensors of a call, on the device."""
    *qkv, given = make(call, dtype)
    return [on_device(x) for x in qkv], {name: on_device(x) for name, x in given.items()}


def test_causal_as_a_tree_has_the_same_bits(backend):
    qkv, given = inputs(replace(CALLS[0], tree=CAUSAL), BACKENDS[backend])
    options = dict(return_lse=True, backend=backend)
    got = attention_with_kvcache(*qkv, **given, **options)
    del given["tree_mask"]
    assert all(map(torch.equal, got, attention_with_kvcache(*qkv, **given, causal=True, **options)))


def test_new_keys_are_appended_to_pages(backend):
    """A draft in one call, beside one whose keys were there already."""
    (q, k, v), given = inputs(Call("any", (5,) * 3, (9, 5, 33), 4, is_paged=True, has_sinks=True, tree=BRANCHES),
                              BACKENDS[backend])
    want = attention_with_kvcache(q, k, v, **given, return_lse=True, backend=backend)
    ends, new = given.pop("seqused_k"), []
    for x in (k, v):
        rows = [[(given["page_table"][b, (end - 5 + t) // 4], (end - 5 + t) % 4) for t in range(5)]
                for b, end in enumerate(ends.tolist())]
        new.append(torch.stack([torch.stack([x[page, :, row] for page, row in places], 1) for places in rows]))
        for page, row in sum(rows, []):
            x[page, :, row] = math.nan
    got = attention_with_kvcache(q, k, v, ends - 5, k=new[0], v=new[1], **given, return_lse=True, backend=backend)
    assert all(map(torch.equal, got, want))


def test_words_are_served_as_masks(backend):
    qkv, given = inputs(replace(CALLS[0], tree=EACH), BACKENDS[backend])
    masks = given.pop("tree_mask")
    for mask in (masks, masks[0]):
        words = pack_tree_mask(mask)
        strided = torch.stack([words, words], -1)[..., 0]
        want = attention_with_kvcache(*qkv, **given, tree_mask=mask, backend=backend)
        for x in (words, strided):
            assert attention_with_kvcache(*qkv, **given, tree_mask=x, backend=backend).equal(want)


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


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_graph_serves_other_trees(backend):
    qkv, given = inputs(CALLS[0], torch.float16)
    words = given["tree_mask"] = pack_tree_mask(given["tree_mask"]).repeat(3, 1)
    graph, (out, _) = captured(lambda: attention_with_kvcache(*qkv, **given, return_lse=True, backend=backend))
    words.copy_(pack_tree_mask(CAUSAL))
    graph.replay()
    causal = replace(CALLS[0], tree=CAUSAL)
    close(out, by_loop(causal, *make(causal, torch.float16))[0], TOLERANCE[torch.float16])
