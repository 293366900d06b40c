// D[M,N] = A[M,K] * B[N,K]^T, row-major bf16, accumulated in f32: the compute that communication
// runs beside. A persistent grid: block b takes output tiles b, b + grid, ... and waits for no other
// block. A tile's value depends on nothing but A and B, so D is the same for every grid.
//
// sm_90a: tensor copies into four stages of shared memory by one producing thread, two consuming
// warpgroups of wgmma.m64n256k16, each 64 rows of a tile. Elsewhere: cp.async, ldmatrix and
// mma.m16n8k16. Both keep 128-byte rows of 64 k, whose 16-byte pieces are permuted by the row's
// lowest three bits (the 128-byte swizzle), which frees reads of bank conflicts.

struct alignas(128) GemmMap {
    u64 words[16];  // CUtensorMap
};

struct GemmRest {
    u64 words[9];
};

struct GemmParams {
    GemmMap a_map, b_map;  // sm_90a only
    u64 a, b, d;
    u32 m, n, k;
    u32 tiles_m, tiles_n, tiles;  // tiles = tiles_m * tiles_n
    u32 steps;                    // k in steps of 64
    u32 group;                    // rows of tiles that are walked together
    GemmRest rest;
};

EP_CHECK_SIZE(GemmMap);
EP_CHECK_SIZE(GemmRest);
EP_CHECK_SIZE(GemmParams);
EP_CHECK_FIELD(GemmParams, a_map);
EP_CHECK_FIELD(GemmParams, b_map);
EP_CHECK_FIELD(GemmParams, a);
EP_CHECK_FIELD(GemmParams, b);
EP_CHECK_FIELD(GemmParams, d);
EP_CHECK_FIELD(GemmParams, m);
EP_CHECK_FIELD(GemmParams, n);
EP_CHECK_FIELD(GemmParams, k);
EP_CHECK_FIELD(GemmParams, tiles_m);
EP_CHECK_FIELD(GemmParams, tiles_n);
EP_CHECK_FIELD(GemmParams, tiles);
EP_CHECK_FIELD(GemmParams, steps);
EP_CHECK_FIELD(GemmParams, group);
EP_CHECK_FIELD(GemmParams, rest);

constexpr u32 STEP_K = 64;
constexpr u32 ROW_BYTES = 2 * STEP_K;
constexpr u32 TILE_M = 128;

extern __shared__ unsigned char dynamic_shared[];

struct GemmTile {
    u32 row, column;  // in tiles
};

// Tile `t` in an order that keeps what runs at a time nearly square, so that its rows of A and B
// stay in L2: `group` rows of tiles, column by column.
__device__ inline GemmTile tile_at(const GemmParams &p, u32 t) {
    u32 per_group = p.group * p.tiles_n;
    u32 first = t / per_group * p.group, in = t % per_group;
    u32 rows = min(p.group, p.tiles_m - first);
    return GemmTile{first + in % rows, in / rows};
}

__device__ inline u32 bf16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Swaps `high` of the lanes without `bit` with `low` of their partners that have it.
__device__ inline void exchange(u32 &low, u32 &high, u32 bit) {
    bool upper = threadIdx.x & bit;
    u32 got = __shfl_xor_sync(~0u, upper ? low : high, bit);
    if (upper)
        low = got;
    else
        high = got;
}

// Stores 8 rows of 32 columns: lane l holds columns 8j + 2(l%4) and the next of row l/4 in v[j]. A
// transposition among four lanes gives each 16 contiguous bytes.
__device__ inline void store_row(const GemmParams &p, u32 row, u32 column, u32 (&v)[4]) {
    exchange(v[0], v[1], 1);
    exchange(v[2], v[3], 1);
    exchange(v[0], v[2], 2);
    exchange(v[1], v[3], 2);
    column += 8 * (threadIdx.x % 4);
    // N is a multiple of 8: what starts inside ends inside.
    if (row < p.m && column < p.n)
        ep_store(p.d + 2 * ((u64)row * p.n + column), EpQuad{v[0], v[1], v[2], v[3]});
}

// Stores 16 rows of 32 columns from four m16n8 accumulators, which mma and wgmma lay out alike: of
// chunk j (8 columns), sums[4j] and the next belong to row l/4, the two after to the eighth row below.
__device__ inline void store_chunks(const GemmParams &p, u32 row, u32 column, const float *sums) {
    row += threadIdx.x % 32 / 4;
    u32 upper[4], lower[4];
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        upper[j] = bf16_pair(sums[4 * j], sums[4 * j + 1]);
        lower[j] = bf16_pair(sums[4 * j + 2], sums[4 * j + 3]);
    }
    store_row(p, row, column, upper);
    store_row(p, row + 8, column, lower);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr u32 TILE_N = 256;
constexpr u32 STAGES = 4;
constexpr u32 A_BYTES = TILE_M * ROW_BYTES, B_BYTES = TILE_N * ROW_BYTES;
constexpr u32 STAGE_BYTES = A_BYTES + B_BYTES;
constexpr u32 CONSUMER_WARPS = 8;
constexpr u32 THREADS = 32 * CONSUMER_WARPS + 128;

