// Dispatch and expand: every row is read once and written to all its places. Dispatch: from a
// token's payload to one row at each of its ranks; rows for ranks that are not mapped here are packed, a
// block per rank, in this rank's own staging. Expand: from a received row to the rows of its
// local experts, all on this rank.
//
// A warp moves one piece of a row at a time; no warp waits for another. Published by the kernel's
// end: the stream raises flags only behind it.

struct MoeRowsParams {
    MoeShape shape;
    MoeRouting routing;
    MoeOp op;
    MoeRowFormat row;
    MoeExpertFormat expert;
    u64 payload, payload_stride, scales, scales_stride, numbers;
    u32 check, chunk, pieces, first;
};

EP_CHECK_SIZE(MoeRowsParams);
EP_CHECK_FIELD(MoeRowsParams, shape);
EP_CHECK_FIELD(MoeRowsParams, routing);
EP_CHECK_FIELD(MoeRowsParams, op);
EP_CHECK_FIELD(MoeRowsParams, row);
EP_CHECK_FIELD(MoeRowsParams, expert);
EP_CHECK_FIELD(MoeRowsParams, payload);
EP_CHECK_FIELD(MoeRowsParams, payload_stride);
EP_CHECK_FIELD(MoeRowsParams, scales);
EP_CHECK_FIELD(MoeRowsParams, scales_stride);
EP_CHECK_FIELD(MoeRowsParams, numbers);
EP_CHECK_FIELD(MoeRowsParams, check);
EP_CHECK_FIELD(MoeRowsParams, chunk);
EP_CHECK_FIELD(MoeRowsParams, pieces);
EP_CHECK_FIELD(MoeRowsParams, first);

typedef const MoeRowsParams &Params;

// Whether rows move: a barrier of the block, all threads of which get the same answer. Rows of an
// uncached dispatch follow the plan, which has just looked at everything. Expand: as `places_may_run`.
template <bool EXPAND>
__device__ bool rows_may_move(Params p) {
    bool bad = ((const MoeHandleHeader *)p.routing.header)->status != 0;
    if (EXPAND) return !__syncthreads_or(bad || ((const MoeLane *)p.op.lane)->refused != 0);
#ifdef EP_FORWARD
    // Announcements say nothing of whether the blocks came: where that wait was released, no other rank is
    // to get what lies there.
    if (moe_poisoned(p.shape, bad)) return false;
#endif
    if (p.check) return moe_goes_on(p.shape, p.op, bad);
    // Where the host had to know, a kernel before this one has judged.
    if (p.shape.far) bad |= ((const MoeLane *)p.op.lane)->refused != 0;
    if (blockIdx.x == 0) moe_awaits(p.shape, p.op, MOE_ROWS, ((const MoeLane *)p.op.lane)->sequence);
    return !__syncthreads_or(bad);
}

// Tells the host how it went, once this block's first warp has moved its rows.
template <bool EXPAND>
__device__ void rows_report(Params p) {
    if (!EXPAND && p.check) moe_verdict(p.shape, p.op, MOE_OK);
}

// For dispatch, where this rank's rows start at each rank, or in staging for one that is not mapped; then
// each rank's first expert and how many it has. Behind the check: until then an announcement may be an
// earlier one, whose slot is no longer offered. A barrier of the block.
template <bool EXPAND>
__device__ void rows_fill_table(Params p, u64 *table) {
    if (!EXPAND) {
        u32 *experts = (u32 *)(table + p.shape.world);
        const u32 *base = (const u32 *)p.shape.base;
        for (u32 r = threadIdx.x; r < p.shape.world; r += blockDim.x) {
            bool mapped = moe_window(p.shape, r) != 0;
            u64 rows = mapped ? moe_rank_rows(p.shape, p.op, r) : p.op.send + r * p.op.block;
            u32 before = ((const u32 *)(mapped ? p.routing.sent_base : p.routing.staged))[r];
            table[r] = rows + (u64)before * p.row.stride;
            experts[2 * r] = base[r];
            experts[2 * r + 1] = base[r + 1] - base[r];
        }
    } else if (threadIdx.x == 0) {
        table[0] = moe_rank_rows(p.shape, p.op, p.shape.rank);
        table[1] = moe_expert_rows(p.shape, p.op, p.shape.rank);
    }
    __syncthreads();
}

