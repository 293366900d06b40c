//! Ranks whose rows are on GPUs.

use std::cell::Cell;
use std::sync::OnceLock;
use std::time::Duration;

use ep_kernels::cuda::{Device, DeviceMemory, Driver, Stream};
use ep_runtime::{
    DType, DeviceIds, Dispatched, EpBuilder, EpError, IdKind, Payload, PayloadKind, Place, Queue,
    Route, Rows, RowsMut, ScaleKind,
};
use parking_lot::{Mutex, MutexGuard};

use super::ground::{Ground, Grounds};
use super::{Matrix, Tokens, payload_kind};

const LIMIT: Duration = Duration::from_secs(30);
const ALIGN: usize = 256;
/// A wait between ranks that takes longer fails the test.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Ranks on the GPUs there are: rank `r` on GPU `r % gpus`.
pub struct Gpus {
    gpus: usize,
    /// The first rank that has memory here.
    first: usize,
    /// Memory of every rank from there on, taken once: allocating waits for what runs meanwhile.
    arenas: Vec<Mutex<Arena>>,
    tuning: ep_runtime::Tuning,
    sms: u32,
}

struct Arena {
    stream: Stream,
    memory: DeviceMemory,
    ordinal: usize,
}

impl Arena {
    fn memory_device(&self) -> Device {
        self.stream.device().clone()
    }
}

impl Gpus {
    /// For up to `ranks` ranks, each with `bytes` of memory. `None`, with the reason, without a GPU.
    pub fn new(ranks: usize, bytes: usize) -> Option<Self> {
        Self::of(0..ranks, bytes)
    }

    /// For some ranks: those that are threads of this process.
    pub fn of(ranks: std::ops::Range<usize>, bytes: usize) -> Option<Self> {
        // Ranks that share a GPU wait for each other on it: their streams need queues of their own.
        static CONNECTIONS: OnceLock<()> = OnceLock::new();
        CONNECTIONS.get_or_init(|| {
            if std::env::var_os("CUDA_DEVICE_MAX_CONNECTIONS").is_none() {
                // SAFETY: tests of this file run one at a time, and the driver is not open yet.
                unsafe { std::env::set_var("CUDA_DEVICE_MAX_CONNECTIONS", "32") };
            }
            if std::env::var_os("CUDA_MODULE_LOADING").is_none() {
                // A fill or copy whose kernel is loaded at first use waits for what runs then.
                // SAFETY: as above.
                unsafe { std::env::set_var("CUDA_MODULE_LOADING", "EAGER") };
            }
        });
        let gpus = match Driver::get().and_then(|driver| driver.device_count()) {
            Ok(gpus) if gpus > 0 => gpus,
            Ok(_) => return None,
            Err(error) => {
                eprintln!("skipped: {error}");
                return None;
            }
        };
        let arena = |rank: usize| {
            let device = Device::open(rank % gpus).expect("a GPU");
            let stream = device.stream(0).expect("a stream");
            let memory = DeviceMemory::zeroed(&stream, bytes, LIMIT).expect("memory");
            Mutex::new(Arena { stream, memory, ordinal: rank % gpus })
        };
        let first = ranks.start;
        let arenas = ranks.map(arena).collect();
        Some(Self { gpus, first, arenas, tuning: ep_runtime::Tuning::default(), sms: 16 })
    }

    /// With other launches.
    pub fn tuned(mut self, tuning: ep_runtime::Tuning, sms: u32) -> Self {
        (self.tuning, self.sms) = (tuning, sms);
        self
    }

    /// How many GPUs there are.
    pub fn count(&self) -> usize {
        self.gpus
    }

    pub fn set_tuning(&mut self, tuning: ep_runtime::Tuning, sms: u32) {
        (self.tuning, self.sms) = (tuning, sms);
    }

