// Answers of the CUDA runtime to the questions of device.h, and the memory of its counters.
#include "common/device.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <tuple>

#include "common/launch.h"

// ask(device), which is not 0, of the current device: asked once for each.
template <typename Ask> static int once_per_device(Ask ask) {
    static std::atomic<int> known[64];
    int device;
    device::check_cuda(cudaGetDevice(&device));
    if (device >= 64) return ask(device);
    if (!known[device]) known[device] = ask(device);
    return known[device];
}

static int attribute(cudaDeviceAttr name, int device) {
    int value;
    device::check_cuda(cudaDeviceGetAttribute(&value, name, device));
    return value;
}

__global__ void probe() {}  // the build holds the same architectures of every kernel

int compute_capability() {
    return once_per_device([](int device) {
        cudaFuncAttributes kernel;
        device::check_cuda(cudaFuncGetAttributes(&kernel, probe));
        const int major = attribute(cudaDevAttrComputeCapabilityMajor, device);
        return std::min(10 * major + attribute(cudaDevAttrComputeCapabilityMinor, device), kernel.ptxVersion);
    });
}
bool has_fast_fp64() {
    auto ratio = [](int device) { return attribute(cudaDevAttrSingleToDoublePrecisionPerfRatio, device); };
    return once_per_device(ratio) <= 2;
}
int num_sms() {
    return once_per_device([](int device) { return attribute(cudaDevAttrMultiProcessorCount, device); });
}
bool can_launch_early() {
    return once_per_device([](int device) {
        int driver;
        device::check_cuda(cudaDriverGetVersion(&driver));
        return 1 + (attribute(cudaDevAttrComputeCapabilityMajor, device) >= 9 && driver >= 12030);
    }) == 2;
}
size_t max_shared_memory() {
    return once_per_device([](int device) { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device); });
}

// 4 MB that are 0 when the library is loaded. A slice of them belongs to its stream or graph for ever.
constexpr int64_t kNumCounters = 1 << 20;
static __device__ int counters[kNumCounters];

int *zeroed_counters(int64_t count, void *stream) {
    struct Slice { int64_t begin = 0, size = 0; };
    struct Dealt { int *base = nullptr; int64_t count = 0; };
    using Owner = std::tuple<int, cudaStream_t, unsigned long long>;  // device, stream, number of the capture or 0
    static std::mutex mutex;
    static std::map<int, Dealt> dealt;  // by device
    static std::map<Owner, Slice> slices;
    Owner owner{0, static_cast<cudaStream_t>(stream), 0};
    if (std::get<1>(owner) == cudaStreamPerThread) return nullptr;  // one name for many streams
    device::check_cuda(cudaGetDevice(&std::get<0>(owner)));
    cudaStreamCaptureStatus status;
    device::check_cuda(cudaStreamGetCaptureInfo(std::get<1>(owner), &status, &std::get<2>(owner)));
    if (status == cudaStreamCaptureStatusNone) std::get<2>(owner) = 0;
    const std::lock_guard lock(mutex);
    Dealt &of_device = dealt[std::get<0>(owner)];
    if (!of_device.base) device::check_cuda(cudaGetSymbolAddress(reinterpret_cast<void **>(&of_device.base), counters));
    if (const auto slice = slices.find(owner); slice != slices.end() && slice->second.size >= count)
        return of_device.base + slice->second.begin;
    // A stream gets twice as many as it needs now. Graphs are many, and each needs the same number in every replay.
    const int64_t least = (count + 31) / 32 * 32, left = kNumCounters - of_device.count;
    const int64_t size = std::get<2>(owner) ? least : std::min(std::max<int64_t>(2 * least, 1024), left);
    if (std::max(size, least) > left) return nullptr;
    slices[owner] = {of_device.count, size}, of_device.count += size;
    return of_device.base + slices[owner].begin;
}
