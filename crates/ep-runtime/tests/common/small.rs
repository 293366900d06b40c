//! A small layer, its tokens, and what a right round trip gives.

use std::time::Duration;

use ep_runtime::{
    CombineOpts, DispatchOpts, Dispatched, Ep, EpBuilder, EpError, ErrorKind, Ids, MoeShape,
    Payload, PayloadKind, Queue, Route, Rows, RowsMut,
};

pub const HIDDEN: usize = 16;
pub const TOPK: usize = 2;
pub const EXPERTS: usize = 8;

pub fn shape() -> MoeShape {
    MoeShape::new(HIDDEN, TOPK, EXPERTS).max_tokens(16).payload(PayloadKind::F32).expert_major(4)
}

/// Nobody waits as long as its time-out: what is an error at once takes less than [`PROMPT`].
pub fn builder() -> EpBuilder {
    EpBuilder::new(shape()).timeout(Duration::from_secs(60))
}

pub const PROMPT: Duration = Duration::from_secs(20);

/// `tokens` rows that all differ, and ids that spread over all experts.
pub struct Tokens {
    pub rows: Vec<f32>,
    pub ids: Vec<i32>,
}

impl Tokens {
    pub fn new(rank: usize, tokens: usize) -> Self {
        let row = |i: usize| (rank * 1000 + i) as f32;
        let id = |i: usize| ((i * 3 + rank) % EXPERTS) as i32;
        Self {
            rows: (0..tokens * HIDDEN).map(row).collect(),
            ids: (0..tokens).flat_map(|t| [id(t), (id(t) + 3) % EXPERTS as i32]).collect(),
        }
    }

    pub fn payload(&self) -> Payload<'_> {
        Payload::new(Rows::new(&self.rows, HIDDEN).unwrap()).unwrap()
    }

    pub fn route(&self) -> Route<'_> {
        Route::Topk { ids: Ids::I32(&self.ids), weights: None }
    }
}

pub fn opts(lane: usize) -> DispatchOpts {
    DispatchOpts { lane, ..DispatchOpts::default() }
}

pub fn dispatch(ep: &Ep, tokens: &Tokens, opts: &DispatchOpts) -> Result<Dispatched, EpError> {
    ep.dispatch(&Queue::host(), tokens.payload(), tokens.route(), opts)
}

/// Combines rows as they came: every token comes back once per rank it went to.
pub fn combine(result: Dispatched, opts: &CombineOpts) -> Result<Vec<f32>, EpError> {
    let mut out = vec![f32::NAN; result.handle().tokens() * HIDDEN];
    result.combine(&Queue::host(), RowsMut::new(&mut out, HIDDEN)?, opts)?;
    Ok(out)
}

/// The group still works: a whole round trip is right.
pub fn round_trip(ep: &Ep) {
    let tokens = Tokens::new(ep.rank(), 3);
    let result = dispatch(ep, &tokens, &opts(0)).expect("the group is usable");
    let handle = result.handle().clone();
    let out = combine(result, &CombineOpts::default()).expect("the group is usable");
    for t in 0..3 {
        let copies = (0..ep.world()).filter(|&r| went_to(ep, &tokens, t, r)).count();
        let sum = |x: f32| (1..copies).fold(x, |acc, _| acc + x);
        for h in 0..HIDDEN {
            assert_eq!(out[t * HIDDEN + h], sum(tokens.rows[t * HIDDEN + h]), "token {t}");
        }
    }
    drop(handle);
}

pub fn went_to(ep: &Ep, tokens: &Tokens, token: usize, rank: usize) -> bool {
    let per_rank = EXPERTS.div_ceil(ep.world());
    let owner = |id: i32| {
        let (base, extra) = (EXPERTS / ep.world(), EXPERTS % ep.world());
        let id = id as usize;
        if id < extra * (base + 1) { id / (base + 1) } else { (id - extra) / base }
    };
    assert!(per_rank > 0);
    tokens.ids[token * TOPK..][..TOPK].iter().any(|&id| owner(id) == rank)
}

#[track_caller]
pub fn assert_argument<T>(result: Result<T, impl Into<EpError>>, needle: &str) {
    match result.map_err(Into::into) {
        Ok(_) => panic!("expected an error with {needle:?}"),
        Err(e) => {
            assert_eq!(e.kind(), ErrorKind::Argument, "{e}");
            assert!(e.group_usable(), "{e}");
            assert!(e.to_string().contains(needle), "{e} does not say {needle:?}");
        }
    }
}
