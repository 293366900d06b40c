//! Writing and awaiting words in the order of a stream: by operations of the stream itself or, where
//! those do not work, by a kernel of one thread.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use cudarc::driver::sys::CUstream;

use super::driver::{Gpu, MemOp, OP};
use crate::{Result, TransportError};

/// The kernel, for the driver to compile.
const PTX: &std::ffi::CStr = match std::ffi::CStr::from_bytes_with_nul(
    concat!(include_str!("words.ptx"), "\0").as_bytes(),
) {
    Ok(text) => text,
    Err(_) => panic!("the text has a NUL inside"),
};
/// Operations of one launch.
const MOST: usize = 24;

/// `CU_STREAM_MEM_OP_WAIT_VALUE_32`, `CU_STREAM_MEM_OP_WRITE_VALUE_32`,
/// `CU_STREAM_MEM_OP_WRITE_VALUE_64`; `CU_STREAM_WAIT_VALUE_EQ`.
const WAIT: u64 = 1;
const WRITE: u64 = 2;
const WRITE_BOTH: u64 = 5;
const EQUAL: u64 = 1;
/// `CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS`.
const WIDE: c_int = 122;
/// For the kernel 2 and 3 are no words to write but what else it does.
pub(super) const LEAST_MARK: u32 = 4;

impl Gpu {
    /// Whether streams write eight bytes at once.
    pub fn writes_both(&self) -> bool {
        self.attribute(WIDE) != 0
    }
}

impl MemOp {
    /// The value is 0, 1 or a mark.
    pub fn write(address: u64, value: u64) -> Self {
        debug_assert!(value <= 1 || value >= LEAST_MARK.into());
        Self { operation: WRITE, address, value, ..Self::default() }
    }

    /// Sets a word and the one behind it to 0, at once.
    pub fn clear_both(address: u64) -> Self {
        Self { operation: WRITE_BOTH, address, ..Self::default() }
    }

    /// Waits until the word is 1.
    pub fn wait(address: u64) -> Self {
        Self { operation: WAIT, address, value: 1, flags: EQUAL, ..Self::default() }
    }
}

/// What the kernel takes; see `words.ptx`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Params {
    address: [u64; MOST],
    kind: [u32; MOST],
    count: u32,
    reserved: u32,
}
const _: () = assert!(size_of::<Params>() == 296);
const _: () = assert!(std::mem::offset_of!(Params, kind) == 192);
const _: () = assert!(std::mem::offset_of!(Params, count) == 288);

impl Params {
    fn new(ops: &[MemOp]) -> Self {
        let mut params =
            Self { address: [0; MOST], kind: [0; MOST], count: ops.len() as u32, reserved: 0 };
        for (i, op) in ops.iter().enumerate() {
            params.address[i] = op.address;
            params.kind[i] = match op.operation {
                WAIT => 2,
                WRITE_BOTH => 3,
                _ => op.value as u32,
            };
        }
        params
    }
}

/// How words are written and awaited on streams.
#[derive(Debug)]
pub(super) enum Words {
    /// By operations of the stream.
    Stream,
    Kernel(Kernel),
}

/// The kernel of one thread, good for any context of the device.
#[derive(Debug)]
pub(super) struct Kernel {
    gpu: Arc<Gpu>,
    library: *mut c_void,
    kernel: *mut c_void,
}

// SAFETY: handles of the driver, which may be used from any thread and never change.
unsafe impl Send for Kernel {}
// SAFETY: the handles never change, and the driver launches them from any thread.
unsafe impl Sync for Kernel {}

