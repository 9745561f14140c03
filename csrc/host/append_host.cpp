// append.cu for the CPU, see flash_host.cpp.
#include "host/cuda.h"
#define simt host
#include "simt/append.cu"
