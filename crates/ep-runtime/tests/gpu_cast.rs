//! Conversions to fp8 and back on a GPU: the host's bits, for every shape, stride, type and number.
//! Without a GPU each test says so and passes.
#![cfg(feature = "cuda")]

mod common;

use std::time::Instant;

use common::gpu::{Gpu, Gpus};
use common::gpu_small::{Graph, LIMIT};
use common::ground::Ground;
use common::small::assert_argument;
use ep_runtime::cast::{DeviceCasts, Real, dequantize_fp8, quantize_fp8};
use ep_runtime::{DType, Fp8E4M3, Queue, Rows, RowsMut, ScaleKind, bf16, f16};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Rows in device memory: their first byte, number, length and stride in bytes.
#[derive(Clone, Copy, Debug)]
struct At {
    at: u64,
    rows: usize,
    bytes: usize,
    stride: usize,
    dtype: DType,
}

impl At {
    /// Room on the GPU, full of ones, with `before` bytes ahead of it and `gap` bytes between rows.
    fn new(
        gpu: &Gpu<'_>,
        (rows, bytes): (usize, usize),
        before: usize,
        gap: usize,
        dtype: DType,
    ) -> Self {
        let at = gpu.place(None, before + rows * (bytes + gap) + 16) + before as u64;
        Self { at, rows, bytes, stride: bytes + gap, dtype }
    }

    fn store(&self, gpu: &Gpu<'_>, data: &[u8]) {
        let mut image = vec![0xff; self.rows * self.stride];
        for (i, row) in data.chunks_exact(self.bytes.max(1)).enumerate() {
            image[i * self.stride..][..self.bytes].copy_from_slice(row);
        }
        gpu.store(self.at, &image);
    }

    /// The rows; whatever is between them has to be as it was.
    fn fetch(&self, gpu: &Gpu<'_>) -> Vec<u8> {
        let mut image = vec![0; self.rows * self.stride];
        gpu.fetch(self.at, &mut image);
        let mut data = Vec::new();
        for row in image.chunks_exact(self.stride.max(1)) {
            data.extend_from_slice(&row[..self.bytes]);
            assert!(row[self.bytes..].iter().all(|&b| b == 0xff), "written between rows");
        }
        data
    }

