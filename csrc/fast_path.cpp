// The fast path: the whole facade in one step, for calls on CUDA tensors with nothing to do but to launch a kernel. The
// checks in Python and the dispatcher would take longer than a small attention does.
//
// Read next: ../minimal_attn/__init__.py, the Python side.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <initializer_list>

#include "torch_params.h"

namespace minimal_attn {

namespace py = pybind11;

namespace {

// Whether a call on CUDA tensors has nothing but a kernel to launch: no autograd, tracing, vmap, fake tensors, modes or
// profiler; and shapes that the kernels take as they are.
bool needs_only_a_kernel(std::initializer_list<py::handle> tensors) {
    if (at::impl::torch_function_mode_enabled() || at::hasCallbacks()) return false;
    const auto tls = c10::impl::tls_local_dispatch_key_set();
    c10::DispatchKeySet keys = tls.included_;
    bool requires_grad = false;
    for (py::handle handle : tensors) {
        if (!THPVariable_CheckExact(handle.ptr())) return false;
        const at::Tensor &x = THPVariable_Unpack(handle.ptr());
        if (x.dim() != 4 || x.numel() == 0 || x.stride(3) != 1) return false;
        keys = keys | x.key_set();
        if (x._fw_grad(0).defined()) return false;  // a tangent, which no_grad does not switch off
        requires_grad |= x.requires_grad();
    }
    keys = keys - tls.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView - c10::default_included_set -
           c10::autocast_dispatch_keyset;
    return keys.highestPriorityTypeId() == c10::DispatchKey::CUDA && !(requires_grad && at::GradMode::is_enabled());
}

bool is_autocast_to_another_dtype(const at::Tensor &q) {
    return at::autocast::is_autocast_enabled(at::kCUDA) &&
           at::autocast::get_autocast_dtype(at::kCUDA) != q.scalar_type();
}

}  // namespace

// Returns out, or (out, lse). Returns None if the call is unusual or wrong: Python and the dispatcher then serve it or
// say what is wrong. Calls warn_slow with the reason why tensor cores could not serve it, if there is one.
py::object fast_forward(py::handle warn_slow, py::handle q_, py::handle k_, py::handle v_, py::handle causal,
                        py::handle softmax_scale, bool seq_major, bool return_lse) {
    if (!needs_only_a_kernel({q_, k_, v_}) || !PyBool_Check(causal.ptr())) return py::none();
    const at::Tensor &q = THPVariable_Unpack(q_.ptr()), &k = THPVariable_Unpack(k_.ptr());
    const at::Tensor &v = THPVariable_Unpack(v_.ptr());
    const double scale = softmax_scale.is_none()                   ? 1 / std::sqrt(double(q.size(3)))
                         : PyFloat_CheckExact(softmax_scale.ptr()) ? PyFloat_AS_DOUBLE(softmax_scale.ptr())
                                                                   : NAN;  // a fault
    const Layout dim = seq_major ? kBSHD : kBHSD;
    if (is_autocast_to_another_dtype(q) || find_type_fault(q, k, v) || find_fault(q, k, v, scale, dim))
        return py::none();
    AttnParams p{};
    set_inputs(p, q, k, v, scale, causal.ptr() == Py_True, dim);
    auto [out, lse, slow_because] = [&] {
        const py::gil_scoped_release released;  // a launch may wait, for memory or a place in the queue
        return run_forward(p, q, dim);
    }();
    if (slow_because) warn_slow(*slow_because);
    if (return_lse) return py::make_tuple(std::move(out), std::move(lse));
    return py::cast(std::move(out));
}

}  // namespace minimal_attn
