// What the kernels of dispatch and combine share: the structs of src/cuda/moe/params.rs, and what
// every kernel that moves rows asks before it touches one.

// An announcement's fixed part, as the runtime's protocol defines it. The counts of an uncached
// dispatch follow it: one u32 per physical expert, then one per rank.
struct MoeHeader {
    u32 op, slot;
    u64 sequence, layout, payload, received, handle, options;
    u32 status, bad_token;
    long long bad_id;
};

struct MoeShape {
    u64 windows, rank_of, base, replica_offsets, replicas, poisoned;
    u64 message, slots_at, slot_bytes, expert_region;
    u32 rank, world, topk, fan_out, physical, experts, local_experts, slots;
    u32 max_rows, max_expert_rows, far, reserved;
};

struct MoeRouting {
    u64 header, physical, expert_index, order, weights, dest_rank, dest_index;
    u64 rank_counts, expert_counts, sent_base, expert_base, expert_offsets, counts, offsets;
    u64 received, positions, choices, row_weights, staged, pieces, experts_from;
    u32 tokens, reserved;
};

struct MoeHandleHeader {
    u64 id, layout;
    u32 status, rows, expert_rows, tokens;
};

struct MoeLane {
    u64 sequence, bad_choice, refused;
};

struct MoeReport {
    u64 ticket, sequence, needed;
    u32 verdict, rank, what, reserved;
};

struct MoeRowFormat {
    u32 payload_bytes, scales_at, scale_bytes, ids_at, weights_at, source_at, stride, reserved;
};

struct MoeExpertFormat {
    u32 payload_bytes, scales_at, scale_bytes, weight_at, row_at, stride;
};

struct MoeOutFormat {
    u32 payload_bytes, weights_at, weights, stride;
};

struct MoeOp {
    u64 lane, mailboxes, report, ticket, awaited, lane_index, send, receive, block;
};

