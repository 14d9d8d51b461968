// How a block finds its job, a unit its place, and an address its memory.
#pragma once

#include "abi.h"

namespace kvpack {

// The last job whose tiles begin at or before `tile`.
template <typename Job>
__device__ __forceinline__ u32 job_of_tile(const Job* jobs, u32 job_count, u32 tile) {
    u32 low = 0;
    u32 high = job_count;
    while (high - low > 1) {
        const u32 middle = low + (high - low) / 2;
        if (jobs[middle].tile_begin <= tile) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

__device__ __forceinline__ u32 divide(u32 n, const Divisor& by) {
    return static_cast<u32>((static_cast<u64>(n) * by.magic) >> by.shift);
}

// An address out of a table is global memory; saying so keeps the compiler from generic loads and stores.
template <typename T>
__device__ __forceinline__ T* global(u64 address) {
    return static_cast<T*>(__cvta_global_to_generic(address));
}

__device__ __forceinline__ u32 ring_row(u32 first, u32 row, u32 ring_rows) {
    const u32 physical = first + row;
    return physical >= ring_rows ? physical - ring_rows : physical;
}

__device__ __forceinline__ u32 paged_row(u64 pages, u32 first, u32 row, const Divisor& page_rows) {
    const u32 logical = first + row;
    const u32 page = divide(logical, page_rows);
    const u32 slot = logical - page * page_rows.divisor;
    return static_cast<u32>(global<const i32>(pages)[page]) * page_rows.divisor + slot;
}

template <typename Job>
__device__ __forceinline__ u32 physical_row(const Job& job, u32 row) {
    return job.pages != 0 ? paged_row(job.pages, job.first, row, job.page_rows) : ring_row(job.first, row, job.ring_rows);
}

}  // namespace kvpack
