// The kernels of a forward pass and of caches for the CPU: host/cuda.h stands in for CUDA, namespace simt becomes host.
#include "host/cuda.h"
#define simt host
#include "flash.cu"
#include "simt/append.cu"
