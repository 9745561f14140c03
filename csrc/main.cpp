// The only file with torch headers: checks what a kernel's memory safety rests on, allocates the outputs, fills
// AttnParams and calls the kernel for the tensors' device. Registers the op minimal_attn::flash_forward; importing the
// Python module is what loads it. No CUDA header, so it compiles with a CPU-only torch as well.
//
// The checks that speak to users are in minimal_attn/checks.py. Messages here are put together without iostreams, which
// crash where a toolchain links libstdc++ statically (seen with g++ 13).
#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/version.h>

#include <cmath>
#include <cstdlib>

#include "flash.h"
#include "kernels.h"

namespace {

namespace py = pybind11;
using at::Tensor;

// Which dimensions of q, k, v and out are heads and rows; 0 is the batch, 3 head_dim.
struct Layout { int head, row; };
constexpr Layout kBHSD{1, 2}, kBSHD{2, 1};

void check(const Tensor &q, const Tensor &k, const Tensor &v, const std::optional<Tensor> &seq_lens, Layout dim) {
    const auto dtype = q.scalar_type();
    TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16,
                     "Unsupported dtype: float32, float16 and bfloat16 are supported");
    TORCH_CHECK_VALUE(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k and v must be 4D");
    const int64_t head_dim = q.size(3), nheads_k = k.size(dim.head);
    TORCH_CHECK_VALUE(k.sizes() == v.sizes() && k.size(0) == q.size(0) && k.size(3) == head_dim,
                      "the shapes of q, k and v do not match");
    TORCH_CHECK_VALUE(nheads_k > 0 && q.size(dim.head) % nheads_k == 0, "nheads must be a multiple of nheads_k");
    TORCH_CHECK_VALUE(head_dim >= 1 && head_dim <= 256, "Unsupported head_dim: 1 to 256 is supported");
    TORCH_CHECK_VALUE(std::max({q.size(1), q.size(2), k.size(dim.row)}) <= INT32_MAX - 256,
                      "a dimension is over 2^31 - 257");
    for (const Tensor *x : {&q, &k, &v}) {
        TORCH_CHECK_TYPE(x->scalar_type() == dtype, "dtypes must match");
        TORCH_CHECK_VALUE(x->device() == q.device(), "q, k and v must be on the same device");
        TORCH_CHECK_VALUE(x->stride(3) == 1 || head_dim == 1, "the last dimension must be contiguous");
    }
    if (seq_lens) {
        TORCH_CHECK_VALUE(seq_lens->dim() == 1 && seq_lens->size(0) == q.size(0) && seq_lens->is_contiguous() &&
                              seq_lens->scalar_type() == at::kInt && seq_lens->device() == q.device(),
                          "seq_lens must be a contiguous int32 tensor of shape (batch_size,) on the device of q");
        TORCH_CHECK_VALUE(q.size(dim.row) == k.size(dim.row), "seq_lens needs seqlen_q == seqlen_k");
    }
}

// The struct of checked inputs, without outputs.
AttnParams params_of(const Tensor &q, const Tensor &k, const Tensor &v, Layout dim) {
    // A dimension of size 1 is never stepped along.
    auto stride = [](const Tensor &x, int i) { return x.size(i) > 1 ? x.stride(i) : 0; };
    AttnParams p{};
    p.q = q.const_data_ptr(), p.k = k.const_data_ptr(), p.v = v.const_data_ptr();
    p.q_batch_stride = stride(q, 0), p.q_head_stride = stride(q, dim.head), p.q_row_stride = stride(q, dim.row);
    p.k_batch_stride = stride(k, 0), p.k_head_stride = stride(k, dim.head), p.k_row_stride = stride(k, dim.row);
    p.v_batch_stride = stride(v, 0), p.v_head_stride = stride(v, dim.head), p.v_row_stride = stride(v, dim.row);
    p.batch_size = q.size(0), p.head_dim = int(q.size(3));
    p.nheads = int(q.size(dim.head)), p.nheads_k = int(k.size(dim.head));
    p.seqlen_q = int(q.size(dim.row)), p.seqlen_k = int(k.size(dim.row));
    p.dtype = q.scalar_type() == at::kFloat  ? DType::kFloat32
              : q.scalar_type() == at::kHalf ? DType::kFloat16
                                             : DType::kBFloat16;
    return p;
}

Choice choose(const AttnParams &p, int compute_capability) {
    const char *forced = std::getenv("MINIMAL_ATTN_KERNEL");  // for tests and benchmarks
    return choose_kernel(p, compute_capability, forced && *forced ? forced : nullptr);
}

// out like q, lse float32 [batch_size, nheads, seqlen_q], of checked inputs.
std::tuple<Tensor, Tensor> run(const Tensor &q, const Tensor &k, const Tensor &v, const std::optional<Tensor> &seq_lens,
                               double softmax_scale, bool causal, Layout dim) {
    const c10::DeviceGuard guard(q.device());
    Tensor out = at::empty_like(q);
    if (out.stride(3) != 1) out = at::empty(q.sizes(), q.options());  // q overlaps itself, as sliding windows do
    AttnParams p = params_of(q, k, v, dim);
    Tensor lse = at::empty({p.batch_size, p.nheads, p.seqlen_q}, q.options().dtype(at::kFloat));
    p.o = out.data_ptr(), p.lse = lse.data_ptr<float>();
    p.seq_lens = seq_lens ? seq_lens->const_data_ptr<int>() : nullptr;
    p.o_batch_stride = out.stride(0), p.o_head_stride = out.stride(dim.head), p.o_row_stride = out.stride(dim.row);
    p.softmax_scale = float(softmax_scale), p.is_causal = causal;
    if (q.is_cpu()) {
        host::flash_forward(p);
        return {out, lse};
    }
#if MINIMAL_ATTN_CUDA
    if (q.is_cuda()) {
        const c10::impl::VirtualGuardImpl device(c10::DeviceType::CUDA);
        p.stream = device.getStream(q.device()).native_handle();
        if (choose(p, compute_capability()).kernel == Kernel::kSm80) sm80::flash_forward(p);
        else simt::flash_forward(p);
        return {out, lse};
    }
#endif
    TORCH_CHECK(false, "minimal_attn: this build has no kernel for the device of q, k and v");
}

// The op. q [batch_size, nheads, seqlen_q, head_dim], k and v [batch_size, nheads_k, seqlen_k, head_dim], head_dim
// contiguous, seq_lens int32 [batch_size].
std::tuple<Tensor, Tensor> flash_forward(const Tensor &q, const Tensor &k, const Tensor &v,
                                         const std::optional<Tensor> &seq_lens, double softmax_scale, bool causal) {
    check(q, k, v, seq_lens, kBHSD);
    return run(q, k, v, seq_lens, softmax_scale, causal, kBHSD);
}

// Whether a call has nothing but this kernel to do: no autograd, tracing, vmap, fake tensors, modes or profiler.
bool is_plain(std::initializer_list<py::handle> tensors) {
    if (at::impl::torch_function_mode_enabled() || at::hasCallbacks()) return false;
    const auto tls = c10::impl::tls_local_dispatch_key_set();
    c10::DispatchKeySet keys = tls.included_;
    bool requires_grad = false;
    for (py::handle x : tensors) {
        if (!THPVariable_CheckExact(x.ptr())) return false;
        const Tensor &tensor = THPVariable_Unpack(x.ptr());
        keys = keys | tensor.key_set();
        requires_grad |= tensor.requires_grad() || tensor._fw_grad(0).defined();
    }
    keys = keys - tls.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView - c10::default_included_set -
           c10::autocast_dispatch_keyset;
    return keys.highestPriorityTypeId() == c10::DispatchKey::CUDA && !(requires_grad && at::GradMode::is_enabled());
}

// The whole facade in one step where the call is plain, which halves its host time: None means that it is not, or that
// something about the arguments is wrong or slow, and the way through Python and the dispatcher tells what.
py::object plain_forward(py::handle q_, py::handle k_, py::handle v_, py::handle causal, py::handle softmax_scale,
                         bool seq_major, bool return_lse) {
    if (!is_plain({q_, k_, v_}) || !PyBool_Check(causal.ptr())) return py::none();
    const Tensor &q = THPVariable_Unpack(q_.ptr()), &k = THPVariable_Unpack(k_.ptr()), &v = THPVariable_Unpack(v_.ptr());
    if (q.numel() == 0 || k.numel() == 0) return py::none();
    double scale = 1 / std::sqrt(double(q.size(-1)));
    if (!softmax_scale.is_none()) {
        if (!PyFloat_CheckExact(softmax_scale.ptr())) return py::none();
        scale = PyFloat_AS_DOUBLE(softmax_scale.ptr());
        if (!std::isfinite(scale)) return py::none();
    }
    const Layout dim = seq_major ? kBSHD : kBHSD;
    try {
        check(q, k, v, std::nullopt, dim);
#if MINIMAL_ATTN_CUDA
        const c10::DeviceGuard guard(q.device());
        if (choose(params_of(q, k, v, dim), compute_capability()).slow_because) return py::none();
#endif
    } catch (const std::exception &) {
        return py::none();
    }
    auto [out, lse] = run(q, k, v, std::nullopt, scale, causal.ptr() == Py_True, dim);
    if (return_lse) return py::make_tuple(std::move(out), std::move(lse));
    return py::cast(std::move(out));
}

// (name of the kernel that would serve a call, why it is not the fast one or None), of valid inputs.
std::pair<std::string, std::optional<std::string>> which_kernel(const Tensor &q, const Tensor &k, const Tensor &v,
                                                                int compute_capability) {
    check(q, k, v, std::nullopt, kBHSD);
    const Choice choice = choose(params_of(q, k, v, kBHSD), compute_capability);
    std::optional<std::string> because;
    if (choice.slow_because) because = choice.slow_because;
    return {kKernelNames[int(choice.kernel)], because};
}

}  // namespace

TORCH_LIBRARY(minimal_attn, m) {
    m.def("flash_forward(Tensor q, Tensor k, Tensor v, Tensor? seq_lens, float softmax_scale, bool causal) "
          "-> (Tensor out, Tensor lse)");
}
TORCH_LIBRARY_IMPL(minimal_attn, CPU, m) { m.impl("flash_forward", &flash_forward); }
TORCH_LIBRARY_IMPL(minimal_attn, CUDA, m) { m.impl("flash_forward", &flash_forward); }
// No derivative yet: a backward pass, or a forward-mode one, raises rather than taking it for 0.
TORCH_LIBRARY_IMPL(minimal_attn, Autograd, m) {
    m.impl("flash_forward", torch::autograd::autogradNotImplementedFallback());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.attr("torch_version") = TORCH_VERSION;
    m.attr("has_cuda") = bool(MINIMAL_ATTN_CUDA);
    m.attr("csrc_digest") = C10_STRINGIZE(MINIMAL_ATTN_DIGEST);
    m.def("plain_forward", &plain_forward);
    m.def("which_kernel", &which_kernel);
}
