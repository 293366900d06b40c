//! What each policy comes to: sizes rounded, margins refused with the margin that would do, and what
//! happens where there are no partitions.

use ep_topology::Launch;

use super::sim::SimDevice;
use crate::sched::policy::SmPolicy;
use crate::sched::reserve::reserve;
use crate::{EpError, ErrorKind};

fn plain(blocks: u32) -> Launch {
    Launch::new(blocks, 1, false)
}

fn refusal(error: EpError) -> (String, Option<u32>) {
    assert!(error.group_usable());
    match error {
        EpError::SmPolicy { ref detail, enough, .. } => {
            assert_eq!(error.kind(), ErrorKind::Argument);
            (detail.clone(), enough)
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_partition_is_rounded_up_and_says_so() {
    let carver = SimDevice::hopper().carver();
    let asked = SmPolicy::Partition { sms: 12 };
    let got = reserve(&carver, "a layer", asked, 12, &[plain(12)]).unwrap();
    let report = got.report();
    assert_eq!((report.asked, report.in_force, &report.why), (asked, asked, &None));
    assert_eq!((report.blocks, report.reserved, report.compute_sms), (12, 16, 116));
    let text = report.to_string();
    for part in ["a partition of 12 SMs", "16 of the 132", "12 blocks", "116 for compute"] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(carver.budget.holders(), [("a layer".to_owned(), 16)]);
    // Other launches may come later, but not more blocks than it has SMs.
    got.check(&[plain(16)]).unwrap();
    let (detail, enough) = refusal(got.check(&[plain(17)]).unwrap_err());
    assert!(detail.contains("17 blocks") && enough == Some(17), "{detail}");
}

#[test]
fn partitions_that_do_not_fit_are_refused_and_nothing_is_kept() {
    let carver = SimDevice::hopper().carver();
    let ask = |sms, blocks| {
        reserve(&carver, "a layer", SmPolicy::Partition { sms }, blocks, &[plain(blocks)])
    };
    assert!(matches!(ask(200, 16), Err(EpError::SmsTaken { free: 131, .. })));
    let (detail, _) = refusal(ask(130, 16).unwrap_err());
    assert!(detail.contains("130"), "{detail}");
    let (detail, enough) = refusal(ask(8, 24).unwrap_err());
    assert!(detail.contains("24 blocks in a partition of 8"), "{detail}");
    assert_eq!(enough, Some(24));
    // 124 are asked for and fit the budget beside the 4, the 128 that it takes do not.
    let other = carver.budget.lease("other", 4).unwrap();
    assert!(matches!(ask(124, 16), Err(EpError::SmsTaken { .. })));
    drop(other);
    assert_eq!(carver.budget.leased(), 0);
    assert_eq!(ask(124, 16).unwrap().report().reserved, 128);
}

#[test]
fn a_plain_launch_fits_a_margin_of_its_blocks_exactly() {
    // No domain is known: without clusters none has to be.
    let carver = SimDevice { domains: None, ..SimDevice::hopper() }.carver();
    for blocks in [1, 8, 16, 24, 131] {
        let margin =
            |sms| reserve(&carver, "l", SmPolicy::Margin { sms }, blocks, &[plain(blocks)]);
        let report = margin(blocks).unwrap().report();
        assert_eq!((report.reserved, report.compute_sms), (blocks, 132 - blocks));
        if blocks > 1 {
            let (detail, enough) = refusal(margin(blocks - 1).unwrap_err());
            assert_eq!(enough, Some(blocks), "{detail}");
            assert!(detail.contains(&format!("{blocks} would do")), "{detail}");
            assert!(detail.contains(&format!("or {} blocks", blocks - 1)), "{detail}");
        }
    }
    assert_eq!(carver.budget.leased(), 0);
}

#[test]
fn clusters_cost_a_larger_margin_which_the_refusal_names() {
    let carver = SimDevice::hopper().carver();
    let launches = [plain(16), Launch::new(16, 2, true)];
    let margin = |sms| reserve(&carver, "l", SmPolicy::Margin { sms }, 16, &launches);
    // n - c + 1 + the sum over both domains of c - 1.
    let (detail, enough) = refusal(margin(16).unwrap_err());
    assert_eq!(enough, Some(17), "{detail}");
    assert!(detail.contains("cooperative") && detail.contains("clusters of 2"), "{detail}");
    assert_eq!(margin(17).unwrap().report().reserved, 17);
    // What is tuned later is held to the same margin.
    let held = margin(17).unwrap();
    held.check(&[Launch::new(16, 2, false)]).unwrap();
    let (_, enough) = refusal(held.check(&[Launch::new(16, 4, false)]).unwrap_err());
    assert_eq!(enough, Some(19));
    let never = refusal(held.check(&[Launch::new(136, 2, true)]).unwrap_err());
    assert!(never.0.contains("never") && never.1.is_none(), "{never:?}");
    let malformed = refusal(held.check(&[Launch::new(15, 2, true)]).unwrap_err());
    assert!(malformed.0.contains("15 blocks"), "{malformed:?}");
}

#[test]
fn clusters_without_known_domains_are_refused() {
    let carver = SimDevice { domains: None, ..SimDevice::hopper() }.carver();
    let launches = [Launch::new(16, 2, true)];
    let error = reserve(&carver, "l", SmPolicy::Margin { sms: 100 }, 16, &launches).unwrap_err();
    let (detail, _) = refusal(error);
    assert!(detail.contains("the probe failed"), "{detail}");
    assert_eq!(carver.budget.leased(), 0);
}

#[test]
fn without_green_contexts_a_partition_is_a_margin_and_says_why() {
    let device = || SimDevice { missing: Some("driver 535".into()), ..SimDevice::hopper() };
    let carver = device().carver();
    let asked = SmPolicy::Partition { sms: 12 };
    let got = reserve(&carver, "l", asked, 12, &[plain(12)]).unwrap();
    let report = got.report();
    assert_eq!(report.in_force, SmPolicy::Margin { sms: 12 });
    assert_eq!((report.asked, report.reserved, report.compute_sms), (asked, 12, 120));
    assert_eq!(report.why.as_deref(), Some("driver 535"));
    let text = report.to_string();
    assert!(text.contains("instead of a partition of 12 SMs") && text.contains("535"), "{text}");
    // A launch that a partition could have held may not fit a margin.
    let launches = [Launch::new(12, 4, true)];
    let (detail, enough) = refusal(reserve(&carver, "l", asked, 12, &launches).unwrap_err());
    assert!(detail.contains("no partition (driver 535)"), "{detail}");
    assert_eq!(enough, Some(15));
    drop(got);
    assert_eq!(carver.budget.leased(), 0);
}

/// Keeps the warnings of one thread.
#[derive(Clone, Default)]
struct Warnings(std::sync::Arc<parking_lot::Mutex<Vec<String>>>);

impl tracing::field::Visit for Warnings {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        self.0.lock().push(format!("{field}={value:?}"));
    }
}

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut self.clone());
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn a_margin_in_place_of_a_partition_is_an_event() {
    let warnings = Warnings::default();
    let told = tracing::subscriber::with_default(warnings.clone(), || {
        let device = SimDevice { missing: Some("MIG is on".into()), ..SimDevice::hopper() };
        let carver = device.carver();
        drop(reserve(&carver, "l", SmPolicy::Margin { sms: 8 }, 8, &[plain(8)]).unwrap());
        assert_eq!(warnings.0.lock().len(), 0, "what was asked for is no news");
        drop(reserve(&carver, "l", SmPolicy::Partition { sms: 8 }, 8, &[plain(8)]).unwrap());
        warnings.0.lock().join(" ")
    });
    for part in ["a margin of 8 SMs instead of a partition of 8 SMs", "MIG is on", "GPU-simulated"]
    {
        assert!(told.contains(part), "{told} does not say {part:?}");
    }
}

#[test]
fn shared_sms_take_nothing_and_fit_anything() {
    let carver = SimDevice::hopper().carver();
    let launches = [Launch::new(200, 1, false)];
    let got = reserve(&carver, "l", SmPolicy::Shared, 200, &launches).unwrap();
    assert_eq!((got.report().reserved, got.report().compute_sms), (0, 132));
    got.check(&[Launch::new(132, 2, true)]).unwrap();
}

#[test]
fn reports_are_data() {
    let carver = SimDevice::hopper().carver();
    let asked = SmPolicy::Margin { sms: 16 };
    let report = reserve(&carver, "l", asked, 16, &[plain(16)]).unwrap().report();
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["asked"], serde_json::json!({"kind": "margin", "sms": 16}));
    assert_eq!(serde_json::from_value::<crate::SmReport>(json).unwrap(), report);
}
