"""context_parallel_attention: attention of a sequence that is split over the ranks of a process group.

All input is checked before anything is sent. Each of the three methods has a file of its own.
"""

import functools
import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..attention import BACKENDS, backend_name, flash_attention
from ..checks import (FP8_DTYPES, NO_WINDOW, autocast, check_choice, check_dropout_seed, check_dtype,
                      check_no_derivative, check_number, check_qkv, check_sizes, check_tensor, check_tensor_of,
                      checked_options, is_transformed, shown)
from ..options import Options
from . import all_gather, ring
from .calls import Attention, Document, Origin, ints, with_origins
from .layout import check_seqlen, shards_of, spans_nodes
from .padding import dropout_padding
from .ulysses import ulysses_attention

METHODS = "all_gather", "ring", "ulysses"
MAX_GATHERED_BYTES = 8 << 30  # keys and values of all ranks; with more, "auto" takes the ring


# Python decides what is sent, and to whom, so nothing is traced. torch.compiler.disable would import Dynamo at once.
@torch._disable_dynamo
def context_parallel_attention(q: Tensor, k: Tensor, v: Tensor, group: "dist.ProcessGroup | None" = None, *,
                               causal: bool = False, sm_scale: float | None = None,
                               window_size: tuple[int, int] = NO_WINDOW, cu_seqlens: Tensor | None = None,
                               seqlen: int | None = None, layout: str = "zigzag", method: str = "auto",
                               sinks: Tensor | None = None, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
                               dropout_p: float = 0.0, dropout_seed: Tensor | None = None, deterministic: bool = False,
                               backend: str = "auto") -> Tensor:
    """flash_attention(q, k, v) of one sequence of P·T rows, split over the P ranks of a group, T rows each.

    All ranks call this with the same shapes, dtypes and options. That is not checked: where they differ, a rank fails
    or waits until the time-out of the group. The gradients of q, k and v are those of this rank's rows. The gradient of
    sinks is this rank's part, to be summed over the ranks like that of any parameter.

    Args:
        q: (B, H, T, D), this rank's rows, with D from 1 to 256. Dtypes as for flash_attention, without float8.
        k, v: (B, Hk, T, D), with H a multiple of Hk. v, and then out, may have another head_dim.
        group: the process group that the sequence is split over; the default group if None.
        causal, sm_scale, window_size, sinks, softcap, deterministic, backend: as for flash_attention. Rows see keys by
            their places in the whole sequence, or in their document.
        cu_seqlens: where the documents of a packed sequence begin and end: int32 (N + 1,), from 0 up to at most P·T.
            All ranks give the same; B is then 1. Rows see their own document alone. The host reads it, so that a tensor
            on the CPU saves a wait for the GPU. Rows after the last entry are padding.
        seqlen: the length of the sequence without padding; P·T if None. Keys from there on are masked. Rows from
            there on give out 0. Not together with cu_seqlens.
        layout: which rows a rank holds. "zigzag": the chunks r and 2P - 1 - r of 2P, so that a causal mask gives all
            ranks the same work. T is even. "contiguous": chunk r of P. distributed.shard makes these, and pads.
        method: "all_gather", "ring", "ulysses" or "auto", which takes
            - "ring" if the group spans nodes, or the keys and values of all ranks have more than 8 GiB, unless
              alibi_slopes are given;
            - else "ulysses" if P divides Hk, and P > 1 + H / Hk, so that it sends less than "all_gather", or
              alibi_slopes are given without a causal mask;
            - else "all_gather".
            A node has as many ranks as the environment variable LOCAL_WORLD_SIZE says, which torchrun sets. It must be
            the same on all nodes. Without it, all ranks are taken to be on one node.
        alibi_slopes: float32 (H,), or (B, H) without cu_seqlens. Not with "ring", and with "all_gather" only under a
            causal mask.
        dropout_p: as for flash_attention. One GPU that computes the whole drops the same elements, with the same seed
            and cu_seqlens. Chunks that begin at a multiple of 16 rows of their document save a copy of q, and in the
            backward pass of out and dout.
        dropout_seed: int64, one element, on q's device. Ranks may give or draw different seeds: that of the first rank
            of the group is broadcast and holds. If None, torch's generator draws it, on each rank.

    Returns:
        out (B, H, T, Dv), in q's dtype, or in autocast's under torch.autocast.

    Raises:
        TypeError: as flash_attention; a group that is no process group, a seqlen that is no int.
        ValueError: as flash_attention; q, k and v that are not 4D, are empty or have different T; a wrong layout,
            method, cu_seqlens or seqlen; an odd T in the zigzag layout; heads that "ulysses" cannot divide; a group
            without this process.
        NotImplementedError: alibi_slopes where the method has none; forward-mode derivatives and transforms of
            torch.func. RuntimeError: torch.distributed is not initialised, a second derivative is wanted, another rank
            failed or did not call this in time, or a rank has no memory that its peers can read.
    """
    shards = shards_of(group, layout)
    q, k, v = autocast(q, k, v)
    check_qkv(q, k, v)
    chosen = BACKENDS[backend_name(backend, q, k, v, sinks)]
    check_dtype(q, tuple(dtype for dtype in chosen.dtypes if dtype not in FP8_DTYPES))
    given = Options(sinks=sinks, alibi_slopes=alibi_slopes, softmax_scale=sm_scale, softcap=softcap,
                    deterministic=deterministic)
    options = checked_options(given, q, k, causal, window_size, is_whole=False)
    dropout_p = check_number("dropout_p", dropout_p)
    if (why_not := chosen.why_not(q.device)) is not None:
        raise why_not
    check_shards(q, k, shards)
    total = shards.size * q.shape[2]
    documents = check_documents(cu_seqlens, seqlen, q, total)
    slopes = options.alibi_slopes
    if slopes is not None and q.shape[0] == 1:
        slopes = slopes.view(-1)  # (H,), for all documents
    check_no_derivative("context parallelism", "flash_attention of the whole sequence", has_backward=True, q=q, k=k,
                        v=v, sinks=options.sinks)
    if is_transformed():
        raise NotImplementedError("context parallelism does not support the transforms of torch.func")
    left, right = needed_window(options.window, documents)
    method = check_method(method, q, k, v, shards, slopes, (left, right))
    seed = shared_seed(check_dropout_seed(dropout_seed, q, None), shards) if dropout_p else None
    options = options._replace(window_left=left, window_right=right, dropout_p=dropout_p, dropout_seed=seed,
                               alibi_slopes=slopes)
    if method == "ulysses" or shards.size == 1:
        each = q.shape[1] // shards.size
        heads = slice(shards.rank * each, (shards.rank + 1) * each)  # of q, which this rank computes
        origins = [Origin(0, 0, n) for n in range(q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)]
        attend = functools.partial(
            flash_attention, causal=causal, sm_scale=options.softmax_scale, deterministic=deterministic,
            backend=backend, window_size=window_size, softcap=options.softcap,
            sinks=None if options.sinks is None else options.sinks[heads],
            alibi_slopes=None if slopes is None else slopes[..., heads], dropout_p=dropout_p,
            dropout_seed=None if seed is None else with_origins(seed, heads.start, origins),
            **lengths_of_whole(cu_seqlens, seqlen, q))
        return ulysses_attention(attend, q, k, v, shards)
    padding = dropout_padding(shards, q.shape[2], documents, seed is not None)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    module = ring if method == "ring" else all_gather
    return LocalRows.apply(q, k, v, options.sinks, Attention(padding, documents, chosen, options), module)