impl Kernel {
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let _current = gpu.current(OP)?;
        let (mut library, null) = (std::ptr::null_mut(), std::ptr::null_mut::<c_void>());
        // SAFETY: `library` is valid for the call; the text ends with a NUL; there are no options.
        let code = unsafe {
            (gpu.driver.library_load)(
                &mut library,
                PTX.as_ptr().cast(),
                null.cast(),
                null.cast(),
                0,
                null.cast(),
                null.cast(),
                0,
            )
        };
        gpu.check(OP, "cuLibraryLoadData", code)?;
        let mut loaded = Self { gpu: gpu.clone(), library, kernel: std::ptr::null_mut() };
        // SAFETY: the library is loaded, `kernel` is valid for the call.
        let code = unsafe {
            (gpu.driver.library_kernel)(&mut loaded.kernel, library, c"ep_words".as_ptr())
        };
        gpu.check(OP, "cuLibraryGetKernel", code)?;
        Ok(loaded)
    }

    fn launch(&self, op: &'static str, stream: CUstream, ops: &[MemOp]) -> Result<()> {
        let mut params = Params::new(ops);
        let mut arguments = [(&raw mut params).cast::<c_void>()];
        let (kernel, arguments) = (self.kernel, arguments.as_mut_ptr());
        // SAFETY: the kernel takes this struct, which the driver copies; the words it names are
        // page-locked for as long as the link lives, and the stream is live. A kernel handle stands
        // for its function in the stream's context.
        let code = unsafe {
            (self.gpu.driver.launch)(
                kernel,
                1,
                1,
                1,
                1,
                1,
                1,
                0,
                stream,
                arguments,
                std::ptr::null_mut(),
            )
        };
        self.gpu.check(op, "cuLaunchKernel", code)
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        let Ok(_current) = self.gpu.current("close") else { return };
        // SAFETY: loaded once by `load`; its launches have ended, by the contract of a link.
        unsafe { (self.gpu.driver.library_unload)(self.library) };
    }
}

impl Words {
    /// Raises a word, after everything before on the stream.
    pub fn raise(&self, op: &'static str, gpu: &Gpu, stream: CUstream, at: u64) -> Result<()> {
        match self {
            // SAFETY: the word is page-locked while its link lives. Without a flag the write comes
            // after a fence for everything before it on the stream.
            Self::Stream => gpu.check(op, "cuStreamWriteValue32", unsafe {
                (gpu.driver.write_value)(stream, at, 1, 0)
            }),
            Self::Kernel(kernel) => kernel.launch(op, stream, &[MemOp::write(at, 1)]),
        }
    }

    /// Writes a mark, after everything before on the stream.
    #[cfg(feature = "rdma")]
    pub fn write(
        &self,
        op: &'static str,
        gpu: &Gpu,
        stream: CUstream,
        (at, mark): (u64, u32),
    ) -> Result<()> {
        match self {
            // SAFETY: as `raise`.
            Self::Stream => gpu.check(op, "cuStreamWriteValue32", unsafe {
                (gpu.driver.write_value)(stream, at, mark, 0)
            }),
            Self::Kernel(kernel) => kernel.launch(op, stream, &[MemOp::write(at, mark.into())]),
        }
    }

    /// Submits operations, in order.
    pub fn submit(
        &self,
        op: &'static str,
        gpu: &Gpu,
        stream: CUstream,
        ops: &mut [MemOp],
    ) -> Result<()> {
        match self {
            Self::Stream => {
                let count = ops.len() as u32;
                // SAFETY: the words are page-locked while their link lives, and the stream is live;
                // the driver copies the operations.
                let code = unsafe { (gpu.driver.batch)(stream, count, ops.as_mut_ptr(), 0) };
                gpu.check(op, "cuStreamBatchMemOp", code)
            }
            Self::Kernel(kernel) => {
                ops.chunks(MOST).try_for_each(|ops| kernel.launch(op, stream, ops))
            }
        }
    }
}

/// How a link raises and awaits flags on streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Signals {
    /// By operations of the stream where a trial shows that they reach every rank, else by a kernel.
    #[default]
    Auto,
    /// By operations of the stream.
    Stream,
    /// By a kernel of one thread.
    Kernel,
}

