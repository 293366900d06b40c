//! The account of a device's SMs.

use std::fmt;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::order::SubmitOrder;
use crate::{EpError, Result};

const OP: &str = "SM lease";
/// SMs that compute keeps whatever is leased.
const COMPUTE: u32 = 1;

/// The SMs of one device, as this process has given them to communication. Clones are the same
/// account.
///
/// ```
/// use ep_runtime::sched::SmBudget;
///
/// let budget = SmBudget::of("GPU-11111111-2222-3333-4444-555555555555", 132)?;
/// let lease = budget.lease("my own copies", 16)?;
/// assert_eq!(budget.free(), 115); // compute keeps one
/// let error = budget.lease("a layer", 120).unwrap_err();
/// assert!(error.to_string().contains("my own copies has 16"));
/// drop(lease);
/// assert!(budget.lease("a layer", 120).is_ok());
/// # Ok::<(), ep_runtime::EpError>(())
/// ```
#[derive(Clone)]
pub struct SmBudget {
    account: Arc<Account>,
}

struct Account {
    device: String,
    sms: u32,
    leases: Mutex<Leases>,
    order: OnceLock<SubmitOrder>,
}

#[derive(Default)]
struct Leases {
    held: Vec<Entry>,
    next: u64,
}

struct Entry {
    id: u64,
    holder: String,
    sms: u32,
}

impl Leases {
    fn total(&self) -> u32 {
        self.held.iter().map(|entry| entry.sms).sum()
    }
}

impl SmBudget {
    /// The account of a device, the same for all of this process: `uuid` as NVML writes it, and how
    /// many SMs the device has.
    ///
    /// # Errors
    /// No SMs, or another number than the device is known with.
    pub fn of(uuid: &str, sms: u32) -> Result<Self> {
        static ALL: Mutex<Vec<Weak<Account>>> = Mutex::new(Vec::new());
        let mut all = ALL.lock();
        all.retain(|account| account.strong_count() > 0);
        let known = all.iter().filter_map(Weak::upgrade).find(|account| account.device == uuid);
        match known {
            Some(account) if account.sms != sms => {
                let known = account.sms;
                Err(EpError::argument(OP, format!("{uuid} with {sms} SMs; it has {known}")))
            }
            Some(account) => Ok(Self { account }),
            None => {
                let new = Self::private(uuid, sms)?;
                all.push(Arc::downgrade(&new.account));
                Ok(new)
            }
        }
    }

    /// An account that nobody else finds.
    pub(crate) fn private(device: &str, sms: u32) -> Result<Self> {
        if sms == 0 {
            return Err(EpError::argument(OP, format!("{device} with no SMs")));
        }
        let device = device.to_owned();
        let account = Account { device, sms, leases: Mutex::default(), order: OnceLock::new() };
        Ok(Self { account: Arc::new(account) })
    }

    /// The device.
    pub fn device(&self) -> &str {
        &self.account.device
    }

    /// SMs of the device.
    pub fn sms(&self) -> u32 {
        self.account.sms
    }

    /// SMs that are leased.
    pub fn leased(&self) -> u32 {
        self.account.leases.lock().total()
    }

    /// SMs that can be leased yet: compute keeps one.
    pub fn free(&self) -> u32 {
        self.sms().saturating_sub(COMPUTE + self.leased())
    }

    /// SMs that are not leased, for compute.
    pub fn compute_sms(&self) -> u32 {
        self.sms() - self.leased()
    }

    /// Who has how many, in the order in which they were leased.
    pub fn holders(&self) -> Vec<(String, u32)> {
        let leases = self.account.leases.lock();
        leases.held.iter().map(|entry| (entry.holder.clone(), entry.sms)).collect()
    }

    /// Takes SMs on behalf of `holder`, whom errors of others name. Never waits.
    ///
    /// # Errors
    /// [`EpError::SmsTaken`] naming all holders where fewer are free; no SMs asked for.
    pub fn lease(&self, holder: &str, sms: u32) -> Result<SmLease> {
        if sms == 0 {
            return Err(EpError::argument(OP, "a lease of no SMs"));
        }
        let mut leases = self.account.leases.lock();
        self.room(&leases, sms, sms)?;
        let id = leases.next;
        leases.next += 1;
        leases.held.push(Entry { id, holder: holder.to_owned(), sms });
        drop(leases);
        Ok(SmLease { held: Arc::new(Held { account: self.account.clone(), id }) })
    }

    /// The order of operations on the device: see the [module](super).
    pub fn order(&self) -> &SubmitOrder {
        self.account.order.get_or_init(SubmitOrder::new)
    }

    /// Fails unless `more` SMs are free.
    fn room(&self, leases: &Leases, asked: u32, more: u32) -> Result<()> {
        let free = self.sms().saturating_sub(COMPUTE + leases.total());
        if more <= free {
            return Ok(());
        }
        let holder = |entry: &Entry| format!("{} has {}", entry.holder, entry.sms);
        let holders: Vec<String> = leases.held.iter().map(holder).collect();
        let device = self.account.device.clone();
        let sms = self.sms();
        let holders = match holders.is_empty() {
            true => "nobody has any, compute keeps 1".to_owned(),
            false => holders.join(", "),
        };
        Err(EpError::SmsTaken { op: OP, device, asked, free, sms, holders })
    }
}

impl fmt::Debug for SmBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SmBudget")
            .field("device", &self.device())
            .field("sms", &self.sms())
            .field("holders", &self.holders())
            .finish()
    }
}

/// SMs that somebody has of a device's. They are free again once the last clone is dropped.
#[derive(Clone)]
pub struct SmLease {
    held: Arc<Held>,
}

struct Held {
    account: Arc<Account>,
    id: u64,
}

impl SmLease {
    /// How many.
    pub fn sms(&self) -> u32 {
        let leases = self.held.account.leases.lock();
        leases.held.iter().find(|entry| entry.id == self.held.id).map_or(0, |entry| entry.sms)
    }

    /// The account they are of.
    pub fn budget(&self) -> SmBudget {
        SmBudget { account: self.held.account.clone() }
    }

    /// Takes what a device rounded up too.
    #[cfg(any(test, feature = "cuda"))]
    pub(crate) fn grow(&self, sms: u32) -> Result<()> {
        let budget = self.budget();
        let mut leases = self.held.account.leases.lock();
        let Some(at) = leases.held.iter().position(|entry| entry.id == self.held.id) else {
            return Ok(());
        };
        let more = sms.saturating_sub(leases.held[at].sms);
        budget.room(&leases, sms, more)?;
        leases.held[at].sms += more;
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.account.leases.lock().held.retain(|entry| entry.id != self.id);
    }
}

impl fmt::Debug for SmLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SmLease")
            .field("device", &self.held.account.device)
            .field("sms", &self.sms())
            .finish()
    }
}