    fn rows(&self, gpu: &Gpu<'_>) -> Rows<'_> {
        let &Self { at, rows, bytes, stride, dtype } = self;
        // SAFETY: in the arena, written by nobody else.
        unsafe { Rows::from_device(gpu.ordinal(), at, rows, bytes, stride, dtype) }
    }

    fn rows_mut(&self, gpu: &Gpu<'_>) -> RowsMut<'_> {
        let &Self { at, rows, bytes, stride, dtype } = self;
        // SAFETY: in the arena, used by nobody else meanwhile.
        unsafe { RowsMut::from_device(gpu.ordinal(), at, rows, bytes, stride, dtype) }
    }
}

/// A number type with all its bits.
trait Bits: Real {
    fn of(bits: u32) -> Self;
    fn bytes(self) -> Vec<u8>;
}

impl Bits for f32 {
    fn of(bits: u32) -> Self {
        Self::from_bits(bits)
    }
    fn bytes(self) -> Vec<u8> {
        self.to_ne_bytes().to_vec()
    }
}

impl Bits for bf16 {
    fn of(bits: u32) -> Self {
        Self::from_bits((bits >> 16) as u16)
    }
    fn bytes(self) -> Vec<u8> {
        self.to_bits().to_ne_bytes().to_vec()
    }
}

impl Bits for f16 {
    fn of(bits: u32) -> Self {
        Self::from_bits((bits >> 16) as u16)
    }
    fn bytes(self) -> Vec<u8> {
        self.to_bits().to_ne_bytes().to_vec()
    }
}

#[derive(Clone, Debug)]
struct Case {
    rows: usize,
    hidden: usize,
    /// Elements ahead of the first row and between rows.
    shift: usize,
    gap: usize,
    kind: ScaleKind,
    blocks: u32,
    /// How numbers are drawn.
    style: u8,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let hidden = prop_oneof![1usize..700, Just(128), Just(2880), Just(3584), Just(7168)];
    let kind = prop_oneof![Just(ScaleKind::F32), Just(ScaleKind::Ue8m0)];
    let blocks = prop_oneof![1u32..9, Just(1000)];
    let shape = (0usize..12, hidden, 0usize..5, 0usize..9);
    (shape, kind, blocks, 0u8..4, any::<u64>()).prop_map(
        |((rows, hidden, shift, gap), kind, blocks, style, seed)| Case {
            rows,
            hidden,
            // Half of them aligned as wide loads want it.
            shift: if shift > 2 { 0 } else { shift },
            gap: if gap > 4 { 16 - hidden % 16 } else { gap },
            kind,
            blocks,
            style,
            seed,
        },
    )
}

/// Numbers of a case: any bits, of ordinary size, tiny, or mostly ordinary with some of any bits.
fn numbers<T: Bits>(case: &Case) -> Vec<T> {
    let mut state = case.seed | 1;
    let mut next = || {
        // Xorshift, Marsaglia 2003.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u32
    };
    let mut number = |_| {
        let bits = next();
        let unit = (bits >> 8) as f32 / (1 << 23) as f32 - 1.0;
        match case.style {
            0 => T::of(bits),
            1 => T::from_f32(unit * 3.0),
            2 => T::from_f32(unit * 1e-5),
            _ if next() % 400 == 0 => T::of(bits | 0x7f80_0000),
            _ => T::from_f32(unit * 100.0),
        }
    };
    (0..case.rows * case.hidden).map(&mut number).collect()
}

fn check<T: Bits>(gpu: &Gpu<'_>, casts: &DeviceCasts, case: &Case, dtype: DType) {
    let &Case { rows, hidden, shift, gap, kind, .. } = case;
    let (size, scale_bytes) = (size_of::<T>(), kind.row_bytes(hidden));
    let src: Vec<T> = numbers(case);
    let mut codes = vec![Fp8E4M3(0); src.len()];
    let mut scales = vec![0u8; rows * scale_bytes];
    quantize_fp8(&src, hidden, kind, &mut codes, &mut scales).expect("the host's");

    let scale_type = if kind == ScaleKind::F32 { DType::F32 } else { DType::Bytes };
    let scale_gap = gap * kind.size();
    let numbers = At::new(gpu, (rows, hidden * size), shift * size, gap * size, dtype);
    let to = At::new(gpu, (rows, hidden), shift, gap, DType::Fp8E4M3);
    let scale = At::new(gpu, (rows, scale_bytes), shift * kind.size(), scale_gap, scale_type);
    let bytes: Vec<u8> = src.iter().flat_map(|x| x.bytes()).collect();
    numbers.store(gpu, &bytes);
    let queue = gpu.queue();
    casts
        .quantize_fp8(&queue, numbers.rows(gpu), to.rows_mut(gpu), scale.rows_mut(gpu))
        .expect("to fp8");
    assert_eq!(scale.fetch(gpu), scales, "scales");
    assert!(to.fetch(gpu) == Fp8E4M3::as_bytes(&codes), "codes");

    let mut expected = vec![T::from_f32(0.0); src.len()];
    dequantize_fp8(&codes, &scales, hidden, kind, &mut expected).expect("the host's");
    let back = At::new(gpu, (rows, hidden * size), shift * size, gap * size, dtype);
    casts
        .dequantize_fp8(&queue, to.rows(gpu), scale.rows(gpu), back.rows_mut(gpu))
        .expect("from fp8");
    let got = back.fetch(gpu);
    for (i, (got, x)) in got.chunks_exact(size).zip(&expected).enumerate() {
        let canonical = if x.to_f32().is_nan() { T::from_f32(f32::NAN) } else { *x };
        assert_eq!(got, canonical.bytes(), "element {i} of {hidden} per row: {}", x.to_f32());
    }
}

/// `EP_GPU_CASES` cases, 300 otherwise.
#[test]
fn conversions_have_the_bits_of_the_host() {
    let Some(gpus) = Gpus::new(1, 32 << 20) else { return };
    let cases = std::env::var("EP_GPU_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(300);
    let mut runner =
        TestRunner::new(Config { failure_persistence: None, ..Config::with_cases(cases) });
    let outcome = runner.run(&case(), |case| {
        let gpu = gpus.rank(0);
        let casts = DeviceCasts::new(0).expect("the kernels").blocks(case.blocks);
        check::<bf16>(&gpu, &casts, &case, DType::Bf16);
        check::<f16>(&gpu, &casts, &case, DType::F16);
        check::<f32>(&gpu, &casts, &case, DType::F32);
        Ok(())
    });
    outcome.unwrap_or_else(|e| panic!("{e}"));
}

/// All values of 16 bits, in blocks whose largest element is what it is.
#[test]
fn every_bf16_has_the_bits_of_the_host() {
    let Some(gpus) = Gpus::new(1, 32 << 20) else { return };
    let gpu = gpus.rank(0);
    let casts = DeviceCasts::new(0).expect("the kernels");
    let all: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    for kind in [ScaleKind::F32, ScaleKind::Ue8m0] {
        let hidden = 1 << 12;
        let mut codes = vec![Fp8E4M3(0); all.len()];
        let mut scales = vec![0u8; 16 * kind.row_bytes(hidden)];
        quantize_fp8(&all, hidden, kind, &mut codes, &mut scales).expect("the host's");
        let dtype = if kind == ScaleKind::F32 { DType::F32 } else { DType::Bytes };
        let src = At::new(&gpu, (16, 2 * hidden), 0, 0, DType::Bf16);
        let out = At::new(&gpu, (16, hidden), 0, 0, DType::Fp8E4M3);
        let scale = At::new(&gpu, (16, kind.row_bytes(hidden)), 0, 0, dtype);
        src.store(&gpu, &all.iter().flat_map(|x| x.bytes()).collect::<Vec<_>>());
        casts
            .quantize_fp8(&gpu.queue(), src.rows(&gpu), out.rows_mut(&gpu), scale.rows_mut(&gpu))
            .expect("to fp8");
        assert_eq!(scale.fetch(&gpu), scales);
        assert!(out.fetch(&gpu) == Fp8E4M3::as_bytes(&codes));
    }
}

#[test]
fn wrong_rows_are_refused() {
    let Some(gpus) = Gpus::new(1, 1 << 20) else { return };
    let gpu = gpus.rank(0);
    let casts = DeviceCasts::new(0).expect("the kernels");
    let src = At::new(&gpu, (4, 2 * 256), 0, 0, DType::Bf16);
    let out = At::new(&gpu, (4, 256), 0, 0, DType::Fp8E4M3);
    let scales = At::new(&gpu, (4, 8), 0, 0, DType::F32);
    let go = |queue: &Queue, src: At, out: At, scales: At| {
        casts.quantize_fp8(queue, src.rows(&gpu), out.rows_mut(&gpu), scales.rows_mut(&gpu))
    };
    let queue = gpu.queue();
    go(&queue, src, out, scales).expect("right ones");
    let refused = [
        (go(&Queue::host(), src, out, scales), "pass a stream"),
        (go(&queue, At { dtype: DType::Bytes, ..src }, out, scales), "no conversion"),
        (go(&queue, src, At { dtype: DType::Bf16, ..out }, scales), "no conversion"),
        (go(&queue, src, out, At { dtype: DType::F16, ..scales }), "scales are"),
        (go(&queue, src, out, At { bytes: 4, ..scales }), "scales are"),
        (go(&queue, At { rows: 3, ..src }, out, scales), "src are 3 rows"),
        (go(&queue, At { at: src.at + 1, ..src }, out, scales), "a multiple of 2"),
        (go(&queue, src, out, At { stride: 9, ..scales }), "a multiple of 4"),
        (go(&queue, src, At { bytes: 0, ..out }, scales), "0 elements"),
    ];
    for (refused, needle) in refused {
        assert_argument(refused, needle);
    }
    let host = vec![bf16::ZERO; 4 * 256];
    let on_host = Rows::new(&host, 256).expect("rows");
    let e = casts.quantize_fp8(&queue, on_host, out.rows_mut(&gpu), scales.rows_mut(&gpu));
    assert_argument(e, "Host");
    let e = go(&queue, At { at: host.as_ptr() as u64, ..src }, out, scales);
    assert_argument(e, "Host memory");
    go(&queue, src, out, scales).expect("right ones");
    gpu.stream().wait("the conversions", LIMIT).expect("they end");
}

/// Captured and replayed; and how fast it is, for who reads the output. `EP_GPU_ROWS` rows, 8192
/// otherwise.
#[test]
fn conversions_are_captured() {
    let Some(gpus) = Gpus::new(1, 256 << 20) else { return };
    let gpu = gpus.rank(0);
    let casts = DeviceCasts::new(0).expect("the kernels");
    let rows = std::env::var("EP_GPU_ROWS").ok().and_then(|n| n.parse().ok()).unwrap_or(8192);
    let hidden = 7168;
    assert!(rows >= 3);
    let case = Case {
        rows: 3,
        hidden,
        shift: 0,
        gap: 0,
        kind: ScaleKind::F32,
        blocks: 8,
        style: 1,
        seed: 5,
    };
    let src = At::new(&gpu, (rows, 2 * hidden), 0, 0, DType::Bf16);
    let out = At::new(&gpu, (rows, hidden), 0, 0, DType::Fp8E4M3);
    let scales = At::new(&gpu, (rows, 4 * 56), 0, 0, DType::F32);
    let first: Vec<bf16> = numbers(&case);
    let (queue, stream) = (gpu.queue(), gpu.stream());
    let graph = Graph::capture(stream, || {
        casts
            .quantize_fp8(&queue, src.rows(&gpu), out.rows_mut(&gpu), scales.rows_mut(&gpu))
            .expect("captured");
    });
    gpu.store(src.at, &first.iter().flat_map(|x| x.bytes()).collect::<Vec<_>>());
    graph.launch(stream);
    let mut got = vec![0u8; 3 * hidden];
    gpu.fetch(out.at, &mut got);
    let (mut codes, mut expected) = (vec![Fp8E4M3(0); 3 * hidden], vec![0u8; 3 * 4 * 56]);
    quantize_fp8(&first, hidden, case.kind, &mut codes, &mut expected).expect("the host's");
    assert!(got == Fp8E4M3::as_bytes(&codes));
    let start = Instant::now();
    for _ in 0..50 {
        graph.launch(stream);
    }
    stream.wait("replays", LIMIT).expect("they end");
    let each = start.elapsed().as_secs_f64() / 50.0;
    let bytes = (rows * (3 * hidden + 4 * 56)) as f64;
    println!("{rows} x {hidden} bf16 to fp8: {:.1} us, {:.0} GB/s", each * 1e6, bytes / each / 1e9);
}
