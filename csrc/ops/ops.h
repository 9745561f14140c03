// The ops as functions, and their schemas.
#pragma once

#include "ops/forward.h"

namespace minimal_attn {

// As OPTIONS: the last arguments of other ops.
#define DECODE_OPTIONS(X)                                                                                             \
    X(OptionalTensor, cu_seqlens_q) X(OptionalTensor, seqused_q) X(OptionalTensor, seqused_k)                         \
    X(OptionalTensor, page_table) X(OptionalTensor, cache_batch_idx) X(OptionalTensor, leftpad_k)                     \
    X(OptionalTensor, tree_mask) SCORE_TENSORS(X) SCORE_NUMBERS(X) X(int64_t, num_splits) X(int64_t, max_seqlen_q)
#define APPEND_OPTIONS(X)                                                                                             \
    X(OptionalTensor, seqused_k) X(OptionalTensor, page_table) X(OptionalTensor, cache_batch_idx)                     \
    X(OptionalTensor, cu_seqlens_k_new) X(OptionalTensor, slot_mapping) X(OptionalTensor, q)                          \
    X(OptionalTensor, cu_seqlens_q) X(OptionalTensor, rotary_cos) X(OptionalTensor, rotary_sin)                       \
    X(OptionalTensor, rotary_seqlens) X(bool, rotary_interleaved) X(bool, q_advances)

constexpr const char *kSchemas[] = {
    "flash_forward(Tensor q, Tensor k, Tensor v" OPTIONS(AS_SCHEMA) ") -> (Tensor out, Tensor lse, Tensor max_logits)",
    "flash_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse" OPTIONS(AS_SCHEMA)
    ", bool need_dq=True, bool need_dkv=True, bool need_dsinks=False, bool need_dbias=False)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor dbias)",
    "flash_decode(Tensor q, Tensor k, Tensor v" DECODE_OPTIONS(AS_SCHEMA) ") -> (Tensor out, Tensor lse)",
    "append_kvcache(Tensor k_new, Tensor v_new, Tensor(a!) k_cache, Tensor(b!) v_cache" APPEND_OPTIONS(AS_SCHEMA)
    ") -> (Tensor q_rotated, Tensor lengths)"};

using TwoTensors = std::tuple<TorchTensor, TorchTensor>;
using Gradients = std::tuple<TorchTensor, TorchTensor, TorchTensor, TorchTensor, TorchTensor>;  // as in the schema

// ops.cpp
Output flash_forward(const TorchTensor &q, const TorchTensor &k, const TorchTensor &v, const Options &options);
Gradients flash_backward(const TorchTensor &dout, const OptionalTensor &dlse, const TorchTensor &q,
                         const TorchTensor &k, const TorchTensor &v, const TorchTensor &out,
                         const TorchTensor &lse OPTIONS(AS_PARAMETER), bool need_dq, bool need_dkv, bool need_dsinks,
                         bool need_dbias);
std::tuple<std::string, Reason> which_kernel(const TorchTensor &q, const TorchTensor &k, const TorchTensor &v,
                                             const Options &options, std::optional<int64_t> capability,
                                             bool fast_fp64);
std::optional<std::string> force_kernel(const std::optional<std::string> &name);

// decode_op.cpp
TwoTensors flash_decode(const TorchTensor &q, const TorchTensor &k,
                        const TorchTensor &v DECODE_OPTIONS(AS_PARAMETER));

// append_op.cpp
TwoTensors append_kvcache(const TorchTensor &k_new, const TorchTensor &v_new, const TorchTensor &k_cache,
                          const TorchTensor &v_cache APPEND_OPTIONS(AS_PARAMETER));

// The tensors of flash_forward as its schema has them: max_logits is empty if it is not asked for.
inline std::tuple<TorchTensor, TorchTensor, TorchTensor> tensors_of(const Output &output) {
    const auto &[out, lse, max_logits, _] = output;
    return {out, lse, max_logits ? *max_logits : make_empty({0}, lse.scalar_type(), lse)};
}

// function(q, k, v, options, others...) for callers with an argument for each option.
template <auto function, typename... Others>
auto with_options(const TorchTensor &q, const TorchTensor &k, const TorchTensor &v OPTIONS(AS_PARAMETER),
                  Others... others) {
    Options options;
    OPTIONS(AS_ASSIGNMENT)
    return function(q, k, v, options, others...);
}

}  // namespace minimal_attn
