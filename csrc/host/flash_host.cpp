// flash.cu for the CPU: host/cuda.h stands in for CUDA, and namespace simt becomes host.
#include "host/cuda.h"
#define simt host
#include "flash.cu"
