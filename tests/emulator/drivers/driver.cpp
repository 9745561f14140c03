// The kernels of csrc on small cases and without torch, for tools that see more of a program of its own: ASan, UBSan
// and TSan on the CPU, compute-sanitizer on the GPU, the emulator. Every buffer is an allocation with nothing to spare;
// every result is compared with attention in double precision (driver_reference.h). The cases are in driver_cases.h.
// test_sanitizers.py builds and runs this for the CPU and the GPU, test_emulator.py for the emulator:
//
//   g++ -std=c++20 -pthread -Icsrc tests/emulator/drivers/driver.cpp     or     nvcc -std=c++20 -Icsrc -x cu tests/emulator/drivers/driver.cpp
//   ./a.out [case...]      all cases if none is named
//     --overrun            declare one key row more than is allocated: a fault that the tools must see
//     --valid-only         leave the q, k and v that must not be read uninitialized, for initcheck, instead of NaN
//     --part=0/4           every fourth case from the first on
//     --forward-only       no backward passes
//
// There the kernels are included, not linked, so that every size of tiles can be called on any GPU and with short
// sequences. With MINIMAL_ATTN_LINKED=1 the driver is linked with the objects of csrc's kernels, so that a change of
// one compiles that one alone; cases that name their tiles fail there. With MINIMAL_ATTN_EMULATED=1 it is linked as
// well, and with the emulator; then it takes
//     --early=1 --late=2 --random=3 ...    when copies and products happen, and a seed
//     --without=17                         leave the 17th statement that synchronizes out (faults.py), and stop at the
//                                          first case that shows it
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#if MINIMAL_ATTN_LINKED || MINIMAL_ATTN_EMULATED
#include "common/device.h"
#include "flash_bwd.h"
#include "common/launch.h"
using namespace device;
template <typename> using Sum = float;
#elif defined(__CUDACC__)
#include "common/device.cu"
#include "flash.cu"
#include "sm80/flash_sm80.cu"
#include "sm90/flash_sm90.cu"
#include "sm90/mods/flash_dropout_sm90.cu"
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

#include "driver_memory.h"
#include "driver_cases.h"
#include "driver_reference.h"

// By the tiles that a case names, on any GPU: those for less shared memory, and those for long sequences. The emulator
// has as little shared memory instead.
#if MINIMAL_ATTN_LINKED || MINIMAL_ATTN_EMULATED
template <typename T> void named_forward(const Case &, const AttnParams &) {
    throw std::runtime_error("a linked driver has no tiles to name");
}
template <typename T> void narrow_backward(const Case &c, const AttnBackwardParams &p) { named_forward<T>(c, p); }
#else
template <typename T> void named_forward(const Case &c, const AttnParams &p) {
    if constexpr (!std::is_same_v<T, double>)
        if (c.tiling == kNarrow)
            return c.max_head_dim() <= 128 ? launch_fwd<T, Tiles128Narrow>(p) : launch_fwd<T, Tiles256Narrow>(p);
    if constexpr (std::is_same_v<T, float>) {
        if (c.max_head_dim() <= 64) return launch_fwd<T, Tiles64Wide>(p);
        return c.max_head_dim() <= 128 ? launch_fwd<T, Tiles128Wide>(p) : launch_fwd<T, Tiles256Wide>(p);
    }
    throw std::runtime_error("there are no such tiles of this type");
}
#ifdef __CUDACC__
template <typename T> void narrow_backward(const Case &c, const AttnBackwardParams &p) {
    if constexpr (sizeof(T) == 2) {
        simt::preprocess_backward(p);
        c.max_head_dim() <= 128 ? sm80::launch_bwd<T, sm80::BwdShape128Narrow>(p)
                          : sm80::launch_bwd<T, sm80::BwdShape256Narrow>(p);
    }
}
#endif
#endif

#if MINIMAL_ATTN_EMULATED
std::vector<std::string> schedules;