    /// A rank's memory, and the queue of its stream.
    pub fn rank(&self, rank: usize) -> Gpu<'_> {
        let arena = self.arenas[rank - self.first].lock();
        // SAFETY: the stream lives as long as `self`, and all work on it is waited for.
        let queue = unsafe { Queue::from_raw(arena.stream.raw().cast(), arena.ordinal) };
        Gpu { arena, queue, used: Cell::new(0), owns: false }
    }
}

impl Grounds for Gpus {
    fn place(&self, rank: usize, _world: usize, builder: EpBuilder) -> EpBuilder {
        // Streams made together get hardware queues of their own, as long as there are fewer than
        // queues: one that waits must not hold up another rank's.
        let mut arena = self.arenas[rank - self.first].lock();
        arena.stream = arena.memory_device().stream(0).expect("a stream");
        drop(arena);
        let builder =
            builder.place(Place::Cuda(rank % self.gpus)).lanes(1).handles(4).timeout(TIMEOUT);
        builder.comm_sms(self.sms).tuning(self.tuning)
    }

    fn ground(&self, rank: usize, world: usize) -> Box<dyn Ground + '_> {
        // Copying out allocates, which waits for the other ranks on the GPU.
        Box::new(Gpu { owns: world <= self.gpus, ..self.rank(rank) })
    }
}

/// A rank on a GPU.
pub struct Gpu<'a> {
    arena: MutexGuard<'a, Arena>,
    queue: Queue,
    used: Cell<usize>,
    owns: bool,
}

impl Gpu<'_> {
    /// Memory for `bytes`, filled with NaN or with `data`.
    pub fn place(&self, data: Option<&[u8]>, bytes: usize) -> u64 {
        let at = self.used.get();
        self.used.set(at + bytes.next_multiple_of(ALIGN));
        assert!(self.used.get() <= self.arena.memory.bytes(), "the arena is too small");
        match data {
            Some(data) => {
                let stream = &self.arena.stream;
                self.arena.memory.upload(stream, at, data, LIMIT).expect("an upload");
            }
            None => {
                let (stream, to) = (&self.arena.stream, self.arena.memory.address() + at as u64);
                // SAFETY: inside the arena, which lives as long as the test.
                unsafe { stream.device().fill(stream.raw(), to, 0xff, bytes).expect("a fill") };
            }
        }
        self.arena.memory.address() + at as u64
    }

    /// Writes to memory that [`Gpu::place`] gave.
    pub fn store(&self, to: u64, data: &[u8]) {
        let at = (to - self.arena.memory.address()) as usize;
        self.arena.memory.upload(&self.arena.stream, at, data, LIMIT).expect("an upload");
    }

    pub fn fetch(&self, from: u64, to: &mut [u8]) {
        let at = (from - self.arena.memory.address()) as usize;
        self.arena.memory.download(&self.arena.stream, at, to, LIMIT).expect("a download");
    }

    pub fn ordinal(&self) -> usize {
        self.arena.ordinal
    }

    pub fn stream(&self) -> &Stream {
        &self.arena.stream
    }

    fn dense(&self, matrix: &Matrix, dtype: DType) -> Rows<'_> {
        let (rows, bytes) = matrix.size();
        let at = self.place(Some(&matrix.bytes()[..rows * bytes]), rows * bytes);
        // SAFETY: dense rows in the arena, written by nobody else.
        unsafe { Rows::from_device(self.arena.ordinal, at, rows, bytes, bytes, dtype) }
    }
}

