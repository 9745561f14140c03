// Which keys a query row sees, and which rows see a key: one mask for all kernels, forward and backward. The keys of a
// row are one range, and neither end of it moves back from one row to the next. So the blocks that a tile of rows needs
// are a range too. The full blocks, which all its rows see whole, are a range within it. They need no mask.
//
// Read next: scores.cuh, what a score is before it is masked.
#pragma once

#include "sequence.cuh"

struct Range {
    int begin, end;  // [begin, end)
    __device__ bool contains(int i) const { return i >= begin && i < end; }
    __device__ bool is_empty() const { return begin >= end; }
};

// Blocks [begin, end) are needed, and those of them in [full_begin, full_end) need no mask.
struct BlockRange {
    int begin, full_begin, full_end, end;
    __device__ bool is_full(int block) const { return block >= full_begin && block < full_end; }
};

struct Mask {
    int seqlen_q, seqlen_k;  // valid rows and keys
    int diagonal;            // under a causal mask row i sees the keys j <= i + diagonal
    bool is_causal;

    __device__ Mask(const Sequence &seq, bool is_causal)
        : seqlen_q(seq.seqlen_q), seqlen_k(seq.seqlen_k), diagonal(seq.seqlen_k - seq.seqlen_q), is_causal(is_causal) {}

    // The keys that a row sees. A row beyond seqlen_q sees none.
    __device__ Range keys(int row) const {
        const int end = is_causal ? max(0, min(seqlen_k, row + 1 + diagonal)) : seqlen_k;
        return {0, row < seqlen_q ? end : 0};
    }
    // The rows that see a key. A key beyond seqlen_k is seen by none.
    __device__ Range rows(int key) const {
        const int begin = is_causal ? max(0, min(seqlen_q, key - diagonal)) : 0;
        return {key < seqlen_k ? begin : seqlen_q, seqlen_q};
    }

    // Blocks of kBlockN keys for the rows [row0, row0 + kBlockM). A block is full if all valid rows see it whole. Rows
    // beyond seqlen_q do not count: their results are thrown away, and valid rows must not depend on the sample's end.
    template <int kBlockM, int kBlockN> __device__ BlockRange key_blocks(int row0) const {
        const Range first = keys(row0), last = keys(min(row0 + kBlockM, seqlen_q) - 1);
        return blocks<kBlockN>({first.begin, last.end}, {last.begin, first.end}, row0 >= seqlen_q);
    }
    // Blocks of kBlockM rows for the keys [key0, key0 + kBlockN).
    template <int kBlockM, int kBlockN> __device__ BlockRange row_blocks(int key0) const {
        const Range first = rows(key0), last = rows(key0 + kBlockN - 1);
        return blocks<kBlockM>({first.begin, first.end}, {last.begin, first.end}, key0 >= seqlen_k);
    }

    // Scores of keys that a row does not see become -inf. acc_s [rows, keys]: accumulators as in softmax.cuh; row and
    // key are the first of this lane's.
    template <int kMTiles, int kNTiles>
    __device__ void apply(float (&acc_s)[kMTiles][kNTiles][4], int row, int key) const {
        hide(acc_s, -INFINITY, key, [&](int i) { return keys(row + i); });
    }
    // Probabilities of rows that do not see a key become 0. acc_p [keys, rows].
    template <int kMTiles, int kNTiles>
    __device__ void apply_transposed(float (&acc_p)[kMTiles][kNTiles][4], int key, int row) const {
        hide(acc_p, 0.f, row, [&](int i) { return rows(key + i); });
    }

  private:
    template <int kBlock> __device__ static BlockRange blocks(Range some, Range all, bool is_none) {
        if (is_none || some.is_empty()) return {0, 0, 0, 0};
        const int begin = some.begin / kBlock, end = (some.end + kBlock - 1) / kBlock;
        const int full_begin = (all.begin + kBlock - 1) / kBlock;
        return {begin, full_begin, max(all.end / kBlock, full_begin), end};
    }

    // Of row i of the fragment, what lies outside of columns_of(i) becomes `hidden`; col is the first of this lane's.
    template <int kMTiles, int kNTiles, typename ColumnsOf>
    __device__ static void hide(float (&acc)[kMTiles][kNTiles][4], float hidden, int col, ColumnsOf columns_of) {
#pragma unroll
        for (int i = 0; i < 2 * kMTiles; i++) {
            const Range columns = columns_of(8 * i);
            const int end = columns.end - col;
#pragma unroll
            for (int n = 0; n < kNTiles; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)  // keys() begins at 0: the compiler drops the second test
                    if (8 * n + e >= end || (columns.begin > 0 && 8 * n + e < columns.begin - col))
                        acc[i / 2][n][i % 2 * 2 + e] = hidden;
        }
    }
};
