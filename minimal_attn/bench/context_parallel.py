"""Context parallelism beside torch's, and beside one GPU, in one run on several GPUs.

    torchrun --nproc-per-node 2 -m minimal_attn.bench.context_parallel --json context_parallel.json

Before a method of ours is timed, 64 rows of its out are compared with attention in fp32. A timing has several calls in
a row, as the layers of a model make them, behind one that lets the host be ahead of the GPUs. The slowest rank counts,
and the median of timings. Efficiency is the time of the whole on one GPU, by the same kernels, over P times the time on
P. Without GPUs it runs in a tiny size on CPUs with Gloo, without torch's context_parallel, to be tested. Read next:
../distributed/attention.py.
"""

import argparse
import json
import os
import statistics
import sys
from contextlib import contextmanager, nullcontext
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
from ..distributed.layout import all_gather
from ..toolkit.benchmark import benchmark_fn
from ..toolkit.validation import allowed_error
from .measure import environment, write_json

# (on GPUs, on a CPU)
SEQLENS = {True: [16384, 65536, 131072], False: [64]}
HEADS_K = {True: [8, 32], False: [2, 4]}
HEADS, HEAD_DIM = {True: 32, False: 4}, {True: 128, False: 16}
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
    rows = []
    for seqlen in args.seqlens or SEQLENS[on_gpu]:
        for heads_k in HEADS_K[on_gpu]:
            rows += measure(seqlen, heads_k, device, args.calls)
    if dist.get_rank() == 0:
        meta = environment(device.type, "torchrun -m minimal_attn.bench.context_parallel", argv)
        meta |= {"ranks": dist.get_world_size(), "nheads": HEADS[on_gpu], "head_dim": HEAD_DIM[on_gpu], "causal": True,
                 "dtype": "bfloat16"}
        if args.json:
            write_json(args.json, meta, rows)
    dist.barrier()
    dist.destroy_process_group()


def measure(seqlen, heads_k, device, calls):
    """The rows of one size: of the communication alone, ours by each method, and torch's where it serves."""
    on_gpu, heads = device.type == "cuda", HEADS[device.type == "cuda"]
    g = torch.Generator(device).manual_seed(0)
    shapes = [(1, h, seqlen, HEAD_DIM[on_gpu]) for h in (heads, heads_k, heads_k, heads)]
    whole = [torch.randn(shape, generator=g, device=device, dtype=torch.bfloat16) for shape in shapes]
    local = [shard(x, dim=2) for x in whole]
    rows = []

    def add(impl, ms, one_gpu={}):
        """Adds rows of {pass: ms}. one_gpu: the same of the whole on one GPU."""
        for what, x in ms.items():
            efficiency = round(one_gpu[what] / dist.get_world_size() / x, 4) if one_gpu else None
            rows.append({"impl": impl, "pass": what, "seqlen_q": seqlen, "nheads_k": heads_k, "ms": x,
                         "efficiency": efficiency})
            if dist.get_rank() == 0:
                print(json.dumps(rows[-1]), flush=True)

    def add_passes(impl, attend, tensors, one_gpu={}):
        ms = {what: timed(passes(attend, tensors, what), device, calls) for what in PASSES}
        add(impl, ms, one_gpu)
        return ms

    add("all_gather_alone", {"forward": timed(partial(gather, *local[1:3]), device, calls)})
    one_gpu = add_passes("one_gpu", partial(flash_attention, causal=True), whole)
    for method in METHODS:
        if method == "ulysses" and heads_k % dist.get_world_size():
            continue
        attend = partial(context_parallel_attention, causal=True, method=method)
        judge(unshard(attend(*local[:3]), dim=2), whole[:3])
        add_passes(method, attend, local, one_gpu)
        if method == "all_gather":
            with plain():
                add_passes("plain_all_gather", attend, local, one_gpu)
    for impl, kernels in PEERS.items() if on_gpu and heads_k == heads else ():  # its cuDNN has no grouped heads there
        with kernels(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torchs_one_gpu = add_passes(f"{impl}_one_gpu", torchs_attention, whole)
            with torchs_context_parallel(seqlen, device):
                add_passes(impl, torchs_attention, local, torchs_one_gpu)
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


@contextmanager
def plain():
    """Lets NCCL gather all heads at once, before the kernel begins."""
    with mock.patch.multiple(by_all_gather, peers_of=lambda *_: None, NUM_GROUPS=1, MAX_BYTES=1 << 62):
        yield


def gather(k, v):
    """k and v of all ranks, in one piece and not in order: what communication takes at least."""
    kv = torch.cat((k, v), -1)
    all_gather(kv.new_empty(dist.get_world_size() * kv.shape[0], *kv.shape[1:]), kv, dist.group.WORLD).wait()


def passes(attend, tensors, what):
    """A function of nothing: the forward pass of attend(q, k, v), or both passes."""
    *qkv, dout = tensors
    if what == "forward":
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
