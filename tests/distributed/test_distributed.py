"""Context parallelism on CPUs with Gloo: every method beside one process, what ranks hold, what is refused, failures.

Four processes serve all tests of this file but those in which one fails. Tests with NCCL need two GPUs.
"""

import dataclasses
import datetime
import functools
import gc
import itertools
import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor.experimental import context_parallel
from torch.utils.checkpoint import checkpoint

import peer_files
import ranks
from cases import FP32_TOLERANCE, SEED, slow_unless
from minimal_attn import FlashMHA, flash_attention
from minimal_attn.backends import Lengths
from minimal_attn.distributed import context_parallel_attention, shard, shard_labels, shard_positions, unshard
from minimal_attn.bench import context_parallel as context_parallel_bench
from minimal_attn.bench.context_parallel import judge
from minimal_attn.distributed import all_gather, attention, local, peer_memory, pieces as pieces_module, summing
from minimal_attn.distributed.layout import Chunk, Shards
from minimal_attn.distributed.pieces import Document, calls_of, pieces_of
from minimal_attn.distributed.room import room_for
from minimal_attn.dropout import keep_mask
from minimal_attn.interface import BACKENDS
from minimal_attn.reference import reference_attention
from minimal_attn.scores import visible_keys
from minimal_attn.validation import allowed_error
from test_examples import run_by_torchrun
from test_lengths import TOLERANCE

pytestmark = pytest.mark.cpu

SIZE = 4
EXACT = {torch.float64: 1e-12, torch.float32: FP32_TOLERANCE}


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    processes = ranks.Ranks(tmp_path_factory.mktemp("ranks"), SIZE)
    yield processes
    processes.end()


@dataclass(frozen=True)
class Case:
    name: str
    size: int = 2
    B: int = 1
    H: int = 4
    Hk: int = 2
    D: int = 16
    Dv: int = 16
    S: int = 48
    method: str = "all_gather"
    layout: str = "zigzag"
    causal: bool = False
    window: tuple = (-1, -1)
    bounds: tuple | None = None  # of documents
    sinks: bool = False
    softcap: float = 0.0
    alibi: bool = False
    dropout_p: float = 0.0
    dtype: torch.dtype = torch.float64
    backend: str = "torch"

    def __str__(self):
        return f"{self.name} {self.method} {self.layout} {self.size} {self.dropout_p}"

    def options(self):
        g = torch.Generator().manual_seed(1)
        slopes = (self.B, self.H) if self.B > 1 else self.H
        return dict(causal=self.causal, window_size=self.window, softcap=self.softcap, backend=self.backend,
                    dropout_p=self.dropout_p, dropout_seed=torch.tensor([SEED], device=ranks.DEVICE),
                    alibi_slopes=torch.rand(slopes, generator=g).to(ranks.DEVICE) / 4 if self.alibi else None)

    def whole(self):
        """q, k, v, dout and sinks of the whole sequence, which require grad but for dout."""
        g = torch.Generator().manual_seed(0)
        shapes = [(self.B, h, self.S, d) for h, d in ((self.H, self.D), (self.Hk, self.D), (self.Hk, self.Dv),
                                                      (self.H, self.Dv))]
        tensors = [torch.randn(shape, generator=g, dtype=torch.float64).to(ranks.DEVICE, self.dtype)
                   for shape in shapes]
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        sinks = torch.randn(self.H, generator=g, dtype=torch.float64).to(ranks.DEVICE, dtype) if self.sinks else None
        return tensors, sinks


FEATURES = [
    Case("plain"),
    Case("causal", causal=True, B=2),
    Case("padded", S=45),
    Case("causal_padded", S=37, causal=True, B=2),
    Case("mostly_padding", S=3, causal=True),
    Case("window", window=(9, 5), S=61),
    Case("window_left", window=(9, -1), B=2),
    Case("window_right", window=(-1, 5)),
    Case("window_causal", window=(17, -1), causal=True),
    Case("window_wide", window=(30, 20), S=50),
    Case("documents", bounds=(0, 5, 30, 30, 46)),
    Case("documents_causal", bounds=(0, 1, 20, 21, 48), causal=True),
    Case("documents_of_one_rank", bounds=(0, 3, 5), causal=True),
    Case("documents_window", bounds=(0, 25, 40, 44), window=(7, 3)),
    Case("documents_window_causal", bounds=(0, 4, 40, 48), window=(7, 0), causal=True, sinks=True),
    Case("sinks", causal=True, sinks=True, B=2),
    Case("sinks_padded", S=41, sinks=True),
    Case("softcap", softcap=2.0, causal=True),
    Case("Dv", Dv=8, causal=True),
]


def in_one_process(case, dtype=None, function=flash_attention):
    """out, dq, dk, dv and dsinks, if any, of the whole."""
    (*qkv, dout), sinks = case.whole()
    inputs = [x.to(dtype or x.dtype).requires_grad_() for x in qkv]
    options = case.options()
    if function is reference_attention:
        del options["backend"]
    if case.sinks:
        inputs.append(options.setdefault("sinks", sinks.to(dtype or sinks.dtype).requires_grad_()))
    if case.bounds:
        cu_seqlens = torch.tensor(case.bounds, dtype=torch.int32, device=ranks.DEVICE)
        options |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    out = function(*inputs[:3], **options)
    return out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))


def on_ranks(case, group, **more):
    """The same, of this rank's shards, put together again; dsinks are summed."""
    (*qkv, dout), sinks = case.whole()
    *inputs, dout = (shard(x, group, 2, case.layout) for x in (*qkv, dout))
    inputs = [x.requires_grad_() for x in inputs]
    options = case.options() | dict(layout=case.layout, method=case.method) | more
    options["window_size"] = torch.tensor(case.window)  # whatever unpacks into two ints
    if case.sinks:
        inputs.append(options.setdefault("sinks", sinks.requires_grad_()))
    if case.bounds:
        options["cu_seqlens"] = torch.tensor(case.bounds, dtype=torch.int32)
    else:
        options["seqlen"] = case.S
    out = context_parallel_attention(*inputs[:3], group, **options)
    gradients = torch.autograd.grad(out, inputs, dout)
    whole = [unshard(x.detach(), group, 2, case.layout) for x in (out, *gradients[:3])]
    assert not any(x[:, :, case.S:].any() for x in whole), f"{case}: padding is not 0"
    whole = [x[:, :, :case.S] for x in whole]
    if case.sinks:
        torch.distributed.all_reduce(gradients[3], group=group)
        whole.append(gradients[3])
    return whole


