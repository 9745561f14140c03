// How the fibers of scheduler.h take turns.
//
// Read next: block.h.
#include "scheduler.h"

#include <tuple>

#include "block.h"

namespace emulator {

Scheduler::Scheduler(const Grid &grid, int slots)
    : grid(grid), slots(slots), fibers(slots * grid.threads), waiting(fibers.size() / 32), order(waiting.size()),
      random(schedule.seed) {
    slow_fiber = random_below(fibers.size());
    for (unsigned i = 0; i < order.size(); i++) order[i] = i;
    std::ranges::shuffle(order, random);
    for (Fiber &fiber : fibers) fiber.begin(enter);
}
Scheduler::~Scheduler() = default;

// Within a fiber of the previous kernel, or after it.
void Scheduler::run() {
    const auto outer = std::tuple(scheduler, block, threadIdx, blockIdx, blockDim, gridDim);
    scheduler = this, gridDim.x = grid.blocks, blockDim.x = grid.threads;
    if (next_block == 0)
        for (unsigned slot = 0; slot < slots.size(); slot += grid.cluster) start_cluster(slot);
    if (const int fiber = has_ended() ? -1 : wait_for_next(); fiber >= 0) resume(fiber), main.switch_to(fibers[fiber]);
    std::tie(scheduler, block, threadIdx, blockIdx, blockDim, gridDim) = outer;
    if (error) std::rethrow_exception(error);
    if (!has_ended() || !next_kernel) return;
    next_kernel->previous_has_ended = 1;
    if (next_kernel->next_block > 0) next_kernel->run();
}

// A kernel whose blocks all let the next one begin has started all of them.
void Scheduler::let_next_begin(Block &block) {
    if (std::exchange(block.lets_next_begin, true) || ++letting_blocks < grid.blocks) return;
    if (!next_kernel || !next_kernel->grid.may_begin_early || schedule.mode == Mode::kLate) return;
    if (schedule.mode == Mode::kEarly || one_in(2)) next_kernel->run();
}

// The first and last function of every fiber, which it does not leave: there is nothing below it.
void Scheduler::enter() {
    try {
        for (;;) {
            scheduler->grid.kernel();
            scheduler->end_thread();
        }
    } catch (...) {
        scheduler->error = std::current_exception();
    }
    scheduler->fibers[scheduler->current].switch_to(scheduler->main);
}

// In the slots from this one on.
bool Scheduler::start_cluster(unsigned slot) {
    if (next_block == grid.blocks) return false;
    const unsigned end = slot + grid.cluster;
    for (unsigned i = slot; i < end; i++) slots[i] = {grid.begin(), next_block++, grid.threads};
    for (unsigned i = slot * grid.threads; i < end * grid.threads; i++)
        fibers[i].is_done = waiting[i / 32].is_known = false;
    return true;
}

// The last thread of a cluster starts another one in its place. When there is none left, run() returns.
void Scheduler::end_thread() {
    const unsigned slot = current / grid.threads;
    fibers[current].is_done = true;
    if (--slots[slot].running == 0) {
        grid.end(*slots[slot].block);
        slots[slot].block->has_ended = true;
        let_next_begin(*slots[slot].block);
        const unsigned first = slot / grid.cluster * grid.cluster;
        const bool has_ended = std::all_of(&slots[first], &slots[first] + grid.cluster,
                                           [](const Slot &other) { return other.running == 0; });
        if (has_ended && !start_cluster(first) && this->has_ended()) fibers[current].switch_to(main);
    }
    go_on();
}

void Scheduler::stored_16_bytes(const void *to) {
    const char *own = fibers[current].stack.get();
    if (to >= own && to < own + Fiber::kStackBytes) return;  // a variable
    const unsigned first = storing_block.try_emplace(to, blockIdx.x).first->second;
    if (first != blockIdx.x) fail("block %u stores 16 bytes where block %u has stored", blockIdx.x, first);
}

void Scheduler::shuffle(unsigned warp) {
    std::erase(order, warp);
    order.insert(order.begin() + random_below(order.size() + 1), warp);
}

// Whether any fiber of a warp can run.
bool Scheduler::can_run(unsigned warp) {
    auto &[is_known, conditions] = waiting[warp];
    if (!is_known) {
        conditions.clear();
        for (unsigned fiber = 32 * warp; fiber < 32 * (warp + 1); fiber++) {
            const Condition &condition = fibers[fiber].condition;
            if (fibers[fiber].is_done) continue;
            if (condition.holds()) return true;
            if (conditions.empty() || conditions.back() != condition) conditions.push_back(condition);
        }
        is_known = true;
    }
    return std::ranges::any_of(conditions, &Condition::holds);
}

// The fiber that is to run next, or -1.
int Scheduler::next() {
    if (one_in(32)) shuffle(random_below(order.size()));
    if (one_in(1 << 14)) slow_fiber = random_below(fibers.size());
    const unsigned first = random_below(32);
    for (unsigned warp : order) {
        if (!can_run(warp)) continue;
        for (unsigned i = 0; i < 32; i++)
            if (const unsigned fiber = warp * 32 + (first + i) % 32; fiber != slow_fiber && fibers[fiber].can_run())
                return fiber;
    }
    return -1;
}

bool Scheduler::let_something_happen(bool is_slow) {
    Block *const running = block;
    std::vector<size_t> possible;
    for (size_t i = 0; i < events.size(); i++) {
        block = events[i].block;
        if (events[i].is_slow == is_slow && events[i].may_happen()) possible.push_back(i);
    }
    if (!possible.empty()) {
        const size_t i = possible[random_below(possible.size())];
        const Event event = std::move(events[i]);
        events.erase(events.begin() + i);
        block = event.block;
        event.happen();
    }
    block = running;
    return !possible.empty();
}

void Scheduler::resume(unsigned fiber) {
    const Slot &slot = slots[fiber / grid.threads];
    current = fiber, waiting[fiber / 32].is_known = false;
    threadIdx.x = fiber % grid.threads, blockIdx.x = slot.block_idx, block = slot.block.get();
}

// Leave the calling fiber, which waits, makes room or is done, for one that can run.
void Scheduler::go_on() {
    if (schedule.mode == Mode::kRandom && one_in(4)) {
        let_something_happen(false);
        if (Block *other = slots[random_below(slots.size())].block.get()) let_copies_arrive(*other);
    }
    Fiber &from = fibers[current];
    const int fiber = wait_for_next();
    if (fiber < 0) return from.switch_to(main);
    resume(fiber);
    if (&from != &fibers[fiber]) from.switch_to(fibers[fiber]);
}

// The fiber that is to run next, or -1: when the previous kernel has ended.
int Scheduler::wait_for_next() {
    for (;;) {
        if (const int fiber = next(); fiber >= 0) return fiber;
        if (let_something_happen(false)) continue;
        if (fibers[slow_fiber].can_run()) return slow_fiber;
        if (let_something_happen(true)) continue;
        if (!previous_has_ended) return -1;
        throw std::runtime_error(deadlock());
    }
}

std::string Scheduler::deadlock() {
    std::string text = "deadlock";
    auto what = [&](size_t i) { return fibers[i].is_done ? std::string() : fibers[i].what(); };
    for (size_t slot = 0; slot < slots.size(); slot++) {
        block = slots[slot].block.get();
        if (slots[slot].running) text += "; block " + std::to_string(slots[slot].block_idx) + " waits for";
        const size_t begin = slot * grid.threads, end = begin + grid.threads;
        for (size_t first = begin, last; first < end; first = last) {
            for (last = first + 1; last < end && what(last) == what(first);) last++;
            if (!what(first).empty())
                text += " [threads " + std::to_string(first - begin) + " to " + std::to_string(last - 1 - begin) +
                        "] " + what(first);
        }
    }
    return text;
}

}  // namespace emulator
