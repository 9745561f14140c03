// The emulator's instructions but for wgmma: the grid, warps that meet, barriers, TMA, registers that change hands.
//
// Read next: wgmma.cpp.
#include <cstdarg>
#include <cstdio>

#include "block.h"
#include "host_cuda.h"

namespace emulator {

void fail(const char *format, ...) {
    char text[512];
    const int prefix = std::snprintf(text, sizeof(text), "block %u, thread %u: ", blockIdx.x, threadIdx.x);
    va_list args;
    va_start(args, format);
    std::vsnprintf(text + prefix, sizeof(text) - prefix, format, args);
    va_end(args);
    throw std::runtime_error(text);
}

// The blocks of a grid run one after another.
void run_grid(int64_t blocks, int threads, size_t shared_bytes, void (*thread)(void *), void *args) {
    Scheduler threads_of_block(threads);
    gridDim.x = unsigned(blocks), blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        Block new_block(threads, shared_bytes);
        block = &new_block;
        threads_of_block.run([=] { thread(args); });
        if (threads_of_block.has_events()) fail("the block ends with copies or products under way");
        for (const auto &[address, barrier] : block->mbarriers)
            if (barrier.tx_bytes) fail("the block ends with %d bytes to come, barrier %#x", barrier.tx_bytes, address);
        for (int i = 0; i < threads; i++)
            if (block->stores[i].issued != block->stores[i].awaited)
                fail("the block ends with copies that thread %d has not waited for", i);
        for (size_t i = 0; i < block->warps.size(); i++) {
            const Warp &warp = block->warps[i];
            if (!warp.accumulators.empty()) fail("the block ends with products that warp %zu has not waited for", i);
            if (warp.issued != block->products[i / 4].size()) fail("warp %zu lacks products of its warpgroup", i);
        }
    }
}

void *shared_memory() { return block->shared.generic.get(); }

void stored_16_bytes(const void *to) {
    if (block->shared.has(to)) block->shared.unfenced[threadIdx.x].push_back(block->shared.address(to));
}

void meet(const char *what, void *mine, void (*act)(void *(&lanes)[32])) {
    Meeting &meeting = this_warp().meeting;
    if (meeting.lanes && std::strcmp(meeting.what, what))
        fail("%s, but other lanes of the warp are at %s", what, meeting.what);
    meeting.what = what, meeting.brought[threadIdx.x % 32] = mine;
    if (++meeting.lanes == 32) {
        act(meeting.brought);
        meeting.lanes = 0, meeting.number++;
    } else {
        auto wanted = [what] { return "its warp at " + std::string(what); };
        scheduler->wait(meeting.number, meeting.number, ~0u, wanted);
    }
}

// "barrier". A whole warp arrives.
struct Arrival {
    int id, threads;
    uint32_t generation = 0;
};
void arrive(void *(&lanes)[32]) {
    const int id = static_cast<Arrival *>(lanes[0])->id, threads = static_cast<Arrival *>(lanes[0])->threads;
    if (id < 0 || id >= 16 || threads <= 0 || threads % 32) fail("barrier %d for %d threads", id, threads);
    NamedBarrier &barrier = block->barriers[id];
    for (void *lane : lanes) static_cast<Arrival *>(lane)->generation = barrier.generation;
    if (barrier.arrived && barrier.threads != threads)
        fail("barrier %d for %d threads, but others have come for %d", id, threads, barrier.threads);
    barrier.threads = threads, barrier.arrived += 32;
    if (barrier.arrived == threads) barrier.arrived = 0, barrier.generation++;
}

void sync(const char *what, int id, int threads) {
    Arrival mine{id, threads};
    meet(what, &mine, arrive);
    const NamedBarrier &barrier = block->barriers[id];
    scheduler->wait(barrier.generation, mine.generation, ~0u, [id] {
        const NamedBarrier &barrier = block->barriers[id];
        return "barrier " + std::to_string(id) + ", where " + std::to_string(barrier.arrived) + " of " +
               std::to_string(barrier.threads) + " threads are";
    });
}

