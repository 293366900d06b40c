// What is decided from all ranks' announcements, and the announcement of operations without counts.

struct MoeAnnounceParams {
    MoeShape shape;
    MoeOp op;
    MoeHeader header;
    u64 handle;
};

struct MoeJudgeParams {
    MoeShape shape;
    MoeOp op;
};

// What is known of nodes and what becomes of it, where tokens cross them once.
struct MoeCrossing {
    u64 node_of, rails, sources, counts, sent_base, staged, places, expert_places;
    u32 nodes, incoming, max_rows, reserved;
};

struct MoePlanParams {
    MoeShape shape;
    MoeRouting routing;
    MoeOp op;
    MoeCrossing crossing;
    u64 summary, scratch, node_of;
    u32 alignment, block_rows, block_expert_rows, reserved;
};

struct MoeTailParams {
    MoeShape shape;
    MoeRouting routing;
    MoeOp op;
    MoeRowFormat row;
    MoeExpertFormat expert;
    u32 expert_major, reserved;
};

EP_CHECK_SIZE(MoeAnnounceParams);
EP_CHECK_FIELD(MoeAnnounceParams, shape);
EP_CHECK_FIELD(MoeAnnounceParams, op);
EP_CHECK_FIELD(MoeAnnounceParams, header);
EP_CHECK_FIELD(MoeAnnounceParams, handle);
EP_CHECK_SIZE(MoeJudgeParams);
EP_CHECK_FIELD(MoeJudgeParams, shape);
EP_CHECK_FIELD(MoeJudgeParams, op);
EP_CHECK_SIZE(MoeCrossing);
EP_CHECK_FIELD(MoeCrossing, node_of);
EP_CHECK_FIELD(MoeCrossing, rails);
EP_CHECK_FIELD(MoeCrossing, sources);
EP_CHECK_FIELD(MoeCrossing, counts);
EP_CHECK_FIELD(MoeCrossing, sent_base);
EP_CHECK_FIELD(MoeCrossing, staged);
EP_CHECK_FIELD(MoeCrossing, places);
EP_CHECK_FIELD(MoeCrossing, expert_places);
EP_CHECK_FIELD(MoeCrossing, nodes);
EP_CHECK_FIELD(MoeCrossing, incoming);
EP_CHECK_FIELD(MoeCrossing, max_rows);
EP_CHECK_FIELD(MoeCrossing, reserved);
EP_CHECK_SIZE(MoePlanParams);
EP_CHECK_FIELD(MoePlanParams, shape);
EP_CHECK_FIELD(MoePlanParams, routing);
EP_CHECK_FIELD(MoePlanParams, op);
EP_CHECK_FIELD(MoePlanParams, crossing);
EP_CHECK_FIELD(MoePlanParams, summary);
EP_CHECK_FIELD(MoePlanParams, scratch);
EP_CHECK_FIELD(MoePlanParams, node_of);
EP_CHECK_FIELD(MoePlanParams, alignment);
EP_CHECK_FIELD(MoePlanParams, block_rows);
EP_CHECK_FIELD(MoePlanParams, block_expert_rows);
EP_CHECK_FIELD(MoePlanParams, reserved);
EP_CHECK_SIZE(MoeTailParams);
EP_CHECK_FIELD(MoeTailParams, shape);
EP_CHECK_FIELD(MoeTailParams, routing);
EP_CHECK_FIELD(MoeTailParams, op);
EP_CHECK_FIELD(MoeTailParams, row);
EP_CHECK_FIELD(MoeTailParams, expert);
EP_CHECK_FIELD(MoeTailParams, expert_major);
EP_CHECK_FIELD(MoeTailParams, reserved);

#define HANDLE_REFUSED 3

extern "C" __global__ void __launch_bounds__(1024, 1)
    moe_announce(const __grid_constant__ MoeAnnounceParams p) {
    MoeLane *lane = (MoeLane *)p.op.lane;
    MoeHeader header = p.header;
    header.sequence = lane->sequence + 1;
    if (p.handle) {
        const MoeHandleHeader *handle = (const MoeHandleHeader *)p.handle;
        header.handle = handle->id;
        if (handle->status) header.status = HANDLE_REFUSED;
    }
    u64 own = ((const u64 *)p.shape.windows)[p.shape.rank];
    for (u32 peer = threadIdx.x; peer < p.shape.world; peer += blockDim.x) {
        u64 window = moe_window(p.shape, peer);
        // Who is not mapped gets a copy of what this rank tells itself.
        if (!window) continue;
        moe_announce_to(window + (p.op.mailboxes - own) + p.shape.rank * p.shape.message, header);
    }
    moe_awaits(p.shape, p.op, MOE_POSTED, header.sequence);
    __syncthreads();
    if (threadIdx.x == 0) lane->sequence = header.sequence;
}

