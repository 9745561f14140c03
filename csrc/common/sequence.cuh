// The lengths of one sample and where its rows are in memory. Only this file reads lengths that the GPU alone knows.
#pragma once

#include "flash.h"

// Where sample b of a packed batch begins. The first one begins at 0, and what lies beyond the tensor is clamped.
__device__ inline int begin_of(const int *cu_seqlens, int64_t b, int seqlen) {
    return b == 0 ? 0 : max(0, min(cu_seqlens[b], seqlen));
}

// The query rows [q_begin, q_begin + seqlen_q) of the tensor are those of the sample, and so for its keys. The rows
// after them are padding, up to padded_q and padded_k rows. Kernels write zeros there: to out and dq, and to dk and dv.
struct Sequence {
    int q_begin, k_begin;
    int seqlen_q, seqlen_k;
    int padded_q, padded_k;

    Sequence() = default;
    __device__ Sequence(const AttnParams &p, int b)
        : q_begin(0), k_begin(0), seqlen_q(p.seqlen_q), seqlen_k(p.seqlen_k), padded_q(p.seqlen_q),
          padded_k(p.seqlen_k) {
        if (p.cu_seqlens_q) {
            find(p.cu_seqlens_q, b, p.batch_size, q_begin, seqlen_q, padded_q);
            find(p.cu_seqlens_k, b, p.batch_size, k_begin, seqlen_k, padded_k);
        }
        if (p.seqused_q) seqlen_q = max(0, min(p.seqused_q[b], seqlen_q));
        // The keys of samples may overlap if each has a length of its own.
        if (p.seqused_k) seqlen_k = max(0, min(p.seqused_k[b], p.seqlen_k - k_begin));
    }

    // Of a cache: k_begin is the place of the first key in the sample's sequence or pages.
    __device__ Sequence(const DecodeParams &p, int b)
        : q_begin(0), k_begin(0), seqlen_q(p.seqlen_q), seqlen_k(p.seqlen_k), padded_q(p.seqlen_q),
          padded_k(p.seqlen_k) {
        if (p.cu_seqlens_q) find(p.cu_seqlens_q, b, p.batch_size, q_begin, seqlen_q, padded_q);
        if (p.seqused_q) seqlen_q = max(0, min(p.seqused_q[b], seqlen_q));
        if (p.seqused_k) seqlen_k = max(0, min(p.seqused_k[b], seqlen_k));
        if (p.leftpad_k) k_begin = max(0, p.leftpad_k[b]), seqlen_k = max(0, seqlen_k - k_begin);
    }

    __device__ bool is_served(const DecodeParams &p) const { return seqlen_q >= p.min_rows && seqlen_q <= p.max_rows; }
    // Whether the tensor has more rows after those of the sample and their padding, and more keys after the valid ones.
    __device__ bool rows_follow(const AttnParams &p) const { return q_begin + padded_q < p.seqlen_q; }
    __device__ bool keys_follow(const AttnParams &p) const { return k_begin + seqlen_k < p.seqlen_k; }

  private:
    // length is that of the tensor, and becomes that of the sample.
    __device__ static void find(const int *cu_seqlens, int b, int64_t batch_size, int &begin, int &length,
                                int &padded) {
        const int seqlen = length;
        begin = begin_of(cu_seqlens, b, seqlen);
        const int end = max(begin, begin_of(cu_seqlens, b + 1, seqlen));
        length = end - begin;
        padded = (b + 1 == batch_size ? seqlen : end) - begin;
    }
};

// A pointer to row `row` of head h of sample b. The next rows follow at the tensor's row_stride.
template <typename T> __device__ T *rows_of(const Tensor &x, int64_t b, int64_t h, int64_t row) {
    return static_cast<T *>(x.data) + b * x.batch_stride + h * x.head_stride + row * x.row_stride;
}

// Index of a sample's row 0 of head h in lse, delta and lse_log2.
__device__ inline int64_t lse_index(const AttnParams &p, int q_begin, int64_t b, int64_t h) {
    return b * p.lse_batch_stride + h * p.seqlen_q + q_begin;
}
__device__ inline int64_t lse_index(const AttnParams &p, const Sequence &seq, int64_t b, int64_t h) {
    return lse_index(p, seq.q_begin, b, h);
}

// Which sample a row of a padded or packed tensor belongs to: row i of sample b is `row` of element `batch`. What
// follows the last packed sample counts as a part of it.
struct SampleRow {
    int b, i, row, batch;

    // index: among all rows. seqlen: of the tensor.
    __device__ SampleRow(const int *cu_seqlens, unsigned index, int batch_size, int seqlen) {
        if (!cu_seqlens) {
            b = batch = int(index / unsigned(seqlen)), i = row = int(index % unsigned(seqlen));
            return;
        }
        int end = batch_size;
        for (b = 0; b + 1 < end;) {  // the last sample that does not begin behind the row, by bisection
            const int middle = b + (end - b) / 2;
            (begin_of(cu_seqlens, middle, seqlen) <= int(index) ? b : end) = middle;
        }
        batch = 0, row = int(index), i = row - begin_of(cu_seqlens, b, seqlen);
    }
};

__device__ inline SampleRow q_row_of(const AppendParams &p, unsigned index) {
    return SampleRow(p.cu_seqlens_q, index, p.batch_size, p.seqlen_q);
}

// How many new rows a sample has, and how many places are taken before them.
struct NewRows {
    int count, taken;

    __device__ NewRows(const AppendParams &p, int b) : count(p.seqlen_new), taken(0) {
        if (p.cu_seqlens_new) {
            const int begin = begin_of(p.cu_seqlens_new, b, p.seqlen_new);
            count = max(0, begin_of(p.cu_seqlens_new, b + 1, p.seqlen_new) - begin);
        }
        if (p.seqused_k) taken = max(0, min(p.seqused_k[b], p.capacity));
    }
};

// Row i of the tables of cos and sin for sample b.
__device__ inline int rotary_row(const AppendParams &p, int b, int i) {
    const int64_t position = int64_t(i) + (p.rotary_seqlens ? p.rotary_seqlens[b] : NewRows(p, b).taken);
    return int(max(int64_t(0), min(position, int64_t(p.seqlen_rotary) - 1)));
}
