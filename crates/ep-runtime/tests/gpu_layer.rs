//! The layer of examples/moe_layer with its rows on GPUs: the same function, called with a stream and
//! views of device memory. Its backend brings rows to the host, computes as the example does, and
//! brings the outputs back, so that the bits can be compared. Without a GPU each test says so and
//! passes.
#![cfg(feature = "cuda")]

mod common;

use common::gpu::{Gpu, Gpus};
use common::gpu_small::LIMIT;
use common::ground::{Ground, Grounds};
use common::{Matrix, ranks};
use ep_runtime::{
    DType, DeviceIds, Dispatched, EpBuilder, EpError, IdKind, Layout, Queue, Route, Rows, RowsMut,
    bf16, f16,
};
use moe_layer::check::check_with;
use moe_layer::host::{Float, HostMoe, Shape};
use moe_layer::{Backend, moe_layer};

const EXPERT_MAJOR: Layout = Layout::ExpertMajor { alignment: 1 };
const MOST: usize = 16;

/// Computes on the host what belongs on a GPU.
struct Staged<'a, T> {
    layer: &'a HostMoe<T>,
    gpu: &'a Gpu<'a>,
}

/// Choices in the memory of a GPU.
struct Choices {
    ids: u64,
    weights: u64,
    count: usize,
}

fn bytes_of<T: Float>(row: &[T]) -> Vec<u8> {
    // SAFETY: numbers, every byte of which is initialised.
    unsafe { std::slice::from_raw_parts(row.as_ptr().cast::<u8>(), size_of_val(row)) }.to_vec()
}

impl<T: Float> Backend for Staged<'_, T> {
    type Choices = Choices;

    fn gate(&self, queue: &Queue, tokens: Rows<'_>) -> Result<Choices, EpError> {
        assert_eq!(queue.raw(), self.gpu.queue().raw(), "the layer passes its queue on");
        let mut on_host = Matrix::zeroed(tokens.len(), tokens.row_bytes());
        let bytes = tokens.len() * tokens.row_bytes();
        self.gpu.fetch(tokens.as_ptr() as u64, &mut on_host.bytes_mut()[..bytes]);
        let chosen = self.layer.gate(&Queue::host(), on_host.rows(tokens.dtype()))?;
        let ids: Vec<u8> = chosen.ids().iter().flat_map(|id| id.to_ne_bytes()).collect();
        let weights: Vec<u8> = chosen.weights().iter().flat_map(|w| w.to_ne_bytes()).collect();
        let place = |bytes: &[u8]| self.gpu.place(Some(bytes), bytes.len());
        Ok(Choices { ids: place(&ids), weights: place(&weights), count: chosen.ids().len() })
    }

    fn route<'a>(&self, choices: &'a Choices) -> Route<'a> {
        let &Choices { ids, weights, count } = choices;
        let ordinal = self.gpu.ordinal();
        // SAFETY: both are in the arena, written by nobody else.
        unsafe {
            let ids = DeviceIds::from_raw(ordinal, ids, count, IdKind::I32);
            let weights = Rows::from_device(ordinal, weights, count, 4, 4, DType::F32);
            Route::Device { ids, weights: Some(weights) }
        }
    }

    fn experts(&self, queue: &Queue, received: &mut Dispatched) -> Result<(), EpError> {
        let on_host = received.to_host(queue)?;
        let (rows, count) = (on_host.rows(), received.num_rows());
        let row = |i: usize| rows.payload().row::<T>(i);
        let mut outputs: Vec<Vec<u8>> = (0..count).map(|i| bytes_of(row(i))).collect();
        if received.handle().layout() == Layout::RankMajor {
            let ids = rows.topk_ids().expect("rank-major rows carry ids");
            for (i, output) in outputs.iter_mut().enumerate() {
                let sum = self.layer.sum_of_experts(row(i), ids.get(i), rows.weights().get(i));
                sum.iter().for_each(|sum| *output = bytes_of(sum));
            }
        } else {
            let groups = received.handle().offsets().iter().zip(received.handle().counts());
            for (expert, (&first, &count)) in groups.enumerate() {
                let rows = first as usize..(first + count) as usize;
                for (i, output) in outputs.iter_mut().enumerate().take(rows.end).skip(rows.start) {
                    *output = bytes_of(&self.layer.output_of(expert, row(i)));
                }
            }
        }
        let weights = (0..count).flat_map(|i| rows.weights().get(i).to_vec()).collect::<Vec<_>>();
        self.gpu.write(received, T::KIND, &outputs, &weights);
        Ok(())
    }
}

fn run<T: Float>(gpus: &Gpus, layout: Layout, tokens: &[usize]) {
    let shape = Shape { hidden: 16, ffn: 24, experts: 10, topk: 3 };
    let world = tokens.len();
    let outcomes = ranks(world, |group| {
        let rank = group.rank();
        let builder = EpBuilder::new(shape.moe_shape::<T>(MOST));
        let ep = gpus.place(rank, world, builder).build(&group).expect("build");
        let gpu = gpus.rank(rank);
        let outcome = check_with::<T>(&ep, shape, layout, tokens[rank], |layer, tokens| {
            let (count, row) = (tokens.len() / shape.hidden, shape.hidden * size_of::<T>());
            let (dtype, ordinal) = (T::KIND.dtype(), gpu.ordinal());
            let at = gpu.place(Some(&bytes_of(tokens)), count * row);
            let out = gpu.place(None, count * row);
            // SAFETY: rows in the arena that nobody else uses.
            let (rows, into) = unsafe {
                let rows = Rows::from_device(ordinal, at, count, row, row, dtype);
                (rows, RowsMut::from_device(ordinal, out, count, row, row, dtype))
            };
            let backend = Staged { layer, gpu: &gpu };
            moe_layer(&backend, &ep, &gpu.queue(), layout, rows, into)?.wait(LIMIT)?;
            let mut bytes = vec![0; count * row];
            gpu.fetch(out, &mut bytes);
            let mut results = tokens.to_vec();
            // SAFETY: as many bytes as there are numbers to overwrite; every pattern is a number.
            unsafe {
                let to = results.as_mut_ptr().cast::<u8>();
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
            }
            Ok(results)
        });
        outcome.expect("the layer")
    });
    for (rank, (outcome, &tokens)) in outcomes.iter().zip(tokens).enumerate() {
        println!("{layout:?}, {:?}, rank {rank} of {world}: {outcome:?}", T::KIND);
        assert!(outcome.same_bits, "{layout:?}, {:?}, rank {rank}: {outcome:?}", T::KIND);
        assert_eq!(outcome.largest > 0.1, tokens > 0, "the layer does something");
    }
}

fn on_all(layout: Layout) {
    let Some(gpus) = Gpus::new(4, 16 << 20) else { return };
    for tokens in [&[13][..], &[16, 9], &[0, 5], &[7, 16, 1], &[5, 6, 7, 8]] {
        run::<f32>(&gpus, layout, tokens);
        run::<bf16>(&gpus, layout, tokens);
        run::<f16>(&gpus, layout, tokens);
    }
}

#[test]
fn the_expert_major_layer_is_the_dense_layer_bit_by_bit() {
    on_all(EXPERT_MAJOR);
}

#[test]
fn the_rank_major_layer_is_the_dense_layer_that_adds_by_rank() {
    on_all(Layout::RankMajor);
}
