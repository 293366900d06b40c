use std::collections::BTreeSet;

use ep_topology::{Launch, SmMap};

use super::lab::{Held, Lab};
use super::sim::Sim;
use super::study::{Curve, Plan, Point, Study};
use super::*;

/// The domains of an H200, four of whose SM pairs host no larger cluster.
const H200: [usize; 12] = [18, 18, 16, 16, 16, 16, 16, 8, 2, 2, 2, 2];

fn study(sim: &mut Sim) -> Study {
    let plan = Plan { rounds: 2, ..Plan::default() };
    study::run(sim, &plan, &mut |_| Ok(()), &mut |_| {}).unwrap()
}

fn wrong(study: &Study) -> Vec<String> {
    let all = study.combinations.iter();
    all.flat_map(|c| c.violations().into_iter().map(|v| format!("{:?}: {v}", c.plan.launch)))
        .collect()
}

#[test]
fn predictions_hold_on_a_device_that_works_as_assumed() {
    for jitter in [false, true] {
        let mut sim = Sim { jitter, ..Sim::new(&H200) };
        let study = study(&mut sim);
        assert_eq!(study.combinations.len(), 42);
        assert_eq!(study.combinations.iter().filter(|c| c.held_out).count(), 18);
        // With jitter, trials see other sets than the recorded ones: only the proved bound must hold.
        let wrong = wrong(&study);
        let broken = wrong.iter().filter(|w| !jitter || w.contains("worst case")).count();
        assert_eq!(broken, 0, "{wrong:#?}");
    }
}

#[test]
fn a_device_that_needs_more_is_calibrated_where_it_was_looked_at() {
    let mut sim = Sim { reserve: 3, ..Sim::new(&H200) };
    let study = study(&mut sim);
    assert!(!study.predictions.calibrations.is_empty());
    let at = |c: &&study::Combination| c.plan.launch == Launch::new(8, 1, true);
    let plain = study.combinations.iter().find(at).unwrap();
    assert_eq!(plain.plain.starts_from(), Some(8));
    assert_eq!(plain.adversary.starts_from(), Some(8));
}

#[test]
fn the_adversary_reaches_the_worst_case_and_never_exceeds_it() {
    let mut sim = Sim::new(&H200);
    let study = study(&mut sim);
    let mut reached = 0;
    for c in study.combinations.iter().filter(|c| c.plan.launch.cooperative) {
        let (seen, worst) = (c.adversary.starts_from().unwrap(), c.plan.starts.unwrap().worst_case);
        assert!(seen <= worst, "{:?}", c.plan.launch);
        reached += u32::from(seen == worst);
    }
    assert_eq!(reached, 21, "the bound is tight on a device that works as assumed");
}

#[test]
fn a_domain_that_hosts_nothing_and_was_not_seen_to_breaks_the_bound_and_is_reported() {
    // The device refuses larger launches than it was observed to take.
    struct Liar(Sim);
    impl Lab for Liar {
        fn name(&self) -> String {
            self.0.name()
        }
        fn observe(&mut self) -> Result<ep_topology::SmObservation> {
            self.0.observe()
        }
        fn left_free(&mut self, free: u32) -> Result<Vec<u32>> {
            self.0.left_free(free)
        }
        fn trial(&mut self, held: &Held, launch: Launch) -> Result<lab::Trial> {
            self.0.no_clusters = vec![0, 1, 2];
            self.0.trial(held, launch)
        }
    }
    let plan = Plan { rounds: 2, ..Plan::default() };
    let study =
        study::run(&mut Liar(Sim::new(&H200)), &plan, &mut |_| Ok(()), &mut |_| {}).unwrap();
    assert!(wrong(&study).iter().any(|w| w.contains("worst case") || w.contains("largest")));
}

#[test]
fn predictions_come_before_anything_that_is_predicted_is_observed() {
    let mut sim = Sim::new(&[8, 8, 4]);
    let plan = Plan { blocks: vec![4, 8], held_out: vec![8], rounds: 2, ..Plan::default() };
    let steps = std::cell::RefCell::new(Vec::new());
    study::run(
        &mut sim,
        &plan,
        &mut |predictions| {
            assert!(predictions.calibrations.iter().all(|c| c.launch.blocks != 8));
            assert_eq!(predictions.plans.len(), 12);
            steps.borrow_mut().push("predicted".to_owned());
            Ok(())
        },
        &mut |step| steps.borrow_mut().push(step.to_owned()),
    )
    .unwrap();
    let steps = steps.into_inner();
    let predicted = steps.iter().position(|s| s == "predicted").unwrap();
    let (before, after) = steps.split_at(predicted);
    assert!(
        before.iter().all(|s| !s.starts_with("observing:") && !s.contains("8 blocks")),
        "{before:?}"
    );
    assert_eq!(after.len(), 13);
}

