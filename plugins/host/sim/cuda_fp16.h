// IEEE binary16 as cuda_fp16.h spells it, with conversions in integer arithmetic (proven by test_conversions.py).
#ifndef MOETRT_HOST_CUDA_FP16_H
#define MOETRT_HOST_CUDA_FP16_H

#include <bit>
#include <cstdint>

struct __half {
    uint16_t bits;
};

inline float __half2float(__half value) {
    const uint32_t sign = (value.bits & 0x8000U) << 16;
    const uint32_t magnitude = value.bits & 0x7fffU;
    if (magnitude < 0x0400U) {  // zero and subnormals: a multiple of 2^-24
        return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(magnitude) * 0x1p-24F));
    }
    // Exponent bias 15 becomes 127; the exponent of infinity and NaN becomes all ones.
    const uint32_t rebias = magnitude >= 0x7c00U ? (255U - 31U) << 23 : (127U - 15U) << 23;
    return std::bit_cast<float>(sign | ((magnitude << 13) + rebias));
}

/// To nearest even; beyond 65520 infinity; NaN becomes 0x7fff, as on the device.
inline __half __float2half_rn(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (bits & 0x80000000U) >> 16;
    const uint32_t magnitude = bits & 0x7fffffffU;
    uint32_t result = 0;
    if (magnitude > 0x7f800000U) {
        return {0x7fffU};
    }
    if (magnitude >= std::bit_cast<uint32_t>(65520.0F)) {
        result = 0x7c00U;
    } else if (magnitude < std::bit_cast<uint32_t>(0x1p-14F)) {
        // The sum's last bit weighs 2^-24, as a subnormal's does: the addition rounds.
        result = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - std::bit_cast<uint32_t>(0.5F);
    } else {
        result = (magnitude - ((127U - 15U) << 23) + 0x0fffU + ((magnitude >> 13) & 1U)) >> 13;
    }
    return {static_cast<uint16_t>(sign | result)};
}

#endif
