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

#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstdlib>

#include "flash.h"
#include "kernels.h"

// Of the current device, in flash_sm80.cu and flash_dmma.cu.
int compute_capability();
bool has_fast_fp64();

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

// The struct of checked inputs; outputs and stream are still to come.
AttnParams params_of(const Tensor &q, const Tensor &k, const Tensor &v, const std::optional<Tensor> &seq_lens,
                     double softmax_scale, bool causal, Layout dim) {
    // Along a dimension of size 1 nobody steps. (Strides of batch and heads count all the same: see kernels.h.)
    auto row_stride = [&](const Tensor &x) { return x.size(dim.row) > 1 ? x.stride(dim.row) : 0; };
    AttnParams p{};
    p.q = q.const_data_ptr(), p.k = k.const_data_ptr(), p.v = v.const_data_ptr();
    p.seq_lens = seq_lens ? seq_lens->const_data_ptr<int>() : nullptr;
    p.q_batch_stride = q.stride(0), p.q_head_stride = q.stride(dim.head), p.q_row_stride = row_stride(q);
    p.k_batch_stride = k.stride(0), p.k_head_stride = k.stride(dim.head), p.k_row_stride = row_stride(k);
    p.v_batch_stride = v.stride(0), p.v_head_stride = v.stride(dim.head), p.v_row_stride = row_stride(v);
    p.batch_size = q.size(0), p.head_dim = int(q.size(3));
    p.nheads = int(q.size(dim.head)), p.nheads_k = int(k.size(dim.head));
    p.seqlen_q = int(q.size(dim.row)), p.seqlen_k = int(k.size(dim.row));
    p.softmax_scale = float(softmax_scale), p.is_causal = causal;
    p.dtype = q.scalar_type() == at::kFloat  ? DType::kFloat32
              : q.scalar_type() == at::kHalf ? DType::kFloat16
                                             : DType::kBFloat16;
    return p;
}

// MINIMAL_ATTN_KERNEL, for tests and benchmarks. It is read only where the GIL keeps Python from writing the
// environment meanwhile, which the op does not hold: there the last reading counts.
std::atomic<int> forced_kernel = -1;
void read_environment() {
    const std::optional<Kernel> kernel = kernel_of(std::getenv("MINIMAL_ATTN_KERNEL"));
    forced_kernel = kernel ? int(*kernel) : -1;
}

Choice choose(const AttnParams &p, Gpu gpu) {
    const int forced = forced_kernel;
    return choose_kernel(p, gpu, forced < 0 ? std::nullopt : std::optional(Kernel(forced)));
}

// The kernel for tensors of a device, which is the current one.
Choice choose(const AttnParams &p, const at::Device &device) {
    if (device.is_cpu()) return {Kernel::kHost, nullptr};
#if MINIMAL_ATTN_CUDA
    if (device.is_cuda()) return choose(p, Gpu{compute_capability(), has_fast_fp64()});
#endif
    TORCH_CHECK(false, "minimal_attn: this build has no kernel for the device of q, k and v");
}

// out like q, lse float32 [batch_size, nheads, seqlen_q], on the current device and its stream.
std::tuple<Tensor, Tensor> run(AttnParams p, const Tensor &q, Kernel kernel, Layout dim) {
    Tensor out = at::empty_like(q);
    if (out.stride(3) != 1) out = at::empty(q.sizes(), q.options());  // q overlaps itself, as sliding windows do
    Tensor lse = at::empty({p.batch_size, p.nheads, p.seqlen_q}, q.options().dtype(at::kFloat));
    p.o = out.data_ptr(), p.lse = lse.data_ptr<float>();
    p.o_batch_stride = out.stride(0), p.o_head_stride = out.stride(dim.head), p.o_row_stride = out.stride(dim.row);
    if (kernel == Kernel::kHost) host::flash_forward(p);
#if MINIMAL_ATTN_CUDA
    else {
        p.stream = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(q.device()).native_handle();
        auto *forward = kernel == Kernel::kSm80   ? sm80::flash_forward
                        : kernel == Kernel::kDmma ? dmma::flash_forward
                                                  : simt::flash_forward;
        forward(p);
    }
#endif
    return {out, lse};
}

// The op. q [batch_size, nheads, seqlen_q, head_dim], k and v [batch_size, nheads_k, seqlen_k, head_dim], head_dim
// contiguous, seq_lens int32 [batch_size].
std::tuple<Tensor, Tensor> flash_forward(const Tensor &q, const Tensor &k, const Tensor &v,
                                         const std::optional<Tensor> &seq_lens, double softmax_scale, bool causal) {
    check(q, k, v, seq_lens, kBHSD);
    const c10::DeviceGuard guard(q.device());
    const AttnParams p = params_of(q, k, v, seq_lens, softmax_scale, causal, kBHSD);
    return run(p, q, choose(p, q.device()).kernel, kBHSD);
}

