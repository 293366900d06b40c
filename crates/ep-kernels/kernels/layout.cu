// Layout: where every token of this rank goes, and its announcement to all ranks. Two kernels, the
// second relies on the end of the first. The twin of `Layout::compute`.

struct MoeLayoutParams {
    MoeShape shape;
    MoeRouting routing;
    MoeOp op;
    MoeHeader header;
    u64 ids, weights, scratch, crossing;
    u32 kind, physical_ids, shared_words, nodes;
};

EP_CHECK_SIZE(MoeLayoutParams);
EP_CHECK_FIELD(MoeLayoutParams, shape);
EP_CHECK_FIELD(MoeLayoutParams, routing);
EP_CHECK_FIELD(MoeLayoutParams, op);
EP_CHECK_FIELD(MoeLayoutParams, header);
EP_CHECK_FIELD(MoeLayoutParams, ids);
EP_CHECK_FIELD(MoeLayoutParams, weights);
EP_CHECK_FIELD(MoeLayoutParams, scratch);
EP_CHECK_FIELD(MoeLayoutParams, crossing);
EP_CHECK_FIELD(MoeLayoutParams, kind);
EP_CHECK_FIELD(MoeLayoutParams, physical_ids);
EP_CHECK_FIELD(MoeLayoutParams, shared_words);
EP_CHECK_FIELD(MoeLayoutParams, nodes);

typedef const MoeLayoutParams &Params;

#define OUT_OF_RANGE 1
#define DUPLICATE 2

__device__ inline long long layout_id(Params p, u64 choice) {
    if (p.kind == 2) return ((const long long *)p.ids)[choice];
    int id = ((const int *)p.ids)[choice];
    return p.kind == 1 || id == -1 ? (long long)id : (long long)(u32)id;
}

__device__ inline void layout_bad(Params p, u64 choice, u32 status) {
    atomicMin(&((MoeLane *)p.op.lane)->bad_choice, choice << 2 | status);
}

// The physical expert of a choice, -1 if there is none.
__device__ inline int layout_expert(Params p, u32 token, u64 choice) {
    long long id = layout_id(p, choice);
    if (id == -1) return -1;
    long long limit = p.physical_ids ? p.shape.physical : p.shape.experts;
    if (id < 0 || id >= limit) {
        layout_bad(p, choice, OUT_OF_RANGE);
        return -1;
    }
    if (p.physical_ids) return (int)id;
    u32 from = ((const u32 *)p.shape.replica_offsets)[id];
    u32 replicas = ((const u32 *)p.shape.replica_offsets)[id + 1] - from;
    u32 which = replicas == 1 ? 0 : (u32)(((u64)p.shape.rank + token) % replicas);
    return ((const u32 *)p.shape.replicas)[from + which];
}

// A token's experts and their ranks: in registers for up to KMAX choices, which are looked up all at
// once, and in memory for any number (KMAX 0).
template <int KMAX>
struct Chosen {
    int expert[KMAX ? KMAX : 1], rank[KMAX ? KMAX : 1];
};

template <int KMAX, typename F>
__device__ inline void layout_each(Params p, u32 token, const Chosen<KMAX> &chosen, F f) {
    u32 topk = p.shape.topk;
    if (KMAX) {
#pragma unroll
        for (int k = 0; k < (KMAX ? KMAX : 1); k++)
            if (k < topk && chosen.expert[k] >= 0) f((u32)k, chosen.expert[k], chosen.rank[k]);
    } else {
        const int *physical = (const int *)p.routing.physical + (u64)token * topk;
        for (u32 k = 0; k < topk; k++)
            if (physical[k] >= 0) f(k, physical[k], (int)((const u32 *)p.shape.rank_of)[physical[k]]);
    }
}

template <int KMAX>
__device__ inline void layout_ranks(Params p, Chosen<KMAX> &chosen) {
#pragma unroll
    for (int k = 0; k < KMAX; k++)
        chosen.rank[k] = chosen.expert[k] >= 0 ? (int)((const u32 *)p.shape.rank_of)[chosen.expert[k]] : -1;
}

