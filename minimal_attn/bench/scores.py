"""Benchmark of scores that change before the softmax: softcap, ALiBi, a bias or a mask, and dense calls beside them.

All rows have op "scores", and their column `score` is one of SCORES. FLOPs count all pairs of a row and a key, or half
of them with a causal mask. Those that a mask hides count too, so that rows of one shape compare by their times. Read
next: measure.py.
"""

import functools
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .. import reference_attention
from . import attention
from .attention import HALVES, causal_mask, causal_mask_mod, flash_call, flex_call, ours
from .measure import DTYPE_NAMES, MEASURED, Impl

DTYPES = DTYPE_NAMES
TITLE = "Attention with softcap, ALiBi, biases and masks"
BASELINE = "flex"
ROW = (*attention.ROW[:-len(MEASURED)], "score", *MEASURED)
SCORES = ("none", "softcap", "alibi", "bias", "mask")
SHAPES = "B,H,S,D or B,H,Sq,D,Hk,Sk, also with ' softcap', ' alibi', ' bias' or ' mask' behind it"

SOFTCAP = 30.0  # far above most scores of normal q and k: what ignores it is only judged wrong in float32
SEEN = 0.75  # of the keys, by a mask


class Shape(NamedTuple("Shape", [*attention.Shape.__annotations__.items(), ("score", str)])):
    """The shape of a dense batch, and one of SCORES."""

    __slots__ = ()

    def __str__(self):
        return f"{attention.Shape(*self[:-1])} {self.score}"

    @property
    def parts(self):
        return attention.Shape(*self[:-1]).parts | {"score": self.score}

    @property
    def plain(self):
        """This shape with unchanged scores."""
        return self._replace(score="none")

    sweeps = ()

    @property
    def elements(self):
        return attention.Shape(*self[:-1]).elements


def shape_of(text, ints):
    """A shape of SHAPES; ints(text) reads integers between commas. Raises ValueError."""
    sizes, _, score = text.partition(" ")
    dense = attention.Shape.of(ints(sizes))
    if (score or "none") not in SCORES:
        raise ValueError(f"behind the sizes there is one of {', '.join(SCORES)}, not {score!r}")
    return Shape(*dense, score or "none")


DEFAULT_SHAPES = {
    "cuda": [Shape(2, 16, 8192, 128, 16, 8192, score) for score in SCORES],
    "cpu": [Shape(2, 4, 32, 16, 2, 32, score) for score in SCORES],  # Triton's interpreter is slow
}
DEFAULTS = {"dtypes": "bfloat16", "causal": "no",
            "impls": ("cuda:sm90", "cuda:sm80", "cuda:host", "triton", "torch:cudnn", "torch:flash", "torch:efficient",
                      "flex")}


@dataclass(eq=False)
class Call(attention.Call):
    """Arguments of a call, with the mask tensor that SDPA needs for it. It is made here, outside the timed part."""

    attn_mask: torch.Tensor | None = None  # the bias or the mask, with a causal mask in it


def sdpa_with(backend=None):
    """SDPA by one of its backends, or by its own choice. It knows biases and masks alone."""
    def forward(q, k, v, call):
        if {"softcap", "alibi_slopes"} & call.keywords.keys():
            raise NotImplementedError("SDPA has neither softcap nor ALiBi")
        with sdpa_kernel(backend) if backend else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a backend that cannot serve warns of every reason, then raises
            if call.attn_mask is None:
                return attention.sdpa(q, k, v, call.causal)
            return scaled_dot_product_attention(q, k, v, attn_mask=call.attn_mask,
                                                enable_gqa=q.shape[1] != k.shape[1])

    return forward


