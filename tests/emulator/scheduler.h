// Threads of a block as fibers of one thread of the CPU, and what happens beside them: copies and products under way.
//
// A fiber runs until it waits. Then goes on the first that can, in an order of the warps which a seed shuffles now and
// then: all runs of a seed are the same, and other seeds let other warps run ahead. What is asynchronous on the GPU is
// an event here, which happens at once, or as late as can be, when no fiber can run without it, or at any time between.
// Some are slow, and happen when nothing else can. If no fiber can run and nothing is left to happen, that is a
// deadlock, and an error that says who waits for what.
//
// Read next: block.h, what a block of threads has beside them.
#pragma once

#include <ucontext.h>

#include <exception>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "launch.h"

namespace emulator {

struct Stack {
    ucontext_t context;
    char bytes[64 << 10];
};

struct Fiber {
    std::unique_ptr<Stack> stack = std::make_unique_for_overwrite<Stack>();
    bool is_done;
    // It waits until *counter differs from `old` in a bit of `mask`, or not at all.
    const uint32_t *counter;
    uint32_t old, mask;
    std::function<std::string()> what;

    bool can_run() const { return !is_done && (!counter || (*counter ^ old) & mask); }
};

struct Event {
    std::function<bool()> may_happen;
    std::function<void()> happen;
    bool is_slow;
};

class Scheduler {
  public:
    explicit Scheduler(int threads) : fibers(threads), order(threads / 32), random(schedule.seed) {
        for (unsigned i = 0; i < order.size(); i++) order[i] = i;
    }

    // thread() by every thread of a block, to the end. The first error ends all.
    void run(const std::function<void()> &thread);

    // The calling fiber goes on when `counter` differs from `old` in a bit of `mask`. what() says what that means.
    template <typename What> void wait(const uint32_t &counter, uint32_t old, uint32_t mask, What what) {
        if ((counter ^ old) & mask) return;
        Fiber &fiber = fibers[threadIdx.x];
        fiber.counter = &counter, fiber.old = old, fiber.mask = mask, fiber.what = what;
        go_on();
        fiber.counter = nullptr;
    }

    // After something that others may see: now and then they go first.
    void pass() {
        if (!one_in(4)) return;
        shuffle(threadIdx.x / 32);
        go_on();
    }

    void post(Event event) {
        if (schedule.mode == Mode::kEarly) event.happen();
        else events.push_back(std::move(event));
    }

    bool has_events() const { return !events.empty(); }
    bool one_in(unsigned n) { return random() % n == 0; }

  private:
    std::vector<Fiber> fibers;
    std::vector<unsigned> order;  // of the warps
    std::vector<Event> events;
    std::mt19937 random;
    std::function<void()> body;
    std::exception_ptr error;
    ucontext_t main;

    void shuffle(unsigned warp) {
        std::erase(order, warp);
        order.insert(order.begin() + random() % (order.size() + 1), warp);
    }

    int next() {
        if (one_in(32)) shuffle(random() % order.size());
        const unsigned first = random();
        for (unsigned warp : order)
            for (unsigned i = 0; i < 32; i++)
                if (const int thread = warp * 32 + (first + i) % 32; fibers[thread].can_run()) return thread;
        return -1;
    }

    bool let_something_happen(bool is_slow) {
        std::vector<size_t> possible;
        for (size_t i = 0; i < events.size(); i++)
            if (events[i].is_slow == is_slow && events[i].may_happen()) possible.push_back(i);
        if (possible.empty()) return false;
        const size_t i = possible[random() % possible.size()];
        const auto happen = std::move(events[i].happen);
        events.erase(events.begin() + i);
        happen();
        return true;
    }

    // Leave the calling fiber, which waits, makes room or is done, for one that can run.
    void go_on() {
        if (schedule.mode == Mode::kRandom && one_in(4)) let_something_happen(false);
        int thread;
        while ((thread = next()) < 0)
            if (!let_something_happen(false) && !let_something_happen(true)) {
                if (std::ranges::all_of(fibers, &Fiber::is_done)) return;  // to the end of enter()
                throw std::runtime_error(deadlock());
            }
        Fiber &from = fibers[threadIdx.x], &to = fibers[thread];
        if (&from == &to) return;
        threadIdx.x = thread;
        swapcontext(&from.stack->context, &to.stack->context);
    }

    std::string deadlock() const {
        std::string text = "block " + std::to_string(blockIdx.x) + ": deadlock, waiting for";
        auto what = [&](size_t i) { return fibers[i].is_done ? std::string() : fibers[i].what(); };
        for (size_t first = 0, end; first < fibers.size(); first = end) {
            for (end = first + 1; end < fibers.size() && what(end) == what(first);) end++;
            if (!what(first).empty())
                text += " [threads " + std::to_string(first) + " to " + std::to_string(end - 1) + "] " + what(first);
        }
        return text;
    }

    static void enter();
};

inline Scheduler *scheduler;

// The first and last function of every fiber, which it does not leave: there is nothing below it.
inline void Scheduler::enter() {
    try {
        scheduler->body();
        scheduler->fibers[threadIdx.x].is_done = true;
        scheduler->go_on();
    } catch (...) {
        scheduler->error = std::current_exception();
    }
    setcontext(&scheduler->main);
}

inline void Scheduler::run(const std::function<void()> &thread) {
    scheduler = this, body = thread;
    std::ranges::shuffle(order, random);
    for (Fiber &fiber : fibers) {
        fiber.is_done = false, fiber.counter = nullptr;
        auto &[context, bytes] = *fiber.stack;
        getcontext(&context);
        context.uc_stack.ss_sp = bytes, context.uc_stack.ss_size = sizeof(bytes);
        makecontext(&context, enter, 0);
    }
    threadIdx.x = next();
    swapcontext(&main, &fibers[threadIdx.x].stack->context);
    if (error) std::rethrow_exception(error);
}

}  // namespace emulator
