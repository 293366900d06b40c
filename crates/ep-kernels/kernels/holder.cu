// Keeps chosen SMs busy until a deadline of the global timer.
//
// Blocks on SMs that were not chosen stay for `settle_ns` first: one that left at once would make
// room for the next block of this grid, which might then never reach a chosen SM.

struct SmSet {
    u32 words[32];  // bit s%32 of word s/32: SM s is chosen
};

struct HoldRecord {
    u64 start_ns;
    u64 end_ns;
    u32 smid;
    u32 state;  // HOLD_*, written last
};

struct HoldParams {
    u64 records;      // HoldRecord[record_count], one per block
    u64 hold_ns;      // a chosen block stays this long after its start,
    u64 deadline_ns;  // but never past this instant of the global timer
    u64 settle_ns;
    u32 record_count;
    u32 reserved;
    SmSet chosen;
};

EP_CHECK_SIZE(SmSet);
EP_CHECK_SIZE(HoldRecord);
EP_CHECK_FIELD(HoldRecord, start_ns);
EP_CHECK_FIELD(HoldRecord, end_ns);
EP_CHECK_FIELD(HoldRecord, smid);
EP_CHECK_FIELD(HoldRecord, state);
EP_CHECK_SIZE(HoldParams);
EP_CHECK_FIELD(HoldParams, records);
EP_CHECK_FIELD(HoldParams, hold_ns);
EP_CHECK_FIELD(HoldParams, deadline_ns);
EP_CHECK_FIELD(HoldParams, settle_ns);
EP_CHECK_FIELD(HoldParams, record_count);
EP_CHECK_FIELD(HoldParams, reserved);
EP_CHECK_FIELD(HoldParams, chosen);

constexpr u32 HOLD_PASSING = 1;  // resident on an SM that was not chosen, until settled
constexpr u32 HOLD_HOLDING = 2;
constexpr u32 HOLD_ENDED = 3;  // a chosen block that has reached its deadline
constexpr u32 HOLD_PASSED = 4;

// Release at system scope: the host polls `state` with acquire loads while the kernel runs, and
// must then see the fields written before it. The host polls its own memory; the GPU only ever
// writes there.
__device__ inline void publish(HoldRecord* record, u32 state) {
    ep_store_release(&record->state, state);
}

extern "C" __global__ void __launch_bounds__(32) holder(const __grid_constant__ HoldParams p) {
    if (threadIdx.x != 0 || blockIdx.x >= p.record_count) return;
    u64 start = ep_globaltimer();
    u32 smid = ep_smid();
    bool chosen = smid < 1024 && (p.chosen.words[smid / 32] >> (smid % 32) & 1);

    HoldRecord* record = reinterpret_cast<HoldRecord*>(p.records) + blockIdx.x;
    record->start_ns = start;
    record->smid = smid;
    publish(record, chosen ? HOLD_HOLDING : HOLD_PASSING);

    u64 end = start + (chosen ? p.hold_ns : p.settle_ns);
    ep_hold_until(end < p.deadline_ns ? end : p.deadline_ns);
    record->end_ns = ep_globaltimer();
    publish(record, chosen ? HOLD_ENDED : HOLD_PASSED);
}
