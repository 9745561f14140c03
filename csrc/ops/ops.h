// The ops minimal_attn::flash_forward and flash_backward as functions for both bindings: their options, the checks of
// these, their arguments and schemas.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "ops/forward.h"

namespace minimal_attn {

using OptionalTensor = std::optional<TorchTensor>;
// dq, dk, dv, dsinks, dbias
using Gradients = std::tuple<TorchTensor, TorchTensor, TorchTensor, TorchTensor, TorchTensor>;

// What a call asks for beside q, k and v. The ops have these as arguments of their own, in this order.
struct Options {
    OptionalTensor cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks, alibi_slopes, attn_bias;
    double softmax_scale, softcap = 0;
    int64_t window_left, window_right;
    double dropout_p = 0;
    OptionalTensor dropout_seed = {};
};

// Whether x is on the device of q, of this dtype and of these sizes.
inline bool is_like(const TorchTensor &x, Sizes sizes, ScalarType dtype, const TorchTensor &q) {
    return x.sizes().equals(sizes) && x.scalar_type() == dtype && x.device() == q.device();
}

// What is wrong with what changes the scores, see score_mods.cuh: a ValueError.
inline Reason find_mods_fault(const TorchTensor &q, Layout dim, int64_t batch_size, const Options &options) {
    const auto &[alibi_slopes, bias] = std::tie(options.alibi_slopes, options.attn_bias);
    if (!(options.softcap >= 0 && options.softcap <= kMaxScale)) return "softcap must be at least 0 and finite";
    const int64_t nheads = q.size(dim.head);
    if (alibi_slopes && !(alibi_slopes->is_contiguous() &&
                          (is_like(*alibi_slopes, {nheads}, ScalarType::Float, q) ||
                           is_like(*alibi_slopes, {batch_size, nheads}, ScalarType::Float, q))))
        return "alibi_slopes must be contiguous float32 with one value a head, or one a sample and head, on the device "
               "of q";
    if (!bias) return {};
    if (options.cu_seqlens_q) return "attn_bias cannot be given with cu_seqlens_q and cu_seqlens_k";
    const ScalarType dtype = bias->scalar_type();
    if (bias->device() != q.device() || bias->dim() != 4 ||
        (dtype != ScalarType::Bool && dtype != q.scalar_type() && dtype != lse_dtype(q)))
        return "attn_bias must be 4D on the device of q, of bool, of the dtype of q or of that of lse";
    return {};
}

// What is wrong with the lengths and sinks of a call, whose q is without a fault: a ValueError. Their values stay on
// the GPU, where kernels clamp the lengths.
inline Reason find_fault(const TorchTensor &q, Layout dim, const Options &options) {
    const auto &[cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks] =
        std::tie(options.cu_seqlens_q, options.cu_seqlens_k, options.seqused_q, options.seqused_k, options.sinks);
    if (cu_seqlens_q.has_value() != cu_seqlens_k.has_value() || (cu_seqlens_q && cu_seqlens_q->numel() < 2))
        return "cu_seqlens_q and cu_seqlens_k go together and have at least two elements";
    if (cu_seqlens_q && dim.batch == 0 && q.size(0) != 1) return "a packed batch is one sample to q, k and v";
    if (!cu_seqlens_q && dim.batch < 0) return "without cu_seqlens_q there must be a batch dimension";
    const int64_t batch_size = cu_seqlens_q ? cu_seqlens_q->numel() - 1 : q.size(dim.batch);
    auto is_wrong = [&](const OptionalTensor &x, int64_t size, ScalarType dtype) {
        return x && !(is_like(*x, {size}, dtype, q) && x->is_contiguous());
    };
    const ScalarType int32 = ScalarType::Int;
    if (is_wrong(cu_seqlens_q, batch_size + 1, int32) || is_wrong(cu_seqlens_k, batch_size + 1, int32))
        return "cu_seqlens_q and cu_seqlens_k must be contiguous int32 tensors of one shape on the device of q";
    if (is_wrong(seqused_q, batch_size, int32) || is_wrong(seqused_k, batch_size, int32))
        return "seqused_q and seqused_k must be contiguous int32 tensors with one value a sample on the device of q";
    if (is_wrong(sinks, q.size(dim.head), lse_dtype(q)))
        return "sinks must be a contiguous tensor with one value a head on the device of q, of the dtype of lse";
    return find_mods_fault(q, dim, batch_size, options);
}

// Of options without a fault.
inline void set_options(AttnParams &p, const Options &options) {
    auto pointer = [](const OptionalTensor &x) { return x ? static_cast<const int *>(x->const_data_ptr()) : nullptr; };
    p.cu_seqlens_q = pointer(options.cu_seqlens_q), p.cu_seqlens_k = pointer(options.cu_seqlens_k);
    p.seqused_q = pointer(options.seqused_q), p.seqused_k = pointer(options.seqused_k);
    if (options.sinks) p.sinks = options.sinks->const_data_ptr();
    p.softcap = options.softcap;
    if (options.alibi_slopes) {
        p.alibi_slopes = static_cast<const float *>(options.alibi_slopes->const_data_ptr());
        p.alibi_batch_stride = options.alibi_slopes->dim() == 2 ? p.nheads : 0;
    }
    if (options.attn_bias) p.bias = bias_of(*options.attn_bias);
    if (!options.cu_seqlens_q) return;
    p.batch_size = options.cu_seqlens_q->numel() - 1;
    p.q.batch_stride = p.k.batch_stride = p.v.batch_stride = p.lse_batch_stride = 0;
}

// ops.cpp describes them.
Output flash_forward(const TorchTensor &q, const TorchTensor &k, const TorchTensor &v, const Options &options);
Gradients flash_backward(const TorchTensor &dout, const OptionalTensor &dlse, const TorchTensor &q,
                         const TorchTensor &k, const TorchTensor &v, const TorchTensor &out, const TorchTensor &lse,
                         const Options &options, bool deterministic, bool need_dq, bool need_dkv, bool need_dsinks,
                         bool need_dbias);
Gradients flash_backward_op(const TorchTensor &dout, const OptionalTensor &dlse, const TorchTensor &q,
                            const TorchTensor &k, const TorchTensor &v, const TorchTensor &out, const TorchTensor &lse,
                            const OptionalTensor &cu_seqlens_q, const OptionalTensor &cu_seqlens_k,
                            const OptionalTensor &seqused_q, const OptionalTensor &seqused_k,
                            const OptionalTensor &sinks, const OptionalTensor &alibi_slopes,
                            const OptionalTensor &attn_bias, double softmax_scale, double softcap, int64_t window_left,
                            int64_t window_right, double dropout_p, const OptionalTensor &dropout_seed,
                            bool deterministic, bool need_dq, bool need_dkv, bool need_dsinks, bool need_dbias);
std::tuple<std::string, Reason> which_kernel(const TorchTensor &q, const TorchTensor &k, const TorchTensor &v,
                                             bool has_dropout, std::optional<int64_t> capability, bool fast_fp64,
                                             bool has_sinks, bool has_scores, const OptionalTensor &attn_bias);
std::optional<std::string> force_kernel(const std::optional<std::string> &name);

// function(q, k, v, options, deterministic), as Python and the dispatcher call it.
template <auto function>
auto with_options(const TorchTensor &q, const TorchTensor &k, const TorchTensor &v, const OptionalTensor &cu_seqlens_q,
                  const OptionalTensor &cu_seqlens_k, const OptionalTensor &seqused_q, const OptionalTensor &seqused_k,
                  const OptionalTensor &sinks, const OptionalTensor &alibi_slopes, const OptionalTensor &attn_bias,
                  double softmax_scale, double softcap, int64_t window_left, int64_t window_right, double dropout_p,
                  const OptionalTensor &dropout_seed, bool deterministic) {
    return function(q, k, v,
                    {cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks, alibi_slopes, attn_bias, softmax_scale,
                     softcap, window_left, window_right, dropout_p, dropout_seed},
                    deterministic);
}

#define OPTIONS                                                                                                 \
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor? sinks, "         \
    "Tensor? alibi_slopes, Tensor? attn_bias, float softmax_scale, float softcap, int window_left, "            \
    "int window_right, float dropout_p=0.0, Tensor? dropout_seed=None, bool deterministic=False"

constexpr const char *kForwardSchema =
    "flash_forward(Tensor q, Tensor k, Tensor v, " OPTIONS ") -> (Tensor out, Tensor lse)";
constexpr const char *kBackwardSchema =
    "flash_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, " OPTIONS
    ", bool need_dq=True, bool need_dkv=True, bool need_dsinks=False, bool need_dbias=False)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor dbias)";

#undef OPTIONS

}  // namespace minimal_attn
