//! Rows that cross to a node packed and are relayed there are, byte by byte, the rows that go
//! straight to their ranks.

use ep_kernels::host::{Crossing, Source, Target, pack, scatter, scatter_relayed};
use ep_kernels::{Ids, KernelError, Layout, PayloadKind, Placement, RecordFormat, ScaleKind};
use proptest::prelude::*;

const GUARD: u8 = 0xee;

#[derive(Debug)]
struct Case {
    fmt: RecordFormat,
    placement: Placement,
    node_of: Vec<usize>,
    layout: Layout,
    payload: Vec<u8>,
    scales: Vec<u8>,
    weights: Option<Vec<f32>>,
}

const SOURCE: usize = 5;

impl Case {
    fn source(&self) -> Source<'_> {
        Source {
            payload: self.payload.as_ptr(),
            payload_stride: self.fmt.payload_bytes,
            scales: self.scales.as_ptr(),
            scales_stride: self.fmt.scale_bytes,
            weights: self.weights.as_deref(),
        }
    }

    fn regions(&self) -> Vec<Vec<u8>> {
        let bytes = |&rows: &u32| vec![GUARD; (rows as usize + 1) * self.fmt.stride];
        self.layout.rank_counts.iter().map(bytes).collect()
    }

    fn targets(regions: &mut [Vec<u8>], counts: &[u32]) -> Vec<Target> {
        let target = |(region, &rows): (&mut Vec<u8>, &u32)| Target {
            base: region.as_mut_ptr(),
            first_row: 1,
            rows: rows as usize + 1,
        };
        regions.iter_mut().zip(counts).map(target).collect()
    }

    /// The tokens that go to a rank of `node`.
    fn crossing(&self, node: usize) -> Vec<u32> {
        let goes = |&token: &u32| {
            self.layout.destinations(token as usize).any(|(rank, _)| self.node_of[rank] == node)
        };
        (0..self.layout.tokens as u32).filter(goes).collect()
    }

    /// Packs for `node` and relays there into `regions`.
    fn relay(&self, node: usize, regions: &mut [Vec<u8>]) {
        let (fmt, topk) = (&self.fmt, self.layout.topk);
        let tokens = self.crossing(node);
        let mut staging = vec![GUARD; tokens.len() * fmt.stride];
        let crossing = Crossing { node_of: &self.node_of, node, tokens: &tokens };
        let (source, to) = (self.source(), staging.as_mut_ptr());
        // SAFETY: the case's rows and a staging of one record per token.
        unsafe { pack(fmt, &source, &self.layout, &self.placement, SOURCE, &crossing, to) }
            .unwrap();
        let numbers = |at: usize, count: usize| {
            let record = |row: usize| staging[row * fmt.stride + at..][..4 * count].chunks(4);
            let all = (0..tokens.len()).flat_map(record);
            all.map(|b| <[u8; 4]>::try_from(b).unwrap()).collect::<Vec<_>>()
        };
        let ids: Vec<i32> = numbers(fmt.ids_at, topk).into_iter().map(i32::from_ne_bytes).collect();
        let weights = numbers(fmt.weights_at, topk).into_iter().map(f32::from_ne_bytes);
        let weights: Vec<f32> = weights.collect();
        let sources = numbers(fmt.source_at, 1).into_iter().map(i32::from_ne_bytes);
        let sources: Vec<i32> = sources.collect();
        let mut layout = Layout::new();
        layout.compute(Ids::I32(&ids), topk, &self.placement, SOURCE, true).unwrap();
        let relayed = Source {
            payload: staging.as_ptr(),
            payload_stride: fmt.stride,
            scales: staging[fmt.scales_at.min(staging.len())..].as_ptr(),
            scales_stride: fmt.stride,
            weights: Some(&weights),
        };
        let targets = Self::targets(regions, &layout.rank_counts);
        let origin = (SOURCE, sources.as_slice());
        // SAFETY: the staging and regions of as many rows as go to each rank.
        unsafe { scatter_relayed(fmt, &relayed, &layout, &self.placement, origin, &targets) }
            .unwrap();
    }
}

