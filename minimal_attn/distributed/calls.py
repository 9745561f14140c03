"""Calls of a backend's kernels: which rows of this rank see which keys, and how few calls compute that.

A Piece is a run of rows that see a run of keys of the same document. Kernels align the last row of a sample with its
last key: the window is shifted by the distance of these in the sequence. Short pieces of one window are samples of one
packed call. Plans read no tensor and are cached, since layers and steps repeat them.
"""

import functools
from typing import NamedTuple

import torch

from ..options import Backend, Lengths, Options
from ..reference.dropout import seed_with_origins
from .layout import Chunk
from .padding import TILE, DropoutPadding, dropout_padding

# Rows: longer pieces are faster as dense calls than as samples of a packed one, on an H200, since dense calls have
# larger tiles of keys. Calls that overlap also fill the GPU where one ends, so that shorter pieces may be dense.
LONG, LONG_OVERLAPPED = 8192, 2048


class Document(NamedTuple):
    begin: int  # in the sequence
    end: int
    number: int = 0  # of its sample, in one call with the whole sequence


class Origin(NamedTuple):
    """The place in its document where a sample of a Call begins, and the document's number."""

    row: int
    key: int
    number: int


NOWHERE = Origin(0, 0, 0)  # of a sample without rows or without keys


class Piece(NamedTuple):
    rows: slice  # of the local q
    keys: slice  # of the keys at hand
    window: tuple[int, int]  # as in Options, with the last of these rows aligned with the last of these keys
    origin: Origin


class Call(NamedTuple):
    """One call of a backend's forward or backward, on q[:, :, rows], k[:, :, keys] and v[:, :, keys]."""

    rows: slice
    keys: slice
    window: tuple[int, int]
    lengths: Lengths  # lists of int in place of tensors, until on_device
    pieces: tuple[Piece, ...]
    origins: tuple[Origin, ...]  # of its samples


class Attention(NamedTuple):
    """The checked arguments of context_parallel_attention. Autograd also gets the sinks as an argument of their own."""

    padding: DropoutPadding  # of q, and in the ring also of k and v
    documents: tuple[Document, ...]
    backend: Backend
    options: Options  # the window counts places in the whole sequence; dropout_seed has one element
    first_head: int = 0  # of q, among all

    def calls(self, q, num_keys, source, share_keys):
        """The Calls of the rows q with the keys of rank `source`, or with all keys if it is None; long ones first."""
        key_chunks = None if source is None else self.padding.key_chunks(source)
        return [on_device(call, q.device)
                for call in self._calls(self.padding, q.shape[0], num_keys, key_chunks, share_keys)]

    def key_ranges(self, rank, batch_size, num_keys):
        """(begin, end) of the keys of each Call of a rank's backward pass with all keys."""
        shards = self.padding.shards._replace(rank=rank)
        padding = dropout_padding(shards, self.padding.num_rows, self.documents, self.options.dropout_seed is not None)
        calls = self._calls(padding, batch_size, num_keys, None, share_keys=False)
        return tuple((call.keys.start, call.keys.stop) for call in calls)

    def _calls(self, padding, batch_size, num_keys, key_chunks, share_keys):
        return calls_of(padding.row_chunks(), key_chunks or (Chunk(0, num_keys, 0),), self.documents,
                        self.options.window, self.options.dropout_seed is not None, batch_size,
                        padding.num_rows + sum(padding.rows_before), num_keys, share_keys,
                        LONG if key_chunks else LONG_OVERLAPPED)

    def of_heads(self, heads):
        """This Attention restricted to a slice of query heads."""
        sinks, slopes = self.options.sinks, self.options.alibi_slopes
        return self._replace(first_head=heads.start, options=self.options._replace(
            sinks=None if sinks is None else sinks[heads],
            alibi_slopes=None if slopes is None else slopes[..., heads].contiguous()))

    def options_of(self, call):
        seed = self.options.dropout_seed
        if seed is not None:
            seed = with_origins(seed, self.first_head, call.origins)
        left, right = call.window
        return self.options.with_lengths(call.lengths)._replace(window_left=left, window_right=right, dropout_seed=seed)

    def forward(self, call, q, k, v):
        """(out, lse) of call.rows."""
        return self.backend.forward(q[:, :, call.rows], k[:, :, call.keys], v[:, :, call.keys], self.options_of(call))

    def backward(self, call, dout, q, out, lse, k, v):
        """(dq, dk, dv) of call.rows and call.keys. out and lse are those of all keys."""
        dout, q, out, lse = (x[:, :, call.rows] for x in (dout, q, out, lse))
        k, v = (x[:, :, call.keys] for x in (k, v))
        options = self.options_of(call)._replace(sinks=None)  # lse has them
        return self.backend.backward(dout, q, k, v, out, lse.contiguous(), options)


