"""The rows that each rank holds, the keys that they see in each call, and the method that "auto" takes."""

import itertools
import random

import pytest
import torch
from torch.distributed.tensor.experimental import context_parallel

import ranks
from minimal_attn.distributed import attention, shard, shard_labels, shard_positions, unshard
from minimal_attn.distributed.calls import LONG, Document, calls_of, length
from minimal_attn.distributed.layout import Chunk, Shards
from minimal_attn.distributed.padding import dropout_padding
from minimal_attn.options import Options
from minimal_attn.reference.scores import visible_keys

pytestmark = pytest.mark.cpu


@ranks.in_group(3)
def shards_in_rank(group, layout):
    """Every rank compares, and gives its positions."""
    for seqlen in (1, 5, 6, 12, 17):
        x = torch.randn(2, seqlen, 3, generator=torch.Generator().manual_seed(0))
        local = shard(x, group, 1, layout)
        assert local.shape == (2, -(-seqlen // (6 if layout == "zigzag" else 3)) * (2 if layout == "zigzag" else 1), 3)
        assert torch.equal(unshard(local, group, 1, layout, seqlen), x)
        assert unshard(local, group, 1, layout).shape[1] == 3 * local.shape[1]
        assert torch.equal(shard(x.transpose(0, 1), group, -3, layout), local.transpose(0, 1))
        positions = shard_positions(seqlen, group, layout)
        is_valid = shard(torch.ones(seqlen, dtype=torch.bool), group, 0, layout)
        assert torch.equal(x[:, positions[is_valid]], local[:, is_valid])
        assert not local[:, ~is_valid].any() and not positions[~is_valid].any()
        tokens = torch.arange(100, 100 + seqlen).expand(2, -1)
        labels = shard_labels(tokens, group, layout)
        is_last = positions == seqlen - 1
        assert torch.equal(labels, (positions + 101).masked_fill(~is_valid | is_last, -100).expand(2, -1))
    x = torch.randn(2, 7, 3, requires_grad=True)
    shard(x, group, 1, layout).sum().backward()
    for error, match, tokens in ((TypeError, "int64 .* got a torch.uint8", torch.zeros(1, 7, dtype=torch.uint8)),
                                 (ValueError, r"int64 of shape \(B, S\), .* got .*\(7,\)", torch.arange(7))):
        with pytest.raises(error, match=f"tokens must be {match}"):
            shard_labels(tokens, group, layout)
    return shard(torch.arange(12), group, 0, layout).tolist(), x.grad[0, :, 0].tolist()


@pytest.mark.parametrize("layout, wanted", [("zigzag", [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
                                            ("contiguous", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]])])
def test_shards_are_those_of_the_layout(four, layout, wanted):
    _, *results = four.run(shards_in_rank, layout)
    assert [held for held, _ in results] == wanted
    assert torch.tensor([gradient for _, gradient in results]).sum(0).tolist() == [1] * 7


def torchs_order_in_rank():
    buffer = torch.arange(16)
    mesh = torch.distributed.init_device_mesh("cpu", (4,))
    with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]):
        return torch.equal(buffer, shard(torch.arange(16), dim=0))


def test_zigzag_is_the_order_of_torchs_context_parallel(four):
    """Whose attention needs GPUs: test_distributed_gpu.py."""
    assert all(four.run(torchs_order_in_rank))


# Which rows see which keys.

def drawn_sequence(draw):
    """Shards of a drawn size, how many rows a rank has, documents and a window."""
    size, layout = draw.choice([1, 2, 3, 4]), draw.choice(["zigzag", "contiguous"])
    rows = draw.randint(1, 12) * 2
    bounds = sorted(draw.sample(range(1, size * rows), k=min(draw.randint(0, 5), size * rows - 1)))
    bounds = [0, *bounds] if bounds else [0, size * rows]
    window = draw.choice([(-1, -1), (-1, 0), (draw.randint(0, 9), draw.choice([-1, 0, draw.randint(0, 9)])),
                          (-1, draw.randint(0, 9))])
    documents = tuple(Document(*ends, number) for number, ends in enumerate(zip(bounds, bounds[1:])))
    return Shards(None, draw.randrange(size), size, layout), rows, documents, window


def samples_of(call):
    """(begin_q, end_q, begin_k, end_k) of the samples of a Call, as flash_attention describes its arguments."""
    cu_seqlens_q, cu_seqlens_k, _, seqused_k = call.lengths
    if cu_seqlens_q is None:
        return [(call.rows.start, call.rows.stop, call.keys.start, call.keys.stop)]
    assert cu_seqlens_q[0] == cu_seqlens_k[0] == 0 and len(cu_seqlens_q) == len(cu_seqlens_k)
    ends = cu_seqlens_k[1:] if seqused_k is None else [a + n for a, n in zip(cu_seqlens_k, seqused_k)]
    return list(zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, ends))


def seen_in(call, num_rows, num_keys):
    """Which keys (num_keys) the rows (num_rows) of a Call see."""
    seen = torch.zeros(num_rows, num_keys, dtype=torch.int)
    for begin_q, end_q, begin_k, end_k in samples_of(call):
        assert begin_q <= end_q <= num_rows and begin_k <= end_k <= num_keys
        mask = visible_keys(end_q - begin_q, end_k - begin_k, Options.of(1.0, call.window), "cpu")
        seen[begin_q:end_q, begin_k:end_k] += 1 if mask is None else mask.int()
    return seen


