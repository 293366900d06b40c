// Combine and reduce: the rows of a token are read and added in a fixed order, the sum is written
// once. Combine, at home: a token's rows are in the slots of its ranks, one per rank (mode 0) or one
// per expert (mode 1); they are read where they are. Reduce, at an owner: the rows of a received
// token's local experts are in this rank's own slot (mode 2), the sum becomes a rank-major row.
//
// The sum is one left fold in f32 from the first row; products and sums are rounded separately; the
// end is rounded to nearest even; NaN is canonical. Biases come last.
//
// A warp owns pieces of tokens; (row, piece) after (row, piece) passes through its stages, however
// many rows a token has. No warp waits for another. Peers' rows were published before the flags for
// which the stream waited; they stay until this rank raises Done, behind this kernel.

struct MoeSumsParams {
    MoeShape shape;
    MoeRouting routing;
    MoeOp op;
    MoeOutFormat from;
    u64 out, out_stride, weights_home, slot;
    u64 bias0, bias1, bias2, bias3, bias4, bias5, bias6, bias7;
    u64 bias_stride0, bias_stride1, bias_stride2, bias_stride3;
    u64 bias_stride4, bias_stride5, bias_stride6, bias_stride7;
    u32 dtype, row_bytes, mode, weighted, biases, check, span, out_weights_at;
};

EP_CHECK_SIZE(MoeSumsParams);
EP_CHECK_FIELD(MoeSumsParams, shape);
EP_CHECK_FIELD(MoeSumsParams, routing);
EP_CHECK_FIELD(MoeSumsParams, op);
EP_CHECK_FIELD(MoeSumsParams, from);
EP_CHECK_FIELD(MoeSumsParams, out);
EP_CHECK_FIELD(MoeSumsParams, out_stride);
EP_CHECK_FIELD(MoeSumsParams, weights_home);
EP_CHECK_FIELD(MoeSumsParams, slot);
EP_CHECK_FIELD(MoeSumsParams, bias0);
EP_CHECK_FIELD(MoeSumsParams, bias1);
EP_CHECK_FIELD(MoeSumsParams, bias2);
EP_CHECK_FIELD(MoeSumsParams, bias3);
EP_CHECK_FIELD(MoeSumsParams, bias4);
EP_CHECK_FIELD(MoeSumsParams, bias5);
EP_CHECK_FIELD(MoeSumsParams, bias6);
EP_CHECK_FIELD(MoeSumsParams, bias7);
EP_CHECK_FIELD(MoeSumsParams, bias_stride0);
EP_CHECK_FIELD(MoeSumsParams, bias_stride1);
EP_CHECK_FIELD(MoeSumsParams, bias_stride2);
EP_CHECK_FIELD(MoeSumsParams, bias_stride3);
EP_CHECK_FIELD(MoeSumsParams, bias_stride4);
EP_CHECK_FIELD(MoeSumsParams, bias_stride5);
EP_CHECK_FIELD(MoeSumsParams, bias_stride6);
EP_CHECK_FIELD(MoeSumsParams, bias_stride7);
EP_CHECK_FIELD(MoeSumsParams, dtype);
EP_CHECK_FIELD(MoeSumsParams, row_bytes);
EP_CHECK_FIELD(MoeSumsParams, mode);
EP_CHECK_FIELD(MoeSumsParams, weighted);
EP_CHECK_FIELD(MoeSumsParams, biases);
EP_CHECK_FIELD(MoeSumsParams, check);
EP_CHECK_FIELD(MoeSumsParams, span);
EP_CHECK_FIELD(MoeSumsParams, out_weights_at);

typedef const MoeSumsParams &Params;

#define PER_RANK 0
#define PER_EXPERT 1
#define LOCAL 2

