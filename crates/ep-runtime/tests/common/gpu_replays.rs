//! What graphs of dispatches and combines have to do, whatever lies between the ranks.

use ep_runtime::{CombineOpts, DispatchOpts, Event, Layout, Route};

use super::gpu_small::{Graph, LIMIT, Rank, capacity, plain};
use super::small::{EXPERTS, TOPK, Tokens, assert_argument};

/// A dispatch, and how its rows go home.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    pub dispatch: DispatchOpts,
    pub combine: CombineOpts,
}

impl Work {
    pub fn plain() -> Self {
        Self { dispatch: capacity(), combine: plain() }
    }

    /// Dispatch, the rows taken away and put back on the caller's stream, combine.
    pub fn submit(&self, rank: &Rank<'_>, route: Route<'_>, tokens: usize, staging: u64) -> Event {
        let (queue, stream) = (rank.queue(), rank.gpu.stream());
        let payload = rank.payload(tokens);
        let result = rank.ep.dispatch(&queue, payload, route, &self.dispatch).unwrap();
        let rows = result.rows().payload();
        let (at, bytes) = (rows.as_ptr() as u64, rows.len() * rows.stride());
        let device = stream.device();
        // SAFETY: the slot's rows and room for as many.
        unsafe {
            device.copy(stream.raw(), staging, at, bytes).unwrap();
            device.fill(stream.raw(), at, 0xff, bytes).unwrap();
            device.copy(stream.raw(), at, staging, bytes).unwrap();
        }
        rank.combine(result, &self.combine).unwrap()
    }

    #[track_caller]
    pub fn check(&self, rank: &Rank<'_>, tokens: &Tokens) {
        match self.dispatch.layout {
            Layout::RankMajor => rank.check(tokens),
            // Rows of experts come back once each.
            _ => rank.check_copies(tokens, |t| {
                tokens.ids[t * TOPK..][..TOPK].iter().filter(|&&id| id >= 0).count()
            }),
        }
    }
}

/// Tokens of round `i`: for all ranks, with a choice less, or for the first or the last rank alone.
pub fn tokens(rank: usize, i: usize, count: usize) -> Tokens {
    let mut tokens = Tokens::new(rank + 7 * i, count);
    let last = EXPERTS as i32 - 1;
    for choices in tokens.ids.chunks_exact_mut(TOPK) {
        match (i + rank) % 4 {
            1 => choices[1] = -1,
            2 => choices.copy_from_slice(&[1, 0]),
            3 => choices.copy_from_slice(&[last - 1, last]),
            _ => {}
        }
    }
    tokens
}

/// Replays equal eager calls, in any mix, `rounds` times over other tokens each.
pub fn replays_equal_eager_calls(rank: &Rank<'_>, work: &Work, rounds: usize) {
    let (me, stream, staging) = (rank.ep.rank(), rank.gpu.stream(), rank.gpu.place(None, 1 << 20));
    let count = 7 + me;
    let submit = || work.submit(rank, rank.route(count), count, staging);
    let first = tokens(me, 0, count);
    rank.load(&first);
    submit().wait(LIMIT).unwrap();
    work.check(rank, &first);
    let mut events = Vec::new();
    let one = Graph::capture(stream, || events.push(submit()));
    let two = Graph::capture(stream, || {
        events.push(submit());
        events.push(submit());
    });
    for event in &events {
        assert!(!event.ready());
        assert_argument(event.wait(LIMIT), "captured");
    }
    for i in 0..rounds {
        let tokens = tokens(me, i, count);
        rank.load(&tokens);
        // Two operations each, in other graphs or eager on each rank.
        match (i + me) % 3 {
            0 => two.launch(stream),
            1 => {
                one.launch(stream);
                one.launch(stream);
            }
            _ => {
                submit().wait(LIMIT).unwrap();
                one.launch(stream);
            }
        }
        stream.wait("a replay", LIMIT).unwrap();
        work.check(rank, &tokens);
    }
    rank.round_trip();
}

/// A graph of a dispatch with the handle of an eager one, and of its combine.
pub fn cached_dispatches_are_captured(rank: &Rank<'_>, work: &Work, rounds: usize) {
    let (me, stream, staging) = (rank.ep.rank(), rank.gpu.stream(), rank.gpu.place(None, 1 << 20));
    let mut tokens = Tokens::new(me, 9);
    rank.load(&tokens);
    let result = rank.dispatch(9, &work.dispatch).unwrap();
    let handle = result.handle().clone();
    rank.combine(result, &work.combine).unwrap().wait(LIMIT).unwrap();
    let graph = Graph::capture(stream, || {
        drop(work.submit(rank, Route::Cached(&handle), 9, staging));
    });
    for i in 0..rounds {
        tokens.rows.iter_mut().for_each(|x| *x += i as f32);
        rank.load(&tokens);
        graph.launch(stream);
        stream.wait("a replay", LIMIT).unwrap();
        work.check(rank, &tokens);
    }
    rank.round_trip();
}
