//! What of a dispatch crosses nodes, as one rank sees it: its own blocks and those it forwards.

use ep_kernels::{Ids, Layout as Routing, RecordFormat};

use super::Nodes;
use crate::notify::Counts;
use crate::shape::Resolved;
use crate::{EpError, Layout, Result};

/// Part of a handle; buffers keep their capacity.
#[derive(Debug, Default)]
pub(crate) struct Crossing {
    /// `[N]`: this rank's tokens that cross to each node; none to its own.
    pub counts: Vec<u32>,
    /// `[N + 1]`: where those of each node start in `tokens`.
    offsets: Vec<usize>,
    tokens: Vec<u32>,
    /// `[N]`: the row of the rail's forward staging where this rank's block starts.
    pub to: Vec<usize>,
    /// The blocks this rank forwards, one per rank whose rail it is.
    pub incoming: Vec<Incoming>,
    /// `[R]`: rows to be forwarded by each rank, of the sources added so far.
    forwards: Vec<usize>,
    /// `[R]` and `[P]`: rows of ranks and experts of this node, of the sources added so far.
    ranks: Vec<usize>,
    experts: Vec<usize>,
    /// The last token, plus one, that crosses to each node; then the next place of each.
    marks: Vec<usize>,
}

/// A block that another node's rank sends here.
#[derive(Debug, Default)]
pub(crate) struct Incoming {
    pub source: usize,
    pub rows: usize,
    /// Where it starts in forward staging.
    pub first: usize,
    /// Where this node's rows start among those that come home to the source, one per (token, node).
    pub home: usize,
    /// `[R]`: where the source's rows start at each rank of this node.
    pub places: Vec<usize>,
    /// `[R]`: how many the source announced for it.
    announced: Vec<usize>,
    /// `[P]`: where its expert-major rows start among those of the owner of each expert here.
    pub experts: Vec<usize>,
    /// Its tokens that come here, as if they were all.
    pub layout: Routing,
    /// `[rows * K]`: their weights, 0 where an expert is on another node.
    pub weights: Vec<f32>,
    /// Their numbers at the source.
    pub tokens: Vec<i32>,
    ids: Vec<i32>,
}

impl Crossing {
    /// Finds which tokens cross to which node.
    pub fn lay_out(&mut self, send: &Routing, nodes: &Nodes, rank: usize) {
        let own = nodes.of(rank);
        refill(&mut self.marks, nodes.count(), 0);
        self.counts.clear();
        self.counts.resize(nodes.count(), 0);
        each(send, nodes, own, &mut self.marks, |node, _| self.counts[node] += 1);
        self.offsets.clear();
        self.offsets.push(0);
        let mut end = 0;
        self.offsets.extend(self.counts.iter().map(|&count| {
            end += count as usize;
            end
        }));
        self.tokens.clear();
        self.tokens.resize(end, 0);
        refill(&mut self.marks, nodes.count(), 0);
        // The counts serve as how many of a node are yet to come.
        let (tokens, counts, offsets) = (&mut self.tokens, &mut self.counts, &self.offsets);
        each(send, nodes, own, &mut self.marks, |node, token| {
            tokens[offsets[node + 1] - counts[node] as usize] = token as u32;
            counts[node] -= 1;
        });
        let ends = self.offsets.windows(2).map(|ends| (ends[1] - ends[0]) as u32);
        self.counts.clear();
        self.counts.extend(ends);
    }

    /// The tokens that cross to `node`, ascending.
    pub fn tokens_to(&self, node: usize) -> &[u32] {
        &self.tokens[self.offsets[node]..self.offsets[node + 1]]
    }

    /// How many rows cross to nodes before `node`.
    pub fn rows_before(&self, node: usize) -> usize {
        self.offsets[node]
    }

    /// Forgets all sources.
    pub fn reset(&mut self, shape: &Resolved, nodes: &Nodes, sources: &[usize]) {
        refill(&mut self.to, nodes.count(), 0);
        refill(&mut self.forwards, shape.world, 0);
        refill(&mut self.ranks, shape.world, 0);
        refill(&mut self.experts, shape.placement.physical(), 0);
        self.incoming.resize_with(sources.len(), Incoming::default);
        for (incoming, &source) in self.incoming.iter_mut().zip(sources) {
            incoming.source = source;
            refill(&mut incoming.places, shape.world, 0);
            refill(&mut incoming.announced, shape.world, 0);
            refill(&mut incoming.experts, shape.placement.physical(), 0);
        }
    }

