use std::collections::BTreeSet;

use super::judge::{Figures, bounds, loss, worst};
use super::load::interval;
use super::points::{SMS, configs};
use super::seat::{Beheld, hold_for, is_blocked};
use super::*;
use crate::case::{Dtype, Layout, Shape};
use crate::machine::Machine;
use crate::nvlink::standard;
use crate::workload::Workload;
use clap::Parser as _;

fn scope(quick: bool, only: Option<&str>) -> Scope {
    Scope { quick, only: only.map(String::from) }
}

fn names(scope: &Scope, seed: u64) -> Vec<String> {
    let points = configs(scope, seed).into_iter().flat_map(|(_, points)| points);
    points.map(|point| point.to_string()).collect()
}

#[test]
fn every_point_is_tried_once_in_an_order_of_the_seed() {
    let all = scope(false, None);
    let (one, other) = (names(&all, 1), names(&all, 2));
    assert_eq!(one, names(&all, 1));
    assert_ne!(one, other);
    let distinct: BTreeSet<_> = one.iter().collect();
    assert_eq!(distinct, other.iter().collect());
    // Two policies with three loads and one with two, for both operations.
    assert_eq!((one.len(), distinct.len()), (SMS.len() * 16, SMS.len() * 16));
    assert!(!one.iter().any(|name| name.starts_with("shared") && name.contains("holder")));
    let sorted = {
        let mut sorted = one.clone();
        sorted.sort();
        sorted
    };
    assert_ne!(one, sorted);
}

#[test]
fn parts_can_be_run() {
    let of = |only| names(&scope(false, Some(only)), 3);
    assert_eq!(of("partition 16 dispatch gemm"), ["partition 16 dispatch gemm"]);
    assert_eq!(of("holder").len(), 2 * 2 * SMS.len());
    assert!(of("nothing").is_empty() && of("tries").is_empty());
    let quick = names(&scope(true, None), 3);
    assert!(quick.len() < names(&scope(false, None), 3).len() / 2);
    let tries = |only| tries::all(&scope(false, Some(only)), 3).into_iter().flat_map(|(_, t)| t);
    assert_eq!(tries("tries partition").count(), 8);
    assert_eq!(tries("pipeline").count(), 0);
}

#[test]
fn tries_have_names_of_their_own() {
    let all: Vec<_> = tries::all(&scope(false, None), 1).into_iter().flat_map(|(_, t)| t).collect();
    let names: BTreeSet<String> = all.iter().map(tries::Try::name).collect();
    assert_eq!(names.len(), all.len());
    assert!(names.contains("tries partition 16 combine cluster2-cooperative"));
    assert!(names.contains("tries unplanned margin 16 dispatch cluster2-cooperative"));
}

fn sms(taken: u32) -> Sms {
    Sms { asked: 12, taken, blocks: 12, compute: 132 - taken, all: 132, why: None }
}

fn figures(beside_us: f64, loss: f64) -> Figures {
    Figures {
        alone_us: Some(100.0),
        beside_us: Some(beside_us),
        loss: Some(loss),
        loss_own: Some(0.04),
        ..Figures::default()
    }
}

fn verdict(policy: Policy, beside: Beside, figures: &Figures) -> Option<&'static str> {
    worst(&bounds(policy, beside, &sms(16), figures))
}

#[test]
fn bounds_are_those_asked_for() {
    use Beside::{CublasLt, Gemm, Holder};
    use Policy::{Margin, Partition, Shared};
    let of = |policy, beside, us| verdict(policy, beside, &figures(us, 0.0));
    assert_eq!(of(Partition, Holder, 100.9), Some("goal"));
    assert_eq!(of(Partition, Holder, 102.9), Some("must"));
    assert_eq!(of(Partition, Holder, 103.1), Some("missed"));
    assert_eq!(of(Partition, Gemm, 105.9), Some("goal"));
    assert_eq!(of(Partition, Gemm, 112.1), Some("missed"));
    assert_eq!(of(Margin, Holder, 107.9), Some("must"));
    assert_eq!(of(Margin, Gemm, 300.0), Some("goal"));
    assert_eq!(of(Partition, CublasLt, 300.0), None);
    assert_eq!(of(Shared, Gemm, 300.0), None);
    // Compute may lose the SMs that were taken and 5 %; a blocked launch is never right.
    let most = 16.0 / 132.0 + 0.05;
    assert_eq!(verdict(Partition, Gemm, &figures(100.0, most - 0.001)), Some("goal"));
    assert_eq!(verdict(Partition, Gemm, &figures(100.0, most + 0.001)), Some("missed"));
    let half = Figures { loss_own: Some(0.5), ..figures(100.0, 0.1) };
    assert_eq!(verdict(Partition, Gemm, &half), Some("must"));
    let blocked = Figures { blocked: 1, ..figures(100.0, 0.0) };
    assert_eq!(verdict(Margin, Holder, &blocked), Some("missed"));
    // What was never measured was not reached.
    assert_eq!(verdict(Partition, Holder, &Figures::default()), Some("missed"));
}