SCORED = ours(flash_call) | {
    "torch:cudnn": Impl(sdpa_with(SDPBackend.CUDNN_ATTENTION), ("cuda",)),
    "torch:flash": Impl(sdpa_with(SDPBackend.FLASH_ATTENTION)),
    "torch:efficient": Impl(sdpa_with(SDPBackend.EFFICIENT_ATTENTION), ("cuda",)),
    "flex": Impl(flex_call, ("cuda",), dtypes=HALVES),
}
IMPLS = SCORED
PROFILES = {"cuda": ("minimal flash attention", functools.partial(flash_call, backend="cuda")),
            "triton": ("triton flash attention", functools.partial(flash_call, backend="triton")),
            "torch": ("scaled_dot_product_attention", sdpa_with()), "flex": ("FlexAttention", flex_call)}


def slopes_of(nheads, device):
    """ALiBi slopes of Press et al., fp32 (H,): a geometric sequence from 2^(-8/H) down to 2^-8."""
    return 2 ** (-8 / nheads * torch.arange(1, nheads + 1, device=device, dtype=torch.float32))


class Case(attention.Case):
    """Inputs of a score. A bias (1, H, Sq, Sk) and a mask (1, 1, Sq, Sk) are read once, as GB/s count them."""

    impls = SCORED
    op = "scores"
    columns = ROW

    def __init__(self, setting, device):
        super().__init__(setting, device)
        bias = self.args[-1].keywords.get("attn_bias")
        self.bytes += 0 if bias is None else bias.nbytes

    def call(self):
        shift = self.shape.seqlen_k - self.shape.seqlen_q
        keywords, score_mod = getattr(self, self.shape.score)(shift)
        bias, attn_mask = keywords.get("attn_bias"), None
        if bias is not None:
            attn_mask = self.with_causal(bias) if self.causal else bias
        return Call(self.causal, keywords, causal_mask_mod(shift) if self.causal else None, score_mod, attn_mask)

    def with_causal(self, bias):
        """Adds a causal mask to a bias or mask, since SDPA takes no is_causal beside attn_mask."""
        seen = causal_mask(self.shape.seqlen_q, self.shape.seqlen_k, self.device)
        return bias & seen if bias.dtype == torch.bool else bias.masked_fill(~seen, -torch.inf)

    # Each of SCORES: (keywords of flash_attention, score_mod of FlexAttention).

    def none(self, shift):
        return {}, None

    def softcap(self, shift):
        return dict(softcap=SOFTCAP), lambda score, b, h, row, col: SOFTCAP * torch.tanh(score / SOFTCAP)

    def alibi(self, shift):
        slopes = slopes_of(self.shape.nheads, self.device)
        return dict(alibi_slopes=slopes), lambda score, b, h, row, col: score - slopes[h] * abs(row + shift - col)

    def bias(self, shift):
        bias = torch.randn(1, self.shape.nheads, self.shape.seqlen_q, self.shape.seqlen_k, device=self.device,
                           dtype=getattr(torch, self.dtype))
        return dict(attn_bias=bias), lambda score, b, h, row, col: score + bias[0, h, row, col]

    def mask(self, shift):
        mask = torch.rand(1, 1, self.shape.seqlen_q, self.shape.seqlen_k, device=self.device) < SEEN
        mask[..., 0] = True  # no row is empty, causal or not
        return dict(attn_bias=mask), lambda score, b, h, row, col: torch.where(mask[0, 0, row, col], score, -torch.inf)

    def keywords_of(self, q):
        """The keywords of the call for the heads that are judged, the last ones, and for q's dtype."""
        keywords = dict(self.args[-1].keywords)
        if "alibi_slopes" in keywords:
            keywords["alibi_slopes"] = keywords["alibi_slopes"][-q.shape[1]:]
        if "attn_bias" in keywords:
            bias = keywords["attn_bias"][:, -q.shape[1]:]
            keywords["attn_bias"] = bias if bias.dtype == torch.bool else bias.to(q.dtype)
        return keywords

    def exact(self, q, k, v):
        return reference_attention(q, k, v, self.causal, **self.keywords_of(q))

    base = exact  # by plain torch in the dtype of the inputs, with scores in fp32 as in SDPA's math backend


CASES = {Shape: Case}
