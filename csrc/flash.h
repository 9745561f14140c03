// The whole contract between host and kernels: plain structs, and the functions that take them. No torch here.
#pragma once

#include <cstdint>

enum class DType { kFloat32, kFloat16, kBFloat16, kFloat64, kBool };  // kFloat64 only on the CPU, kBool for masks

// [batch_size, heads, rows, head_dim] in the kernel's memory. Strides count elements, not bytes. head_dim is always
// contiguous; batch, heads and rows may lie in any order and may be expanded (stride 0). Inputs are only read.
struct Tensor {
    void *data;
    int64_t batch_stride, head_stride, row_stride;
};

// [batch_size, nheads, seqlen_q, seqlen_k], with strides of 0 where it is shared: what is added to the scores, or of
// bool, which keys a row sees.
struct Bias {
    void *data;  // or nullptr: none. Only that of a gradient is written
    int64_t batch_stride, head_stride, row_stride, key_stride;
    DType dtype;
};

struct AttnParams {
    Tensor q;             // [batch_size, nheads, seqlen_q, head_dim]
    Tensor k;             // [batch_size, nheads_k, seqlen_k, head_dim]
    Tensor v;             // [batch_size, nheads_k, seqlen_k, head_dim_v]
    Tensor o;             // [batch_size, nheads, seqlen_q, head_dim_v]
    void *lse;            // [batch_size, nheads, seqlen_q] contiguous: natural log of each row's sum of exponentials;
                          // fp32, or fp64 for fp64
    int64_t lse_batch_stride;

    // In a packed batch the samples lie one after the other, and where one begins is in the kernel's memory:
    // [batch_size + 1], or nullptr twice. The tensors then have one sample of seqlen_q rows and seqlen_k keys, and
    // their batch strides are 0; lse is [nheads, seqlen_q].
    const int *cu_seqlens_q, *cu_seqlens_k;
    const int *seqused_q, *seqused_k;  // [batch_size] how many rows and keys of a sample are valid, or nullptr: all

    int64_t batch_size;    // samples
    int nheads, nheads_k;  // nheads is a multiple of nheads_k; query head h reads K/V head h / (nheads / nheads_k)
    int seqlen_q, seqlen_k, head_dim, head_dim_v;
    int max_head_dim() const { return head_dim > head_dim_v ? head_dim : head_dim_v; }
    double softmax_scale;  // representable in fp32 unless dtype is fp64
    // Row i of a sample sees the keys from i + d - window_left to i + d + window_right, d being its keys minus its rows
    // (bottom-right aligned). Under a causal mask window_right is 0. A window of seqlen_k keys to the left or of
    // seqlen_q to the right hides nothing: that is no bound.
    int window_left, window_right;
    // Call it when seqlen_q and seqlen_k are set. -1 is no bound, and neither is a window in which every row sees all
    // keys on that side, but for a causal mask.
    void set_window(int64_t left, int64_t right) {
        window_left = left < 0 || left >= seqlen_k - 1 ? seqlen_k : int(left);
        window_right = right < 0 || (right > 0 && right >= seqlen_q - 1) ? seqlen_q : int(right);
    }
    bool has_left_bound() const { return window_left < seqlen_k; }
    bool has_right_bound() const { return window_right < seqlen_q - 1; }  // a causal mask hides nothing from one row
    DType dtype;  // of q, k, v and o

    // What changes the scores beside the scale, see scores.cuh.
    double softcap;              // 0: none
    const float *alibi_slopes;   // [batch_size, nheads], or nullptr: none
    int64_t alibi_batch_stride;  // 0: [nheads]
    Bias bias;                   // not in packed batches
    bool has_score_mods() const { return softcap > 0 || alibi_slopes || bias.data; }

    // [nheads] of lse's type, or nullptr: one more score of each row of a head, in units of softmax_scale · q·k. No key
    // and no value go with it (Xiao et al., StreamingLLM, 2023; as in gpt-oss). lse includes it.
    const void *sinks;

    // Dropout of the normalised probabilities, see dropout.h.
    const int64_t *dropout_seed;  // one number in the kernel's memory, or nullptr: no dropout
    uint32_t keep_count;          // of 2^15 probabilities, so many are kept; the others become 0
    bool has_dropout_origins;     // whether the seed is followed by [batch_size, 4], the origins of dropout.h
    double keep_scale;            // what is kept is multiplied by it: 2^15 / keep_count, or 0 if nothing is kept