#[test]
fn losses_are_shares_of_speed() {
    assert_eq!(loss(Some(100.0), Some(125.0)), Some(1.0 - 0.8));
    assert_eq!(loss(Some(100.0), Some(100.0)), Some(0.0));
    assert_eq!(loss(None, Some(1.0)), None);
}

#[test]
fn compute_is_measured_between_ends_inside_the_window() {
    assert_eq!(interval(&[-3.0, 2.0, 5.0, 8.0, 12.0], 10.0), Some(3.0));
    assert_eq!(interval(&[0.0, 10.0], 10.0), Some(10.0));
    assert_eq!(interval(&[-1.0, 4.0, 12.0], 10.0), None);
    assert_eq!(interval(&[], 10.0), None);
}

#[test]
fn a_call_that_waited_for_its_holder_is_told_from_a_late_host() {
    let (calls, expected) = (4, 400.0);
    let hold = hold_for(calls, expected).as_secs_f64() * 1e6;
    // Even the last of the calls would wait longer than it may take.
    assert!(is_blocked(hold - 3.0 * expected, expected));
    assert!(!is_blocked(1.5 * expected, expected));
    assert!(hold_for(100_000, expected) <= hold::LONGEST);
}

fn beheld(us: f64, inside: bool, blocked: bool) -> Beheld {
    Beheld { us, inside, blocked }
}

#[test]
fn the_slowest_rank_counts_where_all_saw_the_call_inside() {
    let one = point::Sample {
        alone: vec![10.0, 12.0, 11.0],
        beside: vec![beheld(20.0, true, false), beheld(1.0, true, false), beheld(9.0, true, false)],
        all_us: vec![100.0],
        own_us: vec![110.0],
        beside_us: vec![200.0],
        clock_beside: vec![1500.0],
        ..point::Sample::default()
    };
    let two = point::Sample {
        alone: vec![11.0, 10.0, 10.0],
        beside: vec![beheld(8.0, true, false), beheld(2.0, false, false), beheld(9.0, false, true)],
        beside_us: vec![125.0],
        clock_beside: vec![1400.0],
        ..one.clone()
    };
    let (alone, beside, figures) = point::merge(&[one, two]);
    assert_eq!((alone, beside), (vec![11.0, 12.0, 11.0], vec![20.0]));
    assert_eq!((figures.blocked, figures.outside), (1, 1));
    assert_eq!((figures.loss, figures.clock_beside), (Some(0.5), Some(1400.0)));
    assert_eq!(figures.tflops_beside, Some(multiply::FLOPS / 200.0 / 1e6));
    assert_eq!(figures.slowdown(), Some(20.0 / 11.0 - 1.0));
}

#[test]
fn a_pipeline_is_measured_against_what_no_schedule_undercuts() {
    let runs = |dispatch: f64| stages::Runs {
        dispatch: vec![dispatch + 1.0, dispatch],
        experts: vec![10.0, 11.0],
        combine: vec![2.0],
        pair: vec![4.0],
    };
    let sample = |dispatch, run| pipeline::Sample {
        alone: runs(dispatch),
        busy: runs(2.0 * dispatch),
        pipeline: vec![run],
        serial: vec![120.0],
        ..pipeline::Sample::default()
    };
    let outcome = pipeline::merge(&[sample(1.0, 88.0), sample(4.0, 90.3)]).unwrap();
    // The least time of each stage of the rank that has the most: 4 + 8 · 10 + 2.
    assert_eq!(outcome.ideal_us, 86.0);
    assert_eq!(outcome.ratio, Some(90.3 / 86.0));
    assert_eq!((outcome.alone.dispatch, outcome.busy.dispatch), (4.0, 8.0));
    assert_eq!(outcome.busy_us, bound::line(8, (8.0, 10.0, 2.0)));
    assert_eq!(pipeline::merge(&[pipeline::Sample::default()]), None);
}

