// Which kernel serves a call on a GPU: one function of dtype, head_dim, alignment, strides and the GPU. The numbers of
// samples and heads do not enter, so that a sample's bits do not depend on its batch.
//
// Read next: torch_params.h, which asks.
#pragma once

#include <array>
#include <optional>
#include <stdexcept>
#include <string>

#include "flash.h"

// flash.cu, flash_sm80.cu, flash_sm90.cu, flash_dmma.cu, flash.cu on the CPU
enum class Kernel { kSimt, kSm80, kSm90, kDmma, kHost };
constexpr const char *kKernelNames[] = {"simt", "sm80", "sm90", "dmma", "host"};

struct Gpu {
    int capability;  // 90 for Hopper; of the code that this build holds for it, if that is older
    bool fast_fp64;  // half as fast as fp32, not a small fraction
};

// Why a kernel cannot serve a call. '%' in the words stands for the name of an argument. No words: it can.
struct Reason {
    const char *words = nullptr;
    char name = 0;

    explicit operator bool() const { return words; }
    std::string text() const {
        std::string text = words;
        if (const size_t place = text.find('%'); place != text.npos) text[place] = name;
        return text;
    }
};

// An input of the forward pass.
struct Input {
    char name;
    const Tensor &x;
    int rows;
};

inline std::array<Input, 3> inputs(const AttnParams &p) {
    return {{{'q', p.q, p.seqlen_q}, {'k', p.k, p.seqlen_k}, {'v', p.v, p.seqlen_k}}};
}

// The bits of all strides of x at once.
inline int64_t all_strides(const Tensor &x) { return x.batch_stride | x.head_stride | x.row_stride; }

// Why a kernel that loads 16 bytes at a time cannot serve p.
inline Reason why_not_16_bytes(const AttnParams &p) {
    const int64_t n = p.dtype == DType::kFloat32 ? 4 : 8;  // elements
    if (p.head_dim % n) return {"head_dim is not a multiple of 16 bytes"};
    for (const auto &[name, x, rows] : inputs(p)) {
        if (uintptr_t(x.data) % 16) return {"% does not start at a multiple of 16 bytes", name};
        if (all_strides(x) % n) return {"a stride of % is not a multiple of 16 bytes", name};
    }
    return {};
}

// Whether a head or a sample of x begins within a row of another one. With a stride of 0 they are all the same one.
inline bool heads_overlap(const Tensor &x, int head_dim) {
    auto overlaps = [&](int64_t stride) { return 0 < stride && stride < head_dim; };
    return overlaps(x.head_stride) || overlaps(x.batch_stride);
}

// Why TMA cannot load q, k and v: it takes rows, heads and samples that do not overlap, and strides below 2^40 bytes.
inline Reason why_not_tma(const AttnParams &p) {
    for (const auto &[name, x, rows] : inputs(p)) {
        if (rows > 1 && x.row_stride < p.head_dim) return {"rows of % overlap", name};
        if (heads_overlap(x, p.head_dim)) return {"heads or samples of % overlap", name};
        if (all_strides(x) >> 39) return {"a stride is 2^40 bytes or more"};
    }
    return why_not_16_bytes(p);
}

constexpr const char *kNotHopper = "the GPU, or what this build holds for it, is not sm_90";
constexpr const char *kNotForFp32 = "the dtype is float32, which its tensor cores would round";
constexpr const char *kNoDropout = "it has no dropout";

// Why flash_sm80.cu cannot serve p.
inline Reason why_not_sm80(const AttnParams &p, Gpu gpu) {
    if (gpu.capability < 80) return {"the GPU, or what this build holds for it, is older than sm_80"};
    if (p.dtype == DType::kFloat32) return {kNotForFp32};
    return why_not_16_bytes(p);
}

// Why flash_sm90.cu cannot serve p.
inline Reason why_not_sm90(const AttnParams &p, Gpu gpu) {
    if (gpu.capability != 90) return {kNotHopper};
    if (p.dtype == DType::kFloat32) return {kNotForFp32};
    if (p.dropout_seed) return {kNoDropout};
    if (p.seqlen_k == 0) return {"there are no keys"};  // TMA takes no empty tensor
    return why_not_tma(p);
}

// Why flash_dmma.cu cannot serve p.
inline Reason why_not_dmma(const AttnParams &p, Gpu gpu) {
    if (gpu.capability != 90) return {kNotHopper};
    if (p.dtype != DType::kFloat32) return {"the dtype is not float32"};
    if (p.head_dim > 128) return {"head_dim is over 128"};
    if (p.dropout_seed) return {kNoDropout};
    return why_not_16_bytes(p);
}

inline Reason why_not(Kernel kernel, const AttnParams &p, Gpu gpu) {
    switch (kernel) {
        case Kernel::kSm80: return why_not_sm80(p, gpu);
        case Kernel::kSm90: return why_not_sm90(p, gpu);
        case Kernel::kDmma: return why_not_dmma(p, gpu);
        default: return {};
    }
}

// Whether flash_bwd_sm80.cu, which serves the backward pass of what flash_sm80.cu serves, can load dout.
inline bool is_dout_aligned(const AttnBackwardParams &p) {
    return uintptr_t(p.dout.data) % 16 == 0 && all_strides(p.dout) % 8 == 0;
}

// The kernel for GPUs of this name. Throws std::invalid_argument if there is none.
inline Kernel kernel_of(const std::string &name) {
    for (Kernel kernel : {Kernel::kSimt, Kernel::kSm80, Kernel::kSm90, Kernel::kDmma})
        if (name == kKernelNames[int(kernel)]) return kernel;
    throw std::invalid_argument("there is no kernel '" + name + "': a GPU has simt, sm80, sm90 and dmma");
}

struct Choice {
    Kernel kernel;
    Reason slow_because;  // what it is about 16-bit tensors that costs them the tensor cores
};

// Throws std::invalid_argument if the forced kernel cannot serve p.
inline Choice choose_kernel(const AttnParams &p, Gpu gpu, std::optional<Kernel> forced) {
    if (forced) {
        if (const Reason reason = why_not(*forced, p, gpu))
            throw std::invalid_argument(std::string("the forced kernel ") + kKernelNames[int(*forced)] +
                                        " cannot serve: " + reason.text());
        return {*forced, {}};
    }
    if (!why_not_sm90(p, gpu)) return {Kernel::kSm90, {}};
    const Reason not_sm80 = why_not_sm80(p, gpu);
    if (!not_sm80) return {Kernel::kSm80, {}};
    // Up to 32 flash.cu multiplies less of what pads head_dim to 64.
    if (gpu.fast_fp64 && p.head_dim > 32 && !why_not_dmma(p, gpu)) return {Kernel::kDmma, {}};
    const bool is_expected = gpu.capability < 80 || p.dtype == DType::kFloat32;
    return {Kernel::kSimt, is_expected ? Reason{} : not_sm80};
}

// The same of the backward pass, of which sm90 and dmma have none: sm80 and simt serve what they serve.
inline Choice choose_kernel(const AttnBackwardParams &p, Gpu gpu, std::optional<Kernel> forced) {
    auto backward_of = [](Kernel kernel) {
        return kernel == Kernel::kSm90 ? Kernel::kSm80 : kernel == Kernel::kDmma ? Kernel::kSimt : kernel;
    };
    const AttnParams &forward = p;
    if (forced) forced = backward_of(*forced);
    const Choice choice = choose_kernel(forward, gpu, forced);
    return {backward_of(choice.kernel), choice.slow_because};
}
