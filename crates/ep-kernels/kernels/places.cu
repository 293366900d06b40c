// Where received rows go among the rows of this rank's experts: the twin of the numbering in
// `Expander`. Two kernels, the second relies on the end of the first. Both run behind the flags of
// all peers' rows.

struct MoePlacesParams {
    MoeShape shape;
    MoeRouting routing;
    MoeOp op;
    MoeRowFormat row;
    u64 scratch;
    u32 shared_words, reserved;
};

EP_CHECK_SIZE(MoePlacesParams);
EP_CHECK_FIELD(MoePlacesParams, shape);
EP_CHECK_FIELD(MoePlacesParams, routing);
EP_CHECK_FIELD(MoePlacesParams, op);
EP_CHECK_FIELD(MoePlacesParams, row);
EP_CHECK_FIELD(MoePlacesParams, scratch);
EP_CHECK_FIELD(MoePlacesParams, shared_words);
EP_CHECK_FIELD(MoePlacesParams, reserved);

typedef const MoePlacesParams &Params;

// Where the wait for the peers' rows was released, rows are earlier ones: what is made of them stays in
// this rank's memory, and the host says that the operation failed.
__device__ inline bool places_may_run(Params p) { return ((const MoeLane *)p.op.lane)->refused == 0; }

__device__ inline u64 places_record(Params p, u32 row) {
    return moe_rank_rows(p.shape, p.op, p.shape.rank) + (u64)row * p.row.stride;
}

// The local expert of choice `k` of a received row, -1 if it is elsewhere.
__device__ inline int places_expert(Params p, u64 record, u32 k) {
    int expert = ((const int *)(record + p.row.ids_at))[k];
    return expert >= 0 && (u32)expert < p.shape.local_experts ? expert : -1;
}

extern "C" __global__ void __launch_bounds__(512, 1)
    moe_places_count(const __grid_constant__ MoePlacesParams p) {
    extern __shared__ __align__(16) u32 shared[];
    if (!places_may_run(p)) return;
    u32 rows = ((const MoeHandleHeader *)p.routing.header)->rows;
    MoeTiles t = tiles_of(p.scratch, p.shape.local_experts, rows, p.shared_words, shared);
    for (u32 base = t.first; base < t.end; base += 32) {
        u32 row = base + (threadIdx.x & 31);
        if (row < t.end) {
            u64 record = places_record(p, row);
            for (u32 k = 0; k < p.shape.topk; k++) {
                int expert = places_expert(p, record, k);
                if (expert >= 0) atomicAdd(t.counts + expert, 1);
            }
        }
    }
    tiles_publish(t);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    moe_places_place(const __grid_constant__ MoePlacesParams p) {
    extern __shared__ __align__(16) u32 shared[];
    if (!places_may_run(p)) return;
    u32 rows = ((const MoeHandleHeader *)p.routing.header)->rows, topk = p.shape.topk;
    MoeTiles t = tiles_of(p.scratch, p.shape.local_experts, rows, p.shared_words, shared);
    tiles_resume(t);
    for (u32 base = t.first; base < t.end; base += 32) {
        u32 row = base + (threadIdx.x & 31);
        bool here = row < t.end;
        u64 record = here ? places_record(p, row) : 0, first = (u64)row * topk;
        for (u32 k = 0; here && k < topk; k++) {
            int expert = places_expert(p, record, k);
            if (expert >= 0) tile_mark(t, expert);
        }
        __syncwarp();
        u32 chosen = 0;
        for (u32 k = 0; here && k < topk; k++) {
            int expert = places_expert(p, record, k);
            if (expert < 0) continue;
            chosen++;
            u32 place = 0;
            for (u32 other = 0; other < topk; other++) {
                int theirs = places_expert(p, record, other);
                place += theirs >= 0 && theirs < expert;
            }
            ((int *)p.routing.positions)[first + place] =
                ((const int *)p.routing.offsets)[expert] + (int)tile_before(t, expert);
            ((int *)p.routing.choices)[first + place] = k;
            ((u32 *)p.routing.row_weights)[first + place] = ((const u32 *)(record + p.row.weights_at))[k];
        }
        for (u32 k = chosen; here && k < topk; k++) ((int *)p.routing.positions)[first + k] = -1;
        __syncwarp();
        for (u32 k = 0; here && k < topk; k++) {
            int expert = places_expert(p, record, k);
            if (expert >= 0) tile_take(t, expert);
        }
        __syncwarp();
    }
}
