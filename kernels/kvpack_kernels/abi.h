// What the host and the kernels agree on: the job tables, byte for byte. kvpack_kernels/abi.py holds the same structs
// as NumPy dtypes and builds them; a test compares every offset and size.
//
// A job is one plane's part of a launch. A launch has tiles, one a block of threads: job j owns the tiles from its
// `tile_begin` up to that of job j + 1, and a block finds its job by binary search. The kernels trust the table: every
// check (alignment, extents, `first < ring_rows`, page numbers, disjoint destinations) is the host's, before the launch.
#pragma once

namespace kvpack {

using u8 = unsigned char;
using i8 = signed char;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 kThreads = 256;             // threads a block, in every kernel
constexpr u32 kUnroll = 4;                // units a thread, in the kernels that go by tiles of units
constexpr u32 kTileUnits = kThreads * kUnroll;
constexpr u32 kChunkBytes = 1024;         // a leaf of BLAKE3's tree

// Element formats of `StageJob` and `RopeJob`.
constexpr u32 kF32 = 0;
constexpr u32 kF16 = 1;
constexpr u32 kBf16 = 2;
constexpr u32 kRaw = 3;  // the chunk of a stage is in the ring's own bytes

// A divisor with its reciprocal: for n < 2^31, n / divisor = (n * magic) >> shift.
struct Divisor {
    u32 divisor;
    u32 magic;
    u32 shift;
};

// Rows of one plane to or from canonical order. A unit is one access of `unit_bytes` (16, 8, 4, 2 or 1); everything
// below is a multiple of it. Rows lie at `plane + physical * row_stride + part * part_stride`.
//   ring (linear too, with `ring_rows` past the last row): physical = first + row, less `ring_rows` where it reaches it
//   paged (`pages` not 0): physical = pages[(first + row) / page_rows] * page_rows + (first + row) % page_rows
struct MoveJob {
    u64 plane;          // address of part 0 of physical row 0
    u64 packed;         // address of the first row in canonical order
    u64 pages;          // address of the block table, i32 page numbers; 0 where the plane is not paged
    u64 row_stride;     // bytes
    u64 part_stride;    // bytes
    u32 units;          // of the whole job, below 2^31
    u32 unit_bytes;
    Divisor row_units;  // units of a row
    Divisor part_units; // units of a part of a row (a head)
    Divisor page_rows;  // rows of a page; 1 where the plane is not paged
    u32 first;
    u32 ring_rows;
    u32 tile_begin;
};
static_assert(sizeof(MoveJob) == 96, "the table is read with a stride of 96 bytes");

// A chunk that would overwrite ring rows that its own queries still need: the ring's live rows, un-rotated, and the
// chunk's rows behind them, in one linear shadow. A unit is one access of `unit_bytes` of ring and shadow: as in MoveJob
// where the chunk is raw, 16 or 2 where its f32 numbers become f16 or bf16.
struct StageJob {
    u64 ring;               // address of part 0 of physical row 0
    u64 chunk;              // address of the chunk's first row
    u64 shadow;             // address of the shadow's first row
    u64 ring_row_stride;    // bytes, as all that follow
    u64 ring_part_stride;
    u64 chunk_row_stride;
    u64 chunk_part_stride;
    u64 shadow_row_stride;
    u64 shadow_part_stride;
    u32 units;              // of the live rows and the chunk's, below 2^31
    u32 unit_bytes;
    Divisor row_units;
    Divisor part_units;
    u32 first;              // physical row of the oldest live row
    u32 ring_rows;
    u32 live;               // rows that come from the ring
    u32 format;             // kRaw, kF16 or kBf16
    u32 tile_begin;
    u32 reserved;
};
static_assert(sizeof(StageJob) == 128, "the table is read with a stride of 128 bytes");

// Rows of K turned in place. Pair i of a head has its members at element `i * pair_step` and `pair_gap` elements
// behind, counted from `rotary_offset`. Placement as in MoveJob. A unit is one pair.
struct RopeJob {
    u64 plane;
    u64 pages;
    u64 cosines;        // address of f32 [rows or 1][pairs]
    u64 sines;
    u64 row_stride;     // bytes
    u64 part_stride;    // bytes
    u32 table_stride;   // f32 numbers between two rows' angles; 0 where all rows turn by the same
    u32 units;          // of the whole job, below 2^31
    Divisor row_pairs;  // pairs of a row, all heads
    Divisor pairs;      // pairs of a head
    Divisor page_rows;
    u32 first;
    u32 ring_rows;
    u32 rotary_offset;  // bytes from a head's start to the first element that turns
    u32 pair_step;      // elements: 1 (half), 2 (interleaved)
    u32 pair_gap;       // elements: pairs (half), 1 (interleaved)
    u32 format;
    u32 tile_begin;
};
static_assert(sizeof(RopeJob) == 120, "the table is read with a stride of 120 bytes");

// One message to hash. A tile is up to kThreads chunks of kChunkBytes.
struct HashJob {
    u64 source;         // address, a multiple of 16
    u64 length;         // bytes; 0 is a message too
    u32 tile_begin;
    u32 tiles;          // at least 1
};
static_assert(sizeof(HashJob) == 24, "the table is read with a stride of 24 bytes");

}  // namespace kvpack
