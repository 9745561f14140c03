// The emulator's instructions but for products: the grid, warps that meet, barriers, cp.async and TMA, registers that
// change hands.
//
// Read next: products.cpp.
#include <cstdarg>
#include <cstdio>

#include "block.h"
#include "common/device.h"
#include "host/cuda.h"

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

// Throws if the block leaves something behind.
static void check_end(const Block &block) {
    if (scheduler->has_events(block)) fail("the block ends with copies or products under way");
    for (const auto &[address, barrier] : block.mbarriers)
        if (barrier.tx_bytes) fail("the block ends with %d bytes to come, barrier %#x", barrier.tx_bytes, address);
    for (size_t i = 0; i < block.stores.size(); i++)
        if (block.stores[i].issued != block.stores[i].awaited || block.copies[i].end > block.copies[i].awaited)
            fail("the block ends with copies that thread %zu has not waited for", i);
    for (size_t i = 0; i < block.warps.size(); i++) {
        const Warp &warp = block.warps[i];
        if (warp.meeting.lanes) fail("some lanes of warp %zu end before they come to %s", i, warp.meeting.what);
        if (!warp.accumulators.empty()) fail("the block ends with products that warp %zu has not waited for", i);
        if (warp.issued != block.products[i / 4].size()) fail("warp %zu lacks products of its warpgroup", i);
    }
}

static std::list<Scheduler> stream;

void enqueue(int64_t blocks, int threads, int cluster, size_t shared_bytes, bool may_begin_early,
             std::function<void()> kernel) {
    if (blocks == 0) return;
    if (blocks > INT32_MAX) throw std::runtime_error("minimal_attn: the grid has more than 2^31 - 1 blocks");
    if (blocks % cluster) throw std::runtime_error("a cluster lacks blocks");
    const Grid grid{unsigned(blocks), threads, cluster, may_begin_early, kernel,
                    [=] { return std::make_unique<Block>(threads, shared_bytes); }, check_end};
    Scheduler *const last = stream.empty() ? nullptr : &stream.back();
    stream.emplace_back(grid, std::min<int64_t>(blocks, std::max(1, gpu.num_sms / cluster) * cluster));
    if (last) last->next_kernel = &stream.back();
}

void wait_for_kernels() {
    std::list<Scheduler> launched = std::exchange(stream, {});
    for (Scheduler &kernel : launched) kernel.previous_has_ended = 1, kernel.run();
}

void *shared_memory() { return block->shared.generic.get(); }

void stored_16_bytes(const void *to) {
    if (block->shared.has(to)) block->shared.unfenced[threadIdx.x].push_back(block->shared.address(to));
    else scheduler->stored_16_bytes(to);
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

// ldmatrix and stmatrix: act(half of a register of a lane, the element in shared memory). Lane l gives the address of
// row l % 8 of matrix l / 8. Lane 4·r + c holds columns 2c and 2c + 1 of row r of the matrix, or of its transpose, in
// a register for each matrix.
struct Matrices {
    uint32_t *x, row;
};
template <bool kTransposed, typename Act> void for_matrices(void *(&lanes)[32], Act act) {
    const SharedMemory &shared = block->shared;
    for (int i = 0; i < 32; i++) {
        const uint32_t address = static_cast<Matrices *>(lanes[i])->row;
        if (address % 16) fail("a row of a matrix at %#x, no multiple of 16", address);
        char *elements = shared.at(shared.generic, address, 16);
        for (int j = 0; j < 8; j++) {
            const int row = kTransposed ? j : i % 8, col = kTransposed ? i % 8 : j;
            auto *halves = reinterpret_cast<uint16_t *>(&static_cast<Matrices *>(lanes[row * 4 + col / 2])->x[i / 8]);
            act(halves[col % 2], *reinterpret_cast<uint16_t *>(elements + 2 * j));
        }
    }
}
template <bool kTransposed> void load_matrices(void *(&lanes)[32]) {
    for_matrices<kTransposed>(lanes, [](uint16_t &x, uint16_t element) { x = element; });
}
template <bool kTransposed> void store_matrices(void *(&lanes)[32]) {
    for_matrices<kTransposed>(lanes, [](uint16_t x, uint16_t &element) { element = x; });
}

// "setmaxnreg". What a warp gives back is free for others; one that wants more waits until enough is.
void set_registers(const char *what, int per_thread) {
    meet(what, &per_thread, [](void *(&lanes)[32]) {
        const int wanted = *static_cast<int *>(lanes[0]);
        Warp &warp = this_warp();
        const int more = 32 * (wanted - warp.registers);
        const bool is_increase = std::strstr(warp.meeting.what, "inc");
        // If its launch bounds, which are not known here, let several blocks share a multiprocessor, it began with less.
        const bool may_be_more = is_increase && blockDim.x <= 256;
        if (wanted % 8 || wanted < 24 || wanted > 256 || (!may_be_more && (is_increase ? more < 0 : more > 0)))
            fail("%s from %d to %d", warp.meeting.what, warp.registers, wanted);
        while (more > int(block->free_registers))
            scheduler->wait(block->free_registers, block->free_registers, ~0u, [] { return "registers"; });
        block->free_registers -= more, warp.registers = wanted;
    });
}

}  // namespace emulator

