// Which tile of the result a block of threads computes. Tiles of one head are neighbours, so that the blocks that run
// at the same time share its K and V (or Q and dO) in L2. The tiles that take longest under a causal mask go first,
// except in a deterministic backward pass.
//
// Read next: dropout.h, which probabilities are dropped.
#pragma once

#include "flash.h"

struct Tile {
    int b, h, h_k;  // sample; query head, or the first of those that read h_k; key/value head
    int block;      // which tile of the head: it begins at row or key `block` times its size
    bool is_valid;  // false when there are no more tiles
};

template <int kBlock> __host__ __device__ int num_blocks(int seqlen) {
    return int((int64_t(seqlen) + kBlock - 1) / kBlock);
}

// Tiles of kBlockM query rows of a head, one for each block of threads.
template <int kBlockM> struct RowTiles {
    __host__ __device__ static int64_t count(const AttnParams &p) {
        return num_blocks<kBlockM>(p.seqlen_q) * p.batch_size * p.nheads;
    }
    __device__ static Tile at(const AttnParams &p, int idx) {
        const int m_blocks = num_blocks<kBlockM>(p.seqlen_q), bh = idx / m_blocks, h = bh % p.nheads;
        return {bh / p.nheads, h, h / (p.nheads / p.nheads_k), m_blocks - 1 - idx % m_blocks, true};
    }
};

// Tiles of kBlockN keys of a key/value head, one for each block of threads: the first keys first, or the last.
template <int kBlockN> struct KeyTiles {
    __host__ __device__ static int64_t count(const AttnParams &p) {
        return num_blocks<kBlockN>(p.seqlen_k) * p.batch_size * p.nheads_k;
    }
    __device__ static Tile at(const AttnParams &p, int idx, bool last_first = false) {
        const int n_blocks = num_blocks<kBlockN>(p.seqlen_k), bh = idx / n_blocks, h_k = bh % p.nheads_k;
        const int n_block = last_first ? n_blocks - 1 - idx % n_blocks : idx % n_blocks;
        return {bh / p.nheads_k, h_k * (p.nheads / p.nheads_k), h_k, n_block, true};
    }
};