#[test]
fn devices_without_clusters_are_studied_without_them() {
    let mut sim = Sim { sizes: vec![1], ..Sim::new(&[10, 10, 20]) };
    let study = study(&mut sim);
    assert_eq!(study.combinations.len(), 14);
    assert_eq!(wrong(&study), Vec::<String>::new());
}

#[test]
fn every_beginning_of_the_adversarys_order_hosts_as_little_as_any_set() {
    let sim = Sim::new(&[5, 4, 2]);
    let map = SmMap::new(Sim::new(&[5, 4, 2]).observe().unwrap()).unwrap();
    for cluster in [1u32, 2, 4] {
        let hosts = |set: &BTreeSet<u32>| -> u32 {
            let domain = |d: &Vec<u32>| d.iter().filter(|sm| set.contains(sm)).count() as u32;
            sim.domains.iter().map(|d| domain(d) / cluster).sum()
        };
        let mut least = [u32::MAX; 12];
        for bits in 0u32..1 << 11 {
            let set: BTreeSet<u32> = (0..11).filter(|sm| bits >> sm & 1 == 1).collect();
            least[set.len()] = least[set.len()].min(hosts(&set));
        }
        for round in 0..4 {
            let order = adversary::order(&map, cluster, round);
            assert_eq!(order.iter().collect::<BTreeSet<_>>().len(), 11);
            for (size, least) in least.iter().enumerate() {
                let set: BTreeSet<u32> = order[..size].iter().copied().collect();
                assert_eq!(hosts(&set), *least, "cluster {cluster}, {size} SMs, round {round}");
            }
        }
    }
}

#[test]
fn curves_are_read_from_the_top() {
    let point = |margin, started| Point { margin, trials: 2, started, resident: 0 };
    let curve = Curve(vec![point(1, 0), point(2, 2), point(3, 1), point(4, 2), point(5, 2)]);
    assert_eq!((curve.starts_from(), curve.first_start()), (Some(4), Some(2)));
    assert_eq!(curve.resident_from(), None);
    assert_eq!(Curve(vec![point(1, 1)]).starts_from(), None);
}

#[test]
fn the_limit_ends_a_study() {
    let plan = Plan { limit: Duration::ZERO, ..Plan::default() };
    let error = study::run(&mut Sim::new(&H200), &plan, &mut |_| Ok(()), &mut |_| {}).unwrap_err();
    assert!(error.to_string().contains("--rounds"), "{error}");
}

#[test]
fn files_are_written_and_violations_fail_the_run() {
    let folder = std::env::temp_dir().join(format!("ep-margin-{}", std::process::id()));
    let args = Args {
        gpu: 0,
        rounds: 2,
        budget: 100,
        json: Some(folder.join("margin.json")),
        html: Some(folder.join("margin.html")),
        predictions: None,
        commit: Some("abc".into()),
    };
    assert!(run_on(&mut Sim::new(&H200), &args, &Plan::default()).unwrap());
    let text = std::fs::read_to_string(folder.join("margin.json")).unwrap();
    let report = Report::parse(&text).unwrap();
    assert_eq!(report.results.len(), 42);
    assert!(report.results.iter().all(|row| row.bench == "margin" && row.verified));
    let row =
        report.results.iter().find(|r| r.sms == 16 && r.launch == "cluster2+cooperative").unwrap();
    assert!(row.metrics["observed_starts"].as_u64() >= Some(16));
    assert!(row.metrics["predicted_starts"]["worst_case"].as_u64() >= Some(16));
    let predictions = std::fs::read_to_string(folder.join("margin-predictions.json")).unwrap();
    assert!(predictions.contains("\"held_out\""));
    let page = std::fs::read_to_string(folder.join("margin.html")).unwrap();
    assert_eq!(page.matches("class=\"pred\"").count(), 42);
    assert!(!page.contains("http"));
    std::fs::remove_dir_all(&folder).unwrap();

    // A device on which held SMs are never enough.
    let args = Args { json: None, html: None, ..args };
    let mut never = Sim { reserve: 1000, ..Sim::new(&H200) };
    assert!(!run_on(&mut never, &args, &Plan::default()).unwrap());
}

#[test]
fn text_fits_the_terminal() {
    let study = study(&mut Sim::new(&H200));
    for text in [output::table(&study), output::predictions(&study.predictions)] {
        assert!(text.lines().all(|line| line.chars().count() <= crate::report::WIDTH), "{text}");
    }
}