int compute_capability() { return emulator::gpu.capability; }
bool has_fast_fp64() { return true; }
int num_sms() { return emulator::gpu.num_sms; }
int max_cluster() { return 8; }
size_t max_shared_memory() { return emulator::gpu.max_shared_memory; }

namespace device {

void wait_for_previous_kernel() {
    emulator::scheduler->wait(emulator::scheduler->previous_has_ended, 0, ~0u, [] { return "the previous kernel"; });
}
void let_next_kernel_begin() { emulator::scheduler->let_next_begin(*emulator::block); }

float to_float(__half x) { return host::to_float(host::__half{x.bits}); }
float to_float(__nv_bfloat16 x) { return host::to_float(host::__nv_bfloat16{x.bits}); }
template <> float from_float(float x) { return x; }
template <> __half from_float(float x) { return {host::from_float<host::__half>(x).bits}; }
template <> __nv_bfloat16 from_float(float x) { return {host::from_float<host::__nv_bfloat16>(x).bits}; }

}  // namespace device

namespace ptx {

using namespace emulator;

void ldmatrix(uint32_t (&x)[4], uint32_t row) {
    Matrices mine{x, row};
    meet("ldmatrix", &mine, load_matrices<false>);
}
void ldmatrix_trans(uint32_t (&x)[4], uint32_t row) {
    Matrices mine{x, row};
    meet("ldmatrix.trans", &mine, load_matrices<true>);
}

// A row is stored by the lane that names it.
template <bool kTransposed> void stmatrix_any(const uint32_t (&x)[4], uint32_t row) {
    uint32_t copy[4] = {x[0], x[1], x[2], x[3]};
    Matrices mine{copy, row};
    meet("stmatrix", &mine, store_matrices<kTransposed>);
    block->shared.unfenced[threadIdx.x].push_back(row);
    scheduler->pass();
}
void stmatrix(const uint32_t (&x)[4], uint32_t row) { stmatrix_any<false>(x, row); }
void stmatrix_trans(const uint32_t (&x)[4], uint32_t row) { stmatrix_any<true>(x, row); }

void store_shared(uint32_t to, uint32_t x) {
    if (to % 4) fail("4 bytes are stored at %#x, no multiple of 4", to);
    std::memcpy(block->shared.at(block->shared.generic, to, 4), &x, 4);
}

void red_add(float *to, const float (&x)[4]) {
    if (uintptr_t(to) % 16) fail("red of 16 bytes to %p", static_cast<void *>(to));
    for (int e = 0; e < 4; e++) to[e] += x[e];
    scheduler->pass();
}

// Another block changes the number. A thread that reads it a second time waits until one has: if none can, that is a
// deadlock.
int load_acquire(const int *from) {
    Acquired &last = block->acquired[threadIdx.x];
    if (last.from == from)
        scheduler->wait(*reinterpret_cast<const uint32_t *>(from), last.value, ~0u, [] { return "another block"; });
    last = {from, *from};
    scheduler->pass();
    return last.value;
}
// Other blocks may go on. A thread that sleeps does not wait for them.
void sleep_briefly() {
    device::wait_for_previous_kernel();  // it may be what the thread waits for
    block->acquired[threadIdx.x] = {};
    scheduler->pass();
}
void store_release(int *to, int x) {
    *to = x;
    block->acquired[threadIdx.x] = {};
    scheduler->let_others_go();
}

// "mbarrier". The barriers are not in shared memory, but in block->mbarriers.
MBarrier &find(Block &of, const Barrier &barrier) {
    if (of.has_ended) fail("barrier %#x of a block that has ended", shared_address(&barrier));
    const auto found = of.mbarriers.find(shared_address(&barrier));
    if (found == of.mbarriers.end()) fail("barrier %#x is not initialised", shared_address(&barrier));
    return found->second;
}
MBarrier &find(const Barrier &barrier) { return find(*block, barrier); }

void mbarrier_init(Barrier &barrier, int count) {
    const uint32_t address = shared_address(&barrier);
    if (count <= 0) fail("barrier %#x is initialised for %d arrivals", address, count);
    if (!block->mbarriers.try_emplace(address, MBarrier{count, count, threadIdx.x}).second)
        fail("barrier %#x is initialised twice", address);
    scheduler->pass();
}

static void arrive(MBarrier &x, uint32_t address, int bytes) {
    if (x.pending == 0) fail("barrier %#x: more arrivals than %d", address, x.count);
    x.pending--, x.tx_bytes += bytes;
    if (std::abs(x.tx_bytes) >= 1 << 20) fail("barrier %#x: %d bytes to come", address, x.tx_bytes);
    x.settle();
}
void mbarrier_arrive_expect_tx(Barrier &barrier, int bytes) {
    arrive(find(barrier), shared_address(&barrier), bytes);
    scheduler->pass();
}
void mbarrier_arrive(Barrier &barrier) { mbarrier_arrive_expect_tx(barrier, 0); }
// In another block it takes a while.
void mbarrier_arrive(Barrier &barrier, int rank) {
    Block &there = scheduler->block_of_cluster(rank);
    if (&there == block) return mbarrier_arrive(barrier);
    MBarrier &x = find(there, barrier);
    const uint32_t address = shared_address(&barrier);
    scheduler->post({[] { return true; }, [=, &x] { arrive(x, address, 0); }, scheduler->one_in(4), &there});
    scheduler->pass();
}

// A thread arrives once before it waits.
void cluster_arrive_relaxed() {
    NamedBarrier &barrier = scheduler->block_of_cluster(0).cluster;
    if (block->has_arrived[threadIdx.x]) fail("barrier.cluster.arrive twice");
    block->has_arrived[threadIdx.x] = true;
    block->cluster_generation[threadIdx.x] = barrier.generation;
    if (++barrier.arrived == scheduler->blocks_of_cluster() * int(blockDim.x)) barrier.arrived = 0, barrier.generation++;
    scheduler->pass();
}
void cluster_wait() {
    NamedBarrier &barrier = scheduler->block_of_cluster(0).cluster;
    if (!block->has_arrived[threadIdx.x]) fail("barrier.cluster.wait before an arrival");
    block->has_arrived[threadIdx.x] = false;
    scheduler->wait(barrier.generation, block->cluster_generation[threadIdx.x], ~0u, [] { return "its cluster"; });
}
void cluster_sync() { cluster_arrive_relaxed(), cluster_wait(); }

void mbarrier_wait(Barrier &barrier, uint32_t parity) {
    scheduler->wait(find(barrier).phase, parity, 1, [&barrier, parity] {
        const MBarrier &x = find(barrier);
        char text[128];
        std::snprintf(text, sizeof(text), "parity %u of barrier %#x, in phase %u with %d arrivals, %d bytes to come",
                      parity, shared_address(&barrier), x.phase, x.pending, x.tx_bytes);
        return std::string(text);
    });
}

int load_from_block(const int &from, int rank) {
    const Block &block = scheduler->block_of_cluster(rank);
    if (block.has_ended) fail("the shared memory of a block that has ended");
    const SharedMemory &there = block.shared;
    int x;
    std::memcpy(&x, there.at(there.generic, shared_address(&from), 4), 4);
    return x;
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

}  // namespace ptx

namespace emulator {

static void deliver(Block &block, const Copies::Copy &copy) {
    char *to = block.shared.at(block.shared.generic, copy.to, copy.bytes);
    copy.from ? std::memcpy(to, copy.from, copy.bytes) : std::memset(to, 0, copy.bytes);
}

// "cp.async". Until it is delivered, the destination is NaN.
void copy_async(uint32_t to, const void *from, uint32_t bytes, bool is_inside) {
    if (to % bytes || uintptr_t(from) % bytes) fail("cp.async of %u bytes to %#x from %p", bytes, to, from);
    Copies &copies = block->copies[threadIdx.x];
    const Copies::Copy copy{copies.committed, to, is_inside ? from : nullptr, bytes};
    std::memset(block->shared.at(block->shared.generic, to, bytes), 0xff, bytes);
    copies.end = copies.committed + 1;
    if (bytes == 16) copies.unfenced.push_back(copy);
    const bool is_early = schedule.mode == Mode::kEarly || (schedule.mode == Mode::kRandom && scheduler->one_in(4));
    is_early ? deliver(*block, copy) : copies.under_way.push_back(copy);
}

void commit_copies() { block->copies[threadIdx.x].committed++; }

void wait_for_copies(uint32_t pending) {
    Copies &copies = block->copies[threadIdx.x];
    if (copies.committed > pending) copies.awaited = std::max(copies.awaited, copies.committed - pending);
    std::erase_if(copies.under_way, [&](const Copies::Copy &copy) {
        if (copy.group >= copies.awaited) return false;
        deliver(*block, copy);
        return true;
    });
    std::erase_if(copies.unfenced, [&](const Copies::Copy &copy) {
        if (copy.group >= copies.awaited) return false;
        block->shared.unfenced[threadIdx.x].push_back(copy.to);
        return true;
    });
    scheduler->pass();
}

void let_copies_arrive(Block &block) {
    Copies &copies = block.copies[scheduler->random_below(block.copies.size())];
    std::erase_if(copies.under_way, [&](const Copies::Copy &copy) {
        if (scheduler->one_in(2)) return false;
        deliver(block, copy);
        return true;
    });
}

uint32_t address_in_shared_memory(const void *p) { return block->shared.address(p); }

}  // namespace emulator

namespace ptx {

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
        fail("TMA writes at %#x, no multiple of %d bytes", address, 8 * map.swizzle_bytes);
    if (map.box[2] != 1 || map.box[3] != 1) fail("a box of several heads or samples is not emulated");
    if (map.swizzle_bytes > 16 && int(2 * map.box[0]) != map.swizzle_bytes)
        fail("a box of part of a pattern is not emulated");
    block->shared.at(block->shared.generic, address, bytes);
    return bytes;
}

// A copy to a block's shared memory, to be counted by a barrier there. Until it is delivered, all of it is NaN.
static MBarrier &begin_copy(Block &to, uint32_t address, uint32_t bytes, const Barrier &barrier) {
    MBarrier &full = find(to, barrier);
    if (!full.is_fenced) fail("TMA counts at barrier %#x, which it may not see yet", shared_address(&barrier));
    const auto next = to.mbarriers.lower_bound(address);
    if (next != to.mbarriers.end() && next->first < address + bytes) fail("TMA copies to where a barrier is");
    for (const auto *view : {&to.shared.generic, &to.shared.async})
        std::memset(to.shared.at(*view, address, bytes), 0xff, bytes);
    return full;
}
static void load_to(Block &block, uint32_t address, const CUtensorMap &map, const Barrier &barrier,
                    const int (&begin)[4]) {
    const uint32_t bytes = check_box(address, map);
    MBarrier &full = begin_copy(block, address, bytes, barrier);
    const int c0 = begin[0], c1 = begin[1], c2 = begin[2], c3 = begin[3];
    const SharedMemory &shared = block.shared;
    scheduler->post({[] { return true; }, [=, &full, &shared, map = map] {
        for_box(address, map, {c0, c1, c2, c3}, [&](uint32_t to, const char *from) {
            for (const auto *view : {&shared.generic, &shared.async})
                from ? std::memcpy(shared.at(*view, to, 2), from, 2) : std::memset(shared.at(*view, to, 2), 0, 2);
        });
        full.tx_bytes -= bytes, full.settle();
    }, scheduler->one_in(4), &block});
}
void tma_load(void *to, const CUtensorMap &map, Barrier &barrier, int c0, int c1, int c2, int c3) {
    load_to(*block, shared_address(to), map, barrier, {c0, c1, c2, c3});
    scheduler->pass();
}
void tma_load_both(void *to, const CUtensorMap &map, Barrier &barrier, int c0, int c1, int c2, int c3) {
    for (int rank = 0; rank < 2; rank++)
        load_to(scheduler->block_of_cluster(rank), shared_address(to), map, barrier, {c0, c1, c2, c3});
    scheduler->pass();
}

// "cp.async.bulk" from shared memory, which it reads at any time until it has been counted.
void copy_to_block(void *to, const void *from, int bytes, Barrier &barrier, int rank) {
    Block &other = scheduler->block_of_cluster(rank);
    const uint32_t address = shared_address(to), source = shared_address(from);
    if (address % 16 || source % 16 || bytes % 16) fail("cp.async.bulk of %d bytes to %#x", bytes, address);
    MBarrier &full = begin_copy(other, address, bytes, barrier);
    Block &mine = *block;
    const SharedMemory &shared = mine.shared, &there = other.shared;
    scheduler->post({[] { return true; }, [=, &full, &mine, &shared, &there] {
        if (mine.has_ended) fail("cp.async.bulk from a block that has ended");
        for (const auto *view : {&there.generic, &there.async})
            std::memcpy(there.at(*view, address, bytes), shared.at(shared.async, source, bytes), bytes);
        full.tx_bytes -= bytes, full.settle();
    }, scheduler->one_in(4), &other});
    scheduler->pass();
}

// "st.async": at any time until it has been counted.
void store_to_block(void *to, const void *from, int bytes, Barrier &barrier, int rank) {
    Block &other = scheduler->block_of_cluster(rank);
    const uint32_t address = shared_address(to);
    if (address % bytes) fail("st.async of %d bytes to %#x", bytes, address);
    MBarrier &full = begin_copy(other, address, bytes, barrier);
    std::vector<char> x(static_cast<const char *>(from), static_cast<const char *>(from) + bytes);
    const SharedMemory &there = other.shared;
    scheduler->post({[] { return true; }, [=, &full, &there] {
        std::memcpy(there.at(there.generic, address, bytes), x.data(), bytes);
        full.tx_bytes -= bytes, full.settle();
    }, scheduler->one_in(4), &other});
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

void tma_store_wait_read() {
    Stores &stores = block->stores[threadIdx.x];
    while (stores.read < stores.issued)
        scheduler->wait(stores.read, stores.read, ~0u, [] { return "copies to be read"; });
    stores.awaited = stores.issued;
}

}  // namespace ptx
