// A chunk of a prefill that wraps a rotating ring, staged before it overwrites anything: the ring's live rows, oldest
// first, then the chunk's rows, in one linear shadow for attention to read. The chunk is in the ring's own bytes, or it is
// f32 and rounded to the ring's format. Specification: `stage` of kvpack.device.host.
//
// Launch: grid = tiles of the table, block = kThreads. No two threads write one byte.
#include "numbers.h"
#include "tiles.h"

namespace kvpack {

__device__ __forceinline__ u32 rounded(float value, u32 format) {
    const u32 word = __float_as_uint(value);
    return format == kF16 ? f16_of_f32(word) : bf16_of_f32(word);
}

__device__ __forceinline__ u32 rounded_pair(float low, float high, u32 format) {
    return rounded(low, format) | rounded(high, format) << 16;
}

// 8 elements: 32 bytes of the chunk, 16 of the shadow.
__device__ __forceinline__ void round_wide(u64 source, u64 target, u32 format) {
    const float4 low = global<const float4>(source)[0];
    const float4 high = global<const float4>(source)[1];
    uint4 out;
    out.x = rounded_pair(low.x, low.y, format);
    out.y = rounded_pair(low.z, low.w, format);
    out.z = rounded_pair(high.x, high.y, format);
    out.w = rounded_pair(high.z, high.w, format);
    *global<uint4>(target) = out;
}

__device__ __forceinline__ void copy_unit(u64 source, u64 target, u32 unit_bytes) {
    switch (unit_bytes) {
        case 16: *global<uint4>(target) = *global<const uint4>(source); break;
        case 8: *global<u64>(target) = *global<const u64>(source); break;
        case 4: *global<u32>(target) = *global<const u32>(source); break;
        case 2: *global<u16>(target) = *global<const u16>(source); break;
        default: *global<u8>(target) = *global<const u8>(source); break;
    }
}

__device__ __forceinline__ void stage_unit(const StageJob& job, u32 unit) {
    const u32 row = divide(unit, job.row_units);
    const u32 in_row = unit - row * job.row_units.divisor;
    const u32 part = divide(in_row, job.part_units);
    const u64 in_part = static_cast<u64>(in_row - part * job.part_units.divisor) * job.unit_bytes;
    const u64 target = job.shadow + row * job.shadow_row_stride + part * job.shadow_part_stride + in_part;
    if (row < job.live) {
        const u32 physical = ring_row(job.first, row, job.ring_rows);
        const u64 source = job.ring + physical * job.ring_row_stride + part * job.ring_part_stride + in_part;
        copy_unit(source, target, job.unit_bytes);
        return;
    }
    const u64 source = job.chunk + (row - job.live) * job.chunk_row_stride + part * job.chunk_part_stride;
    if (job.format == kRaw) {
        copy_unit(source + in_part, target, job.unit_bytes);
    } else if (job.unit_bytes == 16) {
        round_wide(source + in_part * 2, target, job.format);
    } else {
        const float value = *global<const float>(source + in_part * 2);
        *global<u16>(target) = static_cast<u16>(rounded(value, job.format));
    }
}

}  // namespace kvpack

extern "C" __global__ void __launch_bounds__(kvpack::kThreads) kvpack_stage(const kvpack::StageJob* jobs,
                                                                            unsigned job_count) {
    using namespace kvpack;
    const StageJob job = jobs[job_of_tile(jobs, job_count, blockIdx.x)];
    const u32 begin = (blockIdx.x - job.tile_begin) * kTileUnits + threadIdx.x;
#pragma unroll 1
    for (u32 k = 0; k < kUnroll; ++k) {
        const u32 unit = begin + k * kThreads;
        if (unit < job.units) {
            stage_unit(job, unit);
        }
    }
}