// A barrier of the block, all threads of which get the same answer.
__device__ bool sums_may_run(Params p) {
    if (p.check) return moe_goes_on(p.shape, p.op, false);
    bool bad = ((const MoeHandleHeader *)p.routing.header)->status != 0;
    // Where a kernel before this one has judged, the host need not know of it.
    if (p.mode != LOCAL) bad |= ((const MoeLane *)p.op.lane)->refused != 0;
    return !moe_poisoned(p.shape, bad);
}

// Tells the host how it went, once this block's first warp has written its sums.
__device__ inline void sums_report(Params p) {
    if (p.check) moe_verdict(p.shape, p.op, MOE_OK);
}

// Where the rows of each rank start; those of a rank that is not mapped were put into this rank's staging.
// Behind the check, as `rows_fill_table`; a barrier of the block.
__device__ void sums_fill_table(Params p, u64 *table) {
    if (p.mode == LOCAL) {
        u64 own = ((const u64 *)p.shape.windows)[p.shape.rank] + p.shape.slots_at + p.slot * p.shape.slot_bytes;
        if (threadIdx.x == 0) table[0] = own + p.shape.expert_region;
        if (threadIdx.x == 0) table[1] = own;
    } else {
        for (u32 r = threadIdx.x; r < p.shape.world; r += blockDim.x) {
            bool mapped = moe_window(p.shape, r) != 0, per_rank = p.mode == PER_RANK;
            u32 before = per_rank ? ((const u32 *)(mapped ? p.routing.sent_base : p.routing.staged))[r] : 0;
            u64 rows = !mapped ? p.op.receive + r * p.op.block
                       : per_rank ? moe_rank_rows(p.shape, p.op, r) : moe_expert_rows(p.shape, p.op, r);
            table[r] = rows + (u64)before * p.from.stride;
        }
    }
    __syncthreads();
}

__device__ inline u32 sums_tokens(Params p) {
    return p.mode == LOCAL ? ((const MoeHandleHeader *)p.routing.header)->rows : p.routing.tokens;
}

__device__ inline u64 sums_out(Params p, const u64 *table, u32 token) {
    return (p.mode == LOCAL ? table[1] : p.out) + (u64)token * p.out_stride;
}

// The most rows of a token.
__device__ inline u32 sums_width(Params p) { return p.mode == PER_RANK ? p.shape.fan_out : p.shape.topk; }

__device__ inline u64 sums_bias(Params p, u32 b, u32 token) {
    const u64 *at = &p.bias0, *stride = &p.bias_stride0;
    return at[b] + (u64)token * stride[b];
}

// The address of the `j`-th row of a token, 0 behind the last. Which choice or rank it is goes to
// `which`.
__device__ u64 sums_row(Params p, const u64 *table, u32 token, u32 j, int &which) {
    which = -1;
    u32 topk = p.shape.topk;
    if (p.mode == PER_RANK) {
        if (j >= p.shape.fan_out) return 0;
        u64 at = (u64)token * p.shape.fan_out + j;
        int rank = ((const int *)p.routing.dest_rank)[at];
        if (rank < 0) return 0;
        which = rank;
        return table[rank] + (u64)((const u32 *)p.routing.dest_index)[at] * p.from.stride;
    }
    if (j >= topk) return 0;
    if (p.mode == LOCAL) {
        u64 at = (u64)token * topk + j;
        int position = ((const int *)p.routing.positions)[at];
        // Never beyond a slot, whatever a handle holds.
        if (position < 0 || (u32)position >= p.shape.max_expert_rows) return 0;
        which = ((const int *)p.routing.choices)[at];
        return table[0] + (u64)position * p.from.stride;
    }
    int k = ((const int *)p.routing.order)[(u64)token * topk + j];
    if (k < 0) return 0;
    which = k;
    u64 at = (u64)token * topk + k;
    u32 expert = ((const int *)p.routing.physical)[at];
    u64 row = (u64)((const u32 *)p.routing.expert_offsets)[expert] +
              ((const u32 *)p.routing.expert_base)[expert] + ((const u32 *)p.routing.expert_index)[at];
    return table[((const u32 *)p.shape.rank_of)[expert]] + row * p.from.stride;
}

