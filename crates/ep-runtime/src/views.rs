//! Checked views of rows: how an engine hands memory over and gets it shown.

use std::marker::PhantomData;

use ep_kernels::{DType, Element};

use crate::{EpError, Memory, Result};

/// Rows of equal length, some bytes apart, to be read.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    base: *const u8,
    rows: usize,
    row_bytes: usize,
    stride: usize,
    dtype: DType,
    place: Memory,
    memory: PhantomData<&'a [u8]>,
}

// SAFETY: Rows is a shared borrow of bytes, as `&[u8]`.
unsafe impl Send for Rows<'_> {}
// SAFETY: Rows is a shared borrow of bytes, as `&[u8]`.
unsafe impl Sync for Rows<'_> {}

/// Rows of equal length, some bytes apart, to be written.
#[derive(Debug)]
pub struct RowsMut<'a> {
    base: *mut u8,
    rows: usize,
    row_bytes: usize,
    stride: usize,
    dtype: DType,
    place: Memory,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: RowsMut is an exclusive borrow of bytes, as `&mut [u8]`.
unsafe impl Send for RowsMut<'_> {}
// SAFETY: RowsMut is an exclusive borrow of bytes, as `&mut [u8]`.
unsafe impl Sync for RowsMut<'_> {}

fn count(op: &'static str, elements: usize, per_row: usize) -> Result<usize> {
    if per_row == 0 || !elements.is_multiple_of(per_row) {
        let detail = format!("{elements} elements are not a whole number of rows of {per_row}");
        return Err(EpError::argument(op, detail));
    }
    Ok(elements / per_row)
}

impl<'a> Rows<'a> {
    /// The rows of a dense matrix `[rows, per_row]`.
    ///
    /// # Errors
    /// When `data` is not a whole number of rows.
    pub fn new<T: Element>(data: &'a [T], per_row: usize) -> Result<Self> {
        let rows = count("Rows::new", data.len(), per_row)?;
        let row_bytes = per_row * size_of::<T>();
        // SAFETY: `data` is `rows` dense rows, borrowed for 'a.
        Ok(unsafe { Self::from_raw(data.as_ptr().cast(), rows, row_bytes, row_bytes, T::DTYPE) })
    }

    /// Rows anywhere in memory.
    ///
    /// # Safety
    /// Row `i` is `row_bytes` initialised bytes at `base + i * stride`, readable and not written by
    /// anyone for `'a`, and aligned for `dtype`.
    pub unsafe fn from_raw(
        base: *const u8,
        rows: usize,
        row_bytes: usize,
        stride: usize,
        dtype: DType,
    ) -> Self {
        let place = Memory::Host;
        Self { base, rows, row_bytes, stride, dtype, place, memory: PhantomData }
    }

    /// Rows in the memory of a GPU. Their bytes can be handed to operations, not looked at here.
    ///
    /// # Safety
    /// Row `i` is `row_bytes` bytes at `base + i * stride` in memory of the GPU `ordinal`, valid for
    /// `'a` and not written by anyone else in the order of the queues they are passed with.
    #[cfg(feature = "cuda")]
    pub unsafe fn from_device(
        ordinal: usize,
        base: u64,
        rows: usize,
        row_bytes: usize,
        stride: usize,
        dtype: DType,
    ) -> Self {
        let (base, place) = (base as *const u8, Memory::Cuda { ordinal });
        Self { base, rows, row_bytes, stride, dtype, place, memory: PhantomData }
    }

    /// Where the rows lie.
    pub fn place(&self) -> Memory {
        self.place
    }

    /// The same rows in other memory: for views of a window, wherever it is.
    pub(crate) fn at(mut self, place: Memory) -> Self {
        self.place = place;
        self
    }

    /// Before bytes are looked at.
    fn on_host(&self) {
        let place = self.place;
        assert!(place == Memory::Host, "the rows are in the memory of a GPU ({place:?})");
    }

    /// The number of rows.
    pub fn len(&self) -> usize {
        self.rows
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Bytes from one row to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The first byte of the first row.
    pub fn as_ptr(&self) -> *const u8 {
        self.base
    }

    /// The bytes of row `i`.
    ///
    /// # Panics
    /// When there is no such row, as indexing a slice does, or the rows are on a GPU.
    pub fn bytes(&self, i: usize) -> &'a [u8] {
        self.on_host();
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: by the contract of `from_raw`; `i` is in range.
        unsafe { std::slice::from_raw_parts(self.base.add(i * self.stride), self.row_bytes) }
    }

    /// The elements of row `i`.
    ///
    /// # Panics
    /// When there is no such row or `T` is not its type.
    pub fn row<T: Element>(&self, i: usize) -> &'a [T] {
        assert_eq!(T::DTYPE, self.dtype, "the rows hold another type");
        let bytes = self.bytes(i);
        // SAFETY: the row holds `T`s (checked), aligned by the contract of `from_raw`; every bit
        // pattern is a value of the sealed Element types.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size_of::<T>()) }
    }

    /// All rows in order.
    pub fn iter<T: Element>(&self) -> impl Iterator<Item = &'a [T]> + use<'a, T> {
        let rows = *self;
        (0..rows.rows).map(move |i| rows.row(i))
    }
}

