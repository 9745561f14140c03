// What the drivers share: numbers of 16 bits, memory of the GPU, or of the CPU by g++ and in the emulator, the options
// of the command line and the loop over the cases. Include it after the kernels, or their headers, and
// `using namespace device` or `host`.
//
//   ./a.out [case...]      all cases if none is named
//     --part=0/4           every fourth case from the first on
//     --forward-only-on-hopper    no backward passes of Hopper's kernels
//
// With MINIMAL_ATTN_EMULATED=1 a driver is linked with csrc's kernels and the emulator, and takes
//     --early=1 --late=2 --random=3 ...    when copies and products happen, and a seed
//     --without=17                         leave the 17th statement that synchronizes out (faults.py), and stop at the
//                                          first case that shows it
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef __CUDACC__
template <typename T> T encode(float x) { return T(x); }
template <typename T> double decode(T x) { return float(x); }
void *allocate(size_t bytes) { void *p; return check_cuda(cudaMalloc(&p, bytes)), p; }
void release(void *p) { cudaFree(p); }
void copy(void *to, const void *from, size_t bytes) { check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDefault)); }
#else
template <typename T> T encode(float x) { return from_float<T>(x); }
template <typename T> double decode(T x) { return to_float(x); }
void *allocate(size_t bytes) { return std::malloc(bytes); }
void release(void *p) { std::free(p); }
void copy(void *to, const void *from, size_t bytes) { if (bytes) std::memcpy(to, from, bytes); }
#endif
#if MINIMAL_ATTN_EMULATED
using emulator::wait_for_kernels;
#else
void wait_for_kernels() {}  // copy() does
#endif

constexpr DType f16 = DType::kFloat16, b16 = DType::kBFloat16;

// A multiple of 1/64 in [-2, 2): exact in every dtype.
template <typename T> T random_number(std::mt19937 &random) { return encode<T>((int(random() & 255) - 128) / 64.f); }

// Throws unless x, an element of `name`, is y up to a tolerance.
void expect(const char *name, int b, int h, int row, int col, double x, double y, double tolerance) {
    if (x == y || std::abs(x - y) <= tolerance) return;  // a NaN is neither
    char text[128];
    std::snprintf(text, sizeof(text), "%s[%d][%d][%d][%d] is %.8g, expected %.8g ± %.2g", name, b, h, row, col, x, y,
                  tolerance);
    throw std::runtime_error(text);
}

// Memory with ones in all bits is NaN, or must be written before it is read.
template <typename T> struct Memory {
    std::vector<T> host;
    T *device = nullptr;
    Memory() = default;
    explicit Memory(std::vector<T> x) : host(x), device(static_cast<T *>(allocate(bytes()))) { upload(); }
    Memory(const Memory &) = delete;
    ~Memory() { release(device); }
    size_t bytes() const { return host.size() * sizeof(T); }
    void upload() { copy(device, host.data(), bytes()); }
    void fetch() { wait_for_kernels(), copy(host.data(), device, bytes()); }
    void make_nan() { std::memset(static_cast<void *>(host.data()), 0xff, bytes()), upload(); }
};

bool forward_only_on_hopper = false;
size_t part = 0, parts = 1;
std::vector<std::string> schedules;

// By "--late=7" and the like, on a GPU with so much shared memory. There are few SMs, so that a persistent block takes
// several tiles.
void choose_schedule([[maybe_unused]] const std::string &name, [[maybe_unused]] size_t shared_memory) {
#if MINIMAL_ATTN_EMULATED
    const unsigned seed = std::stoul(name.substr(name.find('=') + 1));
    const auto mode = name.starts_with("--early")  ? emulator::Mode::kEarly
                      : name.starts_with("--late") ? emulator::Mode::kLate
                                                   : emulator::Mode::kRandom;
    emulator::schedule = {mode, seed};
    emulator::gpu = {.num_sms = int(seed % 4) + 1, .max_shared_memory = shared_memory};
#endif
}

// Calls f with the name of each schedule; what it throws then says by which.
void for_schedules(const std::vector<std::string> &names, auto f) {
    for (const std::string &name : names) try {
            f(name);
        } catch (const std::exception &error) {
            throw std::runtime_error(name + ": " + error.what());
        }
}

bool take_option(const std::string &argument) {
    const std::string value = argument.substr(argument.find('=') + 1);
    if (argument == "--forward-only-on-hopper") forward_only_on_hopper = true;
    else if (argument.starts_with("--part="))
        part = std::stoul(value), parts = std::stoul(value.substr(value.find('/') + 1));
#if MINIMAL_ATTN_EMULATED
    else if (argument.starts_with("--without=")) emulator::left_out = std::stoi(value);
    else if (argument.starts_with("--")) schedules.push_back(argument);
#endif
    else return false;
    return true;
}

// Runs the cases that are named, or all, as far as they can run here. Returns the exit status.
template <typename Case, typename CanRun, typename Run>
int run_cases(int argc, char **argv, const std::vector<Case> &cases, CanRun can_run, Run run) {
    std::vector<std::string> names(argv + 1, argv + argc);
    std::erase_if(names, take_option);
#if MINIMAL_ATTN_EMULATED
    if (schedules.empty()) schedules = {"--early=1", "--late=2", "--random=3"};
#else
    schedules = {"here"};
#endif
    size_t found = 0, passed = 0, failed = 0;
    for (const Case &c : cases) {
        if (!names.empty() && !std::count(names.begin(), names.end(), c.name)) continue;
        if (found++ % parts != part || !can_run(c)) continue;
        try {
            run(c);
            passed++;
        } catch (const std::exception &error) {
            std::printf("%s: %s\n", c.name, error.what());
            failed++;
        }
#if MINIMAL_ATTN_EMULATED
        if (failed && emulator::left_out >= 0) break;
#endif
    }
    std::printf("%zu passed, %zu failed\n", passed, failed);
    return failed > 0 || found < std::max<size_t>(1, names.size());  // a case is named that there is not
}
