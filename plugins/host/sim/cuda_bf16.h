// bfloat16 as cuda_bf16.h spells it, with conversions in integer arithmetic (proven by test_conversions.py).
#ifndef MOETRT_HOST_CUDA_BF16_H
#define MOETRT_HOST_CUDA_BF16_H

#include <bit>
#include <cstdint>

struct __nv_bfloat16 {
    uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 value) {
    return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

/// To nearest even; NaN becomes 0x7fff, as on the device.
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if ((bits & 0x7fffffffU) > 0x7f800000U) {
        return {0x7fffU};
    }
    return {static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16)};
}

#endif
