//! The data: 1797 handwritten digits of 8 × 8 pixels, which the crate smartcore ships (UCI machine
//! learning repository, Optical Recognition of Handwritten Digits, the test part).

use smartcore::dataset::digits;

/// Labelled samples.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    /// The pixels of each, `[samples][inputs]`, 0 to 1.
    pub inputs: Vec<Vec<f32>>,
    /// The class of each.
    pub labels: Vec<usize>,
}

impl Samples {
    /// The share of the most common class.
    pub fn majority(&self) -> f32 {
        let most = (0..10).map(|c| self.labels.iter().filter(|&&l| l == c).count()).max();
        most.unwrap_or(0) as f32 / self.labels.len().max(1) as f32
    }
}

/// The digits to train with, and every fifth one to test with.
pub fn load() -> (Samples, Samples) {
    let all = digits::load_dataset();
    let (mut train, mut test) = (Samples::default(), Samples::default());
    let pixels = all.data.chunks_exact(all.num_features);
    for (i, (pixels, &label)) in pixels.zip(&all.target).enumerate() {
        let part = if i % 5 == 4 { &mut test } else { &mut train };
        part.inputs.push(pixels.iter().map(|x| x / 16.0).collect());
        part.labels.push(label as usize);
    }
    (train, test)
}
