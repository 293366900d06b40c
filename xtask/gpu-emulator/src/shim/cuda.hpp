// CUDA C++ in terms of C++, as far as the project's kernels use it. Put before a source; the emulator
// runs every CUDA thread on a stack of its own, at whose end its `EpThread` is.

typedef unsigned int u32;
typedef unsigned long long u64;

struct EpIndex {
    u32 x, y, z;
};

// As `Thread` of src/kernel/thread.rs.
struct EpThread {
    EpIndex thread, block, block_size, grid_size;
    unsigned char *shared;
    u32 shared_bytes, static_bytes;
};

// As `Host` of src/kernel/host.rs.
struct EpHost {
    u32 (*block)(EpThread *, u32 kind, u32 value);
    u64 (*warp)(EpThread *, u32 kind, u32 mask, u64 value, u32 argument);
    [[noreturn]] void (*fault)(EpThread *, const char *what, u64 value);
    u64 (*special)(EpThread *, u32 which);
    void (*hold_until)(EpThread *, u64 deadline);
    void (*pause)(EpThread *);
    void (*barrier_init)(EpThread *, u32 barrier);
    void (*barriers_ready)(EpThread *);
    void (*barrier_wait)(EpThread *, u32 barrier, u32 parity);
    void (*bulk_load)(EpThread *, u32 to, u64 from, u32 bytes, u32 barrier);
    void (*bulk_store)(EpThread *, u64 to, u32 from, u32 bytes);
    void (*bulk_commit)(EpThread *);
    void (*bulk_wait)(EpThread *, u32 newest, u32 written);
};

static const EpHost *ep_host;
extern "C" __attribute__((visibility("default"))) void ep_set_host(const EpHost *host) { ep_host = host; }

#define EP_INLINE static inline __attribute__((always_inline))

// Stacks are EP_STACK_BYTES long and aligned to that; see src/kernel/stack.rs for what is at their end.
EP_INLINE EpThread *ep_self() {
    u64 base = (u64)__builtin_frame_address(0) & ~(u64)(EP_STACK_BYTES - 1);
    u64 colour = base / EP_STACK_BYTES % EP_STACK_COLOURS;
    return (EpThread *)(base + EP_STACK_BYTES - EP_STACK_SPAN * (colour + 1));
}

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define threadIdx (ep_self()->thread)
#define blockIdx (ep_self()->block)
#define blockDim (ep_self()->block_size)
#define gridDim (ep_self()->grid_size)
#define warpSize 32

// Shared memory. `__shared__` declarations are rewritten to these before compilation. Static ones have
// their place in the section `ep_shared`, of which every block gets a copy; dynamic ones follow it.
extern "C" {
extern unsigned char ep_shared_first[] __asm__("__start_ep_shared") __attribute__((weak, visibility("hidden")));
extern unsigned char ep_shared_end[] __asm__("__stop_ep_shared") __attribute__((weak, visibility("hidden")));
__attribute__((visibility("default"))) u64 ep_static_shared() { return (u64)ep_shared_end - (u64)ep_shared_first; }
}

template <typename T>
struct EpPlace {
    alignas(T) unsigned char bytes[sizeof(T)];
};

EP_INLINE void *ep_static_place(const void *place) {
    return ep_self()->shared + ((u64)place - (u64)ep_shared_first);
}

EP_INLINE void *ep_dynamic_place() { return ep_self()->shared + ep_self()->static_bytes; }

// Addresses of shared memory do not start at 0, as on devices that reserve some.
#define EP_SHARED_AT 1024u

EP_INLINE u64 __cvta_generic_to_shared(const void *p) {
    u64 at = (u64)p - (u64)ep_self()->shared;
    if (at > ep_self()->shared_bytes) ep_host->fault(ep_self(), "no address of shared memory", (u64)p);
    return at + EP_SHARED_AT;
}

// Barriers and fences of a block.
EP_INLINE void __syncthreads() { ep_host->block(ep_self(), 0, 0); }
EP_INLINE int __syncthreads_or(int value) { return (int)ep_host->block(ep_self(), 1, value != 0); }
EP_INLINE int __syncthreads_and(int value) { return (int)ep_host->block(ep_self(), 2, value != 0); }
EP_INLINE int __syncthreads_count(int value) { return (int)ep_host->block(ep_self(), 3, value != 0); }
EP_INLINE void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
EP_INLINE void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
EP_INLINE void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// What a warp does together.
template <typename T>
EP_INLINE u64 ep_bits(T value) {
    static_assert(sizeof(T) <= 8, "lanes exchange eight bytes at most");
    u64 bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    return bits;
}

template <typename T>
EP_INLINE T ep_value(u64 bits) {
    T value;
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}

#define EP_WARP_SYNC 0
#define EP_WARP_SHUFFLE(name, kind)                                                                \
    template <typename T>                                                                          \
    EP_INLINE T name(u32 mask, T value, u32 argument, u32 width = 32) {                            \
        return ep_value<T>(ep_host->warp(ep_self(), kind, mask, ep_bits(value), width << 16 | (argument & 0xffff))); \
    }
EP_WARP_SHUFFLE(__shfl_sync, 1)
EP_WARP_SHUFFLE(__shfl_up_sync, 2)
EP_WARP_SHUFFLE(__shfl_down_sync, 3)
EP_WARP_SHUFFLE(__shfl_xor_sync, 4)
#undef EP_WARP_SHUFFLE

