"""Time the server of examples/generate.py: tokens per second, and what attention takes of a decode step.

    python benchmarks/serving.py --json benchmarks/h200/serving.json

Tokens per second: N requests arrive at once, with prompts of equal length, one of which is read in each step. A decode
step is a CUDA graph. The step less the same step with attention that returns q is what attention costs within a model.
Its calls, each after a read of the weights of a layer, less these reads are what it costs by itself: without the reads,
a part of a small cache would still be in L2. On a CPU the model is tiny, for the tests.
"""

import argparse
import io
import itertools
import statistics
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from random import Random
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))  # for a checkout that is not installed

import torch  # noqa: E402
from rich.console import Console  # noqa: E402

from examples import generate  # noqa: E402
from examples.tiny_lm import VOCABULARY, TinyLM  # noqa: E402
from minimal_attn.bench.measure import environment, write_json  # noqa: E402
from minimal_attn.bench.options import file  # noqa: E402
from minimal_attn.cli import guarded  # noqa: E402
from minimal_attn.toolkit.benchmark import benchmark_fn, captured  # noqa: E402

MODEL = {device: {name: sizes[i] for name, sizes in generate.MODEL.items()} for i, device in enumerate(("cuda", "cpu"))}
IMPLS = {"cuda": ["cuda", "triton"], "cpu": ["torch"]}  # backends of attention_with_kvcache
REQUESTS = {"cuda": [1, 2, 4, 8, 16, 32, 64], "cpu": [1, 2]}
PROMPT, NEW = {"cuda": 512, "cpu": 8}, {"cuda": 128, "cpu": 4}
STEPS = {"cuda": [(1, 4096), (8, 4096), (64, 1024), (64, 4096), (8, 32768)], "cpu": [(2, 32)]}  # (samples, keys)
RUNS, ROUNDS = 3, 5


def make_model(device, max_seqlen):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return TinyLM(**MODEL[device], max_seqlen=max_seqlen).to(device, dtype)


def make_server(model, num_samples, seqlen_k, backend):
    prompt, num_pages = PROMPT[model.head.weight.device.type], num_samples * generate.pages_of(seqlen_k)
    return generate.Server(model, num_pages, prompt, num_samples, backend)


def tokens_per_s(model, num_requests, backend):
    device, random = model.head.weight.device.type, Random(0)
    prompts = [[random.randrange(VOCABULARY) for _ in range(PROMPT[device])] for _ in range(num_requests)]
    server, times = make_server(model, num_requests, PROMPT[device] + NEW[device], backend), []
    for _ in range(1 + RUNS):
        server.counts.clear()
        requests = [generate.Request(list(prompt), NEW[device]) for prompt in prompts]
        times.append(generate.serve(server, requests, Console(quiet=True)))
        assert server.counts["tokens"] == num_requests * NEW[device]
    return num_requests * NEW[device] / statistics.median(times[1:])


def fill(server, seqlen_k):
    """Gives every sample seqlen_k - 1 keys, in pages in a random order, and one new token."""
    samples, pages = server.max_batch, generate.pages_of(seqlen_k)
    server.cache.normal_()
    server.page_table[:samples, :pages] = torch.randperm(samples * pages).view(samples, pages)
    server.seqused_k.fill_(seqlen_k - 1)
    server.cu_seqlens.copy_(torch.arange(samples + 1))


def step_us(model, samples, seqlen_k, backend):
    """{column of a row: µs}, of medians of rounds in which the graphs take turns."""
    server = make_server(model, samples, seqlen_k, backend)
    fill(server, seqlen_k)
    heads = model.heads, model.heads_k, model.heads_k
    qkv = server.cache.new_empty(samples, sum(heads), model.head_dim).normal_()
    weights = [torch.cat([x.flatten() for x in layer.parameters()]) for layer in model.layers]

    def step(attend=server.attend):
        with mock.patch.object(server, "attend", attend):
            server.forward(samples, samples, 1)

    def reads(attend=lambda *inputs: None):
        for layer, x in enumerate(weights):
            x.sum()
            attend(samples, 1, layer, *qkv.transpose(0, 1)[None].split(heads, 1))  # views, as in the model

    calls = step, partial(step, attend=lambda *inputs: inputs[3]), reads, partial(reads, server.attend)
    calls = [captured(call).replay if server.graphs else call for call in calls]
    rep = 100 if server.graphs else 3
    times = [[1e3 * benchmark_fn(call, warmup=3, rep=rep)[0] for call in calls] for _ in range(ROUNDS)]
    step_us, without_us, reads_us, both_us = map(statistics.median, zip(*times))
    us = {"step_us": step_us, "without_attention_us": without_us, "attention_us": both_us - reads_us}
    return {name: float(f"{x:.6g}") for name, x in us.items()}


def make_rows(device, impls):
    """The rows of the JSON, printed as they are measured."""
    model, rows = make_model(device, PROMPT[device] + NEW[device]), []
    for num_requests, impl in itertools.product(REQUESTS[device], impls):
        speed = tokens_per_s(model, num_requests, impl)
        rows.append({"op": "generate", "impl": impl, "requests": num_requests, "tokens_per_s": float(f"{speed:.6g}")})
        print(f"{num_requests:3} requests {impl:8} {speed:9,.0f} tokens/s", flush=True)
    model = make_model(device, max(seqlen_k for _, seqlen_k in STEPS[device]))
    for (samples, seqlen_k), impl in itertools.product(STEPS[device], impls):
        us = step_us(model, samples, seqlen_k, impl)
        rows.append({"op": "decode_step", "impl": impl, "samples": samples, "seqlen_k": seqlen_k, **us})
        print(f"{samples:3} samples, {seqlen_k:5} keys {impl:8} step {us['step_us']:8,.1f} µs, without attention "
              f"{us['without_attention_us']:8,.1f}, attention alone {us['attention_us']:8,.1f}", flush=True)
    return rows


def main(argv):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--impls", nargs="+", choices=generate.BACKENDS, default=IMPLS[device])
    parser.add_argument("--json", type=file(".json"), metavar="FILE", help="write the rows into it")
    args = parser.parse_args(argv)
    meta = environment(device, "python benchmarks/serving.py", argv)
    with redirect_stdout(io.StringIO()) as printed:
        generate.main([] if device == "cuda" else ["--requests", "3"])
    meta |= {"model": MODEL[device], "prompt": PROMPT[device], "new_tokens": NEW[device],
             "transcript": [*map(str.rstrip, printed.getvalue().splitlines())]}
    rows = make_rows(device, args.impls)
    if args.json:
        write_json(args.json, meta, rows)
        print(f"wrote {args.json}")


if __name__ == "__main__":
    sys.exit(guarded("serving", lambda: main(sys.argv[1:])))
