// The fast path: the whole facade in one step, for calls on CUDA tensors with nothing to do but to launch a kernel. The
// checks in Python and the dispatcher would take longer than a small attention does.
//
// Read next: ../minimal_attn/__init__.py, the Python side.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "ops.h"

namespace minimal_attn {

namespace py = pybind11;

namespace {

// Whether q, k and v are plain CUDA tensors, which nothing watches, of shapes that the kernels take as they are.
bool are_plain(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v) {
    for (const at::Tensor *x : {&q, &k, &v})
        if (!x->is_cuda() || x->is_nested() || x->dim() != 4 || x->numel() == 0 || x->stride(3) != 1) return false;
    return !at::impl::torch_function_mode_enabled() && needs_no_dispatcher({&q, &k, &v});
}

bool is_autocast_to_another_dtype(const at::Tensor &q) {
    return at::autocast::is_autocast_enabled(at::kCUDA) &&
           at::autocast::get_autocast_dtype(at::kCUDA) != q.scalar_type();
}

}  // namespace

// Returns out, or (out, lse). Returns None if the call is unusual or wrong: Python and the dispatcher then serve it or
// say what is wrong. Calls warn_slow with the reason why tensor cores could not serve it, if there is one. If gradients
// are wanted and may_train is not None, may_train(q, k, seq_major) says whether csrc is to make them.
py::object fast_forward(py::handle warn_slow, py::handle may_train, py::handle q_, py::handle k_, py::handle v_,
                        py::handle causal, py::handle softmax_scale, bool seq_major, bool return_lse,
                        bool deterministic) {
    for (py::handle x : {q_, k_, v_})
        if (!THPVariable_CheckExact(x.ptr())) return py::none();
    const at::Tensor &q = THPVariable_Unpack(q_.ptr()), &k = THPVariable_Unpack(k_.ptr());
    const at::Tensor &v = THPVariable_Unpack(v_.ptr());
    if (!are_plain(q, k, v) || !PyBool_Check(causal.ptr())) return py::none();
    const double scale = softmax_scale.is_none()                   ? 1 / std::sqrt(double(q.size(3)))
                         : PyFloat_CheckExact(softmax_scale.ptr()) ? PyFloat_AS_DOUBLE(softmax_scale.ptr())
                                                                   : NAN;  // a fault
    const Layout dim = seq_major ? kBSHD : kBHSD;
    if (is_autocast_to_another_dtype(q) || find_type_fault(q, k, v) || find_fault(q, k, v, scale, dim))
        return py::none();
    const Window window = causal.ptr() == Py_True ? kCausal : kAllKeys;
    const bool needs_grad =
        at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad());
    if (needs_grad && !may_train.is_none() && !may_train(q_, k_, seq_major).cast<bool>()) return py::none();
    auto [out, lse, slow_because] = [&]() -> Output {
        const py::gil_scoped_release released;  // a launch may wait, for memory or a place in the queue
        if (needs_grad) {
            auto heads_first = [&](const at::Tensor &x) { return seq_major ? x.transpose(1, 2) : x; };
            auto [out, lse, reason] = differentiable_forward(
                heads_first(q), heads_first(k), heads_first(v),
                {.softmax_scale = scale, .window_left = window.left, .window_right = window.right}, deterministic);
            return {heads_first(out), lse, reason};
        }
        AttnParams p{};
        set_inputs(p, q, k, v, scale, window, dim);
        return run_forward(p, q, v, dim);
    }();
    if (slow_because) warn_slow(*slow_because);
    if (return_lse) return py::make_tuple(std::move(out), std::move(lse));
    return py::cast(std::move(out));
}

}  // namespace minimal_attn