// One block. The verdict on an operation that is not planned, for a host that has to know it before
// it sends to ranks that are not mapped.
extern "C" __global__ void __launch_bounds__(1024, 1)
    moe_judge(const __grid_constant__ MoeJudgeParams p) {
    if (moe_goes_on(p.shape, p.op, false)) moe_verdict(p.shape, p.op, MOE_OK);
}

typedef const MoePlanParams &Params;

__device__ inline u64 plan_padded(u64 count, u32 alignment) {
    return alignment > 1 ? (count + alignment - 1) / alignment * alignment : count;
}

// What a block finds out together.
struct PlanFound {
    u64 needed;
    u32 first, overflow;
};

// Whether some `rows(r)` exceeds `reserved`: the first such rank and the most rows of any.
template <typename F>
__device__ bool plan_over(PlanFound &found, u32 ranks, u64 reserved, F rows) {
    __syncthreads();
    if (threadIdx.x == 0) {
        found.needed = 0;
        found.first = 0xffffffffu;
    }
    __syncthreads();
    for (u32 r = threadIdx.x; r < ranks; r += blockDim.x) {
        u64 n = rows(r);
        atomicMax(&found.needed, n);
        if (n > reserved) atomicMin(&found.first, r);
    }
    __syncthreads();
    return found.first != 0xffffffffu;
}

// Sums the columns of all ranks' counts. `experts` and `ranks` take the totals.
__device__ void plan_sum(Params p, u64 *experts, u64 *ranks, PlanFound &found) {
    u32 physical = p.shape.physical, world = p.shape.world, me = p.shape.rank;
    for (u32 c = threadIdx.x; c < physical + world; c += blockDim.x) {
        u64 total = 0, before = 0;
        for (u32 source = 0; source < world; source++) {
            if (source == me) before = total;
            const u32 *counts = (const u32 *)(moe_mailbox(p.shape, p.op, source) + 1);
            total += counts[c];
            if (c == physical + me) ((u32 *)p.routing.received)[source] = counts[c];
        }
        if (total > 0x7fffffff) atomicOr(&found.overflow, 1);
        if (c < physical) {
            experts[c] = total;
            ((u32 *)p.routing.expert_base)[c] = before;
        } else {
            ranks[c - physical] = total;
            ((u32 *)p.routing.sent_base)[c - physical] = before;
        }
    }
    __syncthreads();
}

// A warp per rank: the first row of each of its experts, and how many rows it has with padding.
__device__ void plan_offsets(Params p, const u64 *experts, u64 *rows) {
    u32 warps = blockDim.x / 32, lane = threadIdx.x & 31, alignment = p.alignment ? p.alignment : 1;
    const u32 *base = (const u32 *)p.shape.base;
    for (u32 rank = threadIdx.x / 32; rank < p.shape.world; rank += warps) {
        bool own = rank == p.shape.rank;
        if (!own && p.alignment == 0) continue;
        u64 start = 0;
        for (u32 first = base[rank]; first < base[rank + 1]; first += 32) {
            u32 e = first + lane;
            bool here = e < base[rank + 1];
            u64 count = here ? experts[e] : 0, padded = plan_padded(count, alignment), sum = padded;
            for (u32 step = 1; step < 32; step *= 2) {
                u64 below = __shfl_up_sync(0xffffffffu, sum, step);
                if (lane >= step) sum += below;
            }
            u64 at = start + sum - padded;
            int clamped = at > 0x7fffffff ? 0x7fffffff : (int)at;
            if (here && p.alignment) ((int *)p.routing.expert_offsets)[e] = clamped;
            if (here && own) {
                ((int *)p.routing.offsets)[e - base[rank]] = clamped;
                ((int *)p.routing.counts)[e - base[rank]] = (int)count;
            }
            start += __shfl_sync(0xffffffffu, sum, 31);
        }
        if (lane == 0) {
            rows[rank] = start;
            if (own) ((int *)p.routing.offsets)[p.shape.local_experts] = start > 0x7fffffff ? 0x7fffffff : (int)start;
        }
    }
    __syncthreads();
}

