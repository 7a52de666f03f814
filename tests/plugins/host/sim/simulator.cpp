// Fibers, barriers and shared memory of the simulated CTAs.
//
// This file is compiled without instrumentation: all fibers of a CTA touch the scheduler's state, on one thread and in
// turn, and ThreadSanitizer, told that fibers are threads, would take that for races. For the same reason nothing here
// allocates, copies or compares memory through the library (which sanitizers intercept) while fibers run, except to say
// why a launch failed.
#include "simulator.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#if defined(GPUSIM_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(GPUSIM_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace gpusim {
namespace {

constexpr size_t kStackBytes = 128 * 1024;
constexpr size_t kRedZone = 64;

// What the sanitizers are told; nothing in a plain build.

void poison([[maybe_unused]] const void* data, [[maybe_unused]] size_t bytes) {
#if defined(GPUSIM_ASAN)
    __asan_poison_memory_region(data, bytes);
#endif
}

void unpoison([[maybe_unused]] const void* data, [[maybe_unused]] size_t bytes) {
#if defined(GPUSIM_ASAN)
    __asan_unpoison_memory_region(data, bytes);
#endif
}

void release([[maybe_unused]] char& token) {
#if defined(GPUSIM_TSAN)
    __tsan_release(&token);
#endif
}

void acquire([[maybe_unused]] char& token) {
#if defined(GPUSIM_TSAN)
    __tsan_acquire(&token);
#endif
}

/// One flow of control: a CUDA thread, or the host that launched.
struct Flow {
    ucontext_t context = {};
    const void* stack = nullptr;
    size_t stackBytes = 0;
    void* tsanFiber = nullptr;
};

/// Two tokens that take turns: a thread that runs ahead to the next barrier must not lend its order to one that has yet
/// to leave this one.
struct Barrier {
    unsigned expected = 0;
    unsigned arrived = 0;
    unsigned generation = 0;
    Location where;  // of the first that arrived
    char tokens[2] = {};
};

struct Warp {
    Barrier barrier;         // __syncwarp: gives order
    Barrier shuffleBarrier;  // only makes the lanes meet
    uint32_t slots[2][kWarpSize] = {};
};

enum class State { kReady, kWaiting, kEnded };

struct Thread {
    Flow flow;
    State state = State::kReady;
    const char* waitsIn = "";
    Location waitsAt;
    unsigned shuffles = 0;
};

struct SharedArray {
    Location where;
    size_t offset = 0;
    size_t bytes = 0;
};

bool same(const Location& a, const Location& b) {
    return a.file_name() == b.file_name() && a.line() == b.line() && a.column() == b.column();
}

struct Launch {
    unsigned blocks = 0;
    unsigned threads = 0;
    const std::function<void()>* body = nullptr;
    std::array<SharedArray, 16> sharedArrays;
    size_t sharedCount = 0;
    size_t sharedUsed = kRedZone;
    std::string failure;
    std::vector<void*> tsanFibers;
    char started = 0;
    char ended = 0;

