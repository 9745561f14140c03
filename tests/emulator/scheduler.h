// Threads of some blocks as fibers of one thread of the CPU, and what happens beside them: copies and products under
// way.
//
// A fiber runs until it waits. Then the first one that can run goes on, in an order of the warps which a seed shuffles
// now and then: all runs of a seed are the same, and other seeds let other warps run ahead. What is asynchronous on the
// GPU is an event here. It happens at once, or as late as can be, when no fiber can run without it, or at any time
// between. Some events are slow, and happen when nothing else can. One fiber at a time is slow as well, so that the
// other lanes of its warp get far ahead of it. If no fiber can run and no event is left, that is a deadlock, and an
// error that says who waits for what.
//
// The blocks of a grid start in order, those of a cluster together. As many run at a time as the schedule has
// multiprocessors, but a whole cluster at least. A kernel that may begin early runs, when the one before it lets it, as
// far as it can, or not at all. The rest runs when that one has ended.
//
// Read next: block.h, what a block of threads has beside them.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <unordered_map>
#include <vector>

#include "common/launch.h"
#include "host/fiber.h"

namespace emulator {

struct Block;
inline Block *block;  // of the running fiber, or of the event that happens

// Holds when *counter differs from `old` in a bit of `mask`, or without a counter.
struct Condition {
    const uint32_t *counter = nullptr;
    uint32_t old, mask;

    bool holds() const { return !counter || (*counter ^ old) & mask; }
    bool operator==(const Condition &) const = default;
};

struct Fiber : host::Fiber {
    bool is_done = false;
    Condition condition;  // it waits for this
    std::function<std::string()> what;

    bool can_run() const { return !is_done && condition.holds(); }
};

// Conditions that 32 fibers wait for when none of them can run. Mostly they are equal, so one look serves all.
struct Waiting {
    bool is_known = false;  // until one of them runs
    std::vector<Condition> conditions;
};

struct Event {
    std::function<bool()> may_happen;
    std::function<void()> happen;
    bool is_slow;
    Block *block = emulator::block;
};

// A grid, as the scheduler sees it.
struct Grid {
    unsigned blocks;
    int threads, cluster;  // of a block; blocks of a cluster, which run at the same time
    bool may_begin_early;
    std::function<void()> kernel;  // what every thread does
    std::function<std::unique_ptr<Block>()> begin;
    std::function<void(const Block &)> end;  // throws if a block must not end as it does
};

class Scheduler {
  public:
    Scheduler(const Grid &grid, int slots);
    ~Scheduler();
    // All blocks, to the end, or as far as they can before the previous kernel has ended. The first error ends all.
    void run();
    void let_next_begin(Block &block);

    Scheduler *next_kernel = nullptr;
    uint32_t previous_has_ended = 0;

    // The calling fiber goes on when `counter` differs from `old` in a bit of `mask`. what() says what that means.
    template <typename What> void wait(const uint32_t &counter, uint32_t old, uint32_t mask, What what) {
        const Condition condition{&counter, old, mask};
        if (condition.holds()) return;
        Fiber &fiber = fibers[current];
        fiber.condition = condition, fiber.what = what;
        go_on();
        fiber.condition = {};
    }

    // After something that others may see: now and then they go first.
    void pass() {
        if (!one_in(4)) return;
        shuffle(current / 32);
        go_on();
    }

    // After something that others wait for: half of the time all of them go first.
    void let_others_go() {
        if (one_in(2)) return;
        std::erase(order, current / 32);
        order.push_back(current / 32);
        go_on();
    }

    void post(Event event) {
        if (schedule.mode == Mode::kEarly) event.happen();
        else events.push_back(std::move(event));
    }

    bool has_events(const Block &block) const {
        return std::any_of(events.begin(), events.end(), [&](const Event &event) { return event.block == &block; });
    }
    // The running fiber stores 16 bytes. Two blocks must not store them in the same place of global memory: which of
    // them comes last is open.
    void stored_16_bytes(const void *to);
    // The block of the running fiber's cluster that has this rank.
    Block &block_of_cluster(int rank) {
        return *slots[current / grid.threads / grid.cluster * grid.cluster + rank].block;
    }
    int blocks_of_cluster() const { return grid.cluster; }
    unsigned random_below(unsigned n) { return random() % n; }
    bool one_in(unsigned n) { return random_below(n) == 0; }

  private:
    // Where blocks run, one after another.
    struct Slot {
        std::unique_ptr<Block> block;
        unsigned block_idx;
        int running = 0;  // threads
    };

    const Grid grid;
    unsigned next_block = 0;
    unsigned letting_blocks = 0;  // that let the next kernel begin, or have ended
    std::vector<Slot> slots;
    std::vector<Fiber> fibers;     // grid.threads of each slot
    std::vector<Waiting> waiting;  // by warp
    unsigned current;              // fiber
    unsigned slow_fiber;           // runs when no other can; another one now and then
    std::vector<unsigned> order;   // of the warps of all slots
    std::vector<Event> events;
    std::unordered_map<const void *, unsigned> storing_block;  // of places in global memory
    std::mt19937 random;
    std::exception_ptr error;
    host::Fiber main;  // which has called run()

    void shuffle(unsigned warp);
    bool start_cluster(unsigned slot);
    void end_thread();
    void resume(unsigned fiber);
    bool can_run(unsigned warp);
    int next();
    int wait_for_next();
    bool has_ended() const { return next_block == grid.blocks && std::ranges::all_of(fibers, &Fiber::is_done); }
    bool let_something_happen(bool is_slow);
    void go_on();
    std::string deadlock();
    static void enter();
};

inline Scheduler *scheduler;

// Some of the copies by cp.async of some thread of a block arrive.
void let_copies_arrive(Block &block);

}  // namespace emulator
