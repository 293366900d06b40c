//! The small layer on GPUs, and graphs of what it does.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUresult, CUstreamCaptureMode};
use ep_kernels::cuda::Stream;
use ep_runtime::{
    CombineError, CombineOpts, DType, DeviceIds, DispatchOpts, Dispatched, Ep, EpBuilder, EpError,
    Event, IdKind, Payload, Queue, Route, Rows, RowsMut,
};

use super::gpu::{Gpu, Gpus};
use super::ground::{Ground, Grounds};
use super::small::{HIDDEN, TOPK, Tokens, opts, went_to};

pub const LIMIT: Duration = Duration::from_secs(30);
/// The time-out of layers of which a rank stops: it has to be waited for.
pub const STOPS: Duration = Duration::from_secs(5);
const MOST: usize = 16;
const ROW: usize = HIDDEN * 4;

/// Runs `f` on `world` ranks of the layer that `builder` says.
pub fn small<T: Send>(
    gpus: &Gpus,
    world: usize,
    builder: &EpBuilder,
    f: impl Fn(Rank<'_>) -> T + Sync,
) -> Vec<T> {
    // Some use a second lane.
    let placed = |rank| gpus.place(rank, world, builder.clone()).lanes(2);
    super::eps_of(world, &placed, |ep| f(Rank::new(gpus, ep)))
}

pub fn ok(code: CUresult) {
    assert_eq!(code, CUresult::CUDA_SUCCESS);
}

/// Counts who is through with something, however it went.
struct Through<'a>(&'a AtomicUsize);

impl Drop for Through<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A rank with memory for its tokens at fixed addresses, as graphs need it.
pub struct Rank<'a> {
    pub ep: Ep,
    pub gpu: Gpu<'a>,
    pub rows: u64,
    pub ids: u64,
    pub out: u64,
}

impl<'a> Rank<'a> {
    pub fn new(gpus: &'a Gpus, ep: Ep) -> Self {
        Self::on(gpus.rank(ep.rank()), ep)
    }

    /// On a GPU that another rank's number is for.
    pub fn on(gpu: Gpu<'a>, ep: Ep) -> Self {
        let [rows, ids, out] = [ROW, 4 * TOPK, ROW].map(|bytes| gpu.place(None, MOST * bytes));
        Self { ep, gpu, rows, ids, out }
    }

    pub fn queue(&self) -> Queue {
        self.gpu.queue()
    }

    pub fn load(&self, tokens: &Tokens) {
        let bytes: Vec<u8> = tokens.rows.iter().flat_map(|x| x.to_ne_bytes()).collect();
        self.gpu.store(self.rows, &bytes);
        let bytes: Vec<u8> = tokens.ids.iter().flat_map(|x| x.to_ne_bytes()).collect();
        self.gpu.store(self.ids, &bytes);
    }