impl<'a> RowsMut<'a> {
    /// The rows of a dense matrix `[rows, per_row]`.
    ///
    /// # Errors
    /// When `data` is not a whole number of rows.
    pub fn new<T: Element>(data: &'a mut [T], per_row: usize) -> Result<Self> {
        let rows = count("RowsMut::new", data.len(), per_row)?;
        let row_bytes = per_row * size_of::<T>();
        let base = data.as_mut_ptr().cast();
        // SAFETY: `data` is `rows` dense rows, borrowed exclusively for 'a.
        Ok(unsafe { Self::from_raw(base, rows, row_bytes, row_bytes, T::DTYPE) })
    }

    /// Rows anywhere in memory.
    ///
    /// # Safety
    /// Row `i` is `row_bytes` initialised bytes at `base + i * stride`, rows do not overlap, they
    /// are accessible through nothing else for `'a`, and aligned for `dtype`.
    pub unsafe fn from_raw(
        base: *mut u8,
        rows: usize,
        row_bytes: usize,
        stride: usize,
        dtype: DType,
    ) -> Self {
        let place = Memory::Host;
        Self { base, rows, row_bytes, stride, dtype, place, memory: PhantomData }
    }

    /// Rows in the memory of a GPU. Their bytes can be handed to operations, not looked at here.
    ///
    /// # Safety
    /// Row `i` is `row_bytes` bytes at `base + i * stride` in memory of the GPU `ordinal`, valid for
    /// `'a` and accessed by nobody else in the order of the queues they are passed with.
    #[cfg(feature = "cuda")]
    pub unsafe fn from_device(
        ordinal: usize,
        base: u64,
        rows: usize,
        row_bytes: usize,
        stride: usize,
        dtype: DType,
    ) -> Self {
        let (base, place) = (base as *mut u8, Memory::Cuda { ordinal });
        Self { base, rows, row_bytes, stride, dtype, place, memory: PhantomData }
    }

    /// Where the rows lie.
    pub fn place(&self) -> Memory {
        self.place
    }

    /// The same rows in other memory: for views of a window, wherever it is.
    pub(crate) fn at(mut self, place: Memory) -> Self {
        self.place = place;
        self
    }

    /// Before bytes are looked at.
    fn on_host(&self) {
        let place = self.place;
        assert!(place == Memory::Host, "the rows are in the memory of a GPU ({place:?})");
    }

    /// The same rows to be read.
    pub fn as_rows(&self) -> Rows<'_> {
        // SAFETY: the exclusive borrow covers the shared one.
        let rows = unsafe {
            Rows::from_raw(self.base, self.rows, self.row_bytes, self.stride, self.dtype)
        };
        rows.at(self.place)
    }

    /// The number of rows.
    pub fn len(&self) -> usize {
        self.rows
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Bytes from one row to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The first byte of the first row.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.base
    }

    /// The bytes of row `i`.
    ///
    /// # Panics
    /// When there is no such row, or the rows are on a GPU.
    pub fn bytes_mut(&mut self, i: usize) -> &mut [u8] {
        self.on_host();
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: by the contract of `from_raw`; `i` is in range.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(i * self.stride), self.row_bytes) }
    }

    /// The elements of row `i`.
    ///
    /// # Panics
    /// When there is no such row or `T` is not its type.
    pub fn row_mut<T: Element>(&mut self, i: usize) -> &mut [T] {
        assert_eq!(T::DTYPE, self.dtype, "the rows hold another type");
        let bytes = self.bytes_mut(i);
        let elements = bytes.len() / size_of::<T>();
        // SAFETY: as in `Rows::row`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), elements) }
    }

    /// Copies other rows of the same number, length and type over these.
    ///
    /// # Errors
    /// When they differ in number, length or type.
    pub fn copy_from(&mut self, from: Rows<'_>) -> Result<()> {
        let same = from.rows == self.rows && from.row_bytes == self.row_bytes;
        if !same || from.dtype != self.dtype {
            return Err(EpError::argument(
                "copy_from",
                format!(
                    "{} rows of {} bytes ({:?}) do not fit {} rows of {} bytes ({:?})",
                    from.rows, from.row_bytes, from.dtype, self.rows, self.row_bytes, self.dtype
                ),
            ));
        }
        if self.place != Memory::Host || from.place != Memory::Host {
            let detail = "rows on a GPU are copied by its streams";
            return Err(EpError::argument("copy_from", detail));
        }
        for i in 0..self.rows {
            self.bytes_mut(i).copy_from_slice(from.bytes(i));
        }
        Ok(())
    }
}
