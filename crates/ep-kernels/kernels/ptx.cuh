// The one place that speaks PTX, but for the matrix multiplication's own instructions: every instruction
// that CUDA C++ has no words for, as a function. Who runs the kernels elsewhere than on a GPU replaces
// this file alone.

// Nanoseconds of the GPU's global timer, common to all SMs of a GPU. It advances in coarse steps.
__device__ inline u64 ep_globaltimer() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

__device__ inline u32 ep_smid() {
    u32 id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    return id;
}

__device__ inline u32 ep_nsmid() {
    u32 count;
    asm volatile("mov.u32 %0, %%nsmid;" : "=r"(count));
    return count;
}

// Occupies the calling thread until the global timer reaches `deadline`. Reads no memory: a thread
// that polls host memory over PCIe stalls every system-scope fence of other kernels.
__device__ inline void ep_hold_until(u64 deadline) {
    while (ep_globaltimer() < deadline) asm volatile("nanosleep.u32 500;");
}

#if __CUDA_ARCH__ >= 900
// Number of the block's cluster in the grid, blocks in it, and the block's number inside it.
__device__ inline u32 ep_cluster() {
    u32 id;
    asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(id));
    return id;
}

__device__ inline u32 ep_cluster_size() {
    u32 size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

__device__ inline u32 ep_cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
#endif

// 16-byte loads and stores.
struct EpQuad {
    u32 x, y, z, w;
};

__device__ inline EpQuad ep_load(u64 at) {
    EpQuad q;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w)
                 : "l"(at));
    return q;
}

__device__ inline void ep_store(u64 at, EpQuad q) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(q.x), "r"(q.y), "r"(q.z), "r"(q.w)
                 : "memory");
}

__device__ inline EpQuad ep_load_shared(u32 at) {
    EpQuad q;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w)
                 : "r"(at)
                 : "memory");
    return q;
}

// Release at system scope: who reads it with acquire, on any device or the host, sees what was written
// before it.
__device__ inline void ep_store_release(u32 *to, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ inline void ep_store_release(u64 *to, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

// A half's bits as a float.
__device__ inline float ep_widen_f16(u32 bits) {
    float value;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "r"(bits));
    return value;
}

// Two floats rounded to nearest even, `low` in the lower half.
__device__ inline u32 ep_narrow_bf16x2(float high, float low) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ inline u32 ep_narrow_f16x2(float high, float low) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Both sums of two pairs, each rounded once. For bf16 there is no addition on sm_80: a * 1 + b.
__device__ inline u32 ep_add_bf16x2(u32 a, u32 b) {
    u32 sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(0x3f803f80u), "r"(b));
    return sum;
}

__device__ inline u32 ep_add_f16x2(u32 a, u32 b) {
    u32 sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}

// Bulk copies between global and shared memory.
#if __CUDA_ARCH__ >= 900
__device__ inline void ep_barrier_init(u32 barrier) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

// Makes initialised barriers visible to bulk copies.
__device__ inline void ep_barriers_ready() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Starts copying `bytes` (a multiple of 16) to shared memory; the barrier's phase ends when they are
// there.
__device__ inline void ep_bulk_load(u32 to, u64 from, u32 bytes, u32 barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ inline void ep_barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred p;\n"
        "EP_AGAIN_%=: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
        "@!p bra EP_AGAIN_%=; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ inline void ep_bulk_store(u64 to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0],[%1],%2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}

__device__ inline void ep_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but the latest `newest` groups of this thread have read shared memory.
template <int newest>
__device__ inline void ep_bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(newest) : "memory");
}

// Waits until everything this thread stored in bulk has been written: needed before the end of a
// kernel whose stores others are told of.
__device__ inline void ep_bulk_wait_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
#endif