/// How ranks that are processes hand their windows to each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Handles {
    /// Fabric handles where all ranks' windows have one and can be mapped by it, else descriptors.
    #[default]
    Auto,
    /// Descriptors over Unix sockets.
    Fd,
    /// Fabric handles.
    Fabric,
}

/// What a variable says, in the words of its choices.
pub(super) fn chosen<T: Copy>(
    variable: &'static str,
    choices: &[(&str, T)],
    text: Option<&str>,
) -> Result<Option<T>> {
    let Some(text) = text.filter(|text| !text.is_empty()) else { return Ok(None) };
    match choices.iter().find(|(name, _)| *name == text) {
        Some(&(_, choice)) => Ok(Some(choice)),
        None => {
            let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
            let detail = format!("{variable} is {text:?}; it may be one of {names:?}");
            Err(TransportError::Argument { op: OP, detail })
        }
    }
}

impl Signals {
    const CHOICES: [(&str, Self); 3] =
        [("auto", Self::Auto), ("stream", Self::Stream), ("kernel", Self::Kernel)];

    /// What the variable says, else what was asked for.
    pub(super) fn or_variable(self) -> Result<Self> {
        const VARIABLE: &str = "EP_NVLINK_SIGNALS";
        let text = std::env::var(VARIABLE).ok();
        Ok(chosen(VARIABLE, &Self::CHOICES, text.as_deref())?.unwrap_or(self))
    }
}

impl Handles {
    const CHOICES: [(&str, Self); 3] =
        [("auto", Self::Auto), ("fd", Self::Fd), ("fabric", Self::Fabric)];

    /// What the variable says, else what was asked for.
    pub(super) fn or_variable(self) -> Result<Self> {
        const VARIABLE: &str = "EP_NVLINK_HANDLES";
        let text = std::env::var(VARIABLE).ok();
        Ok(chosen(VARIABLE, &Self::CHOICES, text.as_deref())?.unwrap_or(self))
    }

    /// Bits of `CUmemAllocationHandleType` to make memory with.
    pub(super) fn kinds(self) -> c_int {
        match self {
            Self::Auto => POSIX_FD | FABRIC,
            Self::Fd => POSIX_FD,
            Self::Fabric => FABRIC,
        }
    }
}

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`, `CU_MEM_HANDLE_TYPE_FABRIC`.
pub(super) const POSIX_FD: c_int = 1;
pub(super) const FABRIC: c_int = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_become_what_the_kernel_takes() {
        let ops = [MemOp::write(64, 1), MemOp::wait(8), MemOp::write(12, 0), MemOp::clear_both(8)];
        let params = Params::new(&ops);
        assert_eq!((params.count, &params.address[..4]), (4, &[64, 8, 12, 8][..]));
        assert_eq!(params.kind[..4], [1, 2, 0, 3]);
        let marks = super::super::watchdog::Waits::new(1, 0);
        let mark = marks.mark();
        assert!(Params::new(&[MemOp::write(4, mark.into())]).kind[0] > 3, "a mark that waits");
        assert!(PTX.to_str().unwrap().contains(".param .align 8 .b8 ops[296]"));
    }

    #[test]
    fn variables_choose_or_are_refused() {
        let signals = |text| chosen("V", &Signals::CHOICES, text);
        assert_eq!(signals(None).unwrap(), None);
        assert_eq!(signals(Some("")).unwrap(), None);
        assert_eq!(signals(Some("kernel")).unwrap(), Some(Signals::Kernel));
        let e = signals(Some("kernels")).unwrap_err().to_string();
        assert!(e.contains("V is \"kernels\"") && e.contains("stream"), "{e}");
        let handles = chosen("V", &Handles::CHOICES, Some("fabric")).unwrap();
        assert_eq!(handles.map(Handles::kinds), Some(8));
        assert_eq!(Handles::Auto.kinds(), 9);
    }
}
