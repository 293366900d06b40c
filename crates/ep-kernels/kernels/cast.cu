// Rows to fp8 with a scale per 128 elements, and back: bit for bit what src/host/cast.rs does, on any
// architecture, so without the conversions that only some have. A warp takes a block of 128 elements,
// four per lane; the last block of a row may be shorter.

struct MoeCastParams {
    u64 src, out, scales, src_stride, out_stride, scales_stride, rows;
    u32 hidden, dtype, ue8m0, wide;
};

EP_CHECK_SIZE(MoeCastParams);
EP_CHECK_FIELD(MoeCastParams, src);
EP_CHECK_FIELD(MoeCastParams, out);
EP_CHECK_FIELD(MoeCastParams, scales);
EP_CHECK_FIELD(MoeCastParams, src_stride);
EP_CHECK_FIELD(MoeCastParams, out_stride);
EP_CHECK_FIELD(MoeCastParams, scales_stride);
EP_CHECK_FIELD(MoeCastParams, rows);
EP_CHECK_FIELD(MoeCastParams, hidden);
EP_CHECK_FIELD(MoeCastParams, dtype);
EP_CHECK_FIELD(MoeCastParams, ue8m0);
EP_CHECK_FIELD(MoeCastParams, wide);

#define CAST_BF16 0
#define CAST_F16 1
#define CAST_F32 2

struct __align__(8) CastPair {
    u32 x, y;
};

struct __align__(16) CastQuad {
    u32 x, y, z, w;
};

template <int DTYPE>
__device__ inline float cast_widen(u32 bits) {
    if (DTYPE == CAST_F32) return __uint_as_float(bits);
    if (DTYPE == CAST_BF16) return __uint_as_float(bits << 16);
    return ep_widen_f16(bits);
}

// To nearest even; NaN is canonical.
template <int DTYPE>
__device__ inline u32 cast_narrow(float x) {
    bool nan = x != x;
    if (DTYPE == CAST_F32) return nan ? 0x7fc00000u : __float_as_uint(x);
    u32 pair = DTYPE == CAST_BF16 ? ep_narrow_bf16x2(0.0f, x) : ep_narrow_f16x2(0.0f, x);
    return nan ? (DTYPE == CAST_BF16 ? 0x7fc0u : 0x7e00u) : pair & 0xffff;
}

// `count` of a lane's four elements, the others 0.
template <int DTYPE>
__device__ inline void cast_load(u64 at, u32 count, bool wide, float *x) {
    u32 bits[4] = {0, 0, 0, 0};
    if (DTYPE == CAST_F32 && wide && count == 4) {
        CastQuad q = *(const CastQuad *)at;
        bits[0] = q.x, bits[1] = q.y, bits[2] = q.z, bits[3] = q.w;
    } else if (wide && count == 4) {
        CastPair q = *(const CastPair *)at;
        bits[0] = q.x & 0xffff, bits[1] = q.x >> 16, bits[2] = q.y & 0xffff, bits[3] = q.y >> 16;
    } else {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (i >= count) continue;
            bits[i] = DTYPE == CAST_F32 ? ((const u32 *)at)[i] : ((const unsigned short *)at)[i];
        }
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) x[i] = cast_widen<DTYPE>(bits[i]);
}

template <int DTYPE>
__device__ inline void cast_store(u64 at, u32 count, bool wide, const float *x) {
    u32 bits[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) bits[i] = cast_narrow<DTYPE>(x[i]);
    if (DTYPE == CAST_F32 && wide && count == 4) {
        *(CastQuad *)at = CastQuad{bits[0], bits[1], bits[2], bits[3]};
    } else if (wide && count == 4) {
        *(CastPair *)at = CastPair{bits[0] | bits[1] << 16, bits[2] | bits[3] << 16};
    } else {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (i >= count) continue;
            if (DTYPE == CAST_F32)
                ((u32 *)at)[i] = bits[i];
            else
                ((unsigned short *)at)[i] = (unsigned short)bits[i];
        }
    }
}

// The nearest fp8 e4m3 value, ties to even, saturating at 448; NaN is 0x7f.
__device__ inline u32 cast_to_fp8(float x) {
    float magnitude = fminf(fabsf(x), 448.0f);
    u32 bits = __float_as_uint(magnitude);
    // Normal: round at mantissa bit 20, then exchange the bias of 127 for 7.
    u32 normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    // Subnormal: one ulp of 2^14 is 2^-9, so this addition rounds to whole subnormal steps.
    u32 subnormal = __float_as_uint(__fadd_rn(magnitude, 16384.0f)) - __float_as_uint(16384.0f);
    u32 code = magnitude < 0.015625f ? subnormal : normal;
    return x != x ? 0x7f : (__float_as_uint(x) >> 24 & 0x80) | (code & 0xff);
}

