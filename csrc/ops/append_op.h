// The op minimal_attn::append_kvcache as a function for both bindings, and its schema.
#pragma once

#include "flash_cache.h"
#include "ops/ops.h"

namespace minimal_attn {

std::tuple<TorchTensor, TorchTensor> append_kvcache(
    const TorchTensor &k_new, const TorchTensor &v_new, const TorchTensor &k_cache, const TorchTensor &v_cache,
    const OptionalTensor &seqused_k, const OptionalTensor &page_table, const OptionalTensor &cache_batch_idx,
    const OptionalTensor &cu_seqlens_k_new, const OptionalTensor &slot_mapping, const OptionalTensor &q,
    const OptionalTensor &cu_seqlens_q, const OptionalTensor &rotary_cos, const OptionalTensor &rotary_sin,
    const OptionalTensor &rotary_seqlens, bool rotary_interleaved, bool q_advances);

constexpr const char *kAppendSchema =
    "append_kvcache(Tensor k_new, Tensor v_new, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? seqused_k, "
    "Tensor? page_table, Tensor? cache_batch_idx, Tensor? cu_seqlens_k_new, Tensor? slot_mapping, Tensor? q, "
    "Tensor? cu_seqlens_q, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? rotary_seqlens, bool rotary_interleaved, "
    "bool q_advances) -> (Tensor q_rotated, Tensor lengths)";

}  // namespace minimal_attn