// The sum of the first `count` numbers at `at`.
__device__ inline u32 plan_before(const u32 *at, u32 count) {
    u32 sum = 0;
    for (u32 i = 0; i < count; i++) sum += at[i];
    return sum;
}

// Where rows for and from ranks that are not mapped are staged: a block per rank or, where experts' rows
// come home, per expert, in ascending order. All ranks and experts count, mapped or not; where blocks have
// fixed places, the experts of a rank are counted from its block on.
__device__ void plan_staged(Params p) {
    const u32 *ranks = (const u32 *)p.routing.rank_counts, *experts = (const u32 *)p.routing.expert_counts;
    for (u32 r = threadIdx.x; r < p.shape.world; r += blockDim.x)
        ((u32 *)p.routing.staged)[r] = p.op.block ? 0 : plan_before(ranks, r);
    for (u32 e = threadIdx.x; p.alignment && e < p.shape.physical; e += blockDim.x) {
        u32 owner = ((const u32 *)p.shape.rank_of)[e];
        if (moe_window(p.shape, owner)) continue;
        u32 first = p.op.block ? ((const u32 *)p.shape.base)[owner] : 0;
        ((u32 *)p.routing.expert_offsets)[e] = plan_before(experts + first, e - first);
        ((u32 *)p.routing.expert_base)[e] = 0;
    }
}

// Which rows of this rank's experts are whose: who packs blocks of fixed size has to know it.
__device__ void plan_experts_from(Params p) {
    u32 local = p.shape.local_experts, first = ((const u32 *)p.shape.base)[p.shape.rank];
    for (u32 at = threadIdx.x; at < p.shape.world * local; at += blockDim.x)
        ((u32 *)p.routing.experts_from)[at] =
            ((const u32 *)(moe_mailbox(p.shape, p.op, at / local) + 1))[first + at % local];
}

// The most rows that a rank of another node sends to `rank`: one per token or one per expert.
__device__ u64 plan_block(Params p, u32 rank, bool experts) {
    const u32 *node_of = (const u32 *)p.node_of, *base = (const u32 *)p.shape.base;
    u32 first = experts ? base[rank] : p.shape.physical + rank;
    u32 count = experts ? base[rank + 1] - first : 1, most = 0;
    for (u32 source = 0; source < p.shape.world; source++) {
        if (node_of[source] == node_of[rank]) continue;
        const u32 *counts = (const u32 *)(moe_mailbox(p.shape, p.op, source) + 1);
        u32 rows = plan_before(counts + first, count);
        if (rows > most) most = rows;
    }
    return most;
}

// What the host has to know to send to ranks that are not mapped, and to receive from them. By rank: where
// this rank's rows start there; where its rows start in that rank's staging when they go home, one per
// token, and one per expert; how many rows it sent for each expert here. Then how many rows this rank has
// for each expert, and for each rank before each piece of its tokens.
// Returns what is behind it.
__device__ int *plan_far_summary(Params p, int *to) {
    u32 world = p.shape.world, physical = p.shape.physical, local = p.shape.local_experts;
    u32 first = ((const u32 *)p.shape.base)[p.shape.rank];
    for (u32 r = threadIdx.x; r < world; r += blockDim.x) {
        const u32 *counts = (const u32 *)(moe_mailbox(p.shape, p.op, r) + 1);
        to[r] = ((const int *)p.routing.sent_base)[r];
        to[world + r] = plan_before(counts + physical, p.shape.rank);
        to[2 * world + r] = plan_before(counts, first);
    }
    to += 3 * world;
    for (u32 at = threadIdx.x; at < world * local; at += blockDim.x)
        to[at] = ((const int *)(moe_mailbox(p.shape, p.op, at / local) + 1))[first + at % local];
    to += world * local;
    for (u32 e = threadIdx.x; e < physical; e += blockDim.x) to[e] = ((const int *)p.routing.expert_counts)[e];
    to += physical;
    for (u32 at = threadIdx.x; at < MOE_PIECES * world; at += blockDim.x) to[at] = ((const int *)p.routing.pieces)[at];
    return to + MOE_PIECES * world;
}

// How many tokens of `source` cross to `node`, as it announced.
__device__ inline u64 plan_crossing(Params p, u32 source, u32 node) {
    const u32 *counts = (const u32 *)(moe_mailbox(p.shape, p.op, source) + 1);
    return counts[p.shape.physical + p.shape.world + node];
}

