// The kernels of csrc on small cases and without torch, for tools that see more of a program of its own: ASan, UBSan
// and TSan on the CPU, compute-sanitizer on the GPU, the emulator. Every buffer is an allocation with nothing to spare;
// every result is compared with attention in double precision (driver_reference.h). The cases are in driver_cases.h.
// test_sanitizers.py builds and runs this for the CPU and the GPU, test_emulator.py for the emulator. The options are
// in driver_common.h:
//
//   g++ -std=c++20 -pthread -Icsrc tests/emulator/drivers/driver.cpp     or     nvcc -std=c++20 -Icsrc -x cu ...
//
// There the kernels are included; for the emulator they are linked.
#include <list>
#include <map>

#if MINIMAL_ATTN_EMULATED
#include "common/device.h"
#include "flash_bwd.h"
#include "common/launch.h"
using namespace device;
#elif defined(__CUDACC__)
#include "common/device.cu"
#include "flash.cu"
#include "sm80/flash_sm80.cu"
#include "sm90/flash_sm90.cu"
#include "sm90/mods/flash_dropout_sm90.cu"
#include "sm90/mods/flash_masked_sm90.cu"
#include "sm90/mods/flash_max_logits_sm90.cu"
#include "sm90/mods/flash_mods_sm90.cu"
#include "sm90/flash_dmma.cu"
#include "simt/flash_bwd.cu"
#include "simt/flash_bwd_bias.cu"
#include "sm80/flash_bwd_sm80.cu"
#include "sm90/bwd/flash_bwd_sm90.cu"
#include "sm90/bwd/flash_bwd_wide_sm90.cu"
using namespace simt;
#else
#include "host/flash_host.cpp"  // from here on simt reads host
#include "host/flash_bwd_host.cpp"
using namespace simt;
#endif
#if defined(__CUDACC__) || MINIMAL_ATTN_EMULATED
#define HAS_GPU 1  // a real one, or that of the emulator
#endif

#include "driver_common.h"
#include "driver_cases.h"
#include "driver_reference.h"

void forward(const Case &c, const AttnParams &p) {
#if HAS_GPU
    const bool has_more = p.has_score_mods() || p.attention_chunk || p.block_mask.rows;  // than sm90's forward pass with dropout knows
    if (is_sm80(c) || (c.tiling == kSm90 && c.dropout_p > 0 && has_more)) return sm80::flash_forward(p);
    if (c.tiling == kSm90) return sm90::flash_forward(p);
    if (c.tiling == kDmma) return dmma::flash_forward(p);
#endif
    simt::flash_forward(p);
}

void backward(const Case &c, const AttnBackwardParams &p) {
#if HAS_GPU
    if (is_sm80(c)) return sm80::flash_backward(p);
    if (is_sm90_backward(c)) return sm90::flash_backward(p);
#endif
    simt::flash_backward(p);
}

// Hopper's kernels are for the forward pass; simt's backward pass follows them. Not in the emulator, where it is slow
// and other cases have it.
bool has_backward(const Case &c) {
    if (forward_only_on_hopper && needs_hopper(c)) return false;
#if MINIMAL_ATTN_EMULATED
    if (needs_hopper(c) && !is_sm90_backward(c)) return false;
#endif
    return !c.is_packed() || c.seqused_k.empty();  // no gradients of keys that overlap
}

template <typename T> void run_and_check(Tensors<T> &x, Reference<T> &expected, double epsilon) {
    const Case &c = x.c;
    // Sums are fp32; tensor cores take P and dS rounded to T.
    const bool is_rounded = is_sm80(c) || c.tiling == kSm90;
    const double error = is_rounded ? epsilon : 2e-6;
    double lse_error = 5e-6;
#if !MINIMAL_ATTN_EMULATED
    if (is_rounded && c.softcap) lse_error = 0x1p-11;  // of tanh_approx, relative to each score
#endif
    forward(c, x.p);
    check(x.lse, expected.lse, lse_error, 0);
    if (c.has_max) check(x.max_logits, expected.max_logits, lse_error, 0);
    check(x.o, expected.out, error, epsilon);
    if (!has_backward(c)) return;
    backward(c, x.p);
    if (expected.delta.magnitude == std::vector<double>(expected.delta.magnitude.size())) expected.backward();
    check(x.delta, expected.delta, 2e-6, 0);
    if (x.p.lse_log2) check(x.lse_log2, expected.lse_log2, lse_error, 0);
    check(x.dq, expected.dq, error, epsilon);
    check(x.dk, expected.dk, error, epsilon);
    check(x.dv, expected.dv, error, epsilon);
    if (x.p.dbias.data) check(*x.dbias, expected.dbias, 2e-5, 0);
}

// By every schedule, on a GPU with shared memory for the tiles that the case is about. All results must have the same
// bits, but for sums in any order.
template <typename T> void run(const Case &c, double epsilon) {
    const size_t shared_memory = c.tiling == kNarrow ? 64 << 10 : c.tiling == kSm80Narrow ? 99 << 10 : 227 << 10;
    choose_schedule(schedules[0], shared_memory);
    Tensors<T> x(c);
    Reference<T> expected{x};
    expected.forward();
    std::map<std::string, std::string> bits;
    for_schedules(schedules, [&](const std::string &name) {
        choose_schedule(name, shared_memory);
        auto make_nan = [](const char *, auto &result) { result.make_nan(); };
        x.for_forward(make_nan), x.for_backward(make_nan);
        run_and_check(x, expected, epsilon);
        x.tile_counter.fetch();
        if (x.tile_counter.host != std::vector{0, 0}) throw std::runtime_error("the tile counter is not 0");
        auto compare = [&](const std::string &result, auto &buffer) {
            if (result == "dq" && !x.p.deterministic) return;
            const std::string now(reinterpret_cast<const char *>(buffer.host.data()), buffer.bytes());
            if (bits.emplace(result, now).first->second != now)
                throw std::runtime_error(result + " has other bits than by " + schedules[0]);
        };
        x.for_forward(compare), x.for_backward(compare);
        if (!x.workspace || !x.p.deterministic) return;
        x.workspace->fetch();
        if (c.tiling == kSm90) std::fill_n(x.workspace->host.begin(), 128, 0);  // depends on the schedule
        compare("dq before it is rounded", *x.workspace);
    });
}

void run(const Case &c) {
    if (c.dtype == f32) return run<float>(c, 0x1p-23);
    c.dtype == f16 ? run<__half>(c, 0x1p-10) : run<__nv_bfloat16>(c, 0x1p-7);
}

// The emulator has as little shared memory as tiles are for.
bool can_run([[maybe_unused]] const Case &c) {
#if MINIMAL_ATTN_EMULATED
    return true;
#elif defined(__CUDACC__)
    return !is_narrow(c) && (!needs_hopper(c) || compute_capability() == 90);
#else
    return c.tiling == kBest;
#endif
}

int main(int argc, char **argv) {
    return run_cases(argc, argv, cases, can_run, [](const Case &c) { run(c); });
}