template <bool EXPAND>
__device__ u32 rows_count(Params p) {
    return EXPAND ? ((const MoeHandleHeader *)p.routing.header)->rows : p.routing.tokens;
}

// The most places of a row.
template <bool EXPAND>
__device__ u32 rows_width(Params p) {
    return EXPAND ? p.shape.topk : p.shape.fan_out;
}

// The address of place `j` of row `row`, 0 behind the last; `rank` is whose it is.
template <bool EXPAND>
__device__ u64 rows_place(Params p, const u64 *table, u32 row, u32 j, int &rank) {
    if (EXPAND) {
        if (j >= p.shape.topk) return 0;
        int position = ((const int *)p.routing.positions)[(u64)row * p.shape.topk + j];
        if (position < 0 || (u32)position >= p.shape.max_expert_rows) return 0;
        return table[1] + (u64)position * p.expert.stride;
    }
    if (j >= p.shape.fan_out) return 0;
    u64 at = (u64)row * p.shape.fan_out + j;
    rank = ((const int *)p.routing.dest_rank)[at];
    if (rank < 0) return 0;
    u32 index = ((const u32 *)p.routing.dest_index)[at];
    // Never beyond a slot, whatever a handle holds.
    if (((const u32 *)p.routing.sent_base)[rank] + index >= p.shape.max_rows) return 0;
    return table[rank] + (u64)index * p.row.stride;
}

template <bool EXPAND>
__device__ u64 rows_source(Params p, const u64 *table, u32 row) {
    return EXPAND ? table[0] + (u64)row * p.row.stride : p.payload + (u64)row * p.payload_stride;
}

// The number of a token at its source. Rows that are forwarded are some of another rank's.
__device__ inline u32 rows_number(Params p, u32 row) {
#ifdef EP_FORWARD
    return ((const u32 *)p.numbers)[row];
#else
    return p.first + row;
#endif
}

// Four bytes of a token's scales, zero behind the last.
__device__ inline u32 rows_scale_word(Params p, u64 from, u32 at) {
    u32 word = 0;
    for (u32 b = 0; b < 4 && at + b < p.row.scale_bytes; b++)
        word |= (u32) * (const unsigned char *)(from + at + b) << 8 * b;
    return word;
}

// Writes what stands behind the payload of a dispatched row: scales, the local ids and the weights
// of the choices that are on `rank`, and the source.
__device__ inline void rows_write_record(Params p, u32 token, int rank, u64 to) {
    u32 lane = threadIdx.x & 31, topk = p.shape.topk;
    u32 first = ((const u32 *)p.shape.base)[rank];
    u32 count = ((const u32 *)p.shape.base)[rank + 1] - first;
    const int *physical = (const int *)p.routing.physical + (u64)token * topk;
    const u32 *weights = (const u32 *)p.routing.weights + (u64)token * topk;
    u64 scales = p.scales + (u64)token * p.scales_stride;
    u32 words = (p.row.stride - p.row.scales_at) / 4;
    for (u32 w = lane; w < words; w += 32) {
        u32 at = p.row.scales_at + 4 * w, value = 0;
        if (at < p.row.ids_at) {
            bool whole = ((scales | p.scales_stride) & 3) == 0 && 4 * w + 4 <= p.row.scale_bytes;
            value = whole ? *(const u32 *)(scales + 4 * w) : rows_scale_word(p, scales, 4 * w);
        } else if (at < p.row.source_at) {
            bool ids = at < p.row.weights_at;
            u32 k = (at - (ids ? p.row.ids_at : p.row.weights_at)) / 4;
            if (k < topk) {
                int expert = physical[k];
                u32 local = (u32)expert - first;
                bool mine = expert >= 0 && local < count;
                value = ids ? (mine ? local : 0xffffffffu) : (mine ? weights[k] : 0);
            }
        } else if (at == p.row.source_at) {
            value = rows_number(p, token);
        } else if (at == p.row.source_at + 4) {
            value = p.shape.rank;
        }
        *(u32 *)(to + at) = value;
    }
}

// Writes what stands behind the payload of an expert's row.
__device__ inline void rows_write_expert(Params p, u32 row, u32 j, u64 from, u64 to) {
    u32 lane = threadIdx.x & 31;
    u32 quads = (p.expert.weight_at - p.expert.scales_at) / 16;
    for (u32 q = lane; q < quads; q += 32)
        ep_store(to + p.expert.scales_at + 16 * q, ep_load(from + p.row.scales_at + 16 * q));
    if (lane == 0) {
        u32 weight = ((const u32 *)p.routing.row_weights)[(u64)row * p.shape.topk + j];
        EpQuad tail = {weight, row, 0, 0};
        ep_store(to + p.expert.weight_at, tail);
    }
}

