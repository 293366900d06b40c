//! Prints what the host kernels reach beside a plain copy: `cargo run --release --example
//! host_speed`. Times are the least of several runs; rates are (read + written) / 2 bytes.

use std::time::{Duration, Instant};

use ep_kernels::host::{
    Expander, ExpertRows, Source, Target, copy_rows, dequantize_fp8, quantize_fp8, reduce_row,
    scatter,
};
use ep_kernels::{
    CountMatrix, DType, ExpertFormat, Fp8E4M3, Ids, KernelError, Layout, PayloadKind, Placement,
    RecordFormat, ScaleKind, bf16,
};

const HIDDEN: usize = 7168;
const TOPK: usize = 8;
const EXPERTS: usize = 64;
const RANKS: usize = 4;

fn main() -> Result<(), KernelError> {
    for tokens in [128, 1024] {
        println!("{tokens} tokens of {HIDDEN} bf16, top-{TOPK} of {EXPERTS}, {RANKS} ranks");
        measure(tokens)?;
    }
    Ok(())
}

/// The least time of some runs of `work`.
fn least(mut work: impl FnMut()) -> Duration {
    let run = |_| {
        let start = Instant::now();
        work();
        start.elapsed()
    };
    (0..30).map(run).min().unwrap_or_default()
}