impl Ground for Gpu<'_> {
    fn queue(&self) -> Queue {
        self.queue.clone()
    }

    fn owns(&self) -> bool {
        self.owns
    }

    fn rows<'a>(&'a self, matrix: &'a Matrix, dtype: DType) -> Rows<'a> {
        self.dense(matrix, dtype)
    }

    fn payload<'a>(&'a self, tokens: &'a Tokens) -> Result<Payload<'a>, EpError> {
        let rows = |dtype| self.dense(&tokens.payload, dtype);
        match payload_kind(tokens.kind) {
            PayloadKind::Fp8 { scales } => {
                let dtype = if scales == ScaleKind::F32 { DType::F32 } else { DType::Bytes };
                Payload::fp8(rows(DType::Fp8E4M3), self.dense(&tokens.scales, dtype))
            }
            PayloadKind::Opaque { aux_bytes, .. } => {
                let aux = (aux_bytes > 0).then(|| self.dense(&tokens.scales, DType::Bytes));
                Payload::opaque(rows(DType::Bytes), aux)
            }
            kind => Payload::new(rows(kind.dtype())),
        }
    }

    fn route<'a>(&'a self, tokens: &'a Tokens, narrow: bool) -> Route<'a> {
        let (bytes, kind): (Vec<u8>, _) = match narrow {
            true => {
                (tokens.ids.iter().flat_map(|&i| (i as i32).to_ne_bytes()).collect(), IdKind::I32)
            }
            false => (tokens.ids.iter().flat_map(|i| i.to_ne_bytes()).collect(), IdKind::I64),
        };
        let at = self.place(Some(&bytes), bytes.len());
        // SAFETY: in the arena, written by nobody else.
        let ids = unsafe { DeviceIds::from_raw(self.arena.ordinal, at, tokens.ids.len(), kind) };
        let weights = tokens.weights.as_ref().map(|weights| {
            let bytes: Vec<u8> = weights.iter().flat_map(|w| w.to_ne_bytes()).collect();
            let at = self.place(Some(&bytes), bytes.len());
            // SAFETY: as above.
            unsafe { Rows::from_device(self.arena.ordinal, at, weights.len(), 4, 4, DType::F32) }
        });
        Route::Device { ids, weights }
    }

    fn write(&self, into: &mut Dispatched, kind: PayloadKind, rows: &[Vec<u8>], weights: &[f32]) {
        let mut outputs = into.rows_mut(kind).expect("combinable");
        let carried = outputs.all_weights().as_mut_ptr() as u64;
        let mut payload = outputs.payload();
        let (to, stride) = (payload.as_mut_ptr() as u64, payload.stride());
        let (weights_at, per_row) = ((carried - to) as usize, weights.len() / rows.len().max(1));
        let mut image = vec![0u8; rows.len() * stride];
        for (i, row) in rows.iter().enumerate() {
            image[i * stride..][..row.len()].copy_from_slice(row);
            for (k, weight) in weights[i * per_row..][..per_row].iter().enumerate() {
                image[i * stride + weights_at + 4 * k..][..4]
                    .copy_from_slice(&weight.to_ne_bytes());
            }
        }
        let stream = &self.arena.stream;
        // SAFETY: the slot's rows, which `into` owns; the image stays until the copy is done.
        unsafe { stream.device().copy(stream.raw(), to, image.as_ptr() as u64, image.len()) }
            .and_then(|()| stream.wait("writing outputs", LIMIT))
            .expect("a copy");
    }

    fn with_outputs(
        &self,
        rows: &mut Matrix,
        dtype: DType,
        weights: &mut Matrix,
        f: &mut dyn FnMut(RowsMut<'_>, RowsMut<'_>) -> Result<(), EpError>,
    ) -> Result<(), EpError> {
        let space = |matrix: &Matrix| {
            let (rows, bytes) = matrix.size();
            (self.place(None, rows * bytes), rows, bytes)
        };
        let view = |(at, rows, bytes): (u64, usize, usize), dtype| {
            // SAFETY: dense rows in the arena that nobody else knows.
            unsafe { RowsMut::from_device(self.arena.ordinal, at, rows, bytes, bytes, dtype) }
        };
        let (out, home) = (space(rows), space(weights));
        f(view(out, dtype), view(home, DType::F32))?;
        self.fetch(out.0, &mut rows.bytes_mut()[..out.1 * out.2]);
        self.fetch(home.0, &mut weights.bytes_mut()[..home.1 * home.2]);
        Ok(())
    }
}
