// The contract of flash.h for the backward pass.
#pragma once

#include "flash.h"

// q, k, v, o, lse and the options are those of the forward pass.
struct AttnBackwardParams : AttnParams {
    Tensor dout;        // like o
    Tensor dq, dk, dv;  // like q, k and v; data is nullptr where a gradient is not needed (dk and dv go together)
    Bias dbias;         // fp32, or fp64 for fp64, summed over the dimensions with stride 0; or data is nullptr
    Tensor dlse;        // [batch_size, nheads, seqlen_q] in any order, fp32 or fp64 for fp64; data is nullptr: all 0
    void *delta;        // workspace like lse: rowsum(dout ∘ o) - dlse
    float *lse_log2;    // workspace like lse, see scores.cuh; nullptr for flash_bwd.cu
    void *workspace;    // as many bytes as backward_workspace of the kernel says; nullptr for flash_bwd.cu
    bool deterministic;

    bool walks_mask() const { return has_mask_alone(); }  // also a mask for each head
};

// Bytes [0, end) of the workspace, without those of the gap. All are multiples of 16.
struct ZeroBytes { int64_t end, gap_begin, gap_end; };

// flash_backward enqueues dq, dk, dv and dbias. A row that lengths or a window leave without keys adds nothing to dk
// and dv, whatever its dout and dlse; its dq is 0. Where a bias alone hides all keys of a row, its dout must be finite.
namespace simt {
void flash_backward(const AttnBackwardParams &p);         // flash_bwd.cu
// flash_bwd.cu, for every backward pass: delta, lse_log2, and zeros at the beginning of the workspace.
void preprocess_backward(const AttnBackwardParams &p, const ZeroBytes &zeros);
void bias_backward(const AttnBackwardParams &p);          // flash_bwd_bias.cu: dbias, for every backward pass
}
namespace sm80 {
void flash_backward(const AttnBackwardParams &p);         // flash_bwd_sm80.cu
int64_t backward_workspace(const AttnBackwardParams &p);  // bytes
}
namespace sm90 {
void flash_backward(const AttnBackwardParams &p);         // flash_bwd_sm90.cu
void flash_backward_wide(const AttnBackwardParams &p);    // flash_bwd_wide_sm90.cu: most head_dims over 128
int64_t backward_workspace(const AttnBackwardParams &p);  // bytes, of both
int64_t backward_workspace_wide(const AttnBackwardParams &p);
}
namespace host { void flash_backward(const AttnBackwardParams &p); }  // flash_bwd.cu on the CPU; returns when done