def pieces_of(row_chunks, key_chunks, documents, window, has_dropout):
    """The Pieces of chunks of rows and of keys, of DropoutPadding with dropout. window: in the whole sequence."""
    pieces = []
    for rows in row_chunks:
        for document in documents:
            row_begin, row_end = max(rows.begin, document.begin), min(rows.end, document.end)
            if row_begin >= row_end:
                continue
            of_rows = []
            for keys in key_chunks:
                key_begin, key_end = keys_in(keys, document, has_dropout)
                seen = visible_part(row_begin, row_end, key_begin, key_end, window)
                if seen is not None:
                    last_row, last_key, shifted = seen
                    origin = Origin(row_begin - document.begin, key_begin - document.begin, document.number)
                    of_rows.append(Piece(rows.local_slice(row_begin, last_row), keys.local_slice(key_begin, last_key),
                                         shifted, origin))
            pieces += joined(of_rows, has_dropout)
    return pieces


def keys_in(chunk, document, has_dropout):
    """(begin, end) in the sequence of the keys of a chunk in a document, with dropout of those in whole tiles."""
    begin, end = chunk.begin, chunk.end
    if has_dropout:
        begin, end = (place + (-max(0, place - document.begin)) % TILE for place in (begin, end))
    return max(begin, document.begin), min(end, document.end)


def visible_part(row_begin, row_end, key_begin, key_end, window):
    """(row_end, key_end, window), or None if no row sees a key: the ends of the rows that may see one of these keys and
    of the keys that one of these rows may see, and the window with these ends aligned."""
    left, right = window
    if key_begin >= key_end:
        return None
    last_row = row_end if left < 0 else min(row_end, key_end + left)
    last_key = key_end if right < 0 else min(key_end, row_end + right)
    if row_begin >= last_row or key_begin >= last_key:
        return None
    shift = last_key - last_row
    if left >= 0 and shift:  # a window that is not shifted serves other pieces too, which then share a call
        left += shift
        left = -1 if left >= last_key - key_begin - 1 else left
    if right >= 0:
        right -= shift
        right = -1 if 0 < right and right >= last_row - row_begin - 1 else right
    return last_row, last_key, (left, right)


def joined(pieces, has_dropout):
    """Merges two Pieces of the same rows where all rows see all keys of the first, and the keys of the second follow in
    the tensor. With dropout, which counts keys from the first of a piece, they follow in the sequence, too."""
    result = []
    for piece in pieces:
        before, (left, right) = result[-1] if result else None, piece.window
        follows = before and (not has_dropout or piece.origin.key == before.origin.key + length(before.keys))
        # The window of the second is that of both, if not even the first row ends before the keys of the second.
        reaches = right < 0 or length(piece.keys) - length(piece.rows) + right >= -1
        if (follows and before.window == (-1, -1) and left < 0 and reaches and before.rows == piece.rows
                and before.keys.stop == piece.keys.start):
            piece = piece._replace(keys=slice(before.keys.start, piece.keys.stop), origin=before.origin)
            result.pop()
        result.append(piece)
    return result


