// Kernels that tests/kernels.rs runs: what works, and mistakes that have to show.

struct Several {
    u32 small;
    u64 large;
    float number;
};

extern "C" __global__ void take(u32 a, u64 to, float c, const __grid_constant__ Several s, unsigned char d) {
    if (threadIdx.x != 0) return;
    u64 *out = (u64 *)to;
    out[0] = a, out[1] = s.small, out[2] = s.large, out[3] = d;
    out[4] = c == 1.5f && s.number == 2.5f;
}

// Each thread's value becomes its left neighbour's, by static shared memory.
extern "C" __global__ void __launch_bounds__(512) neighbours(u32 *out) {
    __shared__ u32 values[512];
    u32 t = threadIdx.x, n = blockDim.x;
    values[t] = blockIdx.x * 1000 + t;
    __syncthreads();
    u32 left = values[(t + n - 1) % n];
    __syncthreads();
    values[t] = left;
    __syncthreads();
    out[blockIdx.x * n + t] = values[t];
}

// The same without the barrier between write and read.
extern "C" __global__ void __launch_bounds__(512) neighbours_unsynchronised(u32 *out) {
    __shared__ u32 values[512];
    u32 t = threadIdx.x, n = blockDim.x;
    values[t] = blockIdx.x * 1000 + t;
    out[blockIdx.x * n + t] = values[(t + n - 1) % n];
}

extern "C" __global__ void votes(u32 *out) {
    u32 t = threadIdx.x;
    u32 or_ = __syncthreads_or(t == 70), none = __syncthreads_or(0);
    u32 and_ = __syncthreads_and(1), most = __syncthreads_and(t != 3), count = __syncthreads_count(t % 3 == 0);
    out[t] = or_ | none << 1 | and_ << 2 | most << 3 | count << 8;
}

extern "C" __global__ void lanes(u64 *out) {
    u32 lane = threadIdx.x & 31, all = 0xffffffffu;
    u64 *mine = out + 12 * threadIdx.x;
    mine[0] = __shfl_sync(all, (u64)lane << 40, 5);
    mine[1] = __shfl_up_sync(all, lane, 3);
    mine[2] = __shfl_down_sync(all, lane, 3);
    mine[3] = __shfl_xor_sync(all, lane, 16);
    mine[4] = __ballot_sync(all, lane % 5 == 0);
    mine[5] = __any_sync(all, lane == 31) | __any_sync(all, 0) << 1;
    mine[6] = __all_sync(all, 1) | __all_sync(all, lane != 9) << 1;
    mine[7] = __match_any_sync(all, lane / 8);
    mine[8] = __reduce_max_sync(all, lane ^ 7) | (u64)__reduce_add_sync(all, lane) << 32;
    mine[9] = __popc(lane) | __ffs((int)lane) << 8 | __clz((int)lane) << 16;
    mine[10] = (u32)(__shfl_sync(all, (float)lane, lane / 2) * 2);
}

// Halves of a warp do different things, and one of them more.
extern "C" __global__ void halves(u32 *out) {
    u32 lane = threadIdx.x, sum = 0;
    if (lane < 16) {
        for (u32 i = 0; i < 16; i++) sum += __shfl_sync(0xffffu, lane, i);
    } else {
        for (u32 i = 0; i < 3; i++) sum += __ballot_sync(0xffff0000u, lane & 1) >> 16;
    }
    __syncwarp();
    out[lane] = sum;
}

// Most threads leave; the others' barriers do not wait for them.
extern "C" __global__ void leavers(u32 *out) {
    u32 t = threadIdx.x;
    if (t % 8 != 0) return;
    u32 here = __ballot_sync(0xffffffffu, 1);
    __syncwarp();
    out[t] = here + __syncthreads_count(1);
}

// Dynamic shared memory behind static.
extern "C" __global__ void dynamic(u32 *out, u32 words) {
    extern __shared__ __align__(16) u32 shared[];
    __shared__ u32 first;
    u32 t = threadIdx.x, garbage = 0;
    if (t == 0) first = 7;
    for (u32 w = t; w < words; w += blockDim.x) garbage += shared[w] != 0;
    u32 all = __reduce_add_sync(0xffffffffu, garbage);
    __syncthreads();
    for (u32 w = t; w < words; w += blockDim.x) shared[w] = w;
    __syncthreads();
    u32 sum = 0;
    for (u32 w = 0; w < words; w++) sum += shared[w];
    if (t == 0) out[3 * blockIdx.x] = all, out[3 * blockIdx.x + 1] = sum, out[3 * blockIdx.x + 2] = first;
}

extern "C" __global__ void beyond(u32 at) {
    extern __shared__ u32 shared[];
    shared[at] = 1;
}

extern "C" __global__ void atomics(u32 *out, u64 *wide) {
    u32 n = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(out, 1);
    atomicOr(out + 1, 1u << (n & 31));
    atomicMax(wide, (u64)n << 32);
    atomicMin(wide + 1, (u64)n + 5);
    if (atomicExch(out + 2, 1) == 0) atomicAdd(out + 3, 1);
    if (atomicCAS(out + 4, 0, n + 1) == 0) atomicAdd(out + 5, 1);
}

// A count that is read and written, as if nobody else did.
extern "C" __global__ void counted_wrongly(u32 *out) {
    u32 old = *out;
    __syncwarp();
    *out = old + 1;
}

extern "C" __global__ void where(u32 *out) {
    if (threadIdx.x != 0) return;
    u32 *mine = out + 5 * blockIdx.x;
    mine[0] = ep_smid(), mine[1] = ep_nsmid(), mine[2] = ep_cluster(), mine[3] = ep_cluster_size();
    mine[4] = ep_cluster_rank();
}

// Blocks that stay for `ns`, and when each was there.
extern "C" __global__ void stay(u64 *out, u64 ns) {
    u64 start = ep_globaltimer();
    ep_hold_until(start + ns);
    if (threadIdx.x == 0) out[2 * blockIdx.x] = start, out[2 * blockIdx.x + 1] = ep_globaltimer();
}

extern "C" __global__ void halves_of_floats(const u32 *in, u32 *out) {
    u32 n = blockIdx.x * blockDim.x + threadIdx.x, x = in[n];
    out[4 * n] = ep_narrow_bf16x2(__uint_as_float(x), 1.0f);
    out[4 * n + 1] = ep_narrow_f16x2(1.0f, __uint_as_float(x));
    out[4 * n + 2] = __float_as_uint(ep_widen_f16(x & 0xffff));
    out[4 * n + 3] = ep_add_f16x2(x, 0x3c000001u);
}
