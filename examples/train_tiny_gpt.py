r"""Train a small GPT on the sources of this repository with each backend: the same loss curve, at what speed?

    python -m examples.train_tiny_gpt --backend cuda triton torch --out training
    python -m examples.train_tiny_gpt --backend cuda torch:cudnn torch:flash --out training_16k \
        --layers 4 --embed-dim 512 --heads 4 --seqlen 16384 --batch-size 1

Run it from the repository's root. The sequences of the first run are short. In the second run they are so long that
attention takes most of a step.

All backends start from the same weights and see the same batches, so their losses may differ by rounding alone. That
holds with --dropout too. Which probabilities are dropped is a function of a seed, which torch's generator draws
(minimal_attn/reference/dropout.py). After the same torch.manual_seed, every backend drops the same ones.

The text is the sources of the kernels as bytes. It needs no download, and it changes only where records are made anew.
It is half a megabyte of code and prose. In a few hundred steps a model learns its spelling but not its sentences, so
the curves are smooth. A model learns an exercise in arithmetic all at once, at a step that rounding alone can move.
Read next: ../minimal_attn/modules.py, the attention of each block.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import math
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from minimal_attn import FlashMHA
from minimal_attn.attention import BACKENDS
from minimal_attn.checks import check_number
from minimal_attn.cli import guarded

# Modules that need rich or matplotlib are imported in functions: there guarded() says in one line what is missing.

ROOT = Path(__file__).resolve().parents[1]
SOURCES = "csrc/*", "triton_ref/*.py"  # what source_digest, which every record holds, is of
VOCABULARY = 256  # bytes
# Names for the backend "torch" with one of the kernels behind torch's scaled_dot_product_attention, on a GPU.
SDPA_BACKENDS = {"torch:cudnn": SDPBackend.CUDNN_ATTENTION, "torch:flash": SDPBackend.FLASH_ATTENTION}
# (on a GPU, on a CPU), where Triton's interpreter takes half a minute for it
SIZES = {"layers": (6, 2), "embed_dim": (384, 32), "heads": (6, 2), "seqlen": (1024, 32), "batch_size": (16, 4),
         "steps": (300, 60)}
LEARNING_RATE = 1e-3
WARM_UP = 0.1  # share of the steps: the learning rate rises, and the clock is not running yet, for kernels are tuned


class Block(nn.Module):
    """(B, S, E) -> (B, S, E), pre-norm: what each part adds, it computes from normalised values."""

    def __init__(self, embed_dim, heads, dropout, backend):
        super().__init__()
        # No bias: that of the keys would have no gradient but rounding errors, of which Adam makes whole steps.
        self.attention = nn.Sequential(nn.LayerNorm(embed_dim), FlashMHA(embed_dim, heads, bias=False, dropout=dropout,
                                                                        causal=True, backend=backend))
        self.mlp = nn.Sequential(nn.LayerNorm(embed_dim), nn.Linear(embed_dim, 4 * embed_dim), nn.GELU(),
                                 nn.Linear(4 * embed_dim, embed_dim))

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


class TinyGPT(nn.Module):
    """tokens (B, S), int64 -> logits (B, S, VOCABULARY) of what comes next."""

    def __init__(self, args, backend):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, args.embed_dim)
        self.positions = nn.Embedding(args.seqlen, args.embed_dim)
        self.blocks = nn.Sequential(*(Block(args.embed_dim, args.heads, args.dropout, backend)
                                      for _ in range(args.layers)))
        self.head = nn.Sequential(nn.LayerNorm(args.embed_dim), nn.Linear(args.embed_dim, VOCABULARY, bias=False))
        self.head[1].weight = self.tokens.weight  # a token is read and written by the same vector
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens):
        return self.head(self.blocks(self.tokens(tokens) + self.positions.weight[:tokens.shape[1]]))


@functools.cache
def text():
    """All the bytes of SOURCES."""
    return b"".join(file.read_bytes() for pattern in SOURCES for file in sorted(ROOT.glob(pattern)) if file.is_file())


def train(args, backend, console):
    """(the loss of each step, tokens per second after the warm-up) with a backend, or one of SDPA_BACKENDS."""
    with sdpa_kernel(SDPA_BACKENDS[backend]) if backend in SDPA_BACKENDS else contextlib.nullcontext():
        return train_model(args, backend, console)


def train_model(args, backend, console):
    from minimal_attn.command.progress import watched

    torch.manual_seed(args.seed)  # the weights, drawn on the CPU for any device, and the seeds of dropout
    model = TinyGPT(args, backend.partition(":")[0]).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    warm_up = int(WARM_UP * args.steps)
    # In a line up, and along half a cosine down.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (
        min(1, (step + 1) / (warm_up + 1)) * (1 + math.cos(math.pi * step / args.steps)) / 2))
    data = torch.frombuffer(bytearray(text()), dtype=torch.uint8).to(args.device)
    starts = torch.randint(len(data) - args.seqlen, (args.steps, args.batch_size, 1),
                           generator=torch.Generator().manual_seed(args.seed)).to(args.device)
    window = torch.arange(args.seqlen + 1, device=args.device)
    losses = torch.empty(args.steps, device=args.device)  # read at the end: .item() would wait for the GPU in each step
    for step in watched(range(args.steps), f"training with {backend}", console):
        if step == warm_up:
            start = now(args.device)
        batch = data[starts[step] + window].long()  # (B, S + 1)
        # Autocast rather than bf16 weights, to which Adam's small steps would often add nothing.
        with torch.autocast(args.device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
            loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses[step] = loss.detach()
    seconds = now(args.device) - start
    return losses.tolist(), (args.steps - warm_up) * args.batch_size * args.seqlen / seconds


def now(device):
    """The time in seconds at which the device is done with everything so far."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def why_not_here(name, args):
    """Why a backend, or one of SDPA_BACKENDS, is not available for these arguments; None if it is."""
    if name in SDPA_BACKENDS and args.device.type != "cuda":
        return RuntimeError("it is a kernel for NVIDIA GPUs")
    if name in SDPA_BACKENDS and (args.dtype == "float32" or args.dropout):
        return RuntimeError("it is compared in bfloat16 and without dropout")
    return BACKENDS[name.partition(":")[0]].why_not(args.device)


