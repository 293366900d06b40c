//! Which commands are done.
//!
//! Commands are numbered as they come out of the ring. One may take several writes, several may be
//! merged into one, and they end in any order; what waits for sources to be free wants to know up
//! to which number all are done.

use std::collections::VecDeque;

#[derive(Debug, Default)]
pub(super) struct Tickets {
    /// The number of the front.
    first: u64,
    open: VecDeque<Open>,
}

#[derive(Clone, Copy, Debug)]
struct Open {
    /// Writes that are under way.
    pending: u32,
    /// More writes may follow.
    more: bool,
}

impl Tickets {
    /// The next command's number; it is open until [`Tickets::close`].
    pub(super) fn push(&mut self) -> u64 {
        self.open.push_back(Open { pending: 0, more: true });
        self.first + self.open.len() as u64 - 1
    }

    /// A write for command `ticket` is under way.
    pub(super) fn posted(&mut self, ticket: u64) {
        self.get(ticket).pending += 1;
    }

    /// A write for command `ticket` is done.
    pub(super) fn done(&mut self, ticket: u64) {
        let open = self.get(ticket);
        open.pending -= 1;
    }

    /// No further write will be posted for command `ticket`.
    pub(super) fn close(&mut self, ticket: u64) {
        self.get(ticket).more = false;
    }

    /// Forgets what is done; up to which number, exclusive, all are.
    pub(super) fn retire(&mut self) -> u64 {
        while self.open.front().is_some_and(|open| open.pending == 0 && !open.more) {
            self.open.pop_front();
            self.first += 1;
        }
        self.first
    }

    /// Whether nothing is under way.
    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    fn get(&mut self, ticket: u64) -> &mut Open {
        &mut self.open[(ticket - self.first) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_unbroken_run_is_retired() {
        let mut tickets = Tickets::default();
        let (a, b, c) = (tickets.push(), tickets.push(), tickets.push());
        assert_eq!((a, b, c), (0, 1, 2));
        tickets.posted(a);
        tickets.posted(a);
        tickets.close(a);
        tickets.posted(b);
        tickets.close(b);
        tickets.done(b);
        assert_eq!(tickets.retire(), 0, "b is done, a is not");
        tickets.done(a);
        assert_eq!(tickets.retire(), 0, "one of a's writes is under way");
        tickets.done(a);
        assert_eq!(tickets.retire(), 2, "c is open still");
        tickets.close(c);
        assert_eq!(tickets.retire(), 3);
        assert!(tickets.is_empty());
        assert_eq!(tickets.push(), 3);
    }
}
