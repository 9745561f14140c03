// Which kernel serves a call on a GPU: one function of dtype, head_dim, alignment and compute capability. Not of how
// many samples and heads there are, so that a sample's bits do not depend on its batch.
//
// Read next: main.cpp, which asks.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>

#include "flash.h"

enum class Kernel { kSimt, kSm80, kHost };  // flash.cu, flash_sm80.cu, flash.cu on the CPU
constexpr const char *kKernelNames[] = {"simt", "sm80", "host"};

// Why flash_sm80.cu, which loads 16 bytes at a time, cannot serve p, or nullptr. capability: 90 for Hopper.
inline const char *why_not_sm80(const AttnParams &p, int capability) {
    if (capability < 80) return "the GPU, or what this build holds for it, is older than sm_80";
    if (p.dtype == DType::kFloat32) return "the dtype is float32, which tensor cores would round";
    if (p.head_dim % 8) return "head_dim is not a multiple of 8";
    if (uintptr_t(p.q) % 16) return "q does not start at a multiple of 16 bytes";
    if (uintptr_t(p.k) % 16) return "k does not start at a multiple of 16 bytes";
    if (uintptr_t(p.v) % 16) return "v does not start at a multiple of 16 bytes";
    if ((p.q_batch_stride | p.q_head_stride | p.q_row_stride) % 8) return "a stride of q is not a multiple of 8";
    if ((p.k_batch_stride | p.k_head_stride | p.k_row_stride) % 8) return "a stride of k is not a multiple of 8";
    if ((p.v_batch_stride | p.v_head_stride | p.v_row_stride) % 8) return "a stride of v is not a multiple of 8";
    return nullptr;
}

struct Choice {
    Kernel kernel;
    const char *slow_because;  // what it is about the tensors that costs them the tensor cores, or nullptr
};

// The kernel that MINIMAL_ATTN_KERNEL names, if any. Throws std::invalid_argument if it is none for a GPU.
inline std::optional<Kernel> kernel_of(const char *name) {
    const std::string wanted(name ? name : "");
    if (wanted.empty()) return std::nullopt;
    for (Kernel kernel : {Kernel::kSimt, Kernel::kSm80})
        if (wanted == kKernelNames[int(kernel)]) return kernel;
    throw std::invalid_argument("MINIMAL_ATTN_KERNEL is '" + wanted + "': there are simt and sm80");
}

// Throws std::invalid_argument if the forced kernel cannot serve p.
inline Choice choose_kernel(const AttnParams &p, int capability, std::optional<Kernel> forced) {
    const char *why_not = why_not_sm80(p, capability);
    if (forced == Kernel::kSimt) return {Kernel::kSimt, nullptr};
    if (!why_not) return {Kernel::kSm80, nullptr};
    if (forced) throw std::invalid_argument(std::string("MINIMAL_ATTN_KERNEL=sm80 cannot serve: ") + why_not);
    return {Kernel::kSimt, capability < 80 || p.dtype == DType::kFloat32 ? nullptr : why_not};
}