    // Of the CTA that runs.
    unsigned block = 0;
    unsigned current = 0;
    unsigned alive = 0;
    std::vector<Thread> fibers;
    std::vector<Warp> warps;
    Barrier barrier;
    std::byte* shared = nullptr;
    Flow host;
};

thread_local Launch* active = nullptr;

void switchTo(Flow& from, Flow& to, [[maybe_unused]] bool fromEnds = false) {
#if defined(GPUSIM_ASAN)
    void* fakeStack = nullptr;
    __sanitizer_start_switch_fiber(fromEnds ? nullptr : &fakeStack, to.stack, to.stackBytes);
#endif
#if defined(GPUSIM_TSAN)
    __tsan_switch_to_fiber(to.tsanFiber, __tsan_switch_to_fiber_no_sync);
#endif
    swapcontext(&from.context, &to.context);
#if defined(GPUSIM_ASAN)
    __sanitizer_finish_switch_fiber(fakeStack, nullptr, nullptr);
#endif
}

/// Ends the launch: the fibers are left where they are.
[[noreturn]] void fail(const std::string& why) {
    Launch& launch = *active;
    launch.failure = why;
    switchTo(launch.fibers[launch.current].flow, launch.host, true);
    std::abort();  // nobody comes back
}

std::string describe(const Location& where) {
    const std::string file = where.file_name();
    return file.substr(file.rfind('/') + 1) + ":" + std::to_string(where.line());
}

/// Every group of threads that waits at one place, and those that have ended.
std::string deadlock(const Launch& launch) {
    std::map<std::string, std::pair<unsigned, unsigned>> groups;  // place -> first thread, count
    for (unsigned t = 0; t < launch.threads; ++t) {
        const Thread& thread = launch.fibers[t];
        const std::string place = thread.state == State::kEnded
                                      ? std::string("ended")
                                      : std::string("in ") + thread.waitsIn + " at " + describe(thread.waitsAt);
        auto [group, isNew] = groups.try_emplace(place, t, 0);
        ++group->second.second;
    }
    std::string line = "barrier deadlock in block " + std::to_string(launch.block) + ":";
    const char* separator = " ";
    for (const auto& [place, group] : groups) {
        line += separator + std::to_string(group.second) + " threads " + place + " (first: thread " +
                std::to_string(group.first) + ")";
        separator = ", ";
    }
    return line;
}

/// Lets the next ready fiber of the CTA run, the host where all have ended.
void yieldFrom(Thread& thread, bool ends = false) {
    Launch& launch = *active;
    if (launch.alive == 0) {
        switchTo(thread.flow, launch.host, true);
        std::abort();  // nobody comes back
    }
    for (unsigned step = 1; step <= launch.threads; ++step) {
        const unsigned next = (launch.current + step) % launch.threads;
        if (launch.fibers[next].state == State::kReady) {
            launch.current = next;
            switchTo(thread.flow, launch.fibers[next].flow, ends);
            return;
        }
    }
    fail(deadlock(launch));
}

void wait(Barrier& barrier, unsigned firstThread, const char* name, const Location& where, bool givesOrder) {
    Launch& launch = *active;
    Thread& self = launch.fibers[launch.current];
    char& token = barrier.tokens[barrier.generation % 2];
    if (barrier.arrived == 0) {
        barrier.where = where;
    } else if (!same(barrier.where, where)) {
        fail("thread " + std::to_string(launch.current) + " of block " + std::to_string(launch.block) + " comes to " +
             name + " at " + describe(where) + " while others wait at " + describe(barrier.where));
    }
    if (givesOrder) {
        release(token);
    }
    if (++barrier.arrived == barrier.expected) {
        barrier.arrived = 0;
        ++barrier.generation;
        for (unsigned t = firstThread; t < firstThread + barrier.expected; ++t) {
            launch.fibers[t].state = State::kReady;
        }
    } else {
        self.state = State::kWaiting;
        self.waitsIn = name;
        self.waitsAt = where;
        yieldFrom(self);
    }
    if (givesOrder) {
        acquire(token);
    }
}

void fiberMain() {
#if defined(GPUSIM_ASAN)
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
    Launch& launch = *active;
    acquire(launch.started);
    (*launch.body)();
    release(launch.ended);
    Thread& self = launch.fibers[launch.current];
    self.state = State::kEnded;
    --launch.alive;
    yieldFrom(self, true);
    std::abort();  // nobody comes back
}

std::byte* mapStacks(std::byte* where, int flags) {
    void* const memory = mmap(where, kMaxThreadsPerBlock * kStackBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
    if (memory == MAP_FAILED) {
        std::perror("gpusim: no memory for the fibers' stacks");
        std::abort();
    }
    return static_cast<std::byte*>(memory);
}

/// The stacks of a CTA's threads, one after another: one piece of memory that is kept from CTA to CTA.
std::byte* stacks() {
    struct Memory {
        std::byte* data;
        Memory() : data(mapStacks(nullptr, 0)) {}
        ~Memory() { munmap(data, kMaxThreadsPerBlock * kStackBytes); }
    };
    thread_local Memory memory;
#if defined(GPUSIM_TSAN)
    // Mapped anew each time: what one CTA's threads did on their stacks is no race with the next's.
    mapStacks(memory.data, MAP_FIXED);
#endif
    return memory.data;
}

void runBlock(Launch& launch, unsigned block) {
    launch.block = block;
    launch.fibers = std::vector<Thread>(launch.threads);
    launch.warps = std::vector<Warp>(launch.threads / kWarpSize);
    launch.barrier = Barrier{};
    launch.barrier.expected = launch.threads;
    for (Warp& warp : launch.warps) {
        warp.barrier.expected = kWarpSize;
        warp.shuffleBarrier.expected = kWarpSize;
    }
    std::byte* const memory = stacks();
    for (unsigned t = 0; t < launch.threads; ++t) {
        Flow& flow = launch.fibers[t].flow;
        flow.stack = memory + t * kStackBytes;
        flow.stackBytes = kStackBytes;
        unpoison(flow.stack, flow.stackBytes);  // a fiber that a failed launch left behind poisoned parts of it
        getcontext(&flow.context);
        flow.context.uc_stack.ss_sp = memory + t * kStackBytes;
        flow.context.uc_stack.ss_size = kStackBytes;
        flow.context.uc_link = nullptr;
        makecontext(&flow.context, fiberMain, 0);
#if defined(GPUSIM_TSAN)
        flow.tsanFiber = __tsan_create_fiber(0);
        launch.tsanFibers.push_back(flow.tsanFiber);
#endif
    }
    release(launch.started);
    launch.alive = launch.threads;
    launch.current = 0;
    switchTo(launch.host, launch.fibers[0].flow);
}

#if defined(GPUSIM_ASAN)
/// The launching thread's own stack, which AddressSanitizer wants to know when a fiber switches back to it.
void describeHostStack(Flow& host) {
    pthread_attr_t attributes;
    void* stack = nullptr;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &stack, &host.stackBytes);
    pthread_attr_destroy(&attributes);
    host.stack = stack;
}
#endif

}  // namespace

