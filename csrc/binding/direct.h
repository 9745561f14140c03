// binding/ brings the ops to Python: main.cpp for the torch that is here, stable.cpp for the wheel.
// Order: direct.h, autograd.cpp, fast_path.cpp, sdpa_override.cpp, stable.cpp. This file: the way past the dispatcher.
#pragma once

#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <initializer_list>

#include "ops/ops.h"

namespace minimal_attn {

// autograd.cpp: flash_forward with flash_backward as its derivative.
Output differentiable_forward(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const Options &options);

// Whether these tensors, some perhaps undefined, meet no tracing, vmap, fake tensors, modes, tangents or profiler.
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
