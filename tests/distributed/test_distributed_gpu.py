"""Context parallelism on GPUs with NCCL: beside one GPU, and torch's own context_parallel on our kernels."""

import dataclasses
import os

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import minimal_attn
import ranks
from minimal_attn.bench.context_parallel import torchs_attention, torchs_context_parallel
from minimal_attn.distributed import all_gather, context_parallel_attention, shard, unshard
from test_activate_gpu import OURS, TORCHS
from test_distributed import (FEATURES, METHODS, Case, check, compare, compare_in_groups, gather_in_groups, in_turn,
                              of_methods, same_bits)
from test_distributed_errors import error_of_first_rank

NUM_GPUS = torch.cuda.device_count()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS < 2, reason="needs 2 GPUs")]


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    processes = ranks.Ranks(tmp_path_factory.mktemp("ranks"), min(NUM_GPUS, 4), on_gpus=True)
    yield processes
    processes.end()


@pytest.mark.parametrize("backend, dtype, dropout_p", [
    ("cuda", torch.bfloat16, 0), ("cuda", torch.bfloat16, 0.3), ("cuda", torch.float32, 0.3),
    ("triton", torch.bfloat16, 0.3), ("triton", torch.float32, 0)], ids=str)
def test_results_are_those_of_one_gpu(gpus, backend, dtype, dropout_p):
    more = [Case("documents_over_chunks", S=960, bounds=(0, 3, 401, 940), causal=True), Case("whole", S=1024, B=2)]
    for method in METHODS:
        check(gpus, in_turn(FEATURES + more, METHODS.index(method), method=method, dtype=dtype, backend=backend, D=64,
                            Dv=64, dropout_p=dropout_p))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.skipif(NUM_GPUS < 4, reason="needs 4 GPUs"))])
def test_results_at_length(gpus, size):
    """In packed calls, and with the all-gather also in calls of long pieces."""
    case = Case("long", size=size, S=4096, H=8, Hk=4, D=128, Dv=128, causal=True, dtype=torch.bfloat16, backend="cuda")
    longer = dataclasses.replace(case, name="longer", S=4096 * size, H=4, Hk=2)
    cases = [one for each in (case, longer) for one in of_methods(each, layouts=["zigzag"]) if one.Hk % size == 0
             or one.method != "ulysses"]
    check(gpus, cases, compare_in_groups)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_results_of_heads_in_groups(gpus, dtype, monkeypatch):
    """There are three groups, with slopes of each sample."""
    case = Case("groups", B=2, S=1536, H=12, Hk=6, D=64, Dv=64, causal=True, alibi=True, dtype=dtype,
                backend="cuda")
    q, k = (torch.empty(2, heads, 768, 64, device="meta", dtype=dtype) for heads in (12, 6))
    gather_in_groups(monkeypatch)  # as in the processes
    for has_peers in (False, True):
        assert len(all_gather.head_groups(q, k, k, 2, has_peers, is_backward=True)) == 3
    check(gpus, [case], compare_in_groups)


def compare_without_peer_memory(cases):
    if torch.distributed.get_rank(ranks.GROUPS[2]) < 0:
        return {}
    with pytest.MonkeyPatch.context() as patch:
        assert all_gather.peers_of(ranks.GROUPS[2], torch.device(ranks.DEVICE))
        patch.setenv("MINIMAL_ATTN_PEER_MEMORY", "0")
        assert all_gather.peers_of(ranks.GROUPS[2], torch.device(ranks.DEVICE)) is None
        return compare(cases) | compare_in_groups(cases)


def test_results_without_peer_memory(gpus):
    cases = [dataclasses.replace(case, dtype=torch.bfloat16, backend="cuda", D=64, Dv=64, H=12, Hk=6)
             for case in FEATURES]
    check(gpus, cases, compare_without_peer_memory)


@ranks.in_group()
def many_calls_in_rank(group):
    """Calls of several sizes, on two streams in turn, while rank 1 is late with all that it fetches. The host does not
    wait between them. Then the same by messages."""
    device = torch.device(ranks.DEVICE)
    peers, streams, results = all_gather.peers_of(group, device), [torch.cuda.Stream(device) for _ in range(2)], []
    for has_peers in (True, False):
        os.environ["MINIMAL_ATTN_PEER_MEMORY"] = str(int(has_peers))
        for step in range(40):
            with torch.cuda.stream(streams[step % 2]):
                g = torch.Generator(device).manual_seed(step)
                q, k, v, dout = (torch.randn(1, heads, 1024 * (1 + step % 3), 64, generator=g, device=device,
                                             dtype=torch.bfloat16) for heads in (8, 4, 4, 8))
                inputs = [shard(x, group, 2).requires_grad_() for x in (q, k, v)]
                for memory in (peers.gathered, peers.summed):
                    with torch.cuda.stream(memory.stream):
                        torch.cuda._sleep(1_000_000 * torch.distributed.get_rank(group))
                out = context_parallel_attention(*inputs, group, causal=True, method="all_gather", deterministic=True)
                results.append([out.detach(), *torch.autograd.grad(out, inputs, shard(dout, group, 2))])
    del os.environ["MINIMAL_ATTN_PEER_MEMORY"]
    torch.cuda.synchronize()
    for found, wanted in zip(results[:40], results[40:], strict=True):
        assert torch.equal(found[0], wanted[0])
        for x, y in zip(found[1:], wanted[1:]):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


def test_calls_in_a_row_while_a_rank_is_late(gpus):
    gpus.run(many_calls_in_rank)


def test_missing_rank_ends_the_others(tmp_path):
    """By the time-out of the group, at the barrier of peer memory."""
    error, seconds = error_of_first_rank(tmp_path, "all_gather", "waits", on_gpus=True)
    assert error == "AcceleratorError" and 5 < seconds < 15


@pytest.mark.parametrize("D", [64, 128])
def test_all_gather_has_the_bits_of_one_gpu(gpus, D):
    """Chunks are multiples of all tiles of rows, 64, 128 and 192."""
    case = Case("bits", S=4 * 768, bounds=(0, 4 * 768), H=8, Hk=2, D=D, Dv=D, causal=True, dtype=torch.bfloat16,
                backend="cuda")
    assert gpus.run(same_bits, case)[-1] is True


def torchs_in_rank(backend):
    """torch's context_parallel on our kernels, forward and backward, beside torch's attention on one GPU."""
    group = torch.distributed.group.WORLD
    size = torch.distributed.get_world_size()
    case = Case("torch", S=1024 * size, H=4, Hk=4, D=64, Dv=64, causal=True, dtype=torch.bfloat16)
    (*qkv, dout), _ = case.whole()
    whole = [x.requires_grad_() for x in qkv]
    out = torchs_attention(*whole)
    wanted = [out.detach(), *torch.autograd.grad(out, whole, dout)]
    local = [shard(x.detach(), group, 2).requires_grad_() for x in qkv]
    with minimal_attn.activated(), sdpa_kernel(SDPBackend.__members__[backend]), torch.profiler.profile() as profile, \
            torchs_context_parallel(case.S, torch.device("cuda")):
        out = torchs_attention(*local)
        gradients = torch.autograd.grad(out, local, shard(dout, group, 2))
    found = [unshard(x.detach(), group, 2) for x in (out, *gradients)]
    for x, y in zip(found, wanted):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2 * y.abs().max().item())
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len({name for name in names if OURS.search(name)}) >= 2 and not any(map(TORCHS.search, names)), names


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "CUDNN_ATTENTION"])
def test_torchs_context_parallel_runs_on_our_kernels(gpus, backend):
    gpus.run(torchs_in_rank, backend)