__device__ inline float cast_from_fp8(u32 code) {
    u32 exponent = code >> 3 & 15, mantissa = code & 7;
    float magnitude = exponent ? __uint_as_float((exponent + 120) << 23 | mantissa << 20)
                               : __fmul_rn((float)mantissa, 0.001953125f);
    if ((code & 0x7f) == 0x7f) magnitude = __uint_as_float(0x7fc00000u);
    return __uint_as_float(__float_as_uint(magnitude) | (code & 0x80) << 24);
}

// The power of two with this code: 2^-127 is subnormal, 255 is NaN.
__device__ inline float cast_ue8m0(u32 code) {
    return __uint_as_float(code == 255 ? 0x7fc00000u : code == 0 ? 1u << 22 : code << 23);
}

// Runs `f` on this warp's blocks: the row, the number of the block in it, this lane's first element
// and how many of its four there are.
template <typename F>
__device__ inline void cast_blocks(const MoeCastParams &p, F f) {
    u32 lane = threadIdx.x & 31, blocks = (p.hidden + 127) / 128, warps = blockDim.x / 32;
    u64 first = (u64)blockIdx.x * warps + threadIdx.x / 32, step = (u64)gridDim.x * warps;
    u64 row = first / blocks, rows_on = step / blocks;
    u32 block = (u32)(first % blocks), blocks_on = (u32)(step % blocks);
    while (row < p.rows) {
        u32 at = 128 * block + 4 * lane;
        u32 count = at >= p.hidden ? 0 : p.hidden - at < 4 ? p.hidden - at : 4;
        f(row, block, at, count);
        row += rows_on;
        block += blocks_on;
        if (block >= blocks) row++, block -= blocks;
    }
}

template <int DTYPE>
__device__ inline void cast_quantize(const MoeCastParams &p) {
    const u64 size = DTYPE == CAST_F32 ? 4 : 2;
    cast_blocks(p, [&](u64 row, u32 block, u32 at, u32 count) {
        float x[4];
        cast_load<DTYPE>(p.src + row * p.src_stride + at * size, count, p.wide, x);
        // Magnitudes order as their bits do; NaN counts as 0.
        u32 amax = __float_as_uint(1e-4f);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 bits = __float_as_uint(x[i]) & 0x7fffffffu;
            if (bits <= 0x7f800000u && bits > amax) amax = bits;
        }
        amax = __reduce_max_sync(0xffffffffu, amax);
        float scale = __fdiv_rn(__uint_as_float(amax), 448.0f);
        u32 power = __float_as_uint(scale) >> 23;
        // The smallest power of two that is not less.
        if (__float_as_uint(scale) & 0x7fffffu) power++;
        if (power > 255) power = 255;
        if (p.ue8m0) scale = cast_ue8m0(power);
        u64 to = p.scales + row * p.scales_stride;
        if ((threadIdx.x & 31) == 0) {
            if (p.ue8m0)
                ((unsigned char *)to)[block] = (unsigned char)power;
            else
                ((float *)to)[block] = scale;
        }
        u32 codes[4];
#pragma unroll
        for (int i = 0; i < 4; i++) codes[i] = cast_to_fp8(__fdiv_rn(x[i], scale));
        u64 out = p.out + row * p.out_stride + at;
        if (p.wide && count == 4) {
            *(u32 *)out = codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24;
        } else {
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                if (i < count) ((unsigned char *)out)[i] = (unsigned char)codes[i];
        }
    });
}

template <int DTYPE>
__device__ inline void cast_dequantize(const MoeCastParams &p) {
    const u64 size = DTYPE == CAST_F32 ? 4 : 2;
    cast_blocks(p, [&](u64 row, u32 block, u32 at, u32 count) {
        u64 from = p.scales + row * p.scales_stride;
        float scale = p.ue8m0 ? cast_ue8m0(((const unsigned char *)from)[block]) : ((const float *)from)[block];
        u64 src = p.src + row * p.src_stride + at;
        u32 codes = 0;
        if (p.wide && count == 4) {
            codes = *(const u32 *)src;
        } else {
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                if (i < count) codes |= (u32)((const unsigned char *)src)[i] << 8 * i;
        }
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = __fmul_rn(cast_from_fp8(codes >> 8 * i & 0xff), scale);
        cast_store<DTYPE>(p.out + row * p.out_stride + at * size, count, p.wide, x);
    });
}

extern "C" __global__ void __launch_bounds__(256) moe_quantize(const __grid_constant__ MoeCastParams p) {
    if (p.dtype == CAST_BF16)
        cast_quantize<CAST_BF16>(p);
    else if (p.dtype == CAST_F16)
        cast_quantize<CAST_F16>(p);
    else
        cast_quantize<CAST_F32>(p);
}

extern "C" __global__ void __launch_bounds__(256) moe_dequantize(const __grid_constant__ MoeCastParams p) {
    if (p.dtype == CAST_BF16)
        cast_dequantize<CAST_BF16>(p);
    else if (p.dtype == CAST_F16)
        cast_dequantize<CAST_F16>(p);
    else
        cast_dequantize<CAST_F32>(p);
}