def length(run):
    return run.stop - run.start


@functools.lru_cache(maxsize=128)
def calls_of(row_chunks, key_chunks, documents, window, has_dropout, batch_size, num_rows, num_keys, share_keys,
             long=LONG):
    """The Calls of q (num_rows) and k (num_keys): as few as possible, but a Piece of `long` rows or of several samples
    has one of its own. The longest come first: short ones fill a GPU at the end. Pieces of a Call have no row in
    common, and without share_keys no key, since kernels add up gradients within one sample alone."""
    groups = {}  # window: lists of pieces
    for piece in pieces_of(row_chunks, key_chunks, documents, window, has_dropout):
        of_window = groups.setdefault(piece.window, [])
        for group in () if length(piece.rows) >= long else of_window:
            last = group[-1]
            if (batch_size == 1 and length(last.rows) < long and last.rows.stop <= piece.rows.start
                    and (share_keys or last.keys.stop <= piece.keys.start)):
                group.append(piece)
                break
        else:
            of_window.append([piece])
    calls = []
    for window, of_window in groups.items():
        for group in of_window:
            if len(group) == 1:
                row, key, number = group[0].origin
                origins = tuple(Origin(row, key, number + b) for b in range(batch_size))
                calls.append(Call(group[0].rows, group[0].keys, window, Lengths(), tuple(group), origins))
            else:
                lengths, origins = packed_lengths(group, share_keys)
                calls.append(Call(slice(0, num_rows), slice(0, num_keys), window, lengths, tuple(group), origins))
    return tuple(sorted(calls, key=lambda call: -sum(length(piece.rows) * length(piece.keys) for piece in call.pieces)))


def packed_lengths(pieces, share_keys):
    """(Lengths, origins) of pieces as samples of a packed batch. Rows between pieces are a sample without keys; without
    share_keys, keys between pieces are one without rows, in place of seqused_k."""
    samples, row_end, key_end = [], 0, 0  # (end of its rows, begin of its keys, their number, origin)
    for rows, keys, _, origin in pieces:
        if rows.start > row_end or share_keys and not samples and keys.start:  # cu_seqlens_k begins with 0
            samples.append((rows.start, key_end, 0, NOWHERE))
        if keys.start > key_end and not share_keys:
            samples.append((rows.start, key_end, keys.start - key_end, NOWHERE))
        samples.append((rows.stop, keys.start, length(keys), origin))
        row_end, key_end = rows.stop, keys.stop
    ends_q, begins_k, num_keys, origins = zip(*samples)
    return Lengths([0, *ends_q], [*begins_k, key_end], None, list(num_keys) if share_keys else None), origins


def on_device(call, device):
    """A Call with tensors for its lengths. They are not cached, as another stream could read them before the copy."""
    if not call.lengths.is_packed:
        return call
    tensors = iter(ints(device, *(x for x in call.lengths if x is not None)))
    return call._replace(lengths=Lengths(*(x if x is None else next(tensors) for x in call.lengths)))


def has_all_rows(calls, q):
    """Whether each row of q is in a piece of the Calls."""
    return sum(length(piece.rows) for call in calls for piece in call.pieces) == q.shape[2]


def with_origins(seed, first_head, origins):
    """The dropout_seed of a call whose samples begin at these Origins, and which has query heads from first_head on."""
    numbers = [x for row, key, number in origins for x in (row, key, first_head, number)]
    return seed_with_origins(seed, *ints(seed.device, numbers, dtype=torch.int64))


def ints(device, *lists, dtype=torch.int32):
    """Tensors of integers on the device, by one copy that the host does not wait for."""
    host = torch.tensor([x for numbers in lists for x in numbers], dtype=dtype)
    tensor = (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
    return tensor.split([len(numbers) for numbers in lists])
