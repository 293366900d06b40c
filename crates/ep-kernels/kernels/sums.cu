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

#define BF16 0
#define F16 1
#define F32 2

// Sixteen bytes as numbers: eight halves or four floats.
template <int DTYPE>
struct Wide {
    static const int count = DTYPE == F32 ? 4 : 8;
    float at[count];
};

__device__ inline float sums_half(u32 bits) {
    float value;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "r"(bits));
    return value;
}

template <int DTYPE>
__device__ inline Wide<DTYPE> sums_widen(EpQuad q) {
    Wide<DTYPE> wide;
    u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (DTYPE == F32) {
            wide.at[i] = __uint_as_float(words[i]);
        } else if (DTYPE == BF16) {
            wide.at[(2 * i) % Wide<DTYPE>::count] = __uint_as_float(words[i] << 16);
            wide.at[(2 * i + 1) % Wide<DTYPE>::count] = __uint_as_float(words[i] & 0xffff0000u);
        } else {
            wide.at[(2 * i) % Wide<DTYPE>::count] = sums_half(words[i] & 0xffff);
            wide.at[(2 * i + 1) % Wide<DTYPE>::count] = sums_half(words[i] >> 16);
        }
    }
    return wide;
}

template <int DTYPE>
__device__ inline u32 sums_pair(float low, float high) {
    u32 pair;
    if (DTYPE == BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Whether one of eight numbers is NaN.
__device__ inline bool sums_any_nan(const float *at) {
    u32 any;
    asm("{ .reg .pred p;\n"
        "setp.nan.f32 p, %1, %2;\n"
        "setp.nan.or.f32 p, %3, %4, p;\n"
        "setp.nan.or.f32 p, %5, %6, p;\n"
        "setp.nan.or.f32 p, %7, %8, p;\n"
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(any)
        : "f"(at[0]), "f"(at[1]), "f"(at[2]), "f"(at[3]), "f"(at[4]), "f"(at[5]), "f"(at[6]), "f"(at[7]));
    return any != 0;
}

template <int DTYPE>
__device__ inline EpQuad sums_narrow(const Wide<DTYPE> &wide) {
    u32 words[4];
    if (DTYPE == F32) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[i] = wide.at[i] != wide.at[i] ? 0x7fc00000u : __float_as_uint(wide.at[i]);
        return EpQuad{words[0], words[1], words[2], words[3]};
    }
    const int count = Wide<DTYPE>::count;
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = sums_pair<DTYPE>(wide.at[(2 * i) % count], wide.at[(2 * i + 1) % count]);
    if (sums_any_nan(wide.at)) {
        const u32 nan = DTYPE == BF16 ? 0x7fc0 : 0x7e00;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float low = wide.at[(2 * i) % count], high = wide.at[(2 * i + 1) % count];
            if (low != low) words[i] = (words[i] & 0xffff0000u) | nan;
            if (high != high) words[i] = (words[i] & 0xffff) | nan << 16;
        }
    }
    return EpQuad{words[0], words[1], words[2], words[3]};
}

// How a row joins a sum.
enum Term { FIRST, NEXT };

// The first row is taken as it is, others are added.
template <int DTYPE, Term TERM, bool WEIGHTED>
__device__ inline void sums_add(Wide<DTYPE> &sum, EpQuad q, float weight) {
    Wide<DTYPE> wide = sums_widen<DTYPE>(q);
#pragma unroll
    for (int i = 0; i < Wide<DTYPE>::count; i++) {
        float term = WEIGHTED ? __fmul_rn(weight, wide.at[i]) : wide.at[i];
        sum.at[i] = TERM == FIRST ? term : __fadd_rn(sum.at[i], term);
    }
}

