"""Padding of a rank's rows and keys, with which dropout drops the same elements as on one GPU.

../reference/dropout.py draws random numbers for tiles of 16 rows and 16 keys of a document. A call of a kernel begins
with a whole tile, but a chunk may begin anywhere. Rows of zeros before a chunk make it begin at a multiple of 16. Their
results are not read, and they add nothing to gradients. Keys of zeros would have to be hidden, and no window can do
that: in the ring, a chunk is followed by a copy of the next 15 keys of the sequence, and a tile of keys belongs to the
chunk of its first key. The gradients of copies are sent to the ranks that hold these keys. Without dropout, or where
all chunks begin at a multiple of 16 of their documents, there is no padding and no copy.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .layout import Chunk, Shards

TILE = 16  # rows and keys


class DropoutPadding(NamedTuple):
    shards: Shards
    num_rows: int  # of a rank
    rows_before: tuple[int, ...]  # rows of zeros before each chunk of this rank
    keys_after: int  # keys behind each chunk of all ranks, 15 or 0

    def pad_rows(self, x: Tensor, value: float = 0) -> Tensor:
        """x (B, H, T, ...), this rank's rows, with rows of `value` before each chunk."""
        if not any(self.rows_before):
            return x
        return torch.cat([pad(chunk, (0, 0) * (x.ndim - 3) + (before, 0), value=value)
                          for before, chunk in zip(self.rows_before, x.chunk(len(self.rows_before), 2))], 2)

    def unpad_rows(self, x: Tensor) -> Tensor:
        """The inverse of pad_rows."""
        if not any(self.rows_before):
            return x
        each = self.num_rows // len(self.rows_before)
        parts = x.split([before + each for before in self.rows_before], 2)
        return torch.cat([part[:, :, before:] for before, part in zip(self.rows_before, parts)], 2)

    def row_chunks(self) -> tuple[Chunk, ...]:
        """This rank's Chunks in a tensor of pad_rows. A Chunk includes the padding before it."""
        chunks, shift = [], 0
        for before, (begin, end, local) in zip(self.rows_before, self.shards.chunks(self.shards.rank, self.num_rows)):
            chunks.append(Chunk(begin - before, end, local + shift))
            shift += before
        return tuple(chunks)

    def key_chunks(self, rank: int) -> tuple[Chunk, ...]:
        """The Chunks of a rank in a tensor of pad_keys. A Chunk leaves out the copies behind it."""
        chunks = self.shards.chunks(rank, self.num_rows)
        return tuple(chunk._replace(local=chunk.local + i * self.keys_after) for i, chunk in enumerate(chunks))

    def pad_keys(self, kv: Tensor) -> Tensor:
        """kv (B, Hk, T, D), this rank's keys, with copies of the next keys behind each chunk, zeros after the end."""
        if not self.keys_after:
            return kv
        chunks = kv.chunk(self.shards.chunks_per_rank, 2)
        most = min(self.keys_after, chunks[0].shape[2])  # keys of one chunk that follow another one
        # (all chunks in order, most, B, Hk, D)
        first_keys = self.shards.all_gather(torch.stack([chunk[:, :, :most].movedim(2, 0) for chunk in chunks]))
        following = pad(first_keys.flatten(0, 1), (0, 0) * 3 + (0, self.keys_after))
        return torch.cat([part for number, chunk in zip(self._numbers(), chunks) for part in (
            chunk, following[(number + 1) * most:][:self.keys_after].permute(1, 2, 0, 3))], 2)

    def unpad_key_gradients(self, dkv: Tensor) -> Tensor:
        """The gradient (B, Hk, T, D) of this rank's keys and of all copies of them, from dkv of pad_keys."""
        if not self.keys_after:
            return dkv
        chunks = dkv.chunk(self.shards.chunks_per_rank, 2)
        copies = torch.stack([chunk[:, :, -self.keys_after:].movedim(2, 0) for chunk in chunks])
        arriving = self.shards.all_gather(copies)  # (all chunks in order, keys_after, B, Hk, D)
        dkv = torch.cat([chunk[:, :, :-self.keys_after] for chunk in chunks], 2)
        for number, chunk in zip(self._numbers(), dkv.chunk(self.shards.chunks_per_rank, 2)):
            each = chunk.shape[2]
            for before in range(max(0, number - -(-self.keys_after // each)), number):
                begin = (number - before - 1) * each  # of this chunk, among the keys that follow the one before
                rows = arriving[before, begin:begin + each]
                chunk[:, :, :rows.shape[0]] += rows.permute(1, 2, 0, 3)
        return dkv

    def _numbers(self):
        """The numbers of this rank's chunks, counted along the sequence."""
        each = self.num_rows // self.shards.chunks_per_rank
        return [chunk.begin // each for chunk in self.shards.chunks(self.shards.rank, self.num_rows)]


def dropout_padding(shards, num_rows, documents, has_dropout):
    """The DropoutPadding of ranks with num_rows rows each and of Documents."""
    if not has_dropout:
        return DropoutPadding(shards, num_rows, (0,) * shards.chunks_per_rank, 0)

    def rows_before(chunk):
        """The rows before a chunk in its first tile; 0 if it begins in no document."""
        return next((chunk.begin - begin for begin, end, _ in documents if begin <= chunk.begin < end), 0) % TILE

    offsets = [[*map(rows_before, shards.chunks(rank, num_rows))] for rank in range(shards.size)]
    return DropoutPadding(shards, num_rows, tuple(offsets[shards.rank]), TILE - 1 if any(map(any, offsets)) else 0)
