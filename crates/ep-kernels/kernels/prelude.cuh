// Text put before every kernel source. No header is included anywhere: NVRTC alone compiles the
// kernels.
typedef unsigned int u32;
typedef unsigned long long u64;

// Layout checks. The host defines EP_SIZE_<Struct> and EP_AT_<Struct>_<field> from its own
// `repr(C)` struct, so a disagreement is a compile error here. A compiler without headers has no
// offsetof: the field is filled with ones inside a zeroed struct and its bytes are looked for.
// Structs therefore spell out their padding.
template <typename T>
struct EpBytes {
    unsigned char at[sizeof(T)];
};

template <typename T, typename F>
__device__ constexpr bool ep_field_at(F T::*field, u64 offset) {
    EpBytes<F> ones{};
    for (u32 i = 0; i < sizeof(F); i++) ones.at[i] = 0xff;
    T value{};
    value.*field = __builtin_bit_cast(F, ones);
    EpBytes<T> bytes = __builtin_bit_cast(EpBytes<T>, value);
    for (u64 i = 0; i < sizeof(T); i++) {
        bool inside = i >= offset && i < offset + sizeof(F);
        if ((bytes.at[i] != 0) != inside) return false;
    }
    return true;
}

#define EP_CHECK_SIZE(T) static_assert(sizeof(T) == EP_SIZE_##T, "size of " #T " differs from the host's")
#define EP_CHECK_FIELD(T, f) \
    static_assert(ep_field_at(&T::f, EP_AT_##T##_##f), "offset of " #T "::" #f " differs from the host's")