__device__ inline float sums_weight(Params p, u32 token, u32 j) {
    u64 first = (u64)token * p.shape.topk;
    if (p.mode == LOCAL) return ((const float *)p.routing.row_weights)[first + j];
    int k = ((const int *)p.routing.order)[first + j];
    return k < 0 ? 0.0f : ((const float *)p.routing.weights)[first + k];
}

// Brings home, or hands on, the weights that a token's rows carry. The whole warp calls it.
__device__ void sums_weights(Params p, const u64 *table, u32 token) {
    u32 lane = threadIdx.x & 31, topk = p.shape.topk, width = sums_width(p);
    // Those of sums that travel on go with them, behind the payload.
    float *home = p.out_weights_at ? (float *)(sums_out(p, table, token) + p.out_weights_at)
                                   : (float *)p.weights_home + (u64)token * topk;
    for (u32 k = lane; k < topk; k += 32) home[k] = 0.0f;
    __syncwarp();
    for (u32 j = 0; j < width; j++) {
        int which;
        u64 row = sums_row(p, table, token, j, which);
        if (!row) break;
        const float *carried = (const float *)(row + p.from.weights_at);
        if (p.mode != PER_RANK) {
            if (lane == 0) home[which] = carried[0];
            continue;
        }
        for (u32 k = lane; k < topk; k += 32) {
            int expert = ((const int *)p.routing.physical)[(u64)token * topk + k];
            if (expert >= 0 && ((const int *)p.shape.rank_of)[expert] == which) home[k] = carried[k];
        }
    }
}

// The rows of one token, one per lane, biases behind them.
struct Sources {
    u64 address;
    u32 rows;
};

// Where a token's rows are, as far as that is known without waiting for what was loaded.
struct Lookup {
    u64 address;
    int rank;
    u32 index;
};

__device__ inline Lookup sums_look_up(Params p, const u64 *table, u32 token) {
    u32 lane = threadIdx.x & 31;
    Lookup found = {0, -1, 0};
    if (p.mode == PER_RANK) {
        u64 at = (u64)token * p.shape.fan_out + lane;
        if (lane < p.shape.fan_out) {
            found.rank = ((const int *)p.routing.dest_rank)[at];
            found.index = ((const u32 *)p.routing.dest_index)[at];
        }
    } else {
        int which;
        found.address = sums_row(p, table, token, lane, which);
    }
    return found;
}

__device__ inline Sources sums_found(Params p, const u64 *table, u32 token, const Lookup &found) {
    u32 lane = threadIdx.x & 31, width = sums_width(p);
    Sources s;
    s.address = found.rank < 0 ? found.address : table[found.rank] + (u64)found.index * p.from.stride;
    s.rows = __popc(__ballot_sync(0xffffffffu, s.address != 0));
    if (s.rows == 32 && width > 32) {
        int which;
        for (u32 j = 32; j < width && sums_row(p, table, token, j, which); j++) s.rows++;
    }
    if (lane >= s.rows && lane < s.rows + p.biases) s.address = sums_bias(p, lane - s.rows, token);
    return s;
}

// The address of source `j` of a token: the warp's lanes hold the first 32.
__device__ inline u64 sums_source(Params p, const u64 *table, const Sources &s, u32 token, u32 j) {
    u64 address = __shfl_sync(0xffffffffu, s.address, j & 31);
    int which;
    if (j < 32) return address;
    return j < s.rows ? sums_row(p, table, token, j, which) : sums_bias(p, j - s.rows, token);
}

#if __CUDA_ARCH__ >= 900
// Tokens whose rows have been counted ahead of their sums, at most.
#define SUMS_AHEAD 8

// A warp's stages: a ring that is loaded at one end and taken from at the other.
template <int STAGES>
struct Ring {
    u32 in, out, parity, pending;

