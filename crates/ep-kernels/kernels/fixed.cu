// Blocks of fixed size and place: rows of ranks that are not mapped, between staging and this rank's slot.
// A block's place depends on its rank alone, so that what moves whole blocks needs no count: rows that came
// are brought to their final places, rows that go home are packed.
//
// A warp takes some rows of one source, of an expert or of all, at a time; no warp waits for another. What
// is read was published before the flags for which the stream waited, or by kernels before this one; what
// is written is published by the kernel's end.

struct MoeFixedParams {
    MoeShape shape;
    MoeRouting routing;
    MoeOp op;
    u64 slot;
    u32 stride, reserved;
};

EP_CHECK_SIZE(MoeFixedParams);
EP_CHECK_FIELD(MoeFixedParams, shape);
EP_CHECK_FIELD(MoeFixedParams, routing);
EP_CHECK_FIELD(MoeFixedParams, op);
EP_CHECK_FIELD(MoeFixedParams, slot);
EP_CHECK_FIELD(MoeFixedParams, stride);
EP_CHECK_FIELD(MoeFixedParams, reserved);

typedef const MoeFixedParams &Params;

// Items per warp, at least: more are more even, and each looks up its place.
#define ITEMS 4

// The operation's verdict, which a kernel before this one has noted. Where the wait for rows was released,
// they are earlier ones: what is made of them stays in this rank's memory, and the host says that the
// operation failed.
__device__ inline bool fixed_may_move(Params p) {
    return ((const MoeHandleHeader *)p.routing.header)->status == 0 && ((const MoeLane *)p.op.lane)->refused == 0;
}

__device__ inline u64 fixed_slot(Params p) {
    return moe_window(p.shape, p.shape.rank) + p.shape.slots_at + p.slot * p.shape.slot_bytes;
}

// The sum of `count` numbers, `step` apart, for the whole warp.
__device__ inline u32 fixed_sum(const u32 *at, u32 count, u32 step) {
    u32 sum = 0;
    for (u32 i = threadIdx.x & 31; i < count; i += 32) sum += at[(u64)i * step];
    for (u32 other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
    return sum;
}

// Copies every `slices`-th of `rows` adjacent rows, from `slice` on, by the whole warp.
__device__ inline void fixed_copy(u64 to, u64 from, u32 stride, u32 rows, u32 slice, u32 slices) {
    const u32 unroll = 4;
    u32 lane = threadIdx.x & 31, quads = stride / 16;
    for (u32 row = slice; row < rows; row += slices) {
        u64 at = (u64)row * stride;
        for (u32 base = lane; base < quads; base += 32 * unroll) {
            EpQuad held[unroll];
#pragma unroll
            for (u32 u = 0; u < unroll; u++)
                if (base + 32 * u < quads) held[u] = ep_load(from + at + 16ull * (base + 32 * u));
#pragma unroll
            for (u32 u = 0; u < unroll; u++)
                if (base + 32 * u < quads) ep_store(to + at + 16ull * (base + 32 * u), held[u]);
        }
    }
}

// Calls `f(part, slice, slices)` for this warp's share of `parts`, each cut into as many slices as let every
// warp have some.
template <typename F>
__device__ inline void fixed_share(u32 parts, F f) {
    u32 warps = gridDim.x * (blockDim.x / 32), warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    u32 slices = ITEMS * warps / parts + 1;
    for (u64 item = warp; item < (u64)parts * slices; item += warps) f((u32)(item % parts), (u32)(item / parts), slices);
}

// Rank-major rows: those of a source follow those of the sources before it.
template <bool HOME>
__device__ void fixed_rows(Params p) {
    if (!fixed_may_move(p)) return;
    const u32 *received = (const u32 *)p.routing.received;
    fixed_share(p.shape.world, [&](u32 rank, u32 slice, u32 slices) {
        u32 rows = received[rank];
        if (slice >= rows || moe_window(p.shape, rank)) return;
        u32 first = fixed_sum(received, rank, 1);
        // Never beyond a slot or a block, whatever a handle holds.
        if ((u64)first + rows > p.shape.max_rows || (u64)rows * p.stride > p.op.block) return;
        u64 slot = fixed_slot(p) + (u64)first * p.stride;
        u64 block = (HOME ? p.op.send : p.op.receive) + rank * p.op.block;
        fixed_copy(HOME ? block : slot, HOME ? slot : block, p.stride, rows, slice, slices);
    });
}

// Rows that came, to their places in this rank's slot.
extern "C" __global__ void __launch_bounds__(512, 1)
    moe_fixed_receive(const __grid_constant__ MoeFixedParams p) { fixed_rows<false>(p); }

// Rows that go home, one per (token, rank).
extern "C" __global__ void __launch_bounds__(512, 1)
    moe_fixed_rows(const __grid_constant__ MoeFixedParams p) { fixed_rows<true>(p); }

// Rows that go home, one per (token, expert): an expert's rows of one rank are adjacent, and in the block of
// that rank they follow those of the experts before it.
extern "C" __global__ void __launch_bounds__(512, 1)
    moe_fixed_experts(const __grid_constant__ MoeFixedParams p) {
    u32 local = p.shape.local_experts;
    if (local == 0 || !fixed_may_move(p)) return;
    const u32 *from = (const u32 *)p.routing.experts_from;
    fixed_share(p.shape.world * local, [&](u32 part, u32 slice, u32 slices) {
        u32 rank = part / local, expert = part % local, rows = from[part];
        if (slice >= rows || moe_window(p.shape, rank)) return;
        u32 first = (u32)((const int *)p.routing.offsets)[expert] + fixed_sum(from + expert, rank, local);
        u32 before = fixed_sum(from + (u64)rank * local, expert, 1);
        if ((u64)first + rows > p.shape.max_expert_rows || ((u64)before + rows) * p.stride > p.op.block) return;
        u64 slot = fixed_slot(p) + p.shape.expert_region + (u64)first * p.stride;
        u64 block = p.op.send + rank * p.op.block + (u64)before * p.stride;
        fixed_copy(block, slot, p.stride, rows, slice, slices);
    });
}