    /// Adds what the next source announced, seen by `rank`.
    pub fn add(
        &mut self,
        shape: &Resolved,
        nodes: &Nodes,
        rank: usize,
        (source, counts): (usize, &Counts<'_>),
    ) {
        let (own, from) = (nodes.of(rank), nodes.of(source));
        let mut before = 0usize;
        for (node, &count) in counts.node.iter().enumerate().filter(|&(node, _)| node != from) {
            let rail = nodes.rail(source, node);
            if source == rank {
                self.to[node] = self.forwards[rail];
            }
            if rail == rank {
                let mine = self.incoming.iter_mut().find(|incoming| incoming.source == source);
                let mine = mine.expect("one for each source of this rank");
                (mine.rows, mine.first, mine.home) = (count as usize, self.forwards[rank], before);
                for &member in nodes.members(own) {
                    mine.places[member] = self.ranks[member];
                    mine.announced[member] = counts.rank[member] as usize;
                    for expert in experts(shape, member) {
                        mine.experts[expert] = self.experts[expert];
                    }
                }
            }
            // A number that may be a lie never comes back below the limit.
            self.forwards[rail] = self.forwards[rail].saturating_add(count as usize);
            before = before.saturating_add(count as usize);
        }
        for &member in nodes.members(own) {
            self.ranks[member] += counts.rank[member] as usize;
            for expert in experts(shape, member) {
                self.experts[expert] += counts.expert[expert] as usize;
            }
        }
    }

    /// The verdict on what ranks would have to forward: the same on every rank.
    pub fn capacity(&self, op: &'static str, reserved: usize) -> Result<()> {
        let Some(rank) = self.forwards.iter().position(|&rows| rows > reserved) else {
            return Ok(());
        };
        let needed = self.forwards.iter().copied().max().unwrap_or(0);
        let (what, setting) = ("rows to forward", "max_forward_rows");
        Err(EpError::Capacity { op, rank, what, needed, reserved, setting })
    }

    /// Completes the places of expert-major rows with where those of each expert start.
    pub fn finish(&mut self, layout: Layout, shape: &Resolved, members: &[usize], first: &[i32]) {
        if layout == Layout::RankMajor {
            return;
        }
        for incoming in &mut self.incoming {
            for expert in members.iter().flat_map(|&member| experts(shape, member)) {
                incoming.experts[expert] += first[expert] as usize;
            }
        }
    }
}

impl Incoming {
    /// Learns from the records of the block which row is for whom.
    ///
    /// # Errors
    /// If that is not what was announced.
    ///
    /// # Safety
    /// `from` is readable for `rows` records of `format`.
    pub unsafe fn read(
        &mut self,
        format: &RecordFormat,
        from: *const u8,
        shape: &Resolved,
        members: &[usize],
    ) -> Result<(), String> {
        self.ids.clear();
        self.weights.clear();
        self.tokens.clear();
        for row in 0..self.rows {
            // SAFETY: the record is readable; its parts are aligned to 16 and hold so many numbers.
            unsafe {
                let record = from.add(row * format.stride);
                let ids = record.add(format.ids_at).cast::<i32>();
                self.ids.extend_from_slice(std::slice::from_raw_parts(ids, format.topk));
                let weights = record.add(format.weights_at).cast::<f32>();
                self.weights.extend_from_slice(std::slice::from_raw_parts(weights, format.topk));
                self.tokens.push(record.add(format.source_at).cast::<i32>().read());
            }
        }
        let placement = &shape.placement;
        let ids = Ids::I32(&self.ids);
        self.layout
            .compute(ids, format.topk, placement, self.source, true)
            .map_err(|e| format!("rows of rank {} to be forwarded: {e}", self.source))?;
        let counts = &self.layout.rank_counts;
        let here: usize = members.iter().map(|&member| counts[member] as usize).sum();
        let all = self.layout.dest_rank.len();
        let differ = members.iter().find(|&&m| counts[m] as usize != self.announced[m]);
        if here != all || differ.is_some() {
            let rank = differ.copied().unwrap_or(members[0]);
            let source = self.source;
            return Err(format!("rank {source} sent other rows for rank {rank} than it announced"));
        }
        Ok(())
    }
}

/// The physical experts of a rank.
fn experts(shape: &Resolved, rank: usize) -> std::ops::Range<usize> {
    let first = shape.placement.physical_base(rank);
    first..first + shape.placement.local_experts(rank)
}

fn refill(list: &mut Vec<usize>, len: usize, value: usize) {
    list.clear();
    list.resize(len, value);
}

/// Calls `f(node, token)` once for each other node a token goes to, tokens in order.
fn each(
    send: &Routing,
    nodes: &Nodes,
    own: usize,
    marks: &mut [usize],
    mut f: impl FnMut(usize, usize),
) {
    for token in 0..send.tokens {
        for (rank, _) in send.destinations(token) {
            let node = nodes.of(rank);
            if node != own && marks[node] != token + 1 {
                marks[node] = token + 1;
                f(node, token);
            }
        }
    }
}
