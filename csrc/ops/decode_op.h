// The op minimal_attn::flash_decode as a function for both bindings, and its schema.
#pragma once

#include "flash_cache.h"
#include "ops/ops.h"

namespace minimal_attn {

std::tuple<TorchTensor, TorchTensor> flash_decode(
    const TorchTensor &q, const TorchTensor &k, const TorchTensor &v, const OptionalTensor &cu_seqlens_q,
    const OptionalTensor &seqused_q, const OptionalTensor &seqused_k, const OptionalTensor &page_table,
    const OptionalTensor &cache_batch_idx, const OptionalTensor &leftpad_k, const OptionalTensor &tree_mask,
    const OptionalTensor &sinks, const OptionalTensor &alibi_slopes, double softmax_scale, double softcap,
    int64_t window_left, int64_t window_right, int64_t num_splits, int64_t max_seqlen_q);

constexpr const char *kDecodeSchema =
    "flash_decode(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? seqused_q, Tensor? seqused_k, "
    "Tensor? page_table, Tensor? cache_batch_idx, Tensor? leftpad_k, Tensor? tree_mask, Tensor? sinks, "
    "Tensor? alibi_slopes, float softmax_scale, float softcap, int window_left, int window_right, int num_splits, "
    "int max_seqlen_q) -> (Tensor out, Tensor lse)";

}  // namespace minimal_attn
