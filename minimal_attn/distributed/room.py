"""Padding in the tensors of a rank, with which dropout drops the same elements as on one GPU.

../reference/dropout.py draws random numbers for tiles of 16 rows and 16 keys, counted from the start of a document. A
call of a kernel has to begin with a whole tile, but a chunk may begin anywhere in a document.

Rows: rows of zeros come before a chunk, so that it begins at a multiple of 16. Nobody reads their results, and they add
nothing to gradients. Keys: zeros before a chunk would have to be hidden from its rows, and no window can do that. So in
a ring a chunk brings up to 15 of the keys along that follow it. A group of 16 keys belongs to the chunk that has its
first key. The gradients of its other keys are sent at the end to the ranks that hold these keys. Without dropout, or
where all chunks begin at a multiple of 16 of their documents, there is no padding and no copy. Read next: local.py,
which makes calls.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .layout import Chunk, Shards, all_gather


class Room(NamedTuple):
    shards: Shards
    num_rows: int  # of a rank
    fronts: tuple[int, ...]  # how many rows of zeros come before each chunk of this rank
    num_next: int  # how many of the keys that follow a chunk are behind it, 15 or 0; the same on all ranks

    def extended(self, x: Tensor, value: float = 0) -> Tensor:
        """Puts rows that hold `value` before each chunk of x (B, H, T, ...), this rank's rows."""
        if not any(self.fronts):
            return x
        parts = []
        for front, chunk in zip(self.fronts, x.chunk(len(self.fronts), 2)):
            parts += [x.new_full((*x.shape[:2], front, *x.shape[3:]), value), chunk]
        return torch.cat(parts, 2)

    def own(self, x: Tensor) -> Tensor:
        """The reverse of extended."""
        if not any(self.fronts):
            return x
        each = self.num_rows // len(self.fronts)
        return torch.cat([part[:, :, front:] for front, part in
                          zip(self.fronts, x.split([front + each for front in self.fronts], 2))], 2)

    def row_chunks(self) -> tuple[Chunk, ...]:
        """This rank's Chunks in what is extended, together with the rows before them."""
        if not any(self.fronts):
            return self.shards.chunks(self.shards.rank, self.num_rows)
        chunks, shift = [], 0
        for front, (begin, end, local) in zip(self.fronts, self.shards.chunks(self.shards.rank, self.num_rows)):
            chunks.append(Chunk(begin - front, end, local + shift))
            shift += front
        return tuple(chunks)

    def key_chunks(self, rank: int) -> tuple[Chunk, ...]:
        """The Chunks of a rank's keys; those that follow a chunk are behind its end."""
        chunks = self.shards.chunks(rank, self.num_rows)
        return tuple(chunk._replace(local=chunk.local + i * self.num_next) for i, chunk in enumerate(chunks))

    def with_next_keys(self, kv: Tensor) -> Tensor:
        """kv (B, Hk, T, D), this rank's keys, as key_chunks has them. Behind the end of the sequence are zeros."""
        if not self.num_next:
            return kv
        chunks = kv.chunk(self.shards.chunks_per_rank, 2)
        most = min(self.num_next, chunks[0].shape[2])  # of a chunk's keys may follow another one
        first_keys = self._of_all_chunks([chunk[:, :, :most] for chunk in chunks])
        following = pad(first_keys.flatten(0, 1), (0, 0) * 3 + (0, self.num_next))
        return torch.cat([part for number, chunk in zip(self._numbers(), chunks) for part in (
            chunk, following[(number + 1) * most:][:self.num_next].permute(1, 2, 0, 3))], 2)

    def with_gradients_at_home(self, dkv: Tensor) -> Tensor:
        """Turns dkv of keys as key_chunks has them into dkv (B, Hk, T, D) of this rank's keys. The gradients of keys
        that follow a chunk are sent to the rank that holds these keys, which adds them up."""
        if not self.num_next:
            return dkv
        chunks = dkv.chunk(self.shards.chunks_per_rank, 2)
        arriving = self._of_all_chunks([chunk[:, :, -self.num_next:] for chunk in chunks])
        dkv = torch.cat([chunk[:, :, :-self.num_next] for chunk in chunks], 2)
        for number, chunk in zip(self._numbers(), dkv.chunk(self.shards.chunks_per_rank, 2)):
            each = chunk.shape[2]
            for before in range(max(0, number - -(-self.num_next // each)), number):
                begin = (number - before - 1) * each  # of this chunk, among the keys that follow the one before
                rows = arriving[before, begin:begin + each]
                chunk[:, :, :rows.shape[0]] += rows.permute(1, 2, 0, 3)
        return dkv

    def _numbers(self):
        """Numbers of this rank's chunks, counted along the sequence."""
        each = self.num_rows // self.shards.chunks_per_rank
        return [chunk.begin // each for chunk in self.shards.chunks(self.shards.rank, self.num_rows)]

    def _of_all_chunks(self, rows):
        """Gathers n rows (B, Hk, n, D) of each chunk of all ranks: (chunks of all ranks, n, B, Hk, D), in the order of
        the sequence."""
        own = torch.stack([part.movedim(2, 0) for part in rows])
        everything = own.new_empty(self.shards.size * len(rows), *own.shape[1:])
        all_gather(everything, own, self.shards.group).wait()
        return self.shards.in_order(everything)


def room_for(shards, num_rows, documents, has_dropout):
    """The Room of ranks with so many rows, of Documents."""
    own = shards.chunks(shards.rank, num_rows)
    if not has_dropout:
        return Room(shards, num_rows, (0,) * len(own), 0)
    begins = (chunk.begin for rank in range(shards.size) for chunk in shards.chunks(rank, num_rows))
    return Room(shards, num_rows, tuple(place_in_document(chunk.begin, documents) % 16 for chunk in own),
                15 if any(place_in_document(begin, documents) % 16 for begin in begins) else 0)


def place_in_document(place, documents):
    """How far a place in the sequence is from the start of its document; 0 if it is in none."""
    return next((place - document.begin for document in documents if document.begin <= place < document.end), 0)