// The rows that ranks before `until` give to `rail` to forward.
__device__ u64 plan_forwarded(Params p, u32 rail, u32 until) {
    const u32 *node_of = (const u32 *)p.crossing.node_of, *rails = (const u32 *)p.crossing.rails;
    u32 node = node_of[rail];
    u64 sum = 0;
    for (u32 source = 0; source < until; source++)
        if (node_of[source] != node && rails[(u64)source * p.crossing.nodes + node] == rail)
            sum += plan_crossing(p, source, node);
    return sum;
}

// Where this rank's rows start at each rank, and in staging those for each node; nodes are numbered behind
// the ranks and one more. Then where rows of each source that this rank forwards start at the ranks and
// among those of the experts: behind those of the sources before it.
__device__ void plan_nodes(Params p) {
    const MoeCrossing &c = p.crossing;
    u32 world = p.shape.world, physical = p.shape.physical, first = world + 1;
    for (u32 r = threadIdx.x; r < first + c.nodes; r += blockDim.x) {
        ((u32 *)c.sent_base)[r] = r < world ? ((const u32 *)p.routing.sent_base)[r] : 0;
        ((u32 *)c.staged)[r] = r < first ? 0 : plan_before((const u32 *)c.counts + first, r - first);
    }
    u32 columns = physical + world;
    for (u64 at = threadIdx.x; at < (u64)c.incoming * columns; at += blockDim.x) {
        u32 i = (u32)(at / columns), column = (u32)(at % columns), before = 0;
        if (column < physical && p.alignment == 0) continue;
        // Forwarded are rows for this node's ranks alone.
        u32 rank = column < physical ? ((const u32 *)p.shape.rank_of)[column] : column - physical;
        if (moe_window(p.shape, rank) == 0) continue;
        for (u32 s = 0; s < ((const u32 *)c.sources)[i]; s++)
            before += ((const u32 *)(moe_mailbox(p.shape, p.op, s) + 1))[column];
        if (column < physical) ((u32 *)c.expert_places)[(u64)i * physical + column] = before;
        else ((u32 *)c.places)[(u64)i * world + column - physical] = before;
    }
}

// What the host has to know of nodes. By node: where this rank's block starts in its rail's staging, and
// its rows. By source that this rank forwards: its rows, where they start in this rank's staging, and where
// one row for each starts among those that come home to the source.
__device__ void plan_node_summary(Params p, int *to) {
    const MoeCrossing &c = p.crossing;
    const u32 *node_of = (const u32 *)c.node_of, *rails = (const u32 *)c.rails;
    u32 me = p.shape.rank, own = node_of[me];
    for (u32 n = threadIdx.x; n < c.nodes; n += blockDim.x) {
        to[n] = n == own ? 0 : (int)plan_forwarded(p, rails[(u64)me * c.nodes + n], me);
        to[c.nodes + n] = ((const int *)c.counts)[p.shape.world + 1 + n];
    }
    to += 2 * c.nodes;
    for (u32 i = threadIdx.x; i < c.incoming; i += blockDim.x) {
        u32 source = ((const u32 *)c.sources)[i];
        u64 home = 0;
        for (u32 n = 0; n < own; n++) home += plan_crossing(p, source, n);
        to[3 * i] = (int)plan_crossing(p, source, own);
        to[3 * i + 1] = (int)plan_forwarded(p, me, source);
        to[3 * i + 2] = (int)home;
    }
}

__device__ void plan_summary(Params p, u32 rows, u32 expert_rows) {
    int *to = (int *)p.summary;
    u32 experts = p.shape.local_experts, world = p.shape.world;
    if (threadIdx.x == 0) {
        to[0] = rows;
        to[1] = expert_rows;
    }
    to += 2;
    for (u32 e = threadIdx.x; e < experts; e += blockDim.x) to[e] = ((const int *)p.routing.counts)[e];
    to += experts;
    for (u32 e = threadIdx.x; e <= experts; e += blockDim.x) to[e] = ((const int *)p.routing.offsets)[e];
    to += experts + 1;
    for (u32 r = threadIdx.x; r < world; r += blockDim.x) {
        to[r] = ((const int *)p.routing.received)[r];
        to[world + r] = ((const int *)p.routing.rank_counts)[r];
    }
    if (!p.shape.far) return;
    to = plan_far_summary(p, to + 2 * world);
    if (p.crossing.nodes) plan_node_summary(p, to);
}

