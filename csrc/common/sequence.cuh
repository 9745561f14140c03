// The lengths of one sample and where its rows are. Only this file and cache_sequence.cuh read lengths in GPU memory.
#pragma once

#include "flash_cache.h"

// Where sample b of a packed batch begins, clamped to the tensor. The first one begins at 0.
__device__ inline int begin_of(const int *cu_seqlens, int64_t b, int seqlen) {
    return b == 0 ? 0 : max(0, min(cu_seqlens[b], seqlen));
}

// The last sample that begins(b) is true of, or sample 0: by bisection, where samples begin one after another.
template <typename Begins> __device__ int last_sample(int batch_size, Begins begins) {
    int b = 0, end = batch_size;
    while (end - b > 1) {
        const int middle = b + (end - b) / 2;
        if (begins(middle)) b = middle;
        else end = middle;
    }
    return b;
}

// The sample has the rows [q_begin, q_begin + seqlen_q) of q, and padding after them up to padded_q rows. Its keys are
// stored alike. Kernels write zeros to the padding of out, dq, dk and dv.
struct Sequence {
    int q_begin, k_begin;
    int seqlen_q, seqlen_k;
    int padded_q, padded_k;

    Sequence() = default;
    __device__ Sequence(const AttnParams &p, int b) : Sequence(p) {
        if (p.cu_seqlens_q) {
            find(p.cu_seqlens_q, b, p.batch_size, q_begin, seqlen_q, padded_q);
            find(p.cu_seqlens_k, b, p.batch_size, k_begin, seqlen_k, padded_k);
        }
        if (p.seqused_q) seqlen_q = max(0, min(p.seqused_q[b], seqlen_q));
        // The keys of samples may overlap if each has a length of its own.
        if (p.seqused_k) seqlen_k = max(0, min(p.seqused_k[b], p.seqlen_k - k_begin));
    }

    // k_begin is the place of the first key in the sample's sequence or pages.
    __device__ Sequence(const DecodeParams &p, int b) : Sequence(p) {
        if (p.cu_seqlens_q) find(p.cu_seqlens_q, b, p.batch_size, q_begin, seqlen_q, padded_q);
        if (p.seqused_q) seqlen_q = max(0, min(p.seqused_q[b], seqlen_q));
        if (p.seqused_k) seqlen_k = max(0, min(p.seqused_k[b], seqlen_k));
        if (p.leftpad_k) k_begin = max(0, p.leftpad_k[b]), seqlen_k = max(0, seqlen_k - k_begin);
    }
    __device__ bool is_served(const DecodeParams &p) const { return seqlen_q >= p.min_rows && seqlen_q <= p.max_rows; }

    // Whether the tensor has rows after the padded ones, or keys after the valid ones.
    __device__ bool rows_follow(const AttnParams &p) const { return q_begin + padded_q < p.seqlen_q; }
    __device__ bool keys_follow(const AttnParams &p) const { return k_begin + seqlen_k < p.seqlen_k; }

  private:
    __device__ explicit Sequence(const AttnParams &p)  // all rows and keys of the tensors
        : q_begin(0), k_begin(0), seqlen_q(p.seqlen_q), seqlen_k(p.seqlen_k), padded_q(p.seqlen_q),
          padded_k(p.seqlen_k) {}
    // length: of the tensor, then of the sample.
    __device__ static void find(const int *cu_seqlens, int b, int64_t batch_size, int &begin, int &length,
                                int &padded) {
        const int seqlen = length;
        begin = begin_of(cu_seqlens, b, seqlen);
        const int end = max(begin, begin_of(cu_seqlens, b + 1, seqlen));
        length = end - begin;
        padded = (b + 1 == batch_size ? seqlen : end) - begin;
    }
};

template <typename T> __device__ T *rows_of(const Tensor &x, int64_t b, int64_t h, int64_t row) {
    return static_cast<T *>(x.data) + b * x.batch_stride + h * x.head_stride + row * x.row_stride;
}

// Index of a sample's row 0 in lse, delta and lse_log2.
__device__ inline int64_t lse_index(const AttnParams &p, int q_begin, int64_t b, int64_t h) {
    return b * p.lse_batch_stride + h * p.seqlen_q + q_begin;
}