template <int KMAX>
__device__ void layout_count(Params p) {
    extern __shared__ __align__(16) u32 shared[];
    u32 tokens = p.routing.tokens, topk = p.shape.topk, experts = p.shape.physical;
    MoeTiles t = tiles_of(p.scratch, experts + p.shape.world, tokens, p.shared_words, shared);
    int *physical = (int *)p.routing.physical;
    float *weights = (float *)p.routing.weights;
    for (u32 base = t.first; base < t.end; base += 32) {
        u32 token = base + (threadIdx.x & 31);
        u64 first = (u64)token * topk;
        bool here = token < t.end;
        Chosen<KMAX> chosen;
        if (KMAX) {
#pragma unroll
            for (int k = 0; k < (KMAX ? KMAX : 1); k++)
                chosen.expert[k] = here && k < topk ? layout_expert(p, token, first + k) : -1;
            layout_ranks(p, chosen);
#pragma unroll
            for (int k = 0; k < (KMAX ? KMAX : 1); k++)
                if (here && k < topk) physical[first + k] = chosen.expert[k];
        } else {
            for (u32 k = 0; here && k < topk; k++) physical[first + k] = layout_expert(p, token, first + k);
        }
        for (u32 k = 0; here && k < topk; k++)
            weights[first + k] = p.weights ? ((const float *)p.weights)[first + k] : 1.0f;
        if (here)
            layout_each(p, token, chosen, [&](u32 k, int expert, int rank) {
                if (tile_mark(t, expert)) layout_bad(p, first + k, DUPLICATE);
                tile_mark(t, experts + rank);
            });
        __syncwarp();
        if (here)
            layout_each(p, token, chosen, [&](u32, int expert, int rank) {
                tile_take(t, expert);
                tile_take(t, experts + rank);
            });
        __syncwarp();
    }
    tiles_publish(t);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    moe_layout_count(const __grid_constant__ MoeLayoutParams p) {
    if (p.shape.topk <= 8) layout_count<8>(p);
    else layout_count<0>(p);
}

// Writes a destination to its place where choices are not held in registers: a rank comes behind the
// ranks before it that the token goes to.
template <int KMAX>
__device__ void layout_lead(Params p, u32 token, const Chosen<KMAX> &chosen, const MoeTiles &t, int rank) {
    u32 f = 0;
    layout_each(p, token, chosen, [&](u32, int other, int other_rank) {
        if (other_rank >= rank) return;
        bool leads = true;
        layout_each(p, token, chosen, [&](u32, int third, int third_rank) {
            leads &= third_rank != other_rank || third >= other;
        });
        f += leads;
    });
    u64 at = (u64)token * p.shape.fan_out + f;
    ((int *)p.routing.dest_rank)[at] = rank;
    ((u32 *)p.routing.dest_index)[at] = tile_before(t, p.shape.physical + rank);
}

// The destinations of a token, ascending, and its choices in the order of experts. Physical experts
// are numbered rank by rank, so that order is also one of ranks.
template <int KMAX>
__device__ void layout_token(Params p, const MoeTiles &t, u32 token, const Chosen<KMAX> &chosen) {
    u32 topk = p.shape.topk, fan_out = p.shape.fan_out, experts = p.shape.physical;
    u32 *index = (u32 *)p.routing.expert_index + (u64)token * topk;
    int *order = (int *)p.routing.order + (u64)token * topk;
    int *dest_rank = (int *)p.routing.dest_rank + (u64)token * fan_out;
    u32 *dest_index = (u32 *)p.routing.dest_index + (u64)token * fan_out;
    for (u32 k = 0; k < topk; k++) index[k] = 0;
    u32 count = 0, found = 0;
    // Before a choice come those of smaller experts. The first choice of a rank in that order stands for
    // the rank; before that come as many ranks as such choices.
    u32 leads = 0;
    layout_each(p, token, chosen, [&](u32 k, int expert, int rank) {
        count++;
        index[k] = tile_before(t, expert);
        u32 place = 0;
        bool first = true;
        layout_each(p, token, chosen, [&](u32, int other, int other_rank) {
            place += other < expert;
            first &= other_rank != rank || other >= expert;
        });
        order[place] = k;
        if (!first) return;
        found++;
        if (KMAX) {
            leads |= 1u << k;
            return;
        }
        layout_lead(p, token, chosen, t, rank);
    });
    if (KMAX)
        layout_each(p, token, chosen, [&](u32 k, int, int rank) {
            if (!(leads >> k & 1)) return;
            u32 f = 0;
            layout_each(p, token, chosen, [&](u32 j, int, int other) { f += (leads >> j & 1) && other < rank; });
            dest_rank[f] = rank;
            dest_index[f] = tile_before(t, experts + rank);
        });
    for (u32 k = count; k < topk; k++) order[k] = -1;
    for (u32 f = found; f < fan_out; f++) {
        dest_rank[f] = -1;
        dest_index[f] = 0;
    }
}

template <int KMAX>
__device__ void layout_place(Params p, const MoeTiles &t) {
    u32 topk = p.shape.topk, experts = p.shape.physical;
    const int *physical = (const int *)p.routing.physical;
    for (u32 base = t.first; base < t.end; base += 32) {
        u32 token = base + (threadIdx.x & 31);
        bool here = token < t.end;
        Chosen<KMAX> chosen;
        if (KMAX) {
#pragma unroll
            for (int k = 0; k < (KMAX ? KMAX : 1); k++)
                chosen.expert[k] = here && k < topk ? physical[(u64)token * topk + k] : -1;
            layout_ranks(p, chosen);
        }
        if (here)
            layout_each(p, token, chosen, [&](u32, int expert, int rank) {
                tile_mark(t, expert);
                tile_mark(t, experts + rank);
            });
        __syncwarp();
        if (here) layout_token(p, t, token, chosen);
        __syncwarp();
        if (here)
            layout_each(p, token, chosen, [&](u32, int expert, int rank) {
                tile_take(t, expert);
                tile_take(t, experts + rank);
            });
        __syncwarp();
    }
}

// How many rows go to each rank before each piece of this rank's tokens: pieces are the tokens of as many
// blocks each, so that what a block counted is enough.
__device__ void layout_pieces(Params p, const MoeTiles &t, bool good) {
    u32 world = p.shape.world;
    for (u32 at = threadIdx.x; at < MOE_PIECES * world; at += blockDim.x) {
        u32 blocks = gridDim.x * (at / world) / MOE_PIECES;
        u32 rows = good ? tiles_total(t, p.shape.physical + at % world, blocks) : 0;
        ((u32 *)p.routing.pieces)[at] = rows;
    }
}

extern "C" __global__ void __launch_bounds__(512, 1)
    moe_layout_place(const __grid_constant__ MoeLayoutParams p) {
    extern __shared__ __align__(16) u32 shared[];
    u32 tokens = p.routing.tokens, topk = p.shape.topk, experts = p.shape.physical;
    u32 world = p.shape.world, columns = experts + world;
    MoeTiles t = tiles_of(p.scratch, columns, tokens, p.shared_words, shared);
    const MoeLane *lane = (const MoeLane *)p.op.lane;
    u64 bad = lane->bad_choice, sequence = lane->sequence + 1;
    bool good = bad == ~0ull;
    MoeHeader header = p.header;
    header.sequence = sequence;
    if (!good) {
        u64 choice = bad >> 2;
        header.status = (u32)(bad & 3);
        header.bad_token = (u32)(choice / topk);
        header.bad_id = layout_id(p, choice);
    }
    // The announcement: to the ranks dealt to this block.
    u64 own = ((const u64 *)p.shape.windows)[p.shape.rank];
    for (u32 peer = blockIdx.x; peer < world; peer += gridDim.x) {
        u64 window = moe_window(p.shape, peer);
        // Who is not mapped gets a copy of what this rank tells itself.
        if (!window) continue;
        u64 to = window + (p.op.mailboxes - own) + p.shape.rank * p.shape.message;
        u32 *counts = (u32 *)(to + sizeof(MoeHeader));
        for (u32 c = threadIdx.x; c < columns; c += blockDim.x)
            counts[c] = good ? tiles_total(t, c, gridDim.x) : 0;
        // How many tokens cross to each node; an earlier layout has counted them.
        for (u32 n = threadIdx.x; n < p.nodes; n += blockDim.x)
            counts[columns + n] = good ? ((const u32 *)p.crossing)[n] : 0;
        if (threadIdx.x == 0) moe_announce_to(to, header);
    }
    if (blockIdx.x == 0) {
        for (u32 c = threadIdx.x; c < columns; c += blockDim.x) {
            u32 total = good ? tiles_total(t, c, gridDim.x) : 0;
            if (c < experts) ((u32 *)p.routing.expert_counts)[c] = total;
            else ((u32 *)p.routing.rank_counts)[c - experts] = total;
        }
        if (p.shape.far) layout_pieces(p, t, good);
        moe_awaits(p.shape, p.op, MOE_POSTED, sequence);
    }
    if (!good) return;
    tiles_resume(t);
    if (topk <= 8) layout_place<8>(p, t);
    else layout_place<0>(p, t);
}
