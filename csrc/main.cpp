// The only file with torch headers: checks what a kernel's memory safety rests on, allocates the outputs, fills
// AttnParams and calls the kernel for the tensors' device. Registers the ops minimal_attn::flash_forward and
// flash_backward; importing the Python module is what loads them, and ops.py ties them together. No CUDA header, so it
// compiles with a CPU-only torch as well.
//
// The checks that speak to users are in minimal_attn/checks.py. Messages here are put together without iostreams, which
// crash where a toolchain links libstdc++ statically (seen with g++ 13).
#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
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

bool has_fast_fp64();  // flash_dmma.cu: whether the current device is one

namespace {

namespace py = pybind11;
using at::Tensor;

// Which dimensions of q, k, v and out are heads and rows; 0 is the batch, 3 head_dim.
struct Layout { int head, row; };
constexpr Layout kBHSD{1, 2}, kBSHD{2, 1};

void check(const Tensor &q, const Tensor &k, const Tensor &v, const std::optional<Tensor> &seq_lens, Layout dim) {
    const auto dtype = q.scalar_type();
    TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 ||
                         (dtype == at::kDouble && q.device().is_cpu()),
                     "Unsupported dtype: float32, float16, bfloat16 and, on the CPU, float64 are supported");
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

// Puts the strides of x, which count elements, where the struct has them. Along a dimension of size 1 nobody steps.
// (Strides of batch and heads count all the same: see kernels.h.)
void set_strides(const Tensor &x, Layout dim, int64_t &batch, int64_t &head, int64_t &row) {
    batch = x.stride(0), head = x.stride(dim.head), row = x.size(dim.row) > 1 ? x.stride(dim.row) : 0;
}

// The struct of checked inputs, in P, AttnParams or AttnBackwardParams; outputs and stream are still to come.
template <typename P>
P params_of(const Tensor &q, const Tensor &k, const Tensor &v, const std::optional<Tensor> &seq_lens,
            double softmax_scale, bool causal, Layout dim) {
    P p{};
    p.q = q.const_data_ptr(), p.k = k.const_data_ptr(), p.v = v.const_data_ptr();
    p.seq_lens = seq_lens ? seq_lens->const_data_ptr<int>() : nullptr;
    set_strides(q, dim, p.q_batch_stride, p.q_head_stride, p.q_row_stride);
    set_strides(k, dim, p.k_batch_stride, p.k_head_stride, p.k_row_stride);
    set_strides(v, dim, p.v_batch_stride, p.v_head_stride, p.v_row_stride);
    p.batch_size = q.size(0), p.head_dim = int(q.size(3));
    p.nheads = int(q.size(dim.head)), p.nheads_k = int(k.size(dim.head));
    p.seqlen_q = int(q.size(dim.row)), p.seqlen_k = int(k.size(dim.row));
    // Rounded here, so that no kernel takes what fp32 has as 0 for more or less than that.
    p.softmax_scale = q.scalar_type() == at::kDouble ? softmax_scale : float(softmax_scale), p.is_causal = causal;
    p.dtype = q.scalar_type() == at::kFloat    ? DType::kFloat32
              : q.scalar_type() == at::kHalf   ? DType::kFloat16
              : q.scalar_type() == at::kDouble ? DType::kFloat64
                                               : DType::kBFloat16;
    return p;
}

// The seed and what follows from dropout_p, as in dropout.py.
void set_dropout(AttnParams &p, const Tensor &q, double dropout_p, const std::optional<Tensor> &seed) {
    TORCH_CHECK_VALUE(dropout_p >= 0 && dropout_p <= 1, "dropout_p must be in [0, 1]");
    if (dropout_p == 0) return;
    TORCH_CHECK_VALUE(seed && seed->numel() == 1 && seed->scalar_type() == at::kLong && seed->device() == q.device(),
                      "dropout_seed must be one int64 in a tensor on the device of q");
    p.dropout_seed = seed->const_data_ptr<int64_t>();
    p.drop_threshold = uint32_t(std::min(std::nearbyint(dropout_p * 0x1p32), 0x1p32 - 1));
    p.keep_scale = dropout_p == 1 ? 0 : 1 / (1 - dropout_p);
}

// MINIMAL_ATTN_KERNEL, for tests and benchmarks. It is read only where the GIL keeps Python from writing the
// environment meanwhile, which the op does not hold: there the last reading counts.
std::atomic<int> forced_kernel = -1;
void read_environment() {
    const std::optional<Kernel> kernel = kernel_of(std::getenv("MINIMAL_ATTN_KERNEL"));
    forced_kernel = kernel ? int(*kernel) : -1;
}

// P is AttnParams, or AttnBackwardParams for the backward pass.
template <typename P> Choice choose(const P &p, Gpu gpu) {
    const int forced = forced_kernel;
    return choose_kernel(p, gpu, forced < 0 ? std::nullopt : std::optional(Kernel(forced)));
}

// The kernel for tensors of a device, which is the current one.
template <typename P> Choice choose(const P &p, const at::Device &device) {
    if (device.is_cpu()) return {Kernel::kHost, nullptr};
#if MINIMAL_ATTN_CUDA
    if (device.is_cuda()) return choose(p, Gpu{compute_capability(), has_fast_fp64()});
#endif
    TORCH_CHECK(false, "minimal_attn: this build has no kernel for the device of q, k and v");
}

// What is to be written of x's gradient or of the output like x: x's order of dimensions, the last one contiguous.
Tensor new_like(const Tensor &x) {
    Tensor like = at::empty_like(x);
    return like.stride(3) == 1 ? like : at::empty(x.sizes(), x.options());  // x overlaps itself, as sliding windows do
}

#if MINIMAL_ATTN_CUDA
void *current_stream(const Tensor &q) {
    return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(q.device()).native_handle();
}
#endif

// out like q, lse [batch_size, nheads, seqlen_q] in float32, float64 for float64, on the current device and its stream.
std::tuple<Tensor, Tensor> run(AttnParams p, const Tensor &q, Kernel kernel, Layout dim) {
    Tensor out = new_like(q);
    const auto lse_dtype = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    Tensor lse = at::empty({p.batch_size, p.nheads, p.seqlen_q}, q.options().dtype(lse_dtype));
    p.o = out.data_ptr(), p.lse = lse.data_ptr();
    set_strides(out, dim, p.o_batch_stride, p.o_head_stride, p.o_row_stride);
    if (kernel == Kernel::kHost) host::flash_forward(p);
#if MINIMAL_ATTN_CUDA
    else {
        p.stream = current_stream(q);
        Tensor tile_counter;
        if (kernel == Kernel::kSm90 && (p.is_causal || p.seq_lens)) {
            tile_counter = at::empty({1}, q.options().dtype(at::kInt));
            p.tile_counter = tile_counter.data_ptr<int>();
        }
        auto *forward = kernel == Kernel::kSm80   ? sm80::flash_forward
                        : kernel == Kernel::kSm90 ? sm90::flash_forward
                        : kernel == Kernel::kDmma ? dmma::flash_forward
                                                  : simt::flash_forward;
        forward(p);
    }
#endif
    return {out, lse};
}

// The op. q [batch_size, nheads, seqlen_q, head_dim], k and v [batch_size, nheads_k, seqlen_k, head_dim], head_dim
// contiguous, seq_lens int32 [batch_size], dropout_seed one int64. `deterministic` is for the backward pass.
std::tuple<Tensor, Tensor> flash_forward(const Tensor &q, const Tensor &k, const Tensor &v,
                                         const std::optional<Tensor> &seq_lens, double softmax_scale, bool causal,
                                         double dropout_p, const std::optional<Tensor> &dropout_seed, bool) {
    check(q, k, v, seq_lens, kBHSD);
    const c10::DeviceGuard guard(q.device());
    AttnParams p = params_of<AttnParams>(q, k, v, seq_lens, softmax_scale, causal, kBHSD);
    set_dropout(p, q, dropout_p, dropout_seed);
    return run(p, q, choose(p, q.device()).kernel, kBHSD);
}

// The op: dq, dk and dv of what flash_forward made of its inputs, without elements where they are not needed. dout as
// out, dlse as lse or none, both of any strides.
std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor &dout_, const std::optional<Tensor> &dlse,
                                                  const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &out,
                                                  const Tensor &lse, const std::optional<Tensor> &seq_lens,
                                                  double softmax_scale, bool causal, double dropout_p,
                                                  const std::optional<Tensor> &dropout_seed, bool deterministic,
                                                  bool need_dq, bool need_dkv) {
    check(q, k, v, seq_lens, kBHSD);
    const at::IntArrayRef lse_sizes = q.sizes().slice(0, 3);
    const auto lse_dtype = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    for (const Tensor *x : {&dout_, &out})
        TORCH_CHECK_VALUE(x->sizes() == q.sizes() && x->scalar_type() == q.scalar_type() && x->device() == q.device(),
                          "dout and out must be like q");
    TORCH_CHECK_VALUE(out.stride(3) == 1 || q.size(3) == 1, "out must have a contiguous last dimension");
    for (const Tensor *x : {&lse, dlse ? &*dlse : &lse})
        TORCH_CHECK_VALUE(x->sizes() == lse_sizes && x->scalar_type() == lse_dtype && x->device() == q.device(),
                          "lse and dlse must be (batch_size, nheads, seqlen_q), float32, or float64 for float64");
    TORCH_CHECK_VALUE(lse.is_contiguous(), "lse must be contiguous");

    const c10::DeviceGuard guard(q.device());
    auto p = params_of<AttnBackwardParams>(q, k, v, seq_lens, softmax_scale, causal, kBHSD);
    set_dropout(p, q, dropout_p, dropout_seed);
    Tensor dout = dout_;
    auto set_dout = [&] {
        p.dout = dout.const_data_ptr();
        set_strides(dout, kBHSD, p.dout_batch_stride, p.dout_head_stride, p.dout_row_stride);
    };
    set_dout();
    // The gradient of a sum has strides of 0, others do not lie where tensor cores' loads can begin: a copy is less
    // than what a kernel without them would cost.
    const Kernel kernel = choose(p, q.device()).kernel;
    if (dout.stride(3) != 1 || (kernel == Kernel::kSm80 && !is_dout_aligned(p))) {
        dout = dout.clone(at::MemoryFormat::Contiguous);
        set_dout();
    }
    auto gradient = [](const Tensor &x, bool is_needed) {
        return is_needed ? new_like(x) : at::empty({0}, x.options());
    };
    Tensor dq = gradient(q, need_dq), dk = gradient(k, need_dkv), dv = gradient(v, need_dkv);
    if (q.numel() == 0 || k.numel() == 0) return {dq.zero_(), dk.zero_(), dv.zero_()};
    Tensor delta = at::empty_like(lse), workspace;
    p.o = out.data_ptr(), p.lse = lse.data_ptr(), p.delta = delta.data_ptr();
    set_strides(out, kBHSD, p.o_batch_stride, p.o_head_stride, p.o_row_stride);
    if (need_dq) {
        p.dq = dq.data_ptr();
        set_strides(dq, kBHSD, p.dq_batch_stride, p.dq_head_stride, p.dq_row_stride);
    }
    auto set_dkv = [&](const Tensor &dk, const Tensor &dv) {
        p.dk = dk.data_ptr(), p.dv = dv.data_ptr();
        set_strides(dk, kBHSD, p.dk_batch_stride, p.dk_head_stride, p.dk_row_stride);
        set_strides(dv, kBHSD, p.dv_batch_stride, p.dv_head_stride, p.dv_row_stride);
    };
    if (need_dkv) set_dkv(dk, dv);
    if (dlse) {
        p.dlse = dlse->const_data_ptr();
        p.dlse_batch_stride = dlse->stride(0), p.dlse_head_stride = dlse->stride(1);
        p.dlse_row_stride = dlse->stride(2);
    }
    p.deterministic = deterministic || at::globalContext().deterministicAlgorithms();
    if (kernel == Kernel::kHost) host::flash_backward(p);
#if MINIMAL_ATTN_CUDA
    else {
        p.stream = current_stream(q);
        if (kernel == Kernel::kSm80) {
            const Tensor unneeded_dk = need_dkv ? dk : new_like(k), unneeded_dv = need_dkv ? dv : new_like(v);
            set_dkv(unneeded_dk, unneeded_dv);  // its one kernel makes all three
            if (need_dq) {
                workspace = at::empty({sm80::backward_workspace(p)}, q.options().dtype(at::kByte));
                p.workspace = workspace.data_ptr();
            }
            sm80::flash_backward(p);
        } else {
            simt::flash_backward(p);
        }
    }
#endif
    return {dq, dk, dv};
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
    if (at::autocast::is_autocast_enabled(at::kCUDA) && at::autocast::get_autocast_dtype(at::kCUDA) != q.scalar_type())
        return py::none();  // there is something to cast
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
    const auto p = params_of<AttnParams>(q, k, v, std::nullopt, scale, causal.ptr() == Py_True, dim);
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
// a capability, of the tensors' device. has_dropout: of a call with dropout.
std::optional<std::pair<std::string, std::optional<std::string>>> which_kernel(
    const Tensor &q, const Tensor &k, const Tensor &v, bool has_dropout, std::optional<int> capability,
    bool fast_fp64) {
    if (!q.has_storage() || !k.has_storage() || !v.has_storage()) return std::nullopt;
    check(q, k, v, std::nullopt, kBHSD);
    read_environment();
    const c10::DeviceGuard guard(q.device());
    auto p = params_of<AttnParams>(q, k, v, std::nullopt, 1, false, kBHSD);
    const int64_t seed = 0;
    if (has_dropout) p.dropout_seed = &seed;
    const Choice choice = capability ? choose(p, Gpu{*capability, fast_fp64}) : choose(p, q.device());
    std::optional<std::string> because;
    if (choice.slow_because) because = choice.slow_because;
    return std::pair(std::string(kKernelNames[int(choice.kernel)]), because);
}

}  // namespace

