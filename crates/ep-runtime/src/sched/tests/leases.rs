//! Leases and partitions, taken and dropped in any order by any thread: nothing leaks, nothing
//! overlaps, nothing is given twice.

use std::collections::BTreeSet;
use std::sync::Barrier;

use proptest::prelude::*;

use super::sim::SimDevice;
use crate::sched::carve::NoPart;
use crate::sched::lease::SmBudget;
use crate::sched::policy::SmPolicy;
use crate::sched::reserve::reserve;
use crate::{EpError, ErrorKind};

#[test]
fn a_lease_beyond_the_budget_names_the_holders() {
    let budget = SmBudget::private("GPU-x", 132).unwrap();
    let first = budget.lease("prefill", 24).unwrap();
    let second = budget.lease("decode", 8).unwrap();
    assert_eq!((budget.leased(), budget.free(), budget.compute_sms()), (32, 99, 100));
    let error = budget.lease("greedy", 100).unwrap_err();
    let text = error.to_string();
    assert_eq!(error.kind(), ErrorKind::Busy);
    for part in ["100 SMs", "99 of the 132", "GPU-x", "prefill has 24", "decode has 8"] {
        assert!(text.contains(part), "{text} does not say {part:?}");
    }
    assert_eq!(budget.leased(), 32, "an error takes nothing");
    let same = first.clone();
    drop(first);
    assert_eq!(budget.leased(), 32, "a clone holds the lease");
    drop((same, second));
    assert_eq!((budget.leased(), budget.holders().len()), (0, 0));
    assert!(budget.lease("all but one", 131).is_ok());
    assert!(matches!(budget.lease("none", 0), Err(EpError::Argument { .. })));
    let all = budget.lease("all", 132).unwrap_err().to_string();
    assert!(all.contains("compute keeps 1"), "{all}");
}

#[test]
fn a_device_has_one_account_in_the_process() {
    let one = SmBudget::of("GPU-of-this-test", 64).unwrap();
    let lease = SmBudget::of("GPU-of-this-test", 64).unwrap().lease("elsewhere", 40).unwrap();
    assert_eq!(one.free(), 23);
    assert!(one.lease("here", 24).is_err());
    assert_eq!(SmBudget::of("GPU-another", 64).unwrap().leased(), 0);
    assert!(matches!(SmBudget::of("GPU-of-this-test", 65), Err(EpError::Argument { .. })));
    drop(one);
    // The lease keeps the account.
    assert_eq!(SmBudget::of("GPU-of-this-test", 64).unwrap().leased(), 40);
    drop(lease);
    assert_eq!(SmBudget::of("GPU-of-this-test", 64).unwrap().leased(), 0);
    assert!(matches!(SmBudget::of("GPU-nothing", 0), Err(EpError::Argument { .. })));
}

#[test]
fn a_lease_that_cannot_grow_stays_as_it_was() {
    let budget = SmBudget::private("GPU-x", 32).unwrap();
    let (lease, other) = (budget.lease("a", 9).unwrap(), budget.lease("b", 18).unwrap());
    assert!(lease.grow(16).is_err());
    assert_eq!((lease.sms(), budget.leased()), (9, 27));
    drop(other);
    lease.grow(16).unwrap();
    assert_eq!((lease.sms(), budget.leased()), (16, 16));
}

#[test]
fn partitions_are_cut_from_what_is_left_and_used_again() {
    let device = SimDevice::hopper();
    let live = device.live.clone();
    let carver = device.carver();
    let (a, b) = (carver.carve(16).unwrap(), carver.carve(12).unwrap());
    assert_eq!((a.sms(), b.sms()), (16, 16));
    assert!(a.part().sms.is_disjoint(&b.part().sms));
    let of_b = b.part().sms.clone();
    drop(b);
    let c = carver.carve(8).unwrap();
    assert_eq!(c.part().sms, of_b, "a spare that fits comes before a new cut");
    let compute = carver.compute().unwrap();
    assert_eq!(compute.sms.len(), 100);
    // Nothing is cut from under compute, but spares can be had.
    drop(c);
    let again = carver.carve(10).unwrap();
    assert!(matches!(carver.carve(8), Err(NoPart::Refused(why)) if why.contains("compute")));
    drop(compute);
    assert!(carver.carve(8).is_ok());
    drop((a, again));
    // Nobody has anything: it is whole again, so a size that no piece has can be cut.
    assert_eq!(carver.carve(120).unwrap().sms(), 120);
    assert!(carver.compute().is_none());
    assert_eq!(live.lock().len(), 0);
}

#[test]
fn a_partition_leaves_some_sms_to_compute() {
    let carver = SimDevice { sms: 64, ..SimDevice::hopper() }.carver();
    assert!(matches!(carver.carve(60), Err(NoPart::Refused(why)) if why.contains("none")));
    assert!(matches!(carver.carve(65), Err(NoPart::Refused(_))));
    assert_eq!(carver.carve(56).unwrap().sms(), 56);
}

fn policy() -> impl Strategy<Value = SmPolicy> {
    prop_oneof![
        (1u32..60).prop_map(|sms| SmPolicy::Partition { sms }),
        (1u32..60).prop_map(|sms| SmPolicy::Margin { sms }),
        Just(SmPolicy::Shared),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// What is set aside never exceeds the device, never overlaps, and is all there afterwards.
    #[test]
    fn reservations_in_any_order_keep_the_account(
        steps in prop::collection::vec((policy(), any::<prop::sample::Index>(), 0u32..4), 1..40)
    ) {
        let device = SimDevice::hopper();
        let live = device.live.clone();
        let carver = device.carver();
        let mut held = Vec::new();
        for (asked, which, action) in steps {
            if action == 0 && !held.is_empty() {
                held.swap_remove(which.index(held.len()));
            } else if let Ok(reservation) = reserve(&carver, "step", asked, 1, &[]) {
                let report = reservation.report();
                prop_assert!(report.reserved >= asked.sms());
                held.push(reservation);
            }
            let reserved: u32 = held.iter().map(|r| r.report().reserved).sum();
            prop_assert_eq!(carver.budget.leased(), reserved);
            prop_assert!(reserved < 132);
            let mut seen = BTreeSet::new();
            for part in held.iter().filter_map(|r| r.partition.as_ref()) {
                prop_assert!(part.part().sms.iter().all(|sm| seen.insert(*sm)), "overlap");
            }
        }
        held.clear();
        prop_assert_eq!((carver.budget.leased(), live.lock().len()), (0, 0));
        let whole = carver.carve(128);
        prop_assert!(whole.is_ok(), "the device is whole again");
    }
}

#[test]
fn threads_take_and_drop_leases_and_none_is_lost() {
    let carver = SimDevice::hopper().carver();
    let start = Barrier::new(4);
    std::thread::scope(|threads| {
        for thread in 0..4u32 {
            let (carver, start) = (&carver, &start);
            threads.spawn(move || {
                start.wait();
                for i in 0..500u32 {
                    let sms = 1 + (i * 7 + thread * 13) % 50;
                    let asked = match i % 2 {
                        0 => SmPolicy::Partition { sms },
                        _ => SmPolicy::Margin { sms },
                    };
                    let got = reserve(carver, &format!("thread {thread}"), asked, 1, &[]);
                    assert!(carver.budget.leased() < 132);
                    if let Err(error) = got {
                        let refused =
                            matches!(error, EpError::SmsTaken { .. } | EpError::SmPolicy { .. });
                        assert!(refused, "{error}");
                    }
                }
            });
        }
    });
    assert_eq!(carver.budget.leased(), 0);
    assert_eq!(carver.carve(128).unwrap().sms(), 128);
}
