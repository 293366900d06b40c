// Counting in order without waiting: tokens are dealt to blocks and warps in contiguous ranges, a
// warp takes 32 at a time, one per lane. A bit mask per column (an expert or a rank) holds which
// lanes chose it; how many earlier tokens chose it is a population count. Nothing depends on the
// order in which lanes, warps or blocks come.

struct MoeTiles {
    // u32 [grid][columns] and [grid][warps][columns], in scratch.
    u32 *totals, *prefixes;
    // u32 [columns] each, of this warp: masks, and counts so far.
    u32 *masks, *counts;
    u32 columns, warps;
    // The range of this warp.
    u32 first, end;
};

__device__ inline u32 tile_up(u32 n) { return (n + 31) & ~31u; }

// `shared_words` words of dynamic shared memory hold masks and counts if they fit, else scratch does.
__device__ inline MoeTiles tiles_of(u64 scratch, u32 columns, u32 tokens, u32 shared_words, u32 *shared) {
    MoeTiles t;
    t.columns = columns;
    t.warps = blockDim.x / 32;
    u32 warp = threadIdx.x / 32;
    t.totals = (u32 *)scratch;
    t.prefixes = t.totals + (u64)gridDim.x * columns;
    u32 *spill = t.prefixes + (u64)gridDim.x * t.warps * columns;
    u64 own = 2ull * columns * t.warps;
    u32 *base = own <= shared_words ? shared : spill + blockIdx.x * own;
    t.masks = base + 2ull * columns * warp;
    t.counts = t.masks + columns;
    u32 per_block = tile_up((tokens + gridDim.x - 1) / gridDim.x);
    u32 per_warp = tile_up((per_block + t.warps - 1) / t.warps);
    u64 from = (u64)blockIdx.x * per_block, to = from + per_block;
    if (to > tokens) to = tokens;
    u64 first = from + (u64)warp * per_warp, end = first + per_warp;
    t.first = first < to ? first : to;
    t.end = end < to ? end : to;
    for (u32 c = threadIdx.x & 31; c < columns; c += 32) t.masks[c] = t.counts[c] = 0;
    __syncwarp();
    return t;
}

// This lane's token chose `column`. True if it had done so before.
__device__ inline bool tile_mark(const MoeTiles &t, u32 column) {
    u32 bit = 1u << (threadIdx.x & 31);
    return atomicOr(t.masks + column, bit) & bit;
}

// How many earlier tokens chose `column`, marks of the whole warp done.
__device__ inline u32 tile_before(const MoeTiles &t, u32 column) {
    u32 below = (1u << (threadIdx.x & 31)) - 1;
    return t.counts[column] + __popc(t.masks[column] & below);
}

// Counts and clears the marks of a column: who comes first takes all.
__device__ inline void tile_take(const MoeTiles &t, u32 column) {
    u32 mask = atomicExch(t.masks + column, 0);
    if (mask) atomicAdd(t.counts + column, __popc(mask));
}

// Publishes the counts of this block's warps for the kernel that places.
__device__ inline void tiles_publish(const MoeTiles &t) {
    __syncthreads();
    u32 *first = t.counts - 2ull * t.columns * (threadIdx.x / 32);
    for (u32 c = threadIdx.x; c < t.columns; c += blockDim.x) {
        u32 sum = 0;
        for (u32 w = 0; w < t.warps; w++) {
            t.prefixes[((u64)blockIdx.x * t.warps + w) * t.columns + c] = sum;
            sum += first[2ull * t.columns * w + c];
        }
        t.totals[(u64)blockIdx.x * t.columns + c] = sum;
    }
}

// The count of a column over all blocks, or over those before `blocks`.
__device__ inline u32 tiles_total(const MoeTiles &t, u32 column, u32 blocks) {
    u32 sum = 0;
    for (u32 b = 0; b < blocks; b++) sum += t.totals[(u64)b * t.columns + column];
    return sum;
}

// Starts this warp's counts at those of all tokens before its range.
__device__ inline void tiles_resume(const MoeTiles &t) {
    u32 warp = threadIdx.x / 32;
    u32 *first = t.counts - 2ull * t.columns * warp;
    __syncthreads();
    for (u32 c = threadIdx.x; c < t.columns; c += blockDim.x) {
        u32 before = tiles_total(t, c, blockIdx.x);
        for (u32 w = 0; w < t.warps; w++)
            first[2ull * t.columns * w + c] =
                before + t.prefixes[((u64)blockIdx.x * t.warps + w) * t.columns + c];
    }
    __syncthreads();
}
