//! The cases, each on a device that is open already.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{DriverError, result};
use ep_kernels::cuda::{
    Compiler, CublasLt, CudaError, Device, DeviceMemory, EventPool, GemmKernel, GemmSpec,
    GreenContext, SplitFlags, Stream,
};
use half::bf16;
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(5);
/// Bytes behind D that must stay as they are, as must all of D before a product.
const GUARD: usize = 4096;
const UNTOUCHED: u8 = 0xff;
/// Products with more multiplications than this are checked in samples.
const EVERY_ENTRY: u64 = 1 << 28;
const SAMPLES: u64 = 2000;
const WARM_UPS: usize = 5;
const RUNS: usize = 20;

/// `[M, N, K]` of a case named `MxNxK`.
pub fn shape_of(case: &str) -> Option<[u32; 3]> {
    let sizes: Result<Vec<u32>, _> = case.split('x').map(str::parse).collect();
    sizes.ok()?.try_into().ok()
}

/// What all cases share.
pub struct Gpu {
    device: Device,
    stream: Stream,
    kernel: GemmKernel,
    cublaslt: Result<CublasLt, CudaError>,
    events: Arc<EventPool>,
}

impl Gpu {
    pub fn open() -> Result<Gpu, CudaError> {
        let device = Device::open(0)?;
        Ok(Gpu {
            stream: device.stream(0)?,
            kernel: GemmKernel::load(&device, Compiler::get()?)?,
            cublaslt: CublasLt::open(),
            events: EventPool::new(&device, 2, true)?,
            device,
        })
    }

    /// The line of a case. An error is the device's, which is then good for nothing more.
    pub fn case(&self, case: &str) -> Result<Value, CudaError> {
        match (case, shape_of(case)) {
            ("partition", _) => self.partition(),
            ("graph", _) => self.graph(),
            (_, Some(shape)) => self.products(case, shape),
            _ => self.times(),
        }
    }

    /// Ours for several numbers of blocks, which must agree bit by bit, and cuBLASLt's.
    fn products(&self, case: &str, shape: [u32; 3]) -> Result<Value, CudaError> {
        let product = Product::new(self, shape)?;
        let mut failures = Vec::new();
        let mut first: Option<Vec<u32>> = None;
        let sms = self.device.properties().sms;
        for blocks in [1, 7, sms, sms + 3] {
            let out = product.ours(self, &self.stream, blocks)?;
            product.verify(&out, &mut failures, &format!("{blocks} blocks"));
            if first.as_ref().is_some_and(|first| *first != out) {
                failures.push(format!("{blocks} blocks give other bits than 1"));
            }
            first.get_or_insert(out);
        }
        let cublaslt = match &self.cublaslt {
            Err(error) => json!({ "missing": error.to_string() }),
            Ok(library) => {
                let out = product.theirs(self, library, &self.stream, sms)?;
                product.verify(&out, &mut failures, "cuBLASLt");
                json!({ "same_bits": first.is_some_and(|first| first == out) })
            }
        };
        Ok(json!({ "case": case, "failures": failures, "cublaslt": cublaslt }))
    }

    /// Both on a stream of a green context, with as many blocks as it has SMs.
    fn partition(&self) -> Result<Value, CudaError> {
        let product = Product::new(self, [2048, 2048, 1024])?;
        let whole = product.ours(self, &self.stream, self.device.properties().sms)?;
        let (parts, rest) = match self.device.sm_resource() {
            Err(error @ CudaError::Unsupported { .. }) => {
                let reason = error.to_string();
                return Ok(json!({ "case": "partition", "failures": [], "unsupported": reason }));
            }
            resource => resource?.split(1, 16, SplitFlags::empty())?,
        };
        let mut failures = Vec::new();
        let mut sizes = Vec::new();
        for part in parts.iter().chain(&rest) {
            let stream = GreenContext::new(part)?.stream(0)?;
            self.kernel.prepare(&stream)?;
            if product.ours(self, &stream, part.sms())? != whole {
                failures.push(format!("other bits in a partition of {} SMs", part.sms()));
            }
            if let Ok(library) = &self.cublaslt {
                let out = product.theirs(self, library, &stream, part.sms())?;
                product.verify(&out, &mut failures, "cuBLASLt in a partition");
            }
            sizes.push(part.sms());
        }
        Ok(json!({ "case": "partition", "failures": failures, "sms": sizes }))
    }

