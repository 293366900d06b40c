#![allow(non_snake_case, reason = "names of cuda.h")]

use super::functions;
use crate::driver::arg::{In, Out, Text};
use crate::driver::code::{Code, Result};
use crate::driver::context::{self, Context};
use crate::driver::launch::{self, Asked, Attribute, Config};
use crate::driver::module::Entry;
use crate::driver::table::Handle;
use crate::driver::{capture, device, module, stream};

fn launch(config: &Config, asked: &Asked, kernel: Handle, params: &In<usize>) -> Result<()> {
    context::current()?;
    let (stream, entry) = (stream::get(config.stream)?, module::entry(kernel)?);
    stream.submit(launch::prepare(&stream.context, &entry, config, asked, params)?)
}

fn asked(config: &Config) -> Result<Asked> {
    let list = In::<Attribute>::of_address(config.attributes);
    let all = (0..config.count as usize).map(|i| list.at(i)).collect::<Result<Vec<_>>>()?;
    Asked::read(&all)
}

/// The context whose SMs a question is about.
fn place(config: &Config) -> Result<std::sync::Arc<Context>> {
    match config.stream {
        0 => context::current(),
        stream => Ok(stream::get(stream)?.context.clone()),
    }
}

fn threads(config: &Config) -> u32 {
    config.block.iter().product()
}

fn clusters(entry: &Entry, config: &Config, size: u32) -> Result<u32> {
    let sms = place(config)?.sms.len() as u32;
    entry.clusters(size, (threads(config), config.shared), sms)
}

functions! {
    fn cuLibraryLoadData(
        library: Out<Handle>,
        image: In<u8>,
        _options: usize,
        _values: usize,
        options: u32,
        _library_options: usize,
        _library_values: usize,
        library_options: u32,
    ) {
        context::current()?;
        capture::unsafe_call()?;
        if options != 0 || library_options != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        library.set(module::load(&image.image()?)?)
    }

    /// Waits for launches of its kernels.
    fn cuLibraryUnload(library: Handle) {
        capture::unsafe_call()?;
        context::settle_all("cuLibraryUnload");
        module::unload(library)
    }

    fn cuLibraryGetKernel(kernel: Out<Handle>, library: Handle, name: Text) {
        kernel.set(module::kernel(library, &name.get()?)?)
    }

    fn cuKernelGetFunction(function: Out<Handle>, kernel: Handle) {
        function.set(module::function(kernel, context::current()?.handle)?)
    }

    fn cuKernelGetAttribute(value: Out<i32>, which: i32, kernel: Handle, device: i32) {
        device::check(device)?;
        value.set(module::entry(kernel)?.attribute(which)?)
    }

    fn cuKernelSetAttribute(which: i32, value: i32, kernel: Handle, device: i32) {
        device::check(device)?;
        module::entry(kernel)?.set_attribute(which, value)
    }

    fn cuFuncLoad(function: Handle) {
        context::current()?;
        capture::unsafe_call()?;
        module::load_function(function)
    }

    fn cuFuncIsLoaded(state: Out<i32>, function: Handle) {
        state.set(module::is_loaded(function)?.into())
    }

    fn cuLaunchKernelEx(config: In<Config>, kernel: Handle, params: In<usize>, extra: usize) {
        if extra != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        let config = config.get()?;
        launch(&config, &asked(&config)?, kernel, &params)
    }

    fn cuLaunchKernel(
        kernel: Handle,
        grid_x: u32,
        grid_y: u32,
        grid_z: u32,
        block_x: u32,
        block_y: u32,
        block_z: u32,
        shared: u32,
        stream: Handle,
        params: In<usize>,
        extra: usize,
    ) {
        if extra != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let config = Config { grid, block, shared, stream, attributes: 0, count: 0 };
        launch(&config, &Asked::default(), kernel, &params)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: Out<i32>,
        kernel: Handle,
        threads: i32,
        shared: usize,
    ) {
        context::current()?;
        let threads = u32::try_from(threads).map_err(|_| Code::INVALID_VALUE)?;
        let shared = u32::try_from(shared).map_err(|_| Code::INVALID_VALUE)?;
        blocks.set(module::entry(kernel)?.blocks_per_sm(threads, shared) as i32)
    }

    fn cuOccupancyMaxActiveClusters(count: Out<i32>, kernel: Handle, config: In<Config>) {
        let (config, entry) = (config.get()?, module::entry(kernel)?);
        count.set(clusters(&entry, &config, asked(&config)?.cluster())? as i32)
    }

    fn cuOccupancyMaxPotentialClusterSize(size: Out<i32>, kernel: Handle, config: In<Config>) {
        let (config, entry) = (config.get()?, module::entry(kernel)?);
        asked(&config)?;
        let fits = |size: &u32| clusters(&entry, &config, *size).is_ok_and(|count| count > 0);
        size.set([16, 8, 4, 2, 1].into_iter().find(fits).unwrap_or(0) as i32)
    }
}
