"""Time the kernels of two checkouts against one another, in turns.

    git worktree add /tmp/old HEAD~1
    python benchmarks/compare_builds.py /tmp/old .

The process of each checkout takes its turn on the GPU, so that a change of the clock meets both alike. Calls are timed
in a CUDA graph, without the host. `=` says that all results have the same bits. Only deterministic passes compare dq:
in others, blocks add to it in any order.
"""

import argparse
import hashlib
import itertools
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median

import torch

KINDS = "forward", "backward", "decode"
TOKENS, WIDTH = 16384, 2048  # batch_size · seqlen; nheads · head_dim
BOTH = {"alibi": True}, {"dropout_p": 0.1}, {"packed": True}, {"group": 8}
MORE = {"forward": (*BOTH, {"softcap": 20.}, {"bias": "bfloat16"}, {"bias": "bool"}, {"window_size": (512, 0)}),
        "backward": (*BOTH, {"deterministic": True})}


def settings():
    """(kind, options of the call) of everything that is timed."""
    for kind, long in (("forward", 16384), ("backward", 8192)):
        for head_dim, seqlen, causal in itertools.product((64, 128, 256), (2048, long), (False, True)):
            yield kind, {"head_dim": head_dim, "seqlen": seqlen, "causal": causal}
        for more in MORE[kind]:
            yield kind, {"head_dim": 128, "seqlen": 4096, "causal": True, **more}
        for head_dim, kernel in itertools.product((64, 128), ("sm80", "simt")):
            yield kind, {"head_dim": head_dim, "seqlen": 2048, "causal": True, "kernel": kernel}
    for sizes in ((1, 4, 8192, 1), (8, 4, 8192, 1), (64, 8, 1024, 1), (8, 4, 4096, 16), (4, 4, 4096, 256)):
        yield "decode", dict(zip(("batch_size", "group", "seqlen", "rows"), sizes))


def attention(kind, head_dim, seqlen, alibi=False, bias=None, packed=False, group=1, kernel=None, **options):
    """A call that returns the tensors whose bits are compared."""
    from minimal_attn import _build, flash_attention

    batch_size, nheads = TOKENS // seqlen, WIDTH // head_dim
    shape = (1, nheads, TOKENS, head_dim) if packed else (batch_size, nheads, seqlen, head_dim)
    q, k, v, dout = (torch.randn(shape[0], heads, *shape[2:], device="cuda", dtype=torch.bfloat16,
                                 requires_grad=kind == "backward")
                     for heads in (nheads, nheads // group, nheads // group, nheads))
    if alibi:
        options["alibi_slopes"] = torch.rand(nheads, device="cuda")
    if bias:
        x = torch.randn(nheads, seqlen, seqlen, device="cuda", dtype=torch.bfloat16)
        options["attn_bias"] = x > -1 if bias == "bool" else x
    if packed:
        ends = torch.arange(0, TOKENS + 1, seqlen, device="cuda", dtype=torch.int32)
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": seqlen, "max_seqlen_k": seqlen}
    if "dropout_p" in options:
        options["dropout_seed"] = torch.ones((), dtype=torch.int64, device="cuda")
    _build.load().force_kernel(kernel)
    forward = partial(flash_attention, q, k, v, backend="cuda", **options)
    if kind == "forward":
        return lambda: [forward()]
    out, first = forward(), 0 if "deterministic" in options else 1
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)[first:]


def decode(batch_size, group, seqlen, rows):
    from minimal_attn import attention_with_kvcache

    q = torch.randn(batch_size, 32, rows, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch_size, 32 // group, seqlen, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    lengths = torch.full((batch_size,), seqlen, dtype=torch.int32, device="cuda")
    return lambda: [attention_with_kvcache(q, k, v, lengths, causal=True, backend="cuda")]


work = {}  # of the process of one checkout: the call that is timed, its graph, and how many replays fill 10 ms


def build(checkout, builds):
    """Whether the build has kernels for GPUs."""
    sys.path.insert(0, checkout)
    os.environ["TORCH_EXTENSIONS_DIR"] = builds
    from minimal_attn import _build

    return _build.load().has_cuda


def prepare(kind, options):
    """Captures a call, and returns a digest of its results."""
    work.clear()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    torch.cuda.set_stream(torch.cuda.Stream())  # a backward pass runs where its forward pass ran
    call = work["call"] = decode(**options) if kind == "decode" else attention(kind, **options)
    bits = b"".join(x.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes() for x in call())
    work.update(graph=torch.cuda.CUDAGraph(), repeats=2)
    with torch.cuda.graph(work["graph"], stream=torch.cuda.current_stream()):
        call()
    work["repeats"] = max(1, min(200, int(10 / milliseconds())))
    return hashlib.sha256(bits).hexdigest()


def milliseconds():
    """The time of a call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(work["repeats"]):
        work["graph"].replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / work["repeats"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs=2, type=Path, help="the second is compared with the first")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args()
    if not all((path / "csrc/flash.h").is_file() for path in options.checkouts):
        parser.error("needs two checkouts, each with csrc/flash.h")
    folders = [tempfile.TemporaryDirectory() for _ in options.checkouts]
    workers = [ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) for _ in options.checkouts]
    builds = [worker.submit(build, str(path.resolve()), folder.name)
              for worker, path, folder in zip(workers, options.checkouts, folders)]
    if not all([has_cuda.result() for has_cuda in builds]):
        parser.error("needs a GPU, and nvcc")
    print("kind, options, microseconds of the first, speed of the second by it, = for the same bits")
    ratios = {kind: [] for kind in options.kinds}
    for kind, call in (x for x in settings() if x[0] in ratios):
        first, second = [worker.submit(prepare, kind, call).result() for worker in workers]
        times = [[worker.submit(milliseconds).result() for worker in workers] for _ in range(options.rounds)]
        ratios[kind].append(median(old / new for old, new in times))
        print(f"{kind:8} {call} {1000 * median(old for old, _ in times):.1f} {ratios[kind][-1]:.3f}"
              + "=" * (first == second), flush=True)
    for kind, column in ratios.items():
        print(f"{kind}: {len(column)} settings, geometric mean {geometric_mean(column):.4f}, least {min(column):.3f}")


if __name__ == "__main__":
    main()