    __device__ u32 load(u32 j) const { return in + j < STAGES ? in + j : in + j - STAGES; }

    __device__ void loaded(u32 count) {
        in = load(count);
        pending += count;
    }

    // Waits for the `j`-th stage from the end that is taken from, which has been loaded.
    __device__ u32 wait(u32 barriers, u32 j) const {
        u32 stage = out + j, phase = parity;
        if (stage >= STAGES) {
            stage -= STAGES;
            phase ^= 1;
        }
        ep_barrier_wait(barriers + 8 * stage, phase);
        return stage;
    }

    // All lanes have read them.
    __device__ void taken(u32 count) {
        out += count;
        if (out >= STAGES) {
            out -= STAGES;
            parity ^= 1;
        }
        pending -= count;
    }
};

// VECTORS 16-byte vectors per lane make a piece.
template <int DTYPE, int VECTORS, int STAGES>
__device__ void sums_tma(Params p) {
    extern __shared__ __align__(128) unsigned char shared[];
    const u32 chunk = 512 * VECTORS;
    // Fewer loads at a time cost more instructions, more leave stages empty.
    const u32 batch = STAGES >= 4 ? 2 : 1;
    u32 warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    u64 *table = (u64 *)(shared + (u64)warps * STAGES * chunk);
    u64 *barriers = table + (p.mode == LOCAL ? 2 : p.shape.world);
    u32 *counted = (u32 *)(barriers + warps * STAGES) + warp * SUMS_AHEAD;
    if (!sums_may_run(p)) return;
    sums_fill_table(p, table);
    u32 buffer = ep_shared(shared) + warp * STAGES * chunk;
    u32 barrier = ep_shared(barriers) + warp * STAGES * 8;
    if (lane < STAGES) {
        ep_barrier_init(barrier + 8 * lane);
        ep_barriers_ready();
    }
    __syncwarp();
    // An item is `span` adjacent pieces of a token.
    u32 tokens = sums_tokens(p), pieces = (p.row_bytes + chunk - 1) / chunk;
    u32 spans = (pieces + p.span - 1) / p.span;
    auto end_of = [&](u32 part) {
        u32 end = (part + 1) * p.span;
        return end < pieces ? end : pieces;
    };
    auto bytes_of = [&](u32 piece) {
        u32 left = p.row_bytes - piece * chunk;
        return left < chunk ? left : chunk;
    };
    // Two walks over the same (item, piece, source) sequence: one loads, one adds. The first tells
    // the second how many rows each token has.
    EpWalk ahead = ep_walk(spans), walk = ahead;
    Ring<STAGES> ring = {0, 0, 0, 0};
    u32 piece_ahead = 0, source_ahead = 0, told = 0, heard = 0;
    Sources fetching = {0, 0};
    // The places of the item behind are looked up while this one is loaded.
    Lookup following = {0, -1, 0};
    if (ahead.row < tokens) following = sums_look_up(p, table, ahead.row);
    bool fresh = true;
    // Loads as much as there is room for. Afterwards all stages are full, or all sources of the item
    // that is being added have been loaded.
    auto pump = [&]() {
        while (ahead.row < tokens) {
            if (fresh) {
                if (told - heard >= SUMS_AHEAD) return;
                fetching = sums_found(p, table, ahead.row, following);
                if (lane == 0) counted[told % SUMS_AHEAD] = fetching.rows;
                told++;
                piece_ahead = ahead.part * p.span;
                source_ahead = 0;
                fresh = false;
                EpWalk next = ahead;
                ep_step(next);
                if (next.row < tokens) following = sums_look_up(p, table, next.row);
            }
            u32 all = fetching.rows + p.biases, now = all - source_ahead, room = STAGES - ring.pending;
            if (now > room) now = room;
            if (now == 0 && all > 0) return;
            u32 bytes = bytes_of(piece_ahead);
            u64 offset = (u64)piece_ahead * chunk;
            if (all <= 32) {
                // Each lane asks for the source it holds.
                u32 j = lane - source_ahead, s = ring.load(j);
                if (j < now) ep_bulk_load(buffer + s * chunk, fetching.address + offset, bytes, barrier + 8 * s);
            } else {
                for (u32 j = 0; j < now; j++) {
                    u64 from = sums_source(p, table, fetching, ahead.row, source_ahead + j) + offset;
                    u32 s = ring.load(j);
                    if (lane == 0) ep_bulk_load(buffer + s * chunk, from, bytes, barrier + 8 * s);
                }
            }
            ring.loaded(now);
            source_ahead += now;
            if (source_ahead < all) return;
            source_ahead = 0;
            if (all == 0 || ++piece_ahead >= end_of(ahead.part)) {
                ep_step(ahead);
                fresh = true;
            }
        }
    };
    // All lanes have read `count` stages before they are loaded anew.
    auto give_back = [&](u32 count) {
        ring.taken(count);
        if (STAGES - ring.pending < batch) return;
        __syncwarp();
        pump();
    };
    // Adds `all` sources, the first `rows` of which are rows: `vectors` of this lane in a piece.
    auto add = [&](u32 token, u32 rows, u32 all, float my_weight, u64 to, u32 vectors) {
        auto here = [=](int v) { return v < (int)vectors; };
        EpQuad done[VECTORS];
        if (DTYPE != F32 && rows == 2 && all == 2 && !p.weighted) {
            u32 one = buffer + ring.wait(barrier, 0) * chunk + 16 * lane;
            u32 two = buffer + ring.wait(barrier, 1) * chunk + 16 * lane;
#pragma unroll
            for (int v = 0; v < VECTORS; v++) {
                if (!here(v)) continue;
                EpQuad a = ep_load_shared(one + 512 * v), b = ep_load_shared(two + 512 * v);
                done[v] = EpQuad{sums_pair_sum<DTYPE>(a.x, b.x), sums_pair_sum<DTYPE>(a.y, b.y),
                                 sums_pair_sum<DTYPE>(a.z, b.z), sums_pair_sum<DTYPE>(a.w, b.w)};
            }
            give_back(2);
            sums_store<DTYPE, VECTORS>(to, done, here);
            return;
        }
        Wide<DTYPE> sum[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int i = 0; i < Wide<DTYPE>::count; i++) sum[v].at[i] = 0.0f;
        for (u32 j = 0; j < all; j++) {
            bool weighted = p.weighted && j < rows;
            float weight = 1.0f;
            if (weighted) {
                weight = __shfl_sync(0xffffffffu, my_weight, j & 31);
                if (j >= 32) weight = sums_weight(p, token, j);
            }
            u32 from = buffer + ring.wait(barrier, 0) * chunk + 16 * lane;
            auto get = [&](int v) { return ep_load_shared(from + 512 * v); };
            sums_add_row<DTYPE, VECTORS>(sum, j == 0 && rows > 0, weighted, weight, get, here);
            give_back(1);
        }
#pragma unroll
        for (int v = 0; v < VECTORS; v++) done[v] = sums_narrow<DTYPE>(sum[v]);
        sums_store<DTYPE, VECTORS>(to, done, here);
    };
    while (walk.row < tokens) {
        // The last stage of the item before may have been read by some lanes only.
        __syncwarp();
        pump();
        __syncwarp();
        u32 token = walk.row, rows = counted[heard % SUMS_AHEAD], all = rows + p.biases;
        heard++;
        // All lanes have heard before the place is told anew.
        __syncwarp();
        float my_weight = p.weighted && lane < rows ? sums_weight(p, token, lane) : 0.0f;
        for (u32 piece = walk.part * p.span; piece < end_of(walk.part); piece++) {
            u32 bytes = bytes_of(piece);
            u64 to = sums_out(p, table, token) + (u64)piece * chunk + 16 * lane;
            add(token, rows, all, my_weight, to, bytes > 16 * lane ? (bytes - 16 * lane + 511) / 512 : 0);
        }
        if ((p.weights_home || p.mode == LOCAL) && walk.part == 0) sums_weights(p, table, token);
        ep_step(walk);
    }
    sums_report(p);
}
#endif

