use bitflags::bitflags;

use super::device::DeviceProperties;
use super::error::{CudaError, invalid};

bitflags! {
    /// Which attributes a launch sets; the driver's default holds for the others.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct LaunchFlags: u32 {
        /// All blocks of the grid become resident at once, or the launch waits.
        const COOPERATIVE = 1;
        /// Blocks are scheduled in clusters.
        const CLUSTER = 1 << 1;
        /// A priority of its own instead of the stream's.
        const PRIORITY = 1 << 2;
        /// May start before the kernel ahead of it in the stream has ended.
        const PROGRAMMATIC_SERIALIZATION = 1 << 3;
        /// Its memory operations are ordered in a domain of their own.
        const MEM_SYNC_DOMAIN = 1 << 4;
        /// How clusters are spread over SMs.
        const CLUSTER_SCHEDULING = 1 << 5;
    }
}

/// Memory synchronisation domain: a fence waits only for operations of its own domain.
/// `CUlaunchMemSyncDomain`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u32)]
pub enum MemSyncDomain {
    /// Where kernels run that name none.
    #[default]
    Default = 0,
    /// For kernels that write to peers, whose fences then do not wait for local traffic.
    Remote = 1,
}

/// How clusters are placed. `CUclusterSchedulingPolicy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u32)]
pub enum ClusterScheduling {
    /// The driver's choice.
    #[default]
    Default = 0,
    /// Blocks of a cluster spread over SMs.
    Spread = 1,
    /// The hardware balances load.
    LoadBalancing = 2,
}

/// Attributes of one launch, as `cuLaunchKernelEx` takes them. Set through the `with_` functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct LaunchAttributes {
    flags: LaunchFlags,
    cluster: u32,
    priority: i32,
    domain: MemSyncDomain,
    scheduling: ClusterScheduling,
}

impl LaunchAttributes {
    /// A plain launch.
    pub const fn plain() -> Self {
        LaunchAttributes {
            flags: LaunchFlags::empty(),
            cluster: 1,
            priority: 0,
            domain: MemSyncDomain::Default,
            scheduling: ClusterScheduling::Default,
        }
    }

    /// All blocks resident at once.
    pub const fn with_cooperative(mut self) -> Self {
        self.flags = self.flags.union(LaunchFlags::COOPERATIVE);
        self
    }

    /// Clusters of `blocks` blocks along x. The attribute is set for 1 too.
    pub const fn with_cluster(mut self, blocks: u32) -> Self {
        self.flags = self.flags.union(LaunchFlags::CLUSTER);
        self.cluster = blocks;
        self
    }

    /// A priority within the range of `Device::priorities`.
    pub const fn with_priority(mut self, priority: i32) -> Self {
        self.flags = self.flags.union(LaunchFlags::PRIORITY);
        self.priority = priority;
        self
    }

    /// May start before the kernel ahead of it in the stream has ended.
    pub const fn with_programmatic_serialization(mut self) -> Self {
        self.flags = self.flags.union(LaunchFlags::PROGRAMMATIC_SERIALIZATION);
        self
    }

    /// Memory operations ordered in `domain`.
    pub const fn with_mem_sync_domain(mut self, domain: MemSyncDomain) -> Self {
        self.flags = self.flags.union(LaunchFlags::MEM_SYNC_DOMAIN);
        self.domain = domain;
        self
    }

    /// Clusters placed by `scheduling`.
    pub const fn with_cluster_scheduling(mut self, scheduling: ClusterScheduling) -> Self {
        self.flags = self.flags.union(LaunchFlags::CLUSTER_SCHEDULING);
        self.scheduling = scheduling;
        self
    }

    /// Which attributes are set.
    pub const fn flags(&self) -> LaunchFlags {
        self.flags
    }

    /// Blocks per cluster; 1 where no cluster was asked for.
    pub const fn cluster(&self) -> u32 {
        if self.flags.contains(LaunchFlags::CLUSTER) { self.cluster } else { 1 }
    }

