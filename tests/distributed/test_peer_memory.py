"""Peer memory of the all-gather, which files stand for, and the heads that are gathered one group after the other."""

from unittest.mock import Mock

import pytest
import torch

import peer_files
import ranks
from minimal_attn.distributed import all_gather, exchange, peer_memory
from test_distributed import FEATURES, check, compare, compare_in_groups, in_turn

pytestmark = pytest.mark.cpu


def compare_through_files(cases, folder, in_groups):
    """compare, by peer memory. in_groups: of heads, whose gradients are summed one head after the other."""
    with pytest.MonkeyPatch.context() as patch:
        peer_files.use(patch, folder)
        if in_groups:
            patch.setattr(exchange, "MAX_SUM_BYTES", 1)
        return compare_in_groups(cases) if in_groups else compare(cases)


@pytest.mark.parametrize("in_groups", [False, True])
def test_results_through_peer_memory(four, tmp_path, in_groups):
    """Slots grow on the way, and both of them are used many times."""
    cases = in_turn(FEATURES[in_groups::2], H=12, Hk=6)
    cases += in_turn(FEATURES[1 - in_groups::2], 1, H=12, Hk=6, dropout_p=0.3) + in_turn(FEATURES[:3], size=3)
    check(four, cases, compare_through_files, tmp_path, in_groups)


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


@ranks.in_group()
def unopened_in_rank(group, folder):
    """Symmetric memory without a barrier: messages take its place, and a warning says so."""
    with pytest.MonkeyPatch.context() as patch:
        peer_files.use(patch, folder)
        patch.setattr(peer_memory, "RANKS", [])
        patch.delattr(peer_files.Files, "barrier")
        with pytest.warns(UserWarning, match="there is no peer memory: .*barrier"):
            assert peer_memory.opened(group, torch.device("cpu")) is None


@ranks.in_group()
def grown_in_rank(group, folder):
    """Values that a rank finds in the slots of the other while they grow, and after one that nobody fetched from."""
    rank, found = torch.distributed.get_rank(group), []
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


@ranks.in_group()
def failing_growth_in_rank(group, folder):
    """Rank 0 has no memory: both raise, and the next call has slots again."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    rank = torch.distributed.get_rank(group)
    with pytest.MonkeyPatch.context() as patch:
        peer_files.use(patch, folder)
        memory = peer_memory.PeerMemory(group, torch.device("cpu"))
        memory.slot((1,), torch.int64)
        with pytest.MonkeyPatch.context() as failing, pytest.raises(torch.OutOfMemoryError, match="a rank has no"):
            if rank == 0:
                failing.setattr(symmetric_memory, "empty", Mock(side_effect=torch.OutOfMemoryError("none left")))
            memory.slot((1 << 20,), torch.int64)
        assert memory.slot_bytes == 0 and memory.handle is None
        slot, there = memory.slot((3,), torch.int64), torch.empty(3, dtype=torch.int64)
        slot.of_rank(rank).fill_(rank)
        slot.fetch([(there, slot.of_rank(1 - rank))])
        assert there.tolist() == 3 * [1 - rank]


@pytest.mark.parametrize("in_rank", [unopened_in_rank, failing_growth_in_rank])
def test_without_memory(in_rank, four, tmp_path):
    four.run(in_rank, tmp_path)


@pytest.mark.parametrize("has_peers, size, heads, heads_k, rows, forward, backward", [
    (False, 2, 32, 8, 8192, [8], [1, 6, 1]), (False, 2, 32, 32, 32768, [1, 8, 23], [4, 24, 4]),
    (False, 2, 32, 8, 1 << 19, [2, 2, 2, 2], [2, 2, 2, 2]), (False, 8, 32, 8, 16384, [1, 7], [1, 6, 1]),
    (False, 64, 64, 8, 2048, [4, 4], [4, 4]),  # by MIN_BYTES
    (False, 2, 4, 1, 8192, [1], [1]), (False, 2, 4, 2, 1 << 22, [1, 1], [1, 1]),
    (True, 2, 32, 8, 32768, [1, 7], [8]), (True, 2, 32, 32, 65536, [4, 16, 12], [4, 16, 8, 4])])
def test_heads_are_gathered_in_groups_that_grow(has_peers, size, heads, heads_k, rows, forward, backward):
    """And all keys and values of a group of several heads have at most MAX_BYTES."""
    q, k = (torch.empty(1, h, rows, 128, device="meta", dtype=torch.bfloat16) for h in (heads, heads_k))
    for is_backward, groups in ((False, forward), (True, backward)):
        slices = all_gather.head_groups(q, k, k, size, has_peers, is_backward)
        assert [len(range(heads_k)[one]) for one in slices] == groups
        assert [i for one in slices for i in range(heads_k)[one]] == list(range(heads_k))