// What stands behind a row's payload, as far as lanes hold it: fetched ahead, once for all places.
struct Rest {
    EpQuad scales;
    int expert;
    u32 weight;
};

// Whether lanes hold all of it.
template <bool EXPAND>
__device__ inline bool rows_rest_fits(Params p) {
    u32 scales = (EXPAND ? p.expert.weight_at - p.expert.scales_at : p.row.ids_at - p.row.scales_at) / 16;
    bool words = EXPAND || ((p.scales | p.scales_stride | p.row.scale_bytes) & 3) == 0;
    return p.shape.topk <= 32 && scales <= 32 && words;
}

template <bool EXPAND>
__device__ inline Rest rows_fetch_rest(Params p, const u64 *table, u32 row) {
    u32 lane = threadIdx.x & 31, topk = p.shape.topk;
    Rest rest = {{0, 0, 0, 0}, -1, 0};
    if (EXPAND) {
        if (16 * lane < p.expert.weight_at - p.expert.scales_at)
            rest.scales = ep_load(rows_source<EXPAND>(p, table, row) + p.row.scales_at + 16 * lane);
        if (lane < topk) rest.weight = ((const u32 *)p.routing.row_weights)[(u64)row * topk + lane];
        return rest;
    }
    if (lane < topk) {
        rest.expert = ((const int *)p.routing.physical)[(u64)row * topk + lane];
        rest.weight = ((const u32 *)p.routing.weights)[(u64)row * topk + lane];
    }
    const u32 *scales = (const u32 *)(p.scales + (u64)row * p.scales_stride);
    // Scales that are not whole, aligned words are not held.
    u32 words = ((p.scales | p.scales_stride | p.row.scale_bytes) & 3) == 0 ? p.row.scale_bytes / 4 : 0;
    if (4 * lane < words) rest.scales.x = scales[4 * lane];
    if (4 * lane + 1 < words) rest.scales.y = scales[4 * lane + 1];
    if (4 * lane + 2 < words) rest.scales.z = scales[4 * lane + 2];
    if (4 * lane + 3 < words) rest.scales.w = scales[4 * lane + 3];
    return rest;
}

// Writes it to place `j` of a row.
template <bool EXPAND>
__device__ void rows_write_rest(Params p, const u64 *table, const Rest &rest, u32 row, u32 j, int rank, u64 to) {
    u32 lane = threadIdx.x & 31;
    u32 weight = EXPAND ? __shfl_sync(0xffffffffu, rest.weight, j & 31) : rest.weight;
    if (!rows_rest_fits<EXPAND>(p)) {
        if (EXPAND) rows_write_expert(p, row, j, rows_source<EXPAND>(p, table, row), to);
        else rows_write_record(p, row, rank, to);
        return;
    }
    if (EXPAND) {
        if (16 * lane < p.expert.weight_at - p.expert.scales_at)
            ep_store(to + p.expert.scales_at + 16 * lane, rest.scales);
        if (lane == 0) ep_store(to + p.expert.weight_at, EpQuad{weight, row, 0, 0});
        return;
    }
    const u32 *experts = (const u32 *)(table + p.shape.world);
    u32 local = (u32)rest.expert - experts[2 * rank];
    bool mine = rest.expert >= 0 && local < experts[2 * rank + 1];
    if (16 * lane < p.row.ids_at - p.row.scales_at) ep_store(to + p.row.scales_at + 16 * lane, rest.scales);
    if (4 * lane < p.row.weights_at - p.row.ids_at) {
        *(u32 *)(to + p.row.ids_at + 4 * lane) = lane < p.shape.topk ? (mine ? local : 0xffffffffu) : 0;
        *(u32 *)(to + p.row.weights_at + 4 * lane) = mine ? weight : 0;
    }
    if (lane == 0) ep_store(to + p.row.source_at, EpQuad{rows_number(p, row), p.shape.rank, 0, 0});
}

