// The lengths of one sample and where its rows are in memory. Only this file reads seq_lens in a kernel.
//
// Read next: mask.cuh, which keys a row sees.
#pragma once

#include "flash.h"

// Query rows [0, seqlen_q) and keys [0, seqlen_k) of a sample are valid. The rows after them are padding, up to
// padded_q and padded_k. Kernels write zeros there: to out and dq, and to dk and dv.
struct Sequence {
    int q_begin, k_begin;  // where it begins in q and in k: at 0, since the batch is a dimension of its own
    int seqlen_q, seqlen_k;
    int padded_q, padded_k;

    __device__ Sequence(const AttnParams &p, int b)
        : q_begin(0), k_begin(0), seqlen_q(valid(p, b, p.seqlen_q)), seqlen_k(valid(p, b, p.seqlen_k)),
          padded_q(p.seqlen_q), padded_k(p.seqlen_k) {}

  private:
    __device__ static int valid(const AttnParams &p, int b, int seqlen) {
        return p.seq_lens ? max(0, min(p.seq_lens[b], seqlen)) : seqlen;
    }
};

// A pointer to row `row` of head h of sample b. The next rows follow at the tensor's row_stride.
template <typename T> __device__ T *rows_of(const Tensor &x, int64_t b, int64_t h, int64_t row) {
    return static_cast<T *>(x.data) + b * x.batch_stride + h * x.head_stride + row * x.row_stride;
}

// Index of row 0 of head h of sample b in lse, delta and lse_log2, which are [batch_size, nheads, seqlen_q].
__device__ inline int64_t lse_index(const AttnParams &p, int64_t b, int64_t h) {
    return (b * p.nheads + h) * p.seqlen_q;
}
