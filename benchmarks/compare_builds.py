"""Time the kernels of two checkouts against one another, in turns.

    git worktree add /tmp/old HEAD~1
    python benchmarks/compare_builds.py /tmp/old .

Each checkout is loaded by a process of its own. The two take turns on the GPU, so that a change of its clock meets both
alike. Calls are timed in a CUDA graph, without the host. `=` says that all results have the same bits. Only
deterministic passes compare dq: in others, blocks add to it in any order.
"""

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import geometric_mean, median

KINDS = "forward", "backward", "decode"
TOKENS, WIDTH = 16384, 2048  # batch_size · seqlen; nheads · head_dim


def settings():
    """(kind, options of the call) of everything that is timed."""
    for kind, long in (("forward", 16384), ("backward", 8192)):
        for head_dim, seqlen, causal in itertools.product((64, 128, 256), (2048, long), (False, True)):
            yield kind, {"head_dim": head_dim, "seqlen": seqlen, "causal": causal}
    only_forward = {"softcap": 20.}, {"bias": "bfloat16"}, {"bias": "bool"}, {"window": 512}
    for more in ({"alibi": True}, {"dropout_p": 0.1}, {"packed": True}, {"group": 8}, *only_forward):
        yield "forward", {"head_dim": 128, "seqlen": 4096, "causal": True, **more}
    for more in ({"alibi": True}, {"dropout_p": 0.1}, {"packed": True}, {"group": 8}, {"deterministic": True}):
        yield "backward", {"head_dim": 128, "seqlen": 4096, "causal": True, **more}
    for head_dim, kernel, kind in itertools.product((64, 128), ("sm80", "simt"), KINDS[:2]):
        yield kind, {"head_dim": head_dim, "seqlen": 2048, "causal": True, "kernel": kernel}
    for batch_size, group, seqlen, rows in ((1, 4, 8192, 1), (8, 4, 8192, 1), (64, 8, 1024, 1), (8, 4, 4096, 16),
                                            (4, 4, 4096, 256)):
        yield "decode", {"batch_size": batch_size, "group": group, "seqlen": seqlen, "rows": rows}


def attention(kind, head_dim, seqlen, causal, alibi=False, bias=None, dropout_p=0, window=None, packed=False, group=1,
              deterministic=False, softcap=0., kernel=None):
    """A call, and the tensors whose bits are compared."""
    import torch

    from minimal_attn import _build, flash_attention

    batch_size, nheads = TOKENS // seqlen, WIDTH // head_dim
    shape = (1, nheads, TOKENS, head_dim) if packed else (batch_size, nheads, seqlen, head_dim)

    is_backward = kind == "backward"
    q, k, v, dout = (torch.randn(shape[0], heads, *shape[2:], device="cuda", dtype=torch.bfloat16,
                                 requires_grad=is_backward)
                     for heads in (nheads, nheads // group, nheads // group, nheads))
    options = {"causal": causal, "softcap": softcap, "dropout_p": dropout_p, "deterministic": deterministic}
    if alibi:
        options["alibi_slopes"] = torch.rand(nheads, device="cuda")
    if bias:
        x = torch.randn(nheads, seqlen, seqlen, device="cuda", dtype=torch.bfloat16)
        options["attn_bias"] = x > -1 if bias == "bool" else x
    if window:
        options["window_size"] = window, 0
    if packed:
        ends = torch.arange(0, TOKENS + 1, seqlen, device="cuda", dtype=torch.int32)
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": seqlen, "max_seqlen_k": seqlen}
    if dropout_p:
        options["dropout_seed"] = torch.ones((), dtype=torch.int64, device="cuda")
    _build.load().force_kernel(kernel)
    if not is_backward:
        return lambda: [flash_attention(q, k, v, backend="cuda", **options)]
    out = flash_attention(q, k, v, backend="cuda", **options)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)[0 if deterministic else 1:]


def decode(batch_size, group, seqlen, rows):
    import torch

    from minimal_attn import attention_with_kvcache

    q = torch.randn(batch_size, 32, rows, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch_size, 32 // group, seqlen, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    lengths = torch.full((batch_size,), seqlen, dtype=torch.int32, device="cuda")
    return lambda: [attention_with_kvcache(q, k, v, lengths, causal=True, backend="cuda")]


def serve():
    """A process of one checkout: reads settings, prints a digest of the results and, when asked, milliseconds."""
    import torch

    from minimal_attn import _build

    print(json.dumps(_build.load().has_cuda), flush=True)
    stream = torch.cuda.Stream()
    torch.cuda.set_stream(stream)  # a backward pass runs where its forward pass ran
    for line in sys.stdin:
        kind, options = json.loads(line)
        torch.manual_seed(0)
        call = decode(**options) if kind == "decode" else attention(kind, **options)
        digest = hashlib.sha256()
        for x in call():
            digest.update(x.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def milliseconds(repeats):
            begin.record()
            for _ in range(repeats):
                graph.replay()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / repeats

        repeats = max(1, min(200, int(10 / milliseconds(2))))
        print(json.dumps(digest.hexdigest()), flush=True)
        while sys.stdin.readline() == "again\n":
            print(json.dumps(milliseconds(repeats)), flush=True)
        del graph, call
        torch.cuda.empty_cache()


class Worker:
    def __init__(self, checkout):
        self.builds = tempfile.TemporaryDirectory()
        environment = {**os.environ, "PYTHONPATH": f"{checkout.resolve()}:{os.environ.get('PYTHONPATH', '')}",
                       "TORCH_EXTENSIONS_DIR": self.builds.name}
        self.process = subprocess.Popen([sys.executable, __file__, "--serve"], text=True, env=environment,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def answer(self):
        line = self.process.stdout.readline()
        return json.loads(line) if line else sys.exit("the process of a checkout has ended")

    def ask(self, line):
        print(line, file=self.process.stdin, flush=True)
        return self.answer() if line != "done" else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="*", type=Path, help="two; the second is compared with the first")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve()
    if len(options.checkouts) != 2 or not all((path / "csrc/flash.h").is_file() for path in options.checkouts):
        parser.error("needs two checkouts, each with csrc/flash.h")
    workers = [Worker(checkout) for checkout in options.checkouts]  # both build now
    if not all([worker.answer() for worker in workers]):
        parser.error("needs a GPU, and nvcc")
    print("kind, options, microseconds of the first, speed of the second by it, = for the same bits")
    ratios = {kind: [] for kind in options.kinds}
    for kind, call in settings():
        if kind not in ratios:
            continue
        first, second = [worker.ask(json.dumps([kind, call])) for worker in workers]
        times = [[worker.ask("again") for worker in workers] for _ in range(options.rounds)]
        for worker in workers:
            worker.ask("done")
        ratios[kind].append(median(old / new for old, new in times))
        print(f"{kind:8} {call} {1000 * median(old for old, _ in times):.1f} {ratios[kind][-1]:.3f}"
              + "=" * (first == second), flush=True)
    for kind, column in ratios.items():
        print(f"{kind}: {len(column)} settings, geometric mean {geometric_mean(column):.4f}, least {min(column):.3f}")


if __name__ == "__main__":
    main()
