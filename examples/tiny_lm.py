"""A small language model with random weights for generate.py: RMSNorm, rotary positions, grouped heads, an MLP.

How a token sees those before it is left to the caller: with a cache in generate.py, without one at the end of this
file. Read next: ../minimal_attn/caches.py, which rotates and attends where there is a cache.
"""

import torch
from torch import nn
from torch.nn.functional import rms_norm, silu

from minimal_attn import flash_attention

VOCABULARY = 512


class TinyLM(nn.Module):
    """tokens (T,) -> the last hidden states (T, E), which head makes logits of. How a token sees others is up to
    attend(layer, q (1, H, T, D), k and v (1, Hk, T, D)) -> (1, H, T, D)."""

    def __init__(self, layers, embed_dim, heads, heads_k, max_seqlen):
        super().__init__()
        self.heads, self.heads_k, self.head_dim = heads, heads_k, embed_dim // heads
        self.embedding = nn.Embedding(VOCABULARY, embed_dim)
        self.layers = nn.ModuleList(nn.ModuleDict({
            "qkv": nn.Linear(embed_dim, (heads + 2 * heads_k) * self.head_dim, bias=False),
            "out": nn.Linear(embed_dim, embed_dim, bias=False), "up": nn.Linear(embed_dim, 4 * embed_dim, bias=False),
            "down": nn.Linear(4 * embed_dim, embed_dim, bias=False)}) for _ in range(layers))
        self.head = nn.Linear(embed_dim, VOCABULARY, bias=False)
        for weight in self.requires_grad_(False).parameters():
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        for layer in self.layers:  # larger scores: a token sees a few others, rather than the mean of all
            layer["qkv"].weight.mul_(1.5)
        angles = torch.arange(max_seqlen)[:, None] * 10000 ** -torch.linspace(0, 1, self.head_dim // 2 + 1)[:-1]
        self.register_buffer("cos", angles.cos())  # (max_seqlen, D / 2)
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens, attend):
        x = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            qkv = layer["qkv"](norm(x)).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)[None]  # (1, H + 2 Hk, T, D)
            out = attend(i, *qkv.split((self.heads, self.heads_k, self.heads_k), 1))
            x = x + layer["out"](out[0].transpose(0, 1).flatten(1))
            x = x + layer["down"](silu(layer["up"](norm(x))))
        return norm(x)

    def gaps_without_cache(self, tokens, backend):
        """(T - 1,): how far the logit of each token but the first is below the best at its place, by one pass over all
        of the T tokens. 0 is what greedy generation takes."""
        def rotated(x):
            a, b = x.float().chunk(2, -1)
            cos, sin = self.cos[:x.shape[2]].float(), self.sin[:x.shape[2]].float()
            return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)

        tokens = torch.tensor(tokens, device=self.head.weight.device)
        logits = self.head(self(tokens, lambda _, q, k, v: flash_attention(
            rotated(q), rotated(k), v, causal=True, backend=backend, autotune=False)))[:-1].float()
        return logits.amax(-1) - logits.gather(-1, tokens[1:, None])[:, 0]


def norm(x):
    return rms_norm(x, x.shape[-1:])
