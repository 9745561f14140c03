"""Attention of the rows of this rank to the keys at hand: forward and backward, by the kernels of a backend.

A part of the keys gives a part of the result, and merge makes the whole of two parts. In the backward pass nothing is
merged: from out and lse of the whole, a kernel forms the same probabilities whichever keys it is given. Read next:
all_gather.py, which calls this with all keys; ring.py, which calls it with those of one rank after the other.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import sum_dtype
from ..options import Backend, Options
from ..reference.dropout import seed_with_origins
from .layout import Chunk, Shards
from .pieces import LONG, LONG_BESIDE, Document, ints, kept_calls, on_device
from .room import Room, room_for


class Attention(NamedTuple):
    """The checked arguments of a call. sinks are among the options, and for autograd also an argument beside it."""

    shards: Shards
    room: Room  # in q, and with one rank's keys also in k and v
    documents: tuple[Document, ...]
    backend: Backend
    # Its window is that of rows and keys in the whole sequence, its dropout_seed is of one element.
    options: Options
    first_head: int = 0  # of q, among all

    def calls(self, q, num_keys, source, share_keys):
        """The Calls of this rank's rows q with so many keys: those of rank `source`, or all if it is None. The longest
        come first."""
        key_chunks = None if source is None else self.room.key_chunks(source)
        return [on_device(call, q.device) for call in
                self.kept_calls(self.room, q.shape[0], num_keys, key_chunks, share_keys)]

    def key_ranges(self, rank, batch_size, num_keys):
        """(begin, end) of the keys of each Call of a rank's backward pass, when it has all keys."""
        has_dropout = self.options.dropout_seed is not None
        room = room_for(self.shards._replace(rank=rank), self.room.num_rows, self.documents, has_dropout)
        calls = self.kept_calls(room, batch_size, num_keys, None, share_keys=False)
        return tuple((call.keys.start, call.keys.stop) for call in calls)

    def kept_calls(self, room, batch_size, num_keys, key_chunks, share_keys):
        return kept_calls(room.row_chunks(), key_chunks or (Chunk(0, num_keys, 0),), self.documents,
                          self.options.window, self.options.dropout_seed is not None, batch_size,
                          room.num_rows + sum(room.fronts), num_keys, share_keys,
                          LONG if key_chunks else LONG_BESIDE)

    def options_of(self, call):
        """The Options of a Call."""
        seed = self.options.dropout_seed
        if seed is not None:
            origins = [x for row, key, number in call.origins for x in (row, key, self.first_head, number)]
            seed = seed_with_origins(seed, *ints(seed.device, origins, dtype=torch.int64))
        left, right = call.window
        return self.options.with_lengths(call.lengths)._replace(window_left=left, window_right=right, dropout_seed=seed)

    def of_heads(self, heads):
        """This Attention restricted to a slice of query heads."""
        sinks, slopes = self.options.sinks, self.options.alibi_slopes
        return self._replace(first_head=heads.start, options=self.options._replace(
            sinks=None if sinks is None else sinks[heads],
            alibi_slopes=None if slopes is None else slopes[..., heads].contiguous()))

    def run(self, call, q, k, v):
        """(out, lse) of call.rows."""
        return self.backend.forward(*(x[:, :, run] for x, run in ((q, call.rows), (k, call.keys), (v, call.keys))),
                                    self.options_of(call))

    def attend(self, call, q, k, v, out, lse):
        """Write out (B, H, T, Dv) and lse of the rows of a Call."""
        part, part_lse = self.run(call, q, k, v)
        copy_rows(call, out, part)
        copy_rows(call, lse, part_lse)

    def attend_part(self, q, k, v, source, out, lse):
        """Merge the part of the keys of rank `source` into out (B, H, T, Dv), in the dtype of sums, and lse."""
        for call in self.calls(q, k.shape[2], source, share_keys=True):
            merge(out[:, :, call.rows], lse[:, :, call.rows], *self.run(call, q, k, v))

    def gradients(self, call, dout, q, out, lse, k, v):
        """(dq, dk, dv) of call.rows and call.keys. out and lse are those of all keys."""
        rows, keys = call.rows, call.keys
        return self.backend.backward(
            *(x[:, :, run] for x, run in ((dout, rows), (q, rows), (k, keys), (v, keys), (out, rows))),
            lse[:, :, rows].contiguous(), self.options_of(call)._replace(sinks=None))  # lse has them

    def key_gradients(self, call, dout, q, out, lse, k, v, dq):
        """(dk, dv) of call.keys, as gradients() has them. Writes dq (B, H, T, D) of the rows of a Call."""
        part, dk, dv = self.gradients(call, dout, q, out, lse, k, v)
        copy_rows(call, dq, part)
        return dk, dv

    def add_gradients(self, dout, q, out, lse, k, v, source, dq, dk, dv):
        """Add to dq, dk and dv, in the dtype of sums, what the keys of rank `source` give."""
        for call in self.calls(q, k.shape[2], source, share_keys=False):
            for total, run, part in zip((dq, dk, dv), (call.rows, call.keys, call.keys),
                                        self.gradients(call, dout, q, out, lse, k, v)):
                total[:, :, run].add_(part)


def copy_rows(call, whole, part):
    """Copy what the pieces of a Call have in part (B, H, rows of the call, ...) to whole (B, H, T, ...)."""
    for piece in call.pieces:
        begin, end = piece.rows.start - call.rows.start, piece.rows.stop - call.rows.start
        whole[:, :, piece.rows].copy_(part[:, :, begin:end])


def empty_lse(q):
    """The lse (B, H, T) of rows that have seen no key yet: -inf, in the dtype of sums."""
    return q.new_full(q.shape[:3], -math.inf, dtype=sum_dtype(q.dtype))


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add the keys of a part to the result: out (B, H, S, D) and lse (B, H, S) become those of all keys, in place."""
    total = torch.logaddexp(lse, part_lse)
    finite = total.masked_fill(total == -math.inf, 0)  # rows that have seen no key yet: exp(-inf - 0) is 0, not NaN
    out.mul_((lse - finite).exp_()[..., None]).add_(part * (part_lse - finite).exp_()[..., None])
    lse.copy_(total)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Let sinks (H,) have their share of the softmax, in place: a part with this lse and without values. A row of
    padding, which has seen no key, stays as it is."""
    total = torch.logaddexp(lse, sinks[:, None]).masked_fill_(lse == -math.inf, -math.inf)
    out.mul_((lse - total.masked_fill(total == -math.inf, 0)).exp_()[..., None])
    lse.copy_(total)


def gradient_of_sinks(sinks, dout, out, lse):
    """(H,) of the rows of this rank. With P = exp(sink - lse), a sink's share of a row, it is the sum of -P · delta,
    delta = rowsum(dO ∘ O), without the rows of padding, which have lse -inf."""
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    of_rows = (sinks[:, None] - lse).exp() * delta
    return -of_rows.masked_fill(lse == -math.inf, 0).sum((0, 2))
