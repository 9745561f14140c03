"""Which local rows see which keys, as calls of a backend's kernels.

A Piece is a run of rows that see a run of keys of the same document. Kernels align the last row of a sample with its
last key. Where the two are not at the same place of the sequence, the window is shifted by their distance. Short pieces
of one window are samples of one packed call. Nothing here reads a tensor, and layers of a model ask for the same calls,
so that they are kept. Read next: room.py, what dropout needs.
"""

import functools
from typing import NamedTuple

import torch

from ..options import Lengths

# Rows: pieces of so many are faster as dense calls than as samples of a packed one, on an H200. Dense calls have larger
# tiles of keys. Beside one another, they also fill a GPU where one ends.
LONG, LONG_BESIDE = 8192, 2048


class Document(NamedTuple):
    begin: int  # in the sequence
    end: int
    number: int = 0  # of its sample, in one call with the whole sequence


class Origin(NamedTuple):
    """Where a sample of a Call begins in its document, and the document's number."""

    row: int
    key: int
    number: int


NOWHERE = Origin(0, 0, 0)  # of a sample without rows or without keys


class Piece(NamedTuple):
    rows: slice  # of the local q
    keys: slice  # of the keys at hand
    window: tuple[int, int]  # as in Options, for the last of these rows aligned with the last of these keys
    origin: Origin


class Call(NamedTuple):
    """One call of a backend's forward or backward, on q[:, :, rows], k[:, :, keys] and v[:, :, keys]."""

    rows: slice
    keys: slice
    window: tuple[int, int]
    lengths: Lengths  # lists of int in place of tensors, until on_device
    pieces: tuple[Piece, ...]
    origins: tuple[Origin, ...]  # of its samples


def pieces_of(row_chunks, key_chunks, documents, window, has_dropout=False):
    """The Pieces of chunks of rows and chunks of keys, of Documents, and of the window of a row in the whole
    sequence. With dropout the chunks are as Room has them."""
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
    """(begin, end) in the sequence of the keys of a chunk in a document. For dropout they come in groups of 16, and a
    group belongs to the chunk of its first key."""
    begin, end = chunk.begin, chunk.end
    if has_dropout:
        begin, end = (place + (-max(0, place - document.begin)) % 16 for place in (begin, end))
    return max(begin, document.begin), min(end, document.end)


def visible_part(row_begin, row_end, key_begin, key_end, window):
    """(row_end, key_end, window), or None if no row sees a key: the ends of the rows that may see one of these keys, and
    of the keys that one of these rows may see, and the window with these ends aligned. All are places in the sequence.
    """
    left, right = window
    if key_begin >= key_end:
        return None
    last_row = row_end if left < 0 else min(row_end, key_end + left)
    last_key = key_end if right < 0 else min(key_end, row_end + right)
    if row_begin >= last_row or key_begin >= last_key:
        return None
    shift = last_key - last_row
    if left >= 0 and shift:  # one that is not shifted is that of other pieces too, which then share a call
        left += shift
        left = -1 if left >= last_key - key_begin - 1 else left
    if right >= 0:
        right -= shift
        right = -1 if 0 < right and right >= last_row - row_begin - 1 else right
    return last_row, last_key, (left, right)


def joined(pieces, has_dropout):
    """Merges two Pieces of the same rows where all rows see all keys of the first, and the keys of the second follow in
    the tensor. In the sequence there may be other keys between them. With dropout there may not, since dropout counts
    keys from the first one of a piece."""
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
def kept_calls(row_chunks, key_chunks, documents, window, has_dropout, batch_size, num_rows, num_keys, share_keys,
               long):
    """calls_of(pieces_of(row_chunks, ...), ...), the longest ones first: short ones fill a GPU at the end. A few are
    kept, since layers and steps repeat them. They hold no tensors."""
    pieces = pieces_of(row_chunks, key_chunks, documents, window, has_dropout)
    calls = calls_of(pieces, batch_size, num_rows, num_keys, share_keys, long)
    return tuple(sorted(calls, key=lambda call: -sum(length(piece.rows) * length(piece.keys) for piece in call.pieces)))


def calls_of(pieces, batch_size, num_rows, num_keys, share_keys, long=LONG):
    """The Calls of pieces: as few as possible, but a piece of `long` rows has a call of its own.

    No two pieces of a call have a row in common. Without share_keys none have a key in common, since kernels add up
    gradients within one sample alone. A packed batch is one sample to torch, so pieces of several samples have calls of
    their own.

    Args:
        num_rows, num_keys: of q and of k.
    """
    groups = {}  # window: lists of pieces
    for piece in pieces:
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
                lengths, origins = (shared_lengths if share_keys else own_lengths)(group)
                calls.append(Call(slice(0, num_rows), slice(0, num_keys), window, lengths, tuple(group), origins))
    return calls


def on_device(call, device):
    """A Call with tensors for its lengths. They are not kept: another stream could read them before they are copied."""
    if not call.lengths.is_packed:
        return call
    lists = [x for x in call.lengths if x is not None]
    tensors = iter(ints(device, *lists))
    return call._replace(lengths=Lengths(*(x if x is None else next(tensors) for x in call.lengths)))


def all_rows(calls, q):
    """Whether each row of q is in a piece of the Calls."""
    return sum(length(piece.rows) for call in calls for piece in call.pieces) == q.shape[2]


def shared_lengths(pieces):
    """(Lengths, origins) of pieces that may have keys in common. The rows before a piece are a sample without keys."""
    bounds_q, begins_k, seqused_k, origins = [0], [], [], []
    for piece in pieces:
        if piece.rows.start > bounds_q[-1] or not begins_k and piece.keys.start:  # the first sample begins at key 0
            bounds_q.append(piece.rows.start)
            begins_k.append(0)
            seqused_k.append(0)
            origins.append(NOWHERE)
        bounds_q.append(piece.rows.stop)
        begins_k.append(piece.keys.start)
        seqused_k.append(length(piece.keys))
        origins.append(piece.origin)
    return Lengths(bounds_q, [*begins_k, pieces[-1].keys.stop], None, seqused_k), tuple(origins)


def own_lengths(pieces):
    """(Lengths, origins) of pieces that have no keys in common, as gradients need them: without seqused_k. The rows
    before a piece are a sample without keys, and the keys before it are one without rows."""
    bounds_q, bounds_k, origins = [0], [0], []
    for piece in pieces:
        if piece.rows.start > bounds_q[-1]:
            bounds_q.append(piece.rows.start)
            bounds_k.append(bounds_k[-1])
            origins.append(NOWHERE)
        if piece.keys.start > bounds_k[-1]:
            bounds_q.append(bounds_q[-1])
            bounds_k.append(piece.keys.start)
            origins.append(NOWHERE)
        bounds_q.append(piece.rows.stop)
        bounds_k.append(piece.keys.stop)
        origins.append(piece.origin)
    return Lengths(bounds_q, bounds_k), tuple(origins)


def ints(device, *lists, dtype=torch.int32):
    """Tensors of integers on the device, by one copy that no host waits for."""
    host = torch.tensor([x for numbers in lists for x in numbers], dtype=dtype)
    tensor = (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
    return tensor.split([len(numbers) for numbers in lists])
