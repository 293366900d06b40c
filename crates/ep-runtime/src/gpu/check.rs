//! Where callers' memory is.

use ep_kernels::cuda::PointerPlace;

use crate::{EpError, Result};

use super::Gpu;

impl Gpu {
    /// That `address` is in this GPU's memory and aligned as bulk copies need it.
    pub(super) fn check_address(
        &self,
        op: &'static str,
        what: &str,
        address: u64,
        align: u64,
    ) -> Result<()> {
        if !address.is_multiple_of(align) {
            let detail = format!("{what} are at {address:#x}; a multiple of {align} is needed");
            return Err(EpError::argument(op, detail));
        }
        match self.machine.place_of(address)? {
            PointerPlace::Device(ordinal) if ordinal == self.ordinal => Ok(()),
            other => {
                let detail = format!(
                    "{what} are in {other:?} memory, the layer works on GPU {}",
                    self.ordinal
                );
                Err(EpError::argument(op, detail))
            }
        }
    }

    /// As [`Gpu::check_address`], for rows that are moved by bulk copies.
    pub(super) fn check_rows(
        &self,
        op: &'static str,
        what: &str,
        (base, stride, rows): (u64, usize, usize),
        align: u64,
    ) -> Result<()> {
        if rows == 0 {
            return Ok(());
        }
        self.check_address(op, what, base, align)?;
        match rows == 1 || (stride as u64).is_multiple_of(align) {
            true => Ok(()),
            false => {
                let detail =
                    format!("{what} are {stride} bytes apart; a multiple of {align} is needed");
                Err(EpError::argument(op, detail))
            }
        }
    }
}