// Fills the rows between the experts' last rows and the next multiple of the alignment.
__device__ void rows_write_padding(Params p, const u64 *table) {
    u32 warps = gridDim.x * (blockDim.x / 32), warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const int *offsets = (const int *)p.routing.offsets, *counts = (const int *)p.routing.counts;
    u32 lane = threadIdx.x & 31;
    for (u32 e = 0; e < p.shape.local_experts; e++) {
        u32 first = offsets[e] + counts[e], end = offsets[e + 1];
        for (u32 row = first + warp; row < end && row < p.shape.max_expert_rows; row += warps) {
            u64 to = table[1] + (u64)row * p.expert.stride;
            for (u32 q = lane; q < p.expert.stride / 16; q += 32) {
                EpQuad zero = {0, 16 * q == p.expert.weight_at ? 0xffffffffu : 0, 0, 0};
                ep_store(to + 16 * q, zero);
            }
        }
    }
}

#if __CUDA_ARCH__ >= 900
template <bool EXPAND, int STAGES>
__device__ void rows_tma(Params p) {
    extern __shared__ __align__(128) unsigned char shared[];
    u32 warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    u64 *table = (u64 *)(shared + (u64)warps * STAGES * p.chunk);
    u64 *barriers = table + (EXPAND ? 2 : 2 * p.shape.world);
    if (!rows_may_move<EXPAND>(p)) return;
    rows_fill_table<EXPAND>(p, table);
    u32 buffer = ep_shared(shared) + warp * STAGES * p.chunk;
    u32 barrier = ep_shared(barriers) + warp * STAGES * 8;
    if (lane == 0) {
        for (int s = 0; s < STAGES; s++) ep_barrier_init(barrier + 8 * s);
        ep_barriers_ready();
    }
    __syncwarp();
    u32 rows = rows_count<EXPAND>(p), width = rows_width<EXPAND>(p);
    auto bytes_of = [&](u32 piece) {
        u32 left = p.row.payload_bytes - piece * p.chunk;
        return left < p.chunk ? left : p.chunk;
    };
    // Loads run up to STAGES - 1 pieces ahead of stores.
    EpWalk ahead = ep_walk(p.pieces), walk = ahead;
    u32 loaded = 0;
    auto load = [&]() {
        if (ahead.row >= rows) return;
        u32 s = loaded++ % STAGES;
        u64 from = rows_source<EXPAND>(p, table, ahead.row) + (u64)ahead.part * p.chunk;
        if (lane == 0) ep_bulk_load(buffer + s * p.chunk, from, bytes_of(ahead.part), barrier + 8 * s);
        ep_step(ahead);
    };
    for (int s = 0; s + 1 < STAGES; s++) load();
    // The places of the next piece are looked up while this one is on its way.
    int next_rank = -1;
    u64 next = 0;
    Rest next_rest = {};
    auto look = [&]() {
        if (walk.row >= rows) return;
        next = rows_place<EXPAND>(p, table, walk.row, lane, next_rank);
        if (walk.part == 0) next_rest = rows_fetch_rest<EXPAND>(p, table, walk.row);
    };
    look();
    for (u32 k = 0; walk.row < rows; k++) {
        u32 s = k % STAGES, row = walk.row, piece = walk.part;
        u64 mine = next;
        int rank = next_rank;
        Rest rest = next_rest;
        ep_step(walk);
        look();
        u32 bytes = bytes_of(piece);
        ep_barrier_wait(barrier + 8 * s, (k / STAGES) & 1);
        // Every lane stores to its own place, so that stores start together. What the bulk load wrote
        // is visible to each lane, since each waited for the barrier.
        if (mine) ep_bulk_store(mine + (u64)piece * p.chunk, buffer + s * p.chunk, bytes);
        for (u32 j = 32 + lane; j < width; j += 32) {
            int other;
            u64 to = rows_place<EXPAND>(p, table, row, j, other);
            if (to) ep_bulk_store(to + (u64)piece * p.chunk, buffer + s * p.chunk, bytes);
        }
        ep_bulk_commit();
        // The stage that is loaded next was stored from one piece ago.
        if (STAGES > 2) ep_bulk_wait_read<1>(); else ep_bulk_wait_read<0>();
        __syncwarp();
        load();
        if (piece != 0) continue;
        for (u32 j = 0; j < width; j++) {
            int to_rank = __shfl_sync(0xffffffffu, rank, j & 31);
            u64 to = __shfl_sync(0xffffffffu, mine, j & 31);
            if (j >= 32) to = rows_place<EXPAND>(p, table, row, j, to_rank);
            if (!to) break;
            rows_write_rest<EXPAND>(p, table, rest, row, j, to_rank, to);
        }
    }
    if (EXPAND) rows_write_padding(p, table);
    rows_report<EXPAND>(p);
    ep_bulk_wait_written();
}
#endif

