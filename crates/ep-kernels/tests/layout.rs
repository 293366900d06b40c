//! Placements, layouts and count matrices against straightforward code.

use std::collections::HashMap;

use ep_kernels::{CountMatrix, IdError, Ids, KernelError, Layout, Placement, PlacementFault};
use proptest::prelude::*;

/// A placement as plain lists: the ranks of every expert, in order.
type Holders = Vec<Vec<usize>>;

fn contiguous(experts: usize, ranks: usize) -> Holders {
    let mut holders = Vec::new();
    for rank in 0..ranks {
        let more = usize::from(rank < experts % ranks);
        holders.extend(vec![vec![rank]; experts / ranks + more]);
    }
    holders
}

/// (rank, local) of a logical expert's copy on `rank`, by counting.
fn local_on(holders: &Holders, expert: usize, rank: usize) -> usize {
    holders[..expert].iter().filter(|list| list.contains(&rank)).count()
}

fn naive_owner(holders: &Holders, expert: usize, source: usize, token: usize) -> (usize, usize) {
    let list = &holders[expert];
    let rank = list[(source + token) % list.len()];
    (rank, local_on(holders, expert, rank))
}

/// Ranks that hold each expert, ids of each token (distinct, some −1).
fn case() -> impl Strategy<Value = (usize, Holders, usize, Vec<i64>)> {
    (1_usize..7, 1_usize..24, any::<bool>()).prop_flat_map(|(ranks, experts, explicit)| {
        let experts = experts.max(ranks);
        let all: Vec<usize> = (0..ranks).collect();
        let holders = if explicit {
            let list = prop::sample::subsequence(all, 1..=ranks).prop_shuffle();
            prop::collection::vec(list, experts).boxed()
        } else {
            Just(contiguous(experts, ranks)).boxed()
        };
        let token = (0..=experts).prop_flat_map(move |chosen| {
            let ids: Vec<i64> = (0..experts as i64).collect();
            (prop::sample::subsequence(ids, chosen).prop_shuffle(), Just(experts))
        });
        (holders, prop::collection::vec(token, 0..40), 1..=experts).prop_map(
            move |(holders, tokens, topk)| {
                let pad = |(mut ids, _): (Vec<i64>, usize)| {
                    ids.resize(topk, -1);
                    ids
                };
                (ranks, holders, topk, tokens.into_iter().flat_map(pad).collect())
            },
        )
    })
}

