//! What handles stand for.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::RwLock;

use super::code::{Code, Result};

/// Handles are numbers, never reused, of all kinds in one row: a stale handle, or one of another kind, is
/// known as such.
pub type Handle = usize;

/// A new handle. None is null, or one of the driver's own small numbers for streams.
pub fn new_handle() -> Handle {
    static NEXT: AtomicUsize = AtomicUsize::new(0x0e00_0000);
    NEXT.fetch_add(16, Ordering::Relaxed)
}

/// All live things of one kind.
pub struct Table<T>(RwLock<Option<HashMap<Handle, Arc<T>>>>);

impl<T> Table<T> {
    pub const fn new() -> Self {
        Self(RwLock::new(None))
    }

    pub fn insert(&self, handle: Handle, value: Arc<T>) {
        self.0.write().get_or_insert_default().insert(handle, value);
    }

    pub fn get(&self, handle: Handle) -> Result<Arc<T>> {
        let known = self.0.read();
        known.as_ref().and_then(|known| known.get(&handle)).cloned().ok_or(Code::INVALID_HANDLE)
    }

    pub fn remove(&self, handle: Handle) -> Result<Arc<T>> {
        let mut known = self.0.write();
        known.as_mut().and_then(|known| known.remove(&handle)).ok_or(Code::INVALID_HANDLE)
    }

    pub fn all(&self) -> Vec<Arc<T>> {
        self.0.read().iter().flat_map(|known| known.values().cloned()).collect()
    }
}