    /// Both captured in a graph, which is launched: the same bits as without.
    fn graph(&self) -> Result<Value, CudaError> {
        let product = Product::new(self, [512, 1024, 264])?;
        let sms = self.device.properties().sms;
        let mut failures = Vec::new();
        let plain = product.ours(self, &self.stream, sms)?;
        let spec = product.spec(sms);
        // SAFETY: `compute` waits, and the memory has the sizes of the spec.
        let launch = || unsafe { self.kernel.launch(self.stream.raw(), &spec) };
        let out = product.compute(self, &self.stream, "our graph", || self.captured(launch))?;
        if out != plain {
            failures.push("our product has other bits in a graph".to_string());
        }
        if let Ok(library) = &self.cublaslt {
            let plain = product.theirs(self, library, &self.stream, sms)?;
            let plan = library.plan(&self.device, &spec)?;
            // SAFETY: `compute` waits; memory of the spec's sizes and the plan outlive that.
            let launch = || unsafe { plan.launch(self.stream.raw()) };
            let what = "cuBLASLt's graph";
            if product.compute(self, &self.stream, what, || self.captured(launch))? != plain {
                failures.push("cuBLASLt's product has other bits in a graph".to_string());
            }
        }
        Ok(json!({ "case": "graph", "failures": failures }))
    }

    /// Launches a graph of what `launch` submits. The graph is left to the end of the process.
    fn captured(&self, launch: impl FnOnce() -> Result<(), CudaError>) -> Result<(), CudaError> {
        let failed = |error: DriverError| CudaError::Inconsistent {
            operation: "a graph",
            reason: format!("{:?}", error.0),
        };
        let stream = self.stream.raw();
        let _current = self.device.make_current()?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as `self`, and nothing else uses it meanwhile.
        unsafe { result::stream::begin_capture(stream, mode) }.map_err(failed)?;
        let launched = launch();
        // SAFETY: ends what was begun above.
        let graph = unsafe { result::stream::end_capture(stream) }.map_err(failed)?;
        launched?;
        // SAFETY: the graph was just captured, and neither it nor its executable is destroyed.
        unsafe {
            let executable = result::graph::instantiate(graph, CUgraphInstantiate_flags(0));
            result::graph::launch(executable.map_err(failed)?, stream).map_err(failed)
        }
    }

    /// 8192³ with all SMs and with fewer: TFLOP/s of both, and ours over theirs.
    fn times(&self) -> Result<Value, CudaError> {
        let product = Product::new(self, [8192, 8192, 8192])?;
        let sms = self.device.properties().sms;
        let mut rows = Vec::new();
        for blocks in [sms, sms.saturating_sub(8).max(1), sms.saturating_sub(16).max(1)] {
            let spec = product.spec(blocks);
            // SAFETY: the stream and the memory in `product` live until the wait in `time` is over.
            let launch = || unsafe { self.kernel.launch(self.stream.raw(), &spec) };
            let ours = self.time(launch)?;
            let theirs = match &self.cublaslt {
                Err(_) => None,
                Ok(library) => {
                    let plan = library.plan(&self.device, &spec)?;
                    // SAFETY: stream, memory and plan live until the wait in `time` is over; the
                    // plan's products run in the order of one stream.
                    Some(self.time(|| unsafe { plan.launch(self.stream.raw()) })?)
                }
            };
            let tflops = |micros: f64| spec.flops() / micros / 1e6;
            rows.push(json!({
                "blocks": blocks,
                "gemm_us": ours,
                "gemm_tflops": tflops(ours),
                "cublaslt_us": theirs,
                "cublaslt_tflops": theirs.map(tflops),
                "ratio": theirs.map(|theirs| theirs / ours),
            }));
        }
        let library = match &self.cublaslt {
            Ok(library) => library.version().to_string(),
            Err(error) => error.to_string(),
        };
        Ok(json!({ "case": "time", "failures": [], "shape": [8192, 8192, 8192], "rows": rows,
                   "cublaslt": library, "device": self.device.properties().name }))
    }

    /// Median of several runs, µs.
    fn time(&self, launch: impl Fn() -> Result<(), CudaError>) -> Result<f64, CudaError> {
        let mut runs = Vec::new();
        for run in 0..WARM_UPS + RUNS {
            // SAFETY: the stream lives as long as `self`.
            let start = unsafe { self.events.record(self.stream.raw())? };
            launch()?;
            // SAFETY: the stream lives as long as `self`.
            let end = unsafe { self.events.record(self.stream.raw())? };
            self.stream.wait("a timed product", LIMIT)?;
            if run >= WARM_UPS {
                runs.push(end.micros_since(&start)?);
            }
        }
        runs.sort_by(f64::total_cmp);
        Ok((runs[RUNS / 2 - 1] + runs[RUNS / 2]) / 2.0)
    }
}

/// Random A and B on host and device, and room for D. Two bf16 to a word.
struct Product {
    shape: [u32; 3],
    a: Vec<u32>,
    b: Vec<u32>,
    a_device: DeviceMemory,
    b_device: DeviceMemory,
    d_device: DeviceMemory,
}

