// Runs a file of cases through the kernel's host build, each operand in a heap block of its own exact size.
//
// Usage: case_runner CASES OUTPUTS. A case is three int64 (bytes that every array of `dtype` is moved by, to try
// unaligned pointers; the tactic; the simulator's device) and a moetrt_moe_finalize_params whose pointers are replaced
// by the sizes of their arrays in bytes (0 is null), followed by the bytes of the inputs in the order of the fields.
// OUTPUTS receives norm_out and residual_out. A kernel that writes all inputs but gamma and reads the outputs runs
// before, on the same stream. Under AddressSanitizer, rows of gemm2_permuted that no map entry names and the pads of
// all rows are poisoned.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "moetrt/moe_finalize.h"
#include "simulator.h"

#if defined(GPUSIM_ASAN)
#include <sanitizer/asan_interface.h>
#endif

extern "C" const char* moetrt_last_error(void);
extern "C" int32_t moetrt_moe_finalize_with_tactic(const moetrt_moe_finalize_params*, int32_t, void*);

namespace {

[[noreturn]] void stop(const char* why) {
    std::fprintf(stderr, "case_runner: %s\n", why);
    std::exit(2);
}

void read(std::FILE* file, void* data, size_t bytes) {
    if (bytes > 0 && std::fread(data, 1, bytes, file) != bytes) {
        stop("the file of cases ends in a case");
    }
}

struct Block {
    std::unique_ptr<std::byte[]> data;
    size_t shift;
    size_t bytes;

    std::byte* begin() const { return data.get() + shift; }
};

/// Replaces a size by a pointer to a new block of that size; null stays null.
template <typename T>
Block allocate(T*& field, size_t shift) {
    const auto bytes = reinterpret_cast<uintptr_t>(field);
    if (bytes == 0) {
        return {nullptr, 0, 0};
    }
    Block block = {std::make_unique_for_overwrite<std::byte[]>(shift + bytes), shift, bytes};
    field = reinterpret_cast<T*>(block.begin());
    return block;
}

/// Reads every byte, and writes it back where kWrites.
template <bool kWrites>
void touch(const Block& block) {
    for (size_t i = 0; i < block.bytes; ++i) {
        volatile std::byte* const byte = block.begin() + i;
        const std::byte value = *byte;
        if (kWrites) {
            *byte = value;
        }
    }
}

#if defined(GPUSIM_ASAN)
void poisonUnnamedRows(const moetrt_moe_finalize_params& p, const Block& gemm2) {
    std::vector<bool> named(static_cast<size_t>(p.num_rows), p.expanded_idx_to_permuted_idx == nullptr);
    for (int64_t route = 0; p.expanded_idx_to_permuted_idx != nullptr && route < p.num_tokens * p.top_k; ++route) {
        const int32_t row = p.expanded_idx_to_permuted_idx[route];
        if (row >= 0 && row < p.num_rows) {
            named[static_cast<size_t>(row)] = true;
        }
    }
    const size_t size = p.dtype == MOETRT_FLOAT ? 4 : 2;
    const size_t stride = static_cast<size_t>(p.row_stride) * size;
    const size_t used = static_cast<size_t>(p.hidden_size) * size;
    for (size_t row = 0; row < named.size(); ++row) {
        const size_t first = row * stride + (named[row] ? used : 0);
        __asan_poison_memory_region(gemm2.begin() + first, (row + 1) * stride - first);
    }
}
#endif

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) {
        stop("usage: case_runner CASES OUTPUTS");
    }
    std::FILE* cases = std::fopen(argv[1], "rb");
    std::FILE* outputs = std::fopen(argv[2], "wb");
    if (cases == nullptr || outputs == nullptr) {
        stop("a file cannot be opened");
    }
    int64_t head[3] = {};
    for (int number = 0; std::fread(head, sizeof head, 1, cases) == 1; ++number) {
        std::fprintf(stderr, "case %d\n", number);
        const auto shift = static_cast<size_t>(head[0]);
        gpusim::currentDevice() = static_cast<int>(head[2]);
        moetrt_moe_finalize_params p = {};
        read(cases, &p, sizeof p);
        const Block gemm2 = allocate(p.gemm2_permuted, shift);
        const Block weights = allocate(p.expert_weights, 0);
        const Block map = allocate(p.expanded_idx_to_permuted_idx, 0);
        const Block shared = allocate(p.shared_output, shift);
        const Block gate = allocate(p.shared_gate, 0);
        const Block residual = allocate(p.residual, shift);
        const Block gamma = allocate(p.gamma, 0);
        const Block norm = allocate(p.norm_out, shift);
        const Block hidden = allocate(p.residual_out, shift);
        for (const Block* input : {&gemm2, &weights, &map, &shared, &gate, &residual, &gamma}) {
            read(cases, input->begin(), input->bytes);
        }
        const std::function<void()> upstream = [&] {
            for (const Block* input : {&gemm2, &weights, &map, &shared, &gate, &residual}) {
                touch<true>(*input);
            }
            touch<false>(norm);
            touch<false>(hidden);
        };
        if (p.num_tokens > 0) {
            gpusim::runUpstream(upstream);
        }
#if defined(GPUSIM_ASAN)
        poisonUnnamedRows(p, gemm2);
#endif
        if (moetrt_moe_finalize_with_tactic(&p, static_cast<int32_t>(head[1]), nullptr) != 0) {
            stop(moetrt_last_error());
        }
        for (const Block* output : {&norm, &hidden}) {
            if (output->bytes > 0 && std::fwrite(output->begin(), 1, output->bytes, outputs) != output->bytes) {
                stop("the outputs cannot be written");
            }
        }
    }
    if (std::fclose(outputs) != 0) {
        stop("the outputs cannot be written");
    }
    std::fclose(cases);
    return 0;
}
