// Narrow floating-point numbers from and to f32 words, in integer arithmetic: one text for every compiler, no header of
// CUDA needed. Specification: kvpack.device.quantise, rounding, subnormals and NaN included.
#pragma once

#include "abi.h"

namespace kvpack {

constexpr u32 kMagnitude = 0x7FFFFFFF;
constexpr u32 kInfinity = 0x7F800000;
constexpr u32 kQuietNan = 0x7FC00000;

// The code nearest to the f32 magnitude, ties to even, as if the narrow exponent had no upper end; not for NaN.
template <u32 kMantissa, u32 kBias>
__device__ __forceinline__ u32 narrowed(u32 magnitude) {
    constexpr u32 drop = 23 - kMantissa;
    if (magnitude >= (128 - kBias) << 23) {  // normal: round at the dropped bits, then move the exponent's bias
        return ((magnitude + ((1u << (drop - 1)) - 1) + (magnitude >> drop & 1)) >> drop) - ((127 - kBias) << kMantissa);
    }
    const u32 exponent = magnitude >> 23;
    if (exponent < 127 - kBias - kMantissa) {  // below half the smallest step
        return 0;
    }
    // Subnormal: whole steps of 2^(1 - kBias - kMantissa), the significand shifted down to them.
    const u32 significand = (magnitude & 0x7FFFFF) | 0x800000;
    const u32 shift = drop + 128 - kBias - exponent;
    return (significand + ((1u << (shift - 1)) - 1) + (significand >> shift & 1)) >> shift;
}

__device__ __forceinline__ u32 f16_of_f32(u32 word) {
    const u32 magnitude = word & kMagnitude;
    const u32 sign = word >> 16 & 0x8000;
    if (magnitude > kInfinity) {
        return sign | 0x7E00 | (magnitude >> 13 & 0x3FF);
    }
    const u32 code = narrowed<10, 15>(magnitude);
    return sign | (code < 0x7C00 ? code : 0x7C00);
}

__device__ __forceinline__ u32 f32_of_f16(u32 half) {
    const u32 sign = (half & 0x8000) << 16;
    const u32 magnitude = half & 0x7FFF;
    if (magnitude > 0x7C00) {
        return sign | kQuietNan | (half & 0x3FF) << 13;
    }
    if (magnitude == 0x7C00) {
        return sign | kInfinity;
    }
    if (magnitude < 0x400) {  // whole steps of 2^-24, exact in f32
        return sign | __float_as_uint(static_cast<float>(magnitude) * 5.9604644775390625e-8f);
    }
    return sign | ((magnitude << 13) + (112u << 23));
}

__device__ __forceinline__ u32 bf16_of_f32(u32 word) {
    if ((word & kMagnitude) > kInfinity) {
        return word >> 16 | 0x40;
    }
    return (word + 0x7FFF + (word >> 16 & 1)) >> 16;
}

__device__ __forceinline__ u32 f32_of_bf16(u32 half) { return half << 16; }

// Saturating: what lies beyond 448, infinity too, becomes 448.
__device__ __forceinline__ u32 f8_e4m3_of_f32(u32 word) {
    const u32 magnitude = word & kMagnitude;
    const u32 sign = word >> 24 & 0x80;
    if (magnitude > kInfinity) {
        return sign | 0x7F;
    }
    const u32 code = narrowed<3, 7>(magnitude);
    return sign | (code < 0x7E ? code : 0x7E);
}

__device__ __forceinline__ u32 f32_of_f8_e4m3(u32 byte) {
    const u32 sign = (byte & 0x80) << 24;
    const u32 magnitude = byte & 0x7F;
    if (magnitude == 0x7F) {
        return sign | kQuietNan;
    }
    if (magnitude < 8) {  // whole steps of 2^-9
        return sign | __float_as_uint(static_cast<float>(magnitude) * 0.001953125f);
    }
    return sign | ((magnitude << 20) + (120u << 23));
}

// Not saturating: what rounds beyond 57,344 becomes infinity.
__device__ __forceinline__ u32 f8_e5m2_of_f32(u32 word) {
    const u32 magnitude = word & kMagnitude;
    const u32 sign = word >> 24 & 0x80;
    if (magnitude > kInfinity) {
        return sign | 0x7F;
    }
    const u32 code = narrowed<2, 15>(magnitude);
    return sign | (code < 0x7C ? code : 0x7C);
}

// An e5m2 byte is the upper byte of an f16 word.
__device__ __forceinline__ u32 f32_of_f8_e5m2(u32 byte) { return f32_of_f16(byte << 8); }

// A NaN that arithmetic made: its bits differ from one machine to another, so there is one for all.
__device__ __forceinline__ u32 plain_nan(float value) {
    const u32 word = __float_as_uint(value);
    return (word & kMagnitude) > kInfinity ? kQuietNan : word;
}

}  // namespace kvpack
