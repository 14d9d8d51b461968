// Rows between their places in a plane and canonical order (token-major, one row behind the other): one launch for
// every plane of every layer. Specification: `gather` and `scatter` of kvpack.device.host.
//
// Launch: grid = tiles of the table, block = kThreads. No two threads write one byte, so there is nothing to wait for.
#include "tiles.h"

namespace kvpack {

template <typename Unit>
__device__ __forceinline__ u64 place(const MoveJob& job, u32 unit) {
    const u32 row = divide(unit, job.row_units);
    const u32 in_row = unit - row * job.row_units.divisor;
    const u32 part = divide(in_row, job.part_units);
    const u32 in_part = in_row - part * job.part_units.divisor;
    return job.plane + physical_row(job, row) * job.row_stride + part * job.part_stride + in_part * sizeof(Unit);
}

// Every thread loads all its units before it stores the first, to have them in flight together. So that no branch
// stands between the loads, units past the job's end load its last unit, and are not stored.
template <typename Unit, bool kGather>
__device__ __forceinline__ void move_tile(const MoveJob& job, u32 tile) {
    const u32 begin = tile * kTileUnits + threadIdx.x;
    const u32 last = job.units - 1;
    Unit held[kUnroll];
#pragma unroll
    for (u32 k = 0; k < kUnroll; ++k) {
        const u32 ahead = begin + k * kThreads;
        const u32 unit = ahead < last ? ahead : last;
        const u64 source = kGather ? place<Unit>(job, unit) : job.packed + static_cast<u64>(unit) * sizeof(Unit);
        held[k] = *global<const Unit>(source);
    }
#pragma unroll
    for (u32 k = 0; k < kUnroll; ++k) {
        const u32 unit = begin + k * kThreads;
        if (unit <= last) {
            const u64 target = kGather ? job.packed + static_cast<u64>(unit) * sizeof(Unit) : place<Unit>(job, unit);
            *global<Unit>(target) = held[k];
        }
    }
}

template <bool kGather>
__device__ __forceinline__ void move(const MoveJob* jobs, u32 job_count) {
    const MoveJob job = jobs[job_of_tile(jobs, job_count, blockIdx.x)];
    const u32 tile = blockIdx.x - job.tile_begin;
    switch (job.unit_bytes) {
        case 16: move_tile<uint4, kGather>(job, tile); break;
        case 8: move_tile<u64, kGather>(job, tile); break;
        case 4: move_tile<u32, kGather>(job, tile); break;
        case 2: move_tile<u16, kGather>(job, tile); break;
        default: move_tile<u8, kGather>(job, tile); break;
    }
}

}  // namespace kvpack

extern "C" __global__ void __launch_bounds__(kvpack::kThreads) kvpack_gather(const kvpack::MoveJob* jobs, unsigned job_count) {
    kvpack::move<true>(jobs, job_count);
}

extern "C" __global__ void __launch_bounds__(kvpack::kThreads) kvpack_scatter(const kvpack::MoveJob* jobs, unsigned job_count) {
    kvpack::move<false>(jobs, job_count);
}
