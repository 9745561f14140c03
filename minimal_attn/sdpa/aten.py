"""The attention ops of torch's aten library, by the kernels of csrc.

scaled_dot_product_attention, varlen_attn and nested tensors choose one of these ops, and autograd and torch.compile
know the derivatives and the shapes of all of them. Each function here has the signature of an op and returns what the
op's CUDA kernel returns, in the same shapes, strides and dtypes. It raises ValueError for a call that it does not
serve, as the checks of csrc do before a launch: the caller then gives the call to torch's own kernel.

    op                           q, k, v                     causal mask    lse                          out
    sdpa_flash                   (B, H, S, D)                bottom right   (B, H, Sq)                   strides of q
    flash                        (B, S, H, D) or (T, H, D)   bottom right   (B, H, Sq) or (H, T)         strides of q
    sdpa_cudnn                   (B, H, S, D)                top left       (B, H, Sq, 1)                order of q
    sdpa_efficient               (B, H, S, D)                top left       (B, H, Sq rounded up to 32)  as (B, S, H, D)

Torch keeps dropout, since its kernels draw other random numbers than ours and both passes must drop the same; float32,
whose precision torch.backends.cuda.matmul.allow_tf32 sets; debug masks, page tables and ALiBi, whose slopes torch does
not hand to the backward pass.
"""

import math

import torch
from torch.nn.functional import pad

from .. import _build
from ..backends.cuda import _warn_slow
from ..checks import NO_WINDOW
from ..options import OF_OP, Lengths, Options

HALVES = torch.float16, torch.bfloat16
# Windows by is_causal, of which "top left" stands for one that the numbers of rows and keys tell.
BOTTOM_RIGHT, TOP_LEFT = {False: NO_WINDOW, True: (-1, 0)}, {False: NO_WINDOW, True: "top left"}


def _leave_if(*conditions):
    if any(conditions):
        raise ValueError("the call stays with torch's kernel")


def _attend(q, k, v, scale, window, bias=None, lengths=Lengths()):
    """(out, lse) of q (B, H, Sq, D)."""
    k, v, scale, window = _checked(q, k, v, scale, window)
    out, lse, _, slow_because = _build.load().flash_forward(
        q, k, v, *Options.of(scale, window, lengths, attn_bias=bias)[:OF_OP + 1])
    if slow_because:
        _warn_slow(slow_because)
    return out, lse


def _gradients(dout, q, k, v, out, lse, scale, window, bias=None, lengths=Lengths(), needed=(True, True, True, False)):
    """[dq, dk, dv, dbias], with None for each that is not needed. out and lse may come from torch's own forward pass,
    which saves no lse where q, k and v require no grad, though the bias may."""
    _leave_if(dout is None)
    seen_k, seen_v, scale, window = _checked(q, k, v, scale, window)
    if lse is None or lse.shape[2] < q.shape[2]:
        _, lse = _attend(q, seen_k, seen_v, scale, window, bias, lengths)
    options = Options.of(scale, window, lengths, attn_bias=bias)
    dq, dk, dv, _, dbias = torch.ops.minimal_attn.flash_backward.default(
        dout, None, q, seen_k, seen_v, out, lse.contiguous(), *options.of_op(),
        torch.are_deterministic_algorithms_enabled(), needed[0], needed[1] or needed[2], False, needed[3])
    gradients = dq, _with_all_keys(dk, k), _with_all_keys(dv, v), dbias
    return [x if is_needed else None for x, is_needed in zip(gradients, needed)]


def _checked(q, k, v, scale, window):
    """(k, v, scale, window) for an op of csrc, whose checks follow. By "top left" no row sees the keys from Sq on."""
    _leave_if(q.dtype not in HALVES, not q.dtype == k.dtype == v.dtype)
    if window == TOP_LEFT[True]:
        rows, keys = q.shape[2], k.shape[2]
        k, v, window = k[:, :, :rows], v[:, :, :rows], (-1, max(0, rows - keys))
    return k, v, 1 / math.sqrt(q.shape[-1]) if scale is None else scale, window


def _with_all_keys(gradient, x):
    """Adds zeros to the gradient of x for the last keys, which no row sees. One that is not needed is (0,)."""
    if gradient.shape == x.shape or gradient.ndim == 1:
        return gradient
    padded = torch.zeros_like(x)
    padded[:, :, :gradient.shape[2]] = gradient
    return padded


def _rng(x, shape=(), dtype=torch.int64):
    """The ops return these tensors for the dropout of their backward pass. Nothing reads them without dropout."""
    return x.new_empty(shape, dtype=dtype), x.new_empty((), dtype=dtype)


def sdpa_flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    _leave_if(dropout_p, return_debug_mask, value.shape[-1] != query.shape[-1])
    out, lse = _attend(query, key, value, scale, BOTTOM_RIGHT[is_causal])
    return out, lse, None, None, query.shape[2], key.shape[2], *_rng(query, 2, torch.uint64), query.new_empty(0)


def sdpa_flash_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
                        is_causal, philox_seed, philox_offset, *, scale=None):
    _leave_if(dropout_p, cum_seq_q is not None)
    return tuple(_gradients(grad_out, query, key, value, out, logsumexp, scale, BOTTOM_RIGHT[is_causal])[:3])


def flash(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
          window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None,
          num_splits=None, **of_later_versions):
    # num_splits is advice: the bits of our results depend on no split and, in a packed batch, on no other sample.
    _leave_if(dropout_p, return_debug_mask, value.shape[-1] != query.shape[-1],
              *(x is not None for x in (alibi_slopes, block_table, *of_later_versions.values())))
    lengths = _lengths(query, cum_seq_q, cum_seq_k, seqused_k)
    out, lse = _attend(*map(_heads_first, (query, key, value)), scale,
                       _window(window_size_left, window_size_right, is_causal), lengths=lengths)
    lse = lse if cum_seq_q is None else lse.squeeze(0)
    return _rows_first(out, query.ndim), lse, *_rng(query, 2, torch.uint64), query.new_empty(0)


