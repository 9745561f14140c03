"""The interface between the facade and its backends: the options of a call, and the class of a backend."""

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Lengths(NamedTuple):
    """Where samples begin and how long they are, by int32 tensors on q's device, contiguous, whose values the host does
    not know. Kernels clamp them to what the tensors hold.

    In a padded batch, q (B, H, Sq, D) and k, v (B, Hk, Sk, D), the first seqused_q[b] rows and seqused_k[b] keys of
    sample b are valid, or all of them. In a packed batch, q (1, H, Tq, D) and k, v (1, Hk, Tk, D), sample b has the
    rows and keys from cu_seqlens[b] to cu_seqlens[b + 1], of which the first seqused_q[b] rows are valid. With
    seqused_k, its keys are the seqused_k[b] ones from cu_seqlens_k[b] on, which samples may share.
    """

    cu_seqlens_q: Tensor | None = None  # (B + 1,), as cu_seqlens_k: both are given in a packed batch alone
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None  # (B,)
    seqused_k: Tensor | None = None  # (B,)

    @property
    def are_given(self):
        return not (self[0] is self[1] is self[2] is self[3] is None)

    @property
    def is_packed(self):
        return self.cu_seqlens_q is not None

    @property
    def may_share_keys(self):
        return self.is_packed and self.seqused_k is not None

    def num_samples(self, q):
        return self.cu_seqlens_q.shape[0] - 1 if self.is_packed else q.shape[0]


class Options(NamedTuple):
    """The one table of options: the arguments of a call beside q, k and v. A caller's become checked ones in checks.py.

    The first 19 are the arguments of every op after q, k and v, as OPTIONS in csrc/ops/params.h. The ops of csrc also
    take deterministic, and those of triton_ref autotune and the descales. A backend takes those that it knows.
    """

    cu_seqlens_q: Tensor | None = None  # the first four are Lengths
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    sinks: Tensor | None = None  # (H,), contiguous, fp32, or fp64 for fp64: one more score of each row, without a value
    alibi_slopes: Tensor | None = None  # float32 (H,) or (B, H), contiguous; B samples, also of a packed batch
    # 4D, bool (True: seen), q's dtype or float32, of any strides. It broadcasts to (B, H, Sq, Sk).
    attn_bias: Tensor | None = None
    softmax_scale: float = 1.0
    softcap: float = 0.0  # 0 is none
    # Row i sees the keys from i + seqlen_k - seqlen_q - window_left to i + seqlen_k - seqlen_q + window_right, by the
    # lengths of its sample. -1 is no bound, and (-1, 0) is causal.
    window_left: int = -1
    window_right: int = -1
    attention_chunk: int = 0  # a row sees only keys of its own chunk of so many positions; 0: no chunks
    dropout_p: float = 0.0
    # int64, contiguous; None without dropout. One element, or a dropout.seed_with_origins.
    dropout_seed: Tensor | None = None
    return_max_logits: bool = False
    # The tensors of a BlockMask (block_mask.py), or None; a caller gives the BlockMask itself as the first one.
    mask_units: Tensor | None = None
    mask_row_words: Tensor | None = None
    mask_key_words: Tensor | None = None
    mask_bits: Tensor | None = None
    deterministic: bool = False
    autotune: bool = True
    q_descale: Tensor | None = None  # of q, k and v in fp8: float32 (B, Hk), contiguous, or None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    # FlexAttention's (score, b, h, q_idx, kv_idx) -> score, a function; triton_ref puts a Compiled in its place.
    score_mod: Any = None
    return_lse: bool = True  # False: lse may be None

    @classmethod
    def of(cls, softmax_scale, window=(-1, -1), lengths=Lengths(), **others):
        return cls(*lengths, softmax_scale=softmax_scale, window_left=window[0], window_right=window[1], **others)

    @property
    def lengths(self):
        return Lengths(*self[:4])

    @property
    def window(self):
        return self.window_left, self.window_right

    @property
    def mask(self):
        """The options that hide keys by their positions, such as NO_MASK and CAUSAL_MASK."""
        return self[MASK]

    @property
    def descales(self):
        return self.q_descale, self.k_descale, self.v_descale

    @property
    def has_scores(self):
        """Whether softcap, ALiBi, attn_bias, a block mask or score_mod change the scores."""
        return self.softcap > 0 or any(x is not None for x in (self.alibi_slopes, self.attn_bias, self.mask_units,
                                                               self.score_mod))

    @property
    def tensors(self):
        """The tensors among these options, or None for each that is not given."""
        return *self[:Options._fields.index("softmax_scale")], self.dropout_seed, *self[BLOCK_MASK], *self.descales

    @property
    def floats(self):
        """The tensors among these options that may have derivatives, by their names."""
        return {name: x for name, x in zip(self._fields[4:], self[4:])
                if isinstance(x, Tensor) and x.is_floating_point()}

    @property
    def differentiable(self):
        """The options that have gradients, or None for each that is not given."""
        return tuple(getattr(self, name) for name in DIFFERENTIABLE)

    def with_lengths(self, lengths):
        return self._replace(**lengths._asdict())

    def of_op(self):
        """The arguments of an op that follow q, k and v, as far as all ops have them."""
        return self[:OF_OP]

    def of_decode(self, cache):
        """The arguments of an op that attends to a cache, after q, k_cache and v_cache."""
        return (self.cu_seqlens_q, self.seqused_q, self.seqused_k, *cache[:4], *self[SCORE_TENSORS],
                *self[SCORE_NUMBERS], *cache[4:])