fn case() -> impl Strategy<Value = Case> {
    let kinds = prop::sample::select(vec![
        PayloadKind::Bf16,
        PayloadKind::F32,
        PayloadKind::Fp8 { scales: ScaleKind::F32 },
        PayloadKind::Opaque { row_bytes: 48, aux_bytes: 5 },
    ]);
    let ids = prop::collection::vec(-3_i64..12, 0..160);
    (kinds, 1..=5_usize, ids, any::<bool>(), prop::collection::vec(0..3_usize, 6)).prop_map(
        |(kind, topk, mut ids, weighted, node_of)| {
            ids.truncate(ids.len() / topk * topk);
            for token in ids.chunks_mut(topk) {
                for k in 0..topk {
                    if token[k] < 0 || token[..k].contains(&token[k]) {
                        token[k] = -1;
                    }
                }
            }
            // Expert e on ranks e mod 6 and 7 e mod 6 where those differ: some have a replica.
            let holders: Vec<Vec<usize>> = (0..12)
                .map(|e| if e % 6 == 5 { vec![5, 0] } else { vec![e % 6, (e + 1) % 5 + 1] })
                .map(|mut ranks: Vec<usize>| {
                    ranks.dedup();
                    ranks
                })
                .collect();
            let placement = Placement::explicit(6, &holders).unwrap();
            let fmt = RecordFormat::new(kind, 32, topk).unwrap();
            let mut layout = Layout::new();
            layout.compute(Ids::I64(&ids), topk, &placement, SOURCE, false).unwrap();
            let byte = |i: usize| (i * 31 % 251) as u8;
            let weights = weighted.then(|| (0..ids.len()).map(|i| i as f32 * 0.25).collect());
            Case {
                payload: (0..layout.tokens * fmt.payload_bytes).map(byte).collect(),
                scales: (0..layout.tokens * fmt.scale_bytes + 1).map(byte).collect(),
                fmt,
                placement,
                node_of,
                layout,
                weights,
            }
        },
    )
}

proptest! {
    #[test]
    fn relayed_rows_are_the_rows_that_go_straight(case in case()) {
        let mut straight = case.regions();
        let targets = Case::targets(&mut straight, &case.layout.rank_counts);
        let (fmt, source) = (&case.fmt, case.source());
        // SAFETY: the case's rows and regions of as many rows as go to each rank.
        unsafe { scatter(fmt, &source, &case.layout, &case.placement, SOURCE, &targets) }.unwrap();
        let mut relayed = case.regions();
        for node in 0..3 {
            // Ranks of other nodes get nothing from it.
            case.relay(node, &mut relayed);
        }
        prop_assert_eq!(straight, relayed);
    }
}

#[test]
fn what_does_not_fit_is_an_error() {
    let placement = Placement::contiguous(4, 2).unwrap();
    let fmt = RecordFormat::new(PayloadKind::F32, 4, 2).unwrap();
    let mut layout = Layout::new();
    layout.compute(Ids::I32(&[0, 3]), 2, &placement, 0, false).unwrap();
    let (payload, mut staging) = ([0_u8; 16], vec![GUARD; fmt.stride]);
    let source = Source {
        payload: payload.as_ptr(),
        payload_stride: 16,
        scales: std::ptr::null(),
        scales_stride: 0,
        weights: None,
    };
    let mut go = |source: &Source<'_>, node_of: &[usize], tokens: &[u32], there: bool| {
        let to = if there { staging.as_mut_ptr() } else { std::ptr::null_mut() };
        let crossing = Crossing { node_of, node: 1, tokens };
        // SAFETY: nothing is written where the arguments do not fit; else there is one record.
        unsafe { pack(&fmt, source, &layout, &placement, 0, &crossing, to) }
    };
    let length = |e: Result<(), KernelError>| matches!(e, Err(KernelError::Length { .. }));
    assert!(length(go(&source, &[0], &[0], true)), "a rank without a node");
    assert!(length(go(&source, &[0, 1], &[1], true)), "a token that is not there");
    let nothing = Source { payload: std::ptr::null(), ..source };
    let null = |e: Result<(), KernelError>| matches!(e, Err(KernelError::Null { .. }));
    assert!(null(go(&nothing, &[0, 1], &[0], true)));
    assert!(null(go(&source, &[0, 1], &[0], false)));
    go(&source, &[0, 1], &[0], true).unwrap();
}
