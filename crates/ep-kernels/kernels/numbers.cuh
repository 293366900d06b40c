// Rows as numbers: sixteen bytes at a time, summed in f32, rounded to nearest even at the end. NaN is
// canonical in what is written.

#define BF16 0
#define F16 1
#define F32 2

// Sixteen bytes as numbers: eight halves or four floats.
template <int DTYPE>
struct Wide {
    static const int count = DTYPE == F32 ? 4 : 8;
    float at[count];
};

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
            wide.at[(2 * i) % Wide<DTYPE>::count] = ep_widen_f16(words[i] & 0xffff);
            wide.at[(2 * i + 1) % Wide<DTYPE>::count] = ep_widen_f16(words[i] >> 16);
        }
    }
    return wide;
}

template <int DTYPE>
__device__ inline u32 sums_pair(float low, float high) {
    return DTYPE == BF16 ? ep_narrow_bf16x2(high, low) : ep_narrow_f16x2(high, low);
}

// Both sums of two pairs of halves, each rounded once.
//
// That is also what f32 gives: there a sum of two halves is rounded to 24 bits first, and rounding
// twice is rounding once where the wider format has at least 2p + 2 bits (Figueroa, "When is double
// rounding innocuous?", 1995): 18 for bf16, 24 for f16. Sums below the normal range are exact in both.
template <int DTYPE>
__device__ inline u32 sums_pair_sum(u32 a, u32 b) {
    return DTYPE == BF16 ? ep_add_bf16x2(a, b) : ep_add_f16x2(a, b);
}

template <int DTYPE>
__device__ inline u32 sums_nan_bits(u32 pair) {
    // Magnitudes beyond infinity's carry into the sign's place.
    return ((pair & 0x7fff7fffu) + (DTYPE == BF16 ? 0x007f007fu : 0x03ff03ffu)) & 0x80008000u;
}

// NaN as the one NaN that results have.
template <int DTYPE>
__device__ inline u32 sums_canonical(u32 pair) {
    const u32 nan = DTYPE == BF16 ? 0x7fc0 : 0x7e00;
    u32 bad = sums_nan_bits<DTYPE>(pair);
    if (bad & 0x8000u) pair = (pair & 0xffff0000u) | nan;
    if (bad & 0x80000000u) pair = (pair & 0xffffu) | nan << 16;
    return pair;
}

template <int DTYPE>
__device__ inline EpQuad sums_narrow(const Wide<DTYPE> &wide) {
    u32 words[4];
    const int count = Wide<DTYPE>::count;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (DTYPE == F32)
            words[i] = wide.at[i] != wide.at[i] ? 0x7fc00000u : __float_as_uint(wide.at[i]);
        else
            words[i] = sums_pair<DTYPE>(wide.at[(2 * i) % count], wide.at[(2 * i + 1) % count]);
    }
    return EpQuad{words[0], words[1], words[2], words[3]};
}

// Writes a lane's vectors, 512 bytes apart, where `here` says there are some; halves with their NaN
// made canonical. The sum of all is NaN if one of them is, so one look tells that none is.
template <int DTYPE, int VECTORS, typename Here>
__device__ inline void sums_store(u64 to, EpQuad *rows, Here here) {
    if (DTYPE != F32) {
        u32 all = 0;
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            if (!here(v)) continue;
            u32 front = sums_pair_sum<DTYPE>(rows[v].x, rows[v].y), back = sums_pair_sum<DTYPE>(rows[v].z, rows[v].w);
            all = sums_pair_sum<DTYPE>(all, sums_pair_sum<DTYPE>(front, back));
        }
        if (sums_nan_bits<DTYPE>(all)) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                rows[v] = EpQuad{sums_canonical<DTYPE>(rows[v].x), sums_canonical<DTYPE>(rows[v].y),
                                 sums_canonical<DTYPE>(rows[v].z), sums_canonical<DTYPE>(rows[v].w)};
        }
    }
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        if (here(v)) ep_store(to + 512 * v, rows[v]);
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
