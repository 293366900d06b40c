//! Received rows and the rows to be combined, as they lie in a slot.

use std::marker::PhantomData;

use ep_kernels::{DType, ExpertFormat, PayloadKind, RecordFormat};

use crate::ep::Inner;
use crate::result::Dispatched;
use crate::shape::OutFormat;
use crate::{Handle, Layout, Memory, Rows, RowsMut};

/// The format of rows in a slot, either way they are laid out.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Format {
    Rank(RecordFormat),
    Expert(ExpertFormat),
}

impl Format {
    pub fn new(ep: &Inner, layout: Layout, kind: PayloadKind) -> Self {
        let (record, expert) = ep.shape.formats(kind);
        match layout {
            Layout::RankMajor => Self::Rank(record),
            Layout::ExpertMajor { .. } => Self::Expert(expert),
        }
    }

    /// The format in which rows of `kind` are combined out of a slot that holds this.
    pub fn output(
        received: Option<Self>,
        ep: &Inner,
        layout: Layout,
        kind: PayloadKind,
    ) -> OutFormat {
        let (hidden, topk) = (ep.shape.hidden, ep.shape.topk);
        match (layout, received) {
            (Layout::RankMajor, Some(Self::Rank(f))) => {
                OutFormat::rank_major(Some(&f), kind, hidden, topk)
            }
            (Layout::RankMajor, _) => OutFormat::rank_major(None, kind, hidden, topk),
            (Layout::ExpertMajor { .. }, Some(Self::Expert(f))) => {
                OutFormat::expert_major(Some(&f), kind, hidden)
            }
            (Layout::ExpertMajor { .. }, _) => OutFormat::expert_major(None, kind, hidden),
        }
    }
}

impl Format {
    pub fn stride(&self) -> usize {
        match self {
            Self::Rank(f) => f.stride,
            Self::Expert(f) => f.stride,
        }
    }

    /// # Safety
    /// `row` is a row of this format.
    pub unsafe fn mark_empty(&self, row: *mut u8) {
        // SAFETY: by this function's contract; parts of a row are aligned to 16, or 4 in an expert's.
        unsafe {
            match self {
                Self::Rank(f) => {
                    std::slice::from_raw_parts_mut(row.add(f.ids_at).cast(), f.topk).fill(-1);
                    row.add(f.weights_at).cast::<f32>().write_bytes(0, f.topk);
                    row.add(f.source_at).cast::<[i32; 2]>().write([-1, -1]);
                }
                Self::Expert(f) => {
                    row.add(f.weight_at).cast::<f32>().write(0.0);
                    row.add(f.row_at).cast::<i32>().write(-1);
                }
            }
        }
    }
}
/// Where a row came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SourceToken {
    /// The rank.
    pub rank: usize,
    /// The token's index on that rank.
    pub token: usize,
}

/// Received rows, to be read.
#[derive(Clone, Copy, Debug)]
pub struct Received<'a> {
    pub(crate) base: *const u8,
    pub(crate) format: Format,
    pub(crate) kind: PayloadKind,
    pub(crate) rows: usize,
    pub(crate) real: usize,
    /// The rank-major records of the slot, their number and format.
    pub(crate) records: *const u8,
    pub(crate) record_rows: usize,
    pub(crate) record: RecordFormat,
    pub(crate) place: Memory,
    pub(crate) memory: PhantomData<&'a [u8]>,
}

// SAFETY: a shared borrow of bytes, as `&[u8]`.
unsafe impl Send for Received<'_> {}
// SAFETY: a shared borrow of bytes, as `&[u8]`.
unsafe impl Sync for Received<'_> {}

/// One column of small values in rows: `per_row` values of each, `stride` bytes apart.
#[derive(Clone, Copy, Debug)]
pub struct Column<'a, T> {
    base: *const T,
    rows: usize,
    per_row: usize,
    stride: usize,
    place: Memory,
    memory: PhantomData<&'a [T]>,
}

