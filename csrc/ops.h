// What main.cpp, autograd.cpp and fast_path.cpp share: the two ops, and when a call may go past the dispatcher.
//
// Read next: main.cpp, the ops.
#pragma once

#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <initializer_list>
#include <optional>
#include <tuple>

#include "torch_params.h"

namespace minimal_attn {

using OptionalTensor = std::optional<at::Tensor>;
// dq, dk, dv, dsinks, dbias
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// What a call asks for beside q, k and v. The ops have these as arguments of their own, in this order.
struct Options {
    OptionalTensor cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks, alibi_slopes, attn_bias;
    double softmax_scale, softcap = 0;
    int64_t window_left, window_right;
    double dropout_p = 0;
    OptionalTensor dropout_seed = {};
};

inline bool is_like(const at::Tensor &x, at::IntArrayRef sizes, at::ScalarType dtype, const at::Device &device) {
    return x.sizes() == sizes && x.scalar_type() == dtype && x.device() == device;
}

// What is wrong with what changes the scores, see score_mods.cuh: a ValueError.
inline Reason find_mods_fault(const at::Tensor &q, Layout dim, int64_t batch_size, const Options &options) {
    const auto &[alibi_slopes, bias] = std::tie(options.alibi_slopes, options.attn_bias);
    if (!(options.softcap >= 0 && options.softcap <= kMaxScale)) return "softcap must be at least 0 and finite";
    const int64_t nheads = q.size(dim.head);
    if (alibi_slopes && !(alibi_slopes->is_contiguous() &&
                          (is_like(*alibi_slopes, {nheads}, at::kFloat, q.device()) ||
                           is_like(*alibi_slopes, {batch_size, nheads}, at::kFloat, q.device()))))
        return "alibi_slopes must be contiguous float32 with one value a head, or one a sample and head, on the device "
               "of q";
    if (!bias) return {};
    if (options.cu_seqlens_q) return "attn_bias cannot be given with cu_seqlens_q and cu_seqlens_k";
    const at::ScalarType dtype = bias->scalar_type();
    if (bias->device() != q.device() || bias->dim() != 4 ||
        (dtype != at::kBool && dtype != q.scalar_type() && dtype != lse_dtype(q)))
        return "attn_bias must be 4D on the device of q, of bool, of the dtype of q or of that of lse";
    return {};
}

// What is wrong with the lengths and sinks of a call, whose q is without a fault: a ValueError. Their values stay on
// the GPU, where kernels clamp the lengths.
inline Reason find_fault(const at::Tensor &q, Layout dim, const Options &options) {
    const auto &[cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks] =
        std::tie(options.cu_seqlens_q, options.cu_seqlens_k, options.seqused_q, options.seqused_k, options.sinks);
    if (cu_seqlens_q.has_value() != cu_seqlens_k.has_value() || (cu_seqlens_q && cu_seqlens_q->numel() < 2))
        return "cu_seqlens_q and cu_seqlens_k go together and have at least two elements";
    if (cu_seqlens_q && dim.batch == 0 && q.size(0) != 1) return "a packed batch is one sample to q, k and v";
    if (!cu_seqlens_q && dim.batch < 0) return "without cu_seqlens_q there must be a batch dimension";
    const int64_t batch_size = cu_seqlens_q ? cu_seqlens_q->numel() - 1 : q.size(dim.batch);
    auto is_wrong = [&](const OptionalTensor &x, int64_t size, at::ScalarType dtype) {
        return x && !(is_like(*x, {size}, dtype, q.device()) && x->is_contiguous());
    };
    if (is_wrong(cu_seqlens_q, batch_size + 1, at::kInt) || is_wrong(cu_seqlens_k, batch_size + 1, at::kInt))
        return "cu_seqlens_q and cu_seqlens_k must be contiguous int32 tensors of one shape on the device of q";
    if (is_wrong(seqused_q, batch_size, at::kInt) || is_wrong(seqused_k, batch_size, at::kInt))
        return "seqused_q and seqused_k must be contiguous int32 tensors with one value a sample on the device of q";
    if (is_wrong(sinks, q.size(dim.head), lse_dtype(q)))
        return "sinks must be a contiguous tensor with one value a head on the device of q, of the dtype of lse";
    return find_mods_fault(q, dim, batch_size, options);
}

// Of options without a fault.
inline void set_options(AttnParams &p, const Options &options) {
    auto pointer = [](const OptionalTensor &x) { return x ? x->const_data_ptr<int>() : nullptr; };
    p.cu_seqlens_q = pointer(options.cu_seqlens_q), p.cu_seqlens_k = pointer(options.cu_seqlens_k);
    p.seqused_q = pointer(options.seqused_q), p.seqused_k = pointer(options.seqused_k);
    if (options.sinks) p.sinks = options.sinks->const_data_ptr();
    p.softcap = options.softcap;
    if (options.alibi_slopes) {
        p.alibi_slopes = options.alibi_slopes->const_data_ptr<float>();
        p.alibi_batch_stride = options.alibi_slopes->dim() == 2 ? p.nheads : 0;
    }
    if (options.attn_bias) p.bias = bias_of(*options.attn_bias);
    if (!options.cu_seqlens_q) return;
    p.batch_size = options.cu_seqlens_q->numel() - 1;
    p.q.batch_stride = p.k.batch_stride = p.v.batch_stride = p.lse_batch_stride = 0;
}

// main.cpp describes them.
Output flash_forward(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const Options &options);
Gradients flash_backward(const at::Tensor &dout, const OptionalTensor &dlse, const at::Tensor &q, const at::Tensor &k,
                         const at::Tensor &v, const at::Tensor &out, const at::Tensor &lse, const Options &options,
                         bool deterministic, bool need_dq, bool need_dkv, bool need_dsinks, bool need_dbias);
Gradients flash_backward_op(const at::Tensor &dout, const OptionalTensor &dlse, const at::Tensor &q,
                            const at::Tensor &k, const at::Tensor &v, const at::Tensor &out, const at::Tensor &lse,
                            const OptionalTensor &cu_seqlens_q, const OptionalTensor &cu_seqlens_k,
                            const OptionalTensor &seqused_q, const OptionalTensor &seqused_k,
                            const OptionalTensor &sinks, const OptionalTensor &alibi_slopes,
                            const OptionalTensor &attn_bias, double softmax_scale, double softcap, int64_t window_left,
                            int64_t window_right, double dropout_p, const OptionalTensor &dropout_seed,
                            bool deterministic, bool need_dq, bool need_dkv, bool need_dsinks, bool need_dbias);

// autograd.cpp: flash_forward, with flash_backward as its derivative. No dispatcher, no Python in the backward pass.
Output differentiable_forward(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const Options &options,
                              bool deterministic);

// Whether an op on these tensors, some of them perhaps undefined, has nothing but a kernel to launch besides what
// autograd does: no tracing, vmap, fake tensors, dispatch modes, tangents or profiler.
inline bool needs_no_dispatcher(std::initializer_list<const at::Tensor *> tensors) {
    if (at::hasCallbacks()) return false;
    const auto tls = c10::impl::tls_local_dispatch_key_set();
    c10::DispatchKeySet keys = tls.included_;
    for (const at::Tensor *x : tensors) {
        if (!x->defined()) continue;
        keys = keys | x->key_set();
        if (x->_fw_grad(0).defined()) return false;  // a tangent, which no_grad does not switch off
    }
    keys = keys - tls.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView - c10::default_included_set -
           c10::autocast_dispatch_keyset;
    return keys.highestPriorityTypeId() == c10::DispatchKey::CUDA ||
           keys.highestPriorityTypeId() == c10::DispatchKey::CPU;
}

}  // namespace minimal_attn
