"""A small GPT trained on one long sequence that is split over several processes: context parallelism.

    torchrun --nproc-per-node 2 -m examples.long_context

From the repository's root. With as many processes as GPUs it trains on them with NCCL, without GPUs on CPUs with Gloo.
Each process has a share of the sequence and a copy of the model, and DistributedDataParallel takes the mean of the
gradients. Apart from rounding, losses do not depend on the number of processes. What differs from training on one GPU
are the lines with `group`.

The sequence is the sources of the kernels as bytes, repeated as often as needed. Read next:
../minimal_attn/distributed/attention.py, the attention of each block.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from minimal_attn import FlashMHA
from minimal_attn.distributed import shard, shard_labels, shard_positions

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 256  # bytes
# (on GPUs, on a CPU)
SIZES = {"layers": (16, 2), "embed_dim": (2048, 64), "heads": (16, 4), "heads_k": (4, 2), "seqlen": (131072, 509),
         "steps": (20, 20)}


class Block(nn.Module):
    """(B, T, E) -> (B, T, E), pre-norm, of this rank's rows."""

    def __init__(self, embed_dim, heads, heads_k, group):
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(embed_dim), FlashMHA(
            embed_dim, heads, heads_k, bias=False, causal=True, context_parallel_group=group))
        self.mlp = nn.Sequential(nn.LayerNorm(embed_dim), nn.Linear(embed_dim, 4 * embed_dim), nn.GELU(),
                                 nn.Linear(4 * embed_dim, embed_dim))

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


class LongGPT(nn.Module):
    """tokens (B, T) and their positions in the sequence (T,) -> logits (B, T, VOCABULARY)."""

    def __init__(self, args, group):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, args.embed_dim)
        self.blocks = nn.Sequential(*(Block(args.embed_dim, args.heads, args.heads_k, group)
                                      for _ in range(args.layers)))
        self.head = nn.Sequential(nn.LayerNorm(args.embed_dim), nn.Linear(args.embed_dim, VOCABULARY, bias=False))

    def forward(self, tokens, positions):
        return self.head(self.blocks(self.tokens(tokens) + sinusoids(positions, self.tokens.embedding_dim)))


def sinusoids(positions, embed_dim):
    """(T, E), Vaswani et al. 2017."""
    angles = positions[:, None] * 10000 ** -torch.linspace(0, 1, (embed_dim + 1) // 2, device=positions.device)
    return torch.cat((angles.sin(), angles.cos()), -1)[:, :embed_dim]


def text(num_bytes):
    files = [file.read_bytes() for file in sorted((ROOT / "csrc").iterdir()) if file.is_file()]
    whole = b"".join(files)
    return (whole * (num_bytes // len(whole) + 1))[:num_bytes]


def train(args, group, device):
    """(the loss of each step, tokens per second without the first step)."""
    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = DistributedDataParallel(LongGPT(args, group).to(device), process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    whole = torch.frombuffer(bytearray(text(args.seqlen)), dtype=torch.uint8).long()[None]  # (1, S)
    tokens, labels = shard(whole, group).to(device), shard_labels(whole, group).to(device)
    positions = shard_positions(args.seqlen, group, device=device)
    losses = []
    for step in range(args.steps):
        if step == 1:
            start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(tokens, positions)
            # DistributedDataParallel takes the mean over ranks: the sum of their losses is to be that of all labels.
            loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (args.seqlen - 1)
        optimizer.zero_grad()
        (loss * dist.get_world_size(group)).backward()
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total, group=group)
        losses.append(total.item())
    return losses, (args.steps - 1) * args.seqlen / (time.perf_counter() - start)


def count(text):
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=0)
    for name, (gpu, cpu) in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=count, help=f"default: {gpu}, on a CPU {cpu}")
    args = parser.parse_args(argv)
    if args.steps == 1:
        parser.error("argument --steps: at least 2")
    if args.seqlen == 1:
        parser.error("argument --seqlen: at least 2")
    if "RANK" not in os.environ:
        parser.error("start it by torchrun: torchrun --nproc-per-node 2 -m examples.long_context")
    is_cpu = not torch.cuda.is_available()
    for name, defaults in SIZES.items():
        if getattr(args, name) is None:
            setattr(args, name, defaults[is_cpu])
    device = torch.device("cpu") if is_cpu else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if is_cpu:
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD
    losses, tokens_per_s = train(args, group, device)
    if dist.get_rank() == 0:
        memory = "" if is_cpu else f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB on this GPU"
        print(f"{args.seqlen} tokens on {dist.get_world_size()} ranks: loss {losses[0]:.4f} → {losses[-1]:.4f}, "
              f"{tokens_per_s:,.0f} tokens/s{memory}")
    dist.barrier()  # nobody ends while another one still waits for it
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
