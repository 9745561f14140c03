// The contract between host and kernels: plain structs, and the functions that take them. No torch here. flash_cache.h
// has those for caches of keys and values.
#pragma once

#include <cstdint>

enum class DType { kFloat32, kFloat16, kBFloat16, kFloat64, kBool };  // kFloat64: on the CPU alone; kBool: masks

// [batch_size, heads, rows, head_dim] in the kernel's memory. Strides count elements. head_dim is contiguous; the other
// dimensions may lie in any order and may be expanded (stride 0).
struct Tensor {
    void *data;
    int64_t batch_stride, head_stride, row_stride;
};

// [batch_size, nheads, seqlen_q, seqlen_k], with stride 0 along shared dimensions: added to the scores. A bias of bool
// says which keys a row sees.
struct Bias {
    void *data;  // or nullptr
    int64_t batch_stride, head_stride, row_stride, key_stride;
    DType dtype;
};

struct AttnParams {
    Tensor q;   // [batch_size, nheads, seqlen_q, head_dim]
    Tensor k;   // [batch_size, nheads_k, seqlen_k, head_dim]
    Tensor v;   // [batch_size, nheads_k, seqlen_k, head_dim_v]
    Tensor o;   // [batch_size, nheads, seqlen_q, head_dim_v]
    void *lse;  // [batch_size, nheads, seqlen_q], contiguous: natural log of each row's sum of exponentials; fp32, or
                // fp64 for fp64
    int64_t lse_batch_stride;

    // A packed batch: the samples lie one after the other, and begin where cu_seqlens says, [batch_size + 1]. The
    // tensors have one sample of seqlen_q rows and seqlen_k keys, batch strides of 0, and lse is [nheads, seqlen_q].
    const int *cu_seqlens_q, *cu_seqlens_k;  // both or neither
    const int *seqused_q, *seqused_k;        // [batch_size] valid rows and keys of a sample; nullptr: all

    int64_t batch_size;    // samples
    int nheads, nheads_k;  // query head h reads key/value head h / (nheads / nheads_k)
    int seqlen_q, seqlen_k, head_dim, head_dim_v;
    int max_head_dim() const { return head_dim > head_dim_v ? head_dim : head_dim_v; }
    double softmax_scale;  // representable in fp32 unless dtype is fp64
    // Row i of a sample sees the keys [i + d - window_left, i + d + window_right], d = its keys - its rows (aligned
    // bottom right). A causal mask has window_right 0. No bound: seqlen_k to the left, seqlen_q to the right.
    int window_left, window_right;
    // Call it when seqlen_q and seqlen_k are set. -1 is no bound. A window that hides nothing becomes none, except for
    // a causal mask.
    void set_window(int64_t left, int64_t right) {
        window_left = left < 0 || left >= seqlen_k - 1 ? seqlen_k : int(left);
        window_right = right < 0 || (right > 0 && right >= seqlen_q - 1) ? seqlen_q : int(right);
    }
    bool has_left_bound() const { return window_left < seqlen_k; }
    bool has_right_bound() const { return window_right < seqlen_q - 1; }  // a causal mask hides nothing from one row
    DType dtype;  // of q, k, v and o

    // Changes of the scores beyond the scale, see mods/score_mods.cuh.
    double softcap;              // 0: none
    const float *alibi_slopes;   // [batch_size, nheads], or nullptr
    int64_t alibi_batch_stride;  // 0: [nheads]
    Bias bias;                   // not in packed batches
    bool has_score_mods() const { return softcap > 0 || alibi_slopes || bias.data; }

    // [nheads] of lse's type, or nullptr: one more score for each row of a head, in units of softmax_scale · q·k. It
    // has no key and no value (Xiao et al., StreamingLLM, 2023; as in gpt-oss). lse includes it.
    const void *sinks;