OF_OP = Options._fields.index("deterministic")
SCORE_TENSORS = slice(*map(Options._fields.index, ("sinks", "attn_bias")))  # as in csrc/ops/params.h
SCORE_NUMBERS = slice(*map(Options._fields.index, ("softmax_scale", "dropout_p")))
MASK = slice(*map(Options._fields.index, ("window_left", "dropout_p")))
NO_MASK, CAUSAL_MASK = Options().mask, Options(window_right=0).mask
BLOCK_MASK = slice(*map(Options._fields.index, ("mask_units", "deterministic")))
NO_BLOCK_MASK = (None,) * 4
DIFFERENTIABLE = "sinks", "attn_bias"  # the options that have gradients


class Cache(NamedTuple):
    """How k and v, (N, Hk, S, D), hold the keys of a batch: as N cached sequences of S keys, or as N pages of S keys.

    Sample b has the keys from leftpad_k[b] to seqused_k[b] of cached sequence batch_idx[b], or of the pages
    page_table[b], which follow one another. Without Options.seqused_k all keys are valid. Kernels clamp all of these
    values to what there is.
    """

    page_table: Tensor | None = None  # int32 (B, max_pages), its last dimension contiguous; then batch_idx is None
    batch_idx: Tensor | None = None  # int32 (B,), contiguous; None: sample b is sequence b
    leftpad_k: Tensor | None = None  # int32 (B,), contiguous; None: 0
    # int64 (B, Sq), its last dimension contiguous; not with a packed q or a window. Bit j of a row's word: it sees the
    # j-th of its sample's new keys, which are the last ones, as many as the rows. All rows see the keys before.
    tree_mask: Tensor | None = None
    num_splits: int = 0  # into how many parts at most the keys of a sample are split, by its own lengths; 0: any
    max_seqlen_q: int = 0  # of a packed q: no sample has more rows, or it is not split; 0: nothing is known