    pub fn rows_at(&self, ordinal: usize, at: u64, tokens: usize) -> Payload<'_> {
        // SAFETY: only memory of this rank's arena is ever touched; other addresses are refused.
        let rows = unsafe { Rows::from_device(ordinal, at, tokens, ROW, ROW, DType::F32) };
        Payload::new(rows).expect("f32 rows")
    }

    pub fn payload(&self, tokens: usize) -> Payload<'_> {
        self.rows_at(self.gpu.ordinal(), self.rows, tokens)
    }

    pub fn route(&self, tokens: usize) -> Route<'_> {
        let (at, ordinal) = (self.ids, self.gpu.ordinal());
        // SAFETY: in the arena, written in the order of its stream.
        let ids = unsafe { DeviceIds::from_raw(ordinal, at, tokens * TOPK, IdKind::I32) };
        Route::Device { ids, weights: None }
    }

    pub fn out_at(&self, at: u64, tokens: usize) -> RowsMut<'_> {
        // SAFETY: as for rows.
        unsafe { RowsMut::from_device(self.gpu.ordinal(), at, tokens, ROW, ROW, DType::F32) }
    }

    pub fn dispatch(&self, tokens: usize, opts: &DispatchOpts) -> Result<Dispatched, EpError> {
        self.ep.dispatch(&self.queue(), self.payload(tokens), self.route(tokens), opts)
    }

    pub fn combine(&self, result: Dispatched, opts: &CombineOpts) -> Result<Event, CombineError> {
        let tokens = result.handle().tokens();
        result.combine(&self.queue(), self.out_at(self.out, tokens), opts)
    }

    /// Compares what combine left in the output with rows that came back as they went.
    #[track_caller]
    pub fn check(&self, tokens: &Tokens) {
        let ranks = 0..self.ep.world();
        self.check_copies(tokens, |t| {
            ranks.clone().filter(|&r| went_to(&self.ep, tokens, t, r)).count()
        });
    }

    /// As [`Rank::check`], for rows of which a token has as many as `copies` says.
    #[track_caller]
    pub fn check_copies(&self, tokens: &Tokens, copies: impl Fn(usize) -> usize) {
        let count = tokens.ids.len() / TOPK;
        let mut bytes = vec![0u8; count * ROW];
        self.gpu.fetch(self.out, &mut bytes);
        for (i, got) in bytes.chunks_exact(4).enumerate() {
            let (got, x) = (f32::from_ne_bytes(got.try_into().expect("4 bytes")), tokens.rows[i]);
            let t = i / HIDDEN;
            let sum = (1..copies(t)).fold(x, |acc, _| acc + x);
            assert_eq!(got, sum, "rank {} token {t} element {i}", self.ep.rank());
        }
    }

    /// After a round trip rank 1 stops before a dispatch that `opts` says, in a layer with the time-out
    /// [`STOPS`]: the others hear of it in time. It stays until they are `through`.
    pub fn one_stops(&self, opts: &DispatchOpts, through: &AtomicUsize) {
        let most = STOPS + Duration::from_secs(12);
        self.round_trip();
        self.load(&Tokens::new(self.ep.rank(), 2));
        self.ep.group().barrier().unwrap();
        let began = Instant::now();
        if self.ep.rank() == 1 {
            while through.load(Ordering::SeqCst) + 1 < self.ep.world() && began.elapsed() < 4 * most
            {
                std::thread::sleep(Duration::from_millis(5));
            }
            return;
        }
        let _through = Through(through);
        let began = Instant::now();
        // In capacity mode the host may learn of it later.
        let e = self.dispatch(2, opts).and_then(|result| {
            assert!(opts.capacity, "the host knew that rows came");
            self.combine(result, &plain()).map_err(EpError::from)?.wait(LIMIT)
        });
        let e = e.unwrap_err();
        println!("rank {}, {opts:?}, {:?}: {e}", self.ep.rank(), began.elapsed());
        assert!(began.elapsed() < most, "{:?}", began.elapsed());
        assert_eq!((e.peer(), e.group_usable()), (Some(1), false), "{e}");
        let again = self.dispatch(2, opts).unwrap_err();
        assert!(!again.group_usable(), "{again}");
    }

    /// Six rounds: halves that are dropped, cached handles of dispatches as `opts` has them, combines as
    /// `home` has them; all slots are free again.
    pub fn drop_halves_and_use_handles(&self, opts: &DispatchOpts, home: &CombineOpts) {
        let queue = self.queue();
        for round in 0..6 {
            self.load(&Tokens::new(self.ep.rank(), 5));
            let send = self.ep.dispatch_send(&queue, self.payload(5), self.route(5), opts);
            if round % 3 == 0 {
                drop(send.unwrap());
                self.round_trip();
                continue;
            }
            let result = send.unwrap().recv(&queue).unwrap();
            let handle = result.handle().clone();
            result.release(&queue);
            let cached = Route::Cached(&handle);
            let second = DispatchOpts { lane: 1, ..*opts };
            let result = self.ep.dispatch(&queue, self.payload(5), cached, &second).unwrap();
            if round % 3 == 1 {
                drop(result.combine_send(&queue, home).unwrap());
            } else {
                self.combine(result, home).unwrap().wait(LIMIT).unwrap();
                self.check(&Tokens::new(self.ep.rank(), 5));
            }
            self.round_trip();
        }
        assert_eq!(self.ep.free_slots(), 3);
    }

    /// Rank 1 asks for an expert that there is not: every rank is told so, in each of these ways, and the
    /// group goes on.
    pub fn bad_ids_are_refused(&self, ways: &[DispatchOpts]) {
        let mut tokens = Tokens::new(self.ep.rank(), 4);
        if self.ep.rank() == 1 {
            tokens.ids[5] = 99;
        }
        self.load(&tokens);
        for opts in ways {
            let e = self.dispatch(4, opts).unwrap_err();
            assert!(matches!(e, EpError::Ids { rank: 1, token: 2, id: 99, .. }), "{e}");
        }
        self.round_trip();
    }

    /// The group still works: a whole round trip is right.
    #[track_caller]
    pub fn round_trip(&self) {
        let tokens = Tokens::new(self.ep.rank(), 3);
        self.load(&tokens);
        let result = self.dispatch(3, &opts(0)).expect("the group is usable");
        let event = self.combine(result, &CombineOpts::default()).expect("the group is usable");
        event.wait(LIMIT).expect("the group is usable");
        self.check(&tokens);
    }
}

/// Captured work.
pub struct Graph {
    graph: CUgraph,
    exec: CUgraphExec,
}

impl Graph {
    /// What `f` submits to `stream`.
    pub fn capture(stream: &Stream, f: impl FnOnce()) -> Self {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
        let _current = stream.device().make_current().expect("a context");
        // SAFETY: the stream is live, the outputs are valid for the calls.
        unsafe {
            ok(sys::cuStreamBeginCapture_v2(stream.raw(), mode));
            f();
            ok(sys::cuStreamEndCapture(stream.raw(), &mut graph));
            ok(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0));
        }
        Self { graph, exec }
    }

    pub fn launch(&self, stream: &Stream) {
        let _current = stream.device().make_current().expect("a context");
        // SAFETY: both are live.
        unsafe { ok(sys::cuGraphLaunch(self.exec, stream.raw())) };
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made above, destroyed once.
        unsafe {
            sys::cuGraphExecDestroy(self.exec);
            sys::cuGraphDestroy(self.graph);
        }
    }
}

/// Free bytes of the GPU of a stream.
pub fn free_bytes(stream: &Stream) -> usize {
    let _current = stream.device().make_current().expect("a context");
    let (mut free, mut total) = (0, 0);
    // SAFETY: a context is current, the outputs are valid for the call.
    ok(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) });
    free
}

/// As many ranks as these tests have at most.
pub const RANKS: usize = 4;

pub fn gpus() -> Option<Gpus> {
    Gpus::new(RANKS, 64 << 20)
}

pub fn capacity() -> DispatchOpts {
    DispatchOpts { capacity: true, ..opts(0) }
}

pub fn plain() -> CombineOpts {
    CombineOpts::default()
}
