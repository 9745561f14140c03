// The contract between host and kernels, without torch. flash_bwd.h and flash_cache.h have more of it.
#pragma once

#include <cstdint>

enum class DType { kFloat32, kFloat16, kBFloat16, kFloat64, kBool };  // kFloat64: on the CPU alone; kBool: masks

// [batch_size, heads, rows, head_dim]. Strides count elements; 0: expanded. head_dim is contiguous.
struct Tensor {
    void *data;
    int64_t batch_stride, head_stride, row_stride;
};

// [batch_size, nheads, seqlen_q, seqlen_k], stride 0: shared. Added to the scores, or of bool: the keys a row sees.
struct Bias {
    void *data;  // or nullptr
    int64_t batch_stride, head_stride, row_stride, key_stride;
    DType dtype;
};

// A mask in units of 64 rows and 64 keys, see common/block_mask.cuh. A size of 1 for samples or heads: shared. Kernels
// clamp the numbers of bits. Words may have bits of hidden units, but row_words and key_words must agree: in a
// deterministic backward pass on Hopper, key_words say which blocks add dQ, and row_words for how many a block waits.
struct BlockMask {
    const int *units;                  // [samples, heads, rows, keys]: -2 hidden, -1 seen, or the number of its bits
    const uint32_t *row_words;         // [samples, heads, rows, keys / 32]: bit n of them: unit n is not hidden
    const uint32_t *key_words;         // [samples, heads, keys, rows / 32]: the same transposed
    const uint32_t *bits;              // [num_bits, 2, 128]: of units, and of transposed units
    int samples, heads, rows, keys, num_bits;  // rows 0: there is no mask
};

struct AttnParams {
    Tensor q;   // [batch_size, nheads, seqlen_q, head_dim]
    Tensor k;   // [batch_size, nheads_k, seqlen_k, head_dim]
    Tensor v;   // [batch_size, nheads_k, seqlen_k, head_dim_v]
    Tensor o;   // [batch_size, nheads, seqlen_q, head_dim_v]
    // [batch_size, nheads, seqlen_q] contiguous, fp32 or fp64: natural log of a row's sum of exponentials. sm90's
    // forward pass also takes nullptr, where nobody needs it.
    void *lse;
    int64_t lse_batch_stride;
    void *max_logits;  // as lse: the largest score of a row, before its sink, or -inf without keys; or nullptr
    bool return_max_logits;  // whether max_logits is asked for

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
    // After seqlen_q and seqlen_k. -1 is no bound. A window that hides nothing becomes none, but a causal mask stays.
    void set_window(int64_t left, int64_t right) {
        window_left = left < 0 || left >= seqlen_k - 1 ? seqlen_k : int(left);
        window_right = right < 0 || (right > 0 && right >= seqlen_q - 1) ? seqlen_q : int(right);
    }
    // Positions i + d and keys are in chunks of this size, and a row sees only keys of its own chunk; 0: no chunks.
    int attention_chunk;
    bool has_mask() const {  // a causal mask hides nothing from one row
        return window_left < seqlen_k || window_right < seqlen_q - 1 || attention_chunk > 0;
    }
    DType dtype;  // of q, k, v and o

    // Changes of the scores beyond the scale, see mods/score_mods.cuh.
    double softcap;              // 0: none
    const float *alibi_slopes;   // [batch_size, nheads], or nullptr
    int64_t alibi_batch_stride;  // 0: [nheads]
    Bias bias;                   // not in packed batches
    BlockMask block_mask;        // not in packed batches
    bool has_score_mods() const { return softcap > 0 || alibi_slopes || bias.data; }
    // Whether the bias is a mask of bool that Hopper's kernels can take as a block mask, beside the other options.
    bool has_mask_alone() const {
        const double heads = (bias.batch_stride ? batch_size : 1.) * (bias.head_stride ? nheads : 1);
        return bias.data && bias.dtype == DType::kBool && softcap == 0 && !alibi_slopes && !dropout_seed &&
               !max_logits && !return_max_logits && !attention_chunk && !block_mask.rows &&
               heads * (seqlen_q / 64 + 1) * (seqlen_k / 64 + 1) < INT32_MAX;  // units
    }
    // Whether the forward pass on Hopper does so. A mask for each head stays as it is: to pack its units takes half as
    // long as the pass itself.
    bool walks_mask() const { return has_mask_alone() && bias.head_stride == 0; }
    // Whether kernels take their variant for changed scores, which also serves chunks and a block mask.
    bool has_mods() const { return has_score_mods() || attention_chunk || block_mask.rows; }

    // [nheads] of lse's type, or nullptr: one more score for each row of a head, in units of softmax_scale · q·k. It
    // has no key and no value (Xiao et al., StreamingLLM, 2023; as in gpt-oss). lse includes it.
    const void *sinks;

    // Dropout of the normalised probabilities, see mods/dropout.h.
    const int64_t *dropout_seed;  // one number in the kernel's memory, or nullptr: no dropout
    uint32_t keep_count;          // how many of 2^15 probabilities are kept
    bool has_dropout_origins;     // [batch_size, 4] numbers follow the seed, the origins of dropout.h
    double keep_scale;            // factor of the kept ones: 2^15 / keep_count, or 0 if none is kept

    // Workspace of sm90, or nullptr if all tiles are equally long: two numbers that are 0 before and after a call.
    // Attention to a cache takes one number of any value.
    int *tile_counter;
    uint32_t *mask_words;  // workspace of sm90 for a bias of bool: num_mask_words numbers
    void *stream;          // cudaStream_t, on the current device; unused on the CPU
};

// Attention to a cache may take several launches, which overlap (ops/cache_launches.h). Other calls have kAlone.
enum class Phase { kAlone, kPrefill, kDecode, kPrefillRest };

// flash_forward enqueues out = softmax(softmax_scale · Q Kᵀ) V and lse. A row that sees no key gets out 0 and lse -inf,
// or its sink. Throws std::runtime_error when a kernel cannot be launched. ops/kernels.h says what each kernel serves.
namespace simt { void flash_forward(const AttnParams &p); }  // flash.cu: CUDA cores, every GPU
namespace sm80 { void flash_forward(const AttnParams &p); }  // flash_sm80.cu: Ampere's tensor cores
namespace sm90 { void flash_forward(const AttnParams &p); }  // flash_sm90.cu: Hopper's tensor cores and TMA
namespace dmma { void flash_forward(const AttnParams &p); }  // flash_dmma.cu: fp32 on Hopper's fp64 tensor cores
namespace host { void flash_forward(const AttnParams &p); }  // flash.cu on the CPU; returns when it is done
namespace sm90 { int64_t num_mask_words(const AttnParams &p, bool is_backward); }  // 0 without a bias of bool
