// The memory of counters.h.
#include "common/counters.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "common/launch.h"

// 4 MB that are 0 when the library is loaded.
constexpr int64_t kNumCounters = 1 << 20;
static __device__ int counters[kNumCounters];

int *zeroed_counters(int64_t count, void *stream) {
    struct Slice { int64_t begin = 0, size = 0; };
    struct Dealt { int *base = nullptr; int64_t count = 0; };
    // Device, stream, capture or 0. A stream is known by its number, since its handle may be used again. Under capture,
    // where the runtime does not tell the number, the handle will do: it stays the stream's until the capture ends.
    using Owner = std::tuple<int, unsigned long long, unsigned long long>;
    static std::mutex mutex;
    static std::map<int, Dealt> dealt;  // by device
    static std::map<Owner, Slice> slices;
    const auto handle = static_cast<cudaStream_t>(stream);
    if (handle == cudaStreamPerThread) return nullptr;  // one handle for many streams
    Owner owner;
    auto &[device, stream_id, capture_id] = owner;
    cudaStreamCaptureStatus status;
    device::check_cuda(cudaGetDevice(&device));
    device::check_cuda(cudaStreamGetCaptureInfo(handle, &status, &capture_id));
    if (status == cudaStreamCaptureStatusNone) {
        capture_id = 0;
        device::check_cuda(cudaStreamGetId(handle, &stream_id));
    } else {
        stream_id = reinterpret_cast<uintptr_t>(handle);
    }
    const std::lock_guard lock(mutex);
    Dealt &of_device = dealt[device];
    if (!of_device.base) device::check_cuda(cudaGetSymbolAddress(reinterpret_cast<void **>(&of_device.base), counters));
    if (const auto slice = slices.find(owner); slice != slices.end() && slice->second.size >= count)
        return of_device.base + slice->second.begin;
    // A stream gets twice as many as it needs now. A graph does not: graphs are many, and a replay needs no more.
    const int64_t least = (count + 31) / 32 * 32, left = kNumCounters - of_device.count;
    const int64_t size = capture_id ? least : std::min(std::max<int64_t>(2 * least, 1024), left);
    if (std::max(size, least) > left) return nullptr;
    slices[owner] = {of_device.count, size}, of_device.count += size;
    return of_device.base + slices[owner].begin;
}
