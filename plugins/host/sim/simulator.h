// Runs a CUDA kernel's source on the host: each CUDA thread is a fiber, so that barriers, shuffles and shared memory
// mean what they mean on the device, and AddressSanitizer and ThreadSanitizer can watch.
//
// The CTAs of a launch, or its clusters of CTAs, run one after another on the calling thread. ThreadSanitizer is told
// of the fibers and of exactly the order that CUDA gives: the launch before every thread, barriers among those who meet
// there, every thread before the launch's end, and the kernel before this one on the stream only before its threads
// have waited for that one, where the launch lets them start earlier. Shuffles give no order, nor do the switches
// between fibers, nor one CTA to the next.
#ifndef MOETRT_HOST_SIMULATOR_H
#define MOETRT_HOST_SIMULATOR_H

#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <string>

namespace gpusim {

inline constexpr unsigned kWarpSize = 32;
inline constexpr unsigned kMaxThreadsPerBlock = 1024;
inline constexpr unsigned kMaxClusterSize = 8;
inline constexpr size_t kSharedBytes = 4096;  // of one CTA; a declaration past it fails the launch

using Location = std::source_location;

/// What the kernel's launch asks of a device. Registers are as many as an NVIDIA GPU has.
struct Device {
    int computeCapability;
    int multiprocessors;
    int blocksPerMultiprocessor;
    int codeVersion;  ///< what the kernels were compiled for: less where the driver compiles PTX of an earlier device
    bool launchesClusters;
};

/// A whole chip; chips that hold one and two CTAs at a time, so that every CTA goes on with another token; one without
/// clusters and programmatic dependent launch; one with both, but code of an earlier device; one without clusters.
inline constexpr Device kDevices[] = {{90, 132, 32, 90, true}, {90, 1, 1, 90, true}, {90, 2, 1, 90, true},
                                      {80, 2, 1, 80, false},   {90, 2, 1, 80, true}, {90, 2, 1, 90, false}};

/// The calling thread's current device, an index of kDevices.
int& currentDevice();

/// Where the calling CUDA thread is; launches have one dimension.
unsigned threadIndex();
unsigned blockIndex();
unsigned blockSize();
unsigned gridSize();
unsigned clusterRank();
unsigned clusterSize();

/// The barriers of the calling thread's CTA and warp. A thread that waits where others do not come fails the launch.
void blockBarrier(const Location& where);
void warpBarrier(uint32_t mask, const Location& where);

/// The two halves of the barrier of the calling thread's cluster.
void clusterArrive(const Location& where);
void clusterWait(const Location& where);

/// The same place of shared memory in another CTA of the cluster. AddressSanitizer knows it as poisoned before that CTA
/// has declared it and after that CTA has ended.
void* sharedOfCluster(void* mine, unsigned rank, const Location& where);

/// Waits for the end of the kernel that runUpstream has run.
void waitForUpstream();

/// The bits of the lane whose index differs in `laneMask`. No memory order, as on the device.
uint32_t shuffleXor(uint32_t mask, uint32_t bits, int laneMask, const Location& where);

/// The CTA's shared array that is declared at `where`: filled with 0xff, AddressSanitizer-poisoned around it, before
/// its declaration and after the CTA's end.
void* sharedArray(size_t bytes, size_t alignment, const Location& where);

struct Shape {
    unsigned blocks;
    unsigned threadsPerBlock;
    unsigned clusterSize;
    bool startsEarly;  ///< programmatic dependent launch: before the kernel of runUpstream has ended
};

/// Runs `thread` once for each CUDA thread. Empty, or why the launch failed; then it has also been written to stderr.
std::string launch(const Shape& shape, const std::function<void()>& thread);

/// Runs `kernel` as the one before the next launch: for ThreadSanitizer it ends when something has waited for it.
void runUpstream(const std::function<void()>& kernel);

}  // namespace gpusim

#endif
