//! Asking NVML, which is opened at run time.

use std::{ffi::OsStr, mem::ManuallyDrop};

use nvml_wrapper::enum_wrappers::device::{P2pCapabilitiesIndex, P2pStatus as NvmlP2p};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings as sys;

use crate::nvml_record::{
    Answer, DeviceFacts, DeviceRecord, FabricRecord, LinkRecord, NvmlRecord, P2pRecord, P2pStatus,
    Refusal,
};
use crate::{PciAddress, TopologyError};

/// The library that the NVIDIA driver installs.
pub const NVML_LIBRARY: &str = "libnvidia-ml.so.1";

/// Indices, MIG devices and mask words asked for, whatever NVML claims there are.
const MAX_DEVICES: u32 = 256;
const AFFINITY_WORDS: usize = 64;

type Asked<T> = Result<T, NvmlError>;

/// Asks the NVML library at `library` everything this crate wants to know.
///
/// # Errors
/// [`TopologyError::Library`] if the library is missing, too old or refuses to start, with the
/// remedy. What single calls refuse stands in the record.
pub fn read_nvml(library: &str) -> Result<NvmlRecord, TopologyError> {
    let opened = Nvml::builder().lib_path(OsStr::new(library)).init();
    let nvml = opened.map_err(|error| unavailable(library, &error))?;
    if nvml.lib().nvmlShutdown.is_err() {
        // Dropping the wrapper would panic on the symbol that is not there.
        let _leaked = ManuallyDrop::new(nvml);
        return Err(unavailable(library, &NvmlError::FailedToLoadSymbol("nvmlShutdown".into())));
    }
    let count = nvml.device_count().map_err(|error| unavailable(library, &error))?;
    let devices: Vec<(u32, Asked<Device<'_>>)> =
        (0..count.min(MAX_DEVICES)).map(|index| (index, nvml.device_by_index(index))).collect();
    let record = |(index, device): &(u32, Asked<Device<'_>>)| DeviceRecord {
        index: *index,
        facts: match device {
            Ok(device) => Answer::Value(facts(&nvml, device)),
            Err(error) => Answer::Refused(refusal(error)),
        },
    };
    Ok(NvmlRecord {
        driver: answer(nvml.sys_driver_version()),
        library: answer(nvml.sys_nvml_version()),
        cuda: answer(nvml.sys_cuda_driver_version()),
        devices: devices.iter().map(record).collect(),
        p2p: p2p(&devices),
    })
}

/// The error for a library that cannot be used, with what helps.
fn unavailable(library: &str, error: &NvmlError) -> TopologyError {
    let (detail, remedy) = match error {
        NvmlError::LibloadingError(why) => (
            format!("cannot be opened ({why})"),
            "it comes with the NVIDIA driver: install one, or in a container pass the `utility` \
             driver capability",
        ),
        NvmlError::FailedToLoadSymbol(symbol) => {
            (format!("is too old or is not NVML ({symbol})"), "install a newer NVIDIA driver")
        }
        NvmlError::DriverNotLoaded => (
            "the NVIDIA kernel driver is not loaded".to_owned(),
            "load it (modprobe nvidia), or give the container access to the GPUs",
        ),
        NvmlError::LibRmVersionMismatch => (
            "its version differs from the loaded kernel driver's".to_owned(),
            "reboot or reload the driver after an update; in a container use the host's library",
        ),
        NvmlError::NoPermission => (
            "no permission to talk to the driver".to_owned(),
            "give this user or container access to /dev/nvidiactl",
        ),
        other => (other.to_string(), "run nvidia-smi: it should show the same fault"),
    };
    TopologyError::Library {
        op: "open NVML",
        library: library.to_owned(),
        detail,
        remedy: remedy.to_owned(),
    }
}

fn refusal(error: &NvmlError) -> Refusal {
    match error {
        NvmlError::NotSupported => Refusal::Unsupported,
        NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound => Refusal::MissingSymbol,
        NvmlError::NoPermission => Refusal::NoPermission,
        NvmlError::GpuLost => Refusal::GpuLost,
        NvmlError::ResetRequired => Refusal::ResetRequired,
        other => Refusal::Other(other.to_string()),
    }
}

fn answer<T>(asked: Asked<T>) -> Answer<T> {
    match asked {
        Ok(value) => Answer::Value(value),
        Err(error) => Answer::Refused(refusal(&error)),
    }
}

fn facts(nvml: &Nvml, device: &Device<'_>) -> DeviceFacts {
    let mig = device.mig_mode();
    let mig_devices = match &mig {
        Ok(mode) if mode.current == 1 => mig_devices(device),
        _ => Vec::new(),
    };
    DeviceFacts {
        uuid: answer(device.uuid()),
        name: answer(device.name()),
        pci: answer(device.pci_info().map(|p| p.bus_id)),
        memory_bytes: answer(device.memory_info().map(|m| m.total)),
        numa_node: answer(device.numa_node_id()),
        // A C long has 64 bits on every Linux this builds for that has an NVIDIA driver.
        cpu_affinity: answer(device.cpu_affinity(AFFINITY_WORDS).map(trimmed)),
        mig_mode: answer(mig.map(|m| (m.current, m.pending))),
        mig_devices,
        links: links(nvml, device),
        fabric: answer(fabric(nvml, device)),
    }
}

fn trimmed(words: Vec<std::ffi::c_ulong>) -> Vec<u64> {
    let used = words.iter().rposition(|w| *w != 0).map_or(0, |last| last + 1);
    words.into_iter().take(used).collect()
}

fn mig_devices(device: &Device<'_>) -> Vec<Answer<String>> {
    // The count is of slots; empty ones answer "not found".
    let slots = device.mig_device_count().unwrap_or(0).min(MAX_DEVICES);
    let opened = (0..slots).map(|slot| device.mig_device_by_index(slot));
    let there = opened.filter(|d| !matches!(d, Err(NvmlError::NotFound)));
    there.map(|d| answer(d.and_then(|d| d.uuid()))).collect()
}

fn links(nvml: &Nvml, device: &Device<'_>) -> Vec<LinkRecord> {
    let link = |index: u32| {
        let link = device.link_wrapper_for(index);
        let active = answer(link.is_active());
        // No such link, or no NVLink at all.
        if matches!(active, Answer::Refused(Refusal::Unsupported | Refusal::Other(_))) {
            return None;
        }
        Some(LinkRecord {
            index,
            active,
            version: answer(link.version()),
            speed: answer(link_speed(nvml, device, index)),
            remote_kind: answer(remote_kind(nvml, device, index)),
            remote_pci: answer(link.remote_pci_info().map(|p| pci(&p))),
        })
    };
    (0..sys::NVML_NVLINK_MAX_LINKS).filter_map(link).collect()
}

fn pci(info: &nvml_wrapper::struct_wrappers::device::PciInfo) -> String {
    match info.bus_id.parse::<PciAddress>() {
        Ok(_) => info.bus_id.clone(),
        // Some drivers fill the numbers only.
        Err(_) => format!("{:08x}:{:02x}:{:02x}.0", info.domain, info.bus, info.device),
    }
}

/// What a raw NVML status and a value written beside it mean.
fn checked<T>(status: sys::nvmlReturn_t, value: T) -> Asked<T> {
    nvml_wrapper::error::nvml_try(status).map(|()| value)
}

fn missing<T, E: std::fmt::Display>(symbol: &Result<T, E>) -> Asked<&T> {
    symbol.as_ref().map_err(|e| NvmlError::FailedToLoadSymbol(e.to_string()))
}

/// Kind of a link's other end; the safe wrapper returns "unknown" whatever NVML answers.
fn remote_kind(nvml: &Nvml, device: &Device<'_>, link: u32) -> Asked<u32> {
    let call = missing(&nvml.lib().nvmlDeviceGetNvLinkRemoteDeviceType)?;
    let mut kind = sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
    // SAFETY: the handle belongs to `device`, which borrows the initialised library, and `kind` is
    // a live location of the type the call writes.
    let status = unsafe { call(device.handle(), link, &mut kind) };
    checked(status, kind)
}

/// Speed of one link; the safe wrapper cannot name a link (`scopeId`).
fn link_speed(nvml: &Nvml, device: &Device<'_>, link: u32) -> Asked<u64> {
    let call = missing(&nvml.lib().nvmlDeviceGetFieldValues)?;
    let mut field = sys::nvmlFieldValue_t {
        fieldId: sys::field_id::NVML_FI_DEV_NVLINK_GET_SPEED,
        scopeId: link,
        timestamp: 0,
        latencyUsec: 0,
        valueType: sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT,
        nvmlReturn: sys::nvmlReturn_enum_NVML_SUCCESS,
        value: sys::nvmlValue_t { ullVal: 0 },
    };
    // SAFETY: the handle belongs to `device`, which borrows the initialised library; one field is
    // passed and one is announced.
    let status = unsafe { call(device.handle(), 1, &mut field) };
    checked(status, ())?;
    checked(field.nvmlReturn, ())?;
    // SAFETY: all members are plain numbers and the union was zeroed in its full width, so the
    // 32-bit member is initialised whichever one NVML wrote.
    let speed = unsafe { field.value.uiVal };
    Ok(u64::from(speed))
}

/// Fabric registration; the safe wrapper has no such call.
fn fabric(nvml: &Nvml, device: &Device<'_>) -> Asked<FabricRecord> {
    let call = missing(&nvml.lib().nvmlDeviceGetGpuFabricInfo)?;
    let mut info =
        sys::nvmlGpuFabricInfo_t { clusterUuid: [0; 16], status: 0, cliqueId: 0, state: 0 };
    // SAFETY: the handle belongs to `device`, which borrows the initialised library, and `info` is
    // a live location of the type the call writes.
    let status = unsafe { call(device.handle(), &mut info) };
    checked(status, ())?;
    Ok(FabricRecord {
        state: u32::from(info.state),
        status: info.status,
        cluster: info.clusterUuid,
        clique: info.cliqueId,
    })
}

fn p2p(devices: &[(u32, Asked<Device<'_>>)]) -> Vec<P2pRecord> {
    let opened = || devices.iter().filter_map(|(i, d)| d.as_ref().ok().map(|d| (*i, d)));
    let mut pairs = Vec::new();
    for (from, a) in opened() {
        for (to, b) in opened().filter(|(to, _)| *to != from) {
            let status = |what| answer(a.p2p_status(b, what).map(p2p_status));
            pairs.push(P2pRecord {
                from,
                to,
                read: status(P2pCapabilitiesIndex::Read),
                write: status(P2pCapabilitiesIndex::Write),
                nvlink: status(P2pCapabilitiesIndex::NvLink),
                atomics: status(P2pCapabilitiesIndex::Atomics),
            });
        }
    }
    pairs
}

fn p2p_status(status: NvmlP2p) -> P2pStatus {
    match status {
        NvmlP2p::Ok => P2pStatus::Ok,
        NvmlP2p::ChipsetNotSupported => P2pStatus::Chipset,
        NvmlP2p::GpuNotSupported => P2pStatus::Gpu,
        NvmlP2p::IohTopologyNotSupported => P2pStatus::Topology,
        NvmlP2p::DisabledByRegkey => P2pStatus::Disabled,
        NvmlP2p::NotSupported => P2pStatus::Unsupported,
        NvmlP2p::Unknown => P2pStatus::Unknown,
    }
}