// Shared memory: the stages, aligned to the swizzle's period, then per stage a barrier that its
// bytes complete ("full") and one at which each consuming warp arrives when done ("empty").
struct GemmShared {
    u32 stages, full, empty;
};

__device__ inline GemmShared shared_parts() {
    u32 base = (ep_shared(dynamic_shared) + 1023) & ~1023u;
    u32 barriers = base + STAGES * STAGE_BYTES;
    return GemmShared{base, barriers, barriers + 8 * STAGES};
}

// Position in the ring of stages; `parity` is that of the full barriers.
struct GemmRing {
    u32 stage, parity;
    __device__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

__device__ inline void tensor_load(u32 to, const GemmMap &map, u32 k, u32 row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(&map), "r"(k), "r"(row), "r"(barrier)
        : "memory");
}

// One thread. Rows and k past the end arrive as zeros and count as bytes, so every stage is whole.
__device__ inline void produce(const GemmParams &p, GemmShared at) {
    GemmRing ring{0, 0};
    for (u32 t = blockIdx.x; t < p.tiles; t += gridDim.x) {
        GemmTile tile = tile_at(p, t);
        for (u32 step = 0; step < p.steps; step++) {
            // Of the other parity: a fresh barrier lets the first round through.
            ep_barrier_wait(at.empty + 8 * ring.stage, ring.parity ^ 1);
            u32 full = at.full + 8 * ring.stage, to = at.stages + ring.stage * STAGE_BYTES;
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(full), "r"(STAGE_BYTES) : "memory");
            tensor_load(to, p.a_map, step * STEP_K, tile.row * TILE_M, full);
            tensor_load(to + A_BYTES, p.b_map, step * STEP_K, tile.column * TILE_N, full);
            ring.next();
        }
    }
}

// Matrix descriptor of K-major rows of 128 bytes with the 128-byte swizzle (PTX ISA, "Matrix
// descriptor"): address / 16, 1024 / 16 bytes from 8 rows to the next 8, layout 1 in bits 62 and 63.
// The leading offset is not used in this layout.
__device__ inline u64 descriptor(u32 at) { return 1ull << 62 | 64ull << 32 | 1ull << 16 | (at & 0x3ffff) >> 4; }

#define GEMM_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define GEMM_D16(i) GEMM_D4(i), GEMM_D4(i + 4), GEMM_D4(i + 8), GEMM_D4(i + 12)
#define GEMM_D64(i) GEMM_D16(i), GEMM_D16(i + 16), GEMM_D16(i + 32), GEMM_D16(i + 48)

// d (64 x 256) = A (64 x 16) * B (256 x 16)^T, plus d if `accumulate`.
__device__ inline void wgmma(float (&d)[128], u64 a, u64 b, u32 accumulate) {
    asm volatile(
        "{ .reg .pred p;\n"
        "setp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
        "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
        "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
        "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
        "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, "
        "%128, %129, p, 1, 1, 0, 0; }"
        : GEMM_D64(0), GEMM_D64(64)
        : "l"(a), "l"(b), "r"(accumulate)
        : "memory");
}

// Waits until all but the latest `newest` groups of this warp are done.
template <int newest>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(newest) : "memory");
}

// Keeps the compiler from reading the sums before the wait above it.
__device__ inline void settled(float (&d)[128]) {
#pragma unroll
    for (u32 i = 0; i < 128; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// One lane per warp arrives: the wait before it covers its whole warp, and only its warp.
__device__ inline void release(GemmShared at, u32 stage) {
    if (threadIdx.x % 32 == 0)
        asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at.empty + 8 * stage) : "memory");
}

// The sums of one tile's 64 rows. Stage s is released when the group of stage s + 1 is issued and
// that of s done: the tensor cores always have a group ahead. Both the reads (wgmma) and the next
// writes (tensor copies) of a stage are of the async proxy, so the barrier alone orders them.
__device__ inline void multiply(const GemmParams &p, GemmShared at, u64 a, u64 b, GemmRing &ring, float (&d)[128]) {
    u32 before = 0;
    for (u32 step = 0; step < p.steps; step++) {
        ep_barrier_wait(at.full + 8 * ring.stage, ring.parity);
        u32 offset = ring.stage * (STAGE_BYTES / 16);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (u32 k = 0; k < STEP_K / 16; k++)  // 16 k are 32 bytes
            wgmma(d, a + offset + 2 * k, b + offset + 2 * k, step | k);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        wgmma_wait<1>();
        if (step > 0) release(at, before);
        before = ring.stage;
        ring.next();
    }
    wgmma_wait<0>();
    settled(d);
    release(at, before);
}