EP_CHECK_SIZE(MoeHeader);
EP_CHECK_FIELD(MoeHeader, op);
EP_CHECK_FIELD(MoeHeader, slot);
EP_CHECK_FIELD(MoeHeader, sequence);
EP_CHECK_FIELD(MoeHeader, layout);
EP_CHECK_FIELD(MoeHeader, payload);
EP_CHECK_FIELD(MoeHeader, received);
EP_CHECK_FIELD(MoeHeader, handle);
EP_CHECK_FIELD(MoeHeader, options);
EP_CHECK_FIELD(MoeHeader, status);
EP_CHECK_FIELD(MoeHeader, bad_token);
EP_CHECK_FIELD(MoeHeader, bad_id);
EP_CHECK_SIZE(MoeShape);
EP_CHECK_FIELD(MoeShape, windows);
EP_CHECK_FIELD(MoeShape, rank_of);
EP_CHECK_FIELD(MoeShape, base);
EP_CHECK_FIELD(MoeShape, replica_offsets);
EP_CHECK_FIELD(MoeShape, replicas);
EP_CHECK_FIELD(MoeShape, poisoned);
EP_CHECK_FIELD(MoeShape, message);
EP_CHECK_FIELD(MoeShape, slots_at);
EP_CHECK_FIELD(MoeShape, slot_bytes);
EP_CHECK_FIELD(MoeShape, expert_region);
EP_CHECK_FIELD(MoeShape, rank);
EP_CHECK_FIELD(MoeShape, world);
EP_CHECK_FIELD(MoeShape, topk);
EP_CHECK_FIELD(MoeShape, fan_out);
EP_CHECK_FIELD(MoeShape, physical);
EP_CHECK_FIELD(MoeShape, experts);
EP_CHECK_FIELD(MoeShape, local_experts);
EP_CHECK_FIELD(MoeShape, slots);
EP_CHECK_FIELD(MoeShape, max_rows);
EP_CHECK_FIELD(MoeShape, max_expert_rows);
EP_CHECK_FIELD(MoeShape, far);
EP_CHECK_FIELD(MoeShape, reserved);
EP_CHECK_SIZE(MoeRouting);
EP_CHECK_FIELD(MoeRouting, header);
EP_CHECK_FIELD(MoeRouting, physical);
EP_CHECK_FIELD(MoeRouting, expert_index);
EP_CHECK_FIELD(MoeRouting, order);
EP_CHECK_FIELD(MoeRouting, weights);
EP_CHECK_FIELD(MoeRouting, dest_rank);
EP_CHECK_FIELD(MoeRouting, dest_index);
EP_CHECK_FIELD(MoeRouting, rank_counts);
EP_CHECK_FIELD(MoeRouting, expert_counts);
EP_CHECK_FIELD(MoeRouting, sent_base);
EP_CHECK_FIELD(MoeRouting, expert_base);
EP_CHECK_FIELD(MoeRouting, expert_offsets);
EP_CHECK_FIELD(MoeRouting, counts);
EP_CHECK_FIELD(MoeRouting, offsets);
EP_CHECK_FIELD(MoeRouting, received);
EP_CHECK_FIELD(MoeRouting, positions);
EP_CHECK_FIELD(MoeRouting, choices);
EP_CHECK_FIELD(MoeRouting, row_weights);
EP_CHECK_FIELD(MoeRouting, staged);
EP_CHECK_FIELD(MoeRouting, pieces);
EP_CHECK_FIELD(MoeRouting, experts_from);
EP_CHECK_FIELD(MoeRouting, tokens);
EP_CHECK_FIELD(MoeRouting, reserved);
EP_CHECK_SIZE(MoeHandleHeader);
EP_CHECK_FIELD(MoeHandleHeader, id);
EP_CHECK_FIELD(MoeHandleHeader, layout);
EP_CHECK_FIELD(MoeHandleHeader, status);
EP_CHECK_FIELD(MoeHandleHeader, rows);
EP_CHECK_FIELD(MoeHandleHeader, expert_rows);
EP_CHECK_FIELD(MoeHandleHeader, tokens);
EP_CHECK_SIZE(MoeLane);
EP_CHECK_FIELD(MoeLane, sequence);
EP_CHECK_FIELD(MoeLane, bad_choice);
EP_CHECK_FIELD(MoeLane, refused);
EP_CHECK_SIZE(MoeReport);
EP_CHECK_FIELD(MoeReport, ticket);
EP_CHECK_FIELD(MoeReport, sequence);
EP_CHECK_FIELD(MoeReport, needed);
EP_CHECK_FIELD(MoeReport, verdict);
EP_CHECK_FIELD(MoeReport, rank);
EP_CHECK_FIELD(MoeReport, what);
EP_CHECK_FIELD(MoeReport, reserved);
EP_CHECK_SIZE(MoeRowFormat);
EP_CHECK_FIELD(MoeRowFormat, payload_bytes);
EP_CHECK_FIELD(MoeRowFormat, scales_at);
EP_CHECK_FIELD(MoeRowFormat, scale_bytes);
EP_CHECK_FIELD(MoeRowFormat, ids_at);
EP_CHECK_FIELD(MoeRowFormat, weights_at);
EP_CHECK_FIELD(MoeRowFormat, source_at);
EP_CHECK_FIELD(MoeRowFormat, stride);
EP_CHECK_FIELD(MoeRowFormat, reserved);
EP_CHECK_SIZE(MoeExpertFormat);
EP_CHECK_FIELD(MoeExpertFormat, payload_bytes);
EP_CHECK_FIELD(MoeExpertFormat, scales_at);
EP_CHECK_FIELD(MoeExpertFormat, scale_bytes);
EP_CHECK_FIELD(MoeExpertFormat, weight_at);
EP_CHECK_FIELD(MoeExpertFormat, row_at);
EP_CHECK_FIELD(MoeExpertFormat, stride);
EP_CHECK_SIZE(MoeOutFormat);
EP_CHECK_FIELD(MoeOutFormat, payload_bytes);
EP_CHECK_FIELD(MoeOutFormat, weights_at);
EP_CHECK_FIELD(MoeOutFormat, weights);
EP_CHECK_FIELD(MoeOutFormat, stride);
EP_CHECK_SIZE(MoeOp);
EP_CHECK_FIELD(MoeOp, lane);
EP_CHECK_FIELD(MoeOp, mailboxes);
EP_CHECK_FIELD(MoeOp, report);
EP_CHECK_FIELD(MoeOp, ticket);
EP_CHECK_FIELD(MoeOp, awaited);
EP_CHECK_FIELD(MoeOp, lane_index);
EP_CHECK_FIELD(MoeOp, send);
EP_CHECK_FIELD(MoeOp, receive);
EP_CHECK_FIELD(MoeOp, block);

// Pieces of a rank's tokens, after each of which it is known how many rows are for each rank.
#define MOE_PIECES 16

#define MOE_OK 0
#define MOE_DISAGREE 1
#define MOE_CAPACITY 2
#define MOE_POISONED 3

// Whether the waits of this group were released because it failed. The word is in host memory and
// only ever goes from 0 to 1; one thread of a block reads it, volatile, since the host writes it:
// reads over PCIe by whole grids stall everyone's fences. All threads of the block call it; what
// `bad` says of any of them comes with the answer.
__device__ inline bool moe_poisoned(const MoeShape &shape, bool bad = false) {
    if (threadIdx.x == 0) bad |= *(const volatile u32 *)shape.poisoned != 0;
    return __syncthreads_or(bad);
}

__device__ inline const MoeHeader *moe_mailbox(const MoeShape &shape, const MoeOp &op, u32 source) {
    return (const MoeHeader *)(op.mailboxes + (u64)source * shape.message);
}

// The window of `rank`, 0 if it is not mapped here: what goes there is staged in this rank's own window.
__device__ inline u64 moe_window(const MoeShape &shape, u32 rank) { return ((const u64 *)shape.windows)[rank]; }

// The address of the rank-major rows of the slot that `rank` announced for this operation.
__device__ inline u64 moe_rank_rows(const MoeShape &shape, const MoeOp &op, u32 rank) {
    return moe_window(shape, rank) + shape.slots_at + (u64)moe_mailbox(shape, op, rank)->slot * shape.slot_bytes;
}