// "--late=7" and the like, on a GPU with shared memory for the tiles that a case is about. There are few SMs, so that a
// persistent block takes several tiles.
void choose_schedule(const std::string &name, const Case &c) {
    const unsigned seed = std::stoul(name.substr(name.find('=') + 1));
    const auto mode = name.starts_with("--early")  ? emulator::Mode::kEarly
                      : name.starts_with("--late") ? emulator::Mode::kLate
                                                   : emulator::Mode::kRandom;
    const size_t shared_memory = c.tiling == kNarrow ? 64 << 10 : c.tiling == kSm80Narrow ? 99 << 10 : 227 << 10;
    emulator::schedule = {mode, seed};
    emulator::gpu = {.num_sms = int(seed % 4) + 1, .max_shared_memory = shared_memory};
}
bool names_tiles(const Case &) { return false; }
#else
bool names_tiles(const Case &c) { return c.tiling == kNarrow || c.tiling == kWide || c.tiling == kSm80Narrow; }
#endif

template <typename T> void forward(const Case &c, const AttnParams &p) {
#if HAS_GPU
    if (is_sm80(c) || (c.tiling == kSm90 && c.dropout_p > 0 && p.has_score_mods())) return sm80::flash_forward(p);
    if (c.tiling == kSm90) return sm90::flash_forward(p);
    if (c.tiling == kDmma) return dmma::flash_forward(p);
#endif
    names_tiles(c) ? named_forward<T>(c, p) : simt::flash_forward(p);
}

template <typename T> void backward(const Case &c, const AttnBackwardParams &p) {
#if HAS_GPU
    if (is_sm80(c)) return names_tiles(c) ? narrow_backward<T>(c, p) : sm80::flash_backward(p);
    if (is_sm90_backward(c)) return sm90::flash_backward(p);
#endif
    simt::flash_backward(p);
}

// Hopper's kernels are for the forward pass; simt's backward pass follows them. Not in the emulator, where it is slow
// and other cases have it.
bool forward_only = false;
bool has_backward(const Case &c) {
    if (forward_only) return false;
#if MINIMAL_ATTN_EMULATED
    if (needs_hopper(c) && !is_sm90_backward(c)) return false;
#endif
    return !c.is_packed() || c.seqused_k.empty();  // no gradients of keys that overlap
}

template <typename T> void run_and_check(Tensors<T> &x, Reference<T> &expected, double epsilon) {
    const Case &c = x.c;
    // Sums are fp32, or fp64; tensor cores take P and dS rounded to T.
    const bool is_rounded = is_sm80(c) || c.tiling == kSm90;
    const double error = c.dtype == f64 ? 1e-13 : is_rounded ? epsilon : 2e-6;
    double lse_error = c.dtype == f64 ? 1e-13 : 5e-6;
#if !MINIMAL_ATTN_EMULATED
    if (is_rounded && c.softcap) lse_error = 0x1p-11;  // of tanh_approx, relative to each score
#endif
    forward<T>(c, x.p);
    check(x.lse, expected.lse, lse_error, 0);
    check(x.o, expected.out, error, epsilon);
    if (!has_backward(c)) return;
    backward<T>(c, x.p);
    if (expected.delta.magnitude == std::vector<double>(expected.delta.magnitude.size())) expected.backward();
    check(x.delta, expected.delta, 2e-6, 0);
    if (x.p.lse_log2) check(x.lse_log2, expected.lse_log2, lse_error, 0);
    check(x.dq, expected.dq, error, epsilon);
    check(x.dk, expected.dk, error, epsilon);
    check(x.dv, expected.dv, error, epsilon);
    if (x.p.dbias.data) check(*x.dbias, expected.dbias, 2e-5, 0);
}