    int *tile_counter;     // workspace of flash_sm90.cu: one number, or nullptr if all tiles take equally long and no
                           // two launches share them
    uint32_t *mask_words;  // workspace of flash_sm90.cu for a bias of bool: sm90::num_mask_words numbers
    void *stream;          // cudaStream_t, on the current device; unused by the host build
};

// The backward pass. q, k, v, o, lse and the options are those of the forward pass; o and lse are read.
struct AttnBackwardParams : AttnParams {
    Tensor dout;        // as o
    Tensor dq, dk, dv;  // as q, k and v; data is nullptr where a gradient is not needed (dk and dv go together)
    // The gradient of bias: fp32, or fp64 for fp64; data is nullptr if it is not needed. A stride of 0 stands for a
    // dimension that is shared, over which it is summed.
    Bias dbias;
    // [batch_size, nheads, seqlen_q] in any order, or data is nullptr if nobody used lse. fp32, or fp64 for fp64.
    Tensor dlse;
    void *delta;        // workspace like lse: rowsum(dout ∘ o) - dlse
    float *lse_log2;    // workspace like lse: see scores.cuh; nullptr for flash_bwd.cu, which does without
    void *workspace;    // as many bytes as backward_workspace of the kernel says, or nullptr if that is 0
    bool deterministic;
};

// The launches of a mixed batch, in their order; they overlap (ops/cache_launches.h). Other calls have kAlone.
enum class Phase { kAlone, kPrefill, kDecode, kPrefillRest };

// Attention to a cache of keys and values. k is [num_sequences, nheads_k, page_size, head_dim],
// and v alike: cached sequences of page_size keys, or pages. seqlen_k is how many keys a sample may have. cu_seqlens_k
// is nullptr, also where q is packed. Values that point outside of the cache are clamped.
struct DecodeParams : AttnParams {
    const int *page_table;       // [batch_size, max_pages], or nullptr: the keys of a sample lie in one sequence
    int64_t page_table_stride;
    const int *cache_batch_idx;  // [batch_size] that sequence, or nullptr: its own number
    const int *leftpad_k;        // [batch_size] where its keys begin, or nullptr: 0. They end at seqused_k
    // [batch_size, seqlen_q] for up to 64 rows, or nullptr. Bit j of a row's word says whether it sees the j-th of the
    // last seqlen_q keys of its sample, the new ones. All rows see the others. It goes with a padded q and no window.
    const uint64_t *tree_mask;
    int64_t tree_batch_stride;   // 0: [seqlen_q]
    int num_sequences, page_size;
    int num_splits;              // the most parts into which a sample's keys are cut, by its own lengths; 0: no bound
    int max_seqlen_q;            // a sample with more rows is not cut
    int box_rows;                // set by kernels with TMA: the rows of a box
    int min_rows, max_rows;      // the samples that this launch serves have so many rows. It leaves the others alone
    Phase phase;                 // of this launch
    int num_sms;                 // how many multiprocessors it fills
    void *workspace;             // as many bytes as decode_workspace says, or nullptr if that is 0
    int *counters;               // as many zeros as num_decode_counters says; zeros again when the kernel ends. Lengths
                                 // that change while it runs would leave others
};

// New rows for a cache as DecodeParams has it, and the rotation of their keys and of q by position (Su et al.,
// RoFormer, 2021). New row t of a sample goes to place seqused_k + t of its sequence or pages. A row whose place, page
// or sequence is outside of the cache is not written.
struct AppendParams {
    Tensor k_new, v_new;         // [batch_size, nheads_k, seqlen_new, head_dim], and v_new with head_dim_v
    Tensor k_cache, v_cache;     // [num_sequences, nheads_k, page_size, head_dim], and v_cache alike
    const int *cu_seqlens_new;   // [batch_size + 1] of packed new rows, as cu_seqlens_k of AttnParams; or nullptr
    const int *seqused_k;        // [batch_size] how many places of a sample are taken
    int *lengths;                // [batch_size] is set to how many are taken afterwards
    const int *page_table;       // this and the next two as in DecodeParams
    int64_t page_table_stride;
    const int *cache_batch_idx;
    // [seqlen_new], or nullptr: the new rows belong to no sample, and row t becomes row slot % page_size of sequence
    // slot / page_size. Then there are no other pointers to int, no q and no rotation, and batch_size is 1.
    const int64_t *slot_mapping;