proptest! {
    #[test]
    fn layout_equals_counting((ranks, holders, topk, ids) in case(), source in 0_usize..7) {
        let source = source % ranks;
        let placement = Placement::explicit(ranks, &holders).unwrap();
        let mut layout = Layout::new();
        layout.compute(Ids::I64(&ids), topk, &placement, source, false).unwrap();
        prop_assert_eq!((layout.tokens, layout.topk), (ids.len() / topk, topk));

        let mut per_expert: HashMap<(usize, usize), u32> = HashMap::new();
        let mut per_rank: HashMap<usize, u32> = HashMap::new();
        for (token, ids) in ids.chunks(topk).enumerate() {
            let mut ranks_of_token = Vec::new();
            for (k, &id) in ids.iter().enumerate() {
                let physical = layout.physical[token * topk + k];
                if id == -1 {
                    prop_assert_eq!(physical, -1);
                    continue;
                }
                let owner = naive_owner(&holders, id as usize, source, token);
                prop_assert_eq!(placement.owner(physical as usize), owner);
                prop_assert_eq!(placement.logical(physical as usize), id as usize);
                let seen = per_expert.entry(owner).or_default();
                prop_assert_eq!(layout.expert_index[token * topk + k], *seen);
                *seen += 1;
                ranks_of_token.push(owner.0);
            }
            ranks_of_token.sort_unstable();
            ranks_of_token.dedup();
            let expected: Vec<(usize, usize)> = ranks_of_token
                .into_iter()
                .map(|rank| {
                    let seen = per_rank.entry(rank).or_default();
                    *seen += 1;
                    (rank, *seen as usize - 1)
                })
                .collect();
            prop_assert_eq!(layout.destinations(token).collect::<Vec<_>>(), expected);
        }
        for physical in 0..placement.physical() {
            let count = per_expert.get(&placement.owner(physical)).copied().unwrap_or(0);
            prop_assert_eq!(layout.expert_counts[physical], count);
        }
        for rank in 0..ranks {
            prop_assert_eq!(layout.rank_counts[rank], per_rank.get(&rank).copied().unwrap_or(0));
        }

        // The physical ids found are a routing too, and give the same layout.
        let mut again = Layout::new();
        let physical = layout.physical.clone();
        again.compute(Ids::I32(&physical), topk, &placement, source, true).unwrap();
        prop_assert_eq!(format!("{layout:?}"), format!("{again:?}"));
        // So do 32-bit ids.
        let narrow: Vec<u32> = ids.iter().map(|&id| id as u32).collect();
        again.compute(Ids::U32(&narrow), topk, &placement, source, false).unwrap();
        prop_assert_eq!(format!("{layout:?}"), format!("{again:?}"));
    }

    #[test]
    fn matrix_equals_summing(
        (ranks, holders, _, _) in case(),
        seed in prop::collection::vec(0_u32..9, 7 * (7 * 24 + 7)),
        alignment in prop::sample::select(vec![1_usize, 8, 64, 128]),
    ) {
        let placement = Placement::explicit(ranks, &holders).unwrap();
        let physical = placement.physical();
        let mut numbers = seed.iter().copied().cycle();
        let lines: Vec<(Vec<u32>, Vec<u32>)> = (0..ranks)
            .map(|_| (numbers.by_ref().take(physical).collect(), numbers.by_ref().take(ranks).collect()))
            .collect();
        let known = |rank: usize| {
            let mut matrix = CountMatrix::new();
            matrix.reset(&placement, rank);
            lines.iter().for_each(|(expert, rank)| matrix.add(expert, rank).unwrap());
            matrix.finish().unwrap();
            matrix
        };
        let all: Vec<CountMatrix> = (0..ranks).map(known).collect();
        let matrix = &all[0];
        let (mut offsets, mut counts) = (Vec::new(), Vec::new());
        for dest in 0..ranks {
            let before = |source: usize| lines[..source].iter().map(|l| l.1[dest] as usize).sum();
            let sum = |of: &[u32]| of.iter().map(|&n| n as usize).sum::<usize>();
            for (source, (experts, rows)) in lines.iter().enumerate() {
                prop_assert_eq!(all[source].sent_base(dest), before(source));
                prop_assert_eq!(all[dest].received_base(source), before(source));
                prop_assert_eq!(all[dest].received(source), rows[dest] as usize);
                prop_assert_eq!(all[dest].rows_elsewhere(source), sum(&rows[..dest]));
                let first = placement.physical_base(dest);
                prop_assert_eq!(all[dest].choices_elsewhere(source), sum(&experts[..first]));
            }
            prop_assert_eq!(matrix.rows_at(dest), before(ranks));
            matrix.expert_offsets(dest, alignment, &mut offsets);
            matrix.counts(dest, &mut counts);
            prop_assert_eq!(counts.len(), placement.local_experts(dest));
            prop_assert_eq!(offsets.len(), counts.len() + 1);
            prop_assert_eq!(offsets[0], 0);
            for local in 0..counts.len() {
                let p = placement.physical_base(dest) + local;
                let before = |source: usize| lines[..source].iter().map(|l| l.0[p] as usize).sum();
                for (source, known) in all.iter().enumerate() {
                    prop_assert_eq!(known.expert_base(p), before(source));
                }
                let total: usize = before(ranks);
                prop_assert_eq!(counts[local] as usize, total);
                let room = (offsets[local + 1] - offsets[local]) as usize;
                prop_assert!(room >= total && room < total + alignment && room.is_multiple_of(alignment));
            }
            prop_assert_eq!(matrix.expert_rows(dest, alignment), *offsets.last().unwrap() as usize);
        }
    }
}

#[test]
fn contiguous_gives_the_first_ranks_one_more() {
    for (experts, ranks) in [(10, 4), (8, 8), (288, 7), (5, 1)] {
        let placement = Placement::contiguous(experts, ranks).unwrap();
        let explicit = Placement::explicit(ranks, &contiguous(experts, ranks)).unwrap();
        assert_eq!(placement, explicit);
        assert_eq!(placement.digest(), explicit.digest());
        assert_eq!((placement.experts(), placement.physical()), (experts, experts));
        assert_eq!(placement.local_experts(0), experts.div_ceil(ranks));
        assert_eq!(placement.local_experts(ranks - 1), experts / ranks);
    }
}

#[test]
fn placements_that_contradict_themselves_are_refused() {
    assert_eq!(
        Placement::contiguous(3, 4),
        Err(KernelError::TooFewExperts { experts: 3, ranks: 4 })
    );
    assert!(matches!(Placement::contiguous(3, 0), Err(KernelError::Argument { .. })));
    assert!(matches!(Placement::explicit(2, &[]), Err(KernelError::Argument { .. })));
    let fault = |holders: &[Vec<usize>]| match Placement::explicit(2, holders) {
        Err(KernelError::Placement { expert, fault }) => (expert, fault),
        other => panic!("{other:?}"),
    };
    assert_eq!(fault(&[vec![0], vec![]]), (1, PlacementFault::NoRank));
    assert_eq!(fault(&[vec![2]]), (0, PlacementFault::RankOutOfRange { rank: 2, ranks: 2 }));
    assert_eq!(fault(&[vec![1, 0, 1]]), (0, PlacementFault::RepeatedRank { rank: 1 }));
}

#[test]
fn digests_tell_placements_apart() {
    let given: [(usize, &[Vec<usize>]); 5] = [
        (2, &[vec![0], vec![1]]),
        (2, &[vec![1], vec![0]]),
        (2, &[vec![0, 1], vec![1]]),
        (2, &[vec![1, 0], vec![1]]),
        (3, &[vec![0], vec![1]]),
    ];
    let mut digests: Vec<u64> =
        given.iter().map(|(r, h)| Placement::explicit(*r, h).unwrap().digest()).collect();
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), given.len());
}

