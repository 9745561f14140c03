// ptx/cluster.cuh of csrc for the emulator.
#pragma once

#include "ptx/sm90.cuh"

namespace ptx {

void tma_load_both(void *to, const CUtensorMap &map, Barrier &barrier, int c0, int c1, int c2, int c3);
void mbarrier_arrive(Barrier &barrier, int rank);
void copy_to_block(void *to, const void *from, int bytes, Barrier &barrier, int rank);
void cluster_sync();
inline void cluster_sync_relaxed() { cluster_sync(); }
void load_from_block(void *to, const void *from, int bytes, int rank);
template <typename X> X load_from_block(const X &from, int rank) {
    X x;
    load_from_block(&x, &from, sizeof(X), rank);
    return x;
}

}  // namespace ptx
