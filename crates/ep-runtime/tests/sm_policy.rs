//! Policies of SMs where there is no GPU: accepted, without effect, and reported.

mod common;

use common::eps;
use common::small::{builder, round_trip};
use ep_runtime::SmPolicy;

#[test]
fn on_the_host_any_policy_is_accepted_and_reported() {
    for asked in [SmPolicy::Shared, SmPolicy::Margin { sms: 9999 }, SmPolicy::Partition { sms: 0 }]
    {
        eps(2, &builder().sm_policy(asked), |ep| {
            let report = ep.sm_report();
            assert_eq!((report.asked, report.in_force), (asked, SmPolicy::Shared));
            assert_eq!(
                (report.device.as_deref(), report.device_sms, report.reserved),
                (None, 0, 0)
            );
            assert_eq!((ep.compute_sms(), ep.sms_used()), (0, 0));
            assert!(ep.sm_budget().is_none());
            let why = report.why.as_deref();
            assert_eq!(why.is_some(), asked != SmPolicy::Shared);
            assert!(why.is_none_or(|why| report.to_string().contains(why)), "{report}");
            round_trip(&ep);
        });
    }
}

#[test]
fn a_layer_shares_the_sms_of_another() {
    eps(2, &builder().sm_policy(SmPolicy::Margin { sms: 8 }), |ep| {
        let other = builder().share_sms(&ep).build(ep.group()).expect("a second layer");
        assert_eq!(other.sm_report().in_force, SmPolicy::Shared);
        round_trip(&other);
        round_trip(&ep);
    });
}

#[test]
fn a_layer_on_the_host_has_one_order_of_its_own() {
    eps(2, &builder(), |ep| {
        let ticket = ep.submit_order().ticket();
        assert_eq!(ep.clone().submit_order().pending(), 1);
        let other = builder().build(ep.group()).expect("a second layer");
        assert_eq!(other.submit_order().pending(), 0);
        let turn = ticket.wait(std::time::Duration::ZERO).expect("nobody is ahead");
        round_trip(&ep);
        drop(turn);
        assert_eq!(ep.submit_order().pending(), 0);
    });
}