#[test]
fn slowdowns_are_divided_into_clocks_and_sharing() {
    let figures = Figures { warm_us: Some(120.0), ..figures(150.0, 0.0) };
    assert_eq!(figures.by_clocks(), Some(120.0 / 100.0 - 1.0));
    assert_eq!(figures.by_contention(), Some(150.0 / 120.0 - 1.0));
    let product = (1.0 + figures.by_clocks().unwrap()) * (1.0 + figures.by_contention().unwrap());
    assert!((product - 1.0 - figures.slowdown().unwrap()).abs() < 1e-12);
    assert_eq!(Figures::default().by_clocks(), None);
}

#[test]
fn the_plan_in_force_is_compared_in_every_layer() {
    let wanted = |only, policy| choose::wanted(&Config { policy, sms: 16 }, &scope(false, only));
    assert_eq!(wanted(None, Policy::Margin).len(), 2);
    let only = Some("choice partition 16 combine");
    assert_eq!(wanted(only, Policy::Partition), [Operation::Combine]);
    assert!(wanted(only, Policy::Margin).is_empty());
    // Such a layer is built for nothing else.
    let layers = configs(&scope(false, only), 1);
    assert!(layers.len() == 1 && layers[0].1.is_empty());
}

#[test]
fn two_gpus_are_needed() {
    let args = Args::parse_from(["ep-bench", "overlap", "--transport", "nvlink"]);
    let error = super::scope(&args, &[]).unwrap_err();
    assert!(error.exit_code() == 2 && error.to_string().contains("two GPUs"), "{error}");
}

fn small_job() -> Job {
    let mut case =
        standard(Operation::Dispatch, Workload::Decode, 2, Dtype::Bf16, Layout::RankMajor);
    case.shape = Shape { ranks: 2, tokens: 9, hidden: 64, topk: 2, experts: 6 };
    job(case, false, &[]).unwrap()
}

#[test]
fn rows_say_what_was_found_and_tables_fit() {
    let job = small_job();
    let point = Point {
        config: Config { policy: Policy::Partition, sms: 12 },
        operation: Operation::Combine,
        beside: Beside::Gemm,
    };
    let sample = point::Sample {
        alone: vec![400.0],
        beside: vec![beheld(440.0, true, false)],
        all_us: vec![3000.0],
        own_us: vec![3400.0],
        beside_us: vec![3500.0],
        clock_beside: vec![1755.0],
        ..point::Sample::default()
    };
    let seen = vec![sample.clone(), sample];
    let mut report = Report::new("abc".into(), Machine::default());
    report.results.push(result(&job, &point, (sms(16), seen)));
    let one = &tries::all(&scope(false, Some("unplanned margin 24")), 1)[0].1[0];
    let tried_once = tries::Tried {
        refused: None,
        alone: vec![380.0],
        calls: vec![beheld(9000.0, false, true), beheld(390.0, true, false)],
    };
    report.results.push(tried(&job, one, &[tried_once.clone(), tried_once]));
    let args = Args::parse_from(["ep-bench"]);
    report.results.push(pipelined(&args, &job, &[]).unwrap());
    let row = &report.results[0];
    assert_eq!((row.p50_us, row.sms), (440.0, 12));
    assert_eq!(row.metrics["sms_taken"], 16);
    assert_eq!(row.metrics["verdict"], "must");
    assert_eq!(row.metrics["bounds"].as_array().unwrap().len(), 3);
    assert_eq!(report.results[1].metrics["blocked"], 1);
    assert_eq!(report.results[1].metrics["tries"], 2);
    // The pipeline was not measured: that reaches nothing.
    assert_eq!(report.results[2].metrics["verdict"], "missed");
    let table = table(&report);
    assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
    assert!(table.contains("partition 12 combine gemm") && table.contains("1 of"), "{table}");
    assert!(Report::parse(&report.json()).is_ok());
}