template <bool EXPAND, int UNROLL>
__device__ void rows_ldst(Params p) {
    extern __shared__ __align__(128) unsigned char shared[];
    u64 *table = (u64 *)shared;
    if (!rows_may_move<EXPAND>(p)) return;
    rows_fill_table<EXPAND>(p, table);
    u32 warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    u32 rows = rows_count<EXPAND>(p), quads = p.row.payload_bytes / 16, width = rows_width<EXPAND>(p);
    for (u64 row = blockIdx.x * warps + warp; row < rows; row += (u64)gridDim.x * warps) {
        u64 from = rows_source<EXPAND>(p, table, row);
        int my_rank = -1;
        u64 mine = rows_place<EXPAND>(p, table, row, lane, my_rank);
        Rest rest = rows_fetch_rest<EXPAND>(p, table, row);
        auto place = [&](u32 j, int &rank) {
            rank = __shfl_sync(0xffffffffu, my_rank, j & 31);
            u64 to = __shfl_sync(0xffffffffu, mine, j & 31);
            return j < 32 ? to : rows_place<EXPAND>(p, table, row, j, rank);
        };
        for (u32 base = 0; base < quads; base += 32 * UNROLL) {
            u32 q = base + lane;
            EpQuad held[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (q + 32 * u < quads) held[u] = ep_load(from + 16ull * (q + 32 * u));
            for (u32 j = 0; j < width; j++) {
                int rank;
                u64 to = place(j, rank);
                if (!to) break;
#pragma unroll
                for (int u = 0; u < UNROLL; u++)
                    if (q + 32 * u < quads) ep_store(to + 16ull * (q + 32 * u), held[u]);
            }
        }
        for (u32 j = 0; j < width; j++) {
            int rank;
            u64 to = place(j, rank);
            if (!to) break;
            rows_write_rest<EXPAND>(p, table, rest, row, j, rank, to);
        }
    }
    if (EXPAND) rows_write_padding(p, table);
    rows_report<EXPAND>(p);
}

#ifdef EP_FORWARD
#define ROWS_LDST(UNROLL, THREADS)              \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) \
        moe_forward_ld##UNROLL(const __grid_constant__ MoeRowsParams p) { rows_ldst<false, UNROLL>(p); }
#else
#define ROWS_LDST(UNROLL, THREADS)                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                \
        moe_dispatch_ld##UNROLL(const __grid_constant__ MoeRowsParams p) { rows_ldst<false, UNROLL>(p); } \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                \
        moe_expand_ld##UNROLL(const __grid_constant__ MoeRowsParams p) { rows_ldst<true, UNROLL>(p); }
#endif
ROWS_LDST(1, 1024)
ROWS_LDST(2, 1024)
ROWS_LDST(4, 1024)
ROWS_LDST(7, 512)
ROWS_LDST(14, 512)
#undef ROWS_LDST

// Where there are no bulk copies these kernels are empty; no plan launches them there.
#if __CUDA_ARCH__ < 900
template <bool EXPAND, int STAGES>
__device__ void rows_tma(Params p) {}
#endif

#ifdef EP_FORWARD
#define ROWS_TMA(STAGES)                        \
    extern "C" __global__ void __launch_bounds__(512, 1) \
        moe_forward_tma##STAGES(const __grid_constant__ MoeRowsParams p) { rows_tma<false, STAGES>(p); }
#else
#define ROWS_TMA(STAGES)                                                                               \
    extern "C" __global__ void __launch_bounds__(512, 1)                                                \
        moe_dispatch_tma##STAGES(const __grid_constant__ MoeRowsParams p) { rows_tma<false, STAGES>(p); } \
    extern "C" __global__ void __launch_bounds__(512, 1)                                                \
        moe_expand_tma##STAGES(const __grid_constant__ MoeRowsParams p) { rows_tma<true, STAGES>(p); }
#endif
ROWS_TMA(2)
ROWS_TMA(3)
ROWS_TMA(4)
#undef ROWS_TMA
