// ptx/cluster.cuh of csrc for the emulator.
#pragma once

#include "ptx/sm90.cuh"

namespace ptx {

void tma_load_both(void *to, const CUtensorMap &map, Barrier &barrier, int c0, int c1, int c2, int c3);
void mbarrier_arrive(Barrier &barrier, int rank);
void copy_to_block(void *to, const void *from, int bytes, Barrier &barrier, int rank);
void cluster_sync();
inline void cluster_sync_relaxed() { cluster_sync(); }
void cluster_arrive_relaxed();
void cluster_wait();
int load_from_block(const int &from, int rank);
void store_to_block(void *to, const void *from, int bytes, Barrier &barrier, int rank);
template <typename X> void store_to_block(X &to, const X &x, Barrier &barrier, int rank) {
    store_to_block(&to, &x, sizeof(X), barrier, rank);
}

}  // namespace ptx
