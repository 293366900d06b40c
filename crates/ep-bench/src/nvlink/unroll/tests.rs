use std::collections::BTreeSet;

use super::*;
use crate::case::{Dtype, Layout};
use crate::nvlink::standard;
use crate::workload::Workload;

fn case() -> Case {
    standard(Operation::Dispatch, Workload::Train, 2, Dtype::Bf16, Layout::RankMajor)
}

fn all(quick: bool, only: Option<&str>, seed: u64) -> Vec<Point> {
    let scope = Scope { quick, only: only.map(String::from) };
    points(&scope, (24, seed), &case(), &DeviceProperties::h200())
}

#[test]
fn every_unroll_and_bulk_copies_are_tried_for_both() {
    let points = all(false, None, 1);
    for operation in OPERATIONS {
        for unroll in UNROLLS {
            let path = CopyPath::LdSt { unroll };
            let there = |p: &&Point| p.operation == operation && p.plan.path == path;
            assert!(points.iter().any(|p| there(&p)), "{operation:?} {unroll}");
        }
        assert!(points.iter().filter(|p| p.operation == operation && p.is_tma()).count() > 5);
    }
    assert!(points.iter().all(|p| p.plan.blocks == 24));
}

#[test]
fn points_are_distinct_and_in_an_order_of_the_seed() {
    let names = |seed| -> Vec<String> {
        let points = all(false, None, seed).into_iter();
        points.map(|p| format!("{} {}", p.operation.name(), p.how())).collect()
    };
    let (one, other) = (names(1), names(2));
    assert_eq!(one, names(1));
    assert_ne!(one, other);
    let distinct: BTreeSet<_> = one.iter().collect();
    assert_eq!(distinct.len(), one.len());
    assert_eq!(distinct, other.iter().collect());
    assert!(all(true, None, 1).len() < one.len() / 2);
    assert_eq!(all(false, Some("combine 24 ldst u4 w16"), 1).len(), 1);
}

fn timed(how: &str, alone: f64, beside: [f64; 2]) -> (Point, Times) {
    let points = all(false, Some(how), 1);
    let times = Times { runs: vec![alone], alone: Some(alone), beside: beside.map(Some) };
    (points[0], times)
}

#[test]
fn tuned_is_the_best_beside_compute() {
    let list = vec![
        timed("dispatch 24 ldst u4 w16", 100.0, [120.0, 130.0]),
        timed("dispatch 24 ldst u2 w24", 104.0, [110.0, 128.0]),
        timed("dispatch 24 tma 2x14336 w5", 103.0, [111.0, 119.0]),
        timed("combine 24 ldst u4 w16", 1.0, [1.0, 1.0]),
    ];
    let found = best(&list, Operation::Dispatch);
    assert_eq!(found.alone, Some(0));
    assert_eq!(found.beside, [Some(1), Some(2)]);
    assert_eq!(found.paths, [Some(2), Some(1)]);
    assert_eq!(chosen(&found), [0, 1, 2]);
    assert_eq!(best(&list, Operation::Combine).beside, [Some(3), Some(3)]);
    assert_eq!(best(&[], Operation::Combine), Best::default());

    let mut job = case();
    job.shape = crate::case::Shape { ranks: 2, tokens: 9, hidden: 64, topk: 2, experts: 6 };
    let job = super::super::job(job, false, &[]).unwrap();
    let rows = summaries(&job, (24, 24), &list, (Operation::Dispatch, &found));
    assert_eq!(rows.len(), 2);
    let of = |row: &Row, name: &str| row.metrics[name].as_f64().unwrap();
    assert!((of(&rows[0], "overlapped") - 0.20).abs() < 1e-9);
    assert!((of(&rows[0], "tuned") - 0.10).abs() < 1e-9);
    assert_eq!(rows[0].metrics["verdict"], "missed");
    assert!((of(&rows[1], "tuned") - 0.19).abs() < 1e-9);
    assert!(rows[1].metrics["verdict"].is_null());
    let row = result(&job, (24, 24), (1, &list[1].0, &list[1].1), &found);
    assert!(row.verified && row.metrics["best_holder"] == true && row.metrics["unroll"] == 2);
}

#[test]
fn a_rank_that_saw_a_call_outside_takes_it_out() {
    let beheld = |us, inside| Beheld { us, inside, blocked: false };
    let one: Sample =
        (vec![5.0, 7.0], [vec![beheld(6.0, true), beheld(9.0, true)], vec![beheld(8.0, true)]]);
    let two: Sample =
        (vec![6.0, 6.0], [vec![beheld(5.0, true), beheld(1.0, false)], vec![beheld(2.0, false)]]);
    let times = merge([&one, &two].into_iter());
    assert_eq!(times.runs, [6.0, 7.0]);
    assert_eq!(times.beside, [Some(6.0), None]);
}

/// Rows that compare plans in force have other metrics than points.
#[test]
fn points_come_from_the_fastest_on_behind_all_others() {
    let row = |bench: &str, metrics: &[(&str, Value)]| Row {
        metrics: metrics.iter().map(|(name, value)| ((*name).into(), value.clone())).collect(),
        ..crate::report::tests::row(bench, 9)
    };
    let point = |us: f64| row("dispatch", &[("path", json!("tma")), ("alone_us", json!(us))]);
    let mut rows = vec![
        point(7.0),
        point(5.0),
        row("combine", &[("above_best", json!(0.1))]),
        row("dispatch", &[("above_best", json!(0.2))]),
    ];
    sort(&mut rows);
    let found: Vec<_> = rows.iter().map(|row| row.metrics.get("alone_us").cloned()).collect();
    assert_eq!(found, [None, None, Some(json!(5.0)), Some(json!(7.0))]);
    assert_eq!(rows[1].bench, "combine");
}
