// The ops minimal_attn::flash_forward and flash_backward, and the Python module. Importing it registers the ops.
//
// Messages here are put together without iostreams, which crash where a toolchain links libstdc++ statically (seen with
// g++ 13).
//
// Read next: autograd.cpp, their derivative.
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <string>
#include <utility>

#include "ops.h"

namespace minimal_attn {

namespace py = pybind11;

// fast_path.cpp
py::object fast_forward(py::handle warn_slow, py::handle may_train, py::handle q, py::handle k, py::handle v,
                        py::handle causal, py::handle softmax_scale, bool seq_major, bool return_lse,
                        bool deterministic);

namespace {

bool is_like(const at::Tensor &x, at::IntArrayRef sizes, at::ScalarType dtype, const at::Device &device) {
    return x.sizes() == sizes && x.scalar_type() == dtype && x.device() == device;
}

// What the forward and the backward pass have in common, checked. q [batch_size, nheads, seqlen_q, head_dim], k and v
// [batch_size, nheads_k, seqlen_k, head_dim], head_dim contiguous, seq_lens int32 [batch_size], dropout_seed one int64.
void set_params(AttnParams &p, const at::Tensor &q, const at::Tensor &k, const at::Tensor &v,
                const OptionalTensor &seq_lens, double softmax_scale, bool causal, double dropout_p,
                const OptionalTensor &dropout_seed) {
    const Reason type_fault = find_type_fault(q, k, v), fault = find_fault(q, k, v, softmax_scale, kBHSD);
    TORCH_CHECK_TYPE(!type_fault, *type_fault);
    TORCH_CHECK_VALUE(!fault, *fault);
    set_inputs(p, q, k, v, softmax_scale, causal, kBHSD);
    if (seq_lens) {
        TORCH_CHECK_VALUE(is_like(*seq_lens, {q.size(0)}, at::kInt, q.device()) && seq_lens->is_contiguous(),
                          "seq_lens must be a contiguous int32 tensor of shape (batch_size,) on the device of q");
        TORCH_CHECK_VALUE(p.seqlen_q == p.seqlen_k, "seq_lens needs seqlen_q == seqlen_k");
        p.seq_lens = seq_lens->const_data_ptr<int>();
    }
    TORCH_CHECK_VALUE(dropout_p >= 0 && dropout_p <= 1, "dropout_p must be in [0, 1]");
    if (dropout_p == 0) return;
    TORCH_CHECK_VALUE(dropout_seed && dropout_seed->numel() == 1 &&
                          is_like(*dropout_seed, dropout_seed->sizes(), at::kLong, q.device()),
                      "dropout_seed must be one int64 in a tensor on the device of q");
    p.dropout_seed = dropout_seed->const_data_ptr<int64_t>();
    p.drop_threshold = uint32_t(std::min(std::nearbyint(dropout_p * 0x1p32), 0x1p32 - 1));  // as in dropout.py
    p.keep_scale = dropout_p == 1 ? 0 : 1 / (1 - dropout_p);
}

// The op, which returns tensors alone.
std::tuple<at::Tensor, at::Tensor> flash_forward_op(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v,
                                                    const OptionalTensor &seq_lens, double softmax_scale, bool causal,
                                                    double dropout_p, const OptionalTensor &dropout_seed, bool) {
    const auto [out, lse, _] = flash_forward(q, k, v, seq_lens, softmax_scale, causal, dropout_p, dropout_seed, false);
    return {out, lse};
}

// Checks what the backward pass takes beside checked q, k and v.
void check_backward(const at::Tensor &dout, const OptionalTensor &dlse, const at::Tensor &q, const at::Tensor &out,
                    const at::Tensor &lse) {
    auto is_like_q = [&](const at::Tensor &x) { return is_like(x, q.sizes(), q.scalar_type(), q.device()); };
    auto is_of_rows = [&](const at::Tensor &x) { return is_like(x, q.sizes().slice(0, 3), lse_dtype(q), q.device()); };
    TORCH_CHECK_VALUE(is_like_q(dout) && is_like_q(out), "dout and out must be like q");
    TORCH_CHECK_VALUE(out.stride(3) == 1 || q.size(3) == 1, "out must have a contiguous last dimension");
    TORCH_CHECK_VALUE(is_of_rows(lse) && (!dlse || is_of_rows(*dlse)),
                      "lse and dlse must be (batch_size, nheads, seqlen_q), float32, or float64 for float64");
    TORCH_CHECK_VALUE(lse.is_contiguous(), "lse must be contiguous");
}

#if MINIMAL_ATTN_CUDA
void launch_backward(AttnBackwardParams &p, const at::Tensor &k, const at::Tensor &lse, Kernel kernel) {
    if (kernel != Kernel::kSm80) return simt::flash_backward(p);
    at::Tensor unneeded_dk, unneeded_dv, workspace, lse_log2 = at::empty_like(lse);
    p.lse_log2 = lse_log2.data_ptr<float>();
    if (!p.dk.data) {  // its one kernel makes all three gradients
        unneeded_dk = new_like(k), unneeded_dv = new_like(k);
        p.dk = tensor_of(unneeded_dk, kBHSD), p.dv = tensor_of(unneeded_dv, kBHSD);
    }
    if (const int64_t bytes = sm80::backward_workspace(p)) {
        workspace = at::empty({bytes}, k.options().dtype(at::kByte));
        p.workspace = workspace.data_ptr();
    }
    sm80::flash_backward(p);
}
#endif

// (name of the kernel that serves the tensors, why it is not the fast one or None); None for tensors without memory
// of their own, as vmap has them. capability and fast_fp64: of a GPU that need not be here, as in kernels.h; without
// a capability, of the tensors' device. has_dropout: of a call with dropout.
std::optional<std::pair<std::string, Reason>> which_kernel(const at::Tensor &q, const at::Tensor &k,
                                                           const at::Tensor &v, bool has_dropout,
                                                           std::optional<int> capability, bool fast_fp64) {
    if (!q.has_storage() || !k.has_storage() || !v.has_storage()) return std::nullopt;
    AttnParams p{};
    set_params(p, q, k, v, {}, 1, false, 0, {});
    const int64_t seed = 0;
    if (has_dropout) p.dropout_seed = &seed;
    const c10::DeviceGuard guard(q.device());
    const auto [kernel, slow_because] =
        capability ? choose_kernel(p, Gpu{*capability, fast_fp64}, false) : choose(p, q.device(), false);
    return std::pair(std::string(kKernelNames[int(kernel)]), slow_because);
}

// Forces a kernel for GPUs by its name, or none, and returns which one was forced before.
std::optional<std::string> force_kernel(const std::optional<std::string> &name) {
    std::optional<Kernel> forced;
    for (Kernel kernel : {Kernel::kSimt, Kernel::kSm80, Kernel::kSm90, Kernel::kDmma})
        if (name == kKernelNames[int(kernel)]) forced = kernel;
    TORCH_CHECK_VALUE(!name || forced, "there is no kernel '" + *name + "': a GPU has simt, sm80, sm90 and dmma");
    const auto before = forced_kernel.exchange(forced);
    return before ? std::optional(std::string(kKernelNames[int(*before)])) : std::nullopt;
}

}  // namespace

// The op and the reason beside it. `deterministic` is for the backward pass.
Output flash_forward(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const OptionalTensor &seq_lens,
                     double softmax_scale, bool causal, double dropout_p, const OptionalTensor &dropout_seed, bool) {
    AttnParams p{};
    set_params(p, q, k, v, seq_lens, softmax_scale, causal, dropout_p, dropout_seed);
    return run_forward(p, q, kBHSD);
}

// The op: dq, dk and dv, which have no elements where they are not needed. dout is like out, dlse like lse or none;
// both may have any strides.
Gradients flash_backward(const at::Tensor &dout_, const OptionalTensor &dlse, const at::Tensor &q, const at::Tensor &k,
                         const at::Tensor &v, const at::Tensor &out, const at::Tensor &lse,
                         const OptionalTensor &seq_lens, double softmax_scale, bool causal, double dropout_p,
                         const OptionalTensor &dropout_seed, bool deterministic, bool need_dq, bool need_dkv) {
    AttnBackwardParams p{};
    set_params(p, q, k, v, seq_lens, softmax_scale, causal, dropout_p, dropout_seed);
    check_backward(dout_, dlse, q, out, lse);
    const c10::DeviceGuard guard(q.device());
    auto gradient = [](const at::Tensor &x, bool is_needed) {
        return is_needed ? new_like(x) : at::empty({0}, x.options());
    };
    at::Tensor dq = gradient(q, need_dq), dk = gradient(k, need_dkv), dv = gradient(v, need_dkv);
    if (q.numel() == 0 || k.numel() == 0) return {dq.zero_(), dk.zero_(), dv.zero_()};

    const Kernel kernel = choose(p, q.device(), true).kernel;
    at::Tensor dout = dout_, delta = at::empty_like(lse);
    p.dout = tensor_of(dout, kBHSD);
    // Some dout cannot be loaded as it is: that of a sum has strides of 0, others are not 16-byte aligned. A copy costs
    // less than a kernel without tensor cores.
    if (dout.stride(3) != 1 || (kernel == Kernel::kSm80 && why_not_16_bytes("dout", p.dout, 8))) {
        dout = dout.clone(at::MemoryFormat::Contiguous);
        p.dout = tensor_of(dout, kBHSD);
    }
    p.o = tensor_of(out, kBHSD), p.lse = lse.data_ptr(), p.delta = delta.data_ptr();
    if (dlse) p.dlse = tensor_of(*dlse, kBHSD);
    if (need_dq) p.dq = tensor_of(dq, kBHSD);
    if (need_dkv) p.dk = tensor_of(dk, kBHSD), p.dv = tensor_of(dv, kBHSD);
    p.deterministic = deterministic || at::globalContext().deterministicAlgorithms();
    if (kernel == Kernel::kHost) host::flash_backward(p);
#if MINIMAL_ATTN_CUDA
    else launch_backward(p, k, lse, kernel);
#endif
    return {dq, dk, dv};
}

TORCH_LIBRARY(minimal_attn, m) {
    m.def("flash_forward(Tensor q, Tensor k, Tensor v, Tensor? seq_lens, float softmax_scale, bool causal, "
          "float dropout_p=0.0, Tensor? dropout_seed=None, bool deterministic=False) -> (Tensor out, Tensor lse)");
    m.def("flash_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
          "Tensor? seq_lens, float softmax_scale, bool causal, float dropout_p=0.0, Tensor? dropout_seed=None, "
          "bool deterministic=False, bool need_dq=True, bool need_dkv=True) -> (Tensor dq, Tensor dk, Tensor dv)");
    for (c10::DeviceType device : {at::kCPU, at::kCUDA}) {
        m.impl("flash_forward", torch::dispatch(device, &flash_forward_op));
        m.impl("flash_backward", torch::dispatch(device, &flash_backward));
    }
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.attr("torch_version") = TORCH_VERSION;
    m.attr("has_cuda") = bool(MINIMAL_ATTN_CUDA);
#ifdef MINIMAL_ATTN_DIGEST
    m.attr("csrc_digest") = C10_STRINGIZE(MINIMAL_ATTN_DIGEST);  // of what is built at installation; see _build.py
#endif
    m.def("fast_forward", &fast_forward);
    // The forward pass without the dispatcher, for interface.py.
    m.def("flash_forward", &flash_forward, py::call_guard<py::gil_scoped_release>());
    m.def("differentiable_forward", &differentiable_forward, py::call_guard<py::gil_scoped_release>());
    m.def("force_kernel", &force_kernel);
    m.def("which_kernel", &which_kernel, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("has_dropout") = false,
          py::arg("capability") = py::none(), py::arg("fast_fp64") = true);
}

}  // namespace minimal_attn
