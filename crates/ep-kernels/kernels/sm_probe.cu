// Records which SM and which cluster every block ran on.
//
// The host gives each block so much shared memory that an SM holds one, and launches no more blocks
// than fit at once; `hold_ns` keeps them resident until all are placed, so that one launch shows
// each SM at most once.

struct ProbeRecord {
    u64 start_ns;
    u32 smid;
    u32 nsmid;
    u32 cluster;       // number of the cluster in the grid; the block's own number without clusters
    u32 cluster_size;  // blocks in that cluster; 1 without clusters
    u32 cluster_rank;  // this block's number inside the cluster
    u32 written;       // 1 once the record is filled
};

struct ProbeParams {
    u64 records;  // ProbeRecord[record_count], one per block
    u64 hold_ns;
    u32 record_count;
    u32 reserved;
};

EP_CHECK_SIZE(ProbeRecord);
EP_CHECK_FIELD(ProbeRecord, start_ns);
EP_CHECK_FIELD(ProbeRecord, smid);
EP_CHECK_FIELD(ProbeRecord, nsmid);
EP_CHECK_FIELD(ProbeRecord, cluster);
EP_CHECK_FIELD(ProbeRecord, cluster_size);
EP_CHECK_FIELD(ProbeRecord, cluster_rank);
EP_CHECK_FIELD(ProbeRecord, written);
EP_CHECK_SIZE(ProbeParams);
EP_CHECK_FIELD(ProbeParams, records);
EP_CHECK_FIELD(ProbeParams, hold_ns);
EP_CHECK_FIELD(ProbeParams, record_count);
EP_CHECK_FIELD(ProbeParams, reserved);

extern "C" __global__ void __launch_bounds__(32) sm_probe(const __grid_constant__ ProbeParams p) {
    if (threadIdx.x != 0) return;
    u64 start = ep_globaltimer();

    u32 cluster = blockIdx.x, cluster_size = 1, cluster_rank = 0;
#if __CUDA_ARCH__ >= 900
    cluster = ep_cluster();
    cluster_size = ep_cluster_size();
    cluster_rank = ep_cluster_rank();
#endif
    if (blockIdx.x < p.record_count) {
        // Plain stores: the host reads them only after the stream has completed, and kernel
        // completion orders every store of the kernel before what the host then sees.
        ProbeRecord record;
        record.start_ns = start;
        record.smid = ep_smid();
        record.nsmid = ep_nsmid();
        record.cluster = cluster;
        record.cluster_size = cluster_size;
        record.cluster_rank = cluster_rank;
        record.written = 1;
        reinterpret_cast<ProbeRecord*>(p.records)[blockIdx.x] = record;
    }
    ep_hold_until(start + p.hold_ns);
}
