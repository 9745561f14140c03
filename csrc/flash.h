// The whole contract between host and kernels: one plain struct, and the functions that take it. No torch here.
//
// Strides count elements, not bytes. The head_dim dimension is always contiguous; batch, head and row may lie in any
// order and may be expanded (stride 0). Rows are query rows for q and o, key rows for k and v.
//
// Read next: flash.cu, the kernel; main.cpp, which fills the struct from torch tensors.
#pragma once

#include <cstdint>

enum class DType { kFloat32, kFloat16, kBFloat16, kFloat64 };  // the last on the CPU alone

struct AttnParams {
    const void *q;        // [batch_size, nheads, seqlen_q, head_dim]
    const void *k, *v;    // [batch_size, nheads_k, seqlen_k, head_dim]
    void *o;              // as q
    void *lse;            // [batch_size, nheads, seqlen_q] contiguous: natural log of each row's sum of exponentials;
                          // fp32, fp64 for fp64
    const int *seq_lens;  // [batch_size] valid length of each sample, or nullptr; needs seqlen_q == seqlen_k

    int64_t q_batch_stride, q_head_stride, q_row_stride;
    int64_t k_batch_stride, k_head_stride, k_row_stride;
    int64_t v_batch_stride, v_head_stride, v_row_stride;
    int64_t o_batch_stride, o_head_stride, o_row_stride;

    int64_t batch_size;
    int nheads, nheads_k;  // nheads is a multiple of nheads_k; query head h reads K/V head h / (nheads / nheads_k)
    int seqlen_q, seqlen_k, head_dim;
    double softmax_scale;  // a float but for fp64
    bool is_causal;  // bottom-right aligned: query row i sees the keys j <= i + seqlen_k - seqlen_q
    DType dtype;     // of q, k, v and o; every sum is fp32, or fp64 for fp64 and in flash_dmma.cu

    // Dropout of the normalised probabilities, see dropout.h.
    const int64_t *dropout_seed;  // one number in the kernel's memory, or nullptr: no dropout
    uint32_t drop_threshold;      // a probability whose random word is below it becomes 0,
    double keep_scale;            // and what is left is multiplied by 1 / (1 - dropout_p), by 0 where that is 1/0

    int *tile_counter;  // of flash_sm90.cu: memory for one number, or nullptr: tiles of rows are all alike
    void *stream;       // cudaStream_t, on the current device; unused by the host build
};

// The backward pass: q, k, v, o, lse and all that goes with them as in the forward, o and lse to be read.
struct AttnBackwardParams : AttnParams {
    const void *dout;   // as q, the last dimension contiguous as well
    const void *dlse;   // [batch_size, nheads, seqlen_q] in any order, or nullptr: nobody used lse. fp64 for fp64
    void *dq;           // as q, or nullptr: not needed
    void *dk, *dv;      // as k; for flash_bwd.cu also nullptr, both
    void *delta;        // workspace like lse: rowsum(dout ∘ o) - dlse
    void *workspace;    // as many bytes as backward_workspace says
    bool deterministic;

    int64_t dout_batch_stride, dout_head_stride, dout_row_stride;
    int64_t dlse_batch_stride, dlse_head_stride, dlse_row_stride;
    int64_t dq_batch_stride, dq_head_stride, dq_row_stride;
    int64_t dk_batch_stride, dk_head_stride, dk_row_stride;
    int64_t dv_batch_stride, dv_head_stride, dv_row_stride;
};

int compute_capability();  // flash_sm80.cu: of the current device, less if this build holds for it what is older

// flash_forward enqueues out = softmax(softmax_scale · Q Kᵀ) V and lse. A row that sees no key gets out 0 and lse -inf.
// flash_backward enqueues dq, dk, dv. A row that sees no key has no say in them, whatever its dout and dlse, and dq 0.
// They throw std::runtime_error when a kernel cannot be launched.
namespace simt {
void flash_forward(const AttnParams &p);           // flash.cu on the GPU
void flash_backward(const AttnBackwardParams &p);  // flash_bwd.cu on the GPU
void row_sums(const AttnBackwardParams &p);        // delta alone, for other kernels
}
namespace sm80 {
void flash_forward(const AttnParams &p);           // flash_sm80.cu: tensor cores, where kernels.h says so
void flash_backward(const AttnBackwardParams &p);  // flash_bwd_sm80.cu, the same
int64_t backward_workspace(const AttnBackwardParams &p);
}
namespace sm90 {
void flash_forward(const AttnParams &p);  // flash_sm90.cu: Hopper's tensor cores and TMA, where kernels.h says so
}
namespace dmma {
void flash_forward(const AttnParams &p);  // flash_dmma.cu: fp32 on the tensor cores for fp64, where kernels.h says so
}
namespace host {
void flash_forward(const AttnParams &p);  // flash.cu on the CPU; returns when it is done
void flash_backward(const AttnBackwardParams &p);  // flash_bwd.cu on the CPU
}
