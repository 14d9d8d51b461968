// Every encoding from f32 and back, in flat arrays of whole blocks. Specification: kvpack.device.quantise, bit by bit;
// so compile without fused multiply-add and without flushing subnormals.
//
// Launch: one thread a unit (an element of a scalar encoding, a block of 32 of the others), grid = units / kThreads
// rounded up, block = kThreads. f32 arrays lie at multiples of 16 bytes (of 4 for scalar encodings), blocks at
// multiples of 2.
//
// A block that the encoding cannot hold is not written. `refused` gets the first such block's number, for each reason:
// [0] an infinity or a NaN, [1] a scale beyond f16, [2] a minimum beyond f16. The host sets it to 0xFFFFFFFF before.
#include "numbers.h"

namespace kvpack {

constexpr u32 kBlock = 32;

__device__ __forceinline__ float magnitude_of(float value) {
    return __uint_as_float(__float_as_uint(value) & kMagnitude);
}

__device__ __forceinline__ bool is_infinite(u32 word) { return (word & kMagnitude) == kInfinity; }

// Zero where it overflows, as for a scale of zero.
__device__ __forceinline__ float reciprocal(float scale) {
    const float inverse = 1.0f / scale;
    return is_infinite(__float_as_uint(inverse)) ? 0.0f : inverse;
}

__device__ __forceinline__ bool load_block(const float* values, float (&block)[kBlock]) {
    bool finite = true;
#pragma unroll
    for (u32 i = 0; i < kBlock; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(values + i);
        block[i] = four.x;
        block[i + 1] = four.y;
        block[i + 2] = four.z;
        block[i + 3] = four.w;
    }
#pragma unroll
    for (u32 i = 0; i < kBlock; ++i) {
        finite = finite && (__float_as_uint(block[i]) & kMagnitude) < kInfinity;
    }
    return finite;
}

// A NaN that reading made has one pattern on every machine.
__device__ __forceinline__ void store_block(float* values, const float (&block)[kBlock]) {
#pragma unroll
    for (u32 i = 0; i < kBlock; i += 4) {
        uint4 four;
        four.x = plain_nan(block[i]);
        four.y = plain_nan(block[i + 1]);
        four.z = plain_nan(block[i + 2]);
        four.w = plain_nan(block[i + 3]);
        *reinterpret_cast<uint4*>(values + i) = four;
    }
}

// The f16 word of a block's scale or minimum; false where it would be infinite.
__device__ __forceinline__ bool half_of(float value, u32* half) {
    *half = f16_of_f32(__float_as_uint(value));
    return (*half & 0x7C00) != 0x7C00;
}

// The fifth bits where there are any (bit i of a little-endian word is element i's), then the nibbles: element i in the
// low half of byte i, element i + 16 in its high half.
template <u32 kBits>
__device__ __forceinline__ void store_codes(u16* out, const u32 (&codes)[kBlock]) {
    if (kBits == 5) {
        u32 fifth = 0;
#pragma unroll
        for (u32 i = 0; i < kBlock; ++i) {
            fifth |= (codes[i] >> 4) << i;
        }
        *out++ = static_cast<u16>(fifth);
        *out++ = static_cast<u16>(fifth >> 16);
    }
#pragma unroll
    for (u32 i = 0; i < kBlock / 2; i += 2) {
        const u32 low = (codes[i] & 15) | (codes[i + 16] & 15) << 4;
        const u32 high = (codes[i + 1] & 15) | (codes[i + 17] & 15) << 4;
        *out++ = static_cast<u16>(low | high << 8);
    }
}

template <u32 kBits>
__device__ __forceinline__ void load_codes(const u16* in, u32 (&codes)[kBlock]) {
    u32 fifth = 0;
    if (kBits == 5) {
        fifth = in[0] | static_cast<u32>(in[1]) << 16;
        in += 2;
    }
#pragma unroll
    for (u32 i = 0; i < kBlock / 2; i += 2) {
        const u32 two = *in++;
        codes[i] = (two & 15) | (fifth >> i & 1) << 4;
        codes[i + 16] = (two >> 4 & 15) | (fifth >> (i + 16) & 1) << 4;
        codes[i + 1] = (two >> 8 & 15) | (fifth >> (i + 1) & 1) << 4;
        codes[i + 17] = (two >> 12 & 15) | (fifth >> (i + 17) & 1) << 4;
    }
}

struct Q8_0 {
    static constexpr u32 words = 17;  // 16-bit words of a block

