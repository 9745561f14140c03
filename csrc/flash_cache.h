// The contract of flash.h for caches of keys and values.
#pragma once

#include "flash.h"

// Attention to a cache. k and v are [num_sequences, nheads_k, page_size, head_dim]: sequences or pages of page_size
// keys, at most seqlen_k of a sample. cu_seqlens_k is nullptr even for packed q. Page and sequence numbers are clamped.
struct DecodeParams : AttnParams {
    const int *page_table;       // [batch_size, max_pages], or nullptr: a sample's keys lie in one sequence
    int64_t page_table_stride;
    const int *cache_batch_idx;  // [batch_size] that sequence, or nullptr: the sample's own number
    const int *leftpad_k;        // [batch_size] where a sample's keys begin, or nullptr: 0. They end at seqused_k
    // [batch_size, seqlen_q] for up to 64 rows, or nullptr. Bit j of a row's word is set if it sees the j-th of its
    // sample's last seqlen_q keys. Rows see all keys before those. Needs a padded q without a window.
    const uint64_t *tree_mask;
    int64_t tree_batch_stride;   // 0: [seqlen_q]
    int num_sequences, page_size;
    int num_splits;              // the most splits of a sample's keys; 0: no bound
    int max_seqlen_q;            // a sample with more rows is not split
    int box_rows;                // rows of a box of TMA; kernels set it
    int min_rows, max_rows;      // the rows of samples that this launch serves
    Phase phase;
    int num_sms;                 // multiprocessors of this launch
    void *workspace;             // as decode_sizes() says, or nullptr for 0 bytes
    int *counters;               // as many zeros, before and after a call; meanwhile lengths must not change
};

struct DecodeSizes { int64_t workspace_bytes, num_counters; };

// New rows for a cache, and the rotation of their keys and of q by position (Su et al., RoFormer, 2021). A sample's new
// row t goes to place seqused_k + t of its sequence or pages. Rows outside of the cache are not written.
struct AppendParams {
    Tensor k_new, v_new;         // [batch_size, nheads_k, seqlen_new, head_dim], v_new with head_dim_v
    Tensor k_cache, v_cache;     // [num_sequences, nheads_k, page_size, head_dim], v_cache with head_dim_v
    const int *cu_seqlens_new;   // [batch_size + 1] of packed new rows, or nullptr
    const int *seqused_k;        // [batch_size] places taken before
    int *lengths;                // [batch_size] set to the places taken afterwards
    const int *page_table;       // this and the next two as in DecodeParams
    int64_t page_table_stride;
    const int *cache_batch_idx;
    // [seqlen_new], or nullptr: new rows belong to no sample, and row t becomes row slot % page_size of sequence
    // slot / page_size. Then pointers to int are nullptr, there is no q and no rotation, and batch_size is 1.
    const int64_t *slot_mapping;

    Tensor q, q_rotated;         // [batch_size, nheads, seqlen_q, head_dim]; nheads is 0 if q is not rotated
    const int *cu_seqlens_q;     // [batch_size + 1] of a packed q, or nullptr
    const void *rotary_cos, *rotary_sin;  // [seqlen_rotary, rotary_dim / 2] contiguous, of dtype; or both nullptr
    const int *rotary_seqlens;   // [batch_size] position of the first new key and row of q, or nullptr: seqused_k
    int rotary_dim;              // rotated columns: a multiple of 16, at most head_dim; 0: none
    bool rotary_interleaved;     // columns 2i and 2i + 1 turn together, otherwise i and i + rotary_dim / 2
    bool q_advances;             // row i of q has the position of new key i, otherwise of the first

    int batch_size, nheads, nheads_k, seqlen_q, seqlen_new, head_dim, head_dim_v;
    int num_sequences, page_size, capacity;  // capacity: places of a sample
    int seqlen_rotary;           // positions outside of the tables are clamped
    DType dtype;
    void *stream;
};

namespace simt { void append_kvcache(const AppendParams &p); }  // append.cu
namespace sm80 {
void flash_decode(const DecodeParams &p);                // decode.cu
DecodeSizes decode_sizes(const DecodeParams &p);
}
namespace sm90 {
void flash_prefill(const DecodeParams &p);               // prefill_sm90.cu
void flash_decode(const DecodeParams &p);                // decode_sm90.cu
DecodeSizes decode_sizes(const DecodeParams &p);
}
namespace host { void append_kvcache(const AppendParams &p); }
