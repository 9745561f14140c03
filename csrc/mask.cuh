// Which keys a row sees, for every kernel on tensor cores. The causal, tail and seq_lens masks together are one number
// a row: `row` sees the keys [0, visible(row)). It never falls from one row to the next, up to the last valid one. So a
// block of rows needs the key blocks [0, n_block_max), and only those from n_block_full on need a mask.
//
// Read next: flash_sm80.cu.
#pragma once

#include <climits>
#include <cmath>

#include "flash.h"

struct Mask {
    int seq_len;  // valid keys of the sample
    int row_end;  // valid query rows: seq_lens may end them, and no row from seqlen_q on is written anyway
    int shift;
    bool is_causal;

    __device__ Mask(const AttnParams &p, int b)
        : seq_len(p.seq_lens ? max(0, min(p.seq_lens[b], p.seqlen_k)) : p.seqlen_k),
          row_end(p.seq_lens ? seq_len : INT_MAX), shift(p.seqlen_k - p.seqlen_q), is_causal(p.is_causal) {}

    __device__ int visible(int row) const {
        return row >= row_end ? 0 : is_causal ? max(0, min(seq_len, row + 1 + shift)) : seq_len;
    }

    // Blocks of kBlockN keys that some row of [row0, row0 + kBlockM) sees, and how many of them every row sees whole.
    template <int kBlockM, int kBlockN> __device__ int n_block_max(int row0) const {
        return row0 >= row_end ? 0 : (visible(min(row0 + kBlockM, row_end) - 1) + kBlockN - 1) / kBlockN;
    }
    template <int kBlockM, int kBlockN> __device__ int n_block_full(int row0) const {
        return row0 + kBlockM > row_end ? 0 : visible(row0) / kBlockN;
    }

    // Scores of keys that a row does not see become -inf, the others are multiplied by `sign`. acc_s: accumulators as
    // in softmax.cuh; `row` and `col` are the first of this lane's.
    template <int kMTiles, int kNTiles>
    __device__ void apply(float (&acc_s)[kMTiles][kNTiles][4], int row, int col, float sign) const {
#pragma unroll
        for (int i = 0; i < 2 * kMTiles; i++) {
            // visible(row + 8·i) - col, put so that no part of it is kept in a register from one block to the next.
            int end = seq_len - col;
            if (is_causal) end = min(end, row + 8 * i + 1 + (shift - col));
            if (row + 8 * i >= row_end) end = 0;
#pragma unroll
            for (int n = 0; n < kNTiles; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &s = acc_s[i / 2][n][i % 2 * 2 + e];
                    s = 8 * n + e < end ? s * sign : -INFINITY;
                }
        }
    }
};
