// BLAKE3-256 (unkeyed) of messages in device memory: raw tiles, after their copy. Specification: the blake3 package.
//
// Two launches. `kvpack_hash_tiles`: one thread a chunk of 1 KiB, blockDim.x chunks (a power of two, at most kThreads)
// a tile, merged in the block to one node of the tree a tile. `kvpack_hash_roots`: one block a message, which merges
// its nodes. `nodes` has 8 words a tile, `digests` 8 words a message.
//
// Both merge by strides: node i of a level with stride s stands at i * s and takes in its neighbour at i * s + s, where
// there is one. That is the tree of BLAKE3, whose left half is always the largest power of two of chunks.
#include "tiles.h"

namespace kvpack {

constexpr u32 kChunkStart = 1;
constexpr u32 kChunkEnd = 2;
constexpr u32 kParent = 4;
constexpr u32 kRoot = 8;
constexpr u32 kBlockBytes = 64;

struct Node {
    u32 word[8];
};

__device__ __forceinline__ Node initial() {
    return {{0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19}};
}

__device__ __forceinline__ u32 rotated(u32 value, u32 by) { return value >> by | value << (32 - by); }

__device__ __forceinline__ void mix(u32& a, u32& b, u32& c, u32& d, u32 x, u32 y) {
    a = a + b + x;
    d = rotated(d ^ a, 16);
    c = c + d;
    b = rotated(b ^ c, 12);
    a = a + b + y;
    d = rotated(d ^ a, 8);
    c = c + d;
    b = rotated(b ^ c, 7);
}

__device__ __forceinline__ void mix_round(u32 (&s)[16], const u32 (&m)[16]) {
    mix(s[0], s[4], s[8], s[12], m[0], m[1]);
    mix(s[1], s[5], s[9], s[13], m[2], m[3]);
    mix(s[2], s[6], s[10], s[14], m[4], m[5]);
    mix(s[3], s[7], s[11], s[15], m[6], m[7]);
    mix(s[0], s[5], s[10], s[15], m[8], m[9]);
    mix(s[1], s[6], s[11], s[12], m[10], m[11]);
    mix(s[2], s[7], s[8], s[13], m[12], m[13]);
    mix(s[3], s[4], s[9], s[14], m[14], m[15]);
}

__device__ __forceinline__ void permute(u32 (&m)[16]) {
    const u32 n[16] = {m[2], m[6], m[3], m[10], m[7], m[0], m[4], m[13], m[1], m[11], m[12], m[5], m[9], m[14], m[15], m[8]};
#pragma unroll
    for (u32 i = 0; i < 16; ++i) {
        m[i] = n[i];
    }
}

__device__ __forceinline__ void compress(Node& node, u32 (&m)[16], u64 counter, u32 length, u32 flags) {
    const Node start = initial();
    u32 s[16];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        s[i] = node.word[i];
        s[8 + i] = start.word[i];
    }
    s[12] = static_cast<u32>(counter);
    s[13] = static_cast<u32>(counter >> 32);
    s[14] = length;
    s[15] = flags;
#pragma unroll
    for (u32 i = 0; i < 6; ++i) {
        mix_round(s, m);
        permute(m);
    }
    mix_round(s, m);
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        node.word[i] = s[i] ^ s[i + 8];
    }
}

__device__ __forceinline__ void load_whole(u64 source, u32 (&m)[16]) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const uint4 four = global<const uint4>(source)[i];
        m[4 * i] = four.x;
        m[4 * i + 1] = four.y;
        m[4 * i + 2] = four.z;
        m[4 * i + 3] = four.w;
    }
}

// The last block of a message, zeros behind its end; not a byte past the end is read.
__device__ __forceinline__ void load_part(u64 source, u32 length, u32 (&m)[16]) {
    const u32 whole = length / 4;
    u32 rest = 0;
    for (u32 i = whole * 4; i < length; ++i) {
        rest |= static_cast<u32>(global<const u8>(source)[i]) << (8 * (i & 3));
    }
#pragma unroll
    for (u32 i = 0; i < 16; ++i) {
        m[i] = i < whole ? global<const u32>(source)[i] : (i == whole ? rest : 0);
    }
}

