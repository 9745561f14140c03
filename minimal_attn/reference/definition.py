"""reference_attention forms all scores at once: slow, big, and plainly right. Every kernel is judged against it.
blockwise_attention walks along the keys as the kernels do, to be read beside csrc/flash.cu.
"""

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad

from ..block_mask import BlockMask, with_tensors
from ..checks import check_max_seqlens, check_number, check_qkv, check_shapes, checked_options, sum_dtype
from ..options import Options
from .dropout import keep_mask, keep_scale
from .packed import as_padded
from .scores import as_attn_mask, visible_keys, with_mask, with_score_mod

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def without_autocast(function):
    """Compute in the dtypes that function chooses, also under torch.autocast."""

    @functools.wraps(function)
    def wrapped(q, *args, **kwargs):
        with torch.autocast("cpu" if q.is_meta else q.device.type, enabled=False):  # meta knows no autocast
            return function(q, *args, **kwargs)

    return wrapped


def reference_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, sm_scale: float | None = None,
                        seq_lens: Tensor | Sequence[int] | None = None, *, dropout_p: float = 0,
                        dropout_seed: Tensor | None = None, return_lse: bool = False,
                        window_size: tuple[int, int] = (-1, -1), cu_seqlens_q: Tensor | None = None,
                        cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | Tensor | None = None,
                        max_seqlen_k: int | Tensor | None = None, seqused_q: Tensor | None = None,
                        seqused_k: Tensor | None = None, sinks: Tensor | None = None, softcap: float = 0,
                        alibi_slopes: Tensor | None = None, attn_bias: Tensor | None = None, attention_chunk: int = 0,
                        return_max_logits: bool = False, block_mask: BlockMask | None = None,
                        score_mod: Callable | None = None) -> Tensor | tuple[Tensor, ...]:
    """softmax(sm_scale · Q Kᵀ) V in plain torch operations, computed in fp32, or in fp64 when given it.

    The same function as flash_attention, which describes arguments, results and errors: of q (B, H, Sq, D) and k, v
    (B, Hk, Sk, D), or of three dimensions, in float32, float16, bfloat16 or float64. torch.autocast casts nothing here.
    """
    check_qkv(q, k, v, DTYPES)
    check_max_seqlens(max_seqlen_q, max_seqlen_k)
    given = Options(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks, alibi_slopes, attn_bias, sm_scale, softcap,
                    attention_chunk=attention_chunk, dropout_p=dropout_p, dropout_seed=dropout_seed,
                    return_max_logits=return_max_logits, mask_units=block_mask, score_mod=score_mod)
    options = checked_options(with_tensors(given, q, k), q, k, causal, window_size, seq_lens)
    out, lse, *more = reference_forward(*(x if q.ndim == 4 else x.unsqueeze(1) for x in (q, k, v)), options)
    result = [x if q.ndim == 4 else x.squeeze(1) for x in ((out, lse, *more) if return_lse else (out, *more))]
    return tuple(result) if len(result) > 1 else result[0]


def without_padding(q, k, v, mask):
    """q, k and v with 0 in the rows that see no key and in the keys that no row sees. A mask multiplies by 0, and
    0 · NaN is NaN, so what is masked must be finite."""
    hidden_keys = ~mask.any(-2).unsqueeze(-1)
    return q.masked_fill(~mask.any(-1, keepdim=True), 0), k.masked_fill(hidden_keys, 0), v.masked_fill(hidden_keys, 0)


