// The state of a block of threads: shared memory, barriers, the copies of its threads, its warps and their products.
// Plain data, new for every block.
//
// Read next: instructions.cpp and products.cpp, what works on it.
#pragma once

#include <cstdlib>
#include <list>
#include <map>

#include "ptx/cluster.cuh"
#include "ptx/dmma.cuh"
#include "ptx/memory.cuh"
#include "ptx/sm90.cuh"
#include "scheduler.h"

namespace emulator {

// Shared memory as it looks to ordinary loads and stores, and to TMA and wgmma, the async proxy: what is stored gets
// there with the thread's next fence.proxy.async. NaN at the start, in any dtype.
struct SharedMemory {
    static constexpr uint32_t kFirst = 1024;  // its first address; what is before belongs to the system
    static constexpr uint32_t kMaxBytes = 227 << 10;

    struct Free { void operator()(char *p) const { std::free(p); } };
    using View = std::unique_ptr<char, Free>;
    uint32_t bytes;
    View generic, async;
    std::vector<std::vector<uint32_t>> unfenced;  // by thread, addresses of 16 bytes each

    SharedMemory(int threads, size_t size)
        : bytes(uint32_t(size)), generic(new_view()), async(new_view()), unfenced(threads) {
        if (size > kMaxBytes) fail("%zu bytes of shared memory, of %u", size, kMaxBytes);
    }
    View new_view() const {
        char *p = static_cast<char *>(std::aligned_alloc(1024, (bytes + 1023) / 1024 * 1024));
        std::memset(p, 0xff, bytes);
        return View(p);
    }

    bool has(const void *p) const { return p >= generic.get() && p < generic.get() + bytes; }
    uint32_t address(const void *p) const {
        if (!has(p)) fail("the address of something that is not in shared memory");
        return kFirst + uint32_t(static_cast<const char *>(p) - generic.get());
    }
    // In a view, `size` bytes from an address on, all of them inside.
    char *at(const View &view, uint32_t address, uint32_t size) const {
        if (address < kFirst || address + size > kFirst + bytes)
            fail("shared memory at %#x, of %#x to %#x", address, kFirst, kFirst + bytes);
        return view.get() + (address - kFirst);
    }
};

// Where eight rows of 128, 64 or 32 bytes are a pattern, the address of 16 bytes has bits 4 and up, as many as count
// them in a row, xored with bits 7 and up. TMA and wgmma do the same.
inline uint32_t swizzled(uint32_t address, uint32_t row_bytes) { return address ^ (address >> 3 & (row_bytes - 16)); }

// barrier.sync.
struct NamedBarrier {
    int threads = 0, arrived = 0;
    uint32_t generation = 0;
};

struct MBarrier {
    int count, pending;  // arrivals a phase, and how many of them are still to come
    unsigned thread;     // that initialised it
    bool is_fenced = false;
    int tx_bytes = 0;
    uint32_t phase = 0;

    void settle() {
        if (pending == 0 && tx_bytes == 0) pending = count, phase++;
    }
};

// Copies from shared memory to tensors, of a thread.
struct Stores {
    uint32_t issued = 0, read = 0, awaited = 0;
};

// Copies by cp.async of a thread, in groups counted from 0 on: those up to `awaited` have been waited for.
struct Copies {
    struct Copy {
        uint32_t group, to;
        const void *from;  // nullptr: zeros
        uint32_t bytes;
    };
    std::vector<Copy> under_way;
    std::vector<Copy> unfenced;  // of 16 bytes, not awaited yet: a fence.proxy.async has no effect on them
    uint32_t committed = 0, awaited = 0, end = 0;  // end: of the last group with a copy in it
};

// A thread's last read by ld.acquire.
struct Acquired {
    const int *from = nullptr;
    int value;
};

// 16 rows of the accumulators of some products of a warp. Until the warp has waited for the last of them, the registers
// are NaN and this is what they will be.
struct Accumulators {
    float (*registers[32])[4];  // of each lane, [tiles][4]
    int tiles;
    uint32_t end;  // number of products up to the last that adds to them
    float value[16][256];
};

// Where 32 lanes meet: shuffles, and all instructions that are `.sync`.
struct Meeting {
    const char *what = nullptr;
    int lanes = 0;
    uint32_t number = 0;
    void *brought[32];
};

struct Warp {
    Meeting meeting;
    int registers;  // a thread
    // Products, counted from 0 on, in the order in which they are issued and run.
    uint32_t issued = 0, run = 0, awaited = 0;
    std::vector<uint32_t> groups;  // where each ends
    bool may_multiply = false;     // wgmma.fence has come since registers may have been written
    bool is_slow;                  // as an event, the group that is being issued
    std::list<Accumulators> accumulators;
    std::vector<std::pair<uint32_t, const void *>> operands;  // A in registers of lane 0, and the product that reads it
};

struct Block {
    static constexpr int kRegisters = 1 << 16;

    SharedMemory shared;
    std::map<uint32_t, MBarrier> mbarriers;  // by address
    NamedBarrier barriers[16], cluster;  // barrier.cluster is that of rank 0
    std::vector<bool> has_arrived;               // by thread: at barrier.cluster,
    std::vector<uint32_t> cluster_generation;    // and when
    std::vector<Warp> warps;
    std::vector<Stores> stores;      // by thread
    std::vector<Copies> copies;      // by thread
    std::vector<Acquired> acquired;  // by thread
    std::vector<std::vector<Product>> products;  // by warpgroup
    uint32_t free_registers = 0;
    bool lets_next_begin = false, has_ended = false;

    Block(int threads, size_t shared_bytes)
        : shared(threads, shared_bytes), has_arrived(threads), cluster_generation(threads), warps(threads / 32),
          stores(threads), copies(threads), acquired(threads),
          products((threads + 127) / 128) {
        for (Warp &warp : warps) warp.registers = kRegisters / threads / 8 * 8;
    }
};

inline Warp &this_warp() { return block->warps[threadIdx.x / 32]; }

}  // namespace emulator