    static __device__ __forceinline__ u32 write(const float (&block)[kBlock], u16* out) {
        float largest = 0.0f;
#pragma unroll
        for (u32 i = 0; i < kBlock; ++i) {
            const float magnitude = magnitude_of(block[i]);
            largest = magnitude > largest ? magnitude : largest;
        }
        const float scale = largest / 127.0f;
        u32 half;
        if (!half_of(scale, &half)) {
            return 1;
        }
        const float inverse = reciprocal(scale);
        *out++ = static_cast<u16>(half);
#pragma unroll
        for (u32 i = 0; i < kBlock; i += 2) {
            *out++ = static_cast<u16>(code(block[i] * inverse) | code(block[i + 1] * inverse) << 8);
        }
        return 0;
    }

    // Halves away from zero. Adding 0.5 and truncating would round 0.49999997 up.
    static __device__ __forceinline__ u32 code(float scaled) {
        const i32 whole = static_cast<i32>(scaled);
        const bool up = magnitude_of(scaled - static_cast<float>(whole)) >= 0.5f;
        return static_cast<u32>(whole + (up ? (scaled < 0.0f ? -1 : 1) : 0)) & 0xFF;
    }

    static __device__ __forceinline__ void read(const u16* in, float (&block)[kBlock]) {
        const float scale = __uint_as_float(f32_of_f16(*in++));
#pragma unroll
        for (u32 i = 0; i < kBlock; i += 2) {
            const u32 two = *in++;
            block[i] = scale * static_cast<float>(static_cast<i8>(two & 0xFF));
            block[i + 1] = scale * static_cast<float>(static_cast<i8>(two >> 8));
        }
    }
};

// q5_0 and q4_0: the number of largest magnitude (the first of equals) becomes the lowest code, zero the middle.
template <u32 kBits>
struct Signed {
    static constexpr u32 words = kBits == 5 ? 11 : 9;
    static constexpr u32 middle = 1u << (kBits - 1);

    static __device__ __forceinline__ u32 write(const float (&block)[kBlock], u16* out) {
        float extreme = 0.0f;
#pragma unroll
        for (u32 i = 0; i < kBlock; ++i) {
            extreme = magnitude_of(block[i]) > magnitude_of(extreme) ? block[i] : extreme;
        }
        const float scale = extreme / -static_cast<float>(middle);
        u32 half;
        if (!half_of(scale, &half)) {
            return 1;
        }
        const float inverse = reciprocal(scale);
        u32 codes[kBlock];
#pragma unroll
        for (u32 i = 0; i < kBlock; ++i) {
            const u32 code = static_cast<u32>(block[i] * inverse + (static_cast<float>(middle) + 0.5f));
            codes[i] = code < 2 * middle - 1 ? code : 2 * middle - 1;
        }
        *out++ = static_cast<u16>(half);
        store_codes<kBits>(out, codes);
        return 0;
    }

    static __device__ __forceinline__ void read(const u16* in, float (&block)[kBlock]) {
        const float scale = __uint_as_float(f32_of_f16(*in++));
        u32 codes[kBlock];
        load_codes<kBits>(in, codes);
#pragma unroll
        for (u32 i = 0; i < kBlock; ++i) {
            block[i] = scale * (static_cast<float>(codes[i]) - static_cast<float>(middle));
        }
    }
};

// q5_1 and q4_1: the minimum (the first of equals) becomes 0 and the maximum the highest code.
template <u32 kBits>
struct Ranged {
    static constexpr u32 words = kBits == 5 ? 12 : 10;
    static constexpr u32 highest = (1u << kBits) - 1;

