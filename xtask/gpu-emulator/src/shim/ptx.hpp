// What kernels/ptx.cuh does, on the CPU.

EP_INLINE u64 ep_globaltimer() { return ep_host->special(ep_self(), 0); }
EP_INLINE u32 ep_smid() { return (u32)ep_host->special(ep_self(), 1); }
EP_INLINE u32 ep_nsmid() { return (u32)ep_host->special(ep_self(), 2); }
EP_INLINE u32 ep_cluster() { return (u32)ep_host->special(ep_self(), 3); }
EP_INLINE u32 ep_cluster_size() { return (u32)ep_host->special(ep_self(), 4); }
EP_INLINE u32 ep_cluster_rank() { return (u32)ep_host->special(ep_self(), 5); }
EP_INLINE void ep_hold_until(u64 deadline) { ep_host->hold_until(ep_self(), deadline); }

struct EpQuad {
    u32 x, y, z, w;
};

// One vector access, so that who reads sixteen bytes beside a write finds all of it or nothing.
typedef u32 EpVector __attribute__((vector_size(16)));

EP_INLINE void ep_aligned(u64 at) {
    if (at & 15) ep_host->fault(ep_self(), "misaligned access of 16 bytes", at);
}

EP_INLINE EpQuad ep_load(u64 at) {
    ep_aligned(at);
    EpVector v = *(const volatile EpVector *)at;
    return EpQuad{v[0], v[1], v[2], v[3]};
}

EP_INLINE void ep_store(u64 at, EpQuad q) {
    ep_aligned(at);
    *(volatile EpVector *)at = EpVector{q.x, q.y, q.z, q.w};
}

EP_INLINE EpQuad ep_load_shared(u32 at) {
    u64 from = (u64)at - EP_SHARED_AT;
    if (from + 16 > ep_self()->shared_bytes) ep_host->fault(ep_self(), "beyond shared memory", at);
    return ep_load((u64)ep_self()->shared + from);
}

EP_INLINE void ep_store_release(u32 *to, u32 value) { __atomic_store_n(to, value, __ATOMIC_RELEASE); }
EP_INLINE void ep_store_release(u64 *to, u64 value) { __atomic_store_n(to, value, __ATOMIC_RELEASE); }

// Halves: sign, 5 bits of exponent with bias 15, 10 bits of mantissa.
EP_INLINE float ep_widen_f16(u32 bits) {
    u32 sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, mantissa = bits & 0x3ffu;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
    if (exponent != 0) return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
    float magnitude = (float)mantissa * 5.9604644775390625e-8f;  // 2^-24
    return __uint_as_float(sign | __float_as_uint(magnitude));
}

EP_INLINE u32 ep_f16_bits(float x) {
    u32 bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fffu;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more round to infinity
    if (magnitude < 0x38800000u) {
        // Below 2^-14 one ulp is 2^-24, that of 2^-1: the addition rounds to it.
        float rounded = __uint_as_float(magnitude) + 0.5f;
        return sign | (__float_as_uint(rounded) - 0x3f000000u);
    }
    magnitude += 0xfffu + (magnitude >> 13 & 1);
    return sign | ((magnitude >> 13) - (112u << 10));
}

EP_INLINE u32 ep_bf16_bits(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

EP_INLINE u32 ep_narrow_bf16x2(float high, float low) { return ep_bf16_bits(high) << 16 | ep_bf16_bits(low); }
EP_INLINE u32 ep_narrow_f16x2(float high, float low) { return ep_f16_bits(high) << 16 | ep_f16_bits(low); }

// Rounded to f32 first: that changes nothing, as kernels/numbers.cuh says.
EP_INLINE u32 ep_add_bf16x2(u32 a, u32 b) {
    return ep_narrow_bf16x2(__uint_as_float(a & 0xffff0000u) + __uint_as_float(b & 0xffff0000u),
                            __uint_as_float(a << 16) + __uint_as_float(b << 16));
}

EP_INLINE u32 ep_add_f16x2(u32 a, u32 b) {
    return ep_narrow_f16x2(ep_widen_f16(a >> 16) + ep_widen_f16(b >> 16),
                           ep_widen_f16(a & 0xffff) + ep_widen_f16(b & 0xffff));
}

#if __CUDA_ARCH__ >= 900
EP_INLINE void ep_barrier_init(u32 barrier) { ep_host->barrier_init(ep_self(), barrier); }
EP_INLINE void ep_barriers_ready() { ep_host->barriers_ready(ep_self()); }
EP_INLINE void ep_barrier_wait(u32 barrier, u32 parity) { ep_host->barrier_wait(ep_self(), barrier, parity); }
EP_INLINE void ep_bulk_load(u32 to, u64 from, u32 bytes, u32 barrier) {
    ep_host->bulk_load(ep_self(), to, from, bytes, barrier);
}
EP_INLINE void ep_bulk_store(u64 to, u32 from, u32 bytes) { ep_host->bulk_store(ep_self(), to, from, bytes); }
EP_INLINE void ep_bulk_commit() { ep_host->bulk_commit(ep_self()); }
template <int newest>
EP_INLINE void ep_bulk_wait_read() {
    ep_host->bulk_wait(ep_self(), newest, 0);
}
EP_INLINE void ep_bulk_wait_written() { ep_host->bulk_wait(ep_self(), 0, 1); }
#endif
