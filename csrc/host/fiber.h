// Fibers take turns in one thread, each with its own stack. setcontext() makes system calls, so only the first turn
// uses it. Later turns are jumps by builtins: longjmp() may check that it stays in one stack.
#pragma once

#include <ucontext.h>

#include <memory>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#define TSAN(...) __VA_ARGS__
#else
#define TSAN(...)
#endif

namespace host {

// Without begin(), the caller of the others.
struct Fiber {
    static constexpr size_t kStackBytes = 256 << 10;
    std::unique_ptr<char[]> stack;
    ucontext_t context;
    void *place[5];  // where the next turn goes on
    bool has_begun = true;
    TSAN(void *tsan = __tsan_get_current_fiber();)
    TSAN(~Fiber() { if (stack) __tsan_destroy_fiber(tsan); })

    // run() must not return.
    void begin(void (*run)()) {
        stack = std::make_unique_for_overwrite<char[]>(kStackBytes), has_begun = false;
        getcontext(&context);
        context.uc_stack.ss_sp = stack.get(), context.uc_stack.ss_size = kStackBytes;
        makecontext(&context, run, 0);
        TSAN(tsan = __tsan_create_fiber(0);)
    }
    // For ThreadSanitizer, `to` knows what this fiber has done only if the switch synchronizes.
    [[gnu::no_sanitize_thread]] void switch_to(Fiber &to, [[maybe_unused]] bool synchronizes = false) {
        TSAN(__tsan_switch_to_fiber(to.tsan, synchronizes ? 0 : __tsan_switch_to_fiber_no_sync);)
        if (!__builtin_setjmp(place)) to.take_turn();
    }

  private:
    // Not inlined, as a jump must leave its function. AddressSanitizer would clear what it knows of the stack.
    [[gnu::noinline, gnu::no_sanitize_address, gnu::no_sanitize_thread]] void take_turn() {
        if (has_begun) __builtin_longjmp(place, 1);
        has_begun = true;
        setcontext(&context);
    }
};

}  // namespace host