    static __device__ __forceinline__ u32 write(const float (&block)[kBlock], u16* out) {
        float lowest = block[0];
        float largest = block[0];
#pragma unroll
        for (u32 i = 1; i < kBlock; ++i) {
            lowest = block[i] < lowest ? block[i] : lowest;
            largest = block[i] > largest ? block[i] : largest;
        }
        const float scale = (largest - lowest) / static_cast<float>(highest);
        u32 scale_half;
        u32 lowest_half;
        if (!half_of(scale, &scale_half)) {
            return 1;
        }
        if (!half_of(lowest, &lowest_half)) {
            return 2;
        }
        const float inverse = reciprocal(scale);
        u32 codes[kBlock];
#pragma unroll
        for (u32 i = 0; i < kBlock; ++i) {
            const u32 code = static_cast<u32>((block[i] - lowest) * inverse + 0.5f);
            codes[i] = code < highest ? code : highest;
        }
        *out++ = static_cast<u16>(scale_half);
        *out++ = static_cast<u16>(lowest_half);
        store_codes<kBits>(out, codes);
        return 0;
    }

    static __device__ __forceinline__ void read(const u16* in, float (&block)[kBlock]) {
        const float scale = __uint_as_float(f32_of_f16(*in++));
        const float lowest = __uint_as_float(f32_of_f16(*in++));
        u32 codes[kBlock];
        load_codes<kBits>(in, codes);
#pragma unroll
        for (u32 i = 0; i < kBlock; ++i) {
            block[i] = scale * static_cast<float>(codes[i]) + lowest;
        }
    }
};

template <typename Encoding>
__device__ __forceinline__ void write_block(const float* values, u16* stored, u64 units, u32* refused) {
    const u64 unit = static_cast<u64>(blockIdx.x) * kThreads + threadIdx.x;
    if (unit >= units) {
        return;
    }
    float block[kBlock];
    const bool finite = load_block(values + unit * kBlock, block);
    const u32 outcome = finite ? Encoding::write(block, stored + unit * Encoding::words) : 0;
    if (!finite || outcome != 0) {
        atomicMin(refused + outcome, static_cast<u32>(unit));
    }
}

template <typename Encoding>
__device__ __forceinline__ void read_block(const u16* stored, float* values, u64 units) {
    const u64 unit = static_cast<u64>(blockIdx.x) * kThreads + threadIdx.x;
    if (unit < units) {
        float block[kBlock];
        Encoding::read(stored + unit * Encoding::words, block);
        store_block(values + unit * kBlock, block);
    }
}

}  // namespace kvpack

// f32 goes in and out as words: a float register may change a NaN.
#define KVPACK_SCALAR(NAME, STORED)                                                                                    \
    extern "C" __global__ void __launch_bounds__(kvpack::kThreads)                                                     \
        kvpack_write_##NAME(const unsigned* values, STORED* stored, unsigned long long units) {                        \
        const unsigned long long unit = static_cast<unsigned long long>(blockIdx.x) * kvpack::kThreads + threadIdx.x;  \
        if (unit < units) {                                                                                            \
            stored[unit] = static_cast<STORED>(kvpack::NAME##_of_f32(values[unit]));                                   \
        }                                                                                                              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(kvpack::kThreads)                                                     \
        kvpack_read_##NAME(const STORED* stored, unsigned* values, unsigned long long units) {                         \
        const unsigned long long unit = static_cast<unsigned long long>(blockIdx.x) * kvpack::kThreads + threadIdx.x;  \
        if (unit < units) {                                                                                            \
            values[unit] = kvpack::f32_of_##NAME(stored[unit]);                                                        \
        }                                                                                                              \
    }

#define KVPACK_BLOCK(NAME, ...)                                                                                        \
    extern "C" __global__ void __launch_bounds__(kvpack::kThreads) kvpack_write_##NAME(                                \
        const float* values, unsigned short* stored, unsigned long long units, unsigned* refused) {                    \
        kvpack::write_block<kvpack::__VA_ARGS__>(values, stored, units, refused);                                      \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(kvpack::kThreads)                                                     \
        kvpack_read_##NAME(const unsigned short* stored, float* values, unsigned long long units) {                    \
        kvpack::read_block<kvpack::__VA_ARGS__>(stored, values, units);                                                \
    }

KVPACK_SCALAR(f16, unsigned short)
KVPACK_SCALAR(bf16, unsigned short)
KVPACK_SCALAR(f8_e4m3, unsigned char)
KVPACK_SCALAR(f8_e5m2, unsigned char)
KVPACK_BLOCK(q8_0, Q8_0)
KVPACK_BLOCK(q5_1, Ranged<5>)
KVPACK_BLOCK(q5_0, Signed<5>)
KVPACK_BLOCK(q4_1, Ranged<4>)
KVPACK_BLOCK(q4_0, Signed<4>)
