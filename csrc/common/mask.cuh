// Which keys a query row sees, and which rows see a key: one mask for all kernels. The keys of a row are one range, and
// neither end of it moves back from one row to the next. So a tile of rows needs a range of blocks of keys. Within it
// is the range of full blocks, which all rows see whole. They need no mask.
#pragma once

#include <climits>

#include "common/sequence.cuh"

struct Range {
    int begin, end;  // [begin, end)
    __device__ bool contains(int i) const { return i >= begin && i < end; }
    __device__ bool is_empty() const { return begin >= end; }
};

// Blocks [begin, end) are needed, and [full_begin, full_end) are full. A block before full_begin has hidden keys at its
// beginning, a block from full_end on at its end. If full_end <= full_begin none is full, and a block may have both.
struct BlockRange {
    int begin, full_begin, full_end, end;
    __device__ bool is_full(int block) const { return block >= full_begin && block < full_end; }
};

// kChunks: there may be an attention_chunk. Its bounds take registers, so the fastest kernels are there twice.
template <bool kChunks> struct MaskOf {
    int seqlen_q, seqlen_k;  // valid rows and keys
    int left, right;         // row i sees the keys from i + left to i + right
    int chunk;               // attention_chunk, read only if kChunks

    MaskOf() = default;
    __device__ MaskOf(const Sequence &seq, const AttnParams &p) : MaskOf(seq.seqlen_q, seq.seqlen_k, p) {}
    // left and right are clamped where the mask stays the same, so that no sum below overflows.
    __device__ MaskOf(int seqlen_q, int seqlen_k, const AttnParams &p)
        : seqlen_q(seqlen_q), seqlen_k(seqlen_k), left(max(seqlen_k - seqlen_q - p.window_left, -seqlen_q)),
          right(min(seqlen_k - seqlen_q + p.window_right, seqlen_k)), chunk(p.attention_chunk) {}

    // Keys that a row sees; none for a row beyond seqlen_q.
    __device__ Range keys(int row) const {
        return {max(0, begin_of_row(row)), row < seqlen_q ? max(0, end_of_row(row)) : 0};
    }
    // Rows that see a key; none for a key beyond seqlen_k.
    __device__ Range rows(int key) const {
        int begin = key - right, end = key + 1 - left;
        if (has_chunks()) {
            const Range keys = chunk_of(key);
            begin = max(begin, keys.begin - (seqlen_k - seqlen_q)), end = min(end, keys.end - (seqlen_k - seqlen_q));
        }
        return {key < seqlen_k ? max(0, min(seqlen_q, begin)) : seqlen_q, max(0, min(seqlen_q, end))};
    }

    // Blocks of kBlockN keys for the rows [row0, row0 + kBlockM). Rows beyond seqlen_q do not count: their results are
    // thrown away, and valid rows must not depend on the sample's end.
    template <int kBlockM, int kBlockN> __device__ BlockRange key_blocks(int row0) const {
        const Range first = keys(row0), last = keys(min(row0 + kBlockM, seqlen_q) - 1);
        return blocks<kBlockN>({first.begin, last.end}, {last.begin, first.end}, row0 >= seqlen_q);
    }
    // Blocks of kBlockM rows for the keys [key0, key0 + kBlockN).
    template <int kBlockM, int kBlockN> __device__ BlockRange row_blocks(int key0) const {
        const int last_key = key0 + kBlockN - 1;  // beyond the end, no block is full
        const Range first = rows(key0), last = rows(last_key), last_valid = rows(min(last_key, seqlen_k - 1));
        return blocks<kBlockM>({first.begin, last_valid.end}, {last.begin, first.end}, key0 >= seqlen_k);
    }

    // Hidden scores become -inf, except in rows beyond seqlen_q, whose results are thrown away. acc_s [rows, keys]:
    // accumulators as in softmax.cuh; row and key: this lane's first. A caller may raise full_begin, lower full_end.
    template <int kMTiles, int kNTiles>
    __device__ void apply(float (&acc_s)[kMTiles][kNTiles][4], const BlockRange &blocks, int block, int row, int key,
                          float hidden = -INFINITY) const {
        if (block >= blocks.full_end)
            hide(acc_s, hidden, [&](int i) { return Range{INT_MIN, end_of_row(row + i) - key}; });
        if (block < blocks.full_begin)
            hide(acc_s, hidden, [&](int i) { return Range{begin_of_row(row + i) - key, INT_MAX}; });
    }
    // Probabilities of rows that do not see a key become 0, or `hidden`. acc_p [keys, rows]; blocks of rows.
    template <int kMTiles, int kNTiles>
    __device__ void apply_transposed(float (&acc_p)[kMTiles][kNTiles][4], const BlockRange &blocks, int block, int key,
                                     int row, float hidden = 0.f) const {
        if (block >= blocks.full_end)
            hide(acc_p, hidden, [&](int i) { return Range{INT_MIN, rows(key + i).end - row}; });
        if (block < blocks.full_begin)
            hide(acc_p, hidden, [&](int i) { return Range{rows(key + i).begin - row, INT_MAX}; });
    }

    // Columns of row i outside of columns_of(i) become `hidden`. Columns count from this lane's first.
    template <int kMTiles, int kNTiles, typename ColumnsOf>
    __device__ static void hide(float (&acc)[kMTiles][kNTiles][4], float hidden, ColumnsOf columns_of) {
#pragma unroll
        for (int i = 0; i < 2 * kMTiles; i++) {
            const Range columns = columns_of(8 * i);
#pragma unroll
            for (int n = 0; n < kNTiles; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (!columns.contains(8 * n + e)) acc[i / 2][n][i % 2 * 2 + e] = hidden;
        }
    }

  private:
    __device__ bool has_chunks() const { return kChunks && chunk; }
    // The keys of a position's chunk; none before the first key.
    __device__ Range chunk_of(int position) const {
        if (position < 0) return {0, 0};
        const int begin = position / chunk * chunk;
        return {begin, begin + min(chunk, seqlen_k - begin)};
    }
    __device__ int begin_of_row(int row) const {
        return has_chunks() ? max(row + left, chunk_of(row + seqlen_k - seqlen_q).begin) : row + left;
    }
    __device__ int end_of_row(int row) const {
        const int end = min(seqlen_k, row + 1 + right);
        return has_chunks() ? min(end, chunk_of(row + seqlen_k - seqlen_q).end) : end;
    }
    template <int kBlock> __device__ static BlockRange blocks(Range some, Range all, bool is_none) {
        if (is_none || some.is_empty()) return {0, 0, 0, 0};
        return {some.begin / kBlock, (all.begin + kBlock - 1) / kBlock, all.end / kBlock,
                (some.end + kBlock - 1) / kBlock};
    }
};
using Mask = MaskOf<true>;