class Append(NamedTuple):
    """Where new keys and values go in a cache, and what is rotated on the way. An op for it takes these arguments after
    k, v, k_cache and v_cache, in this order.

    k (B, Hk, Sn, D) and v (B, Hk, Sn, Dv) are the new rows, or packed (1, Hk, T, D) with cu_seqlens_k_new. Row t of
    sample b goes to place seqused_k[b] + t of its cached sequence or of its pages, as Cache has them. With slot_mapping
    row t of k (1, Hk, T, D) goes to slot_mapping[t] instead: to place s % S of page s // S. A row is not written where
    its place is beyond the capacity or its page or its sequence does not exist.

    With rotary_cos and rotary_sin, key t of sample b is rotated as at position rotary_seqlens[b] + t. So is row t of q
    where q_advances, and else all its rows are as at rotary_seqlens[b]. Without rotary_seqlens, seqused_k takes its
    place. A position beyond the tables counts as their last one.
    """

    seqused_k: Tensor | None = None  # int32 (B,); None with slot_mapping alone
    page_table: Tensor | None = None  # this and the next one as Cache's
    batch_idx: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None  # int32 (B + 1,)
    slot_mapping: Tensor | None = None  # int64 (T,); then there are no other tensors here
    q: Tensor | None = None  # (B, H, Sq, D), or packed (1, H, Tq, D)
    cu_seqlens_q: Tensor | None = None  # int32 (B + 1,)
    rotary_cos: Tensor | None = None  # (S_ro, rotary_dim / 2), contiguous, in the dtype of k, as rotary_sin
    rotary_sin: Tensor | None = None
    rotary_seqlens: Tensor | None = None  # int32 (B,)
    rotary_interleaved: bool = True  # pairs are the columns (2i, 2i + 1), else (i, i + rotary_dim / 2)
    q_advances: bool = False


DECODE_FIELDS = Options(*Options._fields).of_decode(Cache._fields)  # the names of what it gives
SCHEMA_TYPES = {Tensor | None: "Tensor?", float: "float", int: "int", bool: "bool"}


def schema_of(*tables: type, fields: Sequence[str] | None = None) -> str:
    """The fields of NamedTuples, or some of them in this order, as arguments in the schema of an op of torch."""
    types, defaults = ({name: x for table in tables for name, x in getattr(table, of).items()}
                       for of in ("__annotations__", "_field_defaults"))
    return ", ".join(f"{SCHEMA_TYPES[types[name]]} {name}={defaults[name]}" for name in fields or types)


@dataclass(frozen=True)
class Backend:
    """One implementation behind the facade."""

    # (q, k, v, options) -> (out, lse) or, with return_max_logits, (out, lse, max_logits): checked 4D inputs with a
    # contiguous last dimension. out has the head_dim of v.
    forward: Callable[[Tensor, Tensor, Tensor, Options], tuple[Tensor, ...]]
    dtypes: tuple
    has_forward_mode: bool  # of its derivatives; all backends have those of a backward pass, but for fp8
    # (q, k_cache, v_cache, options, cache) -> (out, lse), as forward; without gradients. q may be packed.
    forward_cached: Callable[[Tensor, Tensor, Tensor, Options, Cache], tuple[Tensor, Tensor]]
    # (k, v, k_cache, v_cache, append) -> (q rotated, lengths): writes k and v into the caches. lengths is int32 (B,),
    # seqused_k plus the new rows, but not beyond the capacity. The first is empty where nothing is rotated or q is
    # None, and lengths is empty with slot_mapping.
    append: Callable[[Tensor, Tensor, Tensor, Tensor, Append], tuple[Tensor, Tensor]]
    # (dout, q, k, v, out, lse, options) -> (dq, dk, dv), where k and v may be a part of the keys, and out and lse those
    # of all, with sinks that options then lacks. No two samples share keys. There is no bias.
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Options], tuple[Tensor, Tensor, Tensor]]
    # None, or the exception that says why the backend cannot run on a device (None: on any device of this machine).
    why_not: Callable[[torch.device | None], Exception | None] = lambda device=None: None


def warn(text: str) -> None:
    """A warning at the line that called into minimal_attn or triton_ref, whichever of their functions that was."""
    frame, depth = sys._getframe(), 1
    while frame is not None and (frame.f_globals.get("__package__") or "").split(".")[0] in (__package__, "triton_ref"):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(f"minimal_attn: {text}", stacklevel=depth)