    pub(crate) fn encode(&self) -> EncodedAttributes {
        let mut encoded = EncodedAttributes { list: [RawAttribute::IGNORE; 6], len: 0 };
        let f = self.flags;
        if f.contains(LaunchFlags::COOPERATIVE) {
            encoded.push(2, &[1]);
        }
        if f.contains(LaunchFlags::CLUSTER) {
            encoded.push(4, &[self.cluster, 1, 1]);
        }
        if f.contains(LaunchFlags::CLUSTER_SCHEDULING) {
            encoded.push(5, &[self.scheduling as u32]);
        }
        if f.contains(LaunchFlags::PROGRAMMATIC_SERIALIZATION) {
            encoded.push(6, &[1]);
        }
        if f.contains(LaunchFlags::PRIORITY) {
            encoded.push(8, &[self.priority as u32]);
        }
        if f.contains(LaunchFlags::MEM_SYNC_DOMAIN) {
            encoded.push(10, &[self.domain as u32]);
        }
        encoded
    }
}

/// `CUlaunchAttribute`: the identifier (`CUlaunchAttributeID`, cuda.h) and a union of 64 bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RawAttribute {
    id: u32,
    pad: u32,
    value: [u32; 16],
}
const _: () = assert!(size_of::<RawAttribute>() == 72);
const _: () = assert!(std::mem::offset_of!(RawAttribute, value) == 8);

impl RawAttribute {
    const IGNORE: Self = RawAttribute { id: 0, pad: 0, value: [0; 16] };
}

/// Attributes in the driver's form. Aligned as the union in it, which holds pointers.
#[repr(C, align(8))]
#[derive(Debug)]
pub(crate) struct EncodedAttributes {
    list: [RawAttribute; 6],
    len: u32,
}

impl EncodedAttributes {
    fn push(&mut self, id: u32, words: &[u32]) {
        let attribute = &mut self.list[self.len as usize];
        attribute.id = id;
        attribute.value[..words.len()].copy_from_slice(words);
        self.len += 1;
    }

    pub(crate) fn as_ptr(&self) -> *const RawAttribute {
        self.list.as_ptr()
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }
}

/// Grid, block and attributes of a launch, in one dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LaunchConfig {
    /// Blocks.
    pub grid: u32,
    /// Threads per block.
    pub block: u32,
    /// Dynamic shared memory per block, bytes.
    pub shared_bytes: u32,
    /// Attributes.
    pub attributes: LaunchAttributes,
}

/// The largest cluster any architecture of today has, blocks.
pub(crate) const LARGEST_CLUSTER: u32 = 16;