def compare(cases):
    """In a rank: {case: what is wrong}."""
    wrong = {}
    for case in cases:
        group = ranks.GROUPS[case.size]
        if torch.distributed.get_rank(group) < 0:
            continue
        found = on_ranks(case, group)
        base = in_one_process(case)
        truths = in_one_process(case, torch.float64, reference_attention)
        for name, x, one, truth in zip(("out", "dq", "dk", "dv", "dsinks"), found, base, truths):
            error = (x.double() - truth).abs().max().item()
            allowed = EXACT.get(case.dtype) or allowed_error(one, truth)
            if name == "dsinks" and case.dtype not in EXACT:  # sums over all rows of what depends on a rounded out
                allowed = 3 * TOLERANCE[case.dtype] * max(1, truth.abs().max().item())
            if not error <= allowed or x.dtype != one.dtype:
                wrong[f"{case} {name}"] = f"{error:.2e}, allowed {allowed:.2e}"
    return wrong


def load(backend):
    """Build it before the ranks need it: that takes longer than they may take for one call."""
    assert BACKENDS[backend].why_not(torch.device("cpu")) is None


def check(four, cases):
    results = four.run(compare, cases)
    assert results == [{}] * len(results)


@pytest.mark.parametrize("method", ["all_gather", "ring", "ulysses"])
def test_results_are_those_of_one_process(four, method):
    check(four, [dataclasses.replace(case, method=method, layout=layout)
                 for case, layout in itertools.product(FEATURES, ("zigzag", "contiguous"))])


def of_methods(case, methods=("all_gather", "ring", "ulysses"), layouts=("zigzag", "contiguous")):
    return [dataclasses.replace(case, method=method, layout=layout) for method in methods for layout in layouts]


# Chunks that begin at a multiple of 16 rows, or not, and documents that begin anywhere in them.
@pytest.mark.parametrize("method", ["all_gather", "ring", "ulysses"])
def test_dropout_is_that_of_one_process(four, method):
    more = [Case("documents_over_chunks", bounds=(0, 3, 40, 93), S=96, causal=True, B=1),
            Case("documents_of_one", bounds=(0, 1, 2, 3, 8, 19, 20), S=24),
            Case("chunks_of_16", S=64, B=2, causal=True),
            Case("documents_in_chunks_of_16", S=64, bounds=(0, 16, 33, 64), window=(20, -1)),
            Case("one_of_three", size=3, H=6, Hk=3, S=50, causal=True, sinks=True, bounds=(0, 21, 22, 50)),
            Case("one_of_four", size=4, H=8, Hk=4, S=75, B=2), Case("alone", size=1, S=21, bounds=(0, 5, 21)),
            Case("four_documents", size=4, H=4, Hk=4, S=100, causal=True, bounds=(0, 7, 40, 40, 99))]
    check(four, [dataclasses.replace(case, method=method, layout=layout, dropout_p=0.3)
                 for case, layout in itertools.product(FEATURES + more, ("zigzag", "contiguous"))])


def kept_in_rank(cases):
    """What is dropped shows in out, where scores are alike and V holds unit vectors."""
    seed = torch.tensor([SEED], device=ranks.DEVICE)
    for case in cases:
        group = ranks.GROUPS[case.size]
        if torch.distributed.get_rank(group) < 0:
            continue
        q, k = (shard(torch.zeros(case.B, heads, case.S, 8, device=ranks.DEVICE), group, 2, case.layout)
                for heads in (case.H, case.Hk))
        units = torch.eye(case.S, device=ranks.DEVICE).expand(case.B, case.Hk, -1, -1)
        v = shard(units, group, 2, case.layout).contiguous()
        lengths = {"cu_seqlens": torch.tensor(case.bounds, dtype=torch.int32)} if case.bounds else {"seqlen": case.S}
        out = context_parallel_attention(q, k, v, group, layout=case.layout, method=case.method, dropout_p=0.5,
                                         dropout_seed=seed + torch.distributed.get_rank(group), backend=case.backend,
                                         **lengths)
        found = unshard(out, group, 2, case.layout)[:, :, :case.S] != 0
        bounds = case.bounds or (0, case.S)
        keep = keep_mask(seed, 0.5, max(case.B, len(bounds) - 1), case.H, case.S, case.S, ranks.DEVICE)
        wanted = torch.zeros_like(found)
        for number, (begin, end) in enumerate(zip(bounds, bounds[1:])):
            samples = slice(number, number + 1) if case.bounds else slice(case.B)
            wanted[:, :, begin:end, begin:end] = keep[samples, :, :end - begin, :end - begin]
        assert torch.equal(found, wanted), case


@pytest.mark.parametrize("backend", ["torch", pytest.param("cuda", marks=pytest.mark.slow)])
def test_dropout_keeps_what_keep_mask_says(four, backend):
    """By the seed of the first rank, also where others are given other seeds."""
    load(backend)
    cases = [Case("whole", B=2, S=75), Case("documents", S=75, bounds=(0, 3, 40, 40, 74)),
             Case("documents", size=3, H=6, Hk=3, S=75, bounds=(0, 13, 71)), Case("whole", size=4, H=8, Hk=4, S=70)]
    four.run(kept_in_rank, [dataclasses.replace(one, backend=backend) for case in cases for one in of_methods(case)])