    Tensor q, q_rotated;         // [batch_size, nheads, seqlen_q, head_dim]; nheads is 0 if q is not rotated
    const int *cu_seqlens_q;     // [batch_size + 1] of a packed q, or nullptr
    const void *rotary_cos, *rotary_sin;  // [seqlen_rotary, rotary_dim / 2] contiguous, of dtype; or nullptr twice
    const int *rotary_seqlens;   // [batch_size] position of the first new key and of the first row of q, or nullptr:
                                 // seqused_k. Positions outside of the tables are clamped
    int rotary_dim;              // columns that turn: a multiple of 16, at most head_dim; 0: none
    bool rotary_interleaved;     // columns 2i and 2i + 1 turn together, not i and i + rotary_dim / 2
    bool q_advances;             // row i of q has the position of the i-th new key, not that of the first

    int batch_size, nheads, nheads_k, seqlen_q, seqlen_new, head_dim, head_dim_v;
    int num_sequences, page_size, capacity;  // capacity: the places of a sample
    int seqlen_rotary;
    DType dtype;                 // of all tensors
    void *stream;
};

// flash_forward enqueues out = softmax(softmax_scale · Q Kᵀ) V and lse. A row that sees no key gets out 0 and lse -inf,
// or its sink.
// flash_backward enqueues dq, dk, dv and dbias. A row that lengths or a window leave without keys adds nothing to dk
// and dv, whatever its dout and dlse; its dq is 0. Where only a bias hides all keys of a row, its dout must be finite.
// Both throw std::runtime_error when a kernel cannot be launched. kernels.h says what each kernel serves.
namespace simt {
void flash_forward(const AttnParams &p);                  // flash.cu: CUDA cores, every GPU
void flash_backward(const AttnBackwardParams &p);         // flash_bwd.cu, the same
void preprocess_backward(const AttnBackwardParams &p);    // flash_bwd.cu: delta and lse_log2, for every backward
void bias_backward(const AttnBackwardParams &p);          // flash_bwd_bias.cu: dbias, for every backward
void append_kvcache(const AppendParams &p);               // append.cu: k_cache, v_cache, q_rotated and lengths
}
namespace sm80 {
void flash_forward(const AttnParams &p);                  // flash_sm80.cu: Ampere's tensor cores
void flash_backward(const AttnBackwardParams &p);         // flash_bwd_sm80.cu, the same
int64_t backward_workspace(const AttnBackwardParams &p);  // bytes
void flash_decode(const DecodeParams &p);                 // decode.cu, the same
int64_t decode_workspace(const DecodeParams &p);          // bytes
int64_t num_decode_counters(const DecodeParams &p);
}
namespace sm90 {
void flash_forward(const AttnParams &p);                  // flash_sm90.cu: Hopper's tensor cores and TMA
void flash_prefill(const DecodeParams &p);                // flash_sm90.cu, the same with the keys of a cache
void flash_decode(const DecodeParams &p);                 // decode_sm90.cu: caches, more than 32 packed rows
int64_t decode_workspace(const DecodeParams &p);          // bytes
int64_t num_decode_counters(const DecodeParams &p);
int64_t num_mask_words(const AttnParams &p);              // 0 without a bias of bool
void flash_backward(const AttnBackwardParams &p);         // flash_bwd_sm90.cu, the same
void flash_backward_wide(const AttnBackwardParams &p);    // flash_bwd_wide_sm90.cu: head_dim over 128
int64_t backward_workspace_wide(const AttnBackwardParams &p);
int64_t backward_workspace(const AttnBackwardParams &p);  // bytes, of both
}
namespace dmma {
void flash_forward(const AttnParams &p);                  // flash_dmma.cu: fp32 on Hopper's fp64 tensor cores
}
namespace host {
void flash_forward(const AttnParams &p);           // flash.cu on the CPU; returns when it is done
void flash_backward(const AttnBackwardParams &p);  // flash_bwd.cu on the CPU
void append_kvcache(const AppendParams &p);        // append.cu on the CPU
}