def title_of(meta):
    """The title of the picture of the run that meta describes."""
    return f"A GPT of {meta['layers']} layers, {meta['dtype']}, on {meta['device']}"


def loss_curves(losses, tokens_per_s, title):
    """The figure of {backend: loss of each step}, and how far each curve is from the last one. The curves have their
    markers by turns, so that one line with all markers means equal losses."""
    from matplotlib.figure import Figure

    from minimal_attn.bench.pictures import STYLES

    figure = Figure(figsize=(8, 5.5), dpi=150, layout="constrained")
    *others, baseline = losses
    above, *below = figure.subplots(1 + bool(others), sharex=True, height_ratios=(3, 1)[:1 + bool(others)],
                                    squeeze=False).flat
    for i, (backend, values) in enumerate(losses.items()):
        style = STYLES[backend].line() | {"linewidth": 1, "zorder": 2}
        style["label"] += f": {float(f'{tokens_per_s[backend]:.3g}'):,.0f} tokens/s"
        above.plot(values, markersize=5, markevery=(4 * i, 4 * len(losses)), **style)
        for ax in below:
            ax.plot([x - y for x, y in zip(values, losses[baseline])], color=style["color"], linewidth=1)
    above.set(ylabel="loss, nats per byte", title=title)
    above.legend()
    for ax in below:
        ax.set_ylabel(f"loss − loss\nwith {baseline}")
    figure.axes[-1].set_xlabel("step")
    return figure


def count(text):
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def device(text):
    try:
        return torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no device of torch") from None


def probability(text):
    try:
        return check_number("dropout_p", float(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1") from None


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--backend", nargs="+", choices=[*BACKENDS, *SDPA_BACKENDS, "all"], default=["all"],
                        help="one after the other; all: every one that is available here (default); torch:cudnn and "
                             "torch:flash: torch with one of its kernels")
    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16, on a CPU float32")
    parser.add_argument("--dropout", type=probability, default=0.0, help="of the attention probabilities")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write training.json and training.png into it")
    for name, (gpu, cpu) in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=count, help=f"default: {gpu}, on a CPU {cpu}")
    args = parser.parse_args(argv)
    if args.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch sees no GPU")
    is_cpu = args.device.type == "cpu"
    args.dtype = args.dtype or ("float32" if is_cpu else "bfloat16")
    for name, defaults in SIZES.items():
        if getattr(args, name) is None:
            setattr(args, name, defaults[is_cpu])
    if args.steps < 2:
        parser.error("argument --steps: at least 2")
    names = [*BACKENDS, *SDPA_BACKENDS]
    backends = [name for name in names if name in args.backend or "all" in args.backend and name in BACKENDS]
    for name in tuple(backends):
        if (why_not := why_not_here(name, args)) is not None:
            if name in args.backend:
                parser.error(f"argument --backend: {name} is not available: {why_not}")
            print(f"{name} is left out: {why_not}", file=sys.stderr)
            backends.remove(name)
    if not 0 < args.seqlen < len(text()):
        parser.error(f"argument --seqlen: 1 to {len(text()) - 1}, as the text has {len(text())} bytes")
    from rich.console import Console

    from minimal_attn.bench.measure import environment

    if args.out:
        from minimal_attn.bench.pictures import draw  # where matplotlib is missing, say so before the training

    console, losses, tokens_per_s = Console(highlight=False), {}, {}
    for backend in backends:
        losses[backend], tokens_per_s[backend] = train(args, backend, console)
        first, last = losses[backend][0], losses[backend][-1]
        console.print(f"{backend}: loss {first:.4f} → {last:.4f}, {tokens_per_s[backend]:,.0f} tokens/s")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        meta = environment(args.device.type, "python -m examples.train_tiny_gpt", argv)
        meta |= {"text_digest": hashlib.sha256(text()).hexdigest(),
                 **{name: getattr(args, name) for name in ("dtype", "seed", "dropout", *SIZES)}}
        result = {"meta": meta, "tokens_per_s": tokens_per_s, "losses": losses}
        (args.out / "training.json").write_text(json.dumps(result, indent=1) + "\n")
        draw(args.out / "training.png", loss_curves, losses, tokens_per_s, title_of(meta))
        console.print(f"wrote {args.out / 'training.json'}, {args.out / 'training.png'}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(guarded("train_tiny_gpt", main))
