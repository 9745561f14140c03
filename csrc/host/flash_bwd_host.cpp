// The backward kernels for the CPU, see flash_host.cpp. Two files compile in half the time.
#include "host/cuda.h"
#define simt host
#include "simt/flash_bwd.cu"
#include "simt/flash_bwd_bias.cu"
