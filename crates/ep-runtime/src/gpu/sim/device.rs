//! GPUs with hardware queues: what was submitted to them, and what they do next.

use std::collections::{HashMap, VecDeque};

use super::effects::{Effect, Ranks};
use super::memory::{Clock, Memory, join};

/// One entry of a stream.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "queues are short")]
pub enum Op {
    Work(Effect),
    Record(usize),
    Order(usize),
    Signal { to: usize, flag: u32, from: usize },
    Wait { rank: usize, flag: u32, sources: Vec<usize> },
}

/// A source of choices.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5bd1_e995)
    }

    /// A number below `n` (splitmix64).
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n.max(1) as u64) as usize
    }

    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

/// What a stream runs now, and how long that tends to take.
#[derive(Debug)]
struct Running {
    effect: Effect,
    slow: bool,
}

#[derive(Debug)]
struct Stream {
    queue: usize,
    running: Option<Running>,
}

/// All simulated GPUs of a group.
#[derive(Debug)]
pub struct Devices {
    pub memory: Memory,
    ranks: Ranks,
    /// Hardware queues of all GPUs. What is at the head of one holds up all behind it until it can
    /// begin; kernels of different streams then run side by side.
    queues: Vec<VecDeque<(usize, Op)>>,
    per_gpu: usize,
    streams: Vec<Stream>,
    /// Raised flags: (rank, flag, source).
    pub flags: HashMap<(usize, u32, usize), Clock>,
    points: Vec<Option<Clock>>,
    pub rng: Rng,
}

enum Next {
    Begin(usize),
    End(usize),
}

impl Devices {
    pub fn new(ranks: Ranks, gpus: usize, per_gpu: usize, rng: Rng) -> Self {
        Self {
            memory: Memory::default(),
            ranks,
            queues: vec![VecDeque::new(); gpus * per_gpu],
            per_gpu,
            streams: Vec::new(),
            flags: HashMap::new(),
            points: Vec::new(),
            rng,
        }
    }

    /// A new stream of a GPU, on some hardware queue of it.
    pub fn stream(&mut self, gpu: usize) -> usize {
        let queue = gpu * self.per_gpu + self.rng.below(self.per_gpu);
        self.streams.push(Stream { queue, running: None });
        self.memory.stream()
    }

    pub fn has(&self, stream: usize) -> bool {
        stream < self.streams.len()
    }

    pub fn point(&mut self) -> usize {
        self.points.push(None);
        self.points.len() - 1
    }

    /// A new stream that goes on from where another one is.
    pub fn beside(&mut self, stream: usize) -> usize {
        let queue = self.streams[stream].queue;
        self.streams.push(Stream { queue, running: None });
        let (beside, point) = (self.memory.stream(), self.point());
        self.submit(stream, Op::Record(point));
        self.submit(beside, Op::Order(point));
        beside
    }

    pub fn is_done(&self, point: usize) -> bool {
        self.points[point].is_some()
    }

    pub fn submit(&mut self, stream: usize, op: Op) {
        self.queues[self.streams[stream].queue].push_back((stream, op));
    }

    /// What is still queued.
    pub fn left(&self) -> Vec<String> {
        let heads = self.queues.iter().filter_map(|queue| queue.front());
        heads.map(|(stream, op)| format!("stream {stream}: {op:?}")).collect()
    }

    fn can_begin(&self, queue: usize) -> bool {
        let Some((stream, op)) = self.queues[queue].front() else { return false };
        self.streams[*stream].running.is_none()
            && match op {
                Op::Order(point) => self.points[*point].is_some(),
                Op::Wait { rank, flag, sources } => {
                    sources.iter().all(|&source| self.flags.contains_key(&(*rank, *flag, source)))
                }
                _ => true,
            }
    }

    /// Lets one thing happen, if something can.
    pub fn step(&mut self) -> bool {
        let patient = !self.rng.chance(5);
        let heads = (0..self.queues.len()).filter(|&queue| self.can_begin(queue));
        let mut next: Vec<Next> = heads.map(Next::Begin).collect();
        let ends = |slow| {
            let ends = self.streams.iter().enumerate();
            ends.filter(move |(_, s)| s.running.as_ref().is_some_and(|r| r.slow == slow))
        };
        next.extend(ends(false).map(|(stream, _)| Next::End(stream)));
        // Slow ones take part only now and then.
        if next.is_empty() || !patient {
            next.extend(ends(true).map(|(stream, _)| Next::End(stream)));
        }
        if next.is_empty() {
            return false;
        }
        match next[self.rng.below(next.len())] {
            Next::Begin(queue) => self.begin(queue),
            Next::End(stream) => self.end(stream),
        }
        true
    }

    fn begin(&mut self, queue: usize) {
        let Some((stream, op)) = self.queues[queue].pop_front() else { return };
        self.memory.tick(stream);
        match op {
            Op::Work(effect) => {
                let slow = self.rng.chance(30);
                self.streams[stream].running = Some(Running { effect, slow });
            }
            Op::Record(point) => self.points[point] = Some(self.memory.clocks[stream].clone()),
            Op::Order(point) => {
                let before = self.points[point].clone().unwrap_or_default();
                join(&mut self.memory.clocks[stream], &before);
            }
            Op::Signal { to, flag, from } => {
                let clock = self.memory.clocks[stream].clone();
                if self.flags.insert((to, flag, from), clock).is_some() {
                    self.memory.fault(|| format!("flag {flag} of {from} at {to} was up already"));
                }
            }
            Op::Wait { rank, flag, sources } => {
                for source in sources {
                    let clock = self.flags.remove(&(rank, flag, source)).unwrap_or_default();
                    join(&mut self.memory.clocks[stream], &clock);
                }
            }
        }
    }

    fn end(&mut self, stream: usize) {
        if let Some(Running { effect, .. }) = self.streams[stream].running.take() {
            self.ranks.run(&mut self.memory, stream, effect);
        }
    }
}
