//! Green contexts: parts of a device's SMs.

use std::sync::Arc;

use super::code::{Code, Result};
use super::context::{self, Context, SMS};
use super::table::{Handle, Table, new_handle};

/// `CU_DEV_RESOURCE_TYPE_SM`, `CU_GREEN_CTX_DEFAULT_STREAM`; parts of compute capability 9.0.
const TYPE_SM: u32 = 1;
const DEFAULT_STREAM: u32 = 1;
const UNIT: u32 = 8;
/// `CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING`, and what parts may be then;
/// `CU_DEV_SM_RESOURCE_SPLIT_MAX_POTENTIAL_CLUSTER_SIZE`.
const IGNORE: u32 = 1;
const FINE: u32 = 2;
const MAX_CLUSTER: u32 = 2;
/// Marks resources that this driver described.
const MAGIC: u32 = 0x6570_676d;

/// `CUdevResource` of SMs.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub struct Resource {
    kind: u32,
    magic: u32,
    device: u32,
    first: u32,
    internal: [u8; 80],
    pub count: u32,
    min_partition: u32,
    alignment: u32,
    rest: [u8; 36],
}
const _: () = assert!(size_of::<Resource>() == 144);
const _: () = assert!(std::mem::offset_of!(Resource, count) == 96);

/// A green context.
pub struct Green {
    resource: Resource,
    pub context: Arc<Context>,
}

/// The driver has no way to give one back.
static DESCRIPTIONS: Table<Resource> = Table::new();
static GREENS: Table<Green> = Table::new();

impl Resource {
    fn new(device: u32, first: u32, count: u32) -> Self {
        Self {
            kind: TYPE_SM,
            magic: MAGIC,
            device,
            first,
            internal: [0; 80],
            count,
            min_partition: UNIT,
            alignment: UNIT,
            rest: [0; 36],
        }
    }

    /// No SMs.
    pub fn nothing() -> Self {
        Self { kind: 0, ..Self::new(0, 0, 0) }
    }

    fn check(&self) -> Result<()> {
        let inside = self.first.checked_add(self.count).is_some_and(|end| end <= SMS);
        match self.kind == TYPE_SM && self.magic == MAGIC && self.count > 0 && inside {
            true => Ok(()),
            false => Err(Code::INVALID_RESOURCE_TYPE),
        }
    }
}

/// All SMs of a device.
pub fn of_device(device: usize, kind: u32) -> Result<Resource> {
    match kind {
        TYPE_SM => Ok(Resource::new(device as u32, 0, SMS)),
        _ => Err(Code::INVALID_RESOURCE_TYPE),
    }
}

/// Up to `groups` parts of at least `least` SMs, and what is left.
pub fn split(
    from: &Resource,
    groups: u32,
    flags: u32,
    least: u32,
) -> Result<(Vec<Resource>, Option<Resource>)> {
    from.check()?;
    if flags & !(IGNORE | MAX_CLUSTER) != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let unit = match flags {
        IGNORE => FINE,
        MAX_CLUSTER => 2 * UNIT,
        _ => UNIT,
    };
    let each = least.max(1).next_multiple_of(unit);
    let made = groups.min(from.count / each);
    if made == 0 {
        return Err(Code::INVALID_RESOURCE_CONFIGURATION);
    }
    let part = |i| Resource::new(from.device, from.first + i * each, each);
    let left = from.count - made * each;
    let rest = (left > 0).then(|| Resource::new(from.device, from.first + made * each, left));
    Ok(((0..made).map(part).collect(), rest))
}

pub fn describe(resources: &[Resource]) -> Result<Handle> {
    let [resource] = resources else { return Err(Code::INVALID_RESOURCE_CONFIGURATION) };
    resource.check()?;
    let handle = new_handle();
    DESCRIPTIONS.insert(handle, Arc::new(*resource));
    Ok(handle)
}

pub fn create(description: Handle, device: usize, flags: u32) -> Result<Handle> {
    let resource = *DESCRIPTIONS.get(description)?;
    if flags != DEFAULT_STREAM || resource.device as usize != device {
        return Err(Code::INVALID_VALUE);
    }
    let handle = new_handle();
    let sms = (resource.first..resource.first + resource.count).collect();
    let context = Context::part(device, sms, handle)?;
    GREENS.insert(handle, Arc::new(Green { resource, context }));
    Ok(handle)
}

pub fn get(green: Handle) -> Result<Arc<Green>> {
    GREENS.get(green).map_err(|_| Code::INVALID_CONTEXT)
}

pub fn destroy(green: Handle) -> Result<()> {
    let green = GREENS.remove(green).map_err(|_| Code::INVALID_CONTEXT)?;
    context::destroy(green.context.handle)
}

impl Green {
    pub fn resource(&self, kind: u32) -> Result<Resource> {
        if kind == TYPE_SM { Ok(self.resource) } else { Err(Code::INVALID_RESOURCE_TYPE) }
    }
}
