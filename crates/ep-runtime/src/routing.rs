//! The routing of a dispatch in progress.

use std::sync::Arc;

use crate::Handle;
use crate::ep::Inner;
use crate::handle::HandleInner;

/// Made by this dispatch or by an earlier one.
#[derive(Debug)]
pub(crate) enum Routing {
    /// Being made: nobody else has it yet.
    New(Fresh),
    Cached(Handle),
}

impl Routing {
    pub fn get(&self) -> &HandleInner {
        match self {
            Self::New(fresh) => fresh,
            Self::Cached(handle) => &handle.routing,
        }
    }
}

/// A handle nobody refers to yet. It goes back to the pool however the dispatch ends.
#[derive(Debug)]
pub(crate) struct Fresh {
    ep: Arc<Inner>,
    handle: Arc<HandleInner>,
}

impl Fresh {
    pub fn take(ep: &Arc<Inner>) -> Self {
        Self { ep: ep.clone(), handle: ep.handles.take() }
    }

    pub fn get_mut(&mut self) -> &mut HandleInner {
        Arc::get_mut(&mut self.handle).expect("not shared before it is complete")
    }

    pub fn done(self) -> Arc<HandleInner> {
        self.handle.clone()
    }
}

impl std::ops::Deref for Fresh {
    type Target = HandleInner;

    fn deref(&self) -> &HandleInner {
        &self.handle
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        self.ep.handles.keep(&self.handle);
    }
}
