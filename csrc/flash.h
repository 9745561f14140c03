// The whole contract between host and kernels: one plain struct, and the functions that take it. No torch here.
//
// Strides count elements, not bytes. The head_dim dimension is always contiguous; batch, head and row may lie in any
// order and may be expanded (stride 0). Rows are query rows for q and o, key rows for k and v.
//
// Read next: flash.cu, the kernel; main.cpp, which fills the struct from torch tensors.
#pragma once

#include <cstdint>

enum class DType { kFloat32, kFloat16, kBFloat16 };

struct AttnParams {
    const void *q;        // [batch_size, nheads, seqlen_q, head_dim]
    const void *k, *v;    // [batch_size, nheads_k, seqlen_k, head_dim]
    void *o;              // as q
    float *lse;           // [batch_size, nheads, seqlen_q] contiguous: natural log of each row's sum of exponentials
    const int *seq_lens;  // [batch_size] valid length of each sample, or nullptr; needs seqlen_q == seqlen_k

    int64_t q_batch_stride, q_head_stride, q_row_stride;
    int64_t k_batch_stride, k_head_stride, k_row_stride;
    int64_t v_batch_stride, v_head_stride, v_row_stride;
    int64_t o_batch_stride, o_head_stride, o_row_stride;

    int64_t batch_size;
    int nheads, nheads_k;  // nheads is a multiple of nheads_k; query head h reads K/V head h / (nheads / nheads_k)
    int seqlen_q, seqlen_k, head_dim;
    float softmax_scale;
    bool is_causal;  // bottom-right aligned: query row i sees the keys j <= i + seqlen_k - seqlen_q
    DType dtype;     // of q, k, v and o; every sum is fp32, or fp64 in flash_dmma.cu

    void *stream;  // cudaStream_t, on the current device; unused by the host build
};

// Enqueue out = softmax(softmax_scale · Q Kᵀ) V and lse. A row that sees no key gets out 0 and lse -inf.
// They throw std::runtime_error when the kernel cannot be launched.
namespace simt {
void flash_forward(const AttnParams &p);  // flash.cu on the GPU
}
namespace sm80 {
void flash_forward(const AttnParams &p);  // flash_sm80.cu: tensor cores, for what kernels.h says they can serve
}
namespace dmma {
void flash_forward(const AttnParams &p);  // flash_dmma.cu: fp32 on the tensor cores for fp64, where kernels.h says so
}
namespace host {
void flash_forward(const AttnParams &p);  // flash.cu on the CPU; returns when it is done
}
