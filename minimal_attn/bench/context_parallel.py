"""Context parallelism beside torch's, and beside one GPU, in one run on several GPUs.

    torchrun --nproc-per-node 2 -m minimal_attn.bench.context_parallel --json context_parallel.json

A timing has several calls in a row, as the layers of a model make them. Efficiency is the time of the whole on one GPU,
by the same kernels, over P times the time on P. Without GPUs it runs in a tiny size on CPUs with Gloo, without torch's
context_parallel, to be tested.
"""

import argparse
import json
import os
import statistics
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import activated, flash_attention, reference_attention
from ..distributed import all_gather as by_all_gather, context_parallel_attention, shard, unshard
from ..distributed.attention import METHODS
from ..distributed.layout import shards_of
from ..toolkit.benchmark import benchmark_fn
from ..toolkit.validation import allowed_error
from .measure import environment, write_json

# Lengths, numbers of key heads, heads and head_dim.
SIZES = {"cuda": ([16384, 65536, 131072], [8, 32], 32, 128), "cpu": ([64], [2, 4], 4, 16)}
PASSES = "forward", "forward_backward"
IN_A_ROW = 4  # calls
PEERS = {"torch_cudnn": nullcontext, "torch_ours": activated}  # torch's context_parallel, by which kernels


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seqlens", type=int, nargs="+", metavar="S", help="of the whole sequence")
    parser.add_argument("--calls", type=int, default=5, help="timings of each, of several calls (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows")
    args = parser.parse_args(argv)
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"argument --json: there is no folder {args.json.parent}")
    if "RANK" not in os.environ:
        parser.error("start it by torchrun: torchrun --nproc-per-node 2 -m minimal_attn.bench.context_parallel")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", **{"device_id": device} if on_gpu else {})
    seqlens, all_heads_k, heads, head_dim = SIZES[device.type]
    rows = [row for seqlen in args.seqlens or seqlens for heads_k in all_heads_k
            for row in measure(seqlen, heads_k, device, args.calls)]
    if dist.get_rank() == 0 and args.json:
        meta = environment(device.type, "torchrun -m minimal_attn.bench.context_parallel", argv)
        meta |= {"ranks": dist.get_world_size(), "nheads": heads, "head_dim": head_dim, "causal": True,
                 "dtype": "bfloat16"}
        write_json(args.json, meta, rows)
    dist.barrier()
    dist.destroy_process_group()


def measure(seqlen, heads_k, device, calls):
    """The rows of one size: of the communication alone, ours by each method, and torch's where it serves."""
    _, _, heads, head_dim = SIZES[device.type]
    g = torch.Generator(device).manual_seed(0)
    whole = [torch.randn(1, h, seqlen, head_dim, generator=g, device=device, dtype=torch.bfloat16)
             for h in (heads, heads_k, heads_k, heads)]
    local, rows = [shard(x, dim=2) for x in whole], []

    def add(impl, attend, tensors, one_gpu={}, passes=PASSES):
        """Adds a row of each pass; {pass: ms}. one_gpu: those of the whole on one GPU."""
        times = {}
        for name in passes:
            times[name] = ms = timed(pass_of(attend, tensors, name), device, calls)
            efficiency = round(one_gpu[name] / dist.get_world_size() / ms, 4) if one_gpu else None
            rows.append({"impl": impl, "pass": name, "seqlen_q": seqlen, "nheads_k": heads_k, "ms": ms,
                         "efficiency": efficiency})
            if dist.get_rank() == 0:
                print(json.dumps(rows[-1]), flush=True)
        return times

    add("all_gather_alone", gather, local[1:], passes=["forward"])
    one_gpu = add("one_gpu", partial(flash_attention, causal=True), whole)
    for method in METHODS:
        if method == "ulysses" and heads_k % dist.get_world_size():
            continue
        attend = partial(context_parallel_attention, causal=True, method=method)
        judge(unshard(attend(*local[:3]), dim=2), whole[:3])
        add(method, attend, local, one_gpu)
        if method == "all_gather":  # also by NCCL alone, all heads at once, before the kernel begins
            with mock.patch.multiple(by_all_gather, peers_of=lambda *_: None, NUM_GROUPS=1, MAX_BYTES=1 << 62):
                add("plain_all_gather", attend, local, one_gpu)
    for impl, kernels in PEERS.items() if device.type == "cuda" and heads_k == heads else ():  # no grouped heads there
        with kernels(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torchs_one_gpu = add(f"{impl}_one_gpu", torchs_attention, whole)
            with torchs_context_parallel(seqlen, device):
                add(impl, torchs_attention, local, torchs_one_gpu)
    return rows


def torchs_attention(q, k, v):
    """torch's attention, looked up in its module at each call: context_parallel puts its own function there."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def torchs_context_parallel(seqlen, device):
    """torch's context_parallel, in which scaled_dot_product_attention takes shards in the zigzag layout."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    # It splits buffers, of which there has to be one; what is timed is split already.
    return context_parallel(mesh, buffers=[torch.empty(seqlen, device=device)], buffer_seq_dims=[0])


def gather(k, v):
    """k and v of all ranks, in one piece and not in order: what communication takes at least."""
    shards_of(None, "contiguous").all_gather(torch.cat((k, v), -1))


def pass_of(attend, tensors, name):
    """A function of nothing: the forward pass of attend(q, k, v), or both passes."""
    *qkv, dout = tensors
    if name == "forward":
        return torch.no_grad()(partial(attend, *qkv))
    inputs = [x.detach().requires_grad_() for x in qkv]
    return lambda: torch.autograd.grad(attend(*inputs), inputs, dout)


def judge(out, whole):
    """ValueError if 64 rows of out miss causal attention of the whole q, k and v by more than the error rule allows."""
    q, k, v = whole
    seqlen = q.shape[2]
    rows = torch.arange(0, seqlen, max(1, seqlen // 64), device=q.device)
    seen = torch.arange(seqlen, device=q.device) <= rows[:, None]
    truth, base = (reference_attention(q[:, :, rows].to(dtype), k.to(dtype), v.to(dtype), attn_bias=seen[None, None])
                   for dtype in (torch.float32, q.dtype))
    error = (out[:, :, rows].float() - truth).abs().max().item()
    if not error <= allowed_error(base, truth.double()):
        raise ValueError(f"wrong result: the error is {error:.2e}")


def timed(call, device, calls):
    """The median ms of a call for the slowest rank, of `calls` timings of IN_A_ROW calls."""
    def in_a_row():
        for _ in range(IN_A_ROW):
            call()

    call()
    times = []
    for _ in range(calls):
        dist.barrier()
        call()  # keeps the GPU busy while the host prepares the first timed one
        slowest = torch.tensor(benchmark_fn(in_a_row, warmup=0, rep=1)[0] / IN_A_ROW, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(slowest.item())
    return float(f"{statistics.median(times):.6g}")


if __name__ == "__main__":
    sys.exit(main())