__device__ inline void consume(const GemmParams &p, GemmShared at, u32 warp) {
    u32 rows = warp / 4 * 64;  // of this warpgroup in the tile
    u64 a = descriptor(at.stages + rows * ROW_BYTES), b = descriptor(at.stages + A_BYTES);
    GemmRing ring{0, 0};
    float d[128] = {};
    for (u32 t = blockIdx.x; t < p.tiles; t += gridDim.x) {
        GemmTile tile = tile_at(p, t);
        multiply(p, at, a, b, ring, d);
        u32 row = tile.row * TILE_M + rows + warp % 4 * 16;
#pragma unroll
        for (u32 j = 0; j < TILE_N / 32; j++) store_chunks(p, row, tile.column * TILE_N + 32 * j, d + 16 * j);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gemm_bf16(const __grid_constant__ GemmParams p) {
    GemmShared at = shared_parts();
    if (threadIdx.x == 0) {
        for (u32 s = 0; s < STAGES; s++) {
            ep_barrier_init(at.full + 8 * s);
            asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at.empty + 8 * s), "r"(CONSUMER_WARPS) : "memory");
        }
        ep_barriers_ready();
    }
    __syncthreads();
    // The same in all lanes, which the compiler cannot know otherwise.
    u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    // 384 threads start with 168 registers each; 40 + 2 * 232 share the same sum.
    if (warp >= CONSUMER_WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 32 * CONSUMER_WARPS) produce(p, at);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume(p, at, warp);
    }
}

#else
constexpr u32 TILE_N = 128;
constexpr u32 STAGES = 3;
constexpr u32 A_BYTES = TILE_M * ROW_BYTES;
constexpr u32 STAGE_BYTES = A_BYTES + TILE_N * ROW_BYTES;
constexpr u32 THREADS = 256;  // 2 x 4 warps of 64 x 32 each

// Where piece `piece` (16 bytes) of a row lies.
__device__ inline u32 swizzled(u32 row, u32 piece) { return row * ROW_BYTES + ((piece ^ row % 8) << 4); }

// Starts copying 128 rows of 64 k; what lies past the end becomes zero.
__device__ inline void load_rows(u32 to, u64 from, u32 first, u32 rows, u32 k0, u32 k) {
    u32 piece = threadIdx.x % 8;
    bool inside_k = k0 + 8 * piece < k;
#pragma unroll
    for (u32 r = threadIdx.x / 8; r < 128; r += THREADS / 8) {
        bool inside = inside_k && first + r < rows;
        u64 at = inside ? from + 2 * ((u64)(first + r) * k + k0 + 8 * piece) : from;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + swizzled(r, piece)), "l"(at),
                     "r"(inside ? 16 : 0)
                     : "memory");
    }
}

// Starts stage `step` of a tile, or nothing past the last; a group either way, so that counts agree.
__device__ inline void load_step(const GemmParams &p, GemmTile tile, u32 shared, u32 step) {
    if (step < p.steps) {
        u32 to = shared + step % STAGES * STAGE_BYTES;
        load_rows(to, p.a, tile.row * TILE_M, p.m, step * STEP_K, p.k);
        load_rows(to + A_BYTES, p.b, tile.column * TILE_N, p.n, step * STEP_K, p.k);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

__device__ inline void load_matrices(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

__device__ inline void mma(float *c, const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Adds 64 k of one stage. Lane l gives ldmatrix the address of row l%8 of 8x8 matrix l/8: for A the
// second matrix lies 8 rows on and the third 8 k, for B the other way round.
__device__ inline void multiply_step(u32 a_at, u32 b_at, float (&sums)[4][16]) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 a_row = warp / 4 * 64 + lane % 16, a_piece = lane / 16;
    u32 b_row = warp % 4 * 32 + lane / 16 * 8 + lane % 8, b_piece = lane / 8 % 2;
#pragma unroll
    for (u32 k = 0; k < STEP_K / 16; k++) {
        u32 b[2][4];
#pragma unroll
        for (u32 j = 0; j < 2; j++) load_matrices(b[j], b_at + swizzled(b_row + 16 * j, b_piece + 2 * k));
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 a[4];
            load_matrices(a, a_at + swizzled(a_row + 16 * i, a_piece + 2 * k));
#pragma unroll
            for (u32 j = 0; j < 4; j++) mma(sums[i] + 4 * j, a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gemm_bf16(const __grid_constant__ GemmParams p) {
    u32 shared = (ep_shared(dynamic_shared) + 1023) & ~1023u, warp = threadIdx.x / 32;
    for (u32 t = blockIdx.x; t < p.tiles; t += gridDim.x) {
        GemmTile tile = tile_at(p, t);
        float sums[4][16] = {};
        __syncthreads();  // the last tile's stages are read
        for (u32 s = 0; s < STAGES - 1; s++) load_step(p, tile, shared, s);
        for (u32 step = 0; step < p.steps; step++) {
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
            __syncthreads();  // everybody's part of this stage is there, and the stage before is read
            load_step(p, tile, shared, step + STAGES - 1);
            u32 stage = shared + step % STAGES * STAGE_BYTES;
            multiply_step(stage, stage + A_BYTES, sums);
        }
        u32 row = tile.row * TILE_M + warp / 4 * 64, column = tile.column * TILE_N + warp % 4 * 32;
#pragma unroll
        for (u32 i = 0; i < 4; i++) store_chunks(p, row + 16 * i, column, sums[i]);
    }
    // Empty groups may be left, copies not: the last steps waited for all that were started.
}
#endif