impl<'a, T: Copy> Column<'a, T> {
    /// The values of row `i`.
    ///
    /// # Panics
    /// When there is no such row, or the rows are on a GPU.
    pub fn get(&self, i: usize) -> &'a [T] {
        assert!(self.place == Memory::Host, "the rows are on a GPU: see Dispatched::to_host");
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: rows are initialised, `stride` bytes apart, and parts of them aligned to 4.
        unsafe {
            let row = self.base.cast::<u8>().add(i * self.stride).cast::<T>();
            std::slice::from_raw_parts(row, self.per_row)
        }
    }

    /// The number of rows.
    pub fn len(&self) -> usize {
        self.rows
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// Values per row.
    pub fn per_row(&self) -> usize {
        self.per_row
    }

    /// Bytes from one row to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// The first value.
    pub fn as_ptr(&self) -> *const T {
        self.base
    }
}

impl<'a> Received<'a> {
    /// Bytes of the rows, and of the records that expert-major rows came from.
    fn bytes(&self) -> (usize, usize) {
        let expert_major = matches!(self.format, Format::Expert(_));
        let records = if expert_major { self.record_rows * self.record.stride } else { 0 };
        (self.rows * self.format.stride(), records)
    }

    /// The rows shown: all there are, or the capacity in capacity mode.
    pub fn len(&self) -> usize {
        self.rows
    }

    /// Whether no row is shown.
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// The payload, `[rows, hidden]`.
    pub fn payload(&self) -> Rows<'a> {
        let bytes = match self.format {
            Format::Rank(f) => f.payload_bytes,
            Format::Expert(f) => f.payload_bytes,
        };
        // SAFETY: the rows are in memory borrowed for 'a, initialised and aligned to 16.
        let rows = unsafe {
            Rows::from_raw(self.base, self.rows, bytes, self.format.stride(), self.kind.dtype())
        };
        rows.at(self.place)
    }

    /// The scales of fp8 rows or the auxiliary bytes of opaque ones; `None` for other payloads.
    pub fn scales(&self) -> Option<Rows<'a>> {
        let (at, bytes) = match self.format {
            Format::Rank(f) => (f.scales_at, f.scale_bytes),
            Format::Expert(f) => (f.scales_at, f.scale_bytes),
        };
        let dtype = match self.kind {
            PayloadKind::Fp8 { scales: ep_kernels::ScaleKind::F32 } => DType::F32,
            _ => DType::Bytes,
        };
        let base = self.base.wrapping_add(at);
        // SAFETY: as in `payload`.
        let rows = unsafe { Rows::from_raw(base, self.rows, bytes, self.format.stride(), dtype) };
        (bytes > 0).then(|| rows.at(self.place))
    }

    /// Rank-major rows: local expert ids `[rows, K]`, -1 where the k-th expert is on another rank.
    /// Expert-major rows have none: the offsets say whose they are.
    pub fn topk_ids(&self) -> Option<Column<'a, i32>> {
        match self.format {
            Format::Rank(f) => Some(self.column(f.ids_at, f.topk)),
            Format::Expert(_) => None,
        }
    }

    /// Gate weights: rank-major `[rows, K]`, 0 where the k-th expert is on another rank;
    /// expert-major `[rows, 1]`, 0 in padding.
    pub fn weights(&self) -> Column<'a, f32> {
        match self.format {
            Format::Rank(f) => self.column(f.weights_at, f.topk),
            Format::Expert(f) => self.column(f.weight_at, 1),
        }
    }

    /// Where row `i` came from; `None` for padding and rows behind the last.
    ///
    /// # Panics
    /// When row `i` is not shown.
    pub fn source(&self, i: usize) -> Option<SourceToken> {
        let (column, row) = match self.format {
            Format::Rank(f) => (self.column::<i32>(f.source_at, 2), i),
            Format::Expert(f) => {
                let row = usize::try_from(self.column::<i32>(f.row_at, 1).get(i)[0]).ok()?;
                let at = self.record;
                let sources = Column {
                    base: self.records.wrapping_add(at.source_at).cast(),
                    rows: self.record_rows,
                    per_row: 2,
                    stride: at.stride,
                    place: self.place,
                    memory: PhantomData,
                };
                (sources, row)
            }
        };
        // What was written over received rows may hold any number here.
        if i >= self.real || row >= column.len() {
            return None;
        }
        let &[token, rank] = column.get(row) else { return None };
        Some(SourceToken { rank: usize::try_from(rank).ok()?, token: usize::try_from(token).ok()? })
    }

    fn column<T>(&self, at: usize, per_row: usize) -> Column<'a, T> {
        let base = self.base.wrapping_add(at).cast();
        let stride = self.format.stride();
        Column { base, rows: self.rows, per_row, stride, place: self.place, memory: PhantomData }
    }
}