// Whether a call on CUDA tensors has nothing but a kernel to launch: no autograd, tracing, vmap, fake tensors, modes or
// profiler; and shapes that the kernels take as they are.
bool is_plain(std::initializer_list<py::handle> tensors) {
    if (at::impl::torch_function_mode_enabled() || at::hasCallbacks()) return false;
    const auto tls = c10::impl::tls_local_dispatch_key_set();
    c10::DispatchKeySet keys = tls.included_;
    bool requires_grad = false;
    for (py::handle handle : tensors) {
        if (!THPVariable_CheckExact(handle.ptr())) return false;
        const Tensor &x = THPVariable_Unpack(handle.ptr());
        if (x.dim() != 4 || x.numel() == 0 || x.stride(3) != 1) return false;
        keys = keys | x.key_set();
        if (x._fw_grad(0).defined()) return false;  // a tangent, which no_grad does not switch off
        requires_grad |= x.requires_grad();
    }
    keys = keys - tls.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView - c10::default_included_set -
           c10::autocast_dispatch_keyset;
    return keys.highestPriorityTypeId() == c10::DispatchKey::CUDA && !(requires_grad && at::GradMode::is_enabled());
}

// The whole facade in one step where the call is plain: None means that it is not, or that something about it is wrong
// or slow, and the way through Python and the dispatcher tells what.
py::object plain_forward(py::handle q_, py::handle k_, py::handle v_, py::handle causal, py::handle softmax_scale,
                         bool seq_major, bool return_lse) {
    if (!is_plain({q_, k_, v_}) || !PyBool_Check(causal.ptr())) return py::none();
    const Tensor &q = THPVariable_Unpack(q_.ptr()), &k = THPVariable_Unpack(k_.ptr());
    const Tensor &v = THPVariable_Unpack(v_.ptr());
    double scale = 1 / std::sqrt(double(q.size(3)));
    if (!softmax_scale.is_none()) {
        if (!PyFloat_CheckExact(softmax_scale.ptr())) return py::none();
        scale = PyFloat_AS_DOUBLE(softmax_scale.ptr());
        if (!(std::abs(scale) <= FLT_MAX)) return py::none();
    }
    const Layout dim = seq_major ? kBSHD : kBHSD;
    std::tuple<Tensor, Tensor> result;
    try {
        check(q, k, v, std::nullopt, dim);
    } catch (const c10::Error &) {
        return py::none();
    }
    read_environment();
    const AttnParams p = params_of(q, k, v, std::nullopt, scale, causal.ptr() == Py_True, dim);
    {
        const py::gil_scoped_release released;  // a launch may wait, for memory or a place in the queue
        const c10::DeviceGuard guard(q.device());
        const Choice choice = choose(p, q.device());
        if (!choice.slow_because) result = run(p, q, choice.kernel, dim);
    }
    auto &[out, lse] = result;
    if (!out.defined()) return py::none();
    if (return_lse) return py::make_tuple(std::move(out), std::move(lse));
    return py::cast(std::move(out));
}

// (name of the kernel that serves valid tensors, why it is not the fast one or None); None for tensors without memory
// of their own, as vmap has them. capability and fast_fp64: of a GPU that need not be here, as in kernels.h; without
// a capability, of the tensors' device.
std::optional<std::pair<std::string, std::optional<std::string>>> which_kernel(
    const Tensor &q, const Tensor &k, const Tensor &v, std::optional<int> capability, bool fast_fp64) {
    if (!q.has_storage() || !k.has_storage() || !v.has_storage()) return std::nullopt;
    check(q, k, v, std::nullopt, kBHSD);
    read_environment();
    const c10::DeviceGuard guard(q.device());
    const AttnParams p = params_of(q, k, v, std::nullopt, 1, false, kBHSD);
    const Choice choice = capability ? choose(p, Gpu{*capability, fast_fp64}) : choose(p, q.device());
    std::optional<std::string> because;
    if (choice.slow_because) because = choice.slow_because;
    return std::pair(std::string(kKernelNames[int(choice.kernel)]), because);
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
#ifdef MINIMAL_ATTN_DIGEST
    m.attr("csrc_digest") = C10_STRINGIZE(MINIMAL_ATTN_DIGEST);  // of what is built at installation; see _build.py
#endif
    m.def("plain_forward", &plain_forward);
    m.def("read_environment", &read_environment);
    m.def("which_kernel", &which_kernel, py::arg("q"), py::arg("k"), py::arg("v"),
          py::arg("capability") = py::none(), py::arg("fast_fp64") = true);
}
