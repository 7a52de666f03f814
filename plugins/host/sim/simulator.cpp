// Fibers, barriers and shared memory of the simulated CTAs and clusters.
//
// This file is compiled without instrumentation: all fibers of a cluster touch the scheduler's state, on one thread and
// in turn, and ThreadSanitizer, told that fibers are threads, would take that for races. For the same reason nothing
// here allocates, copies or compares memory through the library (which sanitizers intercept) while fibers run, except
// to say why a launch failed.
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
constexpr size_t kMaxFibers = size_t{kMaxClusterSize} * kMaxThreadsPerBlock;

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

/// The barrier of a cluster, in two halves: a thread that has arrived may do something else before it waits.
struct SplitBarrier {
    unsigned arrived = 0;
    unsigned generation = 0;
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
    bool hasArrived = false;  // at the cluster's barrier, and has not waited yet
    bool waitsForCluster = false;
    unsigned arrivedIn = 0;  // the generation
};

/// A CTA that runs.
struct Block {
    Barrier barrier;
    unsigned alive = 0;
    std::byte* shared = nullptr;
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
    Shape shape = {};
    const std::function<void()>* body = nullptr;
    std::array<SharedArray, 16> sharedArrays;
    size_t sharedCount = 0;
    size_t sharedUsed = kRedZone;
    std::string failure;
    std::vector<void*> tsanFibers;
    char started = 0;
    char ended = 0;

    // Of the cluster that runs: a CTA alone is a cluster of one.
    unsigned firstBlock = 0;
    unsigned current = 0;  // index of fibers
    unsigned alive = 0;
    std::vector<Thread> fibers;
    std::vector<Warp> warps;
    std::vector<Block> blocks;
    SplitBarrier clusterBarrier;
    Flow host;

    unsigned thread() const { return current % shape.threadsPerBlock; }
    unsigned rank() const { return current / shape.threadsPerBlock; }
    Block& block() { return blocks[rank()]; }
};

/// The kernel before the next launch.
struct Upstream {
    bool runs = false;
    char before = 0;
    char ended = 0;
};

thread_local Upstream upstream;
thread_local int device = 0;
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
    for (unsigned t = 0; t < launch.fibers.size(); ++t) {
        const Thread& thread = launch.fibers[t];
        const std::string place = thread.state == State::kEnded
                                      ? std::string("ended")
                                      : std::string("in ") + thread.waitsIn + " at " + describe(thread.waitsAt);
        auto [group, isNew] = groups.try_emplace(place, t, 0);
        ++group->second.second;
    }
    std::string line = "barrier deadlock in block " + std::to_string(launch.firstBlock);
    if (launch.shape.clusterSize > 1) {
        line += " to " + std::to_string(launch.firstBlock + launch.shape.clusterSize - 1);
    }
    const char* separator = ": ";
    for (const auto& [place, group] : groups) {
        line += separator + std::to_string(group.second) + " threads " + place + " (first: thread " +
                std::to_string(group.first) + ")";
        separator = ", ";
    }
    return line;
}

/// Lets the next ready fiber of the cluster run, the host where all have ended. The calling CTA comes first: it runs as
/// far ahead of the others as its barriers let it, which is what finds that one of them is missing.
void yieldFrom(Thread& thread, bool ends = false) {
    Launch& launch = *active;
    if (launch.alive == 0) {
        switchTo(thread.flow, launch.host, true);
        std::abort();  // nobody comes back
    }
    const unsigned threads = launch.shape.threadsPerBlock;
    for (unsigned block = 0; block < launch.shape.clusterSize; ++block) {
        const unsigned first = (launch.rank() + block) % launch.shape.clusterSize * threads;
        for (unsigned step = 1; step <= threads; ++step) {
            const unsigned next = first + (launch.thread() + step) % threads;
            if (launch.fibers[next].state == State::kReady) {
                launch.current = next;
                switchTo(thread.flow, launch.fibers[next].flow, ends);
                return;
            }
        }
    }
    fail(deadlock(launch));
}

std::string callingThread(const Launch& launch) {
    return "thread " + std::to_string(launch.thread()) + " of block " +
           std::to_string(launch.firstBlock + launch.rank());
}

