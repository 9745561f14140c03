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
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;  // dq, dk, dv, dsinks

// What a call asks for beside q, k and v. The ops have these as arguments of their own, in this order.
struct Options {
    OptionalTensor cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks;
    double softmax_scale;
    int64_t window_left, window_right;
    double dropout_p = 0;
    OptionalTensor dropout_seed = {};
};

// main.cpp describes them.
Output flash_forward(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const Options &options);
Gradients flash_backward(const at::Tensor &dout, const OptionalTensor &dlse, const at::Tensor &q, const at::Tensor &k,
                         const at::Tensor &v, const at::Tensor &out, const at::Tensor &lse, const Options &options,
                         bool deterministic, bool need_dq, bool need_dkv, bool need_dsinks);
Gradients flash_backward_op(const at::Tensor &dout, const OptionalTensor &dlse, const at::Tensor &q,
                            const at::Tensor &k, const at::Tensor &v, const at::Tensor &out, const at::Tensor &lse,
                            const OptionalTensor &cu_seqlens_q, const OptionalTensor &cu_seqlens_k,
                            const OptionalTensor &seqused_q, const OptionalTensor &seqused_k,
                            const OptionalTensor &sinks, double softmax_scale, int64_t window_left,
                            int64_t window_right, double dropout_p, const OptionalTensor &dropout_seed,
                            bool deterministic, bool need_dq, bool need_dkv, bool need_dsinks);

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
