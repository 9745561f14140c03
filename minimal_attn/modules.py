"""Multi-head self-attention as a module (Vaswani et al., Attention Is All You Need, 2017, section 3.2.2). With fewer
key/value heads than query heads it is the grouped-query attention of Ainslie et al., GQA, 2023.
"""

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .attention import BACKENDS, attend, fast_path
from .checks import (NO_WINDOW, autocast, check_apart, check_attn_bias, check_choice, check_head_dim, check_is,
                     check_layout, check_needs, check_number, check_window_size, is_known)
from .distributed.attention import context_parallel_attention
from .distributed.layout import shards_of
from .flash_attn.functions import refuse
from .options import Lengths, Options
from .reference.packed import check_mask, pad_input, unpad_input
from .reference.scores import without_repeats

NAMES = {"cu_seqlens_q": "cu_seqlens", "cu_seqlens_k": "cu_seqlens", "max_seqlen_q": "max_seqlen"}  # in errors


class FlashMHA(nn.Module):
    """Multi-head self-attention, with grouped queries if asked for.

    The parameters have the names and the order of flash-attn's MHA: Wqkv ((H + 2·Hk)·D rows: all query heads, then all
    key heads, then all value heads) and out_proj (E, E), with E = H·D. For Hk = H that is also the order of
    nn.MultiheadAttention, and from the same seed the initial values are its own.

    Args:
        embed_dim: E, a multiple of num_heads; head_dim D = E / H goes up to 256.
        num_heads: H, of the queries.
        num_heads_k: Hk, of keys and values, a divisor of H; H if None.
        bias: whether both projections have one.
        dropout: share in [0, 1] of the attention probabilities that training mode drops.
        causal: each position sees itself and the positions before it.
        device, dtype: of the parameters. The backend decides which dtypes it takes (flash_attention); all take float32.
        backend: of flash_attention.
        window_size: of flash_attention: how many positions before and after its own a position sees.
        attention_chunk: of flash_attention; not with a context_parallel_group.
        context_parallel_group: a torch.distributed.ProcessGroup over which sequences are split, in the zigzag layout of
            distributed.shard; None: they are not.

    TypeError for an argument of the wrong type, and ValueError for a wrong value.
    """

    def __init__(self, embed_dim: int, num_heads: int, num_heads_k: int | None = None, bias: bool = True,
                 dropout: float = 0.0, causal: bool = False, device: torch.device | str | None = None,
                 dtype: torch.dtype | None = None, backend: str = "auto", window_size: tuple[int, int] = NO_WINDOW,
                 context_parallel_group: "torch.distributed.ProcessGroup | None" = None, attention_chunk: int = 0):
        super().__init__()
        num_heads_k = num_heads if num_heads_k is None else num_heads_k
        for name, x in dict(embed_dim=embed_dim, num_heads=num_heads, num_heads_k=num_heads_k, causal=causal,
                            attention_chunk=attention_chunk).items():
            check_number(name, x)
        check_is("embed_dim", embed_dim, embed_dim % num_heads == 0, f"a multiple of num_heads {num_heads}")
        check_is("num_heads", num_heads, num_heads % num_heads_k == 0, f"a multiple of num_heads_k {num_heads_k}")
        head_dim = embed_dim // num_heads
        check_head_dim(head_dim, f" (embed_dim {embed_dim} / num_heads {num_heads})")
        dropout = check_number("dropout_p", dropout, {"dropout_p": "dropout"})
        check_window_size(window_size)
        check_choice("backend", backend, ("auto", *BACKENDS))
        if context_parallel_group is not None:
            refuse({"function": "context_parallel_group"}, attention_chunk=attention_chunk)
            shards_of(context_parallel_group, "zigzag")
        self.context_parallel_group = context_parallel_group
        self.embed_dim, self.num_heads, self.num_heads_k, self.head_dim = embed_dim, num_heads, num_heads_k, head_dim
        self.dropout, self.causal, self.window_size, self.backend = dropout, causal, window_size, backend
        self.attention_chunk = attention_chunk
        self.Wqkv = nn.Linear(embed_dim, (num_heads + 2 * num_heads_k) * head_dim, bias, device, dtype)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, device, dtype)
        self.reset_parameters()

    @classmethod
    def from_torch(cls, mha: nn.MultiheadAttention, causal: bool = False, backend: str = "auto",
                   window_size: tuple[int, int] = NO_WINDOW, attention_chunk: int = 0) -> "FlashMHA":
        """A FlashMHA with copies of mha's weights, which then gives what mha gives for query = key = value = x.

        The copies keep device, dtype and requires_grad; dropout and training mode are mha's too. FlashMHA always takes
        (B, S, E): a warning says so if mha takes (S, B, E). In place of the masks that mha takes in a call, use
        `causal` and `window_size` here, and forward's masks, which are True where mha's are False.

        TypeError if mha is of another class, also a derived one. ValueError for kdim or vdim other than embed_dim,
        add_bias_kv and add_zero_attn; otherwise as FlashMHA.
        """
        check_is("mha", type(mha), type(mha) is nn.MultiheadAttention, "a torch.nn.MultiheadAttention", TypeError)
        others = {"kdim": mha.kdim != mha.embed_dim, "vdim": mha.vdim != mha.embed_dim,
                  "add_bias_kv": mha.bias_k is not None, "add_zero_attn": mha.add_zero_attn}
        if given := [name for name, is_given in others.items() if is_given]:
            raise ValueError(f"from_torch: {given[0]} is not supported: kdim and vdim must be embed_dim, without "
                             f"add_bias_kv and add_zero_attn, got {mha}")
        if not mha.batch_first:  # an input of the wrong layout would give wrong results, and no error
            warnings.warn("from_torch: mha has batch_first=False and takes (S, B, E), but FlashMHA takes and gives "
                          "(B, S, E): swap the first two dimensions; to silence this warning, set mha.batch_first = "
                          "True before the call", stacklevel=2)
        has_bias = mha.in_proj_bias is not None
        # On the device meta nothing is drawn from the generator for values that are replaced at once.
        module = cls(mha.embed_dim, mha.num_heads, bias=has_bias, dropout=mha.dropout, causal=causal, device="meta",
                     backend=backend, window_size=window_size, attention_chunk=attention_chunk)

        def copy(x):
            return None if x is None else nn.Parameter(x.detach().clone(), requires_grad=x.requires_grad)

        module.Wqkv.weight, module.Wqkv.bias = copy(mha.in_proj_weight), copy(mha.in_proj_bias)
        module.out_proj.weight, module.out_proj.bias = copy(mha.out_proj.weight), copy(mha.out_proj.bias)
        return module.train(mha.training)

    def reset_parameters(self):
        """Draw the parameters anew, as nn.MultiheadAttention's constructor does."""
        self.out_proj.reset_parameters()
        nn.init.xavier_uniform_(self.Wqkv.weight)
        for bias in (self.Wqkv.bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor, seq_lens: Tensor | Sequence[int] | None = None, *, cu_seqlens: Tensor | None = None,
                max_seqlen: int | Tensor | None = None, key_padding_mask: Tensor | None = None,
                attn_mask: Tensor | None = None) -> Tensor:
        """Self-attention of x. At most one of seq_lens, cu_seqlens and key_padding_mask is given.

        With a context_parallel_group, x is this rank's rows, and S or T their number. cu_seqlens is then that of the
        whole sequence, on the CPU or on x's device; the other lengths and masks are not supported, and max_seqlen is
        ignored. Without a causal mask, rows see the padding of distributed.shard, unless cu_seqlens ends before it.

        Args:
            x: (B, S, E), or packed (T, E) with cu_seqlens, of the parameters' device and, but for autocast, dtype.
            seq_lens: valid length of each sample, 1 to S, as in flash_attention. No position sees those from the length
                on, and their result is out_proj's bias, or 0 without one.
            cu_seqlens: int32 (B + 1,) on x's device: where the samples of a packed x begin, as in flash_attention.
            max_seqlen: nothing here needs it.
            key_padding_mask: (B, S) on x's device, True or not 0 where a position is valid, the opposite of
                nn.MultiheadAttention: bool, int64, int32 or uint8. The valid positions, wherever they lie, are packed,
                and windows count these alone. All others change nothing, and their result is 0. Without an attn_mask,
                the host waits for their number, so that no CUDA graph can be captured.
            attn_mask: as of scaled_dot_product_attention, broadcastable to (B, H, S, S), on x's device: bool, True
                where a position sees another, or float, which is added to the scores and has a gradient. It goes with
                `causal`, windows, seq_lens and key_padding_mask, all of which hide positions; but not with cu_seqlens,
                nor with a key_padding_mask and a window, or chunks, at once.

        Returns:
            A tensor of x's shape and dtype; under torch.autocast of autocast's dtype.

        Raises:
            As flash_attention or distributed.context_parallel_attention. RuntimeError: a key_padding_mask that packs
            under CUDA graph capture. NotImplementedError: a length or mask that a context_parallel_group excludes.
        """
        check_layout(f"({'B, S' if cu_seqlens is None else 'T'}, {self.embed_dim})", sizes={-1: self.embed_dim}, x=x)
        if seq_lens is not None:
            check_apart("seq_lens", cu_seqlens=cu_seqlens, key_padding_mask=key_padding_mask)
        if cu_seqlens is not None:
            check_apart("cu_seqlens", key_padding_mask=key_padding_mask, attn_mask=attn_mask)
        check_needs("a packed batch: give cu_seqlens with it", cu_seqlens is not None, max_seqlen=max_seqlen)
        for name, given in (("seq_lens", seq_lens), ("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if given is not None and self.context_parallel_group is not None:
                raise NotImplementedError(f"{name} is not supported with context_parallel_group: pack the batch, and "
                                          "give cu_seqlens")
        if key_padding_mask is not None:
            key_padding_mask = check_mask("key_padding_mask", key_padding_mask, x)
            if is_known(x.shape[0] == 0) or x.is_meta:  # the device meta knows no number of valid positions
                return self.forward(x, attn_mask=attn_mask)
            if attn_mask is None:
                packed, indices, cu_seqlens, max_seqlen, _ = unpad_input(x, key_padding_mask)
                out = self.forward(packed, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
                return pad_input(out, indices, *x.shape[:2])
            check_apart("attn_mask and key_padding_mask", ": windows and chunks count what key_padding_mask leaves",
                        window_size=check_window_size(self.window_size) != NO_WINDOW,
                        attention_chunk=self.attention_chunk)
            x = x.masked_fill(~key_padding_mask[..., None], 0)  # what no position sees must be finite
        if cu_seqlens is not None and is_known(x.shape[0] == 0) and getattr(cu_seqlens, "shape", None) == (1,):
            return self.forward(x[None])[0]  # no samples, which flash_attention refuses
        sizes = self.num_heads, self.num_heads_k, self.num_heads_k
        # Views of the projection's result (B, S, H + 2·Hk, D): flash_attention reads them by their strides.
        qkv = self.Wqkv(x).unflatten(-1, (sum(sizes), self.head_dim)).transpose(-2, -3)
        dropout_p = self.dropout if self.training else 0
        q, k, v = (qkv if cu_seqlens is None else qkv.unsqueeze(0)).split(sizes, dim=1)
        if self.context_parallel_group is not None:
            out = context_parallel_attention(q, k, v, self.context_parallel_group, causal=self.causal,
                                             cu_seqlens=cu_seqlens, window_size=self.window_size,
                                             backend=self.backend, dropout_p=dropout_p)
            return self._projected(out, x)
        check_number("max_seqlen_q", max_seqlen, NAMES)
        if attn_mask is not None:
            attn_mask = check_attn_bias(autocast(q, attn_mask)[1], q, k, Lengths(), "attn_mask")
        if attn_mask is not None and key_padding_mask is not None:
            attn_mask, is_valid = without_repeats(attn_mask), key_padding_mask[:, None, None]
            attn_mask = (attn_mask & is_valid if attn_mask.dtype == torch.bool else
                         torch.where(is_valid, attn_mask, -math.inf))
        given = Options(cu_seqlens, cu_seqlens, attn_bias=attn_mask, softmax_scale=None, dropout_p=dropout_p,
                        attention_chunk=self.attention_chunk, return_lse=False)
        out = None if seq_lens is not None else fast_path(q, k, v, given, self.causal, self.window_size, self.backend)
        if out is None:
            out = attend(q, k, v, given, self.causal, self.window_size, self.backend, seq_lens, names=NAMES)
        out = self._projected(out, x)
        return out if key_padding_mask is None else out.masked_fill(~key_padding_mask[..., None], 0)

    def _projected(self, out, x):
        return self.out_proj(out.transpose(1, 2).flatten(2).view(x.shape))

    def extra_repr(self) -> str:
        names = ("embed_dim", "num_heads", "num_heads_k", "dropout", "causal", "window_size", "attention_chunk",
                 "backend")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