__device__ __forceinline__ Node chunk_node(u64 source, u32 length, u64 counter, u32 root) {
    Node node = initial();
    u32 flags = kChunkStart;
    u32 at = 0;
    u32 m[16];
#pragma unroll 1
    for (; at + kBlockBytes < length; at += kBlockBytes) {
        load_whole(source + at, m);
        compress(node, m, counter, kBlockBytes, flags);
        flags = 0;
    }
    load_part(source + at, length - at, m);
    compress(node, m, counter, length - at, flags | kChunkEnd | root);
    return node;
}

__device__ __forceinline__ Node parent_node(const Node& left, const Node& right, u32 root) {
    u32 m[16];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        m[i] = left.word[i];
        m[8 + i] = right.word[i];
    }
    Node node = initial();
    compress(node, m, 0, kBlockBytes, kParent | root);
    return node;
}

}  // namespace kvpack

extern "C" __global__ void __launch_bounds__(kvpack::kThreads)
    kvpack_hash_tiles(const kvpack::HashJob* jobs, unsigned job_count, unsigned* nodes) {
    using namespace kvpack;
    __shared__ u32 tree[8][kThreads];  // word-major: neighbouring threads meet neighbouring banks
    const HashJob job = jobs[job_of_tile(jobs, job_count, blockIdx.x)];
    const u64 first = static_cast<u64>(blockIdx.x - job.tile_begin) * blockDim.x;
    const u64 chunks = job.length > kChunkBytes ? (job.length + kChunkBytes - 1) / kChunkBytes : 1;
    const u32 count = chunks - first < blockDim.x ? static_cast<u32>(chunks - first) : blockDim.x;
    const u32 me = threadIdx.x;
    if (me < count) {
        const u64 begin = (first + me) * kChunkBytes;
        const u32 length = job.length - begin < kChunkBytes ? static_cast<u32>(job.length - begin) : kChunkBytes;
        const Node node = chunk_node(job.source + begin, length, first + me, chunks == 1 ? kRoot : 0);
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            tree[i][me] = node.word[i];
        }
    }
#pragma unroll 1
    for (u32 stride = 1; stride < count; stride *= 2) {
        __syncthreads();
        const u32 left = 2 * me * stride;
        const u32 right = left + stride;
        if (right < count) {
            Node low;
            Node high;
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                low.word[i] = tree[i][left];
                high.word[i] = tree[i][right];
            }
            const Node node = parent_node(low, high, job.tiles == 1 && 2 * stride >= count ? kRoot : 0);
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                tree[i][left] = node.word[i];
            }
        }
    }
    if (me == 0) {  // it did the last merge itself
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            nodes[static_cast<u64>(blockIdx.x) * 8 + i] = tree[i][0];
        }
    }
}

extern "C" __global__ void __launch_bounds__(kvpack::kThreads)
    kvpack_hash_roots(const kvpack::HashJob* jobs, unsigned* nodes, unsigned* digests) {
    using namespace kvpack;
    const HashJob job = jobs[blockIdx.x];
    Node* tree = reinterpret_cast<Node*>(nodes) + job.tile_begin;
#pragma unroll 1
    for (u32 stride = 1; stride < job.tiles; stride *= 2) {
        const u32 root = 2 * stride >= job.tiles ? kRoot : 0;
#pragma unroll 1
        for (u64 left = 2ull * threadIdx.x * stride; left + stride < job.tiles; left += 2ull * blockDim.x * stride) {
            tree[left] = parent_node(tree[left], tree[left + stride], root);
        }
        __syncthreads();
    }
    if (threadIdx.x < 8) {
        digests[static_cast<u64>(blockIdx.x) * 8 + threadIdx.x] = tree[0].word[threadIdx.x];
    }
}