EP_INLINE void __syncwarp(u32 mask = 0xffffffffu) { ep_host->warp(ep_self(), EP_WARP_SYNC, mask, 0, 0); }
EP_INLINE u32 __ballot_sync(u32 mask, int value) { return (u32)ep_host->warp(ep_self(), 5, mask, value != 0, 0); }
EP_INLINE int __any_sync(u32 mask, int value) { return (int)ep_host->warp(ep_self(), 6, mask, value != 0, 0); }
EP_INLINE int __all_sync(u32 mask, int value) { return (int)ep_host->warp(ep_self(), 7, mask, value != 0, 0); }

template <typename T>
EP_INLINE u32 __match_any_sync(u32 mask, T value) {
    return (u32)ep_host->warp(ep_self(), 8, mask, ep_bits(value), 0);
}

#define EP_WARP_REDUCE(name, type, kind) \
    EP_INLINE type name(u32 mask, type value) { return (type)ep_host->warp(ep_self(), kind, mask, (u64)value, 0); }
EP_WARP_REDUCE(__reduce_max_sync, u32, 9)
EP_WARP_REDUCE(__reduce_min_sync, u32, 10)
EP_WARP_REDUCE(__reduce_add_sync, u32, 11)
EP_WARP_REDUCE(__reduce_and_sync, u32, 12)
EP_WARP_REDUCE(__reduce_or_sync, u32, 13)
EP_WARP_REDUCE(__reduce_xor_sync, u32, 14)
#undef EP_WARP_REDUCE

// Which lanes run together is nobody's promise: this one does.
EP_INLINE u32 __activemask() { return 1u << (ep_self()->thread.x & 31); }

// Bits and numbers.
EP_INLINE int __popc(u32 x) { return __builtin_popcount(x); }
EP_INLINE int __popcll(u64 x) { return __builtin_popcountll(x); }
EP_INLINE int __ffs(int x) { return __builtin_ffs(x); }
EP_INLINE int __clz(int x) { return x ? __builtin_clz((u32)x) : 32; }
EP_INLINE float __uint_as_float(u32 x) { return __builtin_bit_cast(float, x); }
EP_INLINE u32 __float_as_uint(float x) { return __builtin_bit_cast(u32, x); }
EP_INLINE float __fadd_rn(float a, float b) { return a + b; }
EP_INLINE float __fmul_rn(float a, float b) { return a * b; }
EP_INLINE float __fdiv_rn(float a, float b) { return a / b; }
EP_INLINE float fminf(float a, float b) { return __builtin_fminf(a, b); }
EP_INLINE float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
EP_INLINE float fabsf(float x) { return __builtin_fabsf(x); }

// Atomics, of the whole system: streams of other devices are other threads. Each may let other
// threads of the grid come first.
template <typename T>
struct EpSame {
    typedef T type;
};

template <typename T, typename F>
EP_INLINE T ep_atomic(T *at, F change) {
    ep_host->pause(ep_self());
    if ((u64)at % sizeof(T)) ep_host->fault(ep_self(), "misaligned atomic", (u64)at);
    T old = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(at, &old, change(old), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return old;
}

#define EP_ATOMIC(name, expression)                                                          \
    template <typename T>                                                                    \
    EP_INLINE T name(T *at, typename EpSame<T>::type value) {                                \
        return ep_atomic(at, [=](T old) -> T { return expression; });                        \
    }
EP_ATOMIC(atomicAdd, old + value)
EP_ATOMIC(atomicSub, old - value)
EP_ATOMIC(atomicMin, old < value ? old : value)
EP_ATOMIC(atomicMax, old > value ? old : value)
EP_ATOMIC(atomicOr, old | value)
EP_ATOMIC(atomicAnd, old & value)
EP_ATOMIC(atomicXor, old ^ value)
EP_ATOMIC(atomicExch, value)
#undef EP_ATOMIC

template <typename T>
EP_INLINE T atomicCAS(T *at, typename EpSame<T>::type expected, typename EpSame<T>::type value) {
    return ep_atomic(at, [=](T old) -> T { return old == expected ? value : old; });
}

// How the emulator calls a kernel: by an array of pointers to its parameters, whose sizes are told.
template <typename T>
struct EpBare {
    typedef T type;
};
template <typename T>
struct EpBare<T &> {
    typedef T type;
};

template <u64... I>
struct EpNumbers {};
template <u64 N, u64... I>
struct EpCount : EpCount<N - 1, N - 1, I...> {};
template <u64... I>
struct EpCount<0, I...> {
    typedef EpNumbers<I...> type;
};

struct EpKernelInfo {
    u32 max_threads, params, sizes[30];
};

template <typename... A, u64... I>
EP_INLINE void ep_call_with(void (*kernel)(A...), void *const *params, EpNumbers<I...>) {
    kernel(*(typename EpBare<A>::type *)params[I]...);
}

template <typename... A>
EP_INLINE void ep_call(void (*kernel)(A...), void *const *params) {
    ep_call_with(kernel, params, typename EpCount<sizeof...(A)>::type());
}

template <typename... A>
constexpr EpKernelInfo ep_info(void (*)(A...), u32 max_threads) {
    return {max_threads, sizeof...(A), {sizeof(typename EpBare<A>::type)...}};
}