// ldmatrix and stmatrix: act(register of a lane, the two elements in shared memory that it holds). Lane l names where
// row l % 8 of matrix l / 8 lies; lane 4·r + c holds columns 2c and 2c + 1 of row r, a register for each matrix.
struct Matrices {
    uint32_t *x, row;
};
template <typename Act> void for_matrices(void *(&lanes)[32], Act act) {
    const SharedMemory &shared = block->shared;
    for (int i = 0; i < 32; i++) {
        const uint32_t row = static_cast<Matrices *>(lanes[i])->row;
        if (row % 16) fail("a row of a matrix at %#x, no multiple of 16", row);
        char *pairs = shared.at(shared.generic, row, 16);
        for (int c = 0; c < 4; c++) act(static_cast<Matrices *>(lanes[i % 8 * 4 + c])->x[i / 8], pairs + 4 * c);
    }
}

// "setmaxnreg". What a warp gives back is free for others; one that wants more waits until enough is.
void set_registers(const char *what, int per_thread) {
    meet(what, &per_thread, [](void *(&lanes)[32]) {
        const int wanted = *static_cast<int *>(lanes[0]);
        Warp &warp = this_warp();
        const int more = 32 * (wanted - warp.registers);
        const bool is_increase = std::strstr(warp.meeting.what, "inc");
        if (wanted % 8 || wanted < 24 || wanted > 256 || (is_increase ? more < 0 : more > 0))
            fail("%s from %d to %d", warp.meeting.what, warp.registers, wanted);
        while (more > int(block->free_registers))
            scheduler->wait(block->free_registers, block->free_registers, ~0u, [] { return "registers"; });
        block->free_registers -= more, warp.registers = wanted;
    });
}

}  // namespace emulator

namespace device {

float to_float(__half x) { return host::to_float(host::__half{x.bits}); }
float to_float(__nv_bfloat16 x) { return host::to_float(host::__nv_bfloat16{x.bits}); }
template <> float from_float(float x) { return x; }
template <> __half from_float(float x) { return {host::from_float<host::__half>(x).bits}; }
template <> __nv_bfloat16 from_float(float x) { return {host::from_float<host::__nv_bfloat16>(x).bits}; }

}  // namespace device