// One block. The verdict on an uncached dispatch, and every row's place.
extern "C" __global__ void __launch_bounds__(1024, 1) moe_plan(const __grid_constant__ MoePlanParams p) {
    __shared__ PlanFound found;
    u64 *experts = (u64 *)p.scratch, *ranks = experts + p.shape.physical, *padded = ranks + p.shape.world;
    if (threadIdx.x == 0) found.overflow = 0;
    MoeReport report = {};
    if (__syncthreads_or(moe_differs(p.shape, p.op))) report.verdict = moe_why(p.shape);
    if (report.verdict == MOE_OK) {
        plan_sum(p, experts, ranks, found);
        plan_offsets(p, experts, padded);
        bool over = false;
        if (found.overflow) {
            over = true;
            report.what = 2;
            report.needed = 0x80000000ull;
        } else if (plan_over(found, p.shape.world, p.shape.max_rows, [&](u32 r) { return ranks[r]; })) {
            over = true;
            report.rank = found.first;
            report.needed = found.needed;
        } else if (p.alignment && plan_over(found, p.shape.world, p.shape.max_expert_rows,
                                            [&](u32 r) { return padded[r]; })) {
            over = true;
            report.what = 1;
            report.rank = found.first;
            report.needed = found.needed;
        } else if (p.crossing.nodes && plan_over(found, p.shape.world, p.crossing.max_rows,
                                                 [&](u32 r) { return plan_forwarded(p, r, p.shape.world); })) {
            over = true;
            report.what = 3;
            report.rank = found.first;
            report.needed = found.needed;
        } else if (p.block_rows && plan_over(found, p.shape.world, p.block_rows,
                                             [&](u32 r) { return plan_block(p, r, false); })) {
            over = true;
            report.what = 4;
            report.rank = found.first;
            report.needed = found.needed;
        } else if (p.block_expert_rows && p.alignment &&
                   plan_over(found, p.shape.world, p.block_expert_rows,
                             [&](u32 r) { return plan_block(p, r, true); })) {
            over = true;
            report.what = 5;
            report.rank = found.first;
            report.needed = found.needed;
        }
        if (over) report.verdict = MOE_CAPACITY;
    }
    bool good = report.verdict == MOE_OK;
    u32 rows = good ? (u32)ranks[p.shape.rank] : 0;
    u32 expert_rows = good && p.alignment ? (u32)padded[p.shape.rank] : 0;
    if (good && p.shape.far) plan_staged(p);
    if (good && p.op.block && p.alignment) plan_experts_from(p);
    if (good && p.crossing.nodes) plan_nodes(p);
    if (good) plan_summary(p, rows, expert_rows);
    if (threadIdx.x == 0) {
        MoeLane *lane = (MoeLane *)p.op.lane;
        const MoeHeader *own = moe_mailbox(p.shape, p.op, p.shape.rank);
        MoeHandleHeader *header = (MoeHandleHeader *)p.routing.header;
        lane->sequence += 1;
        lane->bad_choice = ~0ull;
        lane->refused = !good;
        header->id = p.op.lane_index << 48 | lane->sequence;
        header->layout = own->layout;
        header->status = !good;
        header->rows = rows;
        header->expert_rows = expert_rows;
        header->tokens = p.routing.tokens;
    }
    __syncthreads();
    moe_report(p.shape, p.op, report);
}

// Marks the rows behind the last as rows without ids and source.
extern "C" __global__ void __launch_bounds__(1024, 1) moe_mark_tail(const __grid_constant__ MoeTailParams p) {
    if (((const MoeLane *)p.op.lane)->refused != 0) return;
    const MoeHandleHeader *header = (const MoeHandleHeader *)p.routing.header;
    u32 lane = threadIdx.x & 31, warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    u32 warps = gridDim.x * blockDim.x / 32;
    if (p.expert_major) {
        u64 base = moe_expert_rows(p.shape, p.op, p.shape.rank);
        for (u32 row = header->expert_rows + warp * 32 + lane; row < p.shape.max_expert_rows; row += warps * 32) {
            u64 at = base + (u64)row * p.expert.stride;
            *(u32 *)(at + p.expert.weight_at) = 0;
            *(int *)(at + p.expert.row_at) = -1;
        }
        return;
    }
    u64 base = moe_rank_rows(p.shape, p.op, p.shape.rank);
    for (u32 row = header->rows + warp; row < p.shape.max_rows; row += warps) {
        u64 at = base + (u64)row * p.row.stride;
        for (u32 k = lane; k < p.shape.topk; k += 32) {
            ((int *)(at + p.row.ids_at))[k] = -1;
            ((u32 *)(at + p.row.weights_at))[k] = 0;
        }
        if (lane < 2) ((int *)(at + p.row.source_at))[lane] = -1;
    }
}
