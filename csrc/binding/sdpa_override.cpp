// Three ops of torch's scaled_dot_product_attention without Python, for calls on tensor cores without mask and dropout.
// Each hands other calls to the kernel that it had before, a function of minimal_attn/sdpa/aten.py.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "ops/ops.h"

namespace minimal_attn {

namespace {

using at::Tensor;
using c10::SymInt;
using Scale = std::optional<double>;
using FlashResult = std::tuple<Tensor, Tensor, Tensor, Tensor, SymInt, SymInt, Tensor, Tensor, Tensor>;
using EfficientResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// (out, lse), or nothing for other calls. A causal mask is aligned bottom right.
std::optional<std::pair<Tensor, Tensor>> attend(const Tensor &q, const Tensor &k, const Tensor &v, bool is_causal,
                                                Scale scale) {
    if (q.dim() != 4 || q.numel() == 0 || !at::isReducedFloatingType(q.scalar_type())) return {};
    const Options options{.softmax_scale = scale.value_or(1 / std::sqrt(double(q.size(3)))),
                          .window_left = -1,
                          .window_right = is_causal ? 0 : -1};
    AttnParams p{};
    if (find_type_fault(q, k, v) || set_params(p, q, k, v, options, kBHSD)) return {};
    const c10::DeviceGuard guard(q.device());
    try {
        if (choose(p, q, false).kernel == Kernel::kSimt) return {};  // Python says why it is slow
    } catch (const std::invalid_argument &) {  // by a forced kernel
        return {};
    }
    const Output output = run_forward(p, q, v, kBHSD);
    return std::pair(std::get<0>(output), std::get<1>(output));
}

// Both alignments of a causal mask are one.
bool is_square(const Tensor &q, const Tensor &k) { return q.dim() == 4 && k.dim() == 4 && q.size(2) == k.size(2); }

struct Before {
    Before(const char *name, c10::DispatchKey key)
        : op(c10::Dispatcher::singleton().findSchemaOrThrow(name, "")), key(key),
          kernel(op.getComputedKernelForDispatchKey(key)) {}

    template <class Result, class... Args>
    Result call(const Args &...args) const {
        torch::jit::Stack stack;
        torch::jit::push(stack, args...);
        kernel.callBoxed(op, c10::DispatchKeySet(key), &stack);
        return c10::impl::PopResult<Result>::call(stack);
    }

    c10::OperatorHandle op;
    c10::DispatchKey key;
    c10::SafeKernelFunction kernel;
};

struct SdpaOverride {
    torch::Library library;

    explicit SdpaOverride(const std::string &key_name)
        : library(torch::Library::IMPL, "aten", c10::parseDispatchKey(key_name), __FILE__, __LINE__) {
        const c10::DispatchKey key = c10::parseDispatchKey(key_name);
        const char *name = "aten::_scaled_dot_product_flash_attention";
        library.impl(name, [before = Before(name, key)](const Tensor &q, const Tensor &k, const Tensor &v,
                                                        double dropout_p, bool is_causal, bool return_debug_mask,
                                                        Scale scale) -> FlashResult {
            if (dropout_p == 0 && !return_debug_mask && q.dim() == v.dim() && q.size(-1) == v.size(-1))
                if (auto result = attend(q, k, v, is_causal, scale)) {
                    const auto rng = q.options().dtype(at::kUInt64);
                    return {result->first, result->second, Tensor(), Tensor(), q.size(2), k.size(2),
                            at::empty({2}, rng), at::empty({}, rng), at::empty({0}, q.options())};
                }
            return before.call<FlashResult>(q, k, v, dropout_p, is_causal, return_debug_mask, scale);
        });
        name = "aten::_scaled_dot_product_cudnn_attention";
        library.impl(name, [before = Before(name, key)](const Tensor &q, const Tensor &k, const Tensor &v,
                                                        const OptionalTensor &bias, bool compute_lse, double dropout_p,
                                                        bool is_causal, bool return_debug_mask,
                                                        Scale scale) -> FlashResult {
            if (dropout_p == 0 && !bias && !return_debug_mask && (!is_causal || is_square(q, k)))
                if (auto result = attend(q, k, v, is_causal, scale)) {
                    Tensor lse, seed, offset;
                    if (compute_lse) {
                        const auto rng = q.options().dtype(at::kLong);
                        lse = result->second.unsqueeze(-1), seed = at::empty({}, rng), offset = at::empty({}, rng);
                    }
                    return {result->first, lse, Tensor(), Tensor(), q.size(2), k.size(2), seed, offset, Tensor()};
                }
            return before.call<FlashResult>(q, k, v, bias, compute_lse, dropout_p, is_causal, return_debug_mask, scale);
        });
        name = "aten::_scaled_dot_product_efficient_attention";
        library.impl(name, [before = Before(name, key)](const Tensor &q, const Tensor &k, const Tensor &v,
                                                        const OptionalTensor &bias, bool compute_lse, double dropout_p,
                                                        bool is_causal, Scale scale) -> EfficientResult {
            // out, like q, must be (B, S, H, D) in memory; lse must have a multiple of 32 rows.
            if (dropout_p == 0 && !bias && is_square(q, k) && q.size(1) == k.size(1) && q.size(2) % 32 == 0 &&
                q.transpose(1, 2).is_contiguous())
                if (auto result = attend(q, k, v, is_causal, scale)) {
                    auto &[out, lse] = *result;
                    if (!compute_lse) return {out, at::empty({q.size(0), q.size(1), 0}, lse.options()), {}, {}};
                    const auto rng = q.options().dtype(at::kLong);
                    return {out, lse, at::empty({}, rng), at::empty({}, rng)};
                }
            return before.call<EfficientResult>(q, k, v, bias, compute_lse, dropout_p, is_causal, scale);
        });
    }
};

}  // namespace

void define_sdpa_override(pybind11::module_ &m) {
    pybind11::class_<SdpaOverride>(m, "SdpaOverride")
        .def(pybind11::init<std::string>())
        .def("remove", [](SdpaOverride &x) { x.library.reset(); });
}

}  // namespace minimal_attn
