// Bulk copies between global and shared memory (sm_90), and 16-byte loads and stores.

__device__ inline u32 ep_shared(const void *p) { return (u32)__cvta_generic_to_shared(p); }

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

// Walks over (row, part) pairs dealt round robin to warps, without a division per step.
struct EpWalk {
    u32 row, part, step_rows, step_parts, parts;
};

__device__ inline EpWalk ep_walk(u32 parts) {
    u32 warps = blockDim.x / 32, first = blockIdx.x * warps + threadIdx.x / 32, step = gridDim.x * warps;
    return EpWalk{first / parts, first % parts, step / parts, step % parts, parts};
}

__device__ inline void ep_step(EpWalk &walk) {
    walk.row += walk.step_rows;
    walk.part += walk.step_parts;
    if (walk.part >= walk.parts) {
        walk.part -= walk.parts;
        walk.row++;
    }
}