class LocalRows(torch.autograd.Function):
    """The function (q, k, v, sinks, Attention, all_gather or ring) -> out, with this rank's rows of all tensors."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, attention, module):
        padding = attention.padding
        with torch.cuda.device_of(q):  # whose streams are meant; autograd does so for the backward pass
            out, lse = map(padding.unpad_rows, module.attend(padding.pad_rows(q), k, v, attention))
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.attention, ctx.module = attention, module
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        padding, dsinks = ctx.attention.padding, None
        rows = *map(padding.pad_rows, (dout, q, out)), padding.pad_rows(lse, -math.inf)
        dq, dk, dv = ctx.module.gradients(*rows, k, v, ctx.attention)
        if sinks is not None:  # -P · delta, summed over rows, with P = exp(sink - lse) and delta = rowsum(dO ∘ O)
            delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
            of_rows = (sinks[:, None] - lse).exp() * delta
            dsinks = -of_rows.masked_fill(lse == -math.inf, 0).sum((0, 2))  # rows of padding have lse -inf
        return padding.unpad_rows(dq), dk, dv, dsinks, None, None


def shared_seed(seed, shards):
    """(1,): the seed of the first rank of the group, on all ranks."""
    seed = seed.reshape(1).clone()  # a caller's seed stays as it is
    if shards.size > 1:
        dist.broadcast(seed, dist.get_global_rank(shards.group, 0), group=shards.group)
    return seed


def lengths_of_whole(cu_seqlens, seqlen, q):
    """flash_attention's arguments for lengths, when it has the whole sequence."""
    if cu_seqlens is not None:
        is_there = cu_seqlens.device == q.device  # then nobody waits for the GPU again
        bounds = cu_seqlens.contiguous() if is_there else ints(q.device, cu_seqlens.tolist())[0]
        return {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
    used = None if seqlen is None else torch.full(q.shape[:1], seqlen, dtype=torch.int32, device=q.device)
    return {"seqused_q": used, "seqused_k": used}


def check_shards(q, k, shards):
    """ValueError unless q and k, which are checked, are shards of one sequence."""
    shapes = f"q is {tuple(q.shape)}, k is {tuple(k.shape)}"
    if q.ndim != 4:
        raise ValueError(f"q, k and v must be 4D, (B, H, T, D), got {q.ndim} dimensions")
    if q.shape[2] != k.shape[2] or q.numel() == 0:
        raise ValueError(f"q, k and v must have the same number of rows, at least one: {shapes}")
    shards.check_rows(q.shape[2])
    check_sizes(q, shards.size * k.shape[2])


def check_documents(cu_seqlens, seqlen, q, total):
    """The Documents among the `total` rows of all ranks, without the empty ones. TypeError unless cu_seqlens is a dense
    int32 tensor and seqlen an int; ValueError for everything else, and for both together."""
    if cu_seqlens is None:
        return Document(0, check_seqlen(seqlen, total)),
    if seqlen is not None:
        raise ValueError("seqlen cannot be given together with cu_seqlens, whose last entry says it")
    check_tensor("cu_seqlens", cu_seqlens)
    on_cpu = cu_seqlens.device.type == "cpu"
    check_tensor_of("cu_seqlens", cu_seqlens, cu_seqlens.device if on_cpu else q.device)
    if q.shape[0] != 1:
        raise ValueError(f"with cu_seqlens, q, k and v must be packed, (1, H, T, D), got q {tuple(q.shape)}")
    bounds = cu_seqlens.tolist()
    if len(bounds) < 2 or bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] > total:
        raise ValueError(f"cu_seqlens must start at 0 and ascend up to at most {total}, the rows of all ranks, in at "
                         f"least two entries, got {shown(bounds)}")
    return tuple(Document(begin, end, number) for number, (begin, end) in enumerate(zip(bounds, bounds[1:]))
                 if begin < end)


