//! What a window holds of a GPU's driver, and how that is given back.

use std::ops::Deref;
use std::sync::Arc;

use super::{Driver, Gpu};
use crate::host_link::Region;
use crate::nvlink::drop_when_quiet;

/// Something that is given back later, by a thread of its own: freeing and unlocking may wait for
/// whatever was submitted to the GPU, and who drops a link may be the one that others' streams wait for.
#[derive(Debug)]
pub(super) struct Buried<T: Send + 'static>(Option<T>);

impl<T: Send + 'static> Buried<T> {
    pub(super) fn new(value: T) -> Self {
        Self(Some(value))
    }
}

impl<T: Send + 'static> Deref for Buried<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("there until it is dropped")
    }
}

impl<T: Send + 'static> Drop for Buried<T> {
    fn drop(&mut self) {
        if let Some(value) = self.0.take() {
            drop_when_quiet(value);
        }
    }
}

/// Memory of a GPU.
#[derive(Debug)]
pub(super) struct Allocation {
    pub gpu: Arc<Gpu>,
    pub raw: u64,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let raw = self.raw;
        // SAFETY: allocated once, and used by nobody who does not hold this value.
        let freed =
            self.gpu.with(|driver| driver.check("cuMemFree", unsafe { (driver.free)(raw) }));
        if let Err(error) = freed {
            tracing::warn!(%error, "a window's memory is not given back");
        }
    }
}

/// Pages of the host that a GPU has mapped.
#[derive(Debug)]
pub(super) struct Locked {
    pub gpu: Arc<Gpu>,
    pub region: Arc<dyn Region>,
}

impl Drop for Locked {
    fn drop(&mut self) {
        let at = self.region.base().as_ptr().cast();
        // SAFETY: registered once by `GpuWindow::on_host`; the region is mapped still.
        let code = |driver: &Driver| unsafe { (driver.host_unregister)(at) };
        let freed = self.gpu.with(|driver| driver.check("cuMemHostUnregister", code(driver)));
        if let Err(error) = freed {
            tracing::warn!(%error, "pages of a window stay locked");
        }
    }
}
