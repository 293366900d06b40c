// Bulk copies as kernels use them, and the mistakes that have to show: one warp copies `pieces` pieces of
// 512 bytes through two buffers.

#define RIGHT 0
#define READS_EARLY 1
#define OVERWRITES 2
#define LEAVES 3
#define NO_FENCE 4
#define NOT_INITIALISED 5
#define TWO_LOADS 6
#define MISALIGNED 7
#define WRONG_PHASE 8

template <int MISTAKE>
__device__ void copy(u64 to, u64 from, u32 pieces) {
    extern __shared__ __align__(128) unsigned char shared[];
    u32 buffer = (u32)__cvta_generic_to_shared(shared), barrier = buffer + 1024, lane = threadIdx.x;
    if (lane == 0 && MISTAKE != NOT_INITIALISED) {
        ep_barrier_init(barrier);
        ep_barrier_init(barrier + 8);
        if (MISTAKE != NO_FENCE) ep_barriers_ready();
    }
    __syncwarp();
    if (lane == 0) ep_bulk_load(buffer, from, MISTAKE == MISALIGNED ? 504 : 512, barrier);
    if (MISTAKE == TWO_LOADS && lane == 0) ep_bulk_load(buffer, from, 512, barrier);
    for (u32 k = 0; k < pieces; k++) {
        u32 s = k & 1;
        if (MISTAKE != READS_EARLY) ep_barrier_wait(barrier + 8 * s, (k >> 1 & 1) ^ (MISTAKE == WRONG_PHASE));
        // By the generic way and in bulk, so that both kinds of reading show.
        EpQuad quad = ep_load_shared(buffer + 512 * s + 16 * lane);
        ep_store(to + 1024ull * k + 16 * lane, quad);
        if (MISTAKE == READS_EARLY) ep_barrier_wait(barrier + 8 * s, k >> 1 & 1);
        __syncwarp();
        if (lane == 0) {
            ep_bulk_store(to + 1024ull * k + 512, buffer + 512 * s, 512);
            ep_bulk_commit();
            // The other buffer was stored from one piece ago.
            if (MISTAKE != OVERWRITES && MISTAKE != LEAVES) ep_bulk_wait_read<1>();
            if (k + 1 < pieces) {
                if (k > 0 && MISTAKE == LEAVES) ep_bulk_wait_read<1>();
                ep_bulk_load(buffer + 512 * (s ^ 1), from + 512ull * (k + 1), 512, barrier + 8 * (s ^ 1));
            }
        }
        __syncwarp();
    }
    if (MISTAKE != LEAVES && lane == 0) ep_bulk_wait_written();
}

#define COPY(MISTAKE)                                                                             \
    extern "C" __global__ void __launch_bounds__(32) copy##MISTAKE(u64 to, u64 from, u32 pieces) { \
        copy<MISTAKE>(to, from, pieces);                                                         \
    }
COPY(0)
COPY(1)
COPY(2)
COPY(3)
COPY(4)
COPY(5)
COPY(6)
COPY(7)
COPY(8)

// A store that is never waited for beyond its reading of shared memory.
extern "C" __global__ void store(u64 to) {
    extern __shared__ __align__(128) unsigned char shared[];
    ((u32 *)shared)[threadIdx.x] = threadIdx.x;
    __syncwarp();
    if (threadIdx.x != 0) return;
    ep_bulk_store(to, (u32)__cvta_generic_to_shared(shared), 128);
    ep_bulk_commit();
    ep_bulk_wait_read<0>();
}