TORCH_LIBRARY(minimal_attn, m) {
    m.def("flash_forward(Tensor q, Tensor k, Tensor v, Tensor? seq_lens, float softmax_scale, bool causal, "
          "float dropout_p=0.0, Tensor? dropout_seed=None, bool deterministic=False) -> (Tensor out, Tensor lse)");
    m.def("flash_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
          "Tensor? seq_lens, float softmax_scale, bool causal, float dropout_p=0.0, Tensor? dropout_seed=None, "
          "bool deterministic=False, bool need_dq=True, bool need_dkv=True) -> (Tensor dq, Tensor dk, Tensor dv)");
}
TORCH_LIBRARY_IMPL(minimal_attn, CPU, m) {
    m.impl("flash_forward", &flash_forward);
    m.impl("flash_backward", &flash_backward);
}
TORCH_LIBRARY_IMPL(minimal_attn, CUDA, m) {
    m.impl("flash_forward", &flash_forward);
    m.impl("flash_backward", &flash_backward);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.attr("torch_version") = TORCH_VERSION;
    m.attr("has_cuda") = bool(MINIMAL_ATTN_CUDA);
#ifdef MINIMAL_ATTN_DIGEST
    m.attr("csrc_digest") = C10_STRINGIZE(MINIMAL_ATTN_DIGEST);  // of what is built at installation; see _build.py
#endif
    m.def("plain_forward", &plain_forward);
    // The ops without the dispatcher, for ops.py.
    m.def("flash_forward", &flash_forward, py::call_guard<py::gil_scoped_release>());
    m.def("flash_backward", &flash_backward, py::call_guard<py::gil_scoped_release>());
    m.def("read_environment", &read_environment);
    m.def("which_kernel", &which_kernel, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("has_dropout") = false,
          py::arg("capability") = py::none(), py::arg("fast_fp64") = true);
}
