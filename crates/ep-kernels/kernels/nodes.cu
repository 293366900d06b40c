// Tokens that cross nodes once: what a rank reads from the blocks it forwards, and what it sums per node.

struct MoeBlockParams {
    MoeShape shape;
    MoeRowFormat row;
    u64 lane, records, physical, weights, numbers;
    u32 rows, offset;
};

EP_CHECK_SIZE(MoeBlockParams);
EP_CHECK_FIELD(MoeBlockParams, shape);
EP_CHECK_FIELD(MoeBlockParams, row);
EP_CHECK_FIELD(MoeBlockParams, lane);
EP_CHECK_FIELD(MoeBlockParams, records);
EP_CHECK_FIELD(MoeBlockParams, physical);
EP_CHECK_FIELD(MoeBlockParams, weights);
EP_CHECK_FIELD(MoeBlockParams, numbers);
EP_CHECK_FIELD(MoeBlockParams, rows);
EP_CHECK_FIELD(MoeBlockParams, offset);

// The records of one source's block become the choices of as many tokens: those of experts on this node,
// which are the ranks that are mapped. An id has `offset` added, by which its sender told nodes apart;
// whatever it is, it becomes an expert or none.
extern "C" __global__ void __launch_bounds__(512, 1)
    moe_read_block(const __grid_constant__ MoeBlockParams p) {
    u64 topk = p.shape.topk, choices = p.rows * topk;
    // A block before this one may have been no good.
    if (blockIdx.x == 0 && threadIdx.x == 0) ((MoeLane *)p.lane)->bad_choice = ~0ull;
    for (u64 at = blockIdx.x * blockDim.x + threadIdx.x; at < choices; at += gridDim.x * blockDim.x) {
        u64 row = at / topk, k = at % topk, record = p.records + row * p.row.stride;
        int id = ((const int *)(record + p.row.ids_at))[k];
        u32 expert = (u32)id - p.offset;
        bool here = id >= 0 && expert < p.shape.physical;
        if (here) here = moe_window(p.shape, ((const u32 *)p.shape.rank_of)[expert]) != 0;
        ((int *)p.physical)[at] = here ? (int)expert : -1;
        ((u32 *)p.weights)[at] = here ? ((const u32 *)(record + p.row.weights_at))[k] : 0;
        if (k == 0) ((u32 *)p.numbers)[row] = *(const u32 *)(record + p.row.source_at);
    }
}

struct MoeSplitParams {
    MoeShape shape;
    MoeRouting routing;
    u64 near_rank, near_index, near_order, node_rank, node_index;
    u32 own, reserved;
};

EP_CHECK_SIZE(MoeSplitParams);
EP_CHECK_FIELD(MoeSplitParams, shape);
EP_CHECK_FIELD(MoeSplitParams, routing);
EP_CHECK_FIELD(MoeSplitParams, near_rank);
EP_CHECK_FIELD(MoeSplitParams, near_index);
EP_CHECK_FIELD(MoeSplitParams, near_order);
EP_CHECK_FIELD(MoeSplitParams, node_rank);
EP_CHECK_FIELD(MoeSplitParams, node_index);
EP_CHECK_FIELD(MoeSplitParams, own);
EP_CHECK_FIELD(MoeSplitParams, reserved);

// Where the rows of this rank's tokens are on the way home, if nodes are summed first: those of this node's
// ranks and experts, and one per node. The routing has nodes behind the ranks and one more; ranks of this
// node come first, ascending, as nodes do. Of this node's sums there is one per token, of another's one per
// token that went there.
extern "C" __global__ void __launch_bounds__(512, 1)
    moe_split_nodes(const __grid_constant__ MoeSplitParams p) {
    u32 topk = p.shape.topk, fan_out = p.shape.fan_out, first = p.shape.world + 1;
    const u32 *rank_of = (const u32 *)p.shape.rank_of;
    for (u32 token = blockIdx.x * blockDim.x + threadIdx.x; token < p.routing.tokens; token += gridDim.x * blockDim.x) {
        u64 dests = (u64)token * fan_out, choices = (u64)token * topk;
        const int *ranks = (const int *)p.routing.dest_rank + dests, *order = (const int *)p.routing.order + choices;
        const u32 *indices = (const u32 *)p.routing.dest_index + dests;
        int *near_rank = (int *)p.near_rank + dests, *node_rank = (int *)p.node_rank + dests;
        u32 *near_index = (u32 *)p.near_index + dests, *node_index = (u32 *)p.node_index + dests;
        u32 near = 0, nodes = 0;
        bool own = false;
        auto put_own = [&]() {
            own = true;
            node_rank[nodes] = p.own;
            node_index[nodes++] = token;
        };
        for (u32 j = 0; j < fan_out && ranks[j] >= 0; j++) {
            if ((u32)ranks[j] < first) {
                near_rank[near] = ranks[j];
                near_index[near++] = indices[j];
                continue;
            }
            u32 node = (u32)ranks[j] - first;
            if (near > 0 && !own && node > p.own) put_own();
            node_rank[nodes] = (int)node;
            node_index[nodes++] = indices[j];
        }
        if (near > 0 && !own) put_own();
        for (; near < fan_out; near++) near_rank[near] = -1;
        for (; nodes < fan_out; nodes++) node_rank[nodes] = -1;
        const int *physical = (const int *)p.routing.physical + choices;
        int *near_order = (int *)p.near_order + choices;
        u32 kept = 0;
        for (u32 j = 0; j < topk && order[j] >= 0; j++)
            if (moe_window(p.shape, rank_of[physical[order[j]]]) != 0) near_order[kept++] = order[j];
        for (; kept < topk; kept++) near_order[kept] = -1;
    }
}