@without_autocast
def reference_forward(q, k, v, options):
    """A Backend's forward; not for fp8."""
    if options.lengths.is_packed:
        return as_padded(reference_forward, q, k, v, options)
    seqlen_q, seqlen_k, acc_dtype = q.shape[2], k.shape[2], sum_dtype(q.dtype)
    visible = visible_keys(seqlen_q, seqlen_k, options, q.device)
    if visible is not None:
        q, k, v = without_padding(q, k, v, visible)
    mask, groups = as_attn_mask(q, k, options, visible), q.shape[1] // k.shape[1]  # query heads that share a key head
    k, v = (x.to(acc_dtype).repeat_interleave(groups, dim=1) for x in (k, v))
    scores = q.to(acc_dtype) @ k.transpose(-2, -1) * options.softmax_scale
    if options.softcap > 0:
        scores = options.softcap * (scores / options.softcap).tanh()
    if options.score_mod is not None:
        scores = with_score_mod(scores, options.score_mod)
    scores = with_mask(scores, mask)
    row_max = pad(scores.detach(), (0, 1), value=-math.inf).amax(-1, keepdim=True)  # -inf where no key is seen
    if options.sinks is not None:  # one more score of each row, without a value; but none in padding
        sinks = options.sinks[:, None, None].expand(*scores.shape[:3], 1)
        if options.lengths.seqused_q is not None:
            rows = torch.arange(seqlen_q, device=q.device)[:, None]
            sinks = sinks.masked_fill(rows >= options.lengths.seqused_q[:, None, None, None], -math.inf)
        scores = with_mask(torch.cat((scores, sinks), -1), None)
    # Relative to a row's largest score: beside finfo.min, which hides keys in some models, the logarithm would be lost.
    base = row_max.masked_fill(~row_max.isfinite(), 0)
    scores = scores - base
    lse = scores.logsumexp(-1, keepdim=True)
    # A row without keys has lse -inf; against 0 its probabilities exp(-inf - 0) are 0 rather than NaN.
    probabilities = (scores - lse.masked_fill(lse == -math.inf, 0)).exp()[..., :seqlen_k]
    if options.dropout_seed is not None:
        keep = keep_mask(options.dropout_seed, options.dropout_p, *probabilities.shape, q.device)
        probabilities = probabilities.masked_fill(~keep, 0) * keep_scale(options.dropout_p)
    out = (probabilities @ v).masked_fill(row_max == -math.inf, 0)  # 0, also where V is not finite
    output = out.to(q.dtype), (lse + base).squeeze(-1)
    return (*output, row_max.squeeze(-1)) if options.return_max_logits else output


@without_autocast
def blockwise_attention(q: Tensor, k: Tensor, v: Tensor, block_size: int = 64, dropout_p: float = 0) -> Tensor:
    """softmax(Q Kᵀ / sqrt(D)) V with the online softmax, one block of keys at a time: for reading, not for speed.

    Milakov and Gimelshein 2018 (the running maximum and sum); Dao et al. 2022, Algorithm 1 (with the product by V).

    Args:
        q, k, v: (B, N, D), one float dtype; the sums are kept in fp32 (fp64 for fp64 inputs).
        block_size: keys per block, at least 1.
        dropout_p: share in [0, 1] of the probabilities set to 0, the rest scaled by 1/(1 - dropout_p).

    Returns:
        (B, N, D), with v's head_dim, in q's dtype. ValueError: shapes, block_size or dropout_p; TypeError: dtypes.
    """
    check_qkv(q, k, v, DTYPES)
    check_shapes(q.ndim == 3, "q, k and v must be of shape (B, N, D)", q=q)
    check_number("block_size", block_size)
    check_number("dropout_p", dropout_p)
    dtype, scale = q.dtype, 1 / math.sqrt(q.shape[-1])
    q, k, v = (x.to(sum_dtype(dtype)) for x in (q, k, v))
    row_max = q.new_full((*q.shape[:2], 1), -math.inf)
    row_sum, acc_o = torch.zeros_like(row_max), q.new_zeros(*q.shape[:2], v.shape[-1])
    for k_block, v_block in zip(k.split(block_size, dim=1), v.split(block_size, dim=1)):
        scores = q @ k_block.transpose(-2, -1) * scale
        new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
        p = (scores - new_max).exp()
        # Sums so far are relative to the old maximum. This factor converts them: it is what "online" rests on.
        rescale = (row_max - new_max).exp()
        row_sum = row_sum * rescale + p.sum(-1, keepdim=True)
        # Dropout belongs to the normalised probabilities: it thins what meets V, never the sum that normalises.
        acc_o = acc_o * rescale + dropout(p, dropout_p) @ v_block
        row_max = new_max
    return (acc_o / row_sum if k.shape[1] else acc_o).to(dtype)