/// Rows to be combined, to be written.
#[derive(Debug)]
pub struct Outputs<'a> {
    pub(crate) base: *mut u8,
    pub(crate) rows: usize,
    pub(crate) dtype: DType,
    pub(crate) format: OutFormat,
    pub(crate) place: Memory,
    pub(crate) memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: an exclusive borrow of bytes, as `&mut [u8]`.
unsafe impl Send for Outputs<'_> {}
// SAFETY: an exclusive borrow of bytes, as `&mut [u8]`.
unsafe impl Sync for Outputs<'_> {}

impl Outputs<'_> {
    /// The rows, `[rows, hidden]`.
    pub fn payload(&mut self) -> RowsMut<'_> {
        let OutFormat { payload_bytes, stride, .. } = self.format;
        // SAFETY: the slot holds so many rows of this stride, initialised as all of a window, and
        // is borrowed exclusively for as long as the view.
        let rows =
            unsafe { RowsMut::from_raw(self.base, self.rows, payload_bytes, stride, self.dtype) };
        rows.at(self.place)
    }

    /// The weights of all rows, `[rows, K]` or `[rows, 1]`: what [`Outputs::weights`] shows of one.
    pub fn all_weights(&mut self) -> RowsMut<'_> {
        let OutFormat { weights_at, weights, stride, .. } = self.format;
        let base = self.base.wrapping_add(weights_at);
        // SAFETY: as in `payload`; weights are aligned to 4 in every row.
        let rows = unsafe { RowsMut::from_raw(base, self.rows, weights * 4, stride, DType::F32) };
        rows.at(self.place)
    }

    /// The weights that row `i` carries home (see [`Combined::weights`]): K values, one for each
    /// of the token's experts, in a rank-major row; one value in an expert-major row. They hold the
    /// received weights where rows are written in place, else anything.
    ///
    /// [`Combined::weights`]: crate::Combined::weights
    ///
    /// # Panics
    /// When there is no such row, or the rows are on a GPU.
    pub fn weights(&mut self, i: usize) -> &mut [f32] {
        assert!(self.place == Memory::Host, "the rows are on a GPU: see Outputs::all_weights");
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: the row is inside the slot, borrowed exclusively; its weights are aligned to 4.
        unsafe {
            let at = self.base.add(i * self.format.stride + self.format.weights_at);
            std::slice::from_raw_parts_mut(at.cast(), self.format.weights)
        }
    }
}

#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
struct Chunk([u8; 16]);

/// Memory that holds rows.
#[derive(Debug)]
enum Store {
    Host(Vec<Chunk>),
    #[cfg(feature = "cuda")]
    Cuda(Option<ep_kernels::cuda::DeviceMemory>),
}

impl Store {
    fn base(&self) -> *const u8 {
        match self {
            Self::Host(data) => data.as_ptr().cast(),
            #[cfg(feature = "cuda")]
            Self::Cuda(memory) => memory.as_ref().map_or(0, |m| m.address()) as *const u8,
        }
    }
}

/// Received rows that were copied out of their slot.
#[derive(Debug)]
pub struct Owned {
    handle: Handle,
    layout: (Format, PayloadKind, RecordFormat),
    rows: usize,
    real: usize,
    place: Memory,
    data: Store,
    /// Rank-major records of expert-major rows, for their sources.
    records: Store,
    record_rows: usize,
}

