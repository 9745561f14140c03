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
#include <array>
#include <string>
#include <utility>

#include "ops.h"

namespace minimal_attn {

namespace py = pybind11;

// fast_path.cpp
py::object fast_forward(py::handle warn_slow, py::handle may_train, py::handle q, py::handle k, py::handle v,
                        py::handle causal, py::handle softmax_scale, bool seq_major, bool return_lse,
                        bool deterministic, py::handle window_size, py::tuple lengths, py::handle sinks);

// aten.cpp
void define_everyday_sdpa(py::module_ &m);

namespace {

// What the forward and the backward pass have in common, checked. q [batch_size, nheads, seqlen_q, head_dim], k and v
// [batch_size, nheads_k, seqlen_k, head_dim], v's head_dim may differ; head_dim contiguous, dropout_seed one int64.
void set_params(AttnParams &p, const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const Options &options) {
    const Reason type_fault = find_type_fault(q, k, v);
    const Reason fault = find_fault(q, k, v, options.softmax_scale, kBHSD);
    TORCH_CHECK_TYPE(!type_fault, *type_fault);
    TORCH_CHECK_VALUE(!fault, *fault);
    TORCH_CHECK_VALUE(options.window_left >= -1 && options.window_right >= -1,
                      "window_left and window_right must be at least 0, or -1 for no bound");
    const Reason options_fault = find_fault(q, kBHSD, options);
    TORCH_CHECK_VALUE(!options_fault, *options_fault);
    if (options.attn_bias) {
        const std::array<int64_t, 4> sizes{q.size(0), q.size(1), q.size(2), k.size(2)};
        for (int i = 0; i < 4; i++)
            TORCH_CHECK_VALUE(options.attn_bias->size(i) == 1 || options.attn_bias->size(i) == sizes[i],
                              "attn_bias must broadcast to (batch_size, nheads, seqlen_q, seqlen_k)");
    }
    set_inputs(p, q, k, v, options.softmax_scale, {options.window_left, options.window_right}, kBHSD);
    set_options(p, options);
    const auto &[dropout_p, dropout_seed] = std::tie(options.dropout_p, options.dropout_seed);
    TORCH_CHECK_VALUE(dropout_p >= 0 && dropout_p <= 1, "dropout_p must be in [0, 1]");
    if (dropout_p == 0) return;
    TORCH_CHECK_VALUE(dropout_seed && dropout_seed->numel() == 1 &&
                          is_like(*dropout_seed, dropout_seed->sizes(), at::kLong, q.device()),
                      "dropout_seed must be one int64 in a tensor on the device of q");
    p.dropout_seed = dropout_seed->const_data_ptr<int64_t>();
    p.drop_threshold = uint32_t(std::min(std::nearbyint(dropout_p * 0x1p32), 0x1p32 - 1));  // as in dropout.py
    p.keep_scale = dropout_p == 1 ? 0 : 1 / (1 - dropout_p);
}

// function(q, k, v, options, deterministic), as Python and the dispatcher call it.
template <auto function>
auto with_options(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const OptionalTensor &cu_seqlens_q,
                  const OptionalTensor &cu_seqlens_k, const OptionalTensor &seqused_q, const OptionalTensor &seqused_k,
                  const OptionalTensor &sinks, const OptionalTensor &alibi_slopes, const OptionalTensor &attn_bias,
                  double softmax_scale, double softcap, int64_t window_left, int64_t window_right, double dropout_p,
                  const OptionalTensor &dropout_seed, bool deterministic) {
    return function(q, k, v,
                    {cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks, alibi_slopes, attn_bias, softmax_scale,
                     softcap, window_left, window_right, dropout_p, dropout_seed},
                    deterministic);
}

// Only the backward pass asks whether it is to be deterministic.
Output forward_only(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const Options &options, bool) {
    return flash_forward(q, k, v, options);
}

// As the op, which returns tensors alone.
std::tuple<at::Tensor, at::Tensor> tensors_only(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v,
                                                const Options &options, bool) {
    const auto [out, lse, _] = flash_forward(q, k, v, options);
    return {out, lse};
}

// Checks what the backward pass takes beside checked q, k and v.
void check_backward(const at::Tensor &dout, const OptionalTensor &dlse, const at::Tensor &q, const at::Tensor &v,
                    const at::Tensor &out, const at::Tensor &lse) {
    auto is_like_out = [&](const at::Tensor &x) {
        return x.dim() == 4 && x.size(3) == v.size(3) &&
               is_like(x.select(3, 0), q.sizes().slice(0, 3), q.scalar_type(), q.device());
    };
    auto is_of_rows = [&](const at::Tensor &x) { return is_like(x, q.sizes().slice(0, 3), lse_dtype(q), q.device()); };
    TORCH_CHECK_VALUE(is_like_out(dout) && is_like_out(out), "dout and out must be like q, with the head_dim of v");
    TORCH_CHECK_VALUE(out.stride(3) == 1 || out.size(3) == 1, "out must have a contiguous last dimension");
    TORCH_CHECK_VALUE(is_of_rows(lse) && (!dlse || is_of_rows(*dlse)),
                      "lse and dlse must be (batch_size, nheads, seqlen_q), float32, or float64 for float64");
    TORCH_CHECK_VALUE(lse.is_contiguous(), "lse must be contiguous");
}

// With P = exp(sink - lse), the share of the sink in a row's softmax, its gradient is the sum of P · (0 - delta) over
// the head's rows. A row beyond the end of its sample has lse -inf. The sum is in a fixed order.
at::Tensor gradient_of_sinks(const at::Tensor &sinks, const at::Tensor &lse, const at::Tensor &delta) {
    const at::Tensor share = (sinks.unsqueeze(1) - lse).exp_().masked_fill_(lse == -INFINITY, 0);
    return share.mul_(delta).sum(at::IntArrayRef({0, 2})).neg_();
}

#if MINIMAL_ATTN_CUDA
void launch_backward(AttnBackwardParams &p, const at::Tensor &k, const at::Tensor &v, const at::Tensor &lse,
                     Kernel kernel) {
    // Where neither dq nor dk and dv are needed, simt::flash_backward forms delta, for dsinks, and dbias.
    if (kernel != Kernel::kSm80 || !(p.dq.data || p.dk.data)) return simt::flash_backward(p);
    at::Tensor unneeded_dk, unneeded_dv, workspace, lse_log2 = at::empty_like(lse);
    p.lse_log2 = lse_log2.data_ptr<float>();
    if (!p.dk.data) {  // its one kernel makes all three gradients
        unneeded_dk = new_like(k), unneeded_dv = new_like(v);
        p.dk = tensor_of(unneeded_dk, kBHSD, p.cu_seqlens_k), p.dv = tensor_of(unneeded_dv, kBHSD, p.cu_seqlens_k);
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
// a capability, of the tensors' device. has_dropout, has_sinks, has_scores: of a call with dropout, with sinks, with
// softcap or ALiBi. attn_bias: one that Python has checked, 4D.
std::optional<std::pair<std::string, Reason>> which_kernel(const at::Tensor &q, const at::Tensor &k,
                                                           const at::Tensor &v, bool has_dropout,
                                                           std::optional<int> capability, bool fast_fp64,
                                                           bool has_sinks, bool has_scores,
                                                           const OptionalTensor &attn_bias) {
    if (!q.has_storage() || !k.has_storage() || !v.has_storage()) return std::nullopt;
    AttnParams p{};
    set_params(p, q, k, v, {.softmax_scale = 1, .window_left = -1, .window_right = -1});
    const int64_t seed = 0;
    if (has_dropout) p.dropout_seed = &seed;
    if (has_sinks) p.sinks = &seed;
    if (has_scores) p.softcap = 1;
    if (attn_bias) p.bias = bias_of(*attn_bias);
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

// The op and the reason beside it.
Output flash_forward(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const Options &options) {
    AttnParams p{};
    set_params(p, q, k, v, options);
    return run_forward(p, q, v, kBHSD);
}

// The op: dq, dk, dv, dsinks and dbias, which have no elements where they are not needed. dout is like out, dlse like
// lse or none; both may have any strides.
Gradients flash_backward(const at::Tensor &dout_, const OptionalTensor &dlse, const at::Tensor &q, const at::Tensor &k,
                         const at::Tensor &v, const at::Tensor &out, const at::Tensor &lse, const Options &options,
                         bool deterministic, bool need_dq, bool need_dkv, bool need_dsinks, bool need_dbias) {
    AttnBackwardParams p{};
    set_params(p, q, k, v, options);
    const bool is_packed = p.cu_seqlens_q;
    TORCH_CHECK_NOT_IMPLEMENTED(!is_packed || !p.seqused_k,
                                "the backward pass of backend='cuda' does not take seqused_k with cu_seqlens_k, since "
                                "the keys of samples may overlap: minimal_attn.flash_attention gives each its own");
    check_backward(dout_, dlse, q, v, out, lse);
    const c10::DeviceGuard guard(q.device());
    auto gradient = [](const at::Tensor &x, bool is_needed) {
        return is_needed ? new_like(x) : at::empty({0}, x.options());
    };
    at::Tensor dq = gradient(q, need_dq), dk = gradient(k, need_dkv), dv = gradient(v, need_dkv);
    at::Tensor dsinks = need_dsinks ? at::zeros_like(*options.sinks) : at::empty({0}, lse.options());
    // Sums of many, so in the dtype of sums.
    at::Tensor dbias = at::zeros(need_dbias ? options.attn_bias->sizes() : at::IntArrayRef({0}), lse.options());
    if (q.numel() == 0 || k.numel() == 0) {  // lse is that of the sinks alone
        if (need_dsinks && dlse) dsinks = dlse->masked_fill(lse == -INFINITY, 0).sum(at::IntArrayRef({0, 2}));
        return {dq.zero_(), dk.zero_(), dv.zero_(), dsinks, need_dbias ? dbias.to(options.attn_bias->dtype()) : dbias};
    }

    const Kernel kernel = choose(p, q.device(), true).kernel;
    at::Tensor dout = dout_, delta = at::empty_like(lse);
    p.dout = tensor_of(dout, kBHSD, is_packed);
    // Some dout cannot be loaded as it is: that of a sum has strides of 0, others are not 16-byte aligned. A copy costs
    // less than a kernel without tensor cores.
    if (dout.stride(3) != 1 || (kernel == Kernel::kSm80 && why_not_16_bytes("dout", p.dout, 8))) {
        dout = dout.clone(at::MemoryFormat::Contiguous);
        p.dout = tensor_of(dout, kBHSD, is_packed);
    }
    p.o = tensor_of(out, kBHSD, is_packed), p.lse = lse.data_ptr(), p.delta = delta.data_ptr();
    if (dlse) p.dlse = tensor_of(*dlse, kBHSD, is_packed);
    if (need_dq) p.dq = tensor_of(dq, kBHSD, is_packed);
    if (need_dkv) p.dk = tensor_of(dk, kBHSD, is_packed), p.dv = tensor_of(dv, kBHSD, is_packed);
    if (need_dbias) p.dbias = bias_of(dbias);
    p.deterministic = deterministic || at::globalContext().deterministicAlgorithms();
    at::Tensor ascending;
    if (is_packed && p.deterministic) {  // blocks of keys wait for one another: none may be missing, whatever is given
        ascending = at::stack({*options.cu_seqlens_q, *options.cu_seqlens_k});
        ascending.select(1, 0).zero_();  // as kernels take the first one
        ascending = std::get<0>(ascending.cummax(1)).contiguous();
        p.cu_seqlens_q = ascending.const_data_ptr<int>(), p.cu_seqlens_k = p.cu_seqlens_q + p.batch_size + 1;
    }
    if (kernel == Kernel::kHost) host::flash_backward(p);
#if MINIMAL_ATTN_CUDA
    else launch_backward(p, k, v, lse, kernel);
#endif
    if (need_dsinks) dsinks = gradient_of_sinks(*options.sinks, lse, delta);
    return {dq, dk, dv, dsinks, need_dbias ? dbias.to(options.attn_bias->dtype()) : dbias};
}

Gradients flash_backward_op(const at::Tensor &dout, const OptionalTensor &dlse, const at::Tensor &q,
                            const at::Tensor &k, const at::Tensor &v, const at::Tensor &out, const at::Tensor &lse,
                            const OptionalTensor &cu_seqlens_q, const OptionalTensor &cu_seqlens_k,
                            const OptionalTensor &seqused_q, const OptionalTensor &seqused_k,
                            const OptionalTensor &sinks, const OptionalTensor &alibi_slopes,
                            const OptionalTensor &attn_bias, double softmax_scale, double softcap, int64_t window_left,
                            int64_t window_right, double dropout_p, const OptionalTensor &dropout_seed,
                            bool deterministic, bool need_dq, bool need_dkv, bool need_dsinks, bool need_dbias) {
    return flash_backward(dout, dlse, q, k, v, out, lse,
                          {cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks, alibi_slopes, attn_bias,
                           softmax_scale, softcap, window_left, window_right, dropout_p, dropout_seed},
                          deterministic, need_dq, need_dkv, need_dsinks, need_dbias);
}

#define OPTIONS                                                                                                 \
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor? sinks, "         \
    "Tensor? alibi_slopes, Tensor? attn_bias, float softmax_scale, float softcap, int window_left, "            \
    "int window_right, float dropout_p=0.0, Tensor? dropout_seed=None, bool deterministic=False"

TORCH_LIBRARY(minimal_attn, m) {
    m.def("flash_forward(Tensor q, Tensor k, Tensor v, " OPTIONS ") -> (Tensor out, Tensor lse)");
    m.def("flash_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, " OPTIONS
          ", bool need_dq=True, bool need_dkv=True, bool need_dsinks=False, bool need_dbias=False)"
          " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor dbias)");
    for (c10::DeviceType device : {at::kCPU, at::kCUDA}) {
        m.impl("flash_forward", torch::dispatch(device, &with_options<&tensors_only>));
        m.impl("flash_backward", torch::dispatch(device, &flash_backward_op));
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
    m.def("flash_forward", &with_options<&forward_only>, py::call_guard<py::gil_scoped_release>());
    m.def("differentiable_forward", &with_options<&differentiable_forward>, py::call_guard<py::gil_scoped_release>());
    m.def("force_kernel", &force_kernel);
    define_everyday_sdpa(m);
    m.def("which_kernel", &which_kernel, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("has_dropout") = false,
          py::arg("capability") = py::none(), py::arg("fast_fp64") = true, py::arg("has_sinks") = false,
          py::arg("has_scores") = false, py::arg("attn_bias") = py::none());
}

}  // namespace minimal_attn