namespace ptx {

using namespace emulator;

uint32_t shared_address(const void *p) { return block->shared.address(p); }

void ldmatrix(uint32_t (&x)[4], uint32_t row) {
    Matrices mine{x, row};
    meet("ldmatrix", &mine, [](void *(&lanes)[32]) {
        for_matrices(lanes, [](uint32_t &x, const char *pair) { std::memcpy(&x, pair, 4); });
    });
}

// A row is stored by the lane that names it.
void stmatrix(const uint32_t (&x)[4], uint32_t row) {
    uint32_t copy[4] = {x[0], x[1], x[2], x[3]};
    Matrices mine{copy, row};
    meet("stmatrix", &mine, [](void *(&lanes)[32]) {
        for_matrices(lanes, [](const uint32_t &x, char *pair) { std::memcpy(pair, &x, 4); });
    });
    block->shared.unfenced[threadIdx.x].push_back(row);
    scheduler->pass();
}

// "mbarrier". The barriers are not in shared memory, but in block->mbarriers.
MBarrier &find(const Barrier &barrier) {
    const auto found = block->mbarriers.find(shared_address(&barrier));
    if (found == block->mbarriers.end()) fail("barrier %#x is not initialised", shared_address(&barrier));
    return found->second;
}

void mbarrier_init(Barrier &barrier, int count) {
    const uint32_t address = shared_address(&barrier);
    if (count <= 0) fail("barrier %#x is initialised for %d arrivals", address, count);
    if (!block->mbarriers.try_emplace(address, MBarrier{count, count, threadIdx.x}).second)
        fail("barrier %#x is initialised twice", address);
    scheduler->pass();
}

void mbarrier_arrive_expect_tx(Barrier &barrier, int bytes) {
    MBarrier &x = find(barrier);
    if (x.pending == 0) fail("barrier %#x: more arrivals than %d", shared_address(&barrier), x.count);
    x.pending--, x.tx_bytes += bytes;
    if (std::abs(x.tx_bytes) >= 1 << 20) fail("barrier %#x: %d bytes to come", shared_address(&barrier), x.tx_bytes);
    x.settle();
    scheduler->pass();
}

void mbarrier_arrive(Barrier &barrier) { mbarrier_arrive_expect_tx(barrier, 0); }

void mbarrier_wait(Barrier &barrier, uint32_t parity) {
    scheduler->wait(find(barrier).phase, parity, 1, [&barrier, parity] {
        const MBarrier &x = find(barrier);
        char text[128];
        std::snprintf(text, sizeof(text), "parity %u of barrier %#x, in phase %u with %d arrivals, %d bytes to come",
                      parity, shared_address(&barrier), x.phase, x.pending, x.tx_bytes);
        return std::string(text);
    });
}

void fence_mbarrier_init() {
    for (auto &[address, barrier] : block->mbarriers)
        if (barrier.thread == threadIdx.x) barrier.is_fenced = true;
}

void fence_proxy_async() {
    const SharedMemory &shared = block->shared;
    std::vector<uint32_t> &addresses = block->shared.unfenced[threadIdx.x];
    for (uint32_t address : addresses)
        std::memcpy(shared.at(shared.async, address, 16), shared.at(shared.generic, address, 16), 16);
    addresses.clear();
}

// act(address in shared memory, element in global memory) for the box of a tensor map that begins at some coordinates,
// and which lies in shared memory from `address` on. What is outside of the tensor is null.
template <typename Act> void for_box(uint32_t address, const CUtensorMap &map, const int (&begin)[4], Act act) {
    for (int row = 0; row < int(map.box[1]); row++)
        for (int col = 0; col < int(map.box[0]); col++, address += 2) {
            const int64_t at[] = {begin[0] + col, begin[1] + row, begin[2], begin[3]};
            const char *element = map.address;
            bool is_inside = true;
            for (int i = 0; i < 4; i++)
                is_inside &= at[i] >= 0 && at[i] < int64_t(map.sizes[i]), element += at[i] * int64_t(map.strides[i]);
            act(swizzled(address, map.swizzle_bytes), is_inside ? element : nullptr);
        }
}

// "cp.async.bulk.tensor". Returns the bytes of a box.
uint32_t check_box(uint32_t address, const CUtensorMap &map) {
    const uint32_t bytes = 2 * map.box[0] * map.box[1];
    if (address % (8 * map.swizzle_bytes))
        fail("TMA swizzles at %#x, no multiple of %d bytes", address, 8 * map.swizzle_bytes);
    if (map.box[2] != 1 || map.box[3] != 1) fail("a box of several heads or samples is not emulated");
    if (int(2 * map.box[0]) != map.swizzle_bytes) fail("a box of part of a pattern is not emulated");
    block->shared.at(block->shared.generic, address, bytes);
    return bytes;
}

// Until it is delivered, all of a box is NaN.
void tma_load(void *to, const CUtensorMap &map, Barrier &barrier, int c0, int c1, int c2, int c3) {
    MBarrier &full = find(barrier);
    const uint32_t address = shared_address(to), bytes = check_box(address, map);
    if (!full.is_fenced) fail("TMA counts at barrier %#x, which it may not see yet", shared_address(&barrier));
    const auto next = block->mbarriers.lower_bound(address);
    if (next != block->mbarriers.end() && next->first < address + bytes) fail("TMA copies to where a barrier is");
    const SharedMemory &shared = block->shared;
    for (const auto *view : {&shared.generic, &shared.async})
        std::memset(shared.at(*view, address, bytes), 0xff, bytes);
    scheduler->post({[] { return true; }, [=, &full, &shared, map = map] {
        for_box(address, map, {c0, c1, c2, c3}, [&](uint32_t to, const char *from) {
            for (const auto *view : {&shared.generic, &shared.async})
                from ? std::memcpy(shared.at(*view, to, 2), from, 2) : std::memset(shared.at(*view, to, 2), 0, 2);
        });
        full.tx_bytes -= bytes, full.settle();
    }, scheduler->one_in(4)});
    scheduler->pass();
}

// It reads at any time until its thread has waited for it.
void tma_store(const void *from, const CUtensorMap &map, int c0, int c1, int c2, int c3) {
    const uint32_t address = shared_address(from);
    check_box(address, map);
    const SharedMemory &shared = block->shared;
    Stores &stores = block->stores[threadIdx.x];
    stores.issued++;
    scheduler->post({[] { return true; }, [=, &stores, &shared, map = map] {
        for_box(address, map, {c0, c1, c2, c3}, [&](uint32_t from, const char *to) {
            if (to) std::memcpy(const_cast<char *>(to), shared.at(shared.async, from, 2), 2);
        });
        stores.read++;
    }, scheduler->one_in(4)});
    scheduler->pass();
}

void tma_store_commit_and_wait_read() {
    Stores &stores = block->stores[threadIdx.x];
    while (stores.read < stores.issued)
        scheduler->wait(stores.read, stores.read, ~0u, [] { return "copies to be read"; });
    stores.awaited = stores.issued;
}

}  // namespace ptx