impl LaunchConfig {
    /// Checks what can be checked before the driver is asked.
    ///
    /// # Errors
    /// The argument that is out of range, or an attribute this device does not have.
    pub fn validate(&self, device: &DeviceProperties) -> Result<(), CudaError> {
        const OP: &str = "launch";
        let cluster = self.attributes.cluster();
        if self.grid == 0 || self.grid > i32::MAX as u32 {
            return invalid(OP, format!("{} blocks; 1 to {} are possible", self.grid, i32::MAX));
        }
        if self.block == 0 || self.block > 1024 {
            return invalid(
                OP,
                format!("{} threads per block; 1 to 1024 are possible", self.block),
            );
        }
        if self.shared_bytes > device.shared_per_block {
            return invalid(
                OP,
                format!(
                    "{} bytes of shared memory per block; {} has {}",
                    self.shared_bytes, device.name, device.shared_per_block
                ),
            );
        }
        if !(1..=LARGEST_CLUSTER).contains(&cluster) {
            return invalid(
                OP,
                format!("cluster of {cluster} blocks; 1 to {LARGEST_CLUSTER} are possible"),
            );
        }
        if !self.grid.is_multiple_of(cluster) {
            return invalid(
                OP,
                format!("{} blocks are no multiple of the cluster's {cluster}", self.grid),
            );
        }
        let flags = self.attributes.flags();
        let of_clusters = LaunchFlags::CLUSTER | LaunchFlags::CLUSTER_SCHEDULING;
        let of_hopper =
            of_clusters | LaunchFlags::PROGRAMMATIC_SERIALIZATION | LaunchFlags::MEM_SYNC_DOMAIN;
        if device.capability.0 < 9 && flags.intersects(of_hopper)
            || !device.clusters && flags.intersects(of_clusters)
        {
            let (major, minor) = device.capability;
            let reason =
                format!("{} (compute capability {major}.{minor}) lacks {flags:?}", device.name);
            return Err(CudaError::Unsupported { operation: OP, reason });
        }
        if !device.cooperative && flags.contains(LaunchFlags::COOPERATIVE) {
            let reason = format!("{} has no cooperative launch", device.name);
            return Err(CudaError::Unsupported { operation: OP, reason });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes(attribute: &RawAttribute) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(attribute.id.to_le_bytes());
        bytes.extend(attribute.pad.to_le_bytes());
        bytes.extend(attribute.value.iter().flat_map(|word| word.to_le_bytes()));
        bytes
    }

    fn attributes_of(encoded: &EncodedAttributes) -> Vec<RawAttribute> {
        encoded.list[..encoded.len as usize].to_vec()
    }

    fn device(capability: (u32, u32)) -> DeviceProperties {
        DeviceProperties {
            name: "test GPU".into(),
            capability,
            clusters: capability.0 >= 9,
            ..DeviceProperties::h200()
        }
    }

    /// Against cudarc's bindings, which bindgen wrote from cuda.h: an independent statement of the
    /// same layout.
    #[test]
    fn encoding_agrees_with_the_bindings_of_cuda_h() {
        use cudarc::driver::sys;
        assert_eq!(size_of::<RawAttribute>(), size_of::<sys::CUlaunchAttribute>());
        assert_eq!(align_of::<EncodedAttributes>(), align_of::<sys::CUlaunchAttribute>());
        assert_eq!(
            size_of::<crate::cuda::driver::RawLaunchConfig>(),
            size_of::<sys::CUlaunchConfig>()
        );
        use sys::CUlaunchAttributeID as Id;
        let encoded = LaunchAttributes::plain()
            .with_cooperative()
            .with_cluster(4)
            .with_priority(-3)
            .with_programmatic_serialization()
            .with_mem_sync_domain(MemSyncDomain::Remote)
            .with_cluster_scheduling(ClusterScheduling::LoadBalancing)
            .encode();
        // SAFETY: same size and alignment (asserted above), and every identifier is one of the
        // enum's (below).
        let read = |raw: &RawAttribute| unsafe {
            *std::ptr::from_ref(raw).cast::<sys::CUlaunchAttribute>()
        };
        let known = [2, 4, 5, 6, 8, 10];
        let list = attributes_of(&encoded);
        assert_eq!(list.iter().map(|a| a.id).collect::<Vec<_>>(), known);
        for raw in &list {
            let theirs = read(raw);
            // SAFETY: every member is an integer or an enum that holds the values read here.
            unsafe {
                match theirs.id {
                    Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE => assert_eq!(theirs.value.cooperative, 1),
                    Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION => {
                        let dim = theirs.value.clusterDim;
                        assert_eq!((dim.x, dim.y, dim.z), (4, 1, 1));
                    }
                    Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE => assert_eq!(
                        theirs.value.clusterSchedulingPolicyPreference,
                        sys::CUclusterSchedulingPolicy::CU_CLUSTER_SCHEDULING_POLICY_LOAD_BALANCING
                    ),
                    Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION => {
                        assert_eq!(theirs.value.programmaticStreamSerializationAllowed, 1)
                    }
                    Id::CU_LAUNCH_ATTRIBUTE_PRIORITY => assert_eq!(theirs.value.priority, -3),
                    Id::CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN => assert_eq!(
                        theirs.value.memSyncDomain,
                        sys::CUlaunchMemSyncDomain::CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE
                    ),
                    other => panic!("unexpected {other:?}"),
                }
            }
        }
    }

    #[test]
    fn a_plain_launch_sets_nothing() {
        assert_eq!(LaunchAttributes::plain().encode().len(), 0);
        assert_eq!(LaunchAttributes::plain().cluster(), 1);
        assert_eq!(LaunchAttributes::default().cluster(), 1);
    }

    #[test]
    fn a_value_lies_at_byte_8_and_the_rest_is_zero() {
        let encoded = LaunchAttributes::plain().with_priority(-5).encode();
        let bytes = bytes(&attributes_of(&encoded)[0]);
        assert_eq!(bytes[..4], 8u32.to_le_bytes());
        assert_eq!(bytes[8..12], (-5i32).to_le_bytes());
        assert!(bytes[4..8].iter().chain(&bytes[12..]).all(|byte| *byte == 0));
    }

    #[test]
    fn arguments_out_of_range_are_named() {
        let good = LaunchConfig {
            grid: 16,
            block: 128,
            shared_bytes: 1024,
            attributes: LaunchAttributes::plain().with_cluster(2),
        };
        let hopper = device((9, 0));
        assert_eq!(good.validate(&hopper), Ok(()));
        let cases = [
            (LaunchConfig { grid: 0, ..good }, "0 blocks"),
            (LaunchConfig { grid: 15, ..good }, "no multiple"),
            (LaunchConfig { block: 1025, ..good }, "1025 threads"),
            (LaunchConfig { shared_bytes: 300_000, ..good }, "300000 bytes"),
            (
                LaunchConfig { attributes: LaunchAttributes::plain().with_cluster(0), ..good },
                "cluster of 0",
            ),
            (
                LaunchConfig {
                    grid: 34,
                    attributes: LaunchAttributes::plain().with_cluster(17),
                    ..good
                },
                "cluster of 17",
            ),
        ];
        for (config, expected) in cases {
            let text = config.validate(&hopper).unwrap_err().to_string();
            assert!(text.contains(expected), "{text} should say {expected}");
        }
        let text = good.validate(&device((8, 0))).unwrap_err().to_string();
        assert!(text.contains("8.0") && text.contains("CLUSTER"), "{text}");
    }

    proptest! {
        #[test]
        fn every_flag_is_encoded_once_and_in_order(
            bits in 0u32..64,
            cluster in 1u32..=16,
            priority in -5i32..=0,
        ) {
            let flags = LaunchFlags::from_bits_truncate(bits);
            let setters: [(LaunchFlags, &dyn Fn(LaunchAttributes) -> LaunchAttributes); 6] = [
                (LaunchFlags::COOPERATIVE, &|a| a.with_cooperative()),
                (LaunchFlags::CLUSTER, &|a| a.with_cluster(cluster)),
                (LaunchFlags::PRIORITY, &|a| a.with_priority(priority)),
                (LaunchFlags::PROGRAMMATIC_SERIALIZATION, &|a| a.with_programmatic_serialization()),
                (LaunchFlags::MEM_SYNC_DOMAIN, &|a| a.with_mem_sync_domain(MemSyncDomain::Remote)),
                (LaunchFlags::CLUSTER_SCHEDULING, &|a| {
                    a.with_cluster_scheduling(ClusterScheduling::Spread)
                }),
            ];
            let attributes = setters
                .iter()
                .filter(|(flag, _)| flags.contains(*flag))
                .fold(LaunchAttributes::plain(), |attributes, (_, set)| set(attributes));
            prop_assert_eq!(attributes.flags(), flags);
            let list = attributes_of(&attributes.encode());
            prop_assert_eq!(list.len() as u32, bits.count_ones());
            prop_assert!(list.windows(2).all(|pair| pair[0].id < pair[1].id));
            if flags.contains(LaunchFlags::CLUSTER) {
                let found = list.iter().find(|a| a.id == 4).map(|a| a.value[0]);
                prop_assert_eq!(found, Some(cluster));
            }
        }
    }
}