def drawn_seeds_in_rank(method):
    """The results of ranks that draw different seeds, and what the seed of the first one gives."""
    group = ranks.GROUPS[2]
    if (rank := torch.distributed.get_rank(group)) < 0:
        return None
    case = Case("seeds", method=method, dropout_p=0.5)
    torch.manual_seed(7 + rank)
    found, again = (on_ranks(case, group, dropout_seed=None) for _ in range(2))
    assert not torch.equal(found[0], again[0])
    torch.manual_seed(7)
    seed = torch.randint(2**63 - 1, (1,))
    for x, y in zip(found, on_ranks(case, group, dropout_seed=seed)):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"dropout_seed must be one int64 .*, got torch.int64 of shape \(5,\)"):
        on_ranks(case, group, dropout_seed=seed.repeat(5))


@pytest.mark.parametrize("method", ["all_gather", "ring", "ulysses"])
def test_dropout_by_the_seed_that_the_first_rank_draws(four, method):
    four.run(drawn_seeds_in_rank, method)


def test_results_on_three_and_four_ranks(four):
    check(four, [
        *of_methods(Case("causal", size=4, Hk=4, S=61, causal=True)),
        *of_methods(Case("window", size=4, Hk=4, S=64, window=(11, 6))),
        *of_methods(Case("documents", size=4, H=8, Hk=4, S=64, causal=True, bounds=(0, 7, 40, 59))),
        *of_methods(Case("causal", size=3, H=6, Hk=3, S=50, causal=True, sinks=True)),
        *of_methods(Case("one_head", size=3, H=4, Hk=1, S=30, causal=True, B=2), ["all_gather", "ring"]),
        *of_methods(Case("alone", size=1, S=21, causal=True, sinks=True), ["all_gather", "auto"]),
    ])


def compare_in_groups(cases):
    """compare, with heads that are gathered in several groups, and with pieces that have calls of their own, as large
    ones are."""
    with pytest.MonkeyPatch.context() as patch:
        gather_in_groups(patch)
        return compare(cases)


def gather_in_groups(patch):
    patch.setattr(all_gather, "MIN_BYTES", 1)
    patch.setattr(all_gather, "MIN_FLOP", 1)
    patch.setattr(all_gather, "MIN_FETCHED", 1)
    patch.setattr(all_gather, "MIN_FETCHED_BACKWARD", 1)
    patch.setattr(local, "LONG_BESIDE", 6)


def test_results_of_heads_in_groups(four):
    """Of which there are 2 and 3. All FEATURES have calls of several pieces beside those of one."""
    cases = [Case("groups", H=2 * heads, Hk=heads, causal=True, S=47, B=2, sinks=True, alibi=True) for heads in (4, 6)]
    cases += [dataclasses.replace(case, dropout_p=dropout_p) for case in FEATURES for dropout_p in (0, 0.3)]
    results = four.run(compare_in_groups, cases)
    assert results == [{}] * len(results)


def compare_through_files(cases, folder, in_groups):
    """compare, by peer memory. in_groups: of heads, whose gradients are summed one head after the other."""
    with pytest.MonkeyPatch.context() as patch:
        peer_files.use(patch, folder)
        if in_groups:
            patch.setattr(summing, "MAX_SUM_BYTES", 1)
        return compare_in_groups(cases) if in_groups else compare(cases)


@pytest.mark.parametrize("in_groups", [False, True])
def test_results_through_peer_memory(four, tmp_path, in_groups):
    """Slots grow on the way, and both of them are used many times."""
    cases = [dataclasses.replace(case, layout=layout, dropout_p=dropout_p, H=12, Hk=6) for case in FEATURES
             for layout, dropout_p in (("zigzag", 0), ("contiguous", 0.3))]
    cases += [dataclasses.replace(case, size=3) for case in FEATURES[:3]]
    results = four.run(compare_through_files, cases, tmp_path, in_groups)
    assert results == [{}] * len(results)


def opened_in_rank(folder):
    """Which groups get peer memory: the first one, which then has slots, but none of other ranks after it."""
    device, found = torch.device("cpu"), []
    with pytest.MonkeyPatch.context() as patch:
        peer_files.use(patch, folder)
        patch.setattr(peer_memory, "RANKS", [])
        for size in (2, 4, 2):
            if torch.distributed.get_rank(ranks.GROUPS[size]) >= 0:
                peers = peer_memory.opened(ranks.GROUPS[size], device)
                found.append(peers and (peers.gathered.slot_bytes, peers.summed.number))
    return found


def test_one_group_has_peer_memory(four, tmp_path):
    step = peer_memory.SLOT_STEP
    assert four.run(opened_in_rank, tmp_path) == 2 * [[None]] + 2 * [[(step, 1), None, (step, 1)]]


def unopened_in_rank(folder):
    """Symmetric memory without a barrier: messages take its place, and a warning says so."""
    group = ranks.GROUPS[2]
    if torch.distributed.get_rank(group) < 0:
        return
    with pytest.MonkeyPatch.context() as patch:
        peer_files.use(patch, folder)
        patch.setattr(peer_memory, "RANKS", [])
        patch.delattr(peer_files.Files, "barrier")
        with pytest.warns(UserWarning, match="there is no peer memory: .*barrier"):
            assert peer_memory.opened(group, torch.device("cpu")) is None


def test_warning_without_peer_memory(four, tmp_path):
    four.run(unopened_in_rank, tmp_path)


def grown_in_rank(folder):
    """What one rank finds in the slots of the other while they grow, and after one that nobody has fetched from."""
    group, found = ranks.GROUPS[2], []
    rank = torch.distributed.get_rank(group)
    if rank < 0:
        return None
    with pytest.MonkeyPatch.context() as patch:
        peer_files.use(patch, folder)
        memory = peer_memory.PeerMemory(group, torch.device("cpu"))
        for step, size in enumerate((100, 200, 3 << 20, 10, 10)):
            memory.slot((size,), torch.int64)  # for a call that fails before it fetches
            slot = memory.slot((size,), torch.int64)
            slot.of_rank(rank).fill_(10 * step + rank)
            there = torch.empty(size, dtype=torch.int64)
            slot.fetch([(there, slot.of_rank(1 - rank))])
            found.append((memory.slot_bytes >> 20, set(there.tolist())))
    return found