template <int DTYPE, int UNROLL>
__device__ void sums_ldst(Params p) {
    extern __shared__ __align__(128) unsigned char shared[];
    u64 *table = (u64 *)shared;
    if (!sums_may_run(p)) return;
    sums_fill_table(p, table);
    u32 warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    u32 tokens = sums_tokens(p), quads = p.row_bytes / 16;
    for (u64 token = blockIdx.x * warps + warp; token < tokens; token += (u64)gridDim.x * warps) {
        u64 to = sums_out(p, table, token);
        Sources s = sums_found(p, table, token, sums_look_up(p, table, token));
        for (u32 base = 0; base < quads; base += 32 * UNROLL) {
            u32 q = base + lane;
            Wide<DTYPE> sum[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
#pragma unroll
                for (int i = 0; i < Wide<DTYPE>::count; i++) sum[u].at[i] = 0.0f;
            for (u32 j = 0; j < s.rows + p.biases; j++) {
                u64 from = sums_source(p, table, s, token, j);
                bool weighted = p.weighted && j < s.rows;
                float weight = weighted ? sums_weight(p, token, j) : 1.0f;
                EpQuad held[UNROLL];
#pragma unroll
                for (int u = 0; u < UNROLL; u++)
                    if (q + 32 * u < quads) held[u] = ep_load(from + 16ull * (q + 32 * u));
                auto get = [&](int u) { return held[u]; };
                auto here = [&](int u) { return q + 32 * u < quads; };
                sums_add_row<DTYPE, UNROLL>(sum, j == 0 && s.rows > 0, weighted, weight, get, here);
            }
            EpQuad done[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++) done[u] = sums_narrow<DTYPE>(sum[u]);
            sums_store<DTYPE, UNROLL>(to + 16ull * q, done, [&](int u) { return q + 32 * u < quads; });
        }
        if (p.weights_home || p.mode == LOCAL) sums_weights(p, table, token);
    }
    sums_report(p);
}

#define SUMS_LDST(UNROLL, THREADS)                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                      \
        moe_sum_ld##UNROLL(const __grid_constant__ MoeSumsParams p) {                          \
        if (p.dtype == BF16) sums_ldst<BF16, UNROLL>(p);                                       \
        else if (p.dtype == F16) sums_ldst<F16, UNROLL>(p);                                    \
        else sums_ldst<F32, UNROLL>(p);                                                        \
    }
SUMS_LDST(1, 1024)
SUMS_LDST(2, 1024)
SUMS_LDST(4, 640)
SUMS_LDST(7, 384)
SUMS_LDST(14, 256)
#undef SUMS_LDST

// Where there are no bulk copies these kernels are empty; no plan launches them there.
#if __CUDA_ARCH__ < 900
template <int DTYPE, int VECTORS, int STAGES>
__device__ void sums_tma(Params p) {}
#endif

#define SUMS_TMA(VECTORS, STAGES, THREADS)                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                      \
        moe_sum_tma##VECTORS##x##STAGES(const __grid_constant__ MoeSumsParams p) {             \
        if (p.dtype == BF16) sums_tma<BF16, VECTORS, STAGES>(p);                               \
        else if (p.dtype == F16) sums_tma<F16, VECTORS, STAGES>(p);                            \
        else sums_tma<F32, VECTORS, STAGES>(p);                                                \
    }
SUMS_TMA(2, 4, 512)
SUMS_TMA(7, 3, 512)
SUMS_TMA(7, 4, 512)
SUMS_TMA(7, 6, 320)
SUMS_TMA(4, 6, 512)
SUMS_TMA(14, 2, 256)
SUMS_TMA(14, 3, 256)
#undef SUMS_TMA
