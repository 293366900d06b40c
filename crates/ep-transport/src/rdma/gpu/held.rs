//! What a window holds of a GPU's driver, and how that is given back.

use std::sync::Arc;

use super::{Driver, Gpu};
use crate::host_link::Region;

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