def test_slots_grow(four, tmp_path):
    *_, first, second = four.run(grown_in_rank, tmp_path)
    for other, found in ((1, first), (0, second)):
        assert found == [(mb, {10 * step + other}) for step, mb in enumerate((2, 2, 24, 24, 24))]


def no_memory(*_, **__):
    raise torch.OutOfMemoryError("none left")


def failing_growth_in_rank(folder):
    """Rank 0 has no memory: both raise, and the next call has slots again."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    group = ranks.GROUPS[2]
    rank = torch.distributed.get_rank(group)
    if rank < 0:
        return
    with pytest.MonkeyPatch.context() as patch:
        peer_files.use(patch, folder)
        memory = peer_memory.PeerMemory(group, torch.device("cpu"))
        memory.slot((1,), torch.int64)
        with pytest.MonkeyPatch.context() as failing, pytest.raises(torch.OutOfMemoryError, match="a rank has no"):
            if rank == 0:
                failing.setattr(symmetric_memory, "empty", no_memory)
            memory.slot((1 << 20,), torch.int64)
        assert memory.slot_bytes == 0 and memory.handle is None
        slot, there = memory.slot((3,), torch.int64), torch.empty(3, dtype=torch.int64)
        slot.of_rank(rank).fill_(rank)
        slot.fetch([(there, slot.of_rank(1 - rank))])
        assert there.tolist() == 3 * [1 - rank]


def test_growth_that_fails_on_one_rank(four, tmp_path):
    four.run(failing_growth_in_rank, tmp_path)


@pytest.mark.parametrize("has_peers, size, heads, heads_k, rows, forward, backward", [
    (False, 2, 32, 8, 2048, [8], [8]), (False, 2, 32, 8, 8192, [8], [1, 6, 1]), (False, 2, 32, 8, 65536, [8], [8]),
    (False, 2, 32, 32, 4096, [32], [32]), (False, 2, 32, 32, 8192, [32], [8, 16, 8]),
    (False, 2, 32, 32, 32768, [1, 8, 23], [4, 24, 4]), (False, 2, 32, 32, 65536, [16, 16], [16, 16]),
    (False, 2, 32, 8, 1 << 19, [2, 2, 2, 2], [2, 2, 2, 2]), (False, 8, 32, 8, 16384, [1, 7], [1, 6, 1]),
    (False, 64, 64, 8, 2048, [4, 4], [4, 4]),  # by MIN_BYTES
    (False, 2, 4, 1, 8192, [1], [1]), (False, 2, 8, 8, 100, [8], [8]), (False, 2, 4, 2, 1 << 22, [1, 1], [1, 1]),
    (False, 1, 32, 8, 8192, [8], [8]),
    (True, 2, 32, 8, 8192, [8], [8]), (True, 2, 32, 8, 32768, [1, 7], [8]), (True, 2, 32, 32, 8192, [4, 28], [32]),
    (True, 2, 32, 32, 32768, [4, 28], [4, 24, 4]), (True, 2, 32, 32, 65536, [4, 16, 12], [4, 16, 8, 4]),
    (True, 8, 32, 8, 16384, [1, 7], [8])])
def test_heads_are_gathered_in_groups_that_grow(has_peers, size, heads, heads_k, rows, forward, backward):
    """And all keys and values of a group of several heads have at most MAX_BYTES."""
    q, k = (torch.empty(1, h, rows, 128, device="meta", dtype=torch.bfloat16) for h in (heads, heads_k))
    for is_backward, groups in ((False, forward), (True, backward)):
        slices = all_gather.head_groups(q, k, k, size, has_peers, is_backward)
        assert [len(range(heads_k)[one]) for one in slices] == groups
        assert [i for one in slices for i in range(heads_k)[one]] == list(range(heads_k))


def test_results_with_alibi(four):
    check(four, [*of_methods(Case("causal", alibi=True, causal=True, S=47), ["all_gather", "ulysses", "auto"]),
                 *of_methods(Case("window", alibi=True, window=(9, 0), bounds=(0, 30, 48)), ["all_gather", "auto"]),
                 *of_methods(Case("not_causal", alibi=True, S=41, B=2), ["ulysses", "auto"])])


@pytest.mark.parametrize("backend, dtype", [
    *(("torch", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    *(pytest.param("cuda", dtype, marks=slow_unless(False, dtype == torch.bfloat16))
      for dtype in (torch.float32, torch.bfloat16, torch.float16))], ids=str)
def test_results_are_within_the_error_rule(four, backend, dtype):
    """On a CPU, "cuda" is csrc/flash.cu compiled for it."""
    load(backend)
    cases = [Case("causal", causal=True, S=32, B=2), Case("window", S=29, window=(9, 5), sinks=True),
             Case("documents", S=32, bounds=(0, 11, 26, 30), causal=True)]
    check(four, [dataclasses.replace(one, dtype=dtype, backend=backend, dropout_p=dropout_p) for case in cases
                 for one in of_methods(case, layouts=["zigzag"]) for dropout_p in (0, 0.3)])


@pytest.mark.slow
def test_results_of_triton(four):
    """In its interpreter."""
    check(four, [Case("documents", H=2, Hk=1, S=16, bounds=(0, 5, 15), causal=True, dtype=torch.float32,
                      backend="triton", method=method, dropout_p=dropout_p)
                 for method in ("all_gather", "ring") for dropout_p in (0, 0.3)])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_all_gather_has_the_bits_of_one_process(four, backend):
    """Where chunks are multiples of the tile of rows, beside a packed call, which has the same tiles."""
    load(backend)
    case = Case("bits", S=512, bounds=(0, 512), H=1, Hk=1, causal=True, dtype=torch.float32, backend=backend)
    assert four.run(same_bits, [case])[-1] == [True]


def same_bits(cases):
    group = ranks.GROUPS[2]
    if torch.distributed.get_rank(group) < 0:
        return None
    return [torch.equal(on_ranks(case, group)[0], in_one_process(case)[0]) for case in cases]


# What ranks hold.

def shards_in_rank(layout):
    """Every rank compares, and gives its positions."""
    group = ranks.GROUPS[3]
    if (rank := torch.distributed.get_rank(group)) < 0:
        return None
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
    for error, match, tokens in ((TypeError, "int64, got torch.uint8", torch.zeros(1, 7, dtype=torch.uint8)),
                                 (ValueError, "2D, .* got 1 dimensions", torch.arange(7))):
        with pytest.raises(error, match=f"tokens must be {match}"):
            shard_labels(tokens, group, layout)
    return shard(torch.arange(12), group, 0, layout).tolist(), x.grad[0, :, 0].tolist(), rank


@pytest.mark.parametrize("layout, wanted", [("zigzag", [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
                                            ("contiguous", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]])])
def test_shards_are_those_of_the_layout(four, layout, wanted):
    _, *results = four.run(shards_in_rank, layout)
    assert [held for held, _, _ in results] == wanted
    assert torch.tensor([gradient for _, gradient, _ in results]).sum(0).tolist() == [1] * 7


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
    documents = [Document(*ends, number) for number, ends in enumerate(zip(bounds, bounds[1:]))]
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
        mask = visible_keys(end_q - begin_q, end_k - begin_k, call.window, Lengths(), "cpu")
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


@pytest.mark.parametrize("share_keys", [True, False])
def test_calls_see_every_key_once(share_keys):
    """Of all ranks in turn, as in a ring, and of the whole sequence."""
    draw = random.Random(0)
    for _ in range(600):
        shards, rows, documents, window = drawn_sequence(draw)
        total, places, wanted = shards.size * rows, *seen_in_sequence(shards.size * rows, documents, window)
        held = [torch.cat([places[chunk.begin:chunk.end] for chunk in shards.chunks(rank, rows)])
                for rank in range(shards.size)]
        wanted = wanted[held[shards.rank]].int()
        seen = torch.zeros_like(wanted)
        for source in range(shards.size):
            pieces = pieces_of(shards.chunks(shards.rank, rows), shards.chunks(source, rows), documents, window)
            for call in calls_of(pieces, 1, rows, rows, share_keys):
                seen[:, held[source]] += seen_in(call, rows, rows)
        assert torch.equal(seen, wanted)
        pieces = pieces_of(shards.chunks(shards.rank, rows), [Chunk(0, total, 0)], documents, window)
        calls = calls_of(pieces, 1, rows, total, share_keys)
        assert torch.equal(sum((seen_in(call, rows, total) for call in calls), torch.zeros_like(wanted)), wanted)
        if share_keys and window in ((-1, -1), (-1, 0)):
            assert len(calls) <= 1


@pytest.mark.parametrize("share_keys", [True, False])
def test_long_pieces_have_calls_of_their_own(share_keys):
    """And the other pieces are in calls as before."""
    draw, num_long = random.Random(0), 0
    for _ in range(200):
        shards, rows, documents, window = drawn_sequence(draw)
        total = shards.size * rows
        pieces = pieces_of(shards.chunks(shards.rank, rows), [Chunk(0, total, 0)], documents, window)
        calls = [call.pieces for call in calls_of(pieces, 1, rows, total, share_keys, long=6)]
        long = [piece for piece in pieces if pieces_module.length(piece.rows) >= 6]
        assert all((piece,) in calls for piece in long)
        num_long += len(long)
        others = [piece for piece in pieces if piece not in long]
        wanted = [call.pieces for call in calls_of(others, 1, rows, total, share_keys)]
        assert [call for call in calls if call[0] not in long] == wanted
    assert num_long > 100


def test_page_has_the_recorded_efficiencies():
    root = Path(__file__).parents[2]
    rows = json.loads((root / "benchmarks/h200x2/context_parallel.json").read_text())["rows"]
    efficiency = {(row["impl"], row["pass"], row["seqlen_q"], row["nheads_k"]): row["efficiency"] for row in rows}
    impls = "all_gather", "plain_all_gather", "ring", "ulysses", "torch_cudnn", "torch_ours"
    wanted = []
    for seqlen, heads_k in itertools.product((16384, 65536, 131072), (8, 32)):
        cells = [[efficiency.get((impl, what, seqlen, heads_k)) for what in context_parallel_bench.PASSES]
                 for impl in impls]
        texts = [" / ".join(f"{x:.2f}" for x in cell) if all(cell) else "–" for cell in cells]
        wanted.append(f"| {seqlen // 1024}K | {heads_k} | {' | '.join(texts)} |")
    lines = (root / "docs/context_parallel.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("| ") and "K | " in line and " / " in line] == wanted


def places_in(chunks, length, more=0):
    """(length,): what place of the sequence a row of a tensor with Chunks has, and with `more` rows behind each."""
    places = torch.full((length,), -1)
    for chunk in chunks:
        n = chunk.end - chunk.begin + more
        places[chunk.local : chunk.local + n] = torch.arange(chunk.begin, chunk.begin + n)
    assert (places >= 0).all()
    return places


@pytest.mark.parametrize("share_keys", [True, False])
def test_calls_with_dropout_begin_at_whole_groups(share_keys):
    """With 16 rows and 16 keys of their document. Origins say where, and rows of the rank see every key once."""
    draw = random.Random(0)
    for _ in range(300):
        shards, num_rows, documents, window = drawn_sequence(draw)
        total, _, wanted = shards.size * num_rows, *seen_in_sequence(shards.size * num_rows, documents, window)
        room = room_for(shards, num_rows, documents, True)
        row_places = places_in(room.row_chunks(), num_rows + sum(room.fronts))
        own = room.own(torch.arange(len(row_places)).view(1, 1, -1)).flatten()
        assert torch.equal(room.own(room.extended(torch.arange(num_rows).view(1, 1, -1))).flatten(),
                           torch.arange(num_rows))
        more = room.num_next
        num_keys = num_rows + more * shards.chunks_per_rank
        of_ranks = [(room.key_chunks(rank), num_keys, more) for rank in range(shards.size)]
        for sources in (of_ranks, [([Chunk(0, total, 0)], total, 0)]):
            seen = torch.zeros(num_rows, total + more, dtype=torch.int)
            for key_chunks, num_keys, behind in sources:
                key_places = places_in(key_chunks, num_keys, behind)
                pieces = pieces_of(room.row_chunks(), key_chunks, documents, window, True)
                for call in calls_of(pieces, 1, len(row_places), num_keys, share_keys):
                    seen.index_add_(1, key_places, seen_in(call, len(row_places), num_keys)[own])
                    samples = samples_of(call)
                    assert len(samples) == len(call.origins)
                    for (begin_q, end_q, begin_k, end_k), (row, key, number) in zip(samples, call.origins):
                        if begin_q < end_q and begin_k < end_k:
                            first, = (document.begin for document in documents if document.number == number)
                            assert row % 16 == 0 and key % 16 == 0
                            assert row_places[begin_q:end_q].tolist() == list(range(first + row,
                                                                                    first + row + end_q - begin_q))
                            assert key_places[begin_k:end_k].tolist() == list(range(first + key,
                                                                                    first + key + end_k - begin_k))
            assert torch.equal(seen[:, :total], wanted[row_places[own]].int()) and not seen[:, total:].any()


def test_ring_makes_few_calls():
    """Zigzag and causal, without documents: one kernel in a step, two for the gradients where rows share keys."""
    shards = Shards(None, 1, 4, "zigzag")
    for source in range(4):
        pieces = pieces_of(shards.chunks(1, 8), shards.chunks(source, 8), [Document(0, 32)], (-1, 0))
        counts = [len(calls_of(pieces, 1, 8, 8, share_keys)) for share_keys in (True, False)]
        assert counts == ([1, 2] if source <= 1 else [1, 1])


# Input that is refused, before anything is sent: one rank alone gets each error.

def errors_in_rank():
    """{what is wrong: the error, with its type}, in the last rank, while the others do nothing."""
    group, errors = ranks.GROUPS[2], {}
    outside = ranks.GROUPS[1] if torch.distributed.get_rank() == 0 else None
    if torch.distributed.get_rank() == 0:
        return refused({"outside": dict(group=outside)})
    if torch.distributed.get_rank() < SIZE - 1:
        return None
    q, k, cu = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.tensor
    slopes = torch.ones(4)
    errors = refused({
        "seed": dict(dropout_p=0.1, dropout_seed=5), "dropout range": dict(dropout_p=2),
        "layout": dict(layout="striped"),
        "method": dict(method="p2p"), "group": dict(group="nccl"), "heads": dict(method="ulysses", k=k[:, :1]),
        "3D": dict(q=q[0, :2], k=k[0]), "rows": dict(k=k[:, :, :4]), "empty": dict(q=q[:, :, :0], k=k[:, :, :0]),
        "odd": dict(q=q[:, :, :5], k=k[:, :, :5]), "dtype": dict(q=q.half()), "float8": dict(
            q=q.to(torch.float8_e4m3fn), k=k.to(torch.float8_e4m3fn), backend="reference"),
        "backend": dict(backend="cudnn"), "window": dict(window_size=(-2, 0)), "causal": dict(causal=1),
        "seqlen": dict(seqlen=13), "seqlen 0": dict(seqlen=0), "seqlen type": dict(seqlen=2.0),
        "both": dict(seqlen=3, cu_seqlens=cu([0, 3], dtype=torch.int32)), "int64": dict(cu_seqlens=cu([0, 12])),
        "descending": dict(cu_seqlens=cu([0, 5, 3], dtype=torch.int32)),
        "beyond": dict(cu_seqlens=cu([0, 13], dtype=torch.int32)),
        "one": dict(cu_seqlens=cu([0], dtype=torch.int32)),
        "batch": dict(q=q.expand(2, -1, -1, -1), k=k.expand(2, -1, -1, -1), cu_seqlens=cu([0, 12], dtype=torch.int32)),
        "ring alibi": dict(method="ring", alibi_slopes=slopes, causal=True),
        "gather alibi": dict(method="all_gather", alibi_slopes=slopes), "sinks": dict(sinks=torch.ones(3)),
    }, q=q, k=k, group=group)
    with pytest.raises(NotImplementedError, match="unshard has no gradient"):
        unshard(q.requires_grad_(), group, 2)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: context_parallel_attention(q, k, k, group), (q.detach(),), (q.detach(),))
    with pytest.raises(NotImplementedError, match="transforms"):
        torch.func.vmap(lambda q: context_parallel_attention(q, k, k, group))(q.detach()[None])
    return errors


def refused(wrong, q=None, k=None, group=None):
    q = torch.randn(1, 4, 6, 8) if q is None else q
    errors = {}
    for name, options in wrong.items():
        arguments = dict(q=q, k=q if k is None else k, group=group) | options
        try:
            context_parallel_attention(arguments.pop("q"), arguments["k"], arguments.pop("k"), arguments.pop("group"),
                                       **arguments)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
        else:
            errors[name] = "none"
    return errors


ERRORS = {
    "seed": "TypeError: dropout_seed must be one int64", "dropout range": "ValueError: dropout_p",
    "layout": "ValueError: unknown layout 'striped'", "method": "ValueError: unknown method 'p2p'",
    "group": "TypeError: group must be", "heads": "ValueError: method='ulysses' divides the heads",
    "3D": "ValueError: q, k and v must be 4D", "rows": "ValueError: q, k and v must have the same number of rows",
    "empty": "ValueError: q, k and v must have the same number of rows, at least one",
    "odd": "ValueError: the zigzag layout has two chunks", "dtype": "TypeError: dtypes must match",
    "float8": "TypeError: Unsupported dtype: q is torch.float8_e4m3fn", "backend": "ValueError: unknown backend 'cudnn'",
    "window": "ValueError: window_size must be at least -1", "causal": "TypeError: causal must be a bool",
    "seqlen": "ValueError: seqlen must be in 1..12", "seqlen 0": "ValueError: seqlen must be in 1..12",
    "seqlen type": "TypeError: seqlen must be None or an int", "both": "ValueError: seqlen cannot be given together",
    "int64": "TypeError: cu_seqlens must be int32", "descending": "ValueError: cu_seqlens must start at 0 and ascend",
    "beyond": "ValueError: cu_seqlens must start at 0 and ascend up to at most 12",
    "one": "ValueError: cu_seqlens must have shape", "batch": "ValueError: with cu_seqlens, q, k and v must be packed",
    "ring alibi": "NotImplementedError: method='ring' has no alibi_slopes",
    "gather alibi": "NotImplementedError: method='all_gather' has alibi_slopes under a causal mask alone",
    "sinks": "ValueError: sinks must have shape (4,)",
}


def test_bad_input_is_refused_before_anything_is_sent(four):
    outside, *_, errors = four.run(errors_in_rank)
    assert outside == {"outside": "ValueError: this process is not a member of the group"}
    assert errors.keys() == ERRORS.keys()
    assert {name: error for name, error in errors.items() if not error.startswith(ERRORS[name])} == {}


def test_without_a_process_group():
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(RuntimeError, match="init_process_group first"):
        context_parallel_attention(q, q, q)
    with pytest.raises(RuntimeError, match="init_process_group first"):
        FlashMHA(16, 2, context_parallel_group="cp")


# The method that "auto" takes.

@pytest.mark.parametrize("sizes, slopes, window, local_world_size, method", [
    ((2, 32, 8, 4096), False, (-1, 0), None, "all_gather"),
    ((8, 32, 8, 4096), False, (-1, 0), None, "ulysses"),  # 8 > 1 + 4
    ((8, 32, 4, 4096), False, (-1, 0), "8", "all_gather"),  # 8 does not divide 4
    ((4, 32, 8, 4096), False, (-1, 0), "4", "all_gather"),
    ((4, 32, 32, 4096), False, (-1, 0), "4", "ulysses"),
    ((8, 32, 8, 4096), False, (-1, 0), "4", "ring"),
    ((8, 32, 8, 4096), True, (-1, 0), "4", "ulysses"),
    ((8, 32, 2, 4096), True, (-1, 0), "4", "all_gather"),
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


# In a model.

def small_model(group=None, dropout=0.0):
    torch.manual_seed(3)
    mha = FlashMHA(32, 4, 2, dropout=dropout, causal=True, window_size=(40, 0), context_parallel_group=group)
    return torch.nn.Sequential(torch.nn.Linear(32, 32), mha, torch.nn.GELU(), torch.nn.Linear(32, 16))


def gradients_of(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def loss_of(model, tokens, labels):
    """The sum of losses, divided by the number of labels of all ranks: a sum over ranks is then the mean."""
    logits = model(torch.nn.functional.one_hot(tokens % 32, 32).float())
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum") / (LENGTH - 1)


LENGTH = 61


def trained_on_ranks(how, dropout=0.0):
    """Whether a rank of a group of four has the loss and the gradients of one process."""
    group = ranks.GROUPS[4]
    tokens = torch.randint(16, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    one = small_model(None, dropout)
    whole_loss = loss_of(one, tokens[:, :-1], tokens[:, 1:])
    whole_loss.backward()
    model = small_model(group, dropout)
    if torch.distributed.get_rank(group) > 0:  # whose seeds are not used
        torch.manual_seed(torch.distributed.get_rank(group))
    local, labels = shard(tokens, group), shard_labels(tokens, group)
    if how == "ddp":  # which takes the mean over ranks
        model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    elif how == "fsdp2":
        mesh = torch.distributed.init_device_mesh("cpu", (4,))
        torch.distributed.fsdp.fully_shard(model[1], mesh=mesh)
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    elif how == "compile":
        model = torch.compile(model, backend="aot_eager")
    elif how == "checkpoint":
        model.forward = functools.partial(checkpoint, model.forward, use_reentrant=False)
    loss = loss_of(model, local, labels)
    loss.backward()
    gradients = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in gradients_of(model)]
    loss = loss.detach()
    torch.distributed.all_reduce(loss, group=group)
    for gradient in gradients:
        if how in ("ddp", "fsdp2"):
            gradient *= 4
        else:
            torch.distributed.all_reduce(gradient, group=group)
    torch.testing.assert_close(loss, whole_loss.detach())
    torch.testing.assert_close(gradients, gradients_of(one), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["plain", "ddp", "fsdp2", "checkpoint", pytest.param("compile", marks=pytest.mark.slow)])
def test_model_has_the_gradients_of_one_process(four, how):
    four.run(trained_on_ranks, how)
    if how in ("plain", "checkpoint"):
        four.run(trained_on_ranks, how, 0.3)


def module_in_rank():
    group = ranks.GROUPS[2]
    if torch.distributed.get_rank(group) < 0:
        return
    torch.manual_seed(0)
    one, x = FlashMHA(16, 2), torch.randn(30, 16)
    split = FlashMHA(16, 2, context_parallel_group=group)
    split.load_state_dict(one.state_dict())
    cu_seqlens = torch.tensor([0, 11, 30], dtype=torch.int32)
    out = unshard(split(shard(x, group, 0), cu_seqlens=cu_seqlens).detach(), group, 0, seqlen=30)
    torch.testing.assert_close(out, one(x, cu_seqlens=cu_seqlens).detach())
    for name, mask in (("seq_lens", [4]), ("key_padding_mask", torch.ones(1, 4)), ("attn_mask", torch.ones(4, 4))):
        with pytest.raises(NotImplementedError, match=f"{name} is not supported with context_parallel_group"):
            split(x[None, :4], **{name: mask})
    with pytest.raises(TypeError, match="group must be a torch.distributed.ProcessGroup"):
        FlashMHA(16, 2, context_parallel_group=2)
    with torch.autocast("cpu", torch.bfloat16):
        assert split(shard(x, group, 0)[None]).dtype == torch.bfloat16


def test_module_of_packed_documents(four):
    four.run(module_in_rank)


def padding_in_rank():
    """NaN in padding changes nothing, and gets no gradient."""
    group = ranks.GROUPS[2]
    if torch.distributed.get_rank(group) < 0:
        return
    for case in of_methods(Case("padded", S=21, sinks=True)) + of_methods(Case("packed", S=21, bounds=(0, 9, 21))):
        (*qkv, dout), sinks = case.whole()
        of_case = dict(layout=case.layout, method=case.method, sinks=sinks, backend="torch")
        of_case |= {"seqlen": 21} if sinks is not None else {"cu_seqlens": torch.tensor(case.bounds, dtype=torch.int32)}
        results = []
        for pad_value in (0, torch.nan):
            inputs = [shard(x, group, 2, case.layout, pad_value).requires_grad_() for x in qkv]
            out = context_parallel_attention(*inputs, group, **of_case)
            results.append([out.detach(), *torch.autograd.grad(out, inputs, shard(dout, group, 2, case.layout))])
        torch.testing.assert_close(*results, rtol=0, atol=0)


def test_padding_changes_nothing(four):
    four.run(padding_in_rank)


# Failures, and memory.

def steps_in_rank(num_steps):
    """How many tensors there are, and MB of memory in use, after a few steps and after many more."""
    group, found = ranks.GROUPS[2], []
    if torch.distributed.get_rank(group) < 0:
        return None
    for step in range(num_steps):
        if step in (num_steps // 4, num_steps - 1):
            gc.collect()
            tensors = sum(isinstance(x, torch.Tensor) for x in gc.get_objects())
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            found.append((tensors, pages * os.sysconf("SC_PAGE_SIZE") / 2**20))
        q, k, v = (torch.randn(1, 4, 64, 32, requires_grad=True) for _ in "qkv")
        method = attention.METHODS[step % 3]
        context_parallel_attention(q, k, v, group, method=method, causal=True).sum().backward()
    return found


@pytest.mark.slow
def test_memory_does_not_grow(four):
    """In 1,000 steps. A tensor that each step left behind would be 32 KB, and 24 MB in the end. A few tensors more may
    be those of the last step, which its threads have not freed yet."""
    *_, first, second = four.run(steps_in_rank, 1000)
    for (tensors, mb), (tensors_later, mb_later) in (first, second):
        assert tensors_later - tensors < 8 and mb_later - mb < 8


def fail_in_rank(method, rank, how, store, pipe):
    """A group of two, in which rank 1 raises, ends, or does not call at all."""
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2,
                                         timeout=datetime.timedelta(seconds=8))
    q = torch.randn(1, 4, 8, 16, requires_grad=True)
    out = context_parallel_attention(q, q, q, method=method)  # which is right, so that both are connected
    start = time.monotonic()
    try:
        if rank == 1 and how == "raises":
            raise ValueError("of this rank alone")
        if rank == 1:
            time.sleep(30 if how == "waits" else 0)
            os._exit(0)
        out.sum().backward()
        pipe.send(("none", 0))
    except Exception as error:
        pipe.send((type(error).__name__, time.monotonic() - start))


@pytest.mark.slow
@pytest.mark.parametrize("method, how", [("all_gather", "waits"), ("ring", "ends"), ("ulysses", "raises")])
def test_failing_rank_ends_the_others(tmp_path, method, how):
    """By the time-out of the group, or as soon as a connection is lost."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    other, of_other = context.Pipe()
    processes = [context.Process(target=fail_in_rank, args=(method, rank, how, f"file://{tmp_path}/store", pipe))
                 for rank, pipe in ((0, theirs), (1, of_other))]
    for process in processes:
        process.start()
    try:
        assert ours.poll(60), "rank 0 waits for ever"
        error, seconds = ours.recv()
        assert error in ("RuntimeError", "DistBackendError", "DistNetworkError") and seconds < 20
    finally:
        for process in processes:
            process.kill()
            process.join()


