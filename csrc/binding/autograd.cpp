// The derivative of flash_forward without Python. The dispatcher's is in minimal_attn/backends/ops.py.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include "binding/direct.h"

namespace minimal_attn {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

OptionalTensor if_defined(const at::Tensor &x) { return x.defined() ? OptionalTensor(x) : std::nullopt; }

// A tangent would be lost. Hessian-vector products, forward over backward, have one.
void check_no_tangent(const char *name, const at::Tensor &x) {
    TORCH_CHECK_NOT_IMPLEMENTED(!x.defined() || !x._fw_grad(0).defined(),
                                "the backward pass of backend='cuda' has no forward-mode derivative, but ", name,
                                " has a tangent: use backend='reference'");
}

}  // namespace

// torch shows this name in errors and profiles, and finds sinks and attn_bias among forward's arguments.
struct FlashAttention : torch::autograd::Function<FlashAttention> {
    static variable_list forward(AutogradContext *ctx, const at::Tensor &q, const at::Tensor &k, const at::Tensor &v,
                                 const OptionalTensor &, const OptionalTensor &, const Options &options,
                                 Reason *slow_because) {
        const auto [out, lse, max_logits, reason] = flash_forward(q, k, v, options);
        *slow_because = reason;
        variable_list tensors{q, k, v, out, lse};
        std::vector<c10::IValue> numbers;
        for_each_option(options, [&]<typename T>(const T &x) {
            if constexpr (std::is_arithmetic_v<T>) numbers.emplace_back(x);
            else tensors.push_back(x.value_or(at::Tensor()));
        });
        ctx->save_for_backward(std::move(tensors));
        ctx->saved_data["numbers"] = c10::ivalue::Tuple::create(std::move(numbers));
        ctx->set_materialize_grads(false);  // an lse that nobody uses has no gradient
        if (!max_logits) return {out, lse};
        ctx->mark_non_differentiable({*max_logits});
        return {out, lse, *max_logits};
    }

    static variable_list backward(AutogradContext *ctx, variable_list gradients) {
        const variable_list tensors = ctx->get_saved_variables();
        const c10::IValue numbers = ctx->saved_data["numbers"];
        auto tensor = tensors.begin();
        auto number = numbers.toTupleRef().elements().begin();
        const at::Tensor &q = *tensor++, &k = *tensor++, &v = *tensor++, &out = *tensor++, &lse = *tensor++;
        Options options;
        for_each_option(options, [&]<typename T>(T &x) {
            if constexpr (std::is_arithmetic_v<T>) x = (number++)->template to<T>();
            else x = if_defined(*tensor++);
        });
        const at::Tensor &dlse = gradients[1];
        const at::Tensor dout = gradients[0].defined() ? gradients[0] : at::zeros_like(out);
        check_no_tangent("dout", dout);
        check_no_tangent("dlse", dlse);
        // torch counts the tensors among forward's arguments.
        auto is_needed = [&, i = 0](bool is_given) mutable { return is_given && ctx->needs_input_grad(i++); };
        const bool need_dq = is_needed(true), need_dk = is_needed(true), need_dv = is_needed(true);
        const bool need_dsinks = is_needed(options.sinks.has_value());
        const bool need_dbias = is_needed(options.attn_bias.has_value());
        auto run = [&](auto function) {
            return function(dout, if_defined(dlse), q, k, v, out, lse OPTIONS(AS_ARGUMENT), need_dq, need_dk || need_dv,
                            need_dsinks, need_dbias);
        };
        static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("minimal_attn::flash_backward", "")
                                   .typed<decltype(flash_backward)>();
        // In grad mode a second derivative may follow, which ops.py refuses.
        const bool is_direct = !at::GradMode::is_enabled() && needs_no_dispatcher({&dout, &dlse, &q, &k, &v});
        const auto [dq, dk, dv, dsinks, dbias] =
            is_direct ? run(flash_backward) : run([](const auto &...x) { return op.call(x...); });
        auto if_needed = [](bool is_needed, const at::Tensor &x) { return is_needed ? x : at::Tensor(); };
        return {if_needed(need_dq, dq),         if_needed(need_dk, dk),       if_needed(need_dv, dv),
                if_needed(need_dsinks, dsinks), if_needed(need_dbias, dbias), at::Tensor(), at::Tensor()};
    }
};

Output differentiable_forward(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const Options &options) {
    Reason slow_because;
    const variable_list outputs =
        FlashAttention::apply(q, k, v, options.sinks, options.attn_bias, options, &slow_because);
    return {outputs[0], outputs[1], outputs.size() > 2 ? OptionalTensor(outputs[2]) : std::nullopt, slow_because};
}

}  // namespace minimal_attn
