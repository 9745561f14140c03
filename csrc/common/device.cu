// The answers of device.h, from the CUDA runtime.
#include "common/device.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <utility>

#include "common/launch.h"

// ask(device) for the current device, asked once for each device. No answer is 0.
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

__global__ void probe() {}  // the build has every kernel for the same architectures

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
    auto has_driver = [](int) {
        int driver;
        device::check_cuda(cudaDriverGetVersion(&driver));
        return 1 + (driver >= 12030);
    };
    return compute_capability() >= 90 && once_per_device(has_driver) == 2;
}
int max_cluster() {
    return once_per_device([](int device) {
        const int bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);  // one block each
        device::check_cuda(cudaFuncSetAttribute(probe, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        cudaLaunchAttribute cluster{.id = cudaLaunchAttributeClusterDimension};
        cudaLaunchConfig_t config{.blockDim = dim3(32), .dynamicSmemBytes = size_t(bytes), .attrs = &cluster,
                                  .numAttrs = 1};
        int blocks = 8;
        for (int clusters = 0; blocks > 2; blocks /= 2) {
            cluster.val.clusterDim = {unsigned(blocks), 1, 1}, config.gridDim = dim3(blocks);
            if (cudaOccupancyMaxActiveClusters(&clusters, probe, &config) == cudaSuccess && clusters > 0) break;
            cudaGetLastError();  // forgets an error
        }
        return blocks;  // two multiprocessors are always neighbours
    });
}
void allow_shared_memory(const void *kernel, int bytes) {  // the runtime takes half a microsecond to be told again
    static std::mutex mutex;
    static std::map<std::pair<int, const void *>, int> allowed;
    int device;
    device::check_cuda(cudaGetDevice(&device));
    const std::lock_guard lock(mutex);
    if (int &known = allowed[{device, kernel}]; known != bytes) {
        device::check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        known = bytes;
    }
}
size_t max_shared_memory() {
    return once_per_device([](int device) { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device); });
}