unsigned threadIndex() {
    return active->current;
}
unsigned blockIndex() {
    return active->block;
}
unsigned blockSize() {
    return active->threads;
}
unsigned gridSize() {
    return active->blocks;
}

void blockBarrier(const Location& where) {
    wait(active->barrier, 0, "__syncthreads", where, true);
}

void warpBarrier(uint32_t mask, const Location& where) {
    if (mask != 0xffffffffU) {
        fail("__syncwarp at " + describe(where) + ": the simulator takes whole warps only");
    }
    const unsigned warp = active->current / kWarpSize;
    wait(active->warps[warp].barrier, warp * kWarpSize, "__syncwarp", where, true);
}

uint32_t shuffleXor(uint32_t mask, uint32_t bits, int laneMask, const Location& where) {
    if (mask != 0xffffffffU || laneMask < 0 || laneMask >= static_cast<int>(kWarpSize)) {
        fail("__shfl_xor_sync at " + describe(where) + ": the simulator takes whole warps and lane masks below 32");
    }
    const unsigned thread = active->current;
    const unsigned lane = thread % kWarpSize;
    Warp& warp = active->warps[thread / kWarpSize];
    // Slots take turns as tokens do: a lane that is one shuffle ahead leaves the values of this one alone.
    uint32_t* slots = warp.slots[active->fibers[thread].shuffles++ % 2];
    slots[lane] = bits;
    wait(warp.shuffleBarrier, thread - lane, "__shfl_xor_sync", where, false);
    return slots[lane ^ static_cast<unsigned>(laneMask)];
}

void* sharedArray(size_t bytes, size_t alignment, const Location& where) {
    Launch& launch = *active;
    SharedArray* const end = launch.sharedArrays.data() + launch.sharedCount;
    SharedArray* const found = std::find_if(launch.sharedArrays.data(), end,
                                            [&](const SharedArray& known) { return same(known.where, where); });
    if (found == end) {
        const size_t offset = (launch.sharedUsed + alignment - 1) / alignment * alignment;
        launch.sharedUsed = offset + bytes + kRedZone;
        if (launch.sharedUsed > kSharedBytes || ++launch.sharedCount > launch.sharedArrays.size()) {
            fail("the shared array at " + describe(where) + " does not fit: the simulator has room for " +
                 std::to_string(launch.sharedArrays.size()) + " arrays in " + std::to_string(kSharedBytes) + " bytes");
        }
        *found = {where, offset, bytes};
    }
    unpoison(launch.shared + found->offset, found->bytes);
    return launch.shared + found->offset;
}

std::string launch(unsigned blocks, unsigned threadsPerBlock, const std::function<void()>& thread) {
    if (blocks == 0 || threadsPerBlock == 0 || threadsPerBlock > kMaxThreadsPerBlock ||
        threadsPerBlock % kWarpSize != 0) {
        return "a launch of " + std::to_string(blocks) + " blocks of " + std::to_string(threadsPerBlock) +
               " threads; the simulator takes 1 or more blocks of whole warps, up to 1024 threads";
    }
    Launch launch;
    launch.blocks = blocks;
    launch.threads = threadsPerBlock;
    launch.body = &thread;
#if defined(GPUSIM_ASAN)
    describeHostStack(launch.host);
#endif
#if defined(GPUSIM_TSAN)
    launch.host.tsanFiber = __tsan_get_current_fiber();
#endif
    // Each CTA has its own memory, allocated before the first runs: what one leaves there orders nothing in the next.
    const size_t sharedBytes = blocks * kSharedBytes;
    const auto shared = std::make_unique_for_overwrite<std::byte[]>(sharedBytes);
    std::memset(shared.get(), 0xff, sharedBytes);
    poison(shared.get(), sharedBytes);
    active = &launch;
    for (unsigned block = 0; block < blocks && launch.failure.empty(); ++block) {
        launch.shared = shared.get() + block * kSharedBytes;
        runBlock(launch, block);
        poison(launch.shared, kSharedBytes);
    }
    active = nullptr;
#if defined(GPUSIM_TSAN)
    // Not before: a CTA that got the identities of an earlier one's threads would count as the same threads.
    for (void* fiber : launch.tsanFibers) {
        __tsan_destroy_fiber(fiber);
    }
#endif
    acquire(launch.ended);
    unpoison(shared.get(), sharedBytes);
    if (!launch.failure.empty()) {
        std::fprintf(stderr, "gpusim: %s\n", launch.failure.c_str());
    }
    return launch.failure;
}

}  // namespace gpusim
