"""Time a Llama of transformers as a whole, with its `sdpa` attention as it comes and with ours, in turns.

    python benchmarks/models.py --json benchmarks/h200/models.json

The weights are random, in bf16, and there is one sequence without padding and cache. Two passes are timed, and by
torch's profiler the attention kernels in them: forward, without gradients and with the logits of the last token alone,
so that the head does not hide the attention; and step, both passes with the loss of all tokens and no optimizer.
"""

import argparse
import copy
import itertools
import math
import re
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))  # for a checkout that is not installed

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402

from minimal_attn import activated  # noqa: E402
from minimal_attn.bench.cases import count  # noqa: E402
from minimal_attn.bench.measure import WrongResult, environment, write_json  # noqa: E402
from minimal_attn.bench.options import file  # noqa: E402
from minimal_attn.cli import guarded  # noqa: E402
from minimal_attn.integrations.transformers import register  # noqa: E402
from minimal_attn.toolkit.benchmark import benchmark_fn  # noqa: E402
from minimal_attn.toolkit.validation import allowed_error  # noqa: E402
from torch.autograd import DeviceType  # noqa: E402
from torch.profiler import profile  # noqa: E402

# attn_implementation of transformers, and the context of a call
IMPLS = {"sdpa": ("sdpa", nullcontext), "minimal_attn": ("minimal_attn", nullcontext), "activated": ("sdpa", activated)}
MODEL = {
    "cuda": dict(num_hidden_layers=8, hidden_size=2048, intermediate_size=8192, num_attention_heads=16,
                 num_key_value_heads=4, head_dim=128, vocab_size=32000),
    "cpu": dict(num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4,
                num_key_value_heads=2, head_dim=16, vocab_size=128)}
SEQLENS = {"cuda": [8192, 32768], "cpu": [64]}
CHECKED = {"cuda": 512, "cpu": 64}  # the length at which results are compared: eager attention needs all scores at once

# Kernels of attention, by their names. Ours are in the namespaces of csrc; torch's are those of FlashAttention-2, cuDNN
# (cudnn_generated_..._sdpa_..., cudnn::fusion::...) and memory-efficient attention (fmha_cutlassF_...).
KERNELS = re.compile("(void )?(sm90|sm80|dmma|simt)::|.*(flash|sdpa|fmha|cudnn)", re.IGNORECASE)
OPS = re.compile("aten::_?scaled_dot_product|minimal_attn::")  # on a CPU, which has no kernels to name


def make_model(device):
    """A Llama in bf16 with random weights. The scores of its attention have about the standard deviation 1."""
    sizes = MODEL[device]
    config = LlamaConfig(**sizes, initializer_range=sizes["hidden_size"]**-0.5, eos_token_id=None,
                         max_position_embeddings=max(SEQLENS[device]))
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def using(model, impl):
    """The context of calls of model by an implementation."""
    attention, context = impl
    model.set_attn_implementation(attention)
    return context()


def results_of(model, impl, tokens):
    """The logits of all tokens, and the gradient of a weight below the attention of all layers, in double precision."""
    weight = model.model.layers[0].self_attn.q_proj.weight
    with using(model, impl):
        out = model(tokens, labels=tokens, use_cache=False)
        return out.logits.detach().double(), torch.autograd.grad(out.loss, weight)[0].double()


def check(model, impls):
    """{impl: {pass: the largest error of its logits or of its gradient}}, by eager attention in fp32. WrongResult by
    the error rule of tests/, with `sdpa` as PyTorch's own."""
    tokens = torch.randint(model.config.vocab_size, (1, CHECKED[model.device.type]), device=model.device)
    truths = results_of(copy.deepcopy(model).float(), ("eager", nullcontext), tokens)
    bases = [x.bfloat16() for x in results_of(model, IMPLS["sdpa"], tokens)]
    errors = {name: {} for name in impls}
    for name, impl in impls.items():
        for which, result, truth, base in zip(PASSES, results_of(model, impl, tokens), truths, bases):
            error, allowed = (result - truth).abs().max().item(), allowed_error(base, truth)
            if not error <= allowed:  # NaN is wrong
                raise WrongResult(f"{name}: the error of {which} is {error:.2e}, allowed is {allowed:.2e}")
            errors[name][which] = float(f"{error:.6g}")
    return errors


