//! What the tests share: ranks as threads, and one job run through the library.
#![allow(dead_code)]

pub mod exercise;
#[cfg(feature = "cuda")]
pub mod gpu;
#[cfg(feature = "cuda")]
pub mod gpu_apart;
#[cfg(feature = "cuda")]
pub mod gpu_replays;
#[cfg(feature = "cuda")]
pub mod gpu_small;
pub mod ground;
pub mod jobs;
pub mod node_oracle;
pub mod small;

use ep_bench::oracle::{self, Float, Job, Payload as Kind};
use ep_runtime::{
    DType, Ep, EpBuilder, EpError, Group, Ids, MoeShape, Payload, PayloadKind, Placement, Rows,
    ScaleKind, ThreadTransport,
};

/// Runs `f` on `ranks` ranks, threads of this process.
pub fn ranks<T: Send>(ranks: usize, f: impl Fn(Group) -> T + Sync) -> Vec<T> {
    let groups = Group::local(ranks).expect("a local group");
    std::thread::scope(|scope| {
        let f = &f;
        let started: Vec<_> = groups.into_iter().map(|g| scope.spawn(move || f(g))).collect();
        started.into_iter().map(|t| t.join().expect("no panic")).collect()
    })
}

/// As [`ranks`], each with an [`Ep`].
pub fn eps<T: Send>(world: usize, builder: &EpBuilder, f: impl Fn(Ep) -> T + Sync) -> Vec<T> {
    ranks(world, |group| f(builder.build(&group).expect("build")))
}

/// As [`eps`], each rank with a builder of its own.
pub fn eps_of<T: Send>(
    world: usize,
    builder: &(dyn Fn(usize) -> EpBuilder + Sync),
    f: impl Fn(Ep) -> T + Sync,
) -> Vec<T> {
    ranks(world, |group| f(builder(group.rank()).build(&group).expect("build")))
}

/// Which ranks are late is for the clock to say, and those of a machine that stalls are late too: one
/// try of some has to go as it should.
#[track_caller]
pub fn in_one_of_some_tries(mut attempt: impl FnMut() -> Result<(), String>) {
    let mut wrong = Vec::new();
    while wrong.len() < 8 {
        match attempt() {
            Ok(()) => return,
            Err(what) => wrong.push(what),
        }
    }
    panic!("{wrong:#?}");
}