impl Product {
    fn new(gpu: &Gpu, shape: [u32; 3]) -> Result<Product, CudaError> {
        let [m, n, k] = shape.map(|size| size as usize);
        let upload = |words: &[u32]| {
            let memory = DeviceMemory::zeroed(&gpu.stream, words.len() * 4, LIMIT)?;
            memory.upload(&gpu.stream, 0, words, LIMIT).map(|()| memory)
        };
        let (a, b) = (random(1, m * k / 2), random(2, n * k / 2));
        Ok(Product {
            a_device: upload(&a)?,
            b_device: upload(&b)?,
            d_device: DeviceMemory::zeroed(&gpu.stream, m * n * 2 + GUARD, LIMIT)?,
            shape,
            a,
            b,
        })
    }

    fn spec(&self, blocks: u32) -> GemmSpec {
        let [m, n, k] = self.shape;
        let (a, b) = (self.a_device.address(), self.b_device.address());
        GemmSpec { m, n, k, a, b, d: self.d_device.address(), blocks }
    }

    fn ours(&self, gpu: &Gpu, stream: &Stream, blocks: u32) -> Result<Vec<u32>, CudaError> {
        // SAFETY: `compute` waits, and the memory has the sizes of the spec.
        let launch = || unsafe { gpu.kernel.launch(stream.raw(), &self.spec(blocks)) };
        self.compute(gpu, stream, "our product", launch)
    }

    fn theirs(
        &self,
        gpu: &Gpu,
        library: &CublasLt,
        stream: &Stream,
        blocks: u32,
    ) -> Result<Vec<u32>, CudaError> {
        let plan = library.plan(&gpu.device, &self.spec(blocks))?;
        // SAFETY: as in `ours`; the plan outlives the wait.
        self.compute(gpu, stream, "cuBLASLt's product", || unsafe { plan.launch(stream.raw()) })
    }

    /// D and the bytes behind it after one product.
    fn compute(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        what: &'static str,
        launch: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<Vec<u32>, CudaError> {
        let (at, bytes) = (self.d_device.address(), self.d_device.bytes());
        // SAFETY: the whole allocation, which nothing else uses.
        unsafe { gpu.device.fill(gpu.stream.raw(), at, UNTOUCHED, bytes)? };
        gpu.stream.wait("filling D", LIMIT)?;
        launch()?;
        stream.wait(what, LIMIT)?;
        let mut out = vec![0u32; bytes / 4];
        self.d_device.download(&gpu.stream, 0, &mut out, LIMIT)?;
        Ok(out)
    }

    /// Notes the first entry that is wrong or missing and any byte written behind D.
    fn verify(&self, out: &[u32], failures: &mut Vec<String>, what: &str) {
        let [m, n, k] = self.shape.map(u64::from);
        let words = (m * n / 2) as usize;
        if out[words..].iter().any(|word| *word != u32::MAX) {
            failures.push(format!("{what}: written past the end of D"));
        }
        // No sum here is a NaN, which all ones are.
        let missing = (0..m * n).find(|at| entry(out, *at).is_nan());
        let mut wrong = missing.map(|at| (at, "not written".to_string()));
        let all = m * n * k <= EVERY_ENTRY;
        for sample in 0..if all { m * n } else { SAMPLES } {
            let at = if all { sample } else { mixed(3, sample) % (m * n) };
            wrong = wrong.or_else(|| Some((at, self.compare(out, at).err()?)));
        }
        if let Some((at, why)) = wrong {
            failures.push(format!("{what}: row {}, column {}: {why}", at / n, at % n));
        }
    }

    /// Compares one entry with its sum in f64. Allowed: one rounding to bf16, and what f32 sums of
    /// K terms lose in any order, cut off rather than rounded.
    fn compare(&self, out: &[u32], at: u64) -> Result<(), String> {
        let [_, n, k] = self.shape.map(u64::from);
        let (row, column) = (at / n, at % n);
        let (mut sum, mut size) = (0.0, 0.0);
        for i in 0..k {
            let term = entry(&self.a, row * k + i) * entry(&self.b, column * k + i);
            sum += term;
            size += term.abs();
        }
        let (got, allowed) = (entry(out, at), sum.abs() / 256.0 + size / 65536.0);
        if (got - sum).abs() <= allowed {
            return Ok(());
        }
        Err(format!("{got} instead of {sum} ± {allowed}"))
    }
}

/// bf16 `at` of a matrix.
fn entry(words: &[u32], at: u64) -> f64 {
    let word = words[(at / 2) as usize];
    bf16::from_bits((word >> (16 * (at % 2))) as u16).to_f64()
}

/// Splitmix64's output for a counter.
fn mixed(seed: u64, at: u64) -> u64 {
    let mut x = (seed << 48 ^ at).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// `words` pairs of bf16, uniform in [-1, 1).
fn random(seed: u64, words: usize) -> Vec<u32> {
    let unit = |bits: u64| bf16::from_f32((bits as u32 as f32) / 2_147_483_648.0 - 1.0).to_bits();
    let pair = |x: u64| u32::from(unit(x)) | u32::from(unit(x >> 32)) << 16;
    (0..words as u64).map(|at| pair(mixed(seed, at))).collect()
}