#if MINIMAL_ATTN_EMULATED
// By every schedule. Their results must have the same bits, but for sums in any order.
template <typename T> void run(const Case &c, double epsilon) {
    choose_schedule(schedules[0], c);
    Tensors<T> x(c);
    Reference<T> expected{x};
    expected.forward();
    std::map<std::string, std::string> bits;
    for (const std::string &name : schedules) try {
            choose_schedule(name, c);
            auto make_nan = [](const char *, auto &result) { result.make_nan(); };
            x.for_forward(make_nan), x.for_backward(make_nan);
            run_and_check(x, expected, epsilon);
            auto compare = [&](const std::string &result, auto &buffer) {
                if (result == "dq" && !x.p.deterministic) return;
                const std::string now(reinterpret_cast<const char *>(buffer.host.data()), buffer.bytes());
                if (bits.emplace(result, now).first->second != now)
                    throw std::runtime_error(result + " has other bits than by " + schedules[0]);
            };
            x.for_forward(compare), x.for_backward(compare);
            if (!x.workspace || !x.p.deterministic) continue;
            x.workspace->fetch();
            if (c.tiling == kSm90) std::fill_n(x.workspace->host.begin(), 128, 0);  // depends on the schedule
            compare("dq before it is rounded", *x.workspace);
        } catch (const std::exception &error) {
            throw std::runtime_error(name + ": " + error.what());
        }
}
#else
template <typename T> void run(const Case &c, double epsilon) {
    Tensors<T> x(c);
    Reference<T> expected{x};
    expected.forward();
    run_and_check(x, expected, epsilon);
}
#endif

void run(const Case &c) {
#if HAS_GPU
    if (c.dtype == f64) throw std::runtime_error("float64 is for the CPU");
#else
    if (c.dtype == f64) return run<double>(c, 0x1p-52);
#endif
    if (c.dtype == f32) return run<float>(c, 0x1p-23);
    c.dtype == f16 ? run<__half>(c, 0x1p-10) : run<__nv_bfloat16>(c, 0x1p-7);
}

// The cases that are named, or all.
std::vector<const Case *> selected(const std::vector<std::string> &names) {
    std::vector<const Case *> found;
    for (const Case &c : cases)
        if (names.empty() || std::count(names.begin(), names.end(), c.name)) found.push_back(&c);
    if (!names.empty() && found.size() != names.size()) throw std::runtime_error("a case is named that there is not");
    return found;
}

size_t part = 0, parts = 1;

bool take_option(const std::string &argument) {
    const std::string value = argument.substr(argument.find('=') + 1);
    if (argument == "--overrun") overrun = true;
    else if (argument == "--valid-only") valid_only = true;
    else if (argument == "--forward-only") forward_only = true;
    else if (argument.starts_with("--part="))
        part = std::stoul(value), parts = std::stoul(value.substr(value.find('/') + 1));
#if MINIMAL_ATTN_EMULATED
    else if (argument.starts_with("--without=")) emulator::left_out = std::stoi(value);
    else if (argument.starts_with("--")) schedules.push_back(argument);
#endif
    else return false;
    return true;
}

#if MINIMAL_ATTN_EMULATED
bool can_run(const Case &) { return true; }
bool is_enough(size_t failed) { return failed && emulator::left_out >= 0; }
#else
#ifdef __CUDACC__
bool can_run(const Case &c) { return !needs_hopper(c) || compute_capability() == 90; }
#else
bool can_run(const Case &) { return true; }
#endif
bool is_enough(size_t) { return false; }
#endif

int main(int argc, char **argv) {
    std::vector<std::string> names(argv + 1, argv + argc);
    std::erase_if(names, take_option);
#if MINIMAL_ATTN_EMULATED
    if (schedules.empty()) schedules = {"--early=1", "--late=2", "--random=3"};
#endif
    size_t passed = 0, failed = 0, i = 0;
    for (const Case *c : selected(names)) {
        if (i++ % parts != part || !can_run(*c)) continue;
        try {
            run(*c);
            passed++;
        } catch (const std::exception &error) {
            std::printf("%s: %s\n", c->name, error.what());
            failed++;
        }
        if (is_enough(failed)) break;
    }
    std::printf("%zu passed, %zu failed\n", passed, failed);
    return failed > 0;
}