// Adds one row's vectors, held or fetched by `get`, where `here` says there are some.
template <int DTYPE, int VECTORS, typename Get, typename Here>
__device__ inline void sums_add_row(Wide<DTYPE> *sum, bool first, bool weighted, float weight, Get get, Here here) {
#define SUMS_EACH(TERM, WEIGHTED)                                        \
    _Pragma("unroll") for (int v = 0; v < VECTORS; v++) if (here(v))    \
        sums_add<DTYPE, TERM, WEIGHTED>(sum[v], get(v), weight)
    if (weighted && first) {
        SUMS_EACH(FIRST, true);
    } else if (weighted) {
        SUMS_EACH(NEXT, true);
    } else if (first) {
        SUMS_EACH(FIRST, false);
    } else {
        SUMS_EACH(NEXT, false);
    }
#undef SUMS_EACH
}

__device__ bool sums_may_run(Params p) {
    if (!p.check) return !moe_poisoned(p.shape, ((const MoeHandleHeader *)p.routing.header)->status != 0);
    bool poisoned = moe_poisoned(p.shape), agreed = moe_agreed(p.shape, p.op);
    moe_verdict(p.shape, p.op, poisoned, agreed);
    return !poisoned && agreed;
}

// Where the rows of each rank start.
__device__ void sums_fill_table(Params p, u64 *table) {
    if (p.mode == LOCAL) {
        u64 own = ((const u64 *)p.shape.windows)[p.shape.rank] + p.shape.slots_at + p.slot * p.shape.slot_bytes;
        if (threadIdx.x == 0) table[0] = own + p.shape.expert_region;
        if (threadIdx.x == 0) table[1] = own;
    } else {
        for (u32 r = threadIdx.x; r < p.shape.world; r += blockDim.x)
            table[r] = p.mode == PER_RANK ? moe_rank_rows(p.shape, p.op, r) +
                                                (u64)((const u32 *)p.routing.sent_base)[r] * p.from.stride
                                          : moe_expert_rows(p.shape, p.op, r);
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
        if (position < 0) return 0;
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
    float *home = p.mode == LOCAL ? (float *)(sums_out(p, table, token) + p.out_weights_at)
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

__device__ inline Sources sums_sources(Params p, const u64 *table, u32 token) {
    u32 lane = threadIdx.x & 31, width = sums_width(p);
    Sources s;
    int which;
    s.address = sums_row(p, table, token, lane, which);
    s.rows = __popc(__ballot_sync(0xffffffffu, s.address != 0));
    if (s.rows == 32 && width > 32) {
        for (u32 j = 32; j < width && sums_row(p, table, token, j, which); j++) s.rows++;
    }
    return s;
}

// The address of source `j` of a token: the warp's lanes hold the first 32 rows.
__device__ inline u64 sums_source(Params p, const u64 *table, const Sources &s, u32 token, u32 j) {
    u64 address = __shfl_sync(0xffffffffu, s.address, j & 31);
    int which;
    if (j >= s.rows) return sums_bias(p, j - s.rows, token);
    return j < 32 ? address : sums_row(p, table, token, j, which);
}

#if __CUDA_ARCH__ >= 900
// Tokens whose rows have been counted ahead of their sums, at most.
#define SUMS_AHEAD 8

// VECTORS 16-byte vectors per lane make a piece.
template <int DTYPE, int VECTORS, int STAGES>
__device__ void sums_tma(Params p) {
    extern __shared__ __align__(128) unsigned char shared[];
    const u32 chunk = 512 * VECTORS;
    u32 warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    u64 *table = (u64 *)(shared + (u64)warps * STAGES * chunk);
    u64 *barriers = table + (p.mode == LOCAL ? 2 : p.shape.world);
    u32 *counted = (u32 *)(barriers + warps * STAGES) + warp * SUMS_AHEAD;
    if (!sums_may_run(p)) return;
    sums_fill_table(p, table);
    u32 buffer = ep_shared(shared) + warp * STAGES * chunk;
    u32 barrier = ep_shared(barriers) + warp * STAGES * 8;
    if (lane == 0) {
        for (int s = 0; s < STAGES; s++) ep_barrier_init(barrier + 8 * s);
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
    u32 piece_ahead = 0, source_ahead = 0, loaded = 0, taken = 0, told = 0, heard = 0;
    Sources fetching = {0, 0}, following = {0, 0};
    // The places of the item behind are looked up while this one is loaded.
    if (ahead.row < tokens) following = sums_sources(p, table, ahead.row);
    bool fresh = true;
    auto pump = [&]() {
        while (loaded - taken < STAGES - 1 && ahead.row < tokens) {
            if (fresh) {
                if (told - heard >= SUMS_AHEAD) return;
                fetching = following;
                if (lane == 0) counted[told % SUMS_AHEAD] = fetching.rows;
                told++;
                piece_ahead = ahead.part * p.span;
                source_ahead = 0;
                fresh = false;
                EpWalk next = ahead;
                ep_step(next);
                if (next.row < tokens) following = sums_sources(p, table, next.row);
            }
            u32 all = fetching.rows + p.biases;
            if (source_ahead < all) {
                u64 from = sums_source(p, table, fetching, ahead.row, source_ahead++) + (u64)piece_ahead * chunk;
                u32 s = loaded++ % STAGES;
                if (lane == 0) ep_bulk_load(buffer + s * chunk, from, bytes_of(piece_ahead), barrier + 8 * s);
            }
            if (source_ahead >= all) {
                source_ahead = 0;
                if (all == 0 || ++piece_ahead >= end_of(ahead.part)) {
                    ep_step(ahead);
                    fresh = true;
                }
            }
        }
    };
    while (walk.row < tokens) {
        pump();
        __syncwarp();
        u32 token = walk.row, rows = counted[heard % SUMS_AHEAD], all = rows + p.biases;
        heard++;
        // All lanes have heard before the place is told anew.
        __syncwarp();
        float my_weight = p.weighted && lane < rows ? sums_weight(p, token, lane) : 0.0f;
        for (u32 piece = walk.part * p.span; piece < end_of(walk.part); piece++) {
            Wide<DTYPE> sum[VECTORS];
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
#pragma unroll
                for (int i = 0; i < Wide<DTYPE>::count; i++) sum[v].at[i] = 0.0f;
            u32 bytes = bytes_of(piece);
            for (u32 j = 0; j < all; j++) {
                u32 stage = taken % STAGES;
                bool weighted = p.weighted && j < rows;
                float weight = 1.0f;
                if (weighted) {
                    weight = __shfl_sync(0xffffffffu, my_weight, j & 31);
                    if (j >= 32) weight = sums_weight(p, token, j);
                }
                ep_barrier_wait(barrier + 8 * stage, (taken / STAGES) & 1);
                u32 from = buffer + stage * chunk + 16 * lane;
                auto get = [&](int v) { return ep_load_shared(from + 512 * v); };
                auto here = [&](int v) { return 512 * v + 16 * lane < bytes; };
                auto whole = [&](int) { return true; };
                bool first = j == 0 && rows > 0;
                if (bytes == chunk)
                    sums_add_row<DTYPE, VECTORS>(sum, first, weighted, weight, get, whole);
                else
                    sums_add_row<DTYPE, VECTORS>(sum, first, weighted, weight, get, here);
                taken++;
                // All lanes have read this stage before it is loaded anew.
                __syncwarp();
                pump();
            }
            u64 to = sums_out(p, table, token) + (u64)piece * chunk + 16 * lane;
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                if (512 * v + 16 * lane < bytes) ep_store(to + 512 * v, sums_narrow<DTYPE>(sum[v]));
        }
        if ((p.weights_home || p.mode == LOCAL) && walk.part == 0) sums_weights(p, table, token);
        ep_step(walk);
    }
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
        Sources s = sums_sources(p, table, token);
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
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (q + 32 * u < quads) ep_store(to + 16ull * (q + 32 * u), sums_narrow<DTYPE>(sum[u]));
        }
        if (p.weights_home || p.mode == LOCAL) sums_weights(p, table, token);
    }
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
SUMS_TMA(14, 2, 256)
SUMS_TMA(14, 3, 256)
#undef SUMS_TMA
