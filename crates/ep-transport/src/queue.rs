//! Where operations are ordered.

/// The place in which an operation takes its turn.
///
/// Work submitted to one queue happens in the order of submission. On the host queue it has
/// happened when the call returns. The type is opaque so that streams of a device can join it
/// without a change in code that only passes queues on.
#[derive(Clone, Debug)]
pub struct Queue(());

impl Queue {
    /// The calling thread itself.
    pub const fn host() -> Self {
        Queue(())
    }

    /// Whether this is the host queue.
    pub const fn is_host(&self) -> bool {
        true
    }
}