NO_THREADS_LEFT = """
import os, torch, minimal_attn.distributed
torch.distributed.init_process_group("gloo", init_method="file://{}", rank=0, world_size=1)
minimal_attn.distributed.context_parallel_attention(*torch.randn(3, 1, 2, 8, 16))
torch.distributed.destroy_process_group()
names = [open(f"/proc/self/task/{{thread}}/comm").read() for thread in os.listdir("/proc/self/task")]
assert not any("gloo" in name for name in names), names
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_group_ends_with_destroy_process_group(tmp_path):
    """Gloo's threads that outlive it abort the process at its end, now and then."""
    script = NO_THREADS_LEFT.format(tmp_path / "store")
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])


# The benchmark.

@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="its default size there takes minutes")
def test_benchmark_measures_every_method(tmp_path):
    run = run_by_torchrun(2, "-m", "minimal_attn.bench.context_parallel", "--calls", "2", "--json",
                          str(tmp_path / "rows.json"))
    assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path / "rows.json").read_text())
    assert result["meta"]["ranks"] == 2
    rows = {(row["impl"], row["pass"], row["nheads_k"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"]) == len(run.stdout.splitlines())
    for heads_k in (2, 4):
        for what in ("forward", "forward_backward"):
            one_gpu = rows["one_gpu", what, heads_k]["ms"]
            for impl in ("all_gather", "plain_all_gather", "ring", "ulysses"):
                row = rows[impl, what, heads_k]
                assert row["seqlen_q"] == 64 and row["ms"] > 0
                assert row["efficiency"] == pytest.approx(one_gpu / 2 / row["ms"], abs=1e-4)


def test_benchmark_needs_the_folder_of_its_file(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        context_parallel_bench.main(["--json", str(tmp_path / "none" / "rows.json")])
    assert "argument --json: there is no folder" in capsys.readouterr().err


def test_benchmark_notices_a_wrong_result():
    q, k, v = torch.randn(3, 1, 2, 64, 16, dtype=torch.bfloat16)
    out = flash_attention(q, k, v, causal=True)
    judge(out, (q, k, v))
    for wrong in (out * 1.05, flash_attention(q, k, v), out.roll(1, 2), out * torch.nan):
        with pytest.raises(ValueError, match="wrong result"):
            judge(wrong, (q, k, v))