__device__ inline u64 moe_expert_rows(const MoeShape &shape, const MoeOp &op, u32 rank) {
    return moe_rank_rows(shape, op, rank) + shape.expert_region;
}

// Writes an announcement. Its first sixteen bytes, slot and sequence among them, become visible at once:
// who finds the sequence of an operation finds its slot, also where a wait was released too early.
__device__ inline void moe_announce_to(u64 to, const MoeHeader &header) {
    const u32 *words = (const u32 *)&header;
    for (u32 w = 4; w < sizeof(MoeHeader) / 4; w++) ((u32 *)to)[w] = words[w];
    ep_store(to, EpQuad{words[0], words[1], words[2], words[3]});
}

// Whether the announcements of all ranks agree, as far as this thread looked: all of a block look, and
// every rank finds the same, since all hold the same announcements. They were published before their
// flags, for which the stream waited before this kernel; they stay until this rank raises Done, which
// follows this kernel.
__device__ inline bool moe_differs(const MoeShape &shape, const MoeOp &op) {
    bool bad = false;
    for (u32 source = threadIdx.x; source < shape.world; source += blockDim.x) {
        const MoeHeader first = *moe_mailbox(shape, op, 0), one = *moe_mailbox(shape, op, source);
        bad |= one.op != first.op || one.sequence != first.sequence || one.layout != first.layout ||
               one.payload != first.payload || one.received != first.received ||
               one.handle != first.handle || one.options != first.options || one.status != 0 ||
               one.slot >= shape.slots;
    }
    return bad;
}

#define MOE_POSTED 0
#define MOE_ROWS 1

// Tells the watchdog that the stream waits for all peers' flags of a phase next; the end of that wait
// takes it back. Plain stores to host memory, ordered by the fence of the memory operations behind this
// kernel; `number` changes with every operation. All threads of one block call it.
__device__ inline void moe_awaits(const MoeShape &shape, const MoeOp &op, u32 phase, u64 number) {
    if (!op.awaited) return;
    for (u32 source = threadIdx.x; source < shape.world; source += blockDim.x)
        if (source != shape.rank)
            *(volatile u32 *)(op.awaited + ((u64)phase * shape.world + source) * 64) = 2 * (u32)number + 1;
}

// Tells the host of the verdict. One block calls it, all its threads. On a bad verdict the host gets
// the announcements, behind the report, from which it derives the error; where ranks are not mapped it
// always does, since it has to know their slots.
__device__ inline void moe_report(const MoeShape &shape, const MoeOp &op, MoeReport report) {
    MoeReport *to = (MoeReport *)op.report;
    if (report.verdict == MOE_DISAGREE || shape.far) {
        MoeHeader *headers = (MoeHeader *)(to + 1);
        for (u32 source = threadIdx.x; source < shape.world; source += blockDim.x)
            headers[source] = *moe_mailbox(shape, op, source);
        __threadfence_system();
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        to->sequence = moe_mailbox(shape, op, shape.rank)->sequence;
        to->needed = report.needed;
        to->verdict = report.verdict;
        to->rank = report.rank;
        to->what = report.what;
        // Release: whoever sees the ticket sees what was written above, by this thread and, through
        // the barrier and the fences before it, by the others.
        ep_store_release(&to->ticket, op.ticket);
    }
}

// The verdict of an operation that nothing but announcements decides: block 0 tells the host and the
// kernels that follow. All its threads call it with the same answer.
__device__ inline void moe_verdict(const MoeShape &shape, const MoeOp &op, u32 verdict) {
    if (blockIdx.x != 0) return;
    MoeReport report = {};
    report.verdict = verdict;
    if (threadIdx.x == 0) ((MoeLane *)op.lane)->refused = verdict != MOE_OK;
    moe_report(shape, op, report);
}

// Why announcements differ: because the wait for them was released, or because ranks disagree. All
// threads of the block call it.
__device__ inline u32 moe_why(const MoeShape &shape) {
    bool poisoned = threadIdx.x == 0 && *(const volatile u32 *)shape.poisoned != 0;
    return __syncthreads_or(poisoned) ? MOE_POISONED : MOE_DISAGREE;
}

// Whether an operation that nothing but announcements decides goes on; if not, the host is told, if so,
// the kernel does that when it has moved its rows. `bad`: what this thread knows against it. A barrier of
// the block; all threads get the same answer.
//
// Nobody looks at the word in host memory first: where a wait was released, an announcement is not there,
// so its number is an earlier operation's; if all are there, their owners' slots are too. Reading that
// word takes longer with every block that reads it.
__device__ inline bool moe_goes_on(const MoeShape &shape, const MoeOp &op, bool bad) {
    if (blockIdx.x == 0) moe_awaits(shape, op, MOE_ROWS, moe_mailbox(shape, op, shape.rank)->sequence);
    bad |= moe_differs(shape, op);
    if (!__syncthreads_or(bad)) return true;
    moe_verdict(shape, op, moe_why(shape));
    return false;
}
