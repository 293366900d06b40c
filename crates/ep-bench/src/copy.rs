//! The copy that operations are compared with.
//!
//! One thread per rank copies a plain buffer with `copy_nonoverlapping`; the size is half of what
//! the operation has to read and write. It is measured between the timed runs of the operation,
//! so both meet the same machine.

use std::hint::black_box;

/// Buffers are at most this large; more bytes are copied in several rounds.
pub const MOST_BYTES: usize = 256 << 20;

/// One rank's source and destination, touched once so that no page is missing when timed.
#[derive(Debug)]
pub struct Copier {
    source: Vec<u8>,
    dest: Vec<u8>,
    bytes: usize,
}

impl Copier {
    /// Buffers for copies of `bytes` bytes.
    pub fn new(bytes: usize) -> Self {
        let size = bytes.min(MOST_BYTES);
        // Not zero: pages that were only ever zero may all be one page.
        Self { source: vec![0x5a; size], dest: vec![0xa5; size], bytes }
    }

    /// How many bytes one call of [`Copier::run`] copies.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies once.
    pub fn run(&mut self) {
        let mut left = self.bytes;
        while left > 0 {
            let n = left.min(self.source.len());
            let (source, dest) = (black_box(self.source.as_ptr()), self.dest.as_mut_ptr());
            // SAFETY: both buffers belong to `self`, are distinct allocations and at least `n`
            // bytes long.
            unsafe { std::ptr::copy_nonoverlapping(source, black_box(dest), n) };
            left -= n;
        }
        black_box(&mut self.dest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_copies() {
        let mut copier = Copier::new(4096);
        assert_ne!(copier.source, copier.dest);
        copier.run();
        assert_eq!(copier.source, copier.dest);
        assert_eq!(copier.bytes(), 4096);
    }

    #[test]
    fn nothing_to_copy() {
        Copier::new(0).run();
    }

    #[test]
    fn large_copies_go_in_rounds() {
        let mut copier = Copier { source: vec![1; 100], dest: vec![2; 100], bytes: 250 };
        copier.run();
        assert_eq!(copier.source, copier.dest);
    }
}
