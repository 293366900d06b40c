//! The functions, by their names in cuda.h.

mod device;
mod launch;
mod memory;
mod stream;
mod vmm;

#[cfg(test)]
pub use self::{device::*, launch::*, memory::*, stream::*, vmm::*};

/// Defines functions of the driver.
///
/// Callers promise what cuda.h asks of them; see [`super::arg`] for what that says of pointers.
macro_rules! functions {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            $(#[$doc])*
            #[unsafe(no_mangle)]
            pub extern "C" fn $name($($arg: $type),*) -> $crate::driver::code::Code {
                $crate::driver::code::guard(|| $body)
            }
        )*
    };
}
use functions;
