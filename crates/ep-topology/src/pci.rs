//! PCI addresses.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::TopologyError;

/// A PCI function, `domain:bus:device.function`, all hexadecimal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PciAddress {
    /// Domain (segment); 16 bits on most machines, more behind some host bridges.
    pub domain: u32,
    /// Bus.
    pub bus: u8,
    /// Device, below 32.
    pub device: u8,
    /// Function, below 8.
    pub function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> Self {
        address.to_string()
    }
}

impl TryFrom<String> for PciAddress {
    type Error = TopologyError;

    fn try_from(text: String) -> Result<Self, TopologyError> {
        text.parse()
    }
}

impl FromStr for PciAddress {
    type Err = TopologyError;

    /// Reads `0000:1b:00.0`, NVML's `00000000:1B:00.0` and the short `1b:00.0`; the function may
    /// be left out.
    fn from_str(text: &str) -> Result<Self, TopologyError> {
        parse(text).ok_or_else(|| TopologyError::Format {
            op: "PCI address",
            detail: format!("{text:?} is not domain:bus:device.function"),
        })
    }
}

fn parse(text: &str) -> Option<PciAddress> {
    let (rest, function) = text.split_once('.').unwrap_or((text, "0"));
    let mut parts = rest.rsplit(':');
    let device = hex(parts.next()?, 0x1f)?;
    let bus = hex(parts.next()?, 0xff)?;
    let domain = parts.next().map_or(Some(0), |d| hex(d, u32::MAX))?;
    let function = hex(function, 7)?;
    let end = parts.next().is_none();
    // The bounds above keep every cast exact.
    end.then_some(PciAddress {
        domain,
        bus: bus as u8,
        device: device as u8,
        function: function as u8,
    })
}

fn hex(text: &str, max: u32) -> Option<u32> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_hexdigit());
    let value = digits.then(|| u32::from_str_radix(text, 16).ok()).flatten()?;
    (value <= max).then_some(value)
}