#[test]
fn replicas_take_turns_by_source_and_token() {
    let placement = Placement::explicit(3, &[vec![2, 0], vec![1]]).unwrap();
    let rank = |source, token| placement.owner(placement.resolve(0, source, token)).0;
    assert_eq!([rank(0, 0), rank(0, 1), rank(1, 0), rank(1, 1)], [2, 0, 0, 2]);
}

#[test]
fn bad_ids_are_named_and_clear_the_layout() {
    let placement = Placement::contiguous(8, 2).unwrap();
    let mut layout = Layout::new();
    let mut compute = |ids: Ids<'_>, topk| {
        layout.compute(Ids::I32(&[0, 5]), 2, &placement, 0, false).unwrap();
        assert_eq!((layout.tokens, &layout.rank_counts[..]), (1, &[1, 1][..]));
        let error = layout.compute(ids, topk, &placement, 0, false).unwrap_err();
        assert_eq!((layout.tokens, &layout.dest_offsets[..]), (0, &[0][..]));
        assert!(layout.rank_counts.iter().chain(&layout.expert_counts).all(|&n| n == 0));
        assert!(layout.physical.is_empty() && layout.dest_rank.is_empty());
        error
    };
    let range = |token, k, id| IdError::OutOfRange { token, k, id, experts: 8 };
    assert_eq!(compute(Ids::I32(&[0, 1, 2, 8]), 2), range(1, 1, 8));
    assert_eq!(compute(Ids::I64(&[0, -2]), 2), range(0, 1, -2));
    assert_eq!(compute(Ids::I64(&[1 << 32]), 1), range(0, 0, 1 << 32));
    assert_eq!(compute(Ids::U32(&[u32::MAX - 1]), 1), range(0, 0, i64::from(u32::MAX) - 1));
    assert_eq!(compute(Ids::U32(&[1, 2, 7, 7]), 2), IdError::Duplicate { token: 1, id: 7 });
    assert_eq!(compute(Ids::I32(&[1, 2, 3]), 2), IdError::Shape { ids: 3, topk: 2 });
    assert_eq!(compute(Ids::I32(&[]), 0), IdError::Shape { ids: 0, topk: 0 });
    assert_eq!(
        layout.compute(Ids::I32(&[0]), 1, &placement, 2, false),
        Err(IdError::Limit { what: "source_rank", value: 2, limit: 2 })
    );
}

#[test]
fn two_replicas_of_one_expert_are_no_duplicates() {
    let placement = Placement::explicit(2, &[vec![0, 1]]).unwrap();
    let mut layout = Layout::new();
    layout.compute(Ids::I32(&[0, 1]), 2, &placement, 0, true).unwrap();
    assert_eq!(layout.rank_counts, [1, 1]);
    let twice = layout.compute(Ids::I32(&[1, 1]), 2, &placement, 0, true);
    assert_eq!(twice, Err(IdError::Duplicate { token: 0, id: 1 }));
}

#[test]
fn every_expert_of_hundreds_may_be_chosen() {
    let placement = Placement::contiguous(300, 7).unwrap();
    let ids: Vec<u32> = (0..10).flat_map(|t| (0..300).map(move |e| (e * 7 + t) % 300)).collect();
    let mut layout = Layout::new();
    layout.compute(Ids::U32(&ids), 300, &placement, 3, false).unwrap();
    assert!(layout.expert_counts.iter().chain(&layout.rank_counts).all(|&n| n == 10));
    assert_eq!(
        layout.destinations(9).collect::<Vec<_>>(),
        (0..7).map(|r| (r, 9)).collect::<Vec<_>>()
    );
}

#[test]
fn totals_beyond_i32_are_refused() {
    let placement = Placement::contiguous(2, 2).unwrap();
    let of = |sources: &[([u32; 2], [u32; 2])]| {
        let mut matrix = CountMatrix::new();
        matrix.reset(&placement, 0);
        sources.iter().for_each(|(expert, rank)| matrix.add(expert, rank).unwrap());
        matrix
    };
    let most = i32::MAX as u32;
    let mut matrix = of(&[([0, most], [0, 5]), ([0, 0], [0, 0])]);
    matrix.finish().unwrap();
    assert_eq!(matrix.expert_rows(1, 128), 1 << 31);
    let mut offsets = Vec::new();
    matrix.expert_offsets(1, 128, &mut offsets);
    assert_eq!(offsets, [0, i32::MAX]);
    assert!(matches!(matrix.add(&[0, 0], &[0, 0]), Err(KernelError::Length { .. })));
    let many = of(&[([0, most], [0, 5]), ([0, 1], [0, 5])]).finish();
    assert_eq!(many, Err(KernelError::TooManyRows { what: "expert", index: 1 }));
    let many = of(&[([0, most], [0, 5]), ([0, 0], [u32::MAX, 5])]).finish();
    assert_eq!(many, Err(KernelError::TooManyRows { what: "rank", index: 0 }));
    assert!(matches!(of(&[]).finish(), Err(KernelError::Length { .. })));
    assert!(matches!(of(&[]).add(&[0], &[0, 0]), Err(KernelError::Length { .. })));
}