def seen_in_sequence(total, documents, window):
    """Its places, and which keys its rows see, bool (total, total)."""
    places, (left, right) = torch.arange(total), window
    document = sum((places >= end).int() for _, end, _ in documents)
    seen = (document[:, None] == document) & (places < documents[-1].end)
    seen &= (places[:, None] - places <= left) | torch.tensor(left < 0)
    seen &= (places - places[:, None] <= right) | torch.tensor(right < 0)
    return places, seen


def places_in(chunks, num_rows, more=0):
    """(num_rows,): what place of the sequence a row of a tensor with Chunks has, and with `more` rows behind each."""
    places = torch.full((num_rows,), -1)
    for chunk in chunks:
        n = chunk.end - chunk.begin + more
        places[chunk.local : chunk.local + n] = torch.arange(chunk.begin, chunk.begin + n)
    assert (places >= 0).all()
    return places


def check_origins(call, documents, row_places, key_places):
    """Samples begin at whole tiles of 16 rows and 16 keys of their document, and origins say where."""
    for (begin_q, end_q, begin_k, end_k), (row, key, number) in zip(samples_of(call), call.origins, strict=True):
        if begin_q < end_q and begin_k < end_k:
            first, = (document.begin for document in documents if document.number == number)
            assert row % 16 == 0 and key % 16 == 0
            for places, begin in ((row_places[begin_q:end_q], first + row), (key_places[begin_k:end_k], first + key)):
                assert places.tolist() == list(range(begin, begin + len(places)))


@pytest.mark.parametrize("has_dropout", [False, True])
@pytest.mark.parametrize("share_keys", [True, False])
def test_calls_see_every_key_once(share_keys, has_dropout):
    """The rows of a rank see the keys of all ranks in turn, as in a ring, and of the whole sequence. Long pieces have
    calls of their own."""
    draw, num_long = random.Random(0), 0
    for _ in range(200):
        shards, num_rows, documents, window = drawn_sequence(draw)
        total, _, wanted = shards.size * num_rows, *seen_in_sequence(shards.size * num_rows, documents, window)
        padding = dropout_padding(shards, num_rows, documents, has_dropout)
        row_places = places_in(padding.row_chunks(), num_rows + sum(padding.rows_before))
        own = padding.unpad_rows(torch.arange(len(row_places)).view(1, 1, -1)).flatten()
        assert torch.equal(padding.unpad_rows(padding.pad_rows(torch.arange(num_rows).view(1, 1, -1))).flatten(),
                           torch.arange(num_rows))
        more = padding.keys_after
        of_ranks = [(padding.key_chunks(rank), num_rows + more * shards.chunks_per_rank, more)
                    for rank in range(shards.size)]
        of_all = [((Chunk(0, total, 0),), total, 0)]
        for sources, long in itertools.product((of_ranks, of_all), (LONG, 6)):
            seen = torch.zeros(num_rows, total + more, dtype=torch.int)
            for key_chunks, num_keys, behind in sources:
                key_places = places_in(key_chunks, num_keys, behind)
                calls = calls_of(padding.row_chunks(), key_chunks, documents, window, has_dropout, 1, len(row_places),
                                 num_keys, share_keys, long)
                for call in calls:
                    seen.index_add_(1, key_places, seen_in(call, len(row_places), num_keys)[own])
                    if has_dropout:
                        check_origins(call, documents, row_places, key_places)
                    assert len(call.pieces) == 1 or all(length(piece.rows) < long for piece in call.pieces)
                    num_long += length(call.pieces[0].rows) >= long
            assert torch.equal(seen[:, :total], wanted[row_places[own]].int()) and not seen[:, total:].any()
            if share_keys and sources is of_all and long == LONG and window in ((-1, -1), (-1, 0)):
                assert len(calls) <= 1
    assert num_long > 100


def test_ring_makes_few_calls():
    """Zigzag and causal, without documents: one kernel in a step, two for the gradients where rows share keys."""
    shards = Shards(None, 1, 4, "zigzag")
    for source in range(4):
        chunks = shards.chunks(1, 8), shards.chunks(source, 8)
        counts = [len(calls_of(*chunks, (Document(0, 32),), (-1, 0), False, 1, 8, 8, share_keys))
                  for share_keys in (True, False)]
        assert counts == ([1, 2] if source <= 1 else [1, 1])


# The method that "auto" takes.

@pytest.mark.parametrize("sizes, slopes, window, local_world_size, method", [
    ((2, 32, 8, 4096), False, (-1, 0), None, "all_gather"),
    ((8, 32, 8, 4096), False, (-1, 0), None, "ulysses"),  # 8 > 1 + 4
    ((8, 32, 4, 4096), False, (-1, 0), "8", "all_gather"),  # 8 does not divide 4
    ((4, 32, 32, 4096), False, (-1, 0), "4", "ulysses"),
    ((8, 32, 8, 4096), False, (-1, 0), "4", "ring"),
    ((8, 32, 8, 4096), True, (-1, 0), "4", "ulysses"),
    ((2, 32, 8, 1 << 20), False, (-1, 0), None, "all_gather"),  # 8 GiB
    ((2, 32, 8, (1 << 20) + 2), False, (-1, 0), None, "ring"),
    ((2, 32, 8, 4096), True, (-1, -1), None, "ulysses"),
])
def test_auto_takes_a_method_by_size(monkeypatch, sizes, slopes, window, local_world_size, method):
    size, heads, heads_k, rows = sizes
    if local_world_size:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)
    else:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: list(range(size)))
    q, k = (torch.empty(1, h, rows, 128, dtype=torch.bfloat16, device="meta") for h in (heads, heads_k))
    shards = Shards(None, 0, size, "zigzag")
    assert attention.check_method("auto", q, k, k, shards, torch.ones(1) if slopes else None, window) == method