def forward(tokens, model):
    with torch.no_grad():
        model(tokens, logits_to_keep=1, use_cache=False)


def step(tokens, model):
    model.zero_grad()
    model(tokens, labels=tokens, use_cache=False).loss.backward()


PASSES = {"forward": forward, "step": step}


def attention_ms(call, device):
    """The time in which a kernel of attention runs, or on a CPU an op of attention, within one call."""
    with profile(acc_events=True) as prof:  # as there is one cycle; otherwise torch warns
        call()
        if device == "cuda":
            torch.cuda.synchronize()
    names, kind = (KERNELS, DeviceType.CUDA) if device == "cuda" else (OPS, DeviceType.CPU)
    spans = [(event.time_range.start, event.time_range.end) for event in prof.events()
             if event.device_type == kind and names.match(event.name)]
    if not spans:
        raise RuntimeError("the profiler saw no attention: how are its kernels called here?")
    total, last = 0, -math.inf
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, last))  # kernels overlap, and an op of attention calls others
        last = max(last, end)
    return total / 1e3


def make_rows(model, impls, seqlens, rounds):
    """The rows of the JSON, printed as they are measured. The implementations take turns, so that a change of the GPU's
    clock meets all of them alike."""
    errors, rows = check(model, impls), []
    for seqlen, (which, run) in itertools.product(seqlens, PASSES.items()):
        of_attention, times = {}, {name: [] for name in impls}
        tokens = torch.randint(model.config.vocab_size, (1, seqlen), device=model.device)
        for name, impl in impls.items():
            with using(model, impl):
                run(tokens, model)  # the warm-up: builds, tunes, makes workspaces
                of_attention[name] = attention_ms(partial(run, tokens, model), model.device.type)
        for name, impl in list(impls.items()) * rounds:
            with using(model, impl):
                times[name].append(benchmark_fn(run, tokens, model, warmup=0, rep=3)[0])
        for name in impls:
            ms = median(times[name])
            rows.append({"op": "models", "impl": name, "pass": which, "seqlen": seqlen, "dtype": "bfloat16",
                         "ms": float(f"{ms:.6g}"), "attention_ms": float(f"{of_attention[name]:.6g}"),
                         "max_err": errors[name][which]})
            print(f"{which:7} {seqlen:6} {name:12} {ms:8.2f} ms, {of_attention[name]:8.2f} ms of it attention, "
                  f"{median(times['sdpa']) / ms:.3f} times as fast as sdpa", flush=True)
    return rows


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    devices = ["cuda", "cpu"][not torch.cuda.is_available():]
    parser.add_argument("--device", choices=devices, default=devices[0])
    parser.add_argument("--seqlens", nargs="+", type=count, help="default: 8192 32768, on a CPU 64")
    parser.add_argument("--rounds", type=count, default=5, help="in which the implementations take turns")
    parser.add_argument("--json", type=file(".json"), metavar="FILE", help="write the rows into it")
    args = parser.parse_args(argv)
    register()
    impls = {name: impl for name, impl in IMPLS.items() if args.device == "cuda" or name != "activated"}
    torch.backends.cuda.matmul.allow_tf32 = False  # float32 means float32 for the truth
    rows = make_rows(make_model(args.device), impls, args.seqlens or SEQLENS[args.device], args.rounds)
    if args.json:
        meta = environment(args.device, "python benchmarks/models.py", argv)
        meta |= {"rounds": args.rounds, "model": MODEL[args.device]}
        write_json(args.json, meta, rows)
        print(f"wrote {args.json}")


if __name__ == "__main__":
    sys.exit(guarded("models", lambda: main(sys.argv[1:])))
