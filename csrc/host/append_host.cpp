// append.cu for the CPU, as flash_host.cpp has flash.cu.
#include "host/cuda.h"
#define simt host
#include "simt/append.cu"
