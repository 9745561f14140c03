// The facade in one step, for plain CUDA calls: Python's checks and the dispatcher take longer than a small kernel.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "binding/direct.h"

namespace minimal_attn {

namespace py = pybind11;

namespace {

bool are_plain(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v) {
    for (const at::Tensor *x : {&q, &k, &v})
        if (!x->is_cuda() || x->is_nested() || x->dim() < 3 || x->numel() == 0 || x->stride(-1) != 1) return false;
    return !at::impl::torch_function_mode_enabled() && needs_no_dispatcher({&q, &k, &v});
}

// (left, right) with -1 for no bound, or nothing for unusual arguments.
std::optional<std::pair<int64_t, int64_t>> window_of(py::handle window_size, py::handle causal) {
    PyObject *window = window_size.ptr();
    if (!PyBool_Check(causal.ptr()) || !(PyTuple_CheckExact(window) || PyList_CheckExact(window))) return {};
    if (PySequence_Fast_GET_SIZE(window) != 2) return {};
    int64_t sides[2];
    for (int i = 0; i < 2; i++) {
        PyObject *side = PySequence_Fast_GET_ITEM(window, i);
        int overflow = 0;
        if (side != Py_None && !PyLong_CheckExact(side)) return {};
        sides[i] = side == Py_None ? -1 : PyLong_AsLongLongAndOverflow(side, &overflow);
        if (overflow || sides[i] < -1) return {};
    }
    return std::pair(sides[0], causal.ptr() == Py_True ? 0 : sides[1]);
}

// take() reads an option that Python gave. False: it is unusual.
bool take(OptionalTensor &to, py::handle x) {  // None, or a plain tensor without a gradient
    if (x.is_none()) return true;
    if (!THPVariable_CheckExact(x.ptr())) return false;
    to = THPVariable_Unpack(x.ptr());
    return needs_no_dispatcher({&*to}) && !(at::GradMode::is_enabled() && to->requires_grad());
}
bool take(bool &to, py::handle x) {
    to = x.ptr() == Py_True;
    return PyBool_Check(x.ptr());
}
bool take(int64_t &to, py::handle x) {
    int overflow = 0;
    if (!PyLong_CheckExact(x.ptr())) return false;
    to = PyLong_AsLongLongAndOverflow(x.ptr(), &overflow);
    return !overflow;
}
bool take(double &to, py::handle x) {
    int64_t integer = 0;
    const bool is_integer = take(integer, x), is_float = PyFloat_CheckExact(x.ptr());
    to = is_float ? PyFloat_AS_DOUBLE(x.ptr()) : double(integer);
    return is_integer || is_float;
}

// Returns out, (out, lse), or None for Python to serve or refuse the call. given: an Options of options.py, as
// attention.attend takes it. seq_major: rows come before heads; a packed batch is 3D.
py::object fast_forward(py::handle q_, py::handle k_, py::handle v_, py::tuple given, py::handle causal,
                        py::handle window_size, bool seq_major) {
    for (py::handle x : {q_, k_, v_})
        if (!THPVariable_CheckExact(x.ptr())) return py::none();
    const at::Tensor &q = THPVariable_Unpack(q_.ptr()), &k = THPVariable_Unpack(k_.ptr());
    const at::Tensor &v = THPVariable_Unpack(v_.ptr());
    const auto window = window_of(window_size, causal);
    if (!are_plain(q, k, v) || !window) return py::none();
    Options options{.softmax_scale = 1 / std::sqrt(double(q.size(-1)))};
    size_t field = 0;
    bool is_everyday = true;
    for_each_option(options, [&](auto &option) {
        const py::object x = given[field++];
        const bool is_default_scale = x.is_none() && static_cast<void *>(&option) == &options.softmax_scale;
        is_everyday = is_everyday && (is_default_scale || take(option, x));
    });
    field++;  // autotune; then come the descales, and return_lse
    for (; field + 1 < given.size(); field++) is_everyday = is_everyday && given[field].is_none();
    const bool return_lse = py::bool_(py::object(given[field]));
    if (!is_everyday) return py::none();
    options.window_left = window->first, options.window_right = window->second;
    const bool has_no_batch = seq_major && q.dim() == 3;
    const Layout dim = has_no_batch ? kTHD : seq_major ? kBSHD : kBHSD;
    const bool is_packed = options.cu_seqlens_q.has_value();
    if (seq_major && has_no_batch != is_packed) return py::none();
    if (at::autocast::is_autocast_enabled(at::kCUDA) && at::autocast::get_autocast_dtype(at::kCUDA) != q.scalar_type())
        return py::none();
    if (options.sinks && at::isReducedFloatingType(options.sinks->scalar_type()))
        options.sinks = options.sinks->to(lse_dtype(q)).contiguous();
    AttnParams p{};
    if (find_type_fault(q, k, v) || set_params(p, q, k, v, options, dim) || num_mods(p) > 0) return py::none();
    const bool is_aligned = p.head_dim % 8 == 0 && p.head_dim_v % 8 == 0 && !why_not_16_bytes("q", p.q, 8) &&
                            !why_not_16_bytes("k", p.k, 8) && !why_not_16_bytes("v", p.v, 8);
    if (p.dtype != DType::kFloat32 && !is_aligned) return py::none();  // backends/cuda.py may copy these
    const bool needs_grad =
        at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad());
    if (needs_grad && is_packed && options.seqused_k) return py::none();  // packed.py gives samples keys of their own
    auto [out, lse, none, _] = [&]() -> Output {
        const py::gil_scoped_release released;  // a launch may wait
        if (needs_grad) {
            auto heads_first = [&](const at::Tensor &x) {
                return has_no_batch ? x.transpose(0, 1).unsqueeze(0) : seq_major ? x.transpose(1, 2) : x;
            };
            auto [out, lse, none, reason] =
                differentiable_forward(heads_first(q), heads_first(k), heads_first(v), options);
            if (has_no_batch) return {out.squeeze(0).transpose(0, 1), lse.squeeze(0), none, reason};
            return {seq_major ? out.transpose(1, 2) : out, lse, none, reason};
        }
        return run_forward(p, q, v, dim, return_lse);
    }();
    if (return_lse) return py::make_tuple(std::move(out), std::move(lse));
    return py::cast(std::move(out));
}

}  // namespace

void define_fast_path(py::module_ &m) { m.def("fast_forward", &fast_forward); }

}  // namespace minimal_attn