/// Stays in the group until a rank has given it up.
pub fn stay_until_it_fails(group: &Group) {
    let began = std::time::Instant::now();
    while group.health().fault().is_none() {
        assert!(began.elapsed() < std::time::Duration::from_secs(60), "nobody gives up");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

pub fn payload_kind(kind: Kind) -> PayloadKind {
    match kind {
        Kind::Bf16 => PayloadKind::Bf16,
        Kind::F16 => PayloadKind::F16,
        Kind::F32 => PayloadKind::F32,
        Kind::Fp8F32 => PayloadKind::Fp8 { scales: ScaleKind::F32 },
        Kind::Fp8Ue8m0 => PayloadKind::Fp8 { scales: ScaleKind::Ue8m0 },
        Kind::Opaque { row_bytes, aux_bytes } => {
            PayloadKind::Opaque { row_bytes: row_bytes as u32, aux_bytes: aux_bytes as u32 }
        }
    }
}

pub fn float_kind(float: Float) -> PayloadKind {
    match float {
        Float::Bf16 => PayloadKind::Bf16,
        Float::F16 => PayloadKind::F16,
        Float::F32 => PayloadKind::F32,
    }
}

/// The builder of what a job needs, with combine in `float`; `more` adds to the shape.
pub fn builder(
    job: &Job,
    float: Float,
    nodes: Nodes,
    more: impl FnOnce(MoeShape) -> MoeShape,
) -> EpBuilder {
    let most = job.inputs.iter().map(|i| i.tokens).max().unwrap_or(0);
    let mut shape = MoeShape::new(job.hidden, job.topk, job.experts)
        .max_tokens(most)
        .payload(payload_kind(job.payload))
        .payload(float_kind(float))
        .expert_major(job.alignment);
    if let oracle::Placement::Explicit(holders) = &job.placement {
        shape = shape.placement(Placement::explicit(job.ranks, holders).expect("a placement"));
    }
    let builder = EpBuilder::new(more(shape)).slots(2);
    match nodes.transport(job.ranks) {
        Some(transport) => builder.transport(transport),
        None => builder,
    }
}

/// Which ranks map each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nodes {
    /// All, by the transport that the library picks.
    Mapped,
    /// None.
    Bulk,
    /// Consecutive ranks in nodes of these sizes.
    Sizes(&'static [usize]),
    /// A node starts at every rank whose bit is set.
    Cut(u64),
}

impl Nodes {
    pub fn sizes(self, ranks: usize) -> Vec<usize> {
        match self {
            Self::Mapped => vec![ranks],
            Self::Bulk => vec![1; ranks],
            Self::Sizes(sizes) => sizes.to_vec(),
            Self::Cut(bits) => {
                let mut sizes: Vec<usize> = Vec::new();
                for rank in 0..ranks {
                    match sizes.last_mut() {
                        Some(last) if bits >> (rank % 64) & 1 == 0 => *last += 1,
                        _ => sizes.push(1),
                    }
                }
                sizes
            }
        }
    }

    /// The node of every rank.
    pub fn of(self, ranks: usize) -> Vec<usize> {
        let sizes = self.sizes(ranks).into_iter().enumerate();
        sizes.flat_map(|(node, size)| vec![node; size]).collect()
    }

    pub fn transport(self, ranks: usize) -> Option<ThreadTransport> {
        match self {
            Self::Mapped => None,
            Self::Bulk => Some(ThreadTransport::new().bulk(true)),
            _ => Some(ThreadTransport::new().nodes(&self.sizes(ranks))),
        }
    }
}

/// Aligned rows, dense.
#[derive(Clone, Debug)]
pub struct Matrix {
    data: Vec<u128>,
    rows: usize,
    row_bytes: usize,
}

impl Matrix {
    pub fn new(rows: &[Vec<u8>], row_bytes: usize) -> Self {
        let mut matrix = Self::zeroed(rows.len(), row_bytes);
        for (i, row) in rows.iter().enumerate() {
            matrix.bytes_mut()[i * row_bytes..][..row_bytes].copy_from_slice(row);
        }
        matrix
    }

    pub fn zeroed(rows: usize, row_bytes: usize) -> Self {
        let data = vec![u128::MAX; (rows * row_bytes).div_ceil(16)];
        Self { data, rows, row_bytes }
    }

    /// Rows and the bytes of each.
    pub fn size(&self) -> (usize, usize) {
        (self.rows, self.row_bytes)
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: a u128 is 16 initialised bytes.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr().cast(), self.data.len() * 16) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = self.data.len() * 16;
        // SAFETY: as above; every bit pattern is a u128.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_mut_ptr().cast(), bytes) }
    }

    pub fn rows(&self, dtype: DType) -> Rows<'_> {
        // SAFETY: dense rows of this length, aligned to 16 and borrowed.
        unsafe {
            Rows::from_raw(self.bytes().as_ptr(), self.rows, self.row_bytes, self.row_bytes, dtype)
        }
    }

    pub fn rows_mut(&mut self, dtype: DType) -> ep_runtime::RowsMut<'_> {
        let (rows, bytes) = (self.rows, self.row_bytes);
        let base = self.bytes_mut().as_mut_ptr();
        // SAFETY: as above, borrowed exclusively.
        unsafe { ep_runtime::RowsMut::from_raw(base, rows, bytes, bytes, dtype) }
    }

    pub fn to_rows(&self) -> Vec<Vec<u8>> {
        (0..self.rows)
            .map(|i| self.bytes()[i * self.row_bytes..][..self.row_bytes].to_vec())
            .collect()
    }
}

/// One rank's tokens of a job, as the library takes them.
pub struct Tokens {
    pub payload: Matrix,
    pub scales: Matrix,
    pub ids: Vec<i64>,
    pub weights: Option<Vec<f32>>,
    pub kind: Kind,
}

impl Tokens {
    pub fn new(job: &Job, rank: usize) -> Self {
        let input = &job.inputs[rank];
        Self {
            payload: Matrix::new(&input.payload, job.payload.payload_bytes(job.hidden)),
            scales: Matrix::new(&input.scales, job.payload.scale_bytes(job.hidden)),
            ids: input.ids.clone(),
            weights: input.weights.clone(),
            kind: job.payload,
        }
    }

    pub fn payload(&self) -> Result<Payload<'_>, EpError> {
        match payload_kind(self.kind) {
            PayloadKind::Fp8 { scales } => {
                let dtype = match scales {
                    ScaleKind::F32 => DType::F32,
                    _ => DType::Bytes,
                };
                Payload::fp8(self.payload.rows(DType::Fp8E4M3), self.scales.rows(dtype))
            }
            PayloadKind::Opaque { aux_bytes, .. } => {
                let aux = (aux_bytes > 0).then(|| self.scales.rows(DType::Bytes));
                Payload::opaque(self.payload.rows(DType::Bytes), aux)
            }
            kind => Payload::new(self.payload.rows(kind.dtype())),
        }
    }

    pub fn ids(&self) -> Ids<'_> {
        Ids::I64(&self.ids)
    }
}