impl Owned {
    pub(crate) fn copy(from: &Dispatched) -> Self {
        let rows = from.rows();
        let (data_bytes, record_bytes) = rows.bytes();
        // SAFETY: the records are in the slot `from` owns, in host memory.
        let records = Store::Host(unsafe { chunks(rows.records, record_bytes) });
        // SAFETY: as the records.
        let data = Store::Host(unsafe { chunks(rows.base, data_bytes) });
        Self::new(from, &rows, Memory::Host, data, records)
    }

    fn new(
        from: &Dispatched,
        rows: &Received<'_>,
        place: Memory,
        data: Store,
        records: Store,
    ) -> Self {
        Self {
            handle: from.handle.clone(),
            layout: (rows.format, rows.kind, rows.record),
            rows: rows.rows,
            real: rows.real,
            place,
            data,
            records,
            record_rows: rows.record_rows,
        }
    }

    /// A copy in host memory of rows that are on a GPU, made by `copy(to, from, bytes)`.
    #[cfg(feature = "cuda")]
    pub(crate) fn download(
        from: &Dispatched,
        mut copy: impl FnMut(*mut u8, *const u8, usize) -> crate::Result<()>,
    ) -> crate::Result<Self> {
        let rows = rows_on_gpu(from)?;
        let (data_bytes, record_bytes) = rows.bytes();
        let mut fetch = |from: *const u8, bytes: usize| {
            let mut to = vec![Chunk([0; 16]); bytes / size_of::<Chunk>()];
            copy(to.as_mut_ptr().cast(), from, bytes).map(|()| Store::Host(to))
        };
        let (data, records) = (fetch(rows.base, data_bytes)?, fetch(rows.records, record_bytes)?);
        Ok(Self::new(from, &rows, Memory::Host, data, records))
    }

    /// A copy in memory of the same GPU, made by `copy(from, bytes)`.
    #[cfg(feature = "cuda")]
    pub(crate) fn duplicate(
        from: &Dispatched,
        mut copy: impl FnMut(*const u8, usize) -> crate::Result<ep_kernels::cuda::DeviceMemory>,
    ) -> crate::Result<Self> {
        let rows = rows_on_gpu(from)?;
        let (data_bytes, record_bytes) = rows.bytes();
        let mut fetch = |from: *const u8, bytes: usize| -> crate::Result<Store> {
            let memory = if bytes > 0 { Some(copy(from, bytes)?) } else { None };
            Ok(Store::Cuda(memory))
        };
        let (data, records) = (fetch(rows.base, data_bytes)?, fetch(rows.records, record_bytes)?);
        Ok(Self::new(from, &rows, rows.place, data, records))
    }

    /// The rows, as [`Dispatched::rows`] showed them.
    pub fn rows(&self) -> Received<'_> {
        let (format, kind, record) = self.layout;
        Received {
            base: self.data.base(),
            format,
            kind,
            rows: self.rows,
            real: self.real,
            records: self.records.base(),
            record_rows: self.record_rows,
            record,
            place: self.place,
            memory: PhantomData,
        }
    }

    /// The routing.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }
}

/// The rows of a result on a GPU with their records, once it is known that they came. Of a graph's replays
/// nothing is known.
#[cfg(feature = "cuda")]
fn rows_on_gpu(from: &Dispatched) -> crate::Result<Received<'_>> {
    if from.judged().is_some() {
        from.verdict()?;
    }
    let handle = from.handle.routing.gpu.as_ref();
    let record_rows = match handle.filter(|handle| !handle.is_of_a_graph()) {
        Some(handle) => handle.told()?.rows,
        None => 0,
    };
    Ok(Received { record_rows, ..from.rows() })
}

/// # Safety
/// `from` is aligned to 16 and readable for `bytes`, a multiple of 16.
unsafe fn chunks(from: *const u8, bytes: usize) -> Vec<Chunk> {
    if bytes == 0 {
        return Vec::new();
    }
    // SAFETY: by this function's contract.
    unsafe { std::slice::from_raw_parts(from.cast::<Chunk>(), bytes / size_of::<Chunk>()) }.to_vec()
}