def flash_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
                   is_causal, rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None):
    _leave_if(dropout_p, grad_out is None)
    lengths = _lengths(query, cum_seq_q, cum_seq_k)
    lse = logsumexp if cum_seq_q is None else logsumexp.unsqueeze(0)
    gradients = _gradients(*map(_heads_first, (grad_out, query, key, value, out)), lse, scale,
                           _window(window_size_left, window_size_right, is_causal), lengths=lengths)
    return tuple(_rows_first(x, query.ndim) for x in gradients[:3])


def _lengths(query, cum_seq_q, cum_seq_k, seqused_k=None):
    """The Lengths of query, (B, S, H, D) without any or (T, H, D) with both cum_seq."""
    if cum_seq_q is cum_seq_k is seqused_k is None and query.ndim == 4:
        return Lengths()
    _leave_if(cum_seq_q is None, cum_seq_k is None, query.ndim != 3)
    return cum_seq_q, cum_seq_k, None, seqused_k


def _heads_first(x):
    return x.transpose(-3, -2) if x.ndim == 4 else x.transpose(-3, -2).unsqueeze(0)


def _rows_first(x, ndim):
    return x.transpose(1, 2) if ndim == 4 else x.transpose(1, 2).squeeze(0)


def _window(left, right, is_causal):
    return -1 if left is None else left, 0 if is_causal else -1 if right is None else right


def sdpa_cudnn(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False,
               return_debug_mask=False, *, scale=None):
    _leave_if(dropout_p, return_debug_mask)
    out, lse = _attend(query, key, value, scale, TOP_LEFT[is_causal], _bias(attn_bias, query, is_causal))
    lengths = None, None, query.shape[2], key.shape[2]
    if not compute_log_sumexp:  # nothing wants gradients: nothing is saved
        return out, None, *lengths, None, None, None
    return out, lse.unsqueeze(-1), *lengths, *_rng(query), None


def sdpa_cudnn_backward(grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q,
                        cum_seq_k, max_q, max_k, dropout_p, is_causal, *, scale=None):
    _leave_if(dropout_p, cum_seq_q is not None)
    bias = _bias(attn_bias, query, is_causal)
    lse = logsumexp.squeeze(-1) if logsumexp is not None and logsumexp.ndim == 4 else logsumexp
    return tuple(_gradients(grad_out, query, key, value, out, lse, scale, TOP_LEFT[is_causal], bias)[:3])


def _bias(attn_bias, query, is_causal):
    """attn_bias, (Sq, Sk), (1, Sq, Sk) or (B, 1 or H, Sq, Sk), as a view of four dimensions, or None."""
    _leave_if(query.ndim != 4)
    if attn_bias is None:
        return None
    _leave_if(is_causal, attn_bias.dtype not in (query.dtype, torch.float32), attn_bias.ndim not in (2, 3, 4),
              attn_bias.ndim == 3 and attn_bias.shape[0] != 1)
    return attn_bias[(None,) * (4 - attn_bias.ndim)]


def sdpa_efficient(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    _check_efficient(query, key, attn_bias, dropout_p, is_causal)
    out, lse = _attend(query, key, value, scale, TOP_LEFT[is_causal], attn_bias)
    if not compute_log_sumexp:  # q, k and v want no gradients, but the bias may: then tensors are saved
        rng = (None, None) if attn_bias is None else _rng(query)
        return _rows_before_heads(out), lse.new_empty(*lse.shape[:2], 0), *rng
    if missing := -lse.shape[2] % 32:
        lse = pad(lse, (0, missing), value=math.inf)
    return _rows_before_heads(out), lse, *_rng(query)


def sdpa_efficient_backward(grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset,
                            dropout_p, grad_input_mask, is_causal=False, *, scale=None):
    _check_efficient(query, key, attn_bias, dropout_p, is_causal)
    needed = *grad_input_mask[:3], attn_bias is not None and grad_input_mask[3]
    *gradients, dbias = _gradients(grad_out_, query, key, value, out, logsumexp[:, :, :query.shape[2]], scale,
                                   TOP_LEFT[is_causal], attn_bias, needed=needed)
    if dbias is not None and (missing := -dbias.shape[-1] % 16):  # in memory, rows have a multiple of 16 elements
        dbias = pad(dbias, (0, missing))[..., :-missing]
    return *map(_rows_before_heads, gradients), dbias


def _check_efficient(query, key, attn_bias, dropout_p, is_causal):
    """ValueError unless heads are those of torch's kernel, our kernels take the bias, and there are tensor cores."""
    _leave_if(dropout_p, key.shape[1] != query.shape[1], attn_bias is not None and attn_bias.ndim != 4)
    _leave_if(query.is_cuda and torch.cuda.get_device_capability(query.device) < (8, 0))
    _bias(attn_bias, query, is_causal)


def _rows_before_heads(x):
    """x (B, H, S, D), in memory (B, S, H, D), or None."""
    return None if x is None else x.transpose(1, 2).contiguous().transpose(1, 2)


OPS = {
    "_scaled_dot_product_flash_attention": sdpa_flash,
    "_scaled_dot_product_flash_attention_backward": sdpa_flash_backward,
    "_flash_attention_forward": flash,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_cudnn_attention": sdpa_cudnn,
    "_scaled_dot_product_cudnn_attention_backward": sdpa_cudnn_backward,
    "_scaled_dot_product_efficient_attention": sdpa_efficient,
    "_scaled_dot_product_efficient_attention_backward": sdpa_efficient_backward,
}