    // Dropout of the normalised probabilities, see mods/dropout.h.
    const int64_t *dropout_seed;  // one number in the kernel's memory, or nullptr: no dropout
    uint32_t keep_count;          // how many of 2^15 probabilities are kept
    bool has_dropout_origins;     // [batch_size, 4] numbers follow the seed, the origins of dropout.h
    double keep_scale;            // factor of the kept ones: 2^15 / keep_count, or 0 if none is kept

    int *tile_counter;     // workspace of flash_sm90.cu: one number, or nullptr if all tiles take equally long
                           // and one launch has them
    uint32_t *mask_words;  // workspace of flash_sm90.cu for a bias of bool: sm90::num_mask_words numbers
    void *stream;          // cudaStream_t, on the current device; unused on the CPU
};

// Attention to a cache may take several launches, which overlap (ops/cache_launches.h). Other calls have kAlone.
enum class Phase { kAlone, kPrefill, kDecode, kPrefillRest };

// The backward pass. q, k, v, o, lse and the options are those of the forward pass.
struct AttnBackwardParams : AttnParams {
    Tensor dout;        // like o
    Tensor dq, dk, dv;  // like q, k and v; data is nullptr where a gradient is not needed (dk and dv go together)
    Bias dbias;         // fp32, or fp64 for fp64, summed over the dimensions with stride 0; or data is nullptr
    Tensor dlse;        // [batch_size, nheads, seqlen_q] in any order, fp32 or fp64 for fp64; data is nullptr: all 0
    void *delta;        // workspace like lse: rowsum(dout ∘ o) - dlse
    float *lse_log2;    // workspace like lse, see scores.cuh; nullptr for flash_bwd.cu
    void *workspace;    // as many bytes as backward_workspace of the kernel says, or nullptr if that is 0
    bool deterministic;
};

// flash_forward enqueues out = softmax(softmax_scale · Q Kᵀ) V and lse. A row that sees no key gets out 0 and lse -inf,
// or its sink.
// flash_backward enqueues dq, dk, dv and dbias. A row that lengths or a window leave without keys adds nothing to dk
// and dv, whatever its dout and dlse; its dq is 0. Where a bias alone hides all keys of a row, its dout must be finite.
// All throw std::runtime_error when a kernel cannot be launched. ops/kernels.h says what each kernel serves.
namespace simt {
void flash_forward(const AttnParams &p);                  // flash.cu: CUDA cores, every GPU
void flash_backward(const AttnBackwardParams &p);         // flash_bwd.cu
void preprocess_backward(const AttnBackwardParams &p);    // flash_bwd.cu: delta and lse_log2, for every backward pass
void bias_backward(const AttnBackwardParams &p);          // flash_bwd_bias.cu: dbias, for every backward pass
}
namespace sm80 {  // Ampere's tensor cores
void flash_forward(const AttnParams &p);                  // flash_sm80.cu
void flash_backward(const AttnBackwardParams &p);         // flash_bwd_sm80.cu
int64_t backward_workspace(const AttnBackwardParams &p);  // bytes
}
namespace sm90 {  // Hopper's tensor cores and TMA
void flash_forward(const AttnParams &p);                  // flash_sm90.cu
int64_t num_mask_words(const AttnParams &p);              // 0 without a bias of bool
void flash_backward(const AttnBackwardParams &p);         // flash_bwd_sm90.cu
void flash_backward_wide(const AttnBackwardParams &p);    // flash_bwd_wide_sm90.cu: head_dim over 128
int64_t backward_workspace(const AttnBackwardParams &p);  // bytes, of both
int64_t backward_workspace_wide(const AttnBackwardParams &p);
}
namespace dmma {
void flash_forward(const AttnParams &p);                  // flash_dmma.cu: fp32 on Hopper's fp64 tensor cores
}
namespace host {  // the CPU; these return when they are done
void flash_forward(const AttnParams &p);                  // flash.cu
void flash_backward(const AttnBackwardParams &p);         // flash_bwd.cu
}
