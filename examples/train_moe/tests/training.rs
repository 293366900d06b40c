//! Training gives the same losses on any number of ranks, and it learns.

use train_moe::data;
use train_moe::train::{Config, on_ranks, train};

#[test]
fn ranks_agree_and_it_learns() {
    let (samples, test) = data::load();
    assert_eq!((samples.labels.len(), test.labels.len()), (1438, 359));
    let config = Config { epochs: 5, ..Config::default() };
    let run =
        |ranks| on_ranks(ranks, |group| train(group, &config, &samples, &test)).expect("no error");
    let one = run(1).remove(0);
    assert!(one.losses.iter().all(|loss| loss.is_finite()));
    assert!(one.losses[0] > 2.0, "it starts ignorant: {}", one.losses[0]);
    assert!(one.accuracy >= test.majority() + 0.15, "{} correct", one.accuracy);
    for ranks in [2, 3, 4] {
        for report in run(ranks) {
            assert_eq!(report.losses.len(), one.losses.len());
            for (step, (a, b)) in one.losses.iter().zip(&report.losses).enumerate() {
                assert!((a - b).abs() <= 1e-5 * a.abs(), "{ranks} ranks, step {step}: {a} {b}");
            }
            // More than was asked for: no sum depends on the number of ranks.
            assert_eq!(report, one, "{ranks} ranks");
        }
    }
}
