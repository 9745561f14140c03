// device.h's answers, from the CUDA runtime.
//
// Read next: sequence.cuh, the first of what all kernels share.
#include "device.h"

#include <algorithm>
#include <atomic>

#include "launch.h"

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
size_t max_shared_memory() {
    return once_per_device([](int device) { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device); });
}
