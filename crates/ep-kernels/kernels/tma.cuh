// Bulk copies' addresses in shared memory, and walks over what is copied.

__device__ inline u32 ep_shared(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// Walks over (row, part) pairs dealt round robin to warps, without a division per step.
struct EpWalk {
    u32 row, part, step_rows, step_parts, parts;
};

__device__ inline EpWalk ep_walk(u32 parts) {
    u32 warps = blockDim.x / 32, first = blockIdx.x * warps + threadIdx.x / 32, step = gridDim.x * warps;
    return EpWalk{first / parts, first % parts, step / parts, step % parts, parts};
}

__device__ inline void ep_step(EpWalk &walk) {
    walk.row += walk.step_rows;
    walk.part += walk.step_parts;
    if (walk.part >= walk.parts) {
        walk.part -= walk.parts;
        walk.row++;
    }
}
