//! Scatter, expand, gather: every byte of every row against straightforward code.

use ep_kernels::host::{
    Expander, ExpertRows, Source, Target, copy_rows, gather, scatter, scatter_only,
};
use ep_kernels::{
    CountMatrix, DType, ExpertFormat, Ids, KernelError, Layout, PayloadKind, Placement,
    RecordFormat, ScaleKind,
};
use proptest::prelude::*;

const GUARD: u8 = 0xee;

/// A repeatable byte stream.
fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 32) as u8
    };
    (0..len).map(|_| next()).collect()
}

fn i32_at(bytes: &[u8], at: usize) -> i32 {
    i32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn f32_at(bytes: &[u8], at: usize) -> f32 {
    f32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// One rank's input.
struct Tokens {
    ids: Vec<i32>,
    payload: Vec<u8>,
    scales: Vec<u8>,
    weights: Option<Vec<f32>>,
    /// Bytes between rows that do not belong to them.
    gap: usize,
}

struct Case {
    fmt: RecordFormat,
    placement: Placement,
    ranks: Vec<Tokens>,
    regions: Vec<Vec<u8>>,
    layouts: Vec<Layout>,
    matrix: CountMatrix,
}

impl Case {
    /// Random routing of `tokens` tokens, fewer on later ranks.
    fn new(kind: PayloadKind, hidden: usize, topk: usize, experts: usize, tokens: usize) -> Self {
        let ranks = 3;
        let fmt = RecordFormat::new(kind, hidden, topk).unwrap();
        let placement = Placement::contiguous(experts, ranks).unwrap();
        let mut case = Self {
            fmt,
            placement,
            ranks: Vec::new(),
            regions: Vec::new(),
            layouts: Vec::new(),
            matrix: CountMatrix::new(),
        };
        for rank in 0..ranks {
            let tokens = tokens - tokens * rank / ranks;
            let noise = bytes(tokens * topk, 77 + rank as u64);
            // Distinct ids: steps of 0 wrap to -1 on the second use.
            let ids = noise
                .chunks(topk)
                .flat_map(|noise| {
                    let mut used = vec![false; experts];
                    let pick = |&b: &u8| {
                        let id = usize::from(b) % experts;
                        if std::mem::replace(&mut used[id], true) { -1 } else { id as i32 }
                    };
                    noise.iter().map(pick).collect::<Vec<_>>()
                })
                .collect::<Vec<_>>();
            let gap = 16 * rank;
            let weight = |i: usize| (i % 97) as f32 / 8.0 + 0.5;
            case.ranks.push(Tokens {
                payload: bytes(tokens * (fmt.payload_bytes + gap), rank as u64),
                scales: bytes(tokens * (fmt.scale_bytes + gap), 9 + rank as u64),
                weights: (rank != 1).then(|| (0..ids.len()).map(weight).collect()),
                ids,
                gap,
            });
            let mut layout = Layout::new();
            let ids = Ids::I32(&case.ranks[rank].ids);
            layout.compute(ids, topk, &case.placement, rank, false).unwrap();
            case.layouts.push(layout);
        }
        case.matrix = case.known_to(0);
        case.regions =
            (0..ranks).map(|d| vec![GUARD; case.matrix.rows_at(d) * fmt.stride]).collect();
        case
    }

    fn known_to(&self, rank: usize) -> CountMatrix {
        let mut matrix = CountMatrix::new();
        matrix.reset(&self.placement, rank);
        for layout in &self.layouts {
            matrix.add(&layout.expert_counts, &layout.rank_counts).unwrap();
        }
        matrix.finish().unwrap();
        matrix
    }

    fn source(&self, rank: usize) -> Source<'_> {
        let tokens = &self.ranks[rank];
        Source {
            payload: tokens.payload.as_ptr(),
            payload_stride: self.fmt.payload_bytes + tokens.gap,
            scales: tokens.scales.as_ptr(),
            scales_stride: self.fmt.scale_bytes + tokens.gap,
            weights: tokens.weights.as_deref(),
        }
    }

    fn targets(&mut self, source: usize) -> Vec<Target> {
        let known = self.known_to(source);
        let rows = self.regions.iter_mut().enumerate();
        rows.map(|(dest, region)| Target {
            base: region.as_mut_ptr(),
            first_row: known.sent_base(dest),
            rows: self.matrix.rows_at(dest),
        })
        .collect()
    }

    fn scatter(&mut self, rank: usize, only: Option<&[bool]>) -> Result<(), KernelError> {
        let targets = self.targets(rank);
        let (fmt, src) = (&self.fmt, &self.source(rank));
        let (layout, placement) = (&self.layouts[rank], &self.placement);
        // SAFETY: the targets are the regions, of the size that the matrix gives.
        unsafe {
            match only {
                None => scatter(fmt, src, layout, placement, rank, &targets),
                Some(only) => scatter_only(fmt, src, layout, placement, rank, &targets, only),
            }
        }
    }

    /// The region of `dest`, record by record.
    fn expected(&self, dest: usize) -> Vec<u8> {
        let mut region = Vec::new();
        let held = self.placement.physical_base(dest)
            ..self.placement.physical_base(dest) + self.placement.local_experts(dest);
        for (rank, tokens) in self.ranks.iter().enumerate() {
            for (token, ids) in tokens.ids.chunks(self.fmt.topk).enumerate() {
                let mine = |&id: &i32| id >= 0 && held.contains(&(id as usize));
                if !ids.iter().any(mine) {
                    continue;
                }
                let pad = |region: &mut Vec<u8>| {
                    region.resize(region.len().next_multiple_of(16), 0);
                };
                let (payload, scale) = (self.fmt.payload_bytes, self.fmt.scale_bytes);
                region.extend(&tokens.payload[token * (payload + tokens.gap)..][..payload]);
                region.extend(&tokens.scales[token * (scale + tokens.gap)..][..scale]);
                pad(&mut region);
                for id in ids {
                    let local = if mine(id) { id - held.start as i32 } else { -1 };
                    region.extend(local.to_ne_bytes());
                }
                pad(&mut region);
                for (k, id) in ids.iter().enumerate() {
                    let weight = tokens.weights.as_ref().map_or(1.0, |w| w[token * ids.len() + k]);
                    region.extend(if mine(id) { weight } else { 0.0 }.to_ne_bytes());
                }
                pad(&mut region);
                region.extend((token as i32).to_ne_bytes());
                region.extend((rank as i32).to_ne_bytes());
                pad(&mut region);
                // What is left of the row's last line is nobody's.
                region.resize(region.len().next_multiple_of(self.fmt.stride), GUARD);
            }
        }
        region
    }

    fn check_scatter(&mut self) {
        for rank in 0..self.ranks.len() {
            self.scatter(rank, None).unwrap();
        }
        for dest in 0..self.ranks.len() {
            assert_eq!(self.regions[dest].len(), self.expected(dest).len());
            assert!(self.regions[dest] == self.expected(dest), "rank {dest}");
        }
    }

    fn check_expand(&self, dest: usize, alignment: usize) {
        let fmt = &self.fmt;
        let efmt = ExpertFormat::new(fmt.kind, fmt.hidden).unwrap();
        let (mut offsets, mut counts) = (Vec::new(), Vec::new());
        self.matrix.expert_offsets(dest, alignment, &mut offsets);
        self.matrix.counts(dest, &mut counts);
        let total = self.matrix.expert_rows(dest, alignment);
        let mut out = vec![GUARD; (total + 1) * efmt.stride];
        let rows = self.matrix.rows_at(dest);
        let mut expander = Expander::new();
        let target = ExpertRows {
            base: out.as_mut_ptr(),
            rows: total,
            fmt: efmt,
            offsets: &offsets,
            counts: &counts,
        };
        // SAFETY: the region has `rows` records, `out` more than `total` rows.
        unsafe { expander.expand(fmt, self.regions[dest].as_ptr(), rows, &target).unwrap() };

        let mut expected = vec![GUARD; out.len()];
        let mut map = vec![-1; rows * fmt.topk];
        for expert in 0..counts.len() {
            let mut position = offsets[expert] as usize;
            for row in 0..rows {
                let record = &self.regions[dest][row * fmt.stride..][..fmt.stride];
                for k in 0..fmt.topk {
                    if i32_at(record, fmt.ids_at + 4 * k) != expert as i32 {
                        continue;
                    }
                    let to = &mut expected[position * efmt.stride..][..efmt.stride];
                    to[..efmt.weight_at + 16].fill(0);
                    to[..fmt.ids_at].copy_from_slice(&record[..fmt.ids_at]);
                    let weight = f32_at(record, fmt.weights_at + 4 * k);
                    to[efmt.weight_at..][..4].copy_from_slice(&weight.to_ne_bytes());
                    to[efmt.row_at..][..4].copy_from_slice(&(row as i32).to_ne_bytes());
                    map[row * fmt.topk + k] = position as i32;
                    position += 1;
                }
            }
            for position in position..offsets[expert + 1] as usize {
                let to = &mut expected[position * efmt.stride..][..efmt.stride];
                to.fill(0);
                to[efmt.row_at..][..4].copy_from_slice(&(-1_i32).to_ne_bytes());
            }
        }
        assert_eq!(expander.map, map);
        assert!(out == expected, "rank {dest}, alignment {alignment}");
    }
}

fn kinds() -> Vec<(PayloadKind, usize)> {
    vec![
        (PayloadKind::Bf16, 8),
        (PayloadKind::F16, 64),
        (PayloadKind::F32, 36),
        (PayloadKind::Fp8 { scales: ScaleKind::F32 }, 2880),
        (PayloadKind::Fp8 { scales: ScaleKind::Ue8m0 }, 144),
        (PayloadKind::Opaque { row_bytes: 48, aux_bytes: 5 }, 1),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn rows_arrive_and_expand(
        (kind, hidden) in prop::sample::select(kinds()),
        topk in 1_usize..10,
        experts in 3_usize..20,
        tokens in 0_usize..30,
        alignment in prop::sample::select(vec![1_usize, 8, 64, 128]),
    ) {
        let mut case = Case::new(kind, hidden, topk, experts, tokens);
        case.check_scatter();
        for dest in 0..3 {
            case.check_expand(dest, alignment);
        }
    }
}

#[test]
fn rows_larger_than_the_cache_take_the_streaming_path() {
    let mut case = Case::new(PayloadKind::Bf16, 2048, 6, 20, 700);
    assert!(case.regions.iter().all(|r| r.len() > 4 << 20));
    case.check_scatter();
    case.check_expand(1, 8);
}

#[test]
fn only_the_chosen_ranks_are_written() {
    let mut case = Case::new(PayloadKind::Bf16, 64, 4, 12, 20);
    for rank in 0..3 {
        case.scatter(rank, Some(&[false, true, false])).unwrap();
    }
    assert!(case.regions[1] == case.expected(1));
    assert!(case.regions[0].iter().chain(&case.regions[2]).all(|&b| b == GUARD));
}

#[test]
fn arguments_that_do_not_fit_write_nothing() {
    let mut case = Case::new(PayloadKind::Fp8 { scales: ScaleKind::F32 }, 64, 4, 12, 20);
    let targets = case.targets(0);
    let (fmt, src) = (case.fmt, case.source(0));
    let (layout, placement) = (&case.layouts[0], &case.placement);
    let run = |fmt: &RecordFormat, src: &Source<'_>, targets: &[Target]| {
        // SAFETY: the targets are the regions; every change below is one that is refused.
        unsafe { scatter(fmt, src, layout, placement, 0, targets) }.unwrap_err()
    };
    let mut small = targets.clone();
    small[2].rows = small[2].first_row + layout.rank_counts[2] as usize - 1;
    let needed = small[2].rows + 1;
    let full =
        KernelError::Capacity { operation: "scatter", rank: 2, needed, available: needed - 1 };
    assert_eq!(run(&fmt, &src, &small), full);
    let mut null = targets.clone();
    null[1].base = std::ptr::null_mut();
    assert!(matches!(run(&fmt, &src, &null), KernelError::Null { what: "a target", .. }));
    let no_payload = Source { payload: std::ptr::null(), ..src };
    assert!(matches!(run(&fmt, &no_payload, &targets), KernelError::Null { what: "payload", .. }));
    let no_scales = Source { scales: std::ptr::null(), ..src };
    assert!(matches!(run(&fmt, &no_scales, &targets), KernelError::Null { what: "scales", .. }));
    let weights = Source { weights: Some(&[1.0]), ..src };
    assert!(matches!(run(&fmt, &weights, &targets), KernelError::Length { what: "weights", .. }));
    assert!(matches!(run(&fmt, &src, &targets[1..]), KernelError::Length { what: "targets", .. }));
    let other = RecordFormat::new(fmt.kind, 64, 5).unwrap();
    assert!(matches!(run(&other, &src, &targets), KernelError::Length { .. }));
    assert!(case.regions.iter().flatten().all(|&b| b == GUARD));
}

#[test]
fn rows_that_disagree_with_their_counts_are_refused() {
    let mut case = Case::new(PayloadKind::Bf16, 8, 3, 6, 12);
    case.check_scatter();
    let (fmt, rows) = (case.fmt, case.matrix.rows_at(0));
    let efmt = ExpertFormat::new(fmt.kind, fmt.hidden).unwrap();
    let (mut offsets, mut counts) = (Vec::new(), Vec::new());
    case.matrix.expert_offsets(0, 8, &mut offsets);
    case.matrix.counts(0, &mut counts);
    let total = case.matrix.expert_rows(0, 8);
    let mut out = vec![GUARD; total * efmt.stride];
    let base = out.as_mut_ptr();
    let run = |region: &[u8], offsets: &[i32], counts: &[i32], room| {
        let target = ExpertRows { base, rows: room, fmt: efmt, offsets, counts };
        // SAFETY: `out` has `total` rows and `room` is at most that.
        unsafe { Expander::new().expand(&fmt, region.as_ptr(), rows, &target) }.unwrap_err()
    };
    let inconsistent = |error| matches!(error, KernelError::Inconsistent { .. });
    let with_id = |id: i32| {
        let mut region = case.regions[0].clone();
        let k = (0..3).find(|k| i32_at(&region, fmt.ids_at + 4 * k) >= 0).unwrap();
        region[fmt.ids_at + 4 * k..][..4].copy_from_slice(&id.to_ne_bytes());
        region
    };
    assert!(inconsistent(run(&with_id(2), &offsets, &counts, total)));
    assert!(inconsistent(run(&with_id(-7), &offsets, &counts, total)));
    assert!(inconsistent(run(&with_id(-1), &offsets, &counts, total)));
    let fewer = [counts[0] - 1, counts[1]];
    assert!(inconsistent(run(&case.regions[0], &offsets, &fewer, total)));
    assert!(inconsistent(run(&case.regions[0], &[0, 0, offsets[2]], &counts, total)));
    assert!(inconsistent(run(&case.regions[0], &[-8, 0, offsets[2]], &counts, total)));
    let full = run(&case.regions[0], &offsets, &counts, total - 1);
    assert!(matches!(full, KernelError::Capacity { needed, .. } if needed == total));
    let lengths = run(&case.regions[0], &offsets[1..], &counts, total);
    assert!(matches!(lengths, KernelError::Length { what: "offsets", .. }));
    assert!(out.iter().all(|&b| b == GUARD));
}

#[test]
fn copies_and_gathers_keep_to_their_rows() {
    // Small, and large enough to be streamed; unaligned starts and odd sizes.
    for (row_bytes, rows) in [(48, 5), (1003, 5000)] {
        let (from_stride, to_stride) = (row_bytes + 7, row_bytes + 16);
        let src = bytes(rows * from_stride + 3, 5);
        let index: Vec<i32> = (0..rows as i32).map(|i| (i * 3) % (rows as i32 + 1) - 1).collect();
        let mut copied = vec![GUARD; rows * to_stride + 1];
        let mut gathered = copied.clone();
        // SAFETY: all rows lie inside the vectors.
        unsafe {
            let from = src.as_ptr().add(3);
            let to = copied.as_mut_ptr().add(1);
            copy_rows(from, from_stride, to, to_stride, row_bytes, rows);
            let to = gathered.as_mut_ptr().add(1);
            gather(from, from_stride, &index, to, to_stride, row_bytes);
        }
        let expect = |row_of: &dyn Fn(usize) -> i32| {
            let mut all = vec![GUARD; rows * to_stride + 1];
            for i in 0..rows {
                let to = &mut all[1 + i * to_stride..][..row_bytes];
                match usize::try_from(row_of(i)) {
                    Ok(row) => to.copy_from_slice(&src[3 + row * from_stride..][..row_bytes]),
                    Err(_) => to.fill(0),
                }
            }
            all
        };
        assert!(copied == expect(&|i| i as i32));
        assert!(gathered == expect(&|i| index[i]));
    }
}

#[test]
fn formats_have_the_documented_sizes() {
    let fmt = RecordFormat::new(PayloadKind::Fp8 { scales: ScaleKind::F32 }, 2880, 6).unwrap();
    assert_eq!((fmt.payload_bytes, fmt.scales_at, fmt.scale_bytes), (2880, 2880, 92));
    assert_eq!((fmt.ids_at, fmt.weights_at, fmt.source_at), (2976, 3008, 3040));
    assert_eq!(fmt.stride, 3072);
    let efmt = ExpertFormat::new(PayloadKind::Fp8 { scales: ScaleKind::Ue8m0 }, 2880).unwrap();
    assert_eq!(
        (efmt.scale_bytes, efmt.weight_at, efmt.row_at, efmt.stride),
        (23, 2912, 2916, 2944)
    );
}

#[test]
fn shapes_that_make_no_rows_are_refused() {
    let new = |kind, hidden, topk| RecordFormat::new(kind, hidden, topk).unwrap_err();
    let opaque = |row_bytes, aux_bytes| PayloadKind::Opaque { row_bytes, aux_bytes };
    assert_eq!(
        new(PayloadKind::Bf16, 4, 1),
        KernelError::RowBytes { kind: PayloadKind::Bf16, bytes: 8 }
    );
    assert!(matches!(new(opaque(0, 0), 1, 1), KernelError::RowBytes { .. }));
    assert!(matches!(new(opaque(16, 1 << 28), 1, 1), KernelError::Argument { .. }));
    assert!(matches!(new(PayloadKind::Bf16, 0, 1), KernelError::Argument { .. }));
    assert!(matches!(new(PayloadKind::Bf16, usize::MAX, 1), KernelError::Argument { .. }));
    assert!(matches!(new(PayloadKind::Bf16, 8, 0), KernelError::Argument { .. }));
    assert!(matches!(ExpertFormat::new(PayloadKind::F32, 3), Err(KernelError::RowBytes { .. })));
}

#[test]
fn kinds_have_distinct_codes_and_names() {
    let mut kinds: Vec<PayloadKind> = kinds().into_iter().map(|(kind, _)| kind).collect();
    for (row_bytes, aux_bytes) in [(16, 5), (48, 6), (u32::MAX - 15, 0), (16, (1 << 28) - 1)] {
        kinds.push(PayloadKind::Opaque { row_bytes, aux_bytes });
    }
    for (i, a) in kinds.iter().enumerate() {
        for b in &kinds[..i] {
            assert_ne!(a.code(), b.code(), "{a} {b}");
            assert_ne!(a.to_string(), b.to_string());
        }
    }
    assert!(PayloadKind::Bf16.reducible() && !kinds[3].reducible());
    assert_eq!((kinds[3].dtype(), kinds[5].dtype()), (DType::Fp8E4M3, DType::Bytes));
}
