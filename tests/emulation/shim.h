// CUDA on a CPU, as much of it as the kernels use: enough to compile the .cu files with a C++ compiler and run every
// block and thread of a launch. Barriers need one OS thread a CUDA thread; without them a launch is two loops.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static  // one block runs at a time

struct Dim3 {
    unsigned x, y, z;
};
static thread_local Dim3 threadIdx, blockIdx;
static Dim3 blockDim, gridDim;
static pthread_barrier_t* barrier;  // null: the threads of this launch run one after the other

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

template <typename To, typename From>
static inline To same_bits(From from) {
    To to;
    static_assert(sizeof to == sizeof from, "");
    std::memcpy(&to, &from, sizeof to);
    return to;
}
static inline unsigned __float_as_uint(float value) { return same_bits<unsigned>(value); }
static inline float __uint_as_float(unsigned word) { return same_bits<float>(word); }
static inline void* __cvta_global_to_generic(size_t address) { return reinterpret_cast<void*>(address); }

static inline unsigned atomicMin(unsigned* at, unsigned value) {
    unsigned seen = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (value < seen && !__atomic_compare_exchange_n(at, &seen, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return seen;
}

static inline void __syncthreads() {
    if (barrier == nullptr) {
        __builtin_trap();  // a kernel with barriers was launched as loops
    }
    pthread_barrier_wait(barrier);
}

enum Order : int { kForward, kReverse, kShuffled, kThreaded };

template <typename... A, std::size_t... I>
static void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A*>(arguments[I])...);
}

template <typename... A>
static void launch(void (*kernel)(A...), void** arguments, unsigned grid, unsigned block, int order, unsigned seed) {
    const auto one = [&](std::uint64_t number) {
        blockIdx = {static_cast<unsigned>(number / block), 0, 0};
        threadIdx = {static_cast<unsigned>(number % block), 0, 0};
        call(kernel, arguments, std::index_sequence_for<A...>{});
    };
    const std::uint64_t all = static_cast<std::uint64_t>(grid) * block;
    blockDim = {block, 1, 1};
    gridDim = {grid, 1, 1};
    std::vector<std::uint64_t> numbers(order == kThreaded ? block : order == kShuffled ? all : 0);
    std::iota(numbers.begin(), numbers.end(), 0);
    std::shuffle(numbers.begin(), numbers.end(), std::mt19937(seed));
    if (order == kThreaded) {
        pthread_barrier_t blocks_barrier;
        pthread_barrier_init(&blocks_barrier, nullptr, block);
        barrier = &blocks_barrier;
        std::vector<std::thread> threads;
        for (const std::uint64_t thread : numbers) {  // the order in which they start
            threads.emplace_back([&, thread] {
                for (unsigned at = 0; at < grid; ++at) {
                    one(static_cast<std::uint64_t>(at) * block + thread);
                    pthread_barrier_wait(&blocks_barrier);  // the next block may have the shared memory
                }
            });
        }
        for (auto& thread : threads) {
            thread.join();
        }
        barrier = nullptr;
        pthread_barrier_destroy(&blocks_barrier);
        return;
    }
    if (order == kShuffled) {
        for (const std::uint64_t number : numbers) {
            one(number);
        }
        return;
    }
    for (std::uint64_t i = 0; i < all; ++i) {
        one(order == kForward ? i : all - 1 - i);
    }
}

// The entry point that Python calls for a kernel.
#define EMULATED(kernel)                                                                                               \
    extern "C" void emulated_##kernel(void** arguments, unsigned grid, unsigned block, int order, unsigned seed) {     \
        launch(kernel, arguments, grid, block, order, seed);                                                           \
    }