void wait(Barrier& barrier, unsigned firstThread, const char* name, const Location& where, bool givesOrder) {
    Launch& launch = *active;
    Thread& self = launch.fibers[launch.current];
    char& token = barrier.tokens[barrier.generation % 2];
    if (barrier.arrived == 0) {
        barrier.where = where;
    } else if (!same(barrier.where, where)) {
        fail(callingThread(launch) + " comes to " + name + " at " + describe(where) + " while others wait at " +
             describe(barrier.where));
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
    if (--launch.block().alive == 0) {
        poison(launch.block().shared, kSharedBytes);
    }
    yieldFrom(self, true);
    std::abort();  // nobody comes back
}

std::byte* mapStacks(std::byte* where, size_t count, int flags) {
    void* const memory = mmap(where, count * kStackBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
    if (memory == MAP_FAILED) {
        std::perror("gpusim: no memory for the fibers' stacks");
        std::abort();
    }
    return static_cast<std::byte*>(memory);
}

/// The stacks of `count` fibers, one after another: one piece of memory that is kept from cluster to cluster.
std::byte* stacks([[maybe_unused]] size_t count) {
    struct Memory {
        std::byte* data;
        Memory() : data(mapStacks(nullptr, kMaxFibers, 0)) {}
        ~Memory() { munmap(data, kMaxFibers * kStackBytes); }
    };
    thread_local Memory memory;
#if defined(GPUSIM_TSAN)
    // Mapped anew each time: what one CTA's threads did on their stacks is no race with the next's.
    mapStacks(memory.data, count, MAP_FIXED);
#endif
    return memory.data;
}

/// Makes a fiber that begins with `entry`.
void make(Flow& flow, std::byte* stack, void (*entry)()) {
    flow.stack = stack;
    flow.stackBytes = kStackBytes;
    unpoison(flow.stack, flow.stackBytes);  // a fiber that a failed launch left behind poisoned parts of it
    getcontext(&flow.context);
    flow.context.uc_stack.ss_sp = stack;
    flow.context.uc_stack.ss_size = kStackBytes;
    flow.context.uc_link = nullptr;
    makecontext(&flow.context, entry, 0);
#if defined(GPUSIM_TSAN)
    flow.tsanFiber = __tsan_create_fiber(0);
#endif
}

void runCluster(Launch& launch, unsigned firstBlock, std::byte* shared) {
    const Shape& shape = launch.shape;
    const unsigned fibers = shape.clusterSize * shape.threadsPerBlock;
    launch.firstBlock = firstBlock;
    launch.fibers = std::vector<Thread>(fibers);
    launch.warps = std::vector<Warp>(fibers / kWarpSize);
    launch.blocks = std::vector<Block>(shape.clusterSize);
    launch.clusterBarrier = SplitBarrier{};
    for (Warp& warp : launch.warps) {
        warp.barrier.expected = kWarpSize;
        warp.shuffleBarrier.expected = kWarpSize;
    }
    for (unsigned rank = 0; rank < shape.clusterSize; ++rank) {
        Block& block = launch.blocks[rank];
        block.barrier.expected = shape.threadsPerBlock;
        block.alive = shape.threadsPerBlock;
        block.shared = shared + (firstBlock + rank) * kSharedBytes;
    }
    std::byte* const memory = stacks(fibers);
    for (unsigned t = 0; t < fibers; ++t) {
        make(launch.fibers[t].flow, memory + t * kStackBytes, fiberMain);
        launch.tsanFibers.push_back(launch.fibers[t].flow.tsanFiber);
    }
    release(launch.started);
    launch.alive = fibers;
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

void describeHost([[maybe_unused]] Flow& host) {
#if defined(GPUSIM_ASAN)
    describeHostStack(host);
#endif
#if defined(GPUSIM_TSAN)
    host.tsanFiber = __tsan_get_current_fiber();
#endif
}

thread_local const std::function<void()>* upstreamBody = nullptr;
thread_local Flow upstreamFlow;
thread_local Flow upstreamHost;

void upstreamMain() {
#if defined(GPUSIM_ASAN)
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
    acquire(upstream.before);
    (*upstreamBody)();
    release(upstream.ended);
    switchTo(upstreamFlow, upstreamHost, true);
    std::abort();  // nobody comes back
}

}  // namespace

int& currentDevice() {
    return device;
}

void runUpstream(const std::function<void()>& kernel) {
    upstreamBody = &kernel;
    upstreamHost = {};
    upstreamFlow = {};
    describeHost(upstreamHost);
    make(upstreamFlow, stacks(1), upstreamMain);
    release(upstream.before);
    switchTo(upstreamHost, upstreamFlow);
    upstream.runs = true;
}

void waitForUpstream() {
    acquire(upstream.ended);
}

unsigned threadIndex() {
    return active->thread();
}
unsigned blockIndex() {
    return active->firstBlock + active->rank();
}
unsigned blockSize() {
    return active->shape.threadsPerBlock;
}
unsigned gridSize() {
    return active->shape.blocks;
}
unsigned clusterRank() {
    return active->rank();
}
unsigned clusterSize() {
    return active->shape.clusterSize;
}

void blockBarrier(const Location& where) {
    wait(active->block().barrier, active->rank() * active->shape.threadsPerBlock, "__syncthreads", where, true);
}

void clusterArrive(const Location& where) {
    Launch& launch = *active;
    SplitBarrier& barrier = launch.clusterBarrier;
    Thread& self = launch.fibers[launch.current];
    if (self.hasArrived) {
        fail(callingThread(launch) + " arrives at its cluster's barrier again at " + describe(where));
    }
    self.hasArrived = true;
    self.arrivedIn = barrier.generation;
    release(barrier.tokens[barrier.generation % 2]);
    if (++barrier.arrived == launch.fibers.size()) {
        barrier.arrived = 0;
        ++barrier.generation;
        for (Thread& thread : launch.fibers) {
            if (thread.waitsForCluster) {
                thread.waitsForCluster = false;
                thread.state = State::kReady;
            }
        }
    }
}

void clusterWait(const Location& where) {
    Launch& launch = *active;
    SplitBarrier& barrier = launch.clusterBarrier;
    Thread& self = launch.fibers[launch.current];
    if (!self.hasArrived) {
        fail(callingThread(launch) + " waits at its cluster's barrier at " + describe(where) + " and has not arrived");
    }
    if (barrier.generation == self.arrivedIn) {
        self.state = State::kWaiting;
        self.waitsForCluster = true;
        self.waitsIn = "the cluster's barrier";
        self.waitsAt = where;
        yieldFrom(self);
    }
    self.hasArrived = false;
    acquire(barrier.tokens[self.arrivedIn % 2]);
}

void* sharedOfCluster(void* mine, unsigned rank, const Location& where) {
    Launch& launch = *active;
    if (rank >= launch.shape.clusterSize) {
        fail(callingThread(launch) + " maps shared memory of CTA " + std::to_string(rank) + " at " + describe(where) +
             ", its cluster has " + std::to_string(launch.shape.clusterSize));
    }
    // Of a cluster the CTAs' memories lie one after another, each with the same arrays at the same places.
    return launch.blocks[rank].shared + (static_cast<std::byte*>(mine) - launch.block().shared);
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
    const unsigned thread = active->current;  // blocks are whole warps
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
    std::byte* const data = launch.block().shared + found->offset;
    unpoison(data, found->bytes);
    return data;
}

std::string launch(const Shape& shape, const std::function<void()>& thread) {
    if (shape.blocks == 0 || shape.threadsPerBlock == 0 || shape.threadsPerBlock > kMaxThreadsPerBlock ||
        shape.threadsPerBlock % kWarpSize != 0 || shape.clusterSize == 0 || shape.clusterSize > kMaxClusterSize ||
        shape.blocks % shape.clusterSize != 0) {
        return "a launch of " + std::to_string(shape.blocks) + " blocks of " + std::to_string(shape.threadsPerBlock) +
               " threads in clusters of " + std::to_string(shape.clusterSize) +
               "; the simulator takes whole clusters of up to 8 blocks of whole warps, up to 1024 threads";
    }
    Launch launch;
    launch.shape = shape;
    launch.body = &thread;
    describeHost(launch.host);
    if (!shape.startsEarly) {
        waitForUpstream();
    }
    // Each CTA has its own memory, allocated before the first runs: what one leaves there orders nothing in the next.
    const size_t sharedBytes = shape.blocks * kSharedBytes;
    const auto shared = std::make_unique_for_overwrite<std::byte[]>(sharedBytes);
    std::memset(shared.get(), 0xff, sharedBytes);
    poison(shared.get(), sharedBytes);
    active = &launch;
    for (unsigned block = 0; block < shape.blocks && launch.failure.empty(); block += shape.clusterSize) {
        runCluster(launch, block, shared.get());
    }
    active = nullptr;
#if defined(GPUSIM_TSAN)
    // Not before: a CTA that got the identities of an earlier one's threads would count as the same threads.
    for (void* fiber : launch.tsanFibers) {
        __tsan_destroy_fiber(fiber);
    }
    if (upstream.runs) {
        __tsan_destroy_fiber(upstreamFlow.tsanFiber);
    }
#endif
    upstream.runs = false;
    waitForUpstream();
    acquire(launch.ended);
    unpoison(shared.get(), sharedBytes);
    if (!launch.failure.empty()) {
        std::fprintf(stderr, "gpusim: %s\n", launch.failure.c_str());
    }
    return launch.failure;
}

}  // namespace gpusim
