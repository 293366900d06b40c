//! The clock of a GPU's SMs, as NVML says it.

use std::ffi::OsStr;
use std::mem::ManuallyDrop;
use std::sync::OnceLock;

use ep_kernels::cuda::Device;
use ep_topology::NVML_LIBRARY;
use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::Clock;

/// Never shut down: an NVML without that function would end the program.
static NVML: OnceLock<Option<ManuallyDrop<Nvml>>> = OnceLock::new();

/// MHz now; `None` where NVML or its answer is missing.
pub fn sm_mhz(device: &Device) -> Option<f64> {
    let open = || Nvml::builder().lib_path(OsStr::new(NVML_LIBRARY)).init().ok();
    let nvml = NVML.get_or_init(|| open().map(ManuallyDrop::new)).as_ref()?;
    let device = nvml.device_by_uuid(device.properties().uuid_text()).ok()?;
    device.clock_info(Clock::SM).ok().map(f64::from)
}
