// Runs a CUDA kernel's source on the host: each CUDA thread is a fiber, so that barriers, shuffles and shared memory
// mean what they mean on the device, and AddressSanitizer and ThreadSanitizer can watch.
//
// The CTAs of a launch run one after another on the calling thread. ThreadSanitizer is told of the fibers and of
// exactly the order that CUDA gives: the launch before every thread, barriers among those who meet there, every thread
// before the launch's end. Shuffles give no order, nor do the switches between fibers, nor one CTA to the next.
#ifndef MOETRT_TESTS_HOST_SIMULATOR_H
#define MOETRT_TESTS_HOST_SIMULATOR_H

#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <string>

namespace gpusim {

inline constexpr unsigned kWarpSize = 32;
inline constexpr unsigned kMaxThreadsPerBlock = 1024;
inline constexpr size_t kSharedBytes = 4096;  // of one CTA; a declaration past it fails the launch

using Location = std::source_location;

/// Where the calling CUDA thread is; launches have one dimension.
unsigned threadIndex();
unsigned blockIndex();
unsigned blockSize();
unsigned gridSize();

/// The barriers of the calling thread's CTA and warp. A thread that waits where others do not come fails the launch.
void blockBarrier(const Location& where);
void warpBarrier(uint32_t mask, const Location& where);

/// The bits of the lane whose index differs in `laneMask`. No memory order, as on the device.
uint32_t shuffleXor(uint32_t mask, uint32_t bits, int laneMask, const Location& where);

/// The CTA's shared array that is declared at `where`: filled with 0xff, AddressSanitizer-poisoned around it, before
/// its declaration and after the CTA's end.
void* sharedArray(size_t bytes, size_t alignment, const Location& where);

/// Runs `thread` once for each CUDA thread. Empty, or why the launch failed; then it has also been written to stderr.
std::string launch(unsigned blocks, unsigned threadsPerBlock, const std::function<void()>& thread);

}  // namespace gpusim

#endif