/// Prints a line, with the time as a multiple of a plain copy of as many bytes.
fn line(name: &str, moved: usize, took: Duration, copy_rate: f64) {
    let rate = moved as f64 / 1e9 / took.as_secs_f64();
    let share = copy_rate / rate;
    println!("  {name:<28} {:>9.1} us {rate:>7.2} GB/s  {share:>5.2} x copy", micros(took));
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Distinct pseudo-random experts for every token.
fn routing(tokens: usize) -> Vec<u32> {
    let mut x = 0x2545_f491_4f6c_dd1d_u64;
    let mut ids = Vec::new();
    for _ in 0..tokens {
        let start = ids.len();
        while ids.len() < start + TOPK {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            let id = (x >> 33) as u32 % EXPERTS as u32;
            if !ids[start..].contains(&id) {
                ids.push(id);
            }
        }
    }
    ids
}

fn measure(tokens: usize) -> Result<(), KernelError> {
    let fmt = RecordFormat::new(PayloadKind::Bf16, HIDDEN, TOPK)?;
    let placement = Placement::contiguous(EXPERTS, RANKS)?;
    let ids = routing(tokens);
    let mut layout = Layout::new();
    let took = least(|| {
        layout.compute(Ids::U32(&ids), TOPK, &placement, 0, false).expect("valid ids");
    });
    println!("  {:<28} {:>9.1} us", "layout", micros(took));

    let source: Vec<bf16> = (0..tokens * HIDDEN).map(|i| bf16::from_f32(i as f32)).collect();
    let rows: usize = layout.rank_counts.iter().map(|&n| n as usize).sum();
    let moved = (tokens + rows) * fmt.payload_bytes / 2;
    let from = vec![1_u8; moved];
    let mut to = vec![2_u8; moved];
    let copy = least(|| {
        // SAFETY: both vectors have `moved` bytes.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_mut_ptr(), moved) };
        std::hint::black_box(&to);
    });
    let rate = moved as f64 / 1e9 / copy.as_secs_f64();
    line("copy", moved, copy, rate);

    let mut regions: Vec<Vec<u8>> =
        layout.rank_counts.iter().map(|&n| vec![3; n as usize * fmt.stride]).collect();
    let targets: Vec<Target> = regions
        .iter_mut()
        .map(|r| Target { base: r.as_mut_ptr(), first_row: 0, rows: r.len() / fmt.stride })
        .collect();
    let src = Source {
        payload: source.as_ptr().cast(),
        payload_stride: fmt.payload_bytes,
        scales: std::ptr::null(),
        scales_stride: 0,
        weights: None,
    };
    // SAFETY: the targets are the regions, each large enough for its rows.
    let took = least(|| unsafe {
        scatter(&fmt, &src, &layout, &placement, 0, &targets).expect("fitting arguments");
    });
    line("scatter", moved, took, rate);

    let mut out = vec![bf16::ZERO; tokens * HIDDEN];
    for weighted in [false, true] {
        let took = least(|| sum(&fmt, &layout, &regions, weighted, &mut out));
        line(if weighted { "reduce, weighted" } else { "reduce" }, moved, took, rate);
    }
    expand(&fmt, &placement, &layout, &regions[0], rate)?;
    casts(&source, rate)
}

/// Adds the rows of every token.
fn sum(fmt: &RecordFormat, layout: &Layout, regions: &[Vec<u8>], weighted: bool, out: &mut [bf16]) {
    let (mut rows, weights) = (Vec::with_capacity(RANKS), [0.5; RANKS]);
    for (token, out) in out.chunks_exact_mut(HIDDEN).enumerate() {
        rows.clear();
        let at = |(rank, row): (usize, usize)| regions[rank][row * fmt.stride..].as_ptr();
        rows.extend(layout.destinations(token).map(at));
        let weights = weighted.then_some(&weights[..rows.len()]);
        let out = out.as_mut_ptr().cast();
        // SAFETY: every row and the output have `HIDDEN` elements.
        unsafe { reduce_row(DType::Bf16, HIDDEN, &rows, weights, &[], out) }.expect("bf16");
    }
}

fn expand(
    fmt: &RecordFormat,
    placement: &Placement,
    layout: &Layout,
    region: &[u8],
    rate: f64,
) -> Result<(), KernelError> {
    let mut matrix = CountMatrix::new();
    matrix.reset(placement, 0);
    matrix.add(&layout.expert_counts, &layout.rank_counts)?;
    matrix.finish()?;
    let (mut offsets, mut counts) = (Vec::new(), Vec::new());
    matrix.expert_offsets(0, 1, &mut offsets);
    matrix.counts(0, &mut counts);
    let efmt = ExpertFormat::new(fmt.kind, fmt.hidden)?;
    let (rows, received) = (matrix.expert_rows(0, 1), matrix.rows_at(0));
    let mut out = vec![0_u8; rows * efmt.stride];
    let target =
        ExpertRows { base: out.as_mut_ptr(), rows, fmt: efmt, offsets: &offsets, counts: &counts };
    let mut expander = Expander::new();
    // SAFETY: the region has the rows received, `out` those of all experts.
    let took = least(|| unsafe {
        expander.expand(fmt, region.as_ptr(), received, &target).expect("consistent rows");
    });
    line("expand", (rows + received) * fmt.payload_bytes / 2, took, rate);
    let mut packed = vec![0_u8; received * fmt.payload_bytes];
    // SAFETY: the region has the rows received, `packed` as many payloads.
    let took = least(|| unsafe {
        let (to, bytes) = (packed.as_mut_ptr(), fmt.payload_bytes);
        copy_rows(region.as_ptr(), fmt.stride, to, bytes, bytes, received);
    });
    line("copy_rows", received * fmt.payload_bytes, took, rate);
    Ok(())
}

fn casts(source: &[bf16], rate: f64) -> Result<(), KernelError> {
    let mut fp8 = vec![Fp8E4M3(0); source.len()];
    let mut back = vec![bf16::ZERO; source.len()];
    let kind = ScaleKind::F32;
    let mut scales = vec![0; source.len() / HIDDEN * kind.row_bytes(HIDDEN)];
    let moved = source.len() * 3 / 2;
    let took = least(|| {
        quantize_fp8(source, HIDDEN, kind, &mut fp8, &mut scales).expect("fitting lengths");
    });
    line("quantise to fp8", moved, took, rate);
    let took = least(|| {
        dequantize_fp8(&fp8, &scales, HIDDEN, kind, &mut back).expect("fitting lengths");
    });
    line("dequantise", moved, took, rate);
    Ok(())
}