def needed_window(window, documents):
    """A window (left, right) without the bounds that hide nothing in any document."""
    left, right = window
    farthest = max((end - begin for begin, end, _ in documents), default=1) - 1
    return -1 if left >= farthest else left, -1 if 0 < right and right >= farthest else right


def check_method(method, q, k, v, shards, slopes, window):
    """The method to take; ValueError for an unknown name or unfit heads, NotImplementedError if it has no ALiBi."""
    check_choice("method", method, ("auto", *METHODS))
    heads, heads_k = q.shape[1], k.shape[1]
    divides = heads_k % shards.size == 0  # and so it divides H
    has_slopes, is_causal = slopes is not None, window[1] == 0
    if method == "auto":
        num_bytes = shards.size * q.element_size() * (k.numel() + v.numel())
        if not has_slopes and (spans_nodes(shards.group) or num_bytes > MAX_GATHERED_BYTES):
            method = "ring"
        elif divides and (shards.size > 1 + heads // heads_k or has_slopes and not is_causal):
            method = "ulysses"
        else:
            method = "all_gather"
    if method == "ulysses" and not divides:
        raise ValueError(f"method='ulysses' divides the heads among the ranks: {heads_k} key/value heads are no "
                         f"multiple of {shards.size}")
    if has_slopes and shards.size > 1 and method == "ring":
        raise NotImplementedError("method='ring' has no alibi_slopes: use 'all_gather', or 'ulysses' without a causal "
                                  "mask")
    if has_slopes and shards.size > 1 and method == "all_gather" and not is_causal:
        raise NotImplementedError("method='all_gather' has alibi_slopes under a causal mask alone: use 'ulysses', "
                                  "which divides the heads among the ranks")
    return method
