// Rows of K turned in place from one position to another: each pair (a, b) of a head becomes (a cos - b sin,
// a sin + b cos) in f32, every operation rounded on its own, then rounded to the plane's format. The angles' tables
// come from the host, which alone knows the model's frequencies.
//
// Launch: grid = tiles of the table, block = kThreads. A pair belongs to one thread.
#include "numbers.h"
#include "tiles.h"

namespace kvpack {

__device__ __forceinline__ float load_number(u64 address, u32 format) {
    if (format == kF32) {
        return *global<const float>(address);
    }
    const u32 bits = *global<const u16>(address);
    return __uint_as_float(format == kF16 ? f32_of_f16(bits) : f32_of_bf16(bits));
}

__device__ __forceinline__ void store_number(u64 address, u32 format, float value) {
    const u32 word = plain_nan(value);
    if (format == kF32) {
        *global<u32>(address) = word;
    } else {
        *global<u16>(address) = static_cast<u16>(format == kF16 ? f16_of_f32(word) : bf16_of_f32(word));
    }
}

__device__ __forceinline__ void turn(const RopeJob& job, u32 unit) {
    const u32 row = divide(unit, job.row_pairs);
    const u32 in_row = unit - row * job.row_pairs.divisor;
    const u32 part = divide(in_row, job.pairs);
    const u32 pair = in_row - part * job.pairs.divisor;
    const u64 size = job.format == kF32 ? 4 : 2;
    const u64 head = job.plane + physical_row(job, row) * job.row_stride + part * job.part_stride + job.rotary_offset;
    const u64 first = head + static_cast<u64>(pair) * job.pair_step * size;
    const u64 second = first + job.pair_gap * size;
    const u64 angle = static_cast<u64>(row) * job.table_stride + pair;
    const float cosine = global<const float>(job.cosines)[angle];
    const float sine = global<const float>(job.sines)[angle];
    const float a = load_number(first, job.format);
    const float b = load_number(second, job.format);
    store_number(first, job.format, a * cosine - b * sine);
    store_number(second, job.format, a * sine + b * cosine);
}

}  // namespace kvpack

extern "C" __global__ void __launch_bounds__(kvpack::kThreads) kvpack_rope(const kvpack::RopeJob* jobs,
                                                                           unsigned job_count) {
    using namespace kvpack;
    const RopeJob job = jobs[job_of_tile(jobs, job_count, blockIdx.x)];
    const u32 begin = (blockIdx.x - job.tile_begin) * kTileUnits + threadIdx.x;
#pragma unroll 1
    for (u32 k = 0; k < kUnroll; ++k) {
        const u32 unit = begin + k * kThreads;
        if (unit < job.units) {
            turn(job, unit);
        }
    }
}
